"""The service ``Replication`` of the admin port: what operators ask of replication, and what runners learn
and report.

A translation: what a call means is in ``sava.replication``. What changes or knows how far replication is, is
the leader's (NotController, and the call is passed on to it).
"""

from __future__ import annotations

from typing import Any

from sava.api.messages import from_message, to_message
from sava.proto import replication_pb2 as pb
from sava.proto import replication_pb2_grpc as rpc
from sava.replication.control import Control, Difference
from sava.replication.links import LinkTopic
from sava.replication.policies import Scope
from sava.replication.records import PartitionReport, PolicyRecord, RemoteRecord, ReportRecord
from sava.replication.status import PartitionStatus, TopicReport, TopicStatus
from sava.topics.names import TopicName

# ruff: noqa: N802 (gRPC names the methods)


class ReplicationService(rpc.ReplicationServicer):
    def __init__(self, control: Control) -> None:
        self._control = control

    # -- remotes -----------------------------------------------------------------------------

    async def AddRemote(self, request: pb.Remote, context: Any) -> pb.AddRemoteResponse:
        added = await self._control.remotes.add(request.name, remote_record(request))
        return pb.AddRemoteResponse(remote=remote_message(request.name, added, with_token=False))

    async def ListRemotes(self, request: pb.ListRemotesRequest, context: Any) -> pb.ListRemotesResponse:
        found = await self._control.remotes.list()
        remotes = [remote_message(name, record, with_token=False) for name, record in sorted(found.items())]
        return pb.ListRemotesResponse(remotes=remotes)

    async def RemoveRemote(self, request: pb.RemoveRemoteRequest, context: Any) -> pb.RemoveRemoteResponse:
        await self._control.remove_remote(request.name)
        return pb.RemoveRemoteResponse()

    async def TestRemote(self, request: pb.TestRemoteRequest, context: Any) -> pb.TestRemoteResponse:
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
        held = await self._control.get(Scope.parse(request.scope))
        if held is None:
            return pb.GetReplicationResponse()
        return pb.GetReplicationResponse(policy=policy_message(held.policy), from_scope=str(held.scope))

    async def ClearReplication(
        self, request: pb.ClearReplicationRequest, context: Any
    ) -> pb.ClearReplicationResponse:
        await self._control.clear(Scope.parse(request.scope))
        return pb.ClearReplicationResponse()

    # -- links -------------------------------------------------------------------------------

    async def GetReplicationStatus(
        self, request: pb.GetReplicationStatusRequest, context: Any
    ) -> pb.ReplicationStatus:
        found = self._control.status(topic=request.topic, remote=request.remote)
        return pb.ReplicationStatus(topics=[self._status(each) for each in found])

    def _status(self, status: TopicStatus) -> pb.LinkTopic:
        return topic_status_message(status, self._control.schema_subject(status.topic.name.topic))

    async def GetLink(self, request: pb.GetLinkRequest, context: Any) -> pb.Link:
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
        told = {TopicName.parse(each.topic): report_of(each) for each in request.topics}
        await self._control.report(request.remote, request.runner, told)
        return pb.ReportLinkResponse()

    async def RecreateRemoteTopic(
        self, request: pb.RecreateRemoteTopicRequest, context: Any
    ) -> pb.RecreateRemoteTopicResponse:
        await self._control.recreate(TopicName.parse(request.topic), request.remote)
        return pb.RecreateRemoteTopicResponse()


# -- records as messages, and back -----------------------------------------------------------------


def remote_record(message: pb.Remote) -> RemoteRecord:
    """As an operator gave it; its name and id come from the remote itself."""
    return from_message(RemoteRecord, message, cluster_name="", cluster_id="", added_ms=0)


def remote_message(name: str, record: RemoteRecord, *, with_token: bool) -> pb.Remote:
    return to_message(pb.Remote, record, name=name, token=record.token if with_token else "")


def difference_message(found: Difference) -> pb.Difference:
    return to_message(pb.Difference, found)


def policy_record(message: pb.ReplicationPolicy) -> PolicyRecord:
    return from_message(PolicyRecord, message)


def policy_message(record: PolicyRecord) -> pb.ReplicationPolicy:
    return to_message(pb.ReplicationPolicy, record)


def link_topic_message(topic: LinkTopic, report: ReportRecord | None, schema_subject: str) -> pb.LinkTopic:
    """For a runner, with what was last said of the topic."""
    message = _topic(topic, schema_subject)
    if report is not None:
        for each in report.partitions:
            message.partitions.append(
                to_message(
                    pb.LinkPartition, each, reported_ms=report.reported_ms, backlog=None, backlog_seconds=None
                )
            )
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
    return to_message(
        pb.LinkPartition,
        status.report,
        end=status.end,
        reported_ms=status.reported_ms,
        backlog=status.backlog,
        backlog_seconds=status.backlog_s,
    )


def report_of(message: pb.LinkTopic) -> TopicReport:
    return from_message(TopicReport, message, partitions=tuple(map(_report, message.partitions)))


def _report(message: pb.LinkPartition) -> PartitionReport:
    return from_message(PartitionReport, message)
