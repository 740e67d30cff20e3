"""A cluster, kinds and a clock that do what they are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sava.client.errors import Refused, Unavailable
from sava.pipeline.runner.allowing import NotAllowed
from sava.pipeline.runner.control import (
    AdminRunnerControl,
    ClaimGrant,
    JobStatus,
    ListedPipeline,
    Peer,
    RunnerLease,
)
from sava.pipeline.runner.kinds import JobProgress, PipelineJob, PipelineKind, SettingsInvalid
from sava.pipeline.runner.runner import PipelineRunner
from sava.proto import pipelines_pb2 as pb

TTL_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeJob(PipelineJob):
    """``stubborn``: does not stop. ``batch``: what is asked to stop after the batch waits for ``finish``."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self.name, self.settings = name, settings
        self.shown = JobProgress(is_running=True, has_worked=True)
        self.ended: str | None = None
        self.stops: list[bool] = []
        self.is_stubborn = False
        self.in_batch = False

    @property
    def progress(self) -> JobProgress:
        return self.shown

    @property
    def end(self) -> str | None:
        return self.ended

    def stop(self, *, now: bool) -> None:
        self.stops.append(now)
        if not self.is_stubborn and (now or not self.in_batch):
            self.ended = ""

    def finish(self) -> None:
        self.in_batch = False
        if self.stops and not self.is_stubborn:
            self.ended = ""


class FakeKind(PipelineKind):
    def __init__(self) -> None:
        self.jobs: list[FakeJob] = []
        self.tokens: list[str] = []
        """With which jobs were started."""
        self.prepare: Callable[[FakeJob], None] = lambda job: None

    def start(self, name: str, settings: Mapping[str, Any], token: str) -> PipelineJob:
        if "wrong" in settings:
            raise SettingsInvalid("wrong settings")
        if "forbidden" in settings:
            raise NotAllowed("function os:system", "its operator can allow it with --allow-function")
        self.tokens.append(token)
        job = FakeJob(name, settings)
        self.prepare(job)
        self.jobs.append(job)
        return job

    @property
    def running(self) -> list[FakeJob]:
        return [job for job in self.jobs if job.ended is None]


@dataclass
class Record:
    listed: ListedPipeline
    claim: int = 0
    status: JobStatus | None = None


