"""What the metadata store holds of pipelines.

/pipelines/{name}          PipelineRecord: what is to be done
/pipelines/{name}/claim    Claim, under the lease of the runner that does it: there as long as the runner is
/pipelines/{name}/status   Status: how far it is, by whoever did it last
/runners/{runner}          RunnerRecord, under the runner's lease

The number of a claim is the revision at which it was written: a later claim has a larger one, and nobody has
to count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

import msgspec

from sava.metadata.commands import KeyValue
from sava.metadata.store import LocalView, RangeResult
from sava.topics import specs

PIPELINES: Final = "/pipelines/"
RUNNERS: Final = "/runners/"
UNKNOWN_LAG: Final = -1


def pipeline_key(name: str) -> str:
    return f"{PIPELINES}{name}"


def claim_key(name: str) -> str:
    return f"{PIPELINES}{name}/claim"


def status_key(name: str) -> str:
    return f"{PIPELINES}{name}/status"


def runner_key(runner: str) -> str:
    return f"{RUNNERS}{runner}"


class PipelineState(StrEnum):
    WAITING = "waiting"
    """For a runner."""
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    FAILING = "failing"
    """It has ended with an error, and is tried again."""
    STOPPED = "stopped"
    """By its runner, which has let go of it, or is about to."""
    DELETING = "deleting"
    """Gone as soon as its runner has stopped it."""


class PipelineRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    kind: str
    settings: dict[str, Any] = {}
    """The kind's own."""
    made_by: str = ""
    """Which policy has made it; empty: a person."""
    is_paused: bool = False
    is_deleting: bool = False
    """It is written so, under the lease of the claim, while a runner has it."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    runner: str


class RunnerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    kinds: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    """Pipelines that it takes; empty: all."""
    since_ms: int = 0


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    state: PipelineState = PipelineState.WAITING
    runner: str = ""
    claim: int = 0
    rows: int = 0
    """Since it was made, by all runners."""
    rate: float = 0.0
    lag_messages: int = UNKNOWN_LAG
    lag_seconds: float = UNKNOWN_LAG
    last_error: str = ""
    restarts: int = 0
    since_ms: int = 0
    """In this state."""
    reported_ms: int = 0
    batch: int = 0


class HeldClaim(NamedTuple):
    """A claim that somebody has."""

    runner: str
    number: int
    lease: int


class Pipeline(NamedTuple):
    """As it was read."""

    name: str
    record: PipelineRecord
    revision: int
    """Grows with every change of the record."""
    claim: HeldClaim | None
    reported: PipelineStatus

    @property
    def status(self) -> PipelineStatus:
        """Without a runner nothing moves, whatever was reported last, and how far behind it is by now is not
        known."""
        if self.record.is_deleting:
            return msgspec.structs.replace(self.reported, state=PipelineState.DELETING)
        if self.claim is not None and self.reported.claim == self.claim.number:
            return self.reported
        state = PipelineState.PAUSED if self.record.is_paused else PipelineState.WAITING
        if self.claim is not None:
            state = PipelineState.STARTING
        return msgspec.structs.replace(
            self.reported,
            state=state,
            runner=self.claim.runner if self.claim is not None else "",
            claim=self.claim.number if self.claim is not None else 0,
            rate=0.0,
            lag_messages=UNKNOWN_LAG,
            lag_seconds=UNKNOWN_LAG,
        )


class Runner(NamedTuple):
    """One that is there."""

    name: str
    record: RunnerRecord
    claims: int


def pipeline_of(local: LocalView, name: str) -> Pipeline | None:
    """As this node knows it. Raises RecordCorrupt."""
    kv = local.get(pipeline_key(name))
    return _pipeline(kv, local.get(claim_key(name)), local.get(status_key(name))) if kv is not None else None


def pipelines_of(found: RangeResult) -> list[Pipeline]:
    """Of everything below PIPELINES, in the order of their names. Raises RecordCorrupt."""
    by_key = {kv.key: kv for kv in found.kvs}
    return [
        _pipeline(kv, by_key.get(claim_key(name)), by_key.get(status_key(name)))
        for key, kv in sorted(by_key.items())
        if "/" not in (name := key.removeprefix(PIPELINES))
    ]


def _pipeline(kv: KeyValue, claim: KeyValue | None, status: KeyValue | None) -> Pipeline:
    held = None
    if claim is not None:
        held = HeldClaim(specs.decode(claim, Claim).runner, claim.mod_revision, claim.lease)
    return Pipeline(
        name=kv.key.removeprefix(PIPELINES),
        record=specs.decode(kv, PipelineRecord),
        revision=kv.mod_revision,
        claim=held,
        reported=specs.decode(status, PipelineStatus) if status is not None else PipelineStatus(),
    )


def runners_of(found: RangeResult, pipelines: Sequence[Pipeline]) -> list[Runner]:
    """Of everything below RUNNERS."""
    return [
        Runner(
            name=(name := kv.key.removeprefix(RUNNERS)),
            record=specs.decode(kv, RunnerRecord),
            claims=sum(each.claim is not None and each.claim.runner == name for each in pipelines),
        )
        for kv in found.kvs
    ]


def now_ms() -> int:
    return time.time_ns() // 1_000_000
