"""What a broker says of its load is not believed if it cannot be."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from sava.api.admin.brokers import load_report
from sava.proto import brokers_pb2 as pb
from sava.topics.errors import MessageInvalid


def load(broker: int = 1, cpu: float = 1.0, **topic: Any) -> pb.LoadReport:
    busy = [pb.TopicLoad(topic="/default/orders", **topic)]
    return pb.LoadReport(broker_id=broker, cpu_percent=cpu, topics=busy)


def test_a_report_of_numbers_is_taken() -> None:
    assert load_report(load(messages_per_second=7)).broker_id == 1


@pytest.mark.parametrize(
    "report",
    [load(cpu=nan), load(megabytes_per_second=inf), load(messages_per_second=-1), load(0)],
    ids=["not a number", "endless", "less than none", "no broker"],
)
def test_a_report_that_cannot_be_is_refused(report: pb.LoadReport) -> None:
    with pytest.raises(MessageInvalid, match="load report"):
        load_report(report)
