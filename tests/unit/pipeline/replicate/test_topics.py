"""LinkTopicState: from what the two clusters say of a topic to what may be copied of it. Which relation gives
which verdict is the matrix's (``tests/unit/replication/test_matrix.py``)."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from sava.pipeline.cluster import PartitionExtent
from sava.pipeline.replicate.partitions import Throttle
from sava.pipeline.replicate.target import CopyOutcome
from sava.pipeline.replicate.topics import Creation, LinkTopicState, there
from sava.proto import replica_pb2
from sava.proto import replication_pb2 as pb
from sava.replication.matrix import LinkState, Mismatch, Settings

TOPIC = "/default/orders"
CREATES = Settings(may_create=True, mismatch=Mismatch.PIP370)
WAITS = Settings(may_create=False, mismatch=Mismatch.PIP370)
STRICT = Settings(may_create=True, mismatch=Mismatch.STRICT)


def link_topic(partitions: int = 2, **fields: Any) -> pb.LinkTopic:
    ids = range(1, max(1, partitions) + 1)
    return pb.LinkTopic(topic=TOPIC, partition_count=partitions, reliable=True, topic_ids=ids, **fields)


def shape(*topic_ids: int, partitions: int | None = None, **fields: Any) -> replica_pb2.TopicShape:
    count = len(topic_ids) if partitions is None else partitions
    described = {"namespace_exists": True, "exists": bool(topic_ids), "reliable": True, **fields}
    return replica_pb2.TopicShape(topic=TOPIC, partition_count=count, topic_ids=topic_ids, **described)


def topic(told: pb.LinkTopic | None = None) -> LinkTopicState:
    made = LinkTopicState(told or link_topic(), "west", throttle=Throttle(0, 0.0), now=0.0)
    for partition in made.partitions:
        partition.see(PartitionExtent(0, 0, 0), 0.0, 0)
    return made


def describe(state: LinkTopicState, found: replica_pb2.TopicShape, settings: Settings = CREATES) -> None:
    state.describe(there("west", found), settings)
    state.look(0.0)


def record(state: LinkTopicState) -> None:
    """The cluster writes down what is reported."""
    state.recorded(state.report(0.0))
    state.look(0.0)


def admitted(state: LinkTopicState) -> list[int]:
    return [partition.number for partition in state.partitions if not partition.is_held]


def states(state: LinkTopicState) -> list[LinkState]:
    return [partition.state for partition in state.partitions]


def test_nothing_is_copied_before_the_remote_s_ids_are_on_record() -> None:
    state = topic()
    describe(state, shape(71, 72))
    assert admitted(state) == []
    assert not state.is_recorded
    assert list(state.report(0.0).remote_topic_ids) == [71, 72]
    record(state)
    assert admitted(state) == [0, 1]
    assert [partition.target_topic_id for partition in state.partitions] == [71, 72]
    assert state.is_recorded


def test_a_missing_topic_is_created_once_and_then_compared() -> None:
    state = topic()
    describe(state, shape())
    creation = state.creation(0.0)
    assert creation == Creation(TOPIC, 2, True, grow=False)
    describe(state, shape())
    assert state.creation(100.0) is None  # it is being created, however long that takes
    assert admitted(state) == []
    assert states(state) == [LinkState.STARTING] * 2
    state.created(creation)
    describe(state, shape(71, 72))
    assert state.creation(100.0) is None
    record(state)
    assert admitted(state) == [0, 1]


def test_who_was_faster_is_compared_with() -> None:
    state = topic()
    describe(state, shape(), STRICT)
    assert state.creation(0.0) is not None
    describe(state, shape(71, 72, 73), STRICT)
    record(state)
    assert admitted(state) == []
    assert states(state) == [LinkState.PARTITION_MISMATCH] * 2


def test_a_creation_that_fails_is_tried_again_later_each_time() -> None:
    state = topic()
    describe(state, shape())
    now, delays = 0.0, []
    for _ in range(4):
        assert state.creation(now) is not None
        state.not_created(LinkState.DENIED, "may not create topics", now, 0)
        state.look(now)
        assert states(state) == [LinkState.DENIED] * 2
        due = state.due_in(now)
        assert due is not None
        assert state.creation(now + due - 0.01) is None
        delays.append(due)
        now += due
        describe(state, shape())
    assert delays == sorted(delays)
    assert delays[-1] > delays[0]


def test_a_topic_that_may_not_be_created_is_waited_for() -> None:
    state = topic()
    describe(state, shape(), WAITS)
    assert state.creation(0.0) is None
    assert states(state) == [LinkState.WAITING_REMOTE_TOPIC] * 2
    describe(state, shape(71, 72), WAITS)
    record(state)
    assert admitted(state) == [0, 1]


def test_ids_of_a_topic_that_is_not_copied_into_are_not_kept() -> None:
    """Somebody follows the advice, deletes it and creates a better one: that is no deletion of a copy."""
    state = topic()
    describe(state, shape(71, partitions=0))
    assert states(state) == [LinkState.PARTITION_MISMATCH] * 2
    assert list(state.report(0.0).remote_topic_ids) == []
    describe(state, shape(81, 82))
    record(state)
    assert admitted(state) == [0, 1]


def test_while_partitions_are_added_there_the_others_are_copied() -> None:
    state = topic(link_topic(2, remote_topic_ids=(71, 72)))
    describe(state, shape(71, 72))
    assert admitted(state) == [0, 1]
    assert state.follow(link_topic(4, remote_topic_ids=(71, 72), grow_to=4), 0.0)
    describe(state, shape(71, 72), WAITS)
    assert state.creation(0.0) == Creation(TOPIC, 4, True, grow=True)
    assert admitted(state) == [0, 1]
    state.not_created(LinkState.DENIED, "no", 0.0, 0)
    state.look(0.0)
    assert states(state)[2:] == [LinkState.DENIED] * 2
    assert admitted(state) == [0, 1]
    describe(state, shape(71, 72, 73, 74), WAITS)
    record(state)
    assert admitted(state) == [0, 1, 2, 3]


def test_what_only_somebody_can_help_has_no_next_try() -> None:
    def retries(state: LinkTopicState) -> list[int]:
        return [each.next_retry_ms for each in state.report(0.0).partitions]

    waiting = topic()
    waiting.describe(there("west", shape()), WAITS, retry_ms=5)
    deleted = topic(link_topic(2, remote_topic_ids=(71, 72)))
    deleted.describe(there("west", shape()), WAITS, retry_ms=5)
    assert (set(retries(waiting)), set(retries(deleted))) == ({5}, {0})


@pytest.mark.parametrize("found", [shape(), shape(91, 92)], ids=["gone", "another"])
def test_a_deleted_topic_is_left_alone_until_somebody_asks(found: replica_pb2.TopicShape) -> None:
    state = topic(link_topic(2, remote_topic_ids=(71, 72)))
    describe(state, shape(71, 72))
    assert admitted(state) == [0, 1]
    describe(state, found)
    assert states(state) == [LinkState.REMOTE_DELETED] * 2
    report = state.report(0.0)
    assert (report.is_tombstone, list(report.remote_topic_ids), state.is_recorded) == (True, [71, 72], False)
    record(state)
    assert state.is_recorded
    describe(state, shape(91, 92))  # also if somebody creates it there
    assert admitted(state) == []
    assert state.creation(1000.0) is None

    # An answer that was on its way when it was noticed changes nothing.
    state.follow(link_topic(2, remote_topic_ids=(71, 72)), 0.0)
    describe(state, shape(91, 92))
    assert admitted(state) == []

    assert state.follow(link_topic(2, generation=1), 0.0)
    describe(state, shape(91, 92))
    assert state.report(0.0).generation == 1
    record(state)
    assert admitted(state) == [0, 1]
    assert [partition.target_topic_id for partition in state.partitions] == [91, 92]


def test_a_report_of_an_older_generation_is_no_record() -> None:
    state = topic()
    describe(state, shape(71, 72))
    old = state.report(0.0)
    state.follow(link_topic(2, generation=1), 0.0)
    describe(state, shape(71, 72))
    state.recorded(old)
    assert admitted(state) == []


def test_a_remote_that_does_not_answer_holds_everything_and_lets_go_again() -> None:
    state = topic(link_topic(2, remote_topic_ids=(71, 72)))
    describe(state, shape(71, 72))
    state.unanswered(LinkState.UNREACHABLE, "no answer", retry_ms=5)
    state.look(0.0)
    assert states(state) == [LinkState.UNREACHABLE] * 2
    assert state.creation(0.0) is None
    assert [each.next_retry_ms for each in state.report(0.0).partitions] == [5, 5]
    describe(state, shape(71, 72))
    assert admitted(state) == [0, 1]


def test_another_topic_of_the_same_name_here_is_another() -> None:
    state = topic(link_topic(2))
    assert state.is_about(link_topic(3))  # grown
    assert not state.is_about(pb.LinkTopic(topic=TOPIC, topic_ids=(8, 9), partition_count=2))
    assert not state.is_about(link_topic(0))
    assert state.is_same(link_topic(0))  # reported when it had fewer


def test_where_copying_starts() -> None:
    latest = topic(link_topic(2, start_offsets=(5, 6), policy=pb.ReplicationPolicy(start="latest")))
    assert [partition.begin for partition in latest.partitions] == [5, 6]
    assert not latest.starts_at_first
    by_time = topic(link_topic(2, policy=pb.ReplicationPolicy(start="1700000000000000")))
    assert by_time.start_us == 1_700_000_000_000_000
    assert not by_time.starts_at_first
    assert all(partition.needs_begin for partition in by_time.partitions)
    assert topic(link_topic(2, policy=pb.ReplicationPolicy(start="earliest"))).starts_at_first


def test_it_is_reported_where_the_copy_begins_and_the_next_runner_knows() -> None:
    state = topic(link_topic(2, start_offsets=(5, 6), policy=pb.ReplicationPolicy(start="latest")))
    describe(state, shape(71, 72))
    record(state)
    for partition in state.partitions:
        step = partition.plan(0.0, 0)
        assert step is not None
        partition.begin_step(step, 0.0)
        partition.note(CopyOutcome(name=partition.name), 0.0, 0)
    assert (state.is_recorded, list(state.report(0.0).begins)) == (False, [5, 6])
    record(state)
    assert state.is_recorded
    next_one = topic(link_topic(2, remote_topic_ids=(71, 72), begins=(5, 6)))
    assert list(next_one.report(0.0).begins) == [5, 6]


def test_the_log_says_what_is_not_copied_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    state = topic(link_topic(2, remote_topic_ids=(71, 72)))
    describe(state, shape(71))
    for now in (1.0, 30.0, 59.0, 61.0, 62.0):
        state.look(now)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert "partitions=1 state=partition_mismatch reason=topic /default/orders has 2" in errors[0]
