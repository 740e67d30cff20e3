"""Pipelines: work that runners do on Spark, as records that any client may change and one runner at a time
acts upon.

/pipelines/{name}          PipelineRecord: what is to be done
/pipelines/{name}/claim    Claim, under the lease of the runner that does it: there as long as the runner is
/pipelines/{name}/status   PipelineStatus: how far it is, by the runner that did it last
/runners/{runner}          RunnerRecord, under the runner's lease

The number of a claim is the revision at which it was written: a later claim has a larger one, and no counter
is needed.

**Who does it.** A runner joins under a lease and claims pipelines under the same lease: when it is not heard
of any more, all that it had is open to others at once. It knows by its own clock when that can be the
earliest (a lease lives at least one TTL from the moment at which the last sign of life was *sent*), and has
stopped everything by then.

**One lease for all claims of a runner.** With one for each, a runner that dies with a dozen pipelines would
look like a mass expiry to the leader, which holds such back for another TTL (``sava.metadata.lessor``).

**Deleting** a pipeline that a runner works on must not let another begin a successor of the same name
meanwhile:

    person   deletes    creates again                   the record is marked instead, and creating is refused
    runner   ... at work on the old one ...  stops      the release removes it

The mark is written under the lease of the claim, so that it goes with a runner that never comes back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

import msgspec

from sava.errors import CallerError, RetryableError, cut
from sava.metadata.commands import Compare, Delete, KeyValue, Put
from sava.metadata.errors import LeaseNotFound
from sava.metadata.records import RecordChange, RecordStore, Updated, Versioned, decode, encode, unchanged
from sava.metadata.store import LocalView, MetadataStore, RangeResult
from sava.topics.names import InvalidName, check_name

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
    """By its runner, which has released it, or is about to."""
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
    """A claim that a runner has."""

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
        held = HeldClaim(decode(claim, Claim).runner, claim.mod_revision, claim.lease)
    return Pipeline(
        name=kv.key.removeprefix(PIPELINES),
        record=decode(kv, PipelineRecord),
        revision=kv.mod_revision,
        claim=held,
        reported=decode(status, PipelineStatus) if status is not None else PipelineStatus(),
    )


def runners_of(found: RangeResult, pipelines: Sequence[Pipeline]) -> list[Runner]:
    """Of everything below RUNNERS."""
    return [
        Runner(
            name=(name := kv.key.removeprefix(RUNNERS)),
            record=decode(kv, RunnerRecord),
            claims=sum(each.claim is not None and each.claim.runner == name for each in pipelines),
        )
        for kv in found.kvs
    ]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# -- what is refused, by whose fault it is ----------------------------------------------------


class PipelineUnknown(CallerError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no pipeline {cut(name)}; `sava pipelines list` shows those that there are"
        )
        self.name = name


class PipelineExists(CallerError):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is a pipeline {name} already; `sava pipelines apply` changes it")
        self.name = name


class PipelineInvalid(CallerError):
    """A pipeline that cannot be; says why."""


class PipelineForeign(CallerError):
    """A policy has made it, and it comes and goes with that policy."""

    def __init__(self, name: str, made_by: str) -> None:
        maker = f"by {made_by}, and goes when that does not need it any more" if made_by else "by a person"
        super().__init__(f"pipeline {name} was made {maker}; it can be paused, but not changed or deleted")
        self.name, self.made_by = name, made_by


class PipelineStopping(RetryableError):
    """It was deleted, and its runner has not stopped it yet."""

    def __init__(self, name: str, runner: str) -> None:
        super().__init__(
            f"pipeline {name} was deleted, and runner {runner} is about to stop it; try again in a moment"
        )
        self.name, self.runner = name, runner


class RunnerUnknown(CallerError):
    """Its lease has ended, or it never had one. Everything that it had claimed is open to others."""

    def __init__(self, runner: str) -> None:
        super().__init__(f"runner {cut(runner)} is not known, or not any more; it has to join (again)")
        self.runner = runner


log = logging.getLogger(__name__)

MAX_SETTINGS_BYTES: Final = 64 << 10
MAX_ERROR_CHARACTERS: Final = 2_000
REWRITE_MS: Final = 10_000
"""A status that says nothing new is written down again after this. Idle pipelines, each reporting every
other second, would otherwise keep the log busy."""
SHORTEST_TTL_MS: Final = 1_000
LONGEST_TTL_MS: Final = 300_000


class JoinedRunner(NamedTuple):
    lease: int
    """Another one than before: what the runner had claimed is not its own any more."""
    ttl_ms: int
    runners: Sequence[Runner]


class Claimed(NamedTuple):
    is_granted: bool
    number: int
    holder: str


class Reported(NamedTuple):
    is_held: bool
    """False: the claim is not the runner's any more."""
    is_wanted: bool
    """False: it is to be stopped and released."""
    revision: int


