"""Moves: one topic to another broker, from request to outcome.

A move is one write, *moving*, in which the target is named and still there. Everything after that happens by
itself, whether or not a caller watches: the owner hands the topic over and seals it, or takes the move back;
the controller assigns it, or rolls it back when the owner had its time; and of an owner that dies on the way
the controller takes over as of any other. So the caller of a move only watches the record, and a leader
that is deposed meanwhile loses nothing but the sight of it.

Before that write the owner is asked to upload what the topic has in the journal only, while it serves it. So
a move begins only with an object store that takes writes, and publishers wait for a small rest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from sava.cluster.planning import Candidate, Decision, Placement, decide, store_of
from sava.cluster.records import (
    AlreadyMoving,
    MovePostponed,
    MoveRefused,
    NotController,
)
from sava.cluster.view import ClusterView, TopicEntry
from sava.errors import SavaError
from sava.metadata.errors import Deposed
from sava.metadata.records import RecordChange, RecordStore, Versioned, unchanged
from sava.metadata.store import MetadataStore
from sava.storage.types import TopicState
from sava.topics import specs
from sava.topics.errors import TopicUnknown
from sava.topics.names import TopicName
from sava.topics.ownership import NO_OWNER, UNASSIGNED
from sava.topics.specs import Ownership, OwnershipState

SHOWN_S: Final = 2.0
OUTCOME_GRACE_S: Final = 15.0
"""Beyond the owner's time: for the controller to take the move back, or for the new owner to begin."""
SINGLE_BROKER: Final = (
    "Cannot unload topic: single broker cluster detected. Unload requires at least 2 brokers. "
    "Use delete if you want to remove the topic."
)

_S = OwnershipState

PrepareMove = Callable[[int, TopicName, float], Awaitable[None]]
"""Asks a broker to prepare a topic of its own for a move, within a number of seconds."""


@dataclass(frozen=True, slots=True)
class Move:
    """How a move ended. ``error`` is empty if the topic is somewhere else now."""

    topic: TopicName
    from_broker: int
    to_broker: int
    """The same as before if the move was taken back."""
    epoch: int
    end: int = 0
    """The next owner's first offset (0 for a topic that is not reliable)."""
    error: str = ""
    downtime_ms: int = 0
    """From the request to the owner until the new one had taken it, by this node's clock."""


