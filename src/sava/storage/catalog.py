"""Catalog: which segments a topic has, kept in the metadata store without gaps.

A topic has one state record and one descriptor for each segment (``keys``). Every change is one transaction
that writes the state record, on the condition that it is still the one that was read:

    read the state (linearizable) -> check topic id, epoch, offsets -> transaction: if it is unchanged, write

So two changes never cross. An owner that was replaced finds an epoch above its own; two registrations cannot
overlap or leave a gap, since each must begin at the ``end`` that the same transaction moves; and descriptors
are there exactly for ``start .. end``, at every revision. Who may claim an epoch is decided elsewhere: an
owner that has a ``TenureGuard`` writes nothing once that decision was changed, even if no broker has claimed
the topic since.

**Unknown outcomes.** When the answer to a transaction is lost, the state is read again and the change is
decided again: if it took effect, the state says so and the change is done; if not, it is tried again under
the same condition, and of the two transactions at most one can succeed. When the state cannot be read either,
``OutcomeUnknown`` is what the caller gets, not the harmless error of the second read. Every change can be
repeated by the caller in the same way.

**Unknown is not empty.** Only a successful linearizable read that finds no record means 'never opened'. A
broker that took a failed read for an empty topic would give out offset 0 a second time.

**One name, several topics.** Records are kept by name, and name their topic id. What a deleted topic has left
is removed when its successor (greater id) claims the name; an owner of the deleted topic that wakes up later
gets ``TopicGone``.

Values are JSON: ``sava meta get`` shows an operator in trouble what is there, and a record is read far more
rarely than it would matter. Numbers are exact to 64 bits.

**Hold.** While a backup copies the object store, no segment is replaced or dropped.

A backup has the metadata of one moment, and objects that are copied one after the other, for hours perhaps:

    backup   metadata: segments 0..8 are a, b, c
    broker   merges them into m, deletes a, b, c
    backup   copies the objects: there is no a, and nothing says that m has its messages

The record of a hold is a condition of every transaction that would replace or drop descriptors, so that
none succeeds once it is there. What is published meanwhile is uploaded as ever: the copy has it or not, and
the metadata of before does not name it. A hold ends by itself, since the one who asked for it may be gone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from sava.errors import RetryableError
from sava.metadata.commands import Compare, Delete, Operation, Put, Relation, Target
from sava.metadata.errors import NotInitialized, OutcomeUnknown, Unavailable
from sava.metadata.store import LocalView, MetadataStore
from sava.storage import keys
from sava.storage.errors import (
    CatalogBusy,
    CatalogCorrupt,
    DataGap,
    EpochTaken,
    Fenced,
    NotClaimed,
    SegmentConflict,
    TailElsewhere,
    TopicGone,
    TopicSealed,
)
from sava.storage.producers import EpochRequest, Granted, grant
from sava.storage.source_positions import with_later_chains
from sava.storage.types import EpochTable, OriginMark, ProducerState, Segment, TopicKey, TopicState

T = TypeVar("T")

ATTEMPTS: Final = 16
"""The owner is the only writer but for retention and deletion, so conflicts are rare; an endless loop of them
is a bug."""
NO_ANSWER: Final = (Unavailable, NotInitialized)
"""The metadata store could not be asked."""
PAGE: Final = 1000
"""Descriptors read at a time."""
STEP: Final = 200
"""Descriptors removed in one transaction, below the store's limit of operations."""


class StateRecord(NamedTuple):
    """The state record as it was read; ``revision`` 0 and no state when there is none."""

    state: TopicState | None
    revision: int


class Change(NamedTuple):
    """A new state record, and what must become true with it."""

    state: TopicState
    operations: tuple[Operation, ...] = ()


class TenureGuard(Protocol):
    """Of one owner's time with a topic."""

    @property
    def holds(self) -> Compare:
        """The condition that it has not ended; asked again for each transaction."""
        ...

    async def still_holds(self) -> bool:
        """Asked when a transaction was refused: False if it has ended for good; True if it continues,
        under whatever ``holds`` is now. Raises the error that keeps it from being known."""
        ...


