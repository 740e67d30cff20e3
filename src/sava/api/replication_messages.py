"""Replication on the wire: records as messages, and back."""

from __future__ import annotations

from typing import Any, Final

from sava.proto import replication_pb2 as pb
from sava.replication.checks import Difference
from sava.replication.links import LinkTopic
from sava.replication.records import PartitionReport, PolicyRecord, RemoteRecord, ReportRecord
from sava.replication.reports import TopicReport
from sava.replication.status import PartitionStatus, TopicStatus

REPORTED: Final = tuple(PartitionReport.__struct_fields__)
"""Of one partition, under the same names in a message."""


def remote_record(message: pb.Remote) -> RemoteRecord:
    """As somebody gave it; who it is, it says itself."""
    return RemoteRecord(
        service=message.service,
        token=message.token,
        tls_ca=message.tls_ca,
        tls_cert=message.tls_cert,
        tls_key=message.tls_key,
        max_rate=message.max_rate,
        cluster_name="",
        cluster_id="",
    )


def remote(name: str, record: RemoteRecord, *, with_token: bool) -> pb.Remote:
    return pb.Remote(
        name=name,
        service=record.service,
        token=record.token if with_token else "",
        tls_ca=record.tls_ca,
        tls_cert=record.tls_cert,
        tls_key=record.tls_key,
        max_rate=record.max_rate,
        cluster_name=record.cluster_name,
        cluster_id=record.cluster_id,
    )


def difference(found: Difference) -> pb.Difference:
    return pb.Difference(**found._asdict())


def policy_record(message: pb.ReplicationPolicy) -> PolicyRecord:
    return PolicyRecord(
        remotes=tuple(message.remotes),
        start=message.start,
        forward=message.forward,
        subscriptions=tuple(message.subscriptions),
    )


def policy(record: PolicyRecord) -> pb.ReplicationPolicy:
    return pb.ReplicationPolicy(
        remotes=record.remotes,
        start=record.start,
        forward=record.forward,
        subscriptions=record.subscriptions,
    )


def link_topic(topic: LinkTopic, report: ReportRecord | None, schema_subject: str) -> pb.LinkTopic:
    """For a runner, with what was last said of the topic."""
    message = _topic(topic, schema_subject)
    if report is not None:
        for each in report.partitions:
            message.partitions.add(**_fields(each), reported_ms=report.reported_ms)
    return message


def topic_status(status: TopicStatus, schema_subject: str) -> pb.LinkTopic:
    message = _topic(status.topic, schema_subject)
    message.partitions.extend(map(_partition, status.partitions))
    message.connected_count, message.disconnected_count = status.connected, status.disconnected
    return message


def _topic(topic: LinkTopic, schema_subject: str) -> pb.LinkTopic:
    wanted, record = topic.wanted, topic.record
    return pb.LinkTopic(
        topic=str(topic.name.topic),
        remote=topic.name.remote,
        partition_count=wanted.spec.partitions,
        reliable=wanted.spec.reliable,
        topic_ids=wanted.topic_ids,
        schema_subject=schema_subject,
        policy=policy(wanted.policy),
        remote_topic_ids=record.remote_topic_ids,
        is_tombstone=record.is_tombstone,
        start_offsets=topic.start_offsets,
        generation=record.generation,
        grow_to=topic.grow_to,
        begins=record.begins,
    )


def _partition(status: PartitionStatus) -> pb.LinkPartition:
    message = pb.LinkPartition(
        **_fields(status.report),
        reported_ms=status.reported_ms,
        backlog=status.backlog,
        backlog_seconds=status.backlog_s,
    )
    message.end = status.end
    return message


def _fields(report: PartitionReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in REPORTED}


def told(message: pb.LinkTopic) -> TopicReport:
    return TopicReport(
        topic_ids=tuple(message.topic_ids),
        generation=message.generation,
        remote_topic_ids=tuple(message.remote_topic_ids),
        is_tombstone=message.is_tombstone,
        begins=tuple(message.begins),
        partitions=tuple(map(_report, message.partitions)),
    )


def _report(message: pb.LinkPartition) -> PartitionReport:
    fields = {name: getattr(message, name) for name in REPORTED}
    return PartitionReport(**fields | {"unsynced_subscriptions": tuple(message.unsynced_subscriptions)})
