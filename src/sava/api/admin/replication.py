"""The service ``Replication`` of the admin port: what operators ask of replication, and what runners learn
and report.

A translation: what a call means is in ``sava.replication``. What changes or knows how far replication is, is
the leader's (NotController, and the call is passed on to it).
"""

from __future__ import annotations

from typing import Any, Final

from sava.peers import faults
from sava.proto import replication_pb2 as pb
from sava.proto import replication_pb2_grpc as rpc
from sava.replication.checks import Difference
from sava.replication.control import Control
from sava.replication.links import LinkTopic
from sava.replication.policies import Scope
from sava.replication.records import PartitionReport, PolicyRecord, RemoteRecord, ReportRecord
from sava.replication.reports import TopicReport
from sava.replication.status import PartitionStatus, TopicStatus
from sava.topics.names import TopicName

# ruff: noqa: N802 (gRPC names the methods)


class ReplicationService(rpc.ReplicationServicer):
    def __init__(self, control: Control) -> None:
        self._control = control

    # -- remotes -----------------------------------------------------------------------------

    async def AddRemote(self, request: pb.Remote, context: Any) -> pb.AddRemoteResponse:
        async with faults.told(context):
            added = await self._control.remotes.add(request.name, remote_record(request))
        return pb.AddRemoteResponse(remote=remote_message(request.name, added, with_token=False))

    async def ListRemotes(self, request: pb.ListRemotesRequest, context: Any) -> pb.ListRemotesResponse:
        async with faults.told(context):
            found = await self._control.remotes.list()
        remotes = [remote_message(name, record, with_token=False) for name, record in sorted(found.items())]
        return pb.ListRemotesResponse(remotes=remotes)

    async def RemoveRemote(self, request: pb.RemoveRemoteRequest, context: Any) -> pb.RemoveRemoteResponse:
        async with faults.told(context):
            await self._control.remove_remote(request.name)
        return pb.RemoveRemoteResponse()

    async def TestRemote(self, request: pb.TestRemoteRequest, context: Any) -> pb.TestRemoteResponse:
        async with faults.told(context):
            tested = await self._control.test_remote(request.name)
        response = pb.TestRemoteResponse(
            is_reachable=tested.identity is not None,
            error=tested.error,
            round_trip_ms=tested.round_trip_ms,
            differences=map(difference_message, tested.differences),
        )
        if tested.identity is not None:
            response.cluster_name = tested.identity.cluster_name
            response.cluster_id = tested.identity.cluster_id
        return response

    # -- policies ----------------------------------------------------------------------------

    async def SetReplication(
        self, request: pb.SetReplicationRequest, context: Any
    ) -> pb.SetReplicationResponse:
        async with faults.told(context):
            compared = await self._control.set(
                Scope.parse(request.scope),
                policy_record(request.policy),
                skip_checks=request.skip_checks,
                dry_run=request.dry_run,
            )
        return pb.SetReplicationResponse(
            is_set=compared.is_set,
            remotes=[
                pb.RemoteDifferences(remote=remote, differences=map(difference_message, differences))
                for remote, differences in compared.differences.items()
            ],
        )

    async def GetReplication(
        self, request: pb.GetReplicationRequest, context: Any
    ) -> pb.GetReplicationResponse:
        async with faults.told(context):
            held = await self._control.get(Scope.parse(request.scope))
        if held is None:
            return pb.GetReplicationResponse()
        return pb.GetReplicationResponse(policy=policy_message(held.policy), from_scope=str(held.scope))

    async def ClearReplication(
        self, request: pb.ClearReplicationRequest, context: Any
    ) -> pb.ClearReplicationResponse:
        async with faults.told(context):
            await self._control.clear(Scope.parse(request.scope))
        return pb.ClearReplicationResponse()

    # -- links -------------------------------------------------------------------------------

    async def GetReplicationStatus(
        self, request: pb.GetReplicationStatusRequest, context: Any
    ) -> pb.ReplicationStatus:
        async with faults.told(context):
            found = self._control.status(topic=request.topic, remote=request.remote)
            return pb.ReplicationStatus(topics=[self._status(each) for each in found])

    def _status(self, status: TopicStatus) -> pb.LinkTopic:
        return topic_status_message(status, self._control.schema_subject(status.topic.name.topic))

    async def GetLink(self, request: pb.GetLinkRequest, context: Any) -> pb.Link:
        async with faults.told(context):
            link = self._control.link(request.remote)
            own, settings = self._control.remotes.own(), self._control.settings
            return pb.Link(
                remote=remote_message(request.remote, link.remote, with_token=True),
                cluster_name=own.cluster_name,
                cluster_id=own.cluster_id,
                may_create=settings.may_create,
                mismatch_policy=settings.mismatch.value,
                topics=[
                    link_topic_message(topic, report, self._control.schema_subject(topic.name.topic))
                    for topic, report in link.topics
                ],
            )

    async def ReportLink(self, request: pb.ReportLinkRequest, context: Any) -> pb.ReportLinkResponse:
        async with faults.told(context):
            told = {TopicName.parse(each.topic): report_of(each) for each in request.topics}
            await self._control.report(request.remote, request.runner, told)
        return pb.ReportLinkResponse()

    async def RecreateRemoteTopic(
        self, request: pb.RecreateRemoteTopicRequest, context: Any
    ) -> pb.RecreateRemoteTopicResponse:
        async with faults.told(context):
            await self._control.recreate(TopicName.parse(request.topic), request.remote)
        return pb.RecreateRemoteTopicResponse()


# -- records as messages, and back -----------------------------------------------------------------


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


def remote_message(name: str, record: RemoteRecord, *, with_token: bool) -> pb.Remote:
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


def difference_message(found: Difference) -> pb.Difference:
    return pb.Difference(**found._asdict())


def policy_record(message: pb.ReplicationPolicy) -> PolicyRecord:
    return PolicyRecord(
        remotes=tuple(message.remotes),
        start=message.start,
        forward=message.forward,
        subscriptions=tuple(message.subscriptions),
    )


def policy_message(record: PolicyRecord) -> pb.ReplicationPolicy:
    return pb.ReplicationPolicy(
        remotes=record.remotes,
        start=record.start,
        forward=record.forward,
        subscriptions=record.subscriptions,
    )


def link_topic_message(topic: LinkTopic, report: ReportRecord | None, schema_subject: str) -> pb.LinkTopic:
    """For a runner, with what was last said of the topic."""
    message = _topic(topic, schema_subject)
    if report is not None:
        for each in report.partitions:
            message.partitions.add(**_fields(each), reported_ms=report.reported_ms)
    return message


def topic_status_message(status: TopicStatus, schema_subject: str) -> pb.LinkTopic:
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
        policy=policy_message(wanted.policy),
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


def report_of(message: pb.LinkTopic) -> TopicReport:
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