class Moves:
    """Owned by the event loop. Any number may be under way."""

    def __init__(
        self,
        view: ClusterView,
        store: MetadataStore,
        place: Callable[[], Placement],
        state_of: Callable[[TopicEntry], TopicState | None],
        prepare: PrepareMove,
    ) -> None:
        """``state_of``: what storage has of a topic; None: it was never opened."""
        self._view = view
        self._records = RecordStore(store)
        self._place = place
        self._state_of = state_of
        self._prepare = prepare
        self.bound: Counter[int] = Counter()
        """Topics on their way to each broker. Without them, many moves that begin at once would all choose
        the broker that has the least."""

    async def move(
        self, name: TopicName, *, term: int, target: int = 0, reason: str, timeout_ms: int
    ) -> Move:
        """Returns when it is over, one way or the other. Raises NotController, TopicUnknown, MoveRefused,
        MovePostponed, WrongState, RecordBusy."""
        await self._make_ready(await self._find(name), target, timeout_ms / 1000)
        with ExitStack() as bound:
            decision, arrive = await self._begin(
                name, bound, term=term, target=target, reason=reason, timeout_ms=timeout_ms
            )
            return await self._watch(decision, timeout_ms / 1000 + OUTCOME_GRACE_S, arrive)

    async def _begin(
        self, name: TopicName, bound: ExitStack, *, term: int, target: int, reason: str, timeout_ms: int
    ) -> tuple[Decision, Callable[[], None]]:
        """What was decided, now that the topic is moving. ``bound`` counts it for its next owner."""
        begun: list[tuple[Decision, Callable[[], None]]] = []

        async def begin(found: Versioned[Ownership]) -> RecordChange[Ownership] | None:
            seen = await self._find(name)
            entry = seen._replace(record=found.value or UNASSIGNED, revision=found.revision)
            if found.is_in_doubt and _is_past(entry, begun[-1][0].entry):
                return None  # moved once more, it might go back to where it came from
            bound.close()  # another broker may be the better one by now
            if entry.record.state is _S.MOVING:
                raise AlreadyMoving(name, entry.record)
            chosen = self._choose(entry, target)
            decision = decide(
                entry,
                "move",
                chosen.conditions,
                target=chosen.broker,
                from_broker=entry.record.owner,
                reason=reason,
                timeout_ms=timeout_ms,
            )
            begun.append((decision, bound.enter_context(self._on_the_way(chosen.broker))))
            is_same_topic = unchanged(specs.spec_key(name), entry.spec_revision)
            return RecordChange(decision.record, conditions=(is_same_topic, *decision.conditions))

        try:
            updated = await self._records.update(
                specs.ownership_key(name), Ownership, begin, what=f"topic {name}", fence_term=term
            )
        except Deposed as error:
            raise NotController from error
        # After a lost answer it may be an earlier decision that took effect.
        return next((each for each in begun if each[0].record == updated.value), begun[-1])

    async def _make_ready(self, entry: TopicEntry, target: int, timeout: float) -> None:
        """Raises MovePostponed if the owner cannot upload what the topic has; and what refuses the move, so
        that nothing is uploaded for one that cannot be."""
        owner = entry.record.owner
        if entry.record.state is not _S.ASSIGNED or not entry.spec.reliable:
            return
        self._choose(entry, target)
        try:
            await self._prepare(owner, entry.name, timeout)
        except (SavaError, TimeoutError) as error:
            reason = str(error) or f"broker {owner} did not answer within {timeout:g} s"
            raise MovePostponed(entry.name, owner, reason) from error

    async def _find(self, name: TopicName) -> TopicEntry:
        """A topic that is not in the view may have been created a moment ago."""
        if not self._view.has(name):
            kv = await self._records.store.get(specs.spec_key(name))
            if kv is not None:
                with suppress(TimeoutError):
                    await self._view.wait(lambda: self._view.has(name), timeout=SHOWN_S, about=name)
        entry = self._view.entry(name)
        if entry is None or self._view.is_deleting(name):
            raise TopicUnknown(name)
        return entry

    def _choose(self, entry: TopicEntry, target: int) -> Candidate:
        name, owner, registered = entry.name, entry.record.owner, self._view.brokers
        if not registered.keys() - {owner}:
            raise MoveRefused(SINGLE_BROKER)
        store_id, placement = store_of(entry, registered), self._place()
        if target:
            self._check_target(entry, target, placement, store_id)
        chosen = placement.choose(store_id=store_id, target=target, leaves=owner, may_return=False)
        if chosen is not None:
            return chosen
        if placement.candidates.keys() - {owner}:
            raise MoveRefused(
                f"topic {name} cannot leave broker {owner}: no other active broker has the object store that "
                f"its segments are in ({store_id})"
            )
        raise MoveRefused(f"topic {name} cannot leave broker {owner}: no other broker is active")

    def _check_target(self, entry: TopicEntry, target: int, placement: Placement, store_id: str) -> None:
        if target == entry.record.owner:
            raise MoveRefused(f"topic {entry.name} is served by broker {target} already")
        if target not in self._view.brokers:
            raise MoveRefused(f"topic {entry.name} cannot go to broker {target}: it is not registered")
        candidate = placement.candidates.get(target)
        if candidate is None:
            leaves = self._view.brokers[target].is_leaving
            state = "about to stop" if leaves else f"{self._view.mode(target).mode.value}, not active"
            raise MoveRefused(f"topic {entry.name} cannot go to broker {target}: it is {state}")
        if not candidate.sees(store_id):
            raise MoveRefused(
                f"topic {entry.name} cannot go to broker {target}, which has another object store than the "
                f"one that its segments are in ({store_id})"
            )

    async def _watch(self, decision: Decision, timeout: float, arrive: Callable[[], None]) -> Move:
        name, began, seen = decision.name, time.monotonic(), decision.entry

        def outcome() -> Move | None:
            if self._view.held(name).record.owner not in (NO_OWNER, seen.record.owner):
                arrive()
            now = self._view.entry(name)
            if now is not None and self._is_stranded(now):
                error = f"broker {now.record.owner} is gone, and its journal is not recovered yet"
                return Move(name, seen.record.owner, now.record.owner, now.record.epoch, error=error)
            return outcome_of(seen, now, is_deleting=self._view.is_deleting(name))

        with suppress(TimeoutError):
            await self._view.wait(lambda: outcome() is not None, timeout=timeout, about=name)
        found = outcome()
        downtime_ms = round((time.monotonic() - began) * 1000)
        if found is not None:
            return replace(found, downtime_ms=downtime_ms)
        record = self._view.held(name).record
        error = f"not over within {timeout:g} s: the topic is {record.state.value} {record.error}".rstrip()
        return Move(name, seen.record.owner, record.owner, record.epoch, error=error, downtime_ms=downtime_ms)

    def _is_stranded(self, entry: TopicEntry) -> bool:
        """Its owner has died on the way and no other can continue: what it takes up again it keeps, so the
        move is over."""
        if entry.record.state is not _S.ORPHAN or not entry.spec.reliable:
            return False
        state = self._state_of(entry)
        return state is not None and not state.is_settled

    @contextmanager
    def _on_the_way(self, broker: int) -> Iterator[Callable[[], None]]:
        """Gives what to call as soon as the topic counts as the broker's own."""
        self.bound[broker] += 1
        has_arrived = False

        def arrive() -> None:
            nonlocal has_arrived
            self.bound[broker] -= not has_arrived
            has_arrived = True

        try:
            yield arrive
        finally:
            arrive()


def _is_past(now: TopicEntry, before: TopicEntry) -> bool:
    """Whether the topic has left the state in which its move was decided."""
    return now.record.state is not _S.ASSIGNED or now.record.epoch > before.record.epoch


def outcome_of(before: TopicEntry, now: TopicEntry | None, *, is_deleting: bool) -> Move | None:
    """What has become of a move that began with ``before``; None: it is not over."""
    name, owner = before.name, before.record.owner
    if (
        now is None
        or is_deleting
        or now.spec.topic_id != before.spec.topic_id
        or now.record.state is _S.DELETING
    ):
        return Move(name, owner, 0, before.record.epoch, error="the topic was deleted meanwhile")
    record = now.record
    if record.epoch <= before.record.epoch or not record.owner:
        return None
    if record.owner == owner:
        error = record.error or f"it is with broker {owner} again"
        return Move(name, owner, owner, record.epoch, end=record.end, error=error)
    if not record.incarnation:
        return None
    return Move(name, owner, record.owner, record.epoch, end=record.end)
