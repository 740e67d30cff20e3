"""The service ``Pipelines`` of the admin port: what runners are to do, and how far they are.

Any broker answers: what is known of pipelines is in the metadata store.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import json
from typing import Any

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
from sava.proto import pipelines_pb2 as pb
from sava.proto import pipelines_pb2_grpc as rpc


class PipelinesService(rpc.PipelinesServicer):
    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines

    # -- for people ----------------------------------------------------------------------------

    async def ApplyPipeline(self, request: pb.ApplyPipelineRequest, context: Any) -> pb.Pipeline:
        spec = request.spec
        if spec.made_by:
            raise PipelineInvalid(
                f"pipeline {spec.name}: made_by is {spec.made_by}, and only policies make pipelines so"
            )
        applied = await self._pipelines.apply(
            spec.name, spec.kind, _settings(spec), create_only=request.create_only
        )
        return _pipeline(applied)

    async def ListPipelines(self, request: pb.ListPipelinesRequest, context: Any) -> pb.ListPipelinesResponse:
        found = await self._pipelines.list()
        return pb.ListPipelinesResponse(pipelines=map(_pipeline, found))

    async def PausePipeline(self, request: pb.PipelineName, context: Any) -> pb.Pipeline:
        return _pipeline(await self._pipelines.pause(request.name, is_paused=True))

    async def ResumePipeline(self, request: pb.PipelineName, context: Any) -> pb.Pipeline:
        return _pipeline(await self._pipelines.pause(request.name, is_paused=False))

    async def DeletePipeline(self, request: pb.PipelineName, context: Any) -> pb.DeletePipelineResponse:
        is_gone = await self._pipelines.delete(request.name)
        return pb.DeletePipelineResponse(is_gone=is_gone)

    async def ListRunners(self, request: pb.ListRunnersRequest, context: Any) -> pb.ListRunnersResponse:
        found = await self._pipelines.runners()
        return pb.ListRunnersResponse(runners=map(_runner, found))

    # -- for runners ---------------------------------------------------------------------------

    async def JoinRunner(self, request: pb.JoinRunnerRequest, context: Any) -> pb.JoinRunnerResponse:
        record = RunnerRecord(kinds=tuple(request.kinds), only=tuple(request.only))
        joined = await self._pipelines.join(request.runner, record, ttl_ms=request.ttl_ms)
        return pb.JoinRunnerResponse(
            lease=joined.lease, ttl_ms=joined.ttl_ms, runners=map(_runner, joined.runners)
        )

    async def LeaveRunner(self, request: pb.LeaveRunnerRequest, context: Any) -> pb.LeaveRunnerResponse:
        await self._pipelines.leave(request.runner)
        return pb.LeaveRunnerResponse()

    async def ClaimPipeline(self, request: pb.ClaimPipelineRequest, context: Any) -> pb.ClaimPipelineResponse:
        claimed = await self._pipelines.claim(request.name, request.runner)
        return pb.ClaimPipelineResponse(
            is_granted=claimed.is_granted, claim=claimed.number, holder=claimed.holder
        )

    async def ReportPipeline(
        self, request: pb.ReportPipelineRequest, context: Any
    ) -> pb.ReportPipelineResponse:
        reported = await self._pipelines.report(
            request.name, request.runner, request.claim, _status_of(request.status)
        )
        return to_message(pb.ReportPipelineResponse, reported)

    async def ReleasePipeline(
        self, request: pb.ReleasePipelineRequest, context: Any
    ) -> pb.ReleasePipelineResponse:
        status = _status_of(request.status)
        await self._pipelines.release(request.name, request.runner, request.claim, status)
        return pb.ReleasePipelineResponse()


def _settings(spec: pb.PipelineSpec) -> dict[str, Any]:
    try:
        settings = json.loads(spec.settings or "{}")
    except ValueError as error:
        raise PipelineInvalid(f"pipeline {spec.name}: the settings are not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise PipelineInvalid(f"pipeline {spec.name}: the settings are to be a JSON object")
    return settings


def _pipeline(found: Pipeline) -> pb.Pipeline:
    record = found.record
    return pb.Pipeline(
        spec=pb.PipelineSpec(
            name=found.name,
            kind=record.kind,
            settings=json.dumps(record.settings, ensure_ascii=False, sort_keys=True),
            made_by=record.made_by,
        ),
        is_paused=record.is_paused,
        revision=found.revision,
        status=to_message(pb.PipelineStatus, found.status),
        holder=found.claim.runner if found.claim is not None else "",
        is_deleting=record.is_deleting,
    )


def _status_of(status: pb.PipelineStatus) -> PipelineStatus:
    """The broker itself says when, by whom and under which claim."""
    try:
        state = PipelineState(status.state)
    except ValueError:
        states = ", ".join(PipelineState)
        raise PipelineInvalid(
            f"a pipeline cannot be in the state {status.state!r}; states are {states}"
        ) from None
    return from_message(PipelineStatus, status, state=state, runner="", claim=0, reported_ms=0)


def _runner(found: Runner) -> pb.Runner:
    return to_message(pb.Runner, found.record, runner=found.name, claims=found.claims)
