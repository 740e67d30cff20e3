"""The services ``Replication`` and ``Pipelines`` of the admin port: what operators ask of the work that
runners do, what runners are to do, and how far they are.

Translations: what a call means is in ``sava.replication`` and ``sava.cluster.pipelines``. What is known of
pipelines is in the metadata store, so any broker answers. What changes or knows how far replication is, is
the leader's (NotController, and the call is passed on to it).
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Final

from sava.api.messages import from_message, to_message
from sava.cluster.pipelines import (
    Pipeline,
    PipelineInvalid,
    Pipelines,
    PipelineState,
    PipelineStatus,
    Runner,
    RunnerRecord,
)
from sava.errors import shown
from sava.proto import pipelines_pb2 as pipelines_pb
from sava.proto import pipelines_pb2_grpc as pipelines_rpc
from sava.proto import replication_pb2 as pb
from sava.proto import replication_pb2_grpc as rpc
from sava.replication.control import Control
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
            differences=map(_difference, tested.differences),
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
            from_message(PolicyRecord, request.policy),
            skip_checks=request.skip_checks,
            dry_run=request.dry_run,
        )
        return pb.SetReplicationResponse(
            is_set=compared.is_set,
            remotes=[
                pb.RemoteDifferences(remote=remote, differences=map(_difference, differences))
                for remote, differences in compared.differences.items()
            ],
        )

    async def GetReplication(
        self, request: pb.GetReplicationRequest, context: Any
    ) -> pb.GetReplicationResponse:
        held = await self._control.policies.get(Scope.parse(request.scope))
        if held is None:
            return pb.GetReplicationResponse()
        return pb.GetReplicationResponse(
            policy=to_message(pb.ReplicationPolicy, held.policy), from_scope=str(held.scope)
        )

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
        policy=to_message(pb.ReplicationPolicy, wanted.policy),
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
    partitions = tuple(from_message(PartitionReport, each) for each in message.partitions)
    return from_message(TopicReport, message, partitions=partitions)


_difference: Final = partial(to_message, pb.Difference)


# -- pipelines --------------------------------------------------------------------------------------


class PipelinesService(pipelines_rpc.PipelinesServicer):
    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines

    # -- for people ----------------------------------------------------------------------------

    async def ApplyPipeline(
        self, request: pipelines_pb.ApplyPipelineRequest, context: Any
    ) -> pipelines_pb.Pipeline:
        spec = request.spec
        if spec.made_by:
            raise PipelineInvalid(
                f"pipeline {spec.name}: made_by is {spec.made_by}, and only policies make pipelines so"
            )
        applied = await self._pipelines.apply(
            spec.name, spec.kind, _settings(spec), create_only=request.create_only
        )
        return _pipeline(applied)

    async def ListPipelines(
        self, request: pipelines_pb.ListPipelinesRequest, context: Any
    ) -> pipelines_pb.ListPipelinesResponse:
        found = await self._pipelines.list()
        return pipelines_pb.ListPipelinesResponse(pipelines=map(_pipeline, found))

    async def PausePipeline(self, request: pipelines_pb.PipelineName, context: Any) -> pipelines_pb.Pipeline:
        return _pipeline(await self._pipelines.pause(request.name, is_paused=True))

    async def ResumePipeline(self, request: pipelines_pb.PipelineName, context: Any) -> pipelines_pb.Pipeline:
        return _pipeline(await self._pipelines.pause(request.name, is_paused=False))

    async def DeletePipeline(
        self, request: pipelines_pb.PipelineName, context: Any
    ) -> pipelines_pb.DeletePipelineResponse:
        is_gone = await self._pipelines.delete(request.name)
        return pipelines_pb.DeletePipelineResponse(is_gone=is_gone)

    async def ListRunners(
        self, request: pipelines_pb.ListRunnersRequest, context: Any
    ) -> pipelines_pb.ListRunnersResponse:
        found = await self._pipelines.runners()
        return pipelines_pb.ListRunnersResponse(runners=map(_runner, found))

    # -- for runners ---------------------------------------------------------------------------

    async def JoinRunner(
        self, request: pipelines_pb.JoinRunnerRequest, context: Any
    ) -> pipelines_pb.JoinRunnerResponse:
        record = RunnerRecord(kinds=tuple(request.kinds), only=tuple(request.only))
        joined = await self._pipelines.join(request.runner, record, ttl_ms=request.ttl_ms)
        return pipelines_pb.JoinRunnerResponse(
            lease=joined.lease, ttl_ms=joined.ttl_ms, runners=map(_runner, joined.runners)
        )

    async def LeaveRunner(
        self, request: pipelines_pb.LeaveRunnerRequest, context: Any
    ) -> pipelines_pb.LeaveRunnerResponse:
        await self._pipelines.leave(request.runner)
        return pipelines_pb.LeaveRunnerResponse()

    async def ClaimPipeline(
        self, request: pipelines_pb.ClaimPipelineRequest, context: Any
    ) -> pipelines_pb.ClaimPipelineResponse:
        claimed = await self._pipelines.claim(request.name, request.runner)
        return pipelines_pb.ClaimPipelineResponse(
            is_granted=claimed.is_granted, claim=claimed.number, holder=claimed.holder
        )

    async def ReportPipeline(
        self, request: pipelines_pb.ReportPipelineRequest, context: Any
    ) -> pipelines_pb.ReportPipelineResponse:
        reported = await self._pipelines.report(
            request.name, request.runner, request.claim, _status_of(request.status)
        )
        return to_message(pipelines_pb.ReportPipelineResponse, reported)

    async def ReleasePipeline(
        self, request: pipelines_pb.ReleasePipelineRequest, context: Any
    ) -> pipelines_pb.ReleasePipelineResponse:
        status = _status_of(request.status)
        await self._pipelines.release(request.name, request.runner, request.claim, status)
        return pipelines_pb.ReleasePipelineResponse()


def _settings(spec: pipelines_pb.PipelineSpec) -> dict[str, Any]:
    try:
        settings = json.loads(spec.settings or "{}")
    except ValueError as error:
        raise PipelineInvalid(f"pipeline {spec.name}: the settings are not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise PipelineInvalid(f"pipeline {spec.name}: the settings are to be a JSON object")
    return settings


def _pipeline(found: Pipeline) -> pipelines_pb.Pipeline:
    record = found.record
    return pipelines_pb.Pipeline(
        spec=pipelines_pb.PipelineSpec(
            name=found.name,
            kind=record.kind,
            settings=json.dumps(record.settings, ensure_ascii=False, sort_keys=True),
            made_by=record.made_by,
        ),
        is_paused=record.is_paused,
        revision=found.revision,
        status=to_message(pipelines_pb.PipelineStatus, found.status),
        holder=found.claim.runner if found.claim is not None else "",
        is_deleting=record.is_deleting,
    )


def _status_of(status: pipelines_pb.PipelineStatus) -> PipelineStatus:
    """The broker itself says when, by whom and under which claim."""
    try:
        state = PipelineState(status.state)
    except ValueError:
        states = ", ".join(PipelineState)
        raise PipelineInvalid(
            f"a pipeline cannot be in the state {shown(status.state)}; states are {states}"
        ) from None
    return from_message(PipelineStatus, status, state=state, runner="", claim=0, reported_ms=0)


def _runner(found: Runner) -> pipelines_pb.Runner:
    return to_message(pipelines_pb.Runner, found.record, runner=found.name, claims=found.claims)