class Catalog:
    """One topic's descriptors and state. Holds nothing between calls, so any number of them may exist for a
    topic."""

    def __init__(self, metadata: MetadataStore, topic: TopicKey, guard: TenureGuard | None = None) -> None:
        self.topic = keys.check_topic(topic)
        self._metadata = metadata
        self._guard = guard
        self._state_key = keys.state_key(topic)

    # -- reading -----------------------------------------------------------------------------

    async def load(self) -> TopicState | None:
        """Linearizable. None: this topic has never been opened (and only that). Raises TopicGone."""
        state = (await self._read()).state
        if state is None or state.topic_id < self.topic.topic_id:
            return None
        self._check_id(state)
        return state

    async def segments(self, start: int = 0, end: int | None = None) -> list[Segment]:
        """Descriptors that overlap ``start .. end``, in order, checked for gaps (DataGap). Takes time in
        proportion to how many there are."""
        held, segments = await self._read_all()
        if held.state is None or held.state.topic_id < self.topic.topic_id:
            return []
        self._check_id(held.state)
        return [each for each in segments if each.end > start and (end is None or each.start < end)]

    # -- owning ------------------------------------------------------------------------------

    async def claim(self, *, epoch: int, storage_id: str, has_tail: bool) -> TopicState:
        """Become the owner: creates the state of a new topic, or moves it to ``epoch``. ``has_tail`` says
        that this broker's own journal holds what follows ``end`` of the epoch before (which may be nothing).
        It is believed only if the state names this journal: a broker that had the topic long ago still has a
        tail of it, and not the last one.

        A topic of which nothing exists beyond ``end`` is clean from the start: an owner that dies before
        its first message leaves nothing that a successor must wait for.

        Raises Fenced (a newer epoch), EpochTaken, TopicSealed (this epoch is over already), TailElsewhere
        (not settled and the tail is on another disk). Repeating the same claim succeeds."""

        async def decide(held: StateRecord) -> TopicState | Change:
            state = held.state
            if state is None:
                topic_id = self.topic.topic_id
                return Change(
                    TopicState(
                        topic_id=topic_id, epoch=epoch, storage_id=storage_id, sealed=False, is_clean=True
                    )
                )
            self._check_id(state)
            if state.epoch > epoch:
                raise Fenced(self.topic.path, epoch, state.epoch)
            if state.epoch == epoch:
                return self._check_same_claim(state, storage_id)
            if not state.is_settled and not (has_tail and state.storage_id == storage_id):
                raise TailElsewhere(
                    f"topic {self.topic.path}: offsets from {state.end} on are in journal {state.storage_id} "
                    f"of epoch {state.epoch} and not in this one ({storage_id}); waiting for its owner"
                )
            return Change(
                msgspec.structs.replace(
                    state, epoch=epoch, storage_id=storage_id, sealed=False, is_clean=state.is_settled
                )
            )

        await self._erase_older()
        return await self._change(decide)

    def _check_same_claim(self, state: TopicState, storage_id: str) -> TopicState:
        if state.storage_id != storage_id:
            raise EpochTaken(self.topic.path, state.epoch, state.storage_id)
        if state.sealed:
            raise TopicSealed(f"topic {self.topic.path}: epoch {state.epoch} is sealed at {state.end}")
        return state

    async def register(
        self,
        segment: Segment,
        *,
        epoch: int,
        producers: Sequence[ProducerState],
        origins: Sequence[OriginMark],
        seals: bool = False,
    ) -> TopicState:
        """Append a verified segment: ``segment.start`` must be ``state.end``. What is said of producers and
        origins is as of its end. Repeating the same registration succeeds. Chains do not go back (see
        ``with_later_chains``). ``seals``: nothing exists beyond it; the same as ``seal`` afterwards, in one
        transaction.

        Raises Fenced, TopicSealed, DataGap (it begins later, or more follows one that seals), SegmentConflict
        (it begins earlier, with other content)."""
        if segment.topic_id != self.topic.topic_id or segment.epoch != epoch or segment.start >= segment.end:
            raise ValueError(f"a segment of another topic or epoch, or without messages: {segment}")
        key = keys.segment_key(self.topic, segment.start)

        async def decide(held: StateRecord) -> TopicState | Change:
            state = self._own(held, epoch)
            if segment.start < state.end:
                await self._check_registered(segment)
                return self._sealed(state, segment.end, producers, origins) if seals else state
            if state.sealed:
                raise TopicSealed(f"topic {self.topic.path}: epoch {epoch} is sealed at {state.end}")
            if segment.start > state.end:
                raise DataGap(
                    f"topic {self.topic.path} ends at {state.end}, and a segment begins at {segment.start}"
                )
            moved = msgspec.structs.replace(
                state,
                end=segment.end,
                producers=with_later_chains(producers, state.producers),
                origins=tuple(origins),
                is_clean=False,
                sealed=seals,
            )
            return Change(moved, (Put(key, msgspec.json.encode(segment)),))

        return await self._change(decide)

    async def replace(self, parts: Sequence[Segment], merged: Segment, *, epoch: int) -> TopicState:
        """Name one verified segment in the place of neighbours that hold the same messages. Repeating
        succeeds. Raises Fenced, StorageHeld, SegmentConflict (the topic does not have them any more; nothing
        was changed, nor will be)."""
        if (merged.start, merged.end) != (parts[0].start, parts[-1].end) or merged.epoch != epoch:
            raise ValueError(f"{merged} is no segment of epoch {epoch} for {parts[0]} to {parts[-1]}")
        first, *others = (keys.segment_key(self.topic, part.start) for part in parts)

        async def decide(held: StateRecord) -> TopicState | Change:
            state = self._own(held, epoch)
            # What the state says and what is found now are of one moment if the transaction succeeds.
            if await self._is_registered(merged):
                return state
            for part in parts:
                if not await self._is_registered(part):
                    raise SegmentConflict(
                        f"topic {self.topic.path}: {part.key} is not registered any more; "
                        f"{merged.key} cannot take its place"
                    )
            return Change(state, (Put(first, msgspec.json.encode(merged)), *map(Delete, others)))

        return await self._change(decide, unless_held=True)

    async def _is_registered(self, segment: Segment) -> bool:
        kv = await self._metadata.get(keys.segment_key(self.topic, segment.start))
        return kv is not None and decode_record(kv.key, kv.value, Segment) == segment

    async def _check_registered(self, segment: Segment) -> None:
        if not await self._is_registered(segment):
            raise SegmentConflict(
                f"topic {self.topic.path}: offsets {segment.start}..{segment.end} are registered already, "
                f"with other content than {segment.key}"
            )

    async def seal(
        self,
        *,
        epoch: int,
        end: int,
        producers: Sequence[ProducerState],
        origins: Sequence[OriginMark],
    ) -> TopicState:
        """Nothing exists beyond ``end``, which must be the registered end. Repeating succeeds. Raises Fenced,
        DataGap."""

        async def decide(held: StateRecord) -> TopicState | Change:
            return self._sealed(self._own(held, epoch), end, producers, origins)

        return await self._change(decide)

    def _sealed(
        self,
        state: TopicState,
        end: int,
        producers: Sequence[ProducerState],
        origins: Sequence[OriginMark],
    ) -> TopicState | Change:
        if state.end != end:
            raise DataGap(
                f"topic {self.topic.path} cannot be sealed at {end}: its segments end at {state.end}"
            )
        if state.sealed:
            return state
        return Change(
            msgspec.structs.replace(
                state,
                sealed=True,
                is_clean=False,
                producers=with_later_chains(producers, state.producers),
                origins=tuple(origins),
            )
        )

    async def note(
        self, *, epoch: int, end: int, producers: Sequence[ProducerState], origins: Sequence[OriginMark]
    ) -> TopicState:
        """What is known of producers and origins as of the registered end, if that is still ``end``;
        otherwise nothing is changed. Repeating succeeds. Raises Fenced."""

        async def decide(held: StateRecord) -> TopicState | Change:
            state = self._own(held, epoch)
            noted = msgspec.structs.replace(state, producers=tuple(producers), origins=tuple(origins))
            return state if state.end != end or state.sealed or noted == state else Change(noted)

        return await self._change(decide)

    async def grant_epochs(
        self, *, epoch: int, asks: Sequence[EpochRequest], in_use: Callable[[], Collection[int]]
    ) -> Granted:
        """Open producers, in the order of ``asks`` (see ``producer_epochs``). Repeating gives higher numbers
        to opens, so that no producer has a number of unknown outcome. Raises Fenced, TopicSealed."""
        granted = Granted(EpochTable(), ())

        async def decide(held: StateRecord) -> TopicState | Change:
            nonlocal granted
            state = self._own(held, epoch)
            if state.sealed:
                raise TopicSealed(f"topic {self.topic.path}: epoch {epoch} is sealed at {state.end}")
            granted = grant(state.epochs, asks, in_use())
            if granted.table == state.epochs:
                return state
            return Change(msgspec.structs.replace(state, epochs=granted.table))

        await self._change(decide)
        return granted

    async def mark_clean(self, *, epoch: int) -> TopicState:
        """Nothing exists beyond the registered end, and nothing will before ``mark_dirty``: the caller sees
        to both. Repeating succeeds. Raises Fenced."""

        async def decide(held: StateRecord) -> TopicState | Change:
            state = self._own(held, epoch)
            return state if state.is_settled else Change(msgspec.structs.replace(state, is_clean=True))

        return await self._change(decide)

    async def mark_dirty(self, *, epoch: int) -> TopicState:
        """Messages may follow. Raises Fenced, TopicSealed.

        Writes, whatever the record says: a ``mark_clean`` of unknown outcome may still be on its way, and
        finds the record changed then."""

        async def decide(held: StateRecord) -> TopicState | Change:
            state = self._own(held, epoch)
            if state.sealed:
                raise TopicSealed(f"topic {self.topic.path}: epoch {epoch} is sealed at {state.end}")
            return Change(msgspec.structs.replace(state, is_clean=False))

        return await self._change(decide)

    # -- removing ----------------------------------------------------------------------------

    async def drop(self, *, epoch: int, before: int) -> list[Segment]:
        """Retention: remove the descriptors of whole segments that end at or before ``before`` and move
        ``start``; returns them so that the objects can be deleted afterwards (descriptors first: a reader
        never finds a descriptor without its object for long, and a crash in between leaves an orphan, not a
        hole). Raises Fenced, StorageHeld."""

        def choose(held: StateRecord, segments: list[Segment]) -> list[Segment]:
            self._own(held, epoch)
            return [segment for segment in segments if segment.end <= before]

        return await self._remove(choose, with_state=False, unless_held=True)

    async def delete_all(self) -> list[Segment]:
        """The topic is deleted: all descriptors and the state, in bounded steps, each of which leaves a
        catalog without gaps. A repetition continues where it stopped (what was removed before is not returned
        again: see ``orphans``)."""
        return await self._erase(self.topic.topic_id)

    async def _erase_older(self) -> None:
        """Make room for this topic where a deleted one of the same name has left its records."""
        state = (await self._read()).state
        if state is not None and state.topic_id < self.topic.topic_id:
            await self._erase(state.topic_id)

    async def _erase(self, topic_id: int) -> list[Segment]:
        def choose(held: StateRecord, segments: list[Segment]) -> list[Segment] | None:
            if held.state is None or held.state.topic_id != topic_id:
                return None
            return segments

        return await self._remove(choose, with_state=True)

    async def _remove(
        self,
        choose: Callable[[StateRecord, list[Segment]], list[Segment] | None],
        *,
        with_state: bool,
        unless_held: bool = False,
    ) -> list[Segment]:
        """Remove the chosen descriptors, which are the oldest ones, from the front; at last the state record,
        if it goes too. ``choose`` returns None when there is nothing left to do."""
        attempted: dict[str, Segment] = {}
        unknown: OutcomeUnknown | None = None
        refused: int | None = None
        for _ in range(ATTEMPTS):
            held, segments = await _after(unknown, self._read_all())
            chosen = choose(held, segments)
            if chosen is None or (not chosen and not with_state):
                still_there = {segment.key for segment in segments}
                return [segment for key, segment in attempted.items() if key not in still_there]
            if held.revision == refused:
                await _after(unknown, self._check_others(unless_held))
            attempted.update((segment.key, segment) for segment in chosen)
            try:
                refused = await _after(
                    unknown,
                    self._remove_in_steps(held, chosen, with_state=with_state, unless_held=unless_held),
                )
            except OutcomeUnknown as error:
                unknown = error
        raise unknown or self._busy()

    async def _remove_in_steps(
        self, held: StateRecord, chosen: list[Segment], *, with_state: bool, unless_held: bool
    ) -> int | None:
        """Stops at the first step that is refused; returns the revision of the state that it found."""
        state, revision = held
        assert state is not None
        for index in range(0, len(chosen), STEP) or (0,):
            step = chosen[index : index + STEP]
            operations: list[Operation] = [
                Delete(keys.segment_key(self.topic, segment.start)) for segment in step
            ]
            if with_state and index + STEP >= len(chosen):
                operations.append(Delete(self._state_key))
            else:
                state = msgspec.structs.replace(state, start=step[-1].end)
                operations.append(Put(self._state_key, msgspec.json.encode(state)))
            result = await self._metadata.txn(self._conditions(revision, unless_held), operations)
            if not result.succeeded:
                return revision
            revision = result.revision
        return None

    # -- the way of every change ---------------------------------------------------------------

    async def _change(
        self, decide: Callable[[StateRecord], Awaitable[TopicState | Change]], *, unless_held: bool = False
    ) -> TopicState:
        """``decide`` sees the state and returns it when there is nothing (more) to do, or what to change, or
        raises."""
        unknown: OutcomeUnknown | None = None
        refused: int | None = None
        for _ in range(ATTEMPTS):
            held = await _after(unknown, self._read())
            decision = await _after(unknown, decide(held))
            if isinstance(decision, TopicState):
                return decision
            if held.revision == refused:
                await _after(unknown, self._check_others(unless_held))
            put = Put(self._state_key, msgspec.json.encode(decision.state))
            try:
                result = await _after(
                    unknown,
                    self._metadata.txn(
                        self._conditions(held.revision, unless_held),
                        (put, *decision.operations),
                        batched=True,
                    ),
                )
            except OutcomeUnknown as error:
                unknown = error
                continue
            if result.succeeded:
                return decision.state
            refused = held.revision
        raise unknown or self._busy()

    def _conditions(self, revision: int, unless_held: bool) -> tuple[Compare, ...]:
        """That the state is the one that was read, its owner the owner, and that segments may go."""
        unchanged = Compare(self._state_key, Target.MOD_REVISION, Relation.EQUAL, revision)
        owned = () if self._guard is None else (self._guard.holds,)
        return (unchanged, *owned, NOT_HELD) if unless_held else (unchanged, *owned)

    async def _check_others(self, unless_held: bool) -> None:
        """A transaction was refused although the state is as it was read, so another condition did not hold.
        Raises Fenced if the guard's never will again, which holds for earlier transactions of unknown outcome
        too; StorageHeld."""
        if self._guard is not None and not await self._guard.still_holds():
            raise Fenced(self.topic.path, 0, 0, "it has another owner by now")
        if unless_held:
            await check_not_held(self._metadata)

    def _busy(self) -> CatalogBusy:
        return CatalogBusy(
            f"topic {self.topic.path}: its state changed under {ATTEMPTS} attempts to change it"
        )

    def _own(self, held: StateRecord, epoch: int) -> TopicState:
        """The state, if the owner of ``epoch`` may change it."""
        if held.state is None:
            raise TopicGone(self.topic.path, self.topic.topic_id, None)
        self._check_id(held.state)
        if held.state.epoch > epoch:
            raise Fenced(self.topic.path, epoch, held.state.epoch)
        if held.state.epoch < epoch:
            raise NotClaimed(
                f"topic {self.topic.path}: epoch {epoch} has not claimed it (it is at {held.state.epoch})"
            )
        return held.state

    def _check_id(self, state: TopicState) -> None:
        if state.topic_id != self.topic.topic_id:
            raise TopicGone(self.topic.path, self.topic.topic_id, state.topic_id)

    # -- reading records -----------------------------------------------------------------------

    async def _read(self) -> StateRecord:
        kv = await self._metadata.get(self._state_key)
        if kv is None:
            return StateRecord(None, 0)
        return StateRecord(decode_record(kv.key, kv.value, TopicState), kv.mod_revision)

    async def _read_all(self) -> tuple[StateRecord, list[Segment]]:
        """State and descriptors, as they were together.

        They are under one prefix, so that one read of one revision gives both. A topic with many segments
        takes several pages, between which the state may change: what looks like a gap then is looked at
        again."""
        problem = ""
        for _ in range(ATTEMPTS):
            held, segments, is_one_read = await self._read_pages()
            problem = self._find_gap(held.state, segments)
            if not problem:
                return held, segments
            if is_one_read:
                break
        raise DataGap(f"topic {self.topic.path}: {problem}")

    async def _read_pages(self) -> tuple[StateRecord, list[Segment], bool]:
        held, segments, after, pages = StateRecord(None, 0), [], "", 0
        more = True
        while more:
            page = await self._metadata.range(keys.topic_prefix(self.topic), limit=PAGE, start_after=after)
            more, pages = page.more, pages + 1
            for kv in page.kvs:
                after = kv.key
                if kv.key == self._state_key:
                    held = StateRecord(decode_record(kv.key, kv.value, TopicState), kv.mod_revision)
                elif kv.key.startswith(keys.segments_prefix(self.topic)):
                    segments.append(self._decode_segment(kv.key, kv.value))
        if held.state is not None:
            segments = [segment for segment in segments if segment.start >= held.state.start]
        return held, segments, pages == 1

    def _decode_segment(self, key: str, value: bytes) -> Segment:
        segment = decode_record(key, value, Segment)
        if keys.segment_key(self.topic, segment.start) != key or segment.start >= segment.end:
            raise CatalogCorrupt(f"{key} holds the descriptor of {segment.start}..{segment.end}")
        return segment

    def _find_gap(self, state: TopicState | None, segments: list[Segment]) -> str:
        """What is wrong, in words; nothing if the descriptors are exactly those that the state promises."""
        if state is None:
            return f"{len(segments)} descriptors are there without a state" if segments else ""
        expected = state.start
        for segment in segments:
            if segment.start != expected or segment.topic_id != state.topic_id:
                return f"offsets from {expected} on are missing; the next segment is {segment.key}"
            expected = segment.end
        if expected != state.end:
            return f"the segments end at {expected}, and the state says {state.end}"
        return ""


