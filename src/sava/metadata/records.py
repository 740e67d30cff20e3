"""Typed records in the metadata store, and the one way to change them: read, decide, compare and swap.

    async def decide(found: Versioned[BrokerMode]) -> RecordChange[BrokerMode] | None:
        if found.value is not None and found.value.mode is wanted:
            return None                                    # nothing to do
        return RecordChange(BrokerMode(mode=wanted), conditions=(present(registration_key(broker)),))

    updated = await records.update(mode_key(broker), BrokerMode, decide)

``decide`` sees the record as it is, and names a goal rather than a step: it sets, it does not add to, because
after a lost answer it may be asked once more (``is_in_doubt`` says so, for what can only be a step). It
refuses by raising. Everything that it reads besides the record, and that must still hold when the record is
written, goes into ``conditions``.

**One rule for unknown outcomes.** When the answer to a write is lost, ``update`` reads the record back before
it decides again, and compares it with what it tried to write:

=================================================  ==========================================================
The record …                                       means that the write
=================================================  ==========================================================
is as it was before                                may take effect yet. The next attempt has the same
                                                   condition, so that at most one of them does.
holds what was written, under the same lease and   took effect: ``update`` returns.
with the same operations
was changed once since, to something else          never will take effect: it is forgotten.
was changed in another way                         cannot take effect any more, but may have, below a later
                                                   change. ``decide`` sees what there is now.
=================================================  ==========================================================

As long as a write may have taken effect, no error says that it did not: whatever goes wrong then (no answer
to a read, a refusal of ``decide``, too many conflicts) reaches the caller as ``OutcomeUnknown``.

Values are JSON, so that ``sava meta get`` shows an operator what is there.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

import msgspec

from sava.errors import HostError, Outcome, RetryableError, SavaError
from sava.metadata.commands import Compare, Delete, DeletePrefix, KeyValue, Operation, Put, Relation, Target
from sava.metadata.errors import OutcomeUnknown
from sava.metadata.store import DEFAULT_TIMEOUT_S, MetadataStore
from sava.tasks import Backoff

T = TypeVar("T", bound=msgspec.Struct)

ATTEMPTS: Final = 8
FIRST_PAUSE_S: Final = 0.005
LONGEST_PAUSE_S: Final = 0.2


class RecordCorrupt(HostError):
    """A record in the metadata store cannot be read. Nothing takes its place: an operator must look at it."""


class RecordBusy(RetryableError):
    """The record changed under every attempt to change it. Nothing was done."""


# -- conditions of transactions ------------------------------------------------------------------------------


def absent(key: str) -> Compare:
    return Compare(key, Target.VERSION, Relation.EQUAL, 0)


def present(key: str) -> Compare:
    return Compare(key, Target.VERSION, Relation.GREATER, 0)


def unchanged(key: str, revision: int) -> Compare:
    """Since it had this ``mod_revision``; 0: since it was absent."""
    return Compare(key, Target.MOD_REVISION, Relation.EQUAL, revision)


# -- records -------------------------------------------------------------------------------------------------


def encode(record: msgspec.Struct) -> bytes:
    return msgspec.json.encode(record)


def decode(kv: KeyValue, kind: type[T]) -> T:
    """Raises RecordCorrupt."""
    try:
        return msgspec.json.decode(kv.value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordCorrupt(f"the record {kv.key} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Versioned(Generic[T]):
    """A record and the revision of its last change; empty (None, 0) when there is none."""

    key: str
    value: T | None
    kv: KeyValue | None = None
    is_in_doubt: bool = False
    """In an update: an earlier attempt of it may have taken effect, below what is here now."""

    @property
    def revision(self) -> int:
        return self.kv.mod_revision if self.kv is not None else 0

    @property
    def lease(self) -> int:
        return self.kv.lease if self.kv is not None else 0

    @property
    def unchanged(self) -> Compare:
        """The condition that the record was neither written nor deleted since."""
        return unchanged(self.key, self.revision)


@dataclass(frozen=True, slots=True)
class RecordChange(Generic[T]):
    """What ``decide`` wants written, in one transaction."""

    value: T | None
    """None: delete the record."""
    operations: Sequence[Operation] = ()
    """On other keys."""
    conditions: Sequence[Compare] = ()
    """Beside the one that the record is unchanged."""
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Updated(Generic[T]):
    """How the record stands after an update."""

    value: T | None
    revision: int
    """Of its last change; after a deletion, of the deletion (0 when only a read showed it)."""
    lease: int
    is_changed: bool
    """False: ``decide`` had nothing to do."""


Decide = Callable[[Versioned[T]], "Awaitable[RecordChange[T] | None] | RecordChange[T] | None"]


class RecordStore:
    """Holds nothing between calls."""

    def __init__(self, store: MetadataStore, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """``timeout``: of each read and each write."""
        self.store = store
        self._timeout = timeout

    async def get(self, key: str, kind: type[T]) -> Versioned[T]:
        """The record as of now (linearizable). Raises RecordCorrupt and what the store raises."""
        return _versioned(key, await self.store.get(key, timeout=self._timeout), kind)

    def known(self, key: str, kind: type[T]) -> Versioned[T]:
        """The record as this node knows it. Raises RecordCorrupt."""
        return _versioned(key, self.store.local.get(key), kind)

    async def update(
        self,
        key: str,
        kind: type[T],
        decide: Decide[T],
        *,
        what: str = "",
        on_refused: Callable[[], Awaitable[None]] | None = None,
        conclusive: tuple[type[SavaError], ...] = (),
        fence_term: int = 0,
        batched: bool = False,
        repairs: bool = False,
    ) -> Updated[T]:
        """Change the record to what ``decide`` wants; see the text of this module.

        ``what`` names the record in errors (default: its key). ``on_refused`` is called after a write that
        was refused although the record is unchanged, so one of the other conditions failed: it raises which,
        or returns to have ``decide`` try again. ``conclusive`` are errors that hold whatever became of
        earlier attempts (the caller is fenced): they are raised as they are. ``fence_term`` and ``batched``:
        see ``MetadataStore.txn``. ``repairs``: a record that cannot be read is shown to ``decide`` without a
        value (its ``kv`` is there), so that it can be replaced; otherwise it is an error.

        Raises what ``decide`` and ``on_refused`` raise, RecordBusy, RecordCorrupt, OutcomeUnknown, and what
        the store raises."""
        attempts = _Attempts[T](key, what or key)
        refused: int | None = None
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        for number in range(ATTEMPTS):
            if number:
                await backoff.pause()  # rivals that lost to the same winner do not try again together
            try:
                kv = await self.store.get(key, timeout=self._timeout)
                found = _versioned(key, kv, kind, repairs=repairs)
                applied = await self._find_applied(attempts, found)
                if applied is not None:
                    return Updated(applied.value, found.revision, found.lease, is_changed=True)
                if found.revision == refused and on_refused is not None:
                    await on_refused()
                decision = decide(replace(found, is_in_doubt=attempts.is_in_doubt))
                change = await decision if inspect.isawaitable(decision) else decision
            except SavaError as error:
                attempts.check_doubt(error, conclusive)
                raise
            if change is None and attempts.open:
                continue  # decide may have seen more than this record, which is read again
            if change is None:
                return Updated(found.value, found.revision, found.lease, is_changed=False)
            write = Delete(key) if change.value is None else Put(key, encode(change.value), change.lease)
            try:
                result = await self.store.txn(
                    (found.unchanged, *change.conditions),
                    (write, *change.operations),
                    fence_term=fence_term,
                    batched=batched,
                    timeout=self._timeout,
                )
            except (SavaError, TimeoutError) as error:
                if isinstance(error, SavaError) and error.outcome is not Outcome.UNKNOWN:
                    attempts.check_doubt(error, conclusive)
                    raise
                attempts.lost_answer(found, change, error)
                continue
            if result.succeeded:
                return Updated(change.value, result.revision, change.lease, is_changed=True)
            refused = found.revision
        if attempts.is_in_doubt:
            raise attempts.unknown()
        raise RecordBusy(f"{attempts.what} changed under {ATTEMPTS} attempts to change it")

    async def _find_applied(self, attempts: _Attempts[T], found: Versioned[T]) -> RecordChange[T] | None:
        """The write without an answer that turns out to have taken effect. Closes those that cannot."""
        if not attempts.open or found.revision == attempts.revision:
            return None
        for change in attempts.open:
            wanted = encode(change.value) if change.value is not None else None
            is_same = wanted == (found.kv.value if found.kv is not None else None)
            if (
                is_same
                and found.lease == change.lease
                and await self._are_applied(change.operations, found.revision)
            ):
                return change
        attempts.close(found)
        return None

    async def _are_applied(self, operations: Sequence[Operation], revision: int) -> bool:
        """Whether the keys are as these operations left them, at that revision. Another writer can have
        written the same record, with other operations beside it."""
        for operation in operations:
            match operation:
                case Put(key, value):
                    kv = await self.store.get(key, timeout=self._timeout)
                    if kv is None or kv.value != value or (revision and kv.mod_revision != revision):
                        return False
                case Delete(key):
                    if await self.store.get(key, timeout=self._timeout) is not None:
                        return False
                case DeletePrefix(prefix):
                    if (await self.store.range(prefix, limit=1, timeout=self._timeout)).kvs:
                        return False
                case _:
                    return False
        return True


class _Attempts(Generic[T]):
    """The writes of one update whose answers were lost."""

    def __init__(self, key: str, what: str) -> None:
        self.what = what
        self.open: list[RecordChange[T]] = []
        """May take effect yet, or have. All have the condition that the record is as in ``_before``."""
        self._before: Versioned[T] = Versioned(key, None)
        self._cause: BaseException | None = None
        self.is_in_doubt = False
        """A write may have taken effect, or may yet."""
        self._stays_in_doubt = False
        """One that is closed may have, below a later change."""

    @property
    def revision(self) -> int:
        return self._before.revision

    def lost_answer(self, before: Versioned[T], change: RecordChange[T], cause: BaseException) -> None:
        self._before, self._cause = before, cause
        self.open.append(change)
        self.is_in_doubt = True

    def close(self, found: Versioned[T]) -> None:
        """None of those that are open can take effect any more: the record has changed. That none of them
        did is certain if it changed once."""
        before, after = self._before.kv, found.kv
        changed_once = (
            before is not None
            and after is not None
            and after.create_revision == before.create_revision
            and after.version == before.version + 1
        )
        self.open.clear()
        self._stays_in_doubt = self._stays_in_doubt or not changed_once
        self.is_in_doubt = self._stays_in_doubt

    def check_doubt(self, error: SavaError, conclusive: tuple[type[SavaError], ...]) -> None:
        """Raises OutcomeUnknown in the place of an error that would say that nothing was done."""
        if self.is_in_doubt and not isinstance(error, conclusive):
            raise self.unknown() from error

    def unknown(self) -> OutcomeUnknown:
        return OutcomeUnknown(f"{self.what} may or may not have been changed: {self._cause}")


def _versioned(key: str, kv: KeyValue | None, kind: type[T], *, repairs: bool = False) -> Versioned[T]:
    if kv is None:
        return Versioned(key, None)
    try:
        return Versioned(key, decode(kv, kind), kv)
    except RecordCorrupt:
        if not repairs:
            raise
        return Versioned(key, None, kv)
