"""Publishing side by side: each partition gets its batches in order, and the task learns of every failure."""

from __future__ import annotations

from collections import defaultdict

import pytest

from sava.client.errors import Refused
from sava.pipeline.cluster import PartitionPublisher
from sava.pipeline.sink.routing import TaskPublisher
from sava.records import RecordBatch


def batch_of(number: int) -> RecordBatch:
    return RecordBatch.encode([b"%d" % number], publish_time=1)


class Publisher(PartitionPublisher):
    def __init__(self, brokers: FakePublisher, name: str) -> None:
        self.brokers, self.name = brokers, name
        self.is_closed = False
        self.refused = False

    def put(self, batch: RecordBatch) -> None:
        if self.refused:
            raise Refused("the topic is full")
        self.refused = self.name == "/default/full"
        self.brokers.published[self.name] += batch.payloads()

    def settle(self) -> None:
        if self.refused:
            raise Refused("the topic is full")

    def close(self) -> None:
        self.is_closed = True


class FakePublisher:
    def __init__(self) -> None:
        self.published: dict[str, list[bytes]] = defaultdict(list)
        self.publishers: list[Publisher] = []

    def publisher(self, name: str) -> Publisher:
        self.publishers.append(Publisher(self, name))
        return self.publishers[-1]


def test_partitions_are_published_side_by_side_and_in_order() -> None:
    brokers = FakePublisher()
    with TaskPublisher(brokers.publisher) as publisher:
        for number in range(100):
            publisher.add(f"/default/t{number % 3}", batch_of(number), 1)
        assert publisher.finish() == 100
    assert brokers.published == {
        f"/default/t{rest}": [b"%d" % number for number in range(rest, 100, 3)] for rest in range(3)
    }
    assert [each.is_closed for each in brokers.publishers] == [True] * 3


def test_a_refusal_reaches_the_task_while_it_adds() -> None:
    brokers = FakePublisher()
    with TaskPublisher(brokers.publisher) as publisher:
        publisher.add("/default/full", batch_of(0), 1)
        with pytest.raises(Refused, match="the topic is full"):
            publisher.add("/default/full", batch_of(1), 1)


def test_a_refusal_reaches_the_task_at_its_end() -> None:
    brokers = FakePublisher()
    with TaskPublisher(brokers.publisher) as publisher:
        publisher.add("/default/full", batch_of(0), 1)
        with pytest.raises(Refused, match="the topic is full"):
            publisher.finish()


def test_a_task_that_fails_leaves_no_producer_open() -> None:
    brokers = FakePublisher()
    with TaskPublisher(brokers.publisher) as publisher:
        publisher.add("/default/t", batch_of(0), 1)  # and nothing asks it to finish
    assert [each.is_closed for each in brokers.publishers] == [True]
