"""The append stream to a target: bounded, in order, and never ahead of what the target has said."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest

from sava.client.errors import ClientError, Denied, Unavailable
from sava.pipeline.replicate.target import (
    UNANSWERED,
    UNANSWERED_BYTES,
    EncodedRange,
    TargetCluster,
    TargetStream,
)
from sava.proto import replica_pb2 as pb
from sava.records import RecordBatch
from tests.support.waiting import OwnTime
from tests.unit.client.server import AWAY, Fault
from tests.unit.pipeline.replicate.memory import TARGET_TOPIC_ID, MemoryCopy, World

TOPIC = "/default/orders"
SOURCE = pb.Source(cluster_name="eu", cluster_id="id-of-eu", topic=TOPIC, topic_id=1)


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def source_range(start: int, *, begin: bool = False, size: int = 1) -> EncodedRange:
    """One message."""
    batch = RecordBatch.encode([b"%d" % start + b" " * size], publish_time=1)
    return EncodedRange(start, start + 1, begin, batch.to_bytes(), [start, start + 1], 0)


@pytest.fixture
def stream(world: World) -> Iterator[TargetStream]:
    world.publish(TOPIC, 100)
    stream = TargetCluster.of(world.ends.target).append_stream(TOPIC, SOURCE)
    yield stream
    stream.close()


def opened(stream: TargetStream) -> pb.SourceOpened:
    return stream.open(until=soon(), end_by=soon(20))


def test_ranges_are_counted_when_they_are_answered(world: World, stream: TargetStream) -> None:
    first = opened(stream)
    assert (first.is_known, first.position, first.topic_id) == (False, 0, TARGET_TOPIC_ID)
    world.call(world.replica.receipts.clear)
    for start in range(5):
        assert stream.put(source_range(start, begin=start == 0), until=soon())
    assert (stream.progress.is_known, stream.progress.messages) == (False, 0)
    world.call(world.replica.receipts.set)
    stream.settle(until=soon())
    assert (stream.progress.position, stream.progress.kept_position, stream.progress.messages) == (5, 5, 5)
    stream.close()
    assert opened(stream).position == 5


def test_no_more_are_on_their_way_than_may_be(world: World, stream: TargetStream) -> None:
    opened(stream)
    world.call(world.replica.receipts.clear)
    for start in range(UNANSWERED):
        stream.put(source_range(start, begin=start == 0), until=soon())
    with pytest.raises(Unavailable, match="has not answered within"):
        stream.put(source_range(UNANSWERED), until=soon(0.2))
    assert world.replica.most_unanswered <= UNANSWERED
    world.call(world.replica.receipts.set)
    stream.settle(until=soon())
    assert stream.progress.position == UNANSWERED


def test_nor_more_bytes_but_one_that_is_larger_goes_alone(world: World, stream: TargetStream) -> None:
    opened(stream)
    world.call(world.replica.receipts.clear)
    stream.put(source_range(0, begin=True, size=UNANSWERED_BYTES * 2), until=soon())
    with pytest.raises(Unavailable):
        stream.put(source_range(1), until=soon(0.2))
    world.call(world.replica.receipts.set)
    for start in (1, 2):
        stream.put(source_range(start, size=UNANSWERED_BYTES * 3 // 4), until=soon())
    stream.settle(until=soon())
    assert stream.progress.position == 3


def test_what_is_answered_makes_room(world: World, stream: TargetStream) -> None:
    """However much has gone before, several are on their way at a time."""
    opened(stream)
    for start in range(4):
        stream.put(source_range(start, begin=start == 0, size=UNANSWERED_BYTES // 2), until=soon())
    stream.settle(until=soon())
    world.call(world.replica.receipts.clear)
    for start in range(4, 7):
        assert stream.put(source_range(start), until=soon())
    world.call(world.replica.receipts.set)
    stream.settle(until=soon())
    assert stream.progress.position == 7


def test_the_first_failure_is_the_end(world: World, stream: TargetStream) -> None:
    """3 fails and 4 … are on their way behind it: the position is 3, whatever was sent."""

    def order(stream: MemoryCopy, given: pb.SourceRange) -> pb.SourceEnded | None:
        if given.start != 3:
            return None
        return pb.SourceEnded(code="disk_full", reason="full", may_pass=True, is_known=True, position=3)

    opened(stream)
    world.replica.order = order
    world.call(world.replica.receipts.clear)
    for start in range(7):
        assert stream.put(source_range(start, begin=start == 0), until=soon())
    world.call(world.replica.receipts.set)
    stream.settle(until=soon())
    assert stream.ended is not None
    assert (stream.ended.code, stream.ended.may_pass) == ("disk_full", True)
    assert (stream.progress.position, stream.progress.messages) == (3, 3)
    assert not stream.put(source_range(7), until=soon())


def test_a_stream_that_breaks_says_nothing_of_what_was_sent(world: World, stream: TargetStream) -> None:
    opened(stream)
    world.replica.order = lambda stream, given: AWAY if given.start == 2 else None
    for start in range(3):
        stream.put(source_range(start, begin=start == 0), until=soon())
    with pytest.raises(Unavailable):
        stream.settle(until=soon())
    assert stream.progress.position == 2


def test_an_answer_that_does_not_belong_to_a_range_is_no_progress(world: World, stream: TargetStream) -> None:
    opened(stream)
    world.replica.order = lambda stream, given: pb.SourceReceipt(position=17)  # type: ignore[assignment,return-value]  # which is what is wrong
    stream.put(source_range(0, begin=True), until=soon())
    with pytest.raises(ClientError, match="out of order"):
        stream.settle(until=soon())
    assert stream.progress.position == 0


def test_who_may_not_is_told_so(world: World, stream: TargetStream) -> None:
    for status in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        world.replica.refuse_opening[TOPIC] = Fault(status)
        with pytest.raises(Denied):
            opened(stream)


def test_a_target_that_is_silent_is_not_waited_for(world: World, stream: TargetStream) -> None:
    world.replica.silent_openings.add(TOPIC)
    own = OwnTime()
    with pytest.raises(Unavailable, match="has not opened within"):
        stream.open(until=soon(0.3), end_by=soon())
    assert own.seconds < 3


def test_opening_goes_on_when_the_topic_has_an_owner_again(world: World, stream: TargetStream) -> None:
    world.replica.refuse_openings = [AWAY, AWAY]
    assert not opened(stream).is_known
    assert world.replica.openings == 3
