"""The page that Prometheus scrapes: what is on it, and that nobody has to wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from sava.api import http

Samples = set[tuple[str, tuple[tuple[str, str], ...], float]]


class Topics(Collector):
    """Of so many topics, told in parts of 50."""

    def __init__(self, count: int) -> None:
        self._count = count

    def collect(self) -> Iterable[Metric]:
        for first in range(0, self._count, 50):
            backlog = GaugeMetricFamily("backlog_messages", "Not acked.", labels=("topic", "subscription"))
            acked = CounterMetricFamily("acked_messages", "Acked.", labels=("topic", "subscription"))
            for number in range(first, min(self._count, first + 50)):
                backlog.add_metric((f"/default/t-{number}", "s"), number)
                acked.add_metric((f"/default/t-{number}", "s"), number / 3)
            yield from (backlog, acked)


def samples(page: bytes) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


async def test_it_is_what_the_library_would_write_but_for_when_things_began() -> None:
    registry = CollectorRegistry()
    Histogram("took_seconds", 'With a "quote", a \\ and\na new line.', registry=registry).observe(0.3)

    class Odd(Collector):
        def collect(self) -> Iterable[Metric]:
            family = GaugeMetricFamily("odd", "Values that need care.", labels=("name", "kind"))
            for name, value in (
                *(("plain", 1), ('"quoted"', 0.1), ("back\\slash", 1e300), ("new\nline", -0.0)),
                *(("ümlaut", 2**60), ("", float("inf"))),
            ):
                family.add_metric((name, "odd"), value)
            yield family

    registry.register(Odd())
    page = await http.written(registry)
    expected = {
        sample for sample in samples(generate_latest(registry)) if sample[0] != "took_seconds_created"
    }
    assert samples(page) == expected
    assert b'\nodd{kind="odd",name="plain"} 1.0\n' in page
    assert b"# TYPE took_seconds histogram\n" in page


async def test_the_parts_of_a_family_are_told_in_one_row() -> None:
    page = await http.written(Topics(120))
    lines = page.decode().splitlines()
    assert [line for line in lines if line.startswith("# TYPE")] == [
        "# TYPE backlog_messages gauge",
        "# TYPE acked_messages_total counter",
    ]
    names = [line.partition("{")[0] for line in lines if not line.startswith("#")]
    assert names == ["backlog_messages"] * 120 + ["acked_messages_total"] * 120


async def test_a_page_of_many_topics_does_not_hold_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heartbeats, renewals and deliveries wait while the loop writes: with thousands of topics for longer
    than an election takes. Here every slice is over at once, so that the others get a turn at each chance."""
    monkeypatch.setattr(http, "SLICE_S", 0.0)
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    working = asyncio.create_task(work())
    page = await http.written(Topics(1000))
    working.cancel()
    lines, parts = 2 * 1000, 2 * 1000 // 50
    assert page.count(b"\n") == lines + 4
    assert turns >= parts + lines // 200
