"""Controller: on the leader, makes owners what they should be.

It compares what is with what should be, and writes down the difference (``planning``). It acts on states, not
on events: what it is woken by only says which topics to look at first, and every few seconds, as at the
beginning of each term, it looks at all of them. So nothing depends on a message that might be lost, and a new
leader needs nothing from the one before.

**Only while it leads.** Every write names the term in which it was decided and has no effect in another: a
leader that was deposed and does not know it yet can decide what it likes. Beyond that every decision has its
own conditions; two controllers that believe to lead would merely refuse each other.

**Who is gone.** An owner is gone when its registration is, which the lease decides: a broker that cannot
renew it stops serving by itself before it runs out. That the registration is absent is a condition of the
write, so this node's view being behind costs nothing but that write.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol, TypeVar

from sava.cluster import planning
from sava.cluster.drains import Drains, DrainStatus
from sava.cluster.loads import Loads
from sava.cluster.moves import Move, Moves, PrepareMove
from sava.cluster.planning import (
    ORPHAN_LOOK_S,
    Placement,
    Plan,
    Scene,
    Sightings,
    is_settled,
    plan,
    write_decisions,
)
from sava.cluster.rebalancer import Balance, Rebalanced, Rebalancer
from sava.cluster.records import BrokerMode, NotController, RebalanceRunning, Registration
from sava.cluster.view import ClusterView, TopicEntry
from sava.config import Config
from sava.errors import SavaError
from sava.metadata.errors import Deposed
from sava.metadata.store import MetadataStore
from sava.storage import catalog, keys
from sava.storage.errors import CatalogCorrupt
from sava.storage.types import TopicKey, TopicState
from sava.supervisor import Supervisor
from sava.tasks import cancelled, spawn
from sava.topics.names import TopicName

log = logging.getLogger(__name__)

FULL_PASS_S: Final = 10.0
TICK_S: Final = 0.25
"""How often it looks whether it leads, and whether a drain can continue."""
IDLE_TICK_S: Final = 1.0
"""How often a leader without drains looks whether it still leads; what it writes is fenced in any case."""
RETRY_S: Final = 0.2
READY_S: Final = 5.0
PART: Final = 1000
"""Topics that are looked at before others get their turn on the event loop."""
ABANDONED_S: Final = 30.0
"""A deletion that is not over by then is taken for one whose broker has died."""
UNREADABLE: Final = TopicState(topic_id=0, epoch=0, storage_id="", sealed=False)
"""A record that cannot be read does not say that there is nothing more: such a topic stays as it is."""

T = TypeVar("T")


class Leadership(Protocol):
    def term(self) -> int:
        """0: this node does not lead, or has not applied its own first entry yet."""
        ...


class Controller:
    """Owned by the event loop."""

    def __init__(
        self,
        view: ClusterView,
        store: MetadataStore,
        config: Config,
        leadership: Leadership,
        *,
        broker: int,
        finish_deletions: Callable[[], Awaitable[None]],
        maintain_writers: Callable[[], Awaitable[None]],
        prepare_move: PrepareMove,
    ) -> None:
        self._view = view
        self._store = store
        self._config = config
        self._leadership = leadership
        self._broker = broker
        self._beside = {"deletions": finish_deletions, "writers": maintain_writers}
        """What takes its time, and must not keep topics waiting."""
        self.loads = Loads(interval_s=config.load_manager.load_report_interval_seconds)
        self._moves = Moves(view, store, self._placement, self._state_of, prepare_move)
        self._woken = asyncio.Event()
        self._drains = Drains(view, store, self._move_for_drain, wake=self._woken.set)
        self._rounds = Rebalancer(view, self.loads, config.load_manager, self._move_for_balance)
        self._touched: set[TopicName] = set()
        self._touches_all = True
        self._tasks: list[asyncio.Task[None]] = []
        self._working: dict[str, asyncio.Task[None]] = {}
        self._round: asyncio.Task[Rebalanced] | None = None
        self._passed_term = 0
        """The term of which the first pass is done."""
        self._first_pass = asyncio.Event()
        self._forget()
        view.listen(self._on_change)

        # For metrics.
        self.assignments = 0
        self.moves = 0
        self.move_failures = 0
        self.imbalance = 0.0
        self.pass_seconds = 0.0
        """Of the last look at all topics."""

    def _forget(self) -> None:
        """What was known of an earlier term is of no use in this one."""
        self._sightings = Sightings()
        self._waits: dict[TopicName, float] = {}
        self._waited_for: dict[TopicName, int] = {}
        """Orphans, and the revision of the storage state with which each was found to wait: as long as it has
        this one there is nothing to decide. A thousand of them are looked at ten times a second."""
        self._last_placed = 0
        self._unserved = OfflineTopics()
        self._deleting: dict[TopicName, float] = {}

    # -- running -----------------------------------------------------------------------------

    def start(self, supervisor: Supervisor, resign: Callable[[], Awaitable[None]]) -> None:
        """``resign``: let another broker lead."""
        self._tasks += [
            supervisor.repeated(self._run, name="controller", resign=resign),
            supervisor.repeated(self._rebalance, name="rebalancing"),
        ]

    async def close(self) -> None:
        await cancelled(*self._tasks, *self._working.values(), self._round)
        await self._drains.stop()

    @property
    def is_leading(self) -> bool:
        return self._leadership.term() != 0

    # -- asked for ---------------------------------------------------------------------------

    async def move(self, name: TopicName, *, target: int = 0, reason: str, timeout_ms: int) -> Move:
        """Returns when the topic is served elsewhere, or will not be. Raises NotController, TopicUnknown,
        MoveRefused, MovePostponed, WrongState."""
        term = await self._lead_term()
        move = await self._moves.move(name, term=term, target=target, reason=reason, timeout_ms=timeout_ms)
        self.moves += 1
        self.move_failures += bool(move.error)
        log.info(
            "move: over topic=%s from=%d to=%d reason=%s downtime_ms=%d error=%s",
            name,
            move.from_broker,
            move.to_broker,
            reason,
            move.downtime_ms,
            move.error or "-",
        )
        return move

    async def drain(self, broker: int, mode: BrokerMode) -> AsyncIterator[DrainStatus]:
        """What it has come to, each time that it changes; the last one is done. The drain continues
        without a reader. Raises NotController, BrokerUnknown, MoveRefused."""
        term = await self._lead_term()
        async for status in self._drains.drain(broker, mode, term=term):
            yield status

    def plan_drain(self, broker: int, mode: BrokerMode) -> DrainStatus:
        """What a drain would move. Raises as ``drain``."""
        self._need_term()
        return self._drains.plan(broker, mode)

    async def activate(self, broker: int, reason: str) -> bool:
        """Whether it was active already. Raises NotController, BrokerUnknown."""
        return await self._drains.activate(broker, reason, term=await self._lead_term())

    def balance(self) -> Balance:
        """Raises NotController: loads are reported to the leader."""
        self._need_term()
        return self._rounds.balance()

    async def rebalance(self, *, dry_run: bool, max_moves: int) -> Rebalanced:
        """One round, now; ``max_moves`` 0: as many as the configuration allows. Raises NotController,
        RebalanceRunning."""
        await self._lead_term()
        return await self._rounds.run(dry_run=dry_run, max_moves=max_moves)

    def begin_rebalance(self, *, max_moves: int) -> asyncio.Task[Rebalanced]:
        """A round that continues when its caller leaves. Raises RebalanceRunning while one of these runs; its
        result raises as ``rebalance``."""
        if self._round is not None and not self._round.done():
            raise RebalanceRunning
        self._round = spawn(
            self.rebalance(dry_run=False, max_moves=max_moves), name="rebalance", failed=self._round_failed
        )
        return self._round

    def _round_failed(self, error: BaseException) -> None:
        log.warning("rebalancing: round failed error=%s: %s", type(error).__name__, error)

    def _need_term(self) -> int:
        term = self._leadership.term()
        if not term:
            raise NotController
        return term

    async def _lead_term(self) -> int:
        """The term, as soon as this node has looked at everything in it."""
        term = self._need_term()
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                while self._passed_term != term and self._leadership.term() == term:
                    await self._first_pass.wait()
        if self._passed_term != term:
            raise NotController
        return term

    async def _move_for_drain(self, name: TopicName) -> Move:
        timeout_ms = self._config.cluster.move_timeout_seconds * 1000
        return await self.move(name, reason="drain", timeout_ms=timeout_ms)

    async def _move_for_balance(self, name: TopicName, target: int) -> Move:
        timeout_ms = self._config.cluster.move_timeout_seconds * 1000
        return await self.move(name, target=target, reason="rebalance", timeout_ms=timeout_ms)

    # -- leading -----------------------------------------------------------------------------

    def _on_change(self, topics: frozenset[TopicName] | None) -> None:
        if topics is None:
            self._touches_all = True
        elif not self._touches_all:
            self._touched |= topics
        self._woken.set()

    async def _run(self) -> None:
        while True:
            term = self._leadership.term()
            if not term or not self._view.is_ready:
                await asyncio.sleep(TICK_S)
                continue
            try:
                await self._lead(term)
            except Deposed:
                log.info("controller: deposed term=%d", term)
            finally:
                self._touched.clear()
                self._touches_all = True  # until it leads again there is no use in knowing more
                await self._drains.stop()
            await asyncio.sleep(RETRY_S)

    async def _lead(self, term: int) -> None:
        """Until this node does not lead in this term any more."""
        log.info("controller: leading broker=%d term=%d", self._broker, term)
        self._forget()
        next_full = 0.0
        self._begin("deletions")
        while self._leadership.term() == term:
            try:
                is_full = self._touches_all or time.monotonic() >= next_full
                await self._pass(term, is_full=is_full)
                await self._drains.step(term=term, looks=is_full)
                if is_full:
                    next_full = time.monotonic() + FULL_PASS_S
                    self._passed_term = term
                    passed, self._first_pass = self._first_pass, asyncio.Event()
                    passed.set()
            except Deposed:
                raise
            except (SavaError, TimeoutError) as error:
                log.warning("controller pass failed, retrying error=%s: %s", type(error).__name__, error)
                self._touches_all = True
                await asyncio.sleep(RETRY_S)
                continue
            await self._wait_for_work(next_full)

    async def _wait_for_work(self, next_full: float) -> None:
        due = min([next_full, *self._waits.values()])
        with suppress(TimeoutError):
            tick = TICK_S if self._drains.are_under_way else IDLE_TICK_S
            async with asyncio.timeout(min(tick, max(0.0, due - time.monotonic()))):
                await self._woken.wait()
        self._woken.clear()
        now = time.monotonic()
        for name in [name for name, at in self._waits.items() if at <= now]:
            if self._waited_for.get(name) == self._state_revision(name):
                self._waits[name] = now + ORPHAN_LOOK_S
            else:
                self._touched.add(name)

    async def _pass(self, term: int, *, is_full: bool) -> None:
        began = time.monotonic()
        restless = await self._find_restless(self._take_touched(is_full=is_full))
        if restless:
            scene = self._scene(dict(self._view.brokers))
            for part in _parts(restless):
                planned = plan(part, scene)
                self._waits.update(planned.waits)
                self._unserved.note(planned)
                self._waited_for.update(
                    (each.name, self._state_revision(each.name)) for each in planned.orphans
                )
                self._warn_of_many_gone(planned)
                done = await write_decisions(self._view, self._store, planned.decisions, term=term)
                self.assignments += sum(1 for decision in done if decision.step == "assign")
                await asyncio.sleep(0)
            self._last_placed = scene.placement.last
        if is_full:
            names = {entry.name for entry in restless}
            self._sightings.keep(names)
            self._unserved.keep(names)
            self._watch_deletions()
            self._begin("writers")
            self.imbalance = self._rounds.imbalance
            self.pass_seconds = time.monotonic() - began

    def _take_touched(self, *, is_full: bool) -> list[TopicName]:
        """What is to be looked at; anything that is touched from now on is for the next pass."""
        touched, self._touched = self._touched, set()
        if is_full:
            self._touches_all = False
            self._waits.clear()
            self._waited_for.clear()
            return self._view.names()
        for name in touched:
            self._waits.pop(name, None)
            self._waited_for.pop(name, None)
        return list(touched)

    async def _find_restless(self, names: Sequence[TopicName]) -> list[TopicEntry]:
        """Those with which something has to be done, sometime."""
        restless = []
        for part in _parts(names):
            brokers = self._view.brokers
            for name in part:
                entry = self._view.entry(name)
                if entry is None or is_settled(entry, brokers):
                    self._unserved.forget(name)
                else:
                    restless.append(entry)
            await asyncio.sleep(0)
        return restless

    def _scene(self, brokers: Mapping[int, Registration]) -> Scene:
        return Scene(
            now=time.monotonic(),
            brokers=brokers,
            placement=self._placement(),
            sightings=self._sightings,
            state_of=self._state_of,
            is_deleting=self._view.is_deleting,
        )

    def _placement(self) -> Placement:
        active = planning.candidates(self._view.brokers, self._store.local)
        owned, bound = self._view.counts(), self._moves.bound
        counts = {broker: owned.get(broker, 0) + bound[broker] for broker in active}
        loads = self.loads.by_broker(self._config.load_manager.assignment_strategy, counts)
        return Placement(active, counts, loads, last=self._last_placed)

    def _state_revision(self, name: TopicName) -> int:
        kv = self._store.local.get(keys.state_key(TopicKey(name.namespace, name.topic, 0)))
        return kv.mod_revision if kv is not None else 0

    def _state_of(self, entry: TopicEntry) -> TopicState | None:
        key = TopicKey(entry.name.namespace, entry.name.topic, entry.spec.topic_id)
        try:
            return catalog.known_state(self._store.local, key)
        except CatalogCorrupt as error:
            log.error("controller: %s", error)
            return UNREADABLE

    # -- telling -----------------------------------------------------------------------------

    def _warn_of_many_gone(self, planned: Plan) -> None:
        gone = {decision.entry.record.owner for decision in planned.decisions if decision.step == "orphan"}
        owners = {broker for broker, topics in self._view.counts().items() if topics}
        if len(gone) > 1 and 2 * len(gone) > len(owners):
            log.error("controller: most owners are gone at once gone=%s of=%s", sorted(gone), sorted(owners))

    @property
    def orphans(self) -> int:
        """Topics that wait until the journal of their owner was recovered, or for the owner to return."""
        return len(self._unserved.orphans)

    @property
    def unplaced(self) -> int:
        """Topics for which there is no broker."""
        return len(self._unserved.unplaced)

    # -- beside ------------------------------------------------------------------------------

    def _watch_deletions(self) -> None:
        now = time.monotonic()
        self._deleting = {name: self._deleting.get(name, now) for name in self._view.deleting()}
        if any(now - since >= ABANDONED_S for since in self._deleting.values()):
            self._begin("deletions")

    def _begin(self, work: str) -> None:
        """Unless it is still under way."""
        if work not in self._working or self._working[work].done():
            self._working[work] = spawn(self._work(work), name=f"controller {work}")

    async def _work(self, work: str) -> None:
        try:
            await self._beside[work]()
        except (SavaError, TimeoutError) as error:
            log.warning("controller: %s not finished error=%s: %s", work, type(error).__name__, error)

    async def _rebalance(self) -> None:
        while True:
            await asyncio.sleep(self._config.load_manager.rebalancing.check_interval_seconds)
            if self._passed_term and self._passed_term == self._leadership.term():
                try:
                    await self._rounds.run_automatic()
                except SavaError as error:
                    log.warning("rebalancing: round failed error=%s: %s", type(error).__name__, error)


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + PART] for start in range(0, len(items), PART))


class OfflineTopics:
    """Topics that no broker serves, and for which the controller can do nothing at the moment: remembered so
    that each is logged once, and that they can be counted. Owned by the event loop."""

    def __init__(self) -> None:
        self.orphans: set[TopicName] = set()
        """They wait until the journal of their owner was recovered, or for the owner to return."""
        self.unplaced: set[TopicName] = set()
        """There is no broker for them."""

    def forget(self, name: TopicName) -> None:
        """It is served, or about to be."""
        self.orphans.discard(name)
        self.unplaced.discard(name)

    def keep(self, names: Iterable[TopicName]) -> None:
        """No others exist."""
        names = set(names)
        self.orphans &= names
        self.unplaced &= names

    def note(self, plan: Plan) -> None:
        for decision in plan.decisions:
            self.forget(decision.name)
        for entry in plan.orphans:
            if entry.name not in self.orphans:
                log.warning(
                    "controller: a topic waits for the journal of its owner, which is gone "
                    "topic=%s owner=%d epoch=%d",
                    entry.name,
                    entry.record.owner,
                    entry.record.epoch,
                )
        for entry in plan.unplaced:
            if entry.name not in self.unplaced:
                log.warning("controller: there is no broker for a topic topic=%s", entry.name)
        self.orphans.update(entry.name for entry in plan.orphans)
        self.unplaced.update(entry.name for entry in plan.unplaced)