class Pipelines:
    """Holds nothing between calls; any broker may be asked."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._records = RecordStore(store)

    # -- for people and policies ---------------------------------------------------------------

    async def list(self) -> list[Pipeline]:
        return pipelines_of(await self._store.range(PIPELINES))

    def known(self) -> Sequence[Pipeline]:
        """As this node knows it, at once."""
        return pipelines_of(self._store.local.range(PIPELINES))

    async def get(self, name: str) -> Pipeline:
        """Raises PipelineUnknown."""
        found = await self._read(name)
        if found is None:
            raise PipelineUnknown(name)
        return found

    async def apply(
        self,
        name: str,
        kind: str,
        settings: Mapping[str, Any],
        *,
        made_by: str = "",
        create_only: bool = False,
    ) -> Pipeline:
        """Create it, or change it if it is different; whether it is paused stays as it is. Raises
        PipelineExists, PipelineForeign, PipelineInvalid, PipelineStopping."""
        check_name(name, "pipeline")
        _check(kind, settings)

        def change(found: Pipeline | None) -> PipelineRecord:
            is_paused = False
            if found is not None:
                _require_changeable(found, made_by)
                if create_only:
                    raise PipelineExists(name)
                is_paused = found.record.is_paused
            return PipelineRecord(kind=kind, settings=dict(settings), made_by=made_by, is_paused=is_paused)

        if (await self._change(name, change)).is_changed:
            log.info("pipelines: applied name=%s kind=%s", name, kind)
        return await self.get(name)

    async def pause(self, name: str, *, is_paused: bool) -> Pipeline:
        """Pause or resume it. Raises PipelineUnknown, PipelineStopping."""

        def change(found: Pipeline | None) -> PipelineRecord:
            if found is None:
                raise PipelineUnknown(name)
            if found.record.is_deleting:
                raise PipelineStopping(name, _holder(found))
            return msgspec.structs.replace(found.record, is_paused=is_paused)

        await self._change(name, change)
        return await self.get(name)

    async def _change(
        self, name: str, change: Callable[[Pipeline | None], PipelineRecord]
    ) -> Updated[PipelineRecord]:
        def decide(found: Versioned[PipelineRecord]) -> RecordChange[PipelineRecord] | None:
            changed = change(self._pipeline(name, found))
            return RecordChange(changed) if changed != found.value else None

        return await self._records.update(pipeline_key(name), PipelineRecord, decide, what=f"pipeline {name}")

    def _pipeline(self, name: str, found: Versioned[PipelineRecord]) -> Pipeline | None:
        """With its claim and status, which this node knows at least as well as the record."""
        local = self._store.local
        if found.kv is None:
            return None
        return _pipeline(found.kv, local.get(claim_key(name)), local.get(status_key(name)))

    async def delete(self, name: str, *, made_by: str = "") -> bool:
        """Whether it is gone; if not, it will be when its runner has stopped it. Raises PipelineUnknown,
        PipelineForeign."""
        if not _is_possible(name):
            raise PipelineUnknown(name)

        def decide(record: Versioned[PipelineRecord]) -> RecordChange[PipelineRecord] | None:
            found = self._pipeline(name, record)
            if found is None and record.is_in_doubt:
                return None  # marked, and its runner has removed it
            if found is None:
                raise PipelineUnknown(name)
            if found.record.is_deleting:
                return None
            if found.record.made_by != made_by:
                raise PipelineForeign(name, found.record.made_by)
            conditions = (_same_claim(found),)
            if found.claim is None:
                return RecordChange(None, (Delete(status_key(name)),), conditions)
            marked = msgspec.structs.replace(found.record, is_deleting=True)
            return RecordChange(marked, (Delete(status_key(name)),), conditions, found.claim.lease)

        try:
            updated = await self._records.update(
                pipeline_key(name), PipelineRecord, decide, what=f"pipeline {name}"
            )
        except LeaseNotFound:
            return await self.delete(name, made_by=made_by)  # with the lease went the claim
        if updated.is_changed:
            log.info("pipelines: deleted name=%s", name)
        return updated.value is None

    # -- for runners ---------------------------------------------------------------------------

    async def join(self, runner: str, record: RunnerRecord, *, ttl_ms: int) -> JoinedRunner:
        """A sign of life, the first or the next one."""
        check_name(runner, "runner")
        if not SHORTEST_TTL_MS <= ttl_ms <= LONGEST_TTL_MS:
            raise PipelineInvalid(
                f"runner {runner}: claims last from {SHORTEST_TTL_MS} to {LONGEST_TTL_MS} ms, not {ttl_ms}"
            )
        lease, ttl_ms = await self._renew(runner, record, ttl_ms)
        found = await self._store.range(RUNNERS)
        return JoinedRunner(lease, ttl_ms, runners_of(found, self.known()))

    async def _renew(self, runner: str, record: RunnerRecord, ttl_ms: int) -> tuple[int, int]:
        async def join(found: Versioned[RunnerRecord]) -> RecordChange[RunnerRecord] | None:
            if found.value is not None:
                return None
            joined = msgspec.structs.replace(record, since_ms=now_ms())
            return RecordChange(joined, lease=await self._store.grant_lease(ttl_ms))

        while True:
            updated = await self._records.update(
                runner_key(runner), RunnerRecord, join, what=f"runner {runner}"
            )
            if updated.is_changed:
                log.info("pipelines: a runner has joined runner=%s lease=%d", runner, updated.lease)
                return updated.lease, ttl_ms
            try:
                return updated.lease, await self._store.keep_alive(updated.lease)
            except LeaseNotFound:
                pass  # and with it went the record

    async def leave(self, runner: str) -> None:
        """All its claims are open at once."""
        kv = await self._store.get(runner_key(check_name(runner, "runner")))
        if kv is None:
            return
        try:
            await self._store.revoke_lease(kv.lease)
        except LeaseNotFound:
            return
        log.info("pipelines: a runner has left runner=%s", runner)

    async def runners(self) -> Sequence[Runner]:
        found = await self._store.range(RUNNERS)
        return runners_of(found, self.known())

    async def claim(self, name: str, runner: str) -> Claimed:
        """Granted too when it is this runner's already. Raises RunnerUnknown, PipelineUnknown."""

        async def decide(claim: Versioned[Claim]) -> RecordChange[Claim] | None:
            found = await self.get(name)
            if claim.value is not None or found.record.is_paused or found.record.is_deleting:
                return None
            owner = await self._records.get(runner_key(runner), RunnerRecord)
            if owner.value is None:
                raise RunnerUnknown(runner)
            conditions = (unchanged(pipeline_key(name), found.revision), owner.unchanged)
            return RecordChange(Claim(runner=runner), conditions=conditions, lease=owner.lease)

        if not _is_possible(name):
            raise PipelineUnknown(name)
        try:
            claimed = await self._records.update(
                claim_key(name), Claim, decide, what=f"the claim of pipeline {name}"
            )
        except LeaseNotFound:
            raise RunnerUnknown(runner) from None
        if claimed.value is None:
            return Claimed(False, 0, "")
        if claimed.is_changed:
            log.info("pipelines: claimed name=%s runner=%s claim=%d", name, runner, claimed.revision)
        holder = claimed.value.runner
        return Claimed(holder == runner, claimed.revision, holder)

    async def report(self, name: str, runner: str, claim: int, status: PipelineStatus) -> Reported:
        found = await self._read(name)
        if found is None or not _is_held(found, runner, claim):
            return Reported(False, False, 0)
        is_wanted = not found.record.is_paused and not found.record.is_deleting
        stamped = _stamped(status, runner, claim)
        if not found.record.is_deleting and _is_news(found.reported, stamped):
            conditions = (unchanged(claim_key(name), claim),)
            if not (await self._store.txn(conditions, (Put(status_key(name), encode(stamped)),))).succeeded:
                return Reported(False, False, 0)
        return Reported(True, is_wanted, found.revision)

    async def release(self, name: str, runner: str, claim: int, status: PipelineStatus) -> None:
        """Nothing of it runs any more. Repeating it is harmless."""

        def decide(held: Versioned[Claim]) -> RecordChange[Claim] | None:
            found = pipeline_of(self._store.local, name)
            if found is None or not _is_held(found, runner, claim):
                return None
            conditions = (unchanged(pipeline_key(name), found.revision),)
            if found.record.is_deleting:
                return RecordChange(None, (Delete(pipeline_key(name)), Delete(status_key(name))), conditions)
            stamped = encode(_stamped(status, runner, claim))
            return RecordChange(None, (Put(status_key(name), stamped),), conditions)

        if not _is_possible(name):
            return
        what = f"the claim of pipeline {name}"
        if (await self._records.update(claim_key(name), Claim, decide, what=what)).is_changed:
            log.info("pipelines: released name=%s runner=%s claim=%d", name, runner, claim)

    # -- records -------------------------------------------------------------------------------

    async def _read(self, name: str) -> Pipeline | None:
        if not _is_possible(name):
            return None
        await self._store.get(pipeline_key(name))  # from here on this node knows at least as much
        return pipeline_of(self._store.local, name)