class Cluster:
    """By the rules of the real one: a runner that is not heard for a TTL loses everything."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.records: dict[str, Record] = {}
        self.heard: dict[str, float] = {}
        self.leases: dict[str, int] = {}
        self.only: dict[str, frozenset[str]] = {}
        self.kinds: dict[str, frozenset[str]] = {}
        self.revision = 0

    def apply(self, name: str, *, by: str = "user:ann", **settings: Any) -> None:
        listed = ListedPipeline(name, "fake", settings, self._next(), created_by=by)
        if name in self.records:
            old = self.records[name].listed
            listed = listed._replace(holder=old.holder, is_wanted=old.is_wanted)
            self.records[name].listed = listed
        else:
            self.records[name] = Record(listed)

    def change(self, name: str, **changes: Any) -> None:
        record = self.records[name]
        record.listed = record.listed._replace(**changes, revision=self._next())

    def expire(self) -> None:
        for runner in [name for name, at in self.heard.items() if self.clock.now >= at + TTL_S]:
            self.drop(runner)

    def drop(self, runner: str) -> None:
        self.heard.pop(runner, None)
        self.leases.pop(runner, None)
        for record in self.records.values():
            if record.listed.holder == runner:
                record.listed, record.claim = record.listed._replace(holder=""), 0

    def holders(self) -> dict[str, str]:
        return {name: record.listed.holder for name, record in self.records.items()}

    def status(self, name: str) -> JobStatus:
        status = self.records[name].status
        assert status is not None
        return status

    def _next(self) -> int:
        self.revision += 1
        return self.revision


@dataclass
class FakeControl(AdminRunnerControl):
    cluster: Cluster
    runner: str
    only: frozenset[str] = frozenset()
    is_reachable: bool = True
    call_s: float = 0.0
    """So long each call takes."""
    calls: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    """Calls whose next answer is lost."""

    def _call(self, what: str) -> None:
        self.calls.append(what)
        self.cluster.clock.now += self.call_s
        if not self.is_reachable:
            raise Unavailable("nobody answers")
        self.cluster.expire()

    def _answer(self, what: str) -> None:
        if what in self.lost:
            self.lost.discard(what)
            raise Unavailable("the answer was lost")

    def join(self) -> RunnerLease:
        self._call("join")
        cluster = self.cluster
        cluster.heard[self.runner] = cluster.clock.now - self.call_s
        if self.runner not in cluster.leases:
            cluster.leases[self.runner] = cluster._next()
        cluster.only[self.runner] = self.only
        peers = [
            Peer(
                name,
                cluster.kinds.get(name, frozenset({"fake"})),
                cluster.only[name],
                list(cluster.holders().values()).count(name),
            )
            for name in cluster.heard
        ]
        return RunnerLease(cluster.leases[self.runner], TTL_S, peers)

    def leave(self) -> None:
        self._call("leave")
        self.cluster.drop(self.runner)

    def list(self) -> Sequence[ListedPipeline]:
        self._call("list")
        return [record.listed for _, record in sorted(self.cluster.records.items())]

    def claim(self, name: str) -> ClaimGrant:
        self._call("claim")
        record = self.cluster.records[name]
        if self.runner not in self.cluster.leases:
            raise Refused("join first", "runner_unknown")
        if record.listed.holder not in ("", self.runner) or not record.listed.is_wanted:
            return ClaimGrant()
        if not record.listed.holder:
            record.claim = self.cluster._next()
            record.listed = record.listed._replace(holder=self.runner)
        self._answer("claim")
        return ClaimGrant(record.claim, f"for {record.listed.created_by}", record.listed.revision)

    def report(self, name: str, claim: int, status: JobStatus) -> pb.ReportPipelineResponse:
        self._call("report")
        record = self.cluster.records.get(name)
        if record is None or record.claim != claim:
            return pb.ReportPipelineResponse()
        record.status = status
        return pb.ReportPipelineResponse(
            is_held=True, is_wanted=record.listed.is_wanted, revision=record.listed.revision
        )

    def release(self, name: str, claim: int, status: JobStatus) -> None:
        self._call("release")
        record = self.cluster.records.get(name)
        if record is not None and record.claim == claim:
            record.status, record.claim = status, 0
            record.listed = record.listed._replace(
                holder="", rows=status.rows, restarts=status.restarts, revision=self.cluster._next()
            )


class Hosts:
    """Some runners of one cluster, stepped in turn with the clock between."""

    def __init__(self, *names: str, cluster: Cluster | None = None) -> None:
        self.cluster = cluster or Cluster()
        self.controls: dict[str, FakeControl] = {}
        self.kinds: dict[str, FakeKind] = {}
        self.runners: dict[str, PipelineRunner] = {}
        self.dead: set[str] = set()
        for name in names:
            self.add(name)

    def add(self, name: str, *, only: Sequence[str] = ()) -> None:
        self.controls[name] = FakeControl(self.cluster, name, frozenset(only))
        self.kinds[name] = FakeKind()
        self.runners[name] = PipelineRunner(
            name,
            self.controls[name],
            {"fake": self.kinds[name]},
            only=only,
            stuck_s=60.0,
            clock=self.cluster.clock,
        )

    def pass_time(self, seconds: float, *, every: float = 0.2) -> None:
        """Everybody acts; at every moment each pipeline is run by one at most."""
        until = self.cluster.clock.now + seconds
        while self.cluster.clock.now < until:
            self.cluster.clock.now += every
            for name, runner in self.runners.items():
                if name not in self.dead and not runner.is_done:
                    runner.step()
            self.check()

    def check(self) -> None:
        running = [
            job.name for name, kind in self.kinds.items() if name not in self.dead for job in kind.running
        ]
        assert len(running) == len(set(running)), f"run by two at once: {running}"

    def kill(self, name: str) -> None:
        """kill -9."""
        self.dead.add(name)

    def shares(self) -> dict[str, int]:
        holders = list(self.cluster.holders().values())
        return {name: holders.count(name) for name in self.runners}
