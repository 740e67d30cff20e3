"""The service ``Pipelines`` of the admin port: what runners are to do, and how far they are.

Any broker answers: what is known of pipelines is in the metadata store.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import json
from typing import Any

import msgspec

from sava.cluster.pipeline_errors import PipelineInvalid
from sava.cluster.pipeline_records import Pipeline, PipelineState, PipelineStatus, Runner, RunnerRecord
from sava.cluster.pipelines import Pipelines
from sava.peers import faults
from sava.proto import pipelines_pb2 as pb
from sava.proto import pipelines_pb2_grpc as rpc


class PipelinesService(rpc.PipelinesServicer):
    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines

    # -- for people ----------------------------------------------------------------------------

    async def ApplyPipeline(self, request: pb.ApplyPipelineRequest, context: Any) -> pb.Pipeline:
        spec = request.spec
        async with faults.told(context):
            if spec.made_by:
                raise PipelineInvalid(
                    f"pipeline {spec.name}: made_by is {spec.made_by}, and only policies make pipelines so"
                )
            applied = await self._pipelines.apply(
                spec.name, spec.kind, _settings(spec), create_only=request.create_only
            )
        return _pipeline(applied)

    async def ListPipelines(self, request: pb.ListPipelinesRequest, context: Any) -> pb.ListPipelinesResponse:
        async with faults.told(context):
            found = await self._pipelines.list()
        return pb.ListPipelinesResponse(pipelines=map(_pipeline, found))

    async def PausePipeline(self, request: pb.PipelineName, context: Any) -> pb.Pipeline:
        async with faults.told(context):
            return _pipeline(await self._pipelines.pause(request.name, is_paused=True))

    async def ResumePipeline(self, request: pb.PipelineName, context: Any) -> pb.Pipeline:
        async with faults.told(context):
            return _pipeline(await self._pipelines.pause(request.name, is_paused=False))

    async def DeletePipeline(self, request: pb.PipelineName, context: Any) -> pb.DeletePipelineResponse:
        async with faults.told(context):
            is_gone = await self._pipelines.delete(request.name)
        return pb.DeletePipelineResponse(is_gone=is_gone)

    async def ListRunners(self, request: pb.ListRunnersRequest, context: Any) -> pb.ListRunnersResponse:
        async with faults.told(context):
            found = await self._pipelines.runners()
        return pb.ListRunnersResponse(runners=map(_runner, found))

    # -- for runners ---------------------------------------------------------------------------

    async def JoinRunner(self, request: pb.JoinRunnerRequest, context: Any) -> pb.JoinRunnerResponse:
        record = RunnerRecord(kinds=tuple(request.kinds), only=tuple(request.only))
        async with faults.told(context):
            joined = await self._pipelines.join(request.runner, record, ttl_ms=request.ttl_ms)
        return pb.JoinRunnerResponse(
            lease=joined.lease, ttl_ms=joined.ttl_ms, runners=map(_runner, joined.runners)
        )

    async def LeaveRunner(self, request: pb.LeaveRunnerRequest, context: Any) -> pb.LeaveRunnerResponse:
        async with faults.told(context):
            await self._pipelines.leave(request.runner)
        return pb.LeaveRunnerResponse()

    async def ClaimPipeline(self, request: pb.ClaimPipelineRequest, context: Any) -> pb.ClaimPipelineResponse:
        async with faults.told(context):
            claimed = await self._pipelines.claim(request.name, request.runner)
        return pb.ClaimPipelineResponse(
            is_granted=claimed.is_granted, claim=claimed.number, holder=claimed.holder
        )

    async def ReportPipeline(
        self, request: pb.ReportPipelineRequest, context: Any
    ) -> pb.ReportPipelineResponse:
        async with faults.told(context):
            reported = await self._pipelines.report(
                request.name, request.runner, request.claim, _status_of(request.status)
            )
        return pb.ReportPipelineResponse(
            is_held=reported.is_held, is_wanted=reported.is_wanted, revision=reported.revision
        )

    async def ReleasePipeline(
        self, request: pb.ReleasePipelineRequest, context: Any
    ) -> pb.ReleasePipelineResponse:
        async with faults.told(context):
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
        status=pb.PipelineStatus(**msgspec.structs.asdict(found.status)),
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
    return PipelineStatus(
        state=state,
        rows=status.rows,
        rate=status.rate,
        lag_messages=status.lag_messages,
        lag_seconds=status.lag_seconds,
        last_error=status.last_error,
        restarts=status.restarts,
        since_ms=status.since_ms,
        batch=status.batch,
    )


def _runner(found: Runner) -> pb.Runner:
    return pb.Runner(
        runner=found.name,
        kinds=found.record.kinds,
        only=found.record.only,
        claims=found.claims,
        since_ms=found.record.since_ms,
    )
