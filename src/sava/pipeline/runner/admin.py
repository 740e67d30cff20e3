"""AdminControl: what a runner asks of the cluster, by the admin port of any broker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from sava.client.connection import Tls
from sava.client.errors import Refused
from sava.pipeline.runner.admin_calls import AdminCalls
from sava.pipeline.runner.control import Answer, Joined, Listed, Peer, Status
from sava.proto import pipelines_pb2, pipelines_pb2_grpc

TTL_S: Final = 10.0


class AdminControl:
    """Of one thread. ``kinds`` and ``only`` are what the runner takes."""

    def __init__(
        self,
        addresses: str,
        runner: str,
        *,
        kinds: Sequence[str],
        only: Sequence[str] = (),
        tls: Tls | None = None,
        ttl_s: float = TTL_S,
    ) -> None:
        self._runner = runner
        self._kinds = kinds
        self._only = only
        self._ttl_s = ttl_s
        self._calls = AdminCalls(addresses, tls=tls)

    @property
    def service(self) -> str:
        """Client addresses of the brokers, with commas between; empty: not known yet."""
        return self._calls.service

    @property
    def admin(self) -> str:
        """Admin addresses, also of brokers that have come since this was made."""
        return self._calls.admin

    def close(self) -> None:
        self._calls.close()

    # -- Control -------------------------------------------------------------------------------

    def join(self) -> Joined:
        request = pipelines_pb2.JoinRunnerRequest(
            runner=self._runner, ttl_ms=round(self._ttl_s * 1000), kinds=self._kinds, only=self._only
        )
        response: pipelines_pb2.JoinRunnerResponse = self._ask("JoinRunner", request)
        self._calls.refresh()
        return Joined(
            lease=response.lease,
            ttl_s=response.ttl_ms / 1000,
            peers=[
                Peer(each.runner, frozenset(each.kinds), frozenset(each.only), each.claims)
                for each in response.runners
            ],
        )

    def leave(self) -> None:
        self._ask("LeaveRunner", pipelines_pb2.LeaveRunnerRequest(runner=self._runner))

    def list(self) -> Sequence[Listed]:
        response: pipelines_pb2.ListPipelinesResponse = self._ask(
            "ListPipelines", pipelines_pb2.ListPipelinesRequest()
        )
        return [
            Listed(
                name=each.spec.name,
                kind=each.spec.kind,
                settings=json.loads(each.spec.settings),
                revision=each.revision,
                is_wanted=not each.is_paused and not each.is_deleting,
                holder=each.holder,
                rows=each.status.rows,
                restarts=each.status.restarts,
            )
            for each in response.pipelines
        ]

    def claim(self, name: str) -> int:
        request = pipelines_pb2.ClaimPipelineRequest(name=name, runner=self._runner)
        try:
            response: pipelines_pb2.ClaimPipelineResponse = self._ask("ClaimPipeline", request)
        except Refused as error:
            if error.code != "pipeline_unknown":
                raise
            return 0  # deleted since it was listed
        return response.claim if response.is_granted else 0

    def report(self, name: str, claim: int, status: Status) -> Answer:
        request = pipelines_pb2.ReportPipelineRequest(
            name=name, runner=self._runner, claim=claim, status=_status(status)
        )
        response: pipelines_pb2.ReportPipelineResponse = self._ask("ReportPipeline", request)
        return Answer(response.is_held, response.is_wanted, response.revision)

    def release(self, name: str, claim: int, status: Status) -> None:
        request = pipelines_pb2.ReleasePipelineRequest(
            name=name, runner=self._runner, claim=claim, status=_status(status)
        )
        self._ask("ReleasePipeline", request)

    def _ask(self, method: str, request: Any) -> Any:
        return self._calls.ask(method, request, pipelines_pb2_grpc.PipelinesStub)


def _status(status: Status) -> pipelines_pb2.PipelineStatus:
    return pipelines_pb2.PipelineStatus(**status._asdict())
