"""Every pair of a record and its message fits: no field of the target is without a source."""

import dataclasses
from typing import Any, NamedTuple

import msgspec
import pytest
from google.protobuf.message import Message

from sava.api.messages import from_message, to_message
from sava.cluster.pipelines import PipelineState, PipelineStatus
from sava.proto import pipelines_pb2, replication_pb2, topics_admin_pb2, writers_pb2
from sava.replication.control import Difference
from sava.replication.records import PartitionReport, PolicyRecord
from sava.storage.staging import Section
from sava.topics.specs import FailurePolicy, RedeliveryBackoff


def both_ways(record: Any, kind: type[Message], missing: tuple[str, ...] = ()) -> Any:
    """The record that comes out when its message went over the wire; ``missing`` are fields of the message
    that the record does not have."""
    wire = to_message(kind, record, **dict.fromkeys(missing)).SerializeToString()
    return from_message(type(record), kind.FromString(wire))


def test_records_come_back_as_they_were() -> None:
    report = PartitionReport(
        partition=3, state="active", reason="ok", position=7, rate=1.5, unsynced_subscriptions=("a", "b")
    )
    extra = ("reported_ms", "backlog", "backlog_seconds")
    assert both_ways(report, replication_pb2.LinkPartition, extra) == report
    policy = PolicyRecord(remotes=("west", "east"), start="latest", forward=True, subscriptions=("s",))
    assert both_ways(policy, replication_pb2.ReplicationPolicy) == policy
    difference = Difference("orders", "missing", "here", "not there", "nothing is copied", blocks=True)
    assert both_ways(difference, replication_pb2.Difference) == difference
    section = Section("key", 1, 2, 3, 4, 5)
    assert both_ways(section, writers_pb2.Section, ("topic",)) == section
    status = PipelineStatus(
        state=PipelineState.RUNNING, runner="r", rows=9, lag_messages=-1, last_error="late", batch=4
    )
    assert both_ways(status, pipelines_pb2.PipelineStatus) == status


def test_an_override_wins_and_none_leaves_a_field_unset() -> None:
    policy = FailurePolicy(backoff=RedeliveryBackoff.FIXED, dead_letter_topic="")
    message = to_message(topics_admin_pb2.FailurePolicy, policy, ack_timeout_ms=5, dead_letter=None)
    assert (message.ack_timeout_ms, message.backoff) == (5, RedeliveryBackoff.FIXED.value)
    assert message.HasField("dead_letter_topic")
    assert not message.HasField("dead_letter")


@dataclasses.dataclass
class Half:
    name: str


class Named(NamedTuple):
    name: str
    more: int


class Optional(msgspec.Struct):
    backoff: str


def test_a_field_without_a_source_is_an_error_and_not_a_default() -> None:
    with pytest.raises(TypeError, match=r"Half has no .*service.* for sava\.\w+\.Remote"):
        to_message(replication_pb2.Remote, Half("west"))
    with pytest.raises(TypeError, match=r"Remote has no certain more for Named"):
        from_message(Named, replication_pb2.Remote(name="west"))
    with pytest.raises(TypeError, match="no record"):
        from_message(int, replication_pb2.Remote(name="west"))


def test_a_field_that_may_be_absent_needs_an_override() -> None:
    with pytest.raises(TypeError, match="no certain backoff for Optional"):
        from_message(Optional, topics_admin_pb2.FailurePolicy(backoff="fixed"))
    assert from_message(Optional, topics_admin_pb2.FailurePolicy(), backoff="none").backoff == "none"
