"""The service ``Replication`` of the admin port: what operators ask of replication, and what runners are told
and tell.

A translation: what a call means is in ``sava.replication``. What changes or knows how far replication is, is
the leader's (NotController, and the call is passed on to it).
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from typing import Any

from sava.api import replication_messages as messages
from sava.peers import faults
from sava.proto import replication_pb2 as pb
from sava.proto import replication_pb2_grpc as rpc
from sava.replication.control import Control
from sava.replication.policies import Scope
from sava.replication.status import TopicStatus
from sava.topics.names import TopicName


class ReplicationService(rpc.ReplicationServicer):
    def __init__(self, control: Control) -> None:
        self._control = control

    # -- remotes -----------------------------------------------------------------------------

    async def AddRemote(self, request: pb.Remote, context: Any) -> pb.AddRemoteResponse:
        async with faults.told(context):
            added = await self._control.remotes.add(request.name, messages.remote_record(request))
        return pb.AddRemoteResponse(remote=messages.remote(request.name, added, with_token=False))

    async def ListRemotes(self, request: pb.ListRemotesRequest, context: Any) -> pb.ListRemotesResponse:
        async with faults.told(context):
            found = await self._control.remotes.list()
        remotes = [messages.remote(name, record, with_token=False) for name, record in sorted(found.items())]
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
            differences=map(messages.difference, tested.differences),
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
                messages.policy_record(request.policy),
                skip_checks=request.skip_checks,
                dry_run=request.dry_run,
            )
        return pb.SetReplicationResponse(
            is_set=compared.is_set,
            remotes=[
                pb.RemoteDifferences(remote=remote, differences=map(messages.difference, differences))
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
        return pb.GetReplicationResponse(policy=messages.policy(held.policy), from_scope=str(held.scope))

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
        return messages.topic_status(status, self._control.schema_subject(status.topic.name.topic))

    async def GetLink(self, request: pb.GetLinkRequest, context: Any) -> pb.Link:
        async with faults.told(context):
            link = self._control.link(request.remote)
            own, settings = self._control.remotes.own(), self._control.settings
            return pb.Link(
                remote=messages.remote(request.remote, link.remote, with_token=True),
                cluster_name=own.cluster_name,
                cluster_id=own.cluster_id,
                may_create=settings.may_create,
                mismatch_policy=settings.mismatch.value,
                topics=[
                    messages.link_topic(topic, report, self._control.schema_subject(topic.name.topic))
                    for topic, report in link.topics
                ],
            )

    async def ReportLink(self, request: pb.ReportLinkRequest, context: Any) -> pb.ReportLinkResponse:
        async with faults.told(context):
            told = {TopicName.parse(each.topic): messages.told(each) for each in request.topics}
            await self._control.report(request.remote, request.runner, told)
        return pb.ReportLinkResponse()

    async def RecreateRemoteTopic(
        self, request: pb.RecreateRemoteTopicRequest, context: Any
    ) -> pb.RecreateRemoteTopicResponse:
        async with faults.told(context):
            await self._control.recreate(TopicName.parse(request.topic), request.remote)
        return pb.RecreateRemoteTopicResponse()
