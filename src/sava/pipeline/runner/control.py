"""What a runner asks of the cluster, through the admin port of any broker.

A call is answered or fails within CALL_S. A runner that waits longer cannot look at the clock meanwhile, and
only the clock tells a runner without contact to the cluster that it must stop.

A call goes to the broker that answered last, and within its time to the next one after a failure. All calls
are idempotent: what one broker has done without an answer, another one finds done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

from sava.client.connection import Connection
from sava.client.errors import Refused, Unavailable
from sava.client.loop_thread import LoopThread
from sava.proto import brokers_pb2, brokers_pb2_grpc, pipelines_pb2, pipelines_pb2_grpc
from sava.security.credentials import Tls, Token

CALL_S: Final = 1.5
UNKNOWN_LAG: Final = -1

JobState = Literal["starting", "running", "failing", "failed", "stopped"]


class ListedPipeline(NamedTuple):
    """A pipeline as the cluster lists it."""

    name: str
    kind: str
    settings: Mapping[str, Any]
    revision: int
    is_wanted: bool = True
    """False if it is paused or being deleted."""
    holder: str = ""
    rows: int = 0
    restarts: int = 0
    created_by: str = ""


class ClaimGrant(NamedTuple):
    """A claim on a pipeline."""

    claim: int = 0
    """Its number; 0: another runner has it, or the pipeline is not wanted."""
    token: str = ""
    """Lets the runner act for the pipeline's creator. Empty where calls need no permission, and for what a
    policy has made."""

    revision: int = 0
    """Of the pipeline whose creator that is. What was listed with another revision may say what another
    principal wants, and is not to be done with this token."""

    def __repr__(self) -> str:
        return f"ClaimGrant(claim={self.claim})"


class Peer(NamedTuple):
    """A live runner, this one included."""

    name: str
    kinds: frozenset[str]
    only: frozenset[str]
    claims: int

    def takes(self, listed: ListedPipeline) -> bool:
        return listed.kind in self.kinds and (not self.only or listed.name in self.only)


class RunnerLease(NamedTuple):
    """The lease of this runner, and the runners beside it."""

    lease: int
    """A new id means that all claims are lost."""
    ttl_s: float
    """Claims live this long from the moment of the request."""
    peers: Sequence[Peer]


class JobStatus(NamedTuple):
    """The status of a pipeline that a runner reports."""

    state: JobState
    rows: int = 0
    rate: float = 0.0
    lag_messages: int = UNKNOWN_LAG
    lag_seconds: float = UNKNOWN_LAG
    last_error: str = ""
    restarts: int = 0
    since_ms: int = 0
    batch: int = 0


ADDRESSES_S: Final = 2.0
"""The interval between broker listings. The runner must learn of a broker that replaces the only known one
before that one leaves, and moving its topics takes only a few seconds."""
ATTEMPT_S: Final = CALL_S / 2


class AdminCalls:
    """Calls to the admin port of any broker, for one thread."""

    def __init__(
        self, addresses: str, *, tls: Tls | None = None, token: Token | None = None, name: str = "sava runner"
    ) -> None:
        self.service = ""
        """Client addresses of the brokers, separated by commas; empty until known."""
        self._scheme = "https://" if "https://" in addresses else ""
        self._connection = Connection(addresses, token=token, tls=tls, timeout=CALL_S)
        self._known = list(self._connection.targets)
        self._turn = 0
        self._ask_addresses_at = 0.0
        self._loop = LoopThread(name)

    @property
    def admin(self) -> str:
        """Admin addresses, separated by commas: the given ones, and those found since."""
        return ",".join(f"{self._scheme}{target}" for target in self._known)

    def close(self) -> None:
        self._loop.run(self._connection.close())
        self._loop.close()

    def refresh(self) -> None:
        """List the brokers again if that is due."""
        if time.monotonic() >= self._ask_addresses_at:
            with suppress(Unavailable):
                self.look_up()

    def look_up(self) -> None:
        """List the brokers. Raises Unavailable."""
        response: brokers_pb2.ListBrokersResponse = self.ask(
            "ListBrokers", brokers_pb2.ListBrokersRequest(local=True), brokers_pb2_grpc.BrokersStub
        )
        self._ask_addresses_at = time.monotonic() + ADDRESSES_S
        there = [broker for broker in response.brokers if broker.client_addr]
        if not there:
            return  # brokers that have just started do not know each other yet
        self.service = ",".join(broker.client_addr for broker in there)
        target = self._known[self._turn]
        # The given addresses stay: they may be the only ones that are reachable from here.
        known = (*self._connection.targets, *(broker.admin_addr for broker in there), target)
        self._known = list(dict.fromkeys(known))
        self._turn = self._known.index(target)

    def ask(self, method: str, request: Any, service: Callable[[Any], Any]) -> Any:
        """Raises Unavailable, Refused."""
        deadline = time.monotonic() + CALL_S
        failure = Unavailable("no broker was asked")
        for _ in range(len(self._known)):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            attempt = left if len(self._known) == 1 else min(left, ATTEMPT_S)
            try:
                return self._loop.run(
                    self._connection.call(
                        method, request, target=self._known[self._turn], timeout=attempt, service=service
                    )
                )
            except Unavailable as error:
                failure = error
                self._turn = (self._turn + 1) % len(self._known)
        raise failure


TTL_S: Final = 10.0


class AdminRunnerControl(AdminCalls):
    """The calls of a runner, for one thread. ``kinds`` and ``only`` are what the runner takes. Raises
    Unavailable when no broker answers in time, and Refused, both of ``sava.client.errors``."""

    def __init__(
        self,
        addresses: str,
        runner: str,
        *,
        kinds: Sequence[str],
        only: Sequence[str] = (),
        tls: Tls | None = None,
        token: Token | None = None,
        ttl_s: float = TTL_S,
    ) -> None:
        super().__init__(addresses, tls=tls, token=token)
        self._runner = runner
        self._kinds = kinds
        self._only = only
        self._ttl_s = ttl_s

    def join(self) -> RunnerLease:
        request = pipelines_pb2.JoinRunnerRequest(
            runner=self._runner, ttl_ms=round(self._ttl_s * 1000), kinds=self._kinds, only=self._only
        )
        response: pipelines_pb2.JoinRunnerResponse = self._ask("JoinRunner", request)
        self.refresh()
        return RunnerLease(
            lease=response.lease,
            ttl_s=response.ttl_ms / 1000,
            peers=[
                Peer(each.runner, frozenset(each.kinds), frozenset(each.only), each.claims)
                for each in response.runners
            ],
        )

    def leave(self) -> None:
        self._ask("LeaveRunner", pipelines_pb2.LeaveRunnerRequest(runner=self._runner))

    def list(self) -> Sequence[ListedPipeline]:
        response: pipelines_pb2.ListPipelinesResponse = self._ask(
            "ListPipelines", pipelines_pb2.ListPipelinesRequest()
        )
        return [
            ListedPipeline(
                name=each.spec.name,
                kind=each.spec.kind,
                settings=json.loads(each.spec.settings),
                revision=each.revision,
                is_wanted=not each.is_paused and not each.is_deleting,
                holder=each.holder,
                rows=each.status.rows,
                restarts=each.status.restarts,
                created_by=each.created_by,
            )
            for each in response.pipelines
        ]

    def claim(self, name: str) -> ClaimGrant:
        request = pipelines_pb2.ClaimPipelineRequest(name=name, runner=self._runner)
        try:
            response: pipelines_pb2.ClaimPipelineResponse = self._ask("ClaimPipeline", request)
        except Refused as error:
            if error.code != "pipeline_unknown":
                raise
            return ClaimGrant()  # deleted since it was listed
        if not response.is_granted:
            return ClaimGrant()
        return ClaimGrant(response.claim, response.delegation, response.revision)

    def report(self, name: str, claim: int, status: JobStatus) -> pipelines_pb2.ReportPipelineResponse:
        """Whether the claim holds, and whether the pipeline is wanted."""
        request = pipelines_pb2.ReportPipelineRequest(
            name=name, runner=self._runner, claim=claim, status=_status(status)
        )
        response: pipelines_pb2.ReportPipelineResponse = self._ask("ReportPipeline", request)
        return response

    def release(self, name: str, claim: int, status: JobStatus) -> None:
        request = pipelines_pb2.ReleasePipelineRequest(
            name=name, runner=self._runner, claim=claim, status=_status(status)
        )
        self._ask("ReleasePipeline", request)

    def _ask(self, method: str, request: Any) -> Any:
        return self.ask(method, request, pipelines_pb2_grpc.PipelinesStub)


def _status(status: JobStatus) -> pipelines_pb2.PipelineStatus:
    return pipelines_pb2.PipelineStatus(**status._asdict())
