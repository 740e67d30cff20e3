"""Drains: a broker's topics go to others, a few at a time, until it has none.

That a broker is being drained stands in its mode record, and nowhere else: each leader sees it there, finds
the topics that the broker still has, and moves them. So a drain survives the leader that was asked for it; a
new one only begins to count again, failures and time included. Nothing is assigned to a broker that is not
active, for every assignment has its mode as a condition, and when it has no topics left it is *drained*. If
it turns out to have some after all (an assignment that was decided before the drain and seen after it), they
are moved like the others.

A broker that says in its registration that it leaves is drained the same way, without a mode: it stops when
it has no topics left, or when it has waited long enough.

A move that its owner postpones, because the object store takes no writes, has not failed: it is tried again
until the drain's time is over, and the status says what is waited for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec

from sava.cluster import planning, records
from sava.cluster.moves import Move
from sava.cluster.records import (
    BrokerMode,
    BrokerUnknown,
    Mode,
    MovePostponed,
    MoveRefused,
    NotController,
)
from sava.cluster.view import ClusterView, TopicEntry
from sava.metadata.commands import Compare
from sava.metadata.errors import Deposed
from sava.metadata.records import Decide, RecordBusy, RecordChange, RecordStore, Versioned, present
from sava.metadata.store import MetadataStore
from sava.tasks import cancelled
from sava.topics.names import TopicName
from sava.topics.specs import OwnershipState

log = logging.getLogger(__name__)

SHOWN_S: Final = 5.0
RETRIES: Final = 3
RETRY_PAUSE_S: Final = 1.0
"""Before the first retry of a move; twice as long before each further one."""
POSTPONED_S: Final = 1.0
"""Before a move is tried again that its owner postponed."""

LEAVING: Final = BrokerMode(mode=Mode.DRAINING, reason="leaving", parallel=4)
"""As which a broker is drained that is about to stop. Few at a time: a broker uploads one after another, and
the publishers of each wait until its turn has come."""

MoveTopic = Callable[[TopicName], Awaitable[Move]]


@dataclass(frozen=True, slots=True)
class DrainStatus:
    total: int
    succeeded: int
    failed: int
    pending: int
    failed_topics: tuple[TopicName, ...] = ()
    topics: tuple[TopicName, ...] = ()
    """Of a dry run: what would be moved."""
    mode: Mode = Mode.DRAINING
    is_done: bool = False
    """No more moves will be begun for this request. The broker is drained if ``mode`` says so."""
    waiting: str = ""
    """Why topics do not move at present, although nothing failed."""


class Drain:
    """One broker that is being drained, as the present leader sees it. Owned by the event loop."""

    def __init__(
        self,
        broker: int,
        mode: BrokerMode,
        move: MoveTopic,
        *,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.broker = broker
        self.mode = mode
        self.over: Literal["", "replaced", "deposed"] = ""
        """Whether it was given up: for another mode of the broker, or because another leads."""
        self.wants_look = True
        """Whether it does not know what is left to do."""
        self._move = move
        self._wake = wake
        self._clock = clock
        self._deadline = clock() + mode.timeout_ms / 1000
        self._seen: set[TopicName] = set()
        self._left: set[TopicName] = set()
        self._todo: deque[TopicName] = deque()
        self._under_way: dict[TopicName, asyncio.Task[None]] = {}
        self._others = 0
        """Moves of its topics that were not begun by this drain."""
        self._retries: dict[TopicName, tuple[int, float]] = {}
        """How often a move was tried again, and when the next time is."""
        self._failed: dict[TopicName, str] = {}
        self._waiting = ""
        self._is_done = False
        self._changed = asyncio.Event()

    # -- going on ----------------------------------------------------------------------------

    def look(self, owned: Iterable[TopicEntry]) -> None:
        """What is left to do, from what the broker has now."""
        self.wants_look = False
        scope = [entry for entry in owned if is_about(self.mode, entry)]
        self._left = {entry.name for entry in scope} | self._under_way.keys()
        self._seen |= self._left
        self._others = 0
        self._todo.clear()
        for entry in scope:
            if entry.name in self._under_way or entry.name in self._failed:
                continue
            if entry.record.state is OwnershipState.MOVING:
                self._others += 1
            elif entry.record.state is OwnershipState.ASSIGNED:
                self._todo.append(entry.name)

    def begin_moves(self) -> None:
        """As many as may be under way at a time."""
        now, postponed = self._clock(), []
        while self._todo and self._room > 0 and now < self._deadline:
            name = self._todo.popleft()
            if self._retries.get(name, (0, 0.0))[1] > now:
                postponed.append(name)
                continue
            self._under_way[name] = asyncio.create_task(self._move_one(name), name=f"drain {name}")
        self._todo.extend(postponed)

    @property
    def is_moving(self) -> bool:
        """Whether a topic is on its way: it is moved when another serves it."""
        return bool(self._under_way)

    @property
    def _room(self) -> int:
        return self.mode.parallel - len(self._under_way) - self._others

    async def _move_one(self, name: TopicName) -> None:
        try:
            error = (await self._move(name)).error
        except MovePostponed as postponed:
            self._postpone(name, postponed)
            return
        except Exception as failure:  # noqa: BLE001 (counted, so that the drain ends and names the topic)
            error = str(failure) or type(failure).__name__
        finally:
            self._under_way.pop(name, None)
            self._wake()
        self._waiting = ""
        if not error:
            self._left.discard(name)
            self._retries.pop(name, None)
        else:
            self._retry(name, error)
        self.wants_look = not self._under_way and not self._todo

    def _postpone(self, name: TopicName, postponed: MovePostponed) -> None:
        if not self._waiting:
            log.warning("drain: waiting broker=%d topic=%s reason=%s", self.broker, name, postponed.reason)
        self._waiting = postponed.reason
        self._retries[name] = self._retries.get(name, (0, 0.0))[0], self._clock() + POSTPONED_S
        self._todo.append(name)

    def _retry(self, name: TopicName, error: str) -> None:
        tried = self._retries.get(name, (0, 0.0))[0] + 1
        log.warning(
            "drain: a topic was not moved broker=%d topic=%s attempt=%d error=%s",
            self.broker,
            name,
            tried,
            error,
        )
        if tried > RETRIES:
            self._failed[name] = error
            self._retries.pop(name, None)
            return
        self._retries[name] = tried, self._clock() + RETRY_PAUSE_S * 2 ** (tried - 1)
        self._todo.append(name)

    async def stop(self, why: Literal["replaced", "deposed"]) -> None:
        """The moves that are under way continue by themselves."""
        self.over = why
        await cancelled(*self._under_way.values())
        self.tell()

    # -- telling -----------------------------------------------------------------------------

    def tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def changed(self) -> asyncio.Event:
        return self._changed

    def conclude(self) -> None:
        """After everything that could be done at the moment: whether that was all."""
        is_late = self._clock() >= self._deadline
        is_all = self._left <= self._failed.keys()
        self._is_done = not self._under_way and not self.wants_look and (is_late or is_all)
        self.tell()

    def status(self, mode: Mode) -> DrainStatus:
        failed = tuple(sorted(self._failed.keys() & self._left))
        pending = len(self._left) - len(failed)
        return DrainStatus(
            total=len(self._seen),
            succeeded=len(self._seen) - len(self._left),
            failed=len(failed),
            pending=pending,
            failed_topics=failed,
            mode=mode,
            is_done=self._is_done or bool(self.over) or mode is not Mode.DRAINING,
            waiting=self._waiting,
        )


def is_about(mode: BrokerMode, entry: TopicEntry) -> bool:
    """Whether the drain is about the topic. One that is being deleted goes by itself."""
    return mode.takes(entry.name.namespace) and entry.record.state is not OwnershipState.DELETING


class Drains:
    """All brokers that are being drained, while this node leads. Owned by the event loop."""

    def __init__(
        self,
        view: ClusterView,
        store: MetadataStore,
        move: MoveTopic,
        *,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._records = RecordStore(store)
        self._move = move
        self._wake = wake
        self._clock = clock
        self._drains: dict[int, Drain] = {}
        self._term = 0
        """In which they continue; 0: they do not."""

    @property
    def are_under_way(self) -> bool:
        return bool(self._drains)

    # -- asked for ---------------------------------------------------------------------------

    def plan(self, broker: int, mode: BrokerMode) -> DrainStatus:
        """What a drain would move. Raises BrokerUnknown, MoveRefused."""
        self._check(broker)
        topics = tuple(sorted(entry.name for entry in self._view.owned_by(broker) if is_about(mode, entry)))
        count = len(topics)
        mode_now = self._view.mode(broker).mode
        return DrainStatus(count, 0, 0, count, topics=topics, mode=mode_now, is_done=True)

    async def drain(self, broker: int, mode: BrokerMode, *, term: int) -> AsyncIterator[DrainStatus]:
        """Each state that it comes to, until it is done; the drain continues without a reader. Raises
        BrokerUnknown, MoveRefused, NotController."""
        now_ms = time.time_ns() // 1_000_000
        wanted = msgspec.structs.replace(mode, mode=Mode.DRAINING, since_ms=now_ms)
        await self._set_mode(broker, lambda _: RecordChange(wanted, conditions=self._check(broker)), term)
        await self._sync()
        drain = self._drains.get(broker)
        if self._term != term:
            raise NotController
        if drain is None or drain.mode != wanted:
            raise RecordBusy(f"the drain of broker {broker} was called off at once")
        self._wake()
        last = None
        while last is None or not last.is_done:
            changed = drain.changed
            if drain.over == "deposed":
                raise NotController
            status = self._status_of(drain)
            if status == last:
                await changed.wait()
            else:
                yield status
                last = status

    def _status_of(self, drain: Drain) -> DrainStatus:
        status = drain.status(self._mode_of(drain))
        is_empty = not self._view.counts().get(drain.broker)
        if is_empty and status.mode is Mode.DRAINING and not drain.over:
            # It is done when its mode says so, which is written next.
            return replace(status, is_done=False)
        return status

    def _mode_of(self, drain: Drain) -> Mode:
        return self._view.mode(drain.broker).mode

    async def activate(self, broker: int, reason: str, *, term: int) -> bool:
        """Whether it was active already. Raises BrokerUnknown, NotController."""

        def decide(found: Versioned[BrokerMode]) -> RecordChange[BrokerMode] | None:
            if found.value is None and broker not in self._view.brokers:
                raise BrokerUnknown(broker)
            if found.value is None or found.value.mode is Mode.ACTIVE:
                return None
            now_ms = time.time_ns() // 1_000_000
            return RecordChange(BrokerMode(mode=Mode.ACTIVE, reason=reason, since_ms=now_ms))

        return not await self._set_mode(broker, decide, term)

    def _check(self, broker: int) -> tuple[Compare, ...]:
        """The conditions of a drain: the broker is there, and another that may take its topics."""
        if broker not in self._view.brokers:
            raise BrokerUnknown(broker)
        active = planning.candidates(self._view.brokers, self._records.store.local)
        other = next((each for each in active.values() if each.broker != broker), None)
        if other is None:
            raise MoveRefused(f"broker {broker} cannot be drained: no other broker is active")
        return (present(records.registration_key(broker)), *other.conditions)

    async def _set_mode(self, broker: int, decide: Decide[BrokerMode], term: int) -> bool:
        """Whether it was changed. Raises NotController, RecordBusy."""
        try:
            updated = await self._records.update(
                records.mode_key(broker),
                BrokerMode,
                decide,
                what=f"the mode of broker {broker}",
                fence_term=term,
            )
        except Deposed as error:
            raise NotController from error
        mode = updated.value
        if updated.is_changed and mode is not None:
            log.info("cluster: a broker's mode broker=%d mode=%s reason=%s", broker, mode.mode, mode.reason)
            with suppress(TimeoutError):
                await self._view.wait(lambda: self._view.mode(broker) == mode, timeout=SHOWN_S)
        return updated.is_changed

    # -- going on ----------------------------------------------------------------------------

    async def step(self, *, term: int, looks: bool) -> None:
        """After each pass, and every now and then; ``looks``: at all topics of those brokers."""
        self._term = term
        await self._sync()
        for drain in list(self._drains.values()):
            has_any = bool(self._view.counts().get(drain.broker))
            if looks or drain.wants_look or not has_any:
                drain.look(self._view.owned_by(drain.broker))
            if any(each.broker != drain.broker for each in self._view.active):
                drain.begin_moves()
            if not has_any and not drain.is_moving and self._mode_of(drain) is Mode.DRAINING:
                await self._finish(drain, term)
            drain.conclude()

    async def stop(self) -> None:
        """Another leads now."""
        self._term = 0
        while self._drains:
            await self._drains.popitem()[1].stop("deposed")

    async def _sync(self) -> None:
        """A drain for each broker whose mode says so."""
        counts = self._view.counts()
        for broker in sorted(self._view.brokers.keys() | self._drains.keys()):
            mode, drain = self._wanted_mode(broker), self._drains.get(broker)
            is_wanted = mode.mode is Mode.DRAINING or (mode.mode is Mode.DRAINED and counts.get(broker))
            if drain is not None and (not is_wanted or drain.mode != mode):
                del self._drains[broker]
                await drain.stop("replaced")
            if is_wanted and broker not in self._drains:
                self._drains[broker] = Drain(broker, mode, self._move, wake=self._wake, clock=self._clock)

    def _wanted_mode(self, broker: int) -> BrokerMode:
        registration = self._view.brokers.get(broker)
        is_leaving = registration is not None and registration.is_leaving
        return LEAVING if is_leaving else self._view.mode(broker)

    async def _finish(self, drain: Drain, term: int) -> None:
        drained = msgspec.structs.replace(drain.mode, mode=Mode.DRAINED)
        await self._set_mode(
            drain.broker, lambda found: RecordChange(drained) if found.value == drain.mode else None, term
        )
