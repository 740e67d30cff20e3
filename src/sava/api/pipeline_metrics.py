"""What a broker tells Prometheus about pipelines: what their runners have reported.

Told by the broker that leads, so that each pipeline is there once. What a runner does not report any more is
not told as if it went on: without a runner the rate is 0 and the lag is not told at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sava.cluster.pipeline_records import PipelineState
from sava.cluster.pipelines import Pipelines
from sava.errors import SavaError

log = logging.getLogger(__name__)


class PipelinesCollector(Collector):
    def __init__(self, pipelines: Pipelines, is_leading: Callable[[], bool]) -> None:
        self._pipelines = pipelines
        self._is_leading = is_leading

    def collect(self) -> Iterable[Metric]:
        if not self._is_leading():
            return
        try:
            found = self._pipelines.known()
        except SavaError as error:
            log.error("pipelines: no metrics error=%s", error)
            return
        labels = ("pipeline", "kind")
        states = GaugeMetricFamily(
            "sava_pipeline_state", "1 for the state that it is in.", labels=(*labels, "state")
        )
        rows = CounterMetricFamily("sava_pipeline_rows", "Rows read, by all runners.", labels=labels)
        restarts = CounterMetricFamily(
            "sava_pipeline_restarts", "Times that it was begun again after an error.", labels=labels
        )
        rate = GaugeMetricFamily("sava_pipeline_rows_per_second", "Rows a second, lately.", labels=labels)
        lag = GaugeMetricFamily(
            "sava_pipeline_lag_messages", "Behind its topics; absent if not known.", labels=labels
        )
        age = GaugeMetricFamily(
            "sava_pipeline_lag_seconds",
            "For how long it has been behind; absent if not known.",
            labels=labels,
        )
        for pipeline in found:
            names, status = (pipeline.name, pipeline.record.kind), pipeline.status
            for state in PipelineState:
                states.add_metric((*names, state.value), float(status.state is state))
            rows.add_metric(names, status.rows)
            restarts.add_metric(names, status.restarts)
            rate.add_metric(names, status.rate)
            if status.lag_messages >= 0:
                lag.add_metric(names, status.lag_messages)
            if status.lag_seconds >= 0:
                age.add_metric(names, status.lag_seconds)
        yield from (states, rows, restarts, rate, lag, age)
