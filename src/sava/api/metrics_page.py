"""The page that Prometheus scrapes, written in slices.

A thousand topics with two subscriptions each make a page of two megabytes, and the event loop that writes it
is the one that sends heartbeats, renews the lease and delivers. Written at once, it would stand still for a
quarter of a second per thousand topics: for longer than an election takes, once there are some thousand. So
collectors tell large families in parts, and nobody keeps the loop for longer than a slice.

The parts of a family are put together again, for the format wants all of its lines in a row. When a counter
or histogram began (``_created``) is left out: only OpenMetrics asks for it, and here it would be a series
more for each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SLICE_S: Final = 0.005
"""Of an event loop that owes a heartbeat every 100 ms."""
_LINES: Final = 200
"""Between two looks at the clock; well below a slice."""
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


async def written(registry: Collector) -> bytes:
    slices = _Slices()
    families: dict[str, Metric] = {}
    for part in registry.collect():
        family = families.setdefault(part.name, part)
        if family is not part:
            family.samples += part.samples
        await slices.breathe()
    page: list[bytes] = []
    for family in families.values():
        lines: list[str] = []
        for count, line in enumerate(_lines(family)):
            lines.append(line)
            if not count % _LINES:
                await slices.breathe()
        page.append("".join(lines).encode())
    return b"".join(page)


class _Slices:
    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def breathe(self) -> None:
        """Let others go first, if they have waited for a slice."""
        if time.perf_counter() - self._began > SLICE_S:
            await asyncio.sleep(0)
            self._began = time.perf_counter()


def _lines(family: Metric) -> Iterator[str]:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {text}\n# TYPE {name} {family.type}\n"
    created = f"{family.name}_created"
    for sample in family.samples:
        if sample.name != created:
            yield _line(sample)


def _line(sample: Sample) -> str:
    """Labels in order of their names, as the library writes them: people compare lines as text."""
    labels = ",".join(
        f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(sample.labels.items())
    )
    return f"{sample.name}{f'{{{labels}}}' if labels else ''} {float(sample.value)!r}\n"
