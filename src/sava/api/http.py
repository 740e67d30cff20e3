"""What the pages ``/metrics``, ``/healthz`` and ``/readyz`` of the HTTP port say.

``/healthz`` says that the process works; an orchestrator restarts it otherwise. ``/readyz`` says that it can
serve: it belongs to a cluster, knows the leader, has applied what it knows to be committed, and is
registered, so that topics come to it. A broker that waits for ``cluster init`` is healthy and not ready, and
so is one that could not renew its registration: it has let go of its topics. One that ends because something
in it has died says what that was for as long as it is still there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from sava.cluster.registration import Registrar
from sava.cluster.view import ClusterView
from sava.metadata.node import RaftNode
from sava.supervisor import Supervisor
from sava.tasks import Slices

CAUGHT_UP = 100
"""Entries that may be committed and not yet applied while a node still counts as caught up."""

Readiness = Callable[[], tuple[bool, str]]


def readiness(
    node: RaftNode, view: ClusterView, registrar: Registrar, supervisor: Supervisor
) -> tuple[bool, str]:
    if supervisor.reason:
        return False, f"this broker ends: {supervisor.reason}"
    core = node.core_status
    if core is None:
        return False, "waiting for cluster initialization"
    if core.node not in core.membership.members:
        return False, "not a member of the cluster"
    if not core.leader:
        return False, "no leader known"
    if core.commit - core.applied > CAUGHT_UP:
        return False, f"catching up: applied {core.applied} of {core.commit}"
    if not view.is_ready:
        return False, "learning which topics and brokers there are"
    if registrar.is_leaving:
        return False, "this broker stops, and hands its topics over"
    if not registrar.is_registered:
        return False, "not registered: the other brokers do not know that this one is there"
    return True, "ready"


# -- the page of metrics ---------------------------------------------------------------------------


TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SLICE_S: Final = 0.005
"""Of an event loop that owes a heartbeat every 100 ms."""
_LINES: Final = 200
"""Between two looks at the clock; well below a slice."""
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


async def written(registry: Collector) -> bytes:
    slices = Slices(SLICE_S)
    families: dict[str, Metric] = {}
    for part in registry.collect():
        family = families.setdefault(part.name, part)
        if family is not part:
            family.samples += part.samples
        await slices.next()
    page: list[bytes] = []
    for family in families.values():
        lines: list[str] = []
        for count, line in enumerate(_lines(family)):
            lines.append(line)
            if not count % _LINES:
                await slices.next()
        page.append("".join(lines).encode())
    return b"".join(page)


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