def _is_possible(name: str) -> bool:
    """No other name was ever accepted."""
    try:
        check_name(name, "pipeline")
    except InvalidName:
        return False
    return True


def _same_claim(found: Pipeline) -> Compare:
    return unchanged(claim_key(found.name), found.claim.number if found.claim is not None else 0)


def _check(kind: str, settings: Mapping[str, Any]) -> None:
    check_name(kind, "pipeline kind")
    size = len(msgspec.json.encode(settings))
    if size > MAX_SETTINGS_BYTES:
        raise PipelineInvalid(f"settings of {size} bytes; {MAX_SETTINGS_BYTES} are possible")


def _require_changeable(found: Pipeline, made_by: str) -> None:
    if found.record.is_deleting:
        raise PipelineStopping(found.name, _holder(found))
    if found.record.made_by != made_by:
        raise PipelineForeign(found.name, found.record.made_by)


def _is_held(found: Pipeline, runner: str, claim: int) -> bool:
    return found.claim is not None and (found.claim.runner, found.claim.number) == (runner, claim)


def _holder(found: Pipeline) -> str:
    return found.claim.runner if found.claim is not None else "none"


def _stamped(status: PipelineStatus, runner: str, claim: int) -> PipelineStatus:
    error = status.last_error
    if len(error) > MAX_ERROR_CHARACTERS:
        error = f"{error[: MAX_ERROR_CHARACTERS - 1]}…"
    return msgspec.structs.replace(status, runner=runner, claim=claim, last_error=error, reported_ms=now_ms())


def _is_news(before: PipelineStatus, now: PipelineStatus) -> bool:
    is_same = msgspec.structs.replace(now, reported_ms=before.reported_ms) == before
    return not is_same or abs(now.reported_ms - before.reported_ms) >= REWRITE_MS