def known_state(local: LocalView, topic: TopicKey) -> TopicState | None:
    """As this node knows it; None: not opened yet, or no longer there."""
    kv = local.get(keys.state_key(topic))
    state = decode_record(kv.key, kv.value, TopicState) if kv is not None else None
    return state if state is not None and state.topic_id == topic.topic_id else None


async def _after(unknown: OutcomeUnknown | None, step: Awaitable[T]) -> T:
    """After a transaction of unknown outcome, a failure to find out more is still an unknown outcome."""
    try:
        return await step
    except NO_ANSWER as error:
        if unknown is not None:
            raise unknown from error
        raise


def decode_record(key: str, value: bytes, kind: type[T]) -> T:
    """Raises CatalogCorrupt."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CatalogCorrupt(f"the record {key} cannot be read: {error}") from error


# -- holding segments ---------------------------------------------------------------------------


HOLD_KEY: Final = "/storage/hold"
NOT_HELD: Final = Compare(HOLD_KEY, Target.VERSION, Relation.EQUAL, 0)


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    until_ms: int


class StorageHeld(RetryableError):
    """Nothing was changed."""

    def __init__(self) -> None:
        super().__init__(
            "segments are held, so that the object store can be copied; `sava storage release` ends it"
        )


async def check_not_held(metadata: MetadataStore) -> None:
    """Raises StorageHeld."""
    if await metadata.get(HOLD_KEY) is not None:
        raise StorageHeld


async def is_held(metadata: MetadataStore, *, now_ms: int) -> bool:
    """Ends one whose time is over."""
    kv = await metadata.get(HOLD_KEY)
    if kv is None:
        return False
    try:
        is_over = msgspec.json.decode(kv.value, type=Hold).until_ms <= now_ms
    except msgspec.DecodeError:
        is_over = False  # an operator wants a hold; unknown is not over
    if is_over:
        unchanged = Compare(HOLD_KEY, Target.MOD_REVISION, Relation.EQUAL, kv.mod_revision)
        await metadata.txn((unchanged,), (Delete(HOLD_KEY),))
    return not is_over
