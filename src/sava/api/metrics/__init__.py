"""Prometheus metrics. ``broker`` has the registry and the figures of Raft, of journals and of disks;
``cluster`` those of the cluster, of replication and of pipelines, most of which only the leader has;
``topics`` those of topics and subscriptions. The page that Prometheus scrapes is in ``api.http``.

The functions here make a metric from what is read when scraped. Labels are the name of one, or the names of
several; the values of several are a tuple.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Family = GaugeMetricFamily | CounterMetricFamily
Labels = str | tuple[str, ...]

F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily)


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=float(value))


def gauges(
    name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, float]] = ()
) -> GaugeMetricFamily:
    return _filled(GaugeMetricFamily(name, text, labels=_several(labels)), values)


def counters(
    name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, float]] = ()
) -> CounterMetricFamily:
    return _filled(CounterMetricFamily(name, text, labels=_several(labels)), values)


def _filled(family: F, values: Iterable[tuple[Labels, float]]) -> F:
    for labels, value in values:
        family.add_metric(_several(labels), float(value))
    return family


def _several(labels: Labels) -> tuple[str, ...]:
    return (labels,) if isinstance(labels, str) else labels
