"""Publishing side by side: each partition gets its batches in order, and the task learns of every failure."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator

import pytest

from sava.client.errors import Refused
from sava.pipeline.sink.delivery import AHEAD, TaskPublisher
from sava.records import RecordBatch
from tests.support.waiting import PATIENCE_S


def batch_of(number: int) -> RecordBatch:
    return RecordBatch.encode([b"%d" % number], publish_time=1)


class FakePublisher:
    def __init__(self) -> None:
        self.published: dict[str, list[bytes]] = defaultdict(list)
        self.gate = threading.Event()
        self.gate.set()

    def publish(self, name: str, batches: Iterator[RecordBatch]) -> int:
        count = 0
        for batch in batches:
            assert self.gate.wait(30)
            if name == "/default/full":
                raise Refused("the topic is full")
            self.published[name] += batch.payloads()
            count += len(batch)
        return count


def threads_of_the_sink() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("sava sink")]


def test_partitions_are_published_side_by_side_and_in_order() -> None:
    brokers = FakePublisher()
    with TaskPublisher(brokers.publish) as publisher:
        for number in range(100):
            publisher.add(f"/default/t{number % 3}", batch_of(number), 1)
        assert publisher.finish() == 100
    assert brokers.published == {
        f"/default/t{rest}": [b"%d" % number for number in range(rest, 100, 3)] for rest in range(3)
    }
    assert not threads_of_the_sink()


def test_a_refusal_reaches_the_task_while_it_adds() -> None:
    brokers = FakePublisher()
    with TaskPublisher(brokers.publish) as publisher:
        publisher.add("/default/full", batch_of(0), 1)
        for thread in threads_of_the_sink():
            thread.join(PATIENCE_S)
        with pytest.raises(Refused, match="the topic is full"):
            publisher.add("/default/full", batch_of(1), 1)


def test_a_refusal_reaches_the_task_at_its_end() -> None:
    brokers = FakePublisher()
    with TaskPublisher(brokers.publish) as publisher:
        publisher.add("/default/full", batch_of(0), 1)
        with pytest.raises(Refused, match="the topic is full"):
            publisher.finish()


def test_a_task_that_fails_leaves_no_thread_behind() -> None:
    brokers = FakePublisher()
    with TaskPublisher(brokers.publish) as publisher:
        publisher.add("/default/t", batch_of(0), 1)  # and nobody asks it to finish
    for thread in threads_of_the_sink():
        thread.join(PATIENCE_S)
    assert not threads_of_the_sink()


def test_a_partition_that_is_behind_holds_the_task_back() -> None:
    brokers = FakePublisher()
    brokers.gate.clear()
    added = 0
    is_held = threading.Event()

    def add() -> None:
        nonlocal added
        with TaskPublisher(brokers.publish) as publisher:
            for number in range(AHEAD + 10):
                publisher.add("/default/t", batch_of(number), 1)
                added += 1
                if added == AHEAD + 1:
                    is_held.set()  # one more is in the hands of the partition's thread
            publisher.finish()

    task = threading.Thread(target=add)
    task.start()
    assert is_held.wait(30)
    task.join(0.2)
    assert added == AHEAD + 1
    brokers.gate.set()
    task.join(PATIENCE_S)
    assert len(brokers.published["/default/t"]) == AHEAD + 10
