"""Failover: the ledgers of brokers that are gone are recovered, and what their topics have in them is saved.

=================================================================  =====================  ==================
a ledger that is                                                   gets                   by
=================================================================  =====================  ==================
open or recovering, and its broker is not registered under its     a recovery, until it   the leader
number any more                                                    is closed
closed, as all others of its disk, and the disk is not there       a tail recovery,       the brokers that
                                                                   until its record is    have a copy
                                                                   gone
=================================================================  =====================  ==================

Level-triggered as the controller: a pass looks at all records, whenever one of them or a registration changes
and every few seconds. A leader that is deposed leaves off where it is; the next one claims again.

Then the storage state of each topic says where it ends, and the controller gives it to another broker. A disk
that is there keeps its topics: its broker serves them from its own bytes.

**The number of a ledger is its broker's registration.** So a broker that came back within the time of its
lease, or that lost the lease and got another, has left a ledger that no broker continues, and it is recovered
like that of a dead one. That the registration has another number by then is a condition of the claim.

**What no topic needs is not waited for.** A broker that was drained and taken away may have been the only one
that had its ledger. If it is a member of the cluster no more, it cannot take up a topic again; if it owns no
topic, and no state that is not sealed names its disk, whatever was acknowledged is in segments. Then the
ledger is closed without the parts that cannot be had, and no operator is asked.

**Unclean recovery.** A ledger of a broker that is gone can wait for disks without limit, at three places:

* its *recovery* has too few answers to know how far it goes, or no disk has a part of it intact;
* all of it is there, and too few disks can take the copies that are written back before it is closed: nothing
  is lost by closing it, unless the disks that have it are lost before its messages are in segments;
* it is *closed*, and before its topics' tails were recovered the last disk that had some part was lost, too.

All are decided alike. First a report says which positions are missing, and what that means for each topic;
then the operator accepts exactly this loss, or nothing happens, because it is not the same any more: a disk
has come back.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from sava.cluster import records as cluster_records
from sava.cluster.controller import Leadership
from sava.cluster.records import LedgerUnknown, NotController, NothingToAbandon
from sava.cluster.view import ClusterView
from sava.errors import SavaError
from sava.ledger.protocol import (
    LedgerId,
    LedgerRecord,
    LedgerState,
    Loss,
    StorageId,
)
from sava.ledger.protocol import record as steps
from sava.ledger.recoverer import BytesMissing, LedgerReader, Recoverer
from sava.ledger.registry import LedgerAccess, LedgerRecordChanged, Stored, choose, record_key
from sava.ledger.tail_recovery import (
    WHOLE,
    NotClosed,
    Share,
    TailRecovery,
    read_tails,
    share_of,
    unsettled,
)
from sava.metadata.commands import Compare, Relation, Target
from sava.metadata.errors import Deposed
from sava.metadata.records import RecordChange, RecordCorrupt, RecordStore, Versioned
from sava.metadata.store import MetadataStore
from sava.storage.orphans import named_states
from sava.supervisor import Supervisor
from sava.tasks import Backoff, cancelled, set_within, spawn
from sava.topics.names import TopicName

log = logging.getLogger(__name__)

FAILURES: Final = (SavaError, TimeoutError, OSError)
PASS_S: Final = 2.0
FIRST_RETRY_S: Final = 0.2
LONGEST_RETRY_S: Final = 30.0
DISKS: Final = 2
"""Whose tails are recovered at a time."""
LOOK_S: Final = 10.0
"""So often all topics are looked through for a ledger that waits."""
HELP_S: Final = 5.0
"""A holder that has done its own share waits this long before it does what is left of the others': another
holder may be stopped, or may not reach the object store. Below the time that a busy holder needs it would
make the same segments a second time."""
TURN_S: Final = 30.0
"""The leader, if it holds nothing, recovers the tails after this time, and the other brokers after twice this
time: it may be that no holder can."""


@dataclass(slots=True)
class Figures:
    """Since this process began."""

    claims: int = 0
    recoveries: int = 0
    recovery_seconds: float = 0.0
    tail_recoveries: int = 0
    tail_recovery_seconds: float = 0.0
    recovered_topics: int = 0
    recovered_messages: int = 0
    recovered_bytes: int = 0


@dataclass(slots=True)
class _Work:
    """Something under way, or to be tried again."""

    task: asyncio.Task[None] | None = None
    recoverer: Recoverer | None = None
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_RETRY_S, LONGEST_RETRY_S, jitter=0))
    retry_at: float = 0.0
    error: str = ""
    lacks_bytes: bool = False
    """The last attempt found a part of a closed ledger on no disk."""
    looked_at: float = 0.0
    """When it was last asked whether a topic needs what it waits for."""
    share: Share | None = None
    """Of a tail recovery: what the last attempt was about."""
    help_at: float = math.inf
    """Of a tail recovery: from then on an attempt is about other brokers' shares, too."""

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    def failed(self, error: Exception) -> bool:
        """Whether it is news."""
        is_news = self.error != str(error)
        self.error = str(error)
        self.lacks_bytes = isinstance(error, BytesMissing)
        self.retry_at = time.monotonic() + self.backoff.next()
        return is_news


@dataclass(slots=True)
class _Disk:
    """A disk, and the records of its ledgers."""

    broker: int
    ledgers: dict[LedgerId, Stored] = field(default_factory=dict)

    @property
    def is_closed(self) -> bool:
        return all(each.record.state is LedgerState.CLOSED for each in self.ledgers.values())

    @property
    def holders(self) -> dict[StorageId, None]:
        """Who has the bytes, of the newest ledger first."""
        newest_first = reversed(list(self.ledgers.values()))
        return dict.fromkeys(holder for each in newest_first for holder in each.record.holders)


class Failover:
    """Owned by the event loop."""

    def __init__(
        self,
        view: ClusterView,
        store: MetadataStore,
        access: LedgerAccess,
        tail_recovery: TailRecovery,
        leadership: Leadership,
        *,
        is_member: Callable[[int], bool],
        may_degrade: bool,
        broker: int,
    ) -> None:
        self._view = view
        self._store = store
        self._access = access
        self._tail_recovery = tail_recovery
        self._leadership = leadership
        self._is_member = is_member
        self._may_degrade = may_degrade
        self._broker = broker
        self._term = 0
        self._recovering: dict[LedgerId, _Work] = {}
        self._recovering_tails: dict[StorageId, _Work] = {}
        self._closed_since: dict[StorageId, float] = {}
        """Disks whose tails are to be recovered, and since when this broker knows."""
        self._slots = asyncio.Semaphore(DISKS)
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.figures = Figures()

    # -- running -----------------------------------------------------------------------------

    def start(self, supervisor: Supervisor, resign: Callable[[], Awaitable[None]]) -> None:
        """``resign``: let another broker lead."""
        self._view.listen(self._on_change)
        self._access.records.listen(None, self._woken.set)
        self._task = supervisor.repeated(self._run, name="failover", resign=resign)

    async def close(self) -> None:
        works = [*self._recovering.values(), *self._recovering_tails.values()]
        await cancelled(self._task, *(work.task for work in works))

    def _on_change(self, topics: frozenset[TopicName] | None) -> None:
        if topics is None:  # about brokers, or everything
            self._woken.set()

    async def _run(self) -> None:
        corrupt = ""
        while True:
            self._woken.clear()
            try:
                if self._view.is_ready:
                    await self._pass()
                corrupt = ""
            except RecordCorrupt as error:
                if str(error) != corrupt:
                    corrupt = str(error)
                    log.error("failover: %s", error)
            await set_within(self._pause(), self._woken)

    def _pause(self) -> float:
        now = time.monotonic()
        works = (*self._recovering.values(), *self._recovering_tails.values())
        due = [max(0.0, work.retry_at - now) for work in works if not work.is_running and work.retry_at]
        return min([PASS_S, *due])

    async def _pass(self) -> None:
        known = self._access.records.known()
        await self._recover(known)
        self._recover_tails(known)

    # -- recovering --------------------------------------------------------------------------

    async def _recover(self, known: Mapping[LedgerId, Stored]) -> None:
        term = self._leadership.term()
        if term != self._term:
            await self._stop_recoveries()
            self._term = term
        for ledger in [each for each in self._recovering if each not in known]:
            if not self._recovering[ledger].is_running:
                del self._recovering[ledger]
        if not term:
            return
        for ledger, stored in known.items():
            if stored.record.state is not LedgerState.CLOSED and not self.is_continued(ledger):
                work = self._recovering.setdefault(ledger, _Work())
                if not work.is_running and work.retry_at <= time.monotonic():
                    work.recoverer = self._recoverer(ledger, stored, term)
                    self._begin(work, self._run_recovery(ledger, work), f"recovery of {ledger}")
        for ledger, stored in known.items():
            if self._is_waiting(ledger):
                await self._abandon_unneeded(ledger, stored)

    async def _abandon_unneeded(self, ledger: LedgerId, stored: Stored) -> None:
        """Close it with what is there, if no topic needs the rest, or all that is missing is a second
        copy."""
        work, recoverer = self._recovering[ledger], self.recovery(ledger)
        loss = recoverer.loss() if recoverer is not None else None
        if recoverer is None or loss is None:
            return
        if self._may_degrade and not loss.missing and loss.unknown_from is None:
            recoverer.accept_loss(loss, why="fewer copies are allowed")
            return
        if self._is_member(ledger.broker):
            return
        if time.monotonic() < work.looked_at + LOOK_S:
            return
        work.looked_at = time.monotonic()
        try:
            states = await named_states(self._store)
        except FAILURES as error:
            log.info("failover: cannot read the topic states, retrying ledger=%s error=%s", ledger, error)
            return
        origin = stored.record.origin
        is_named = any(state.storage_id == origin and not state.sealed for state in states.values())
        if not is_named and not self._view.owned_by(ledger.broker):
            recoverer.accept_loss(loss, why="no topic needs it")

    async def _stop_recoveries(self) -> None:
        tasks = [work.task for work in self._recovering.values() if work.task is not None]
        await cancelled(*tasks)
        self._recovering.clear()

    def is_continued(self, ledger: LedgerId) -> bool:
        """By what this node knows; that it is not is a condition of the claim."""
        kv = self._store.local.get(cluster_records.registration_key(ledger.broker))
        return kv is not None and kv.lease == ledger.incarnation

    def _recoverer(self, ledger: LedgerId, stored: Stored, term: int) -> Recoverer:
        key = cluster_records.registration_key(ledger.broker)
        is_gone = Compare(key, Target.LEASE, Relation.NOT_EQUAL, ledger.incarnation)
        spares = partial(
            choose,
            own=stored.record.origin,
            keep=(),
            avoid=frozenset(stored.record.storages),
            count=stored.record.qw,
        )
        return Recoverer(
            ledger,
            self._access.records,
            self._access.peers,
            name=f"broker-{self._broker}",
            conditions=(is_gone,),
            term=term,
            spares=lambda: spares(self._access.live_brokers.all()),
        )

    async def _run_recovery(self, ledger: LedgerId, work: _Work) -> None:
        recoverer = work.recoverer
        assert recoverer is not None
        log.info("failover: recovering the ledger of a broker that is gone ledger=%s", ledger)
        self.figures.claims += 1
        try:
            record = await recoverer.run()
        except Deposed:
            work.retry_at = time.monotonic() + FIRST_RETRY_S  # if it is not known here yet
            return
        except FAILURES as error:
            if work.failed(error):
                log.warning(
                    "failover: recovery failed, retrying ledger=%s error=%s: %s",
                    ledger,
                    type(error).__name__,
                    error,
                )
            return
        if record is None:
            work.retry_at = time.monotonic() + PASS_S
            return
        self.figures.recoveries += 1
        self.figures.recovery_seconds += recoverer.seconds
        log.info(
            "failover: closed ledger=%s end=%d holders=%s lost=%s ms=%.0f",
            ledger,
            record.end,
            ",".join(record.holders) or "-",
            ",".join(f"{part.start}..{part.end}" for part in record.lost) or "-",
            recoverer.seconds * 1000,
        )

    # -- recovering tails --------------------------------------------------------------------

    def _recover_tails(self, known: Mapping[LedgerId, Stored]) -> None:
        disks = self._disks(known)
        for storage in [each for each in self._recovering_tails if each not in disks]:
            if not self._recovering_tails[storage].is_running:
                del self._recovering_tails[storage]
        present = {StorageId(each.storage_id) for each in self._view.brokers.values()}
        now = time.monotonic()
        waiting = [storage for storage, disk in disks.items() if storage not in present and disk.is_closed]
        self._closed_since = {storage: self._closed_since.get(storage, now) for storage in waiting}
        for storage in waiting:
            work = self._recovering_tails.setdefault(storage, _Work())
            share = self._share(disks[storage], present, now - self._closed_since[storage])
            if share is None or work.is_running:
                continue
            # A share that grew is due at once: the broker that had the rest is gone.
            if work.retry_at <= now or share != work.share:
                work.share = share
                part = WHOLE if now >= work.help_at else share
                tail_recovery = self._run_tail_recovery(storage, disks[storage].broker, work, part)
                self._begin(work, tail_recovery, f"tail_recovery of {storage}")

    def _disks(self, known: Mapping[LedgerId, Stored]) -> dict[StorageId, _Disk]:
        disks: dict[StorageId, _Disk] = {}
        for ledger, stored in known.items():
            disk = disks.setdefault(stored.record.origin, _Disk(ledger.broker))
            disk.ledgers[ledger] = stored
        return disks

    def _share(self, disk: _Disk, present: Set[StorageId], waited_s: float) -> Share | None:
        """What this broker recovers of the disk by now. The leader may find that nothing is needed."""
        share = share_of(list(disk.holders), present, self._access.own)
        if share is not None:
            return share
        has_holders = any(storage in present for storage in disk.holders)
        turn = has_holders + (self._leadership.term() == 0)
        return WHOLE if waited_s >= turn * TURN_S else None

    async def _run_tail_recovery(self, storage: StorageId, broker: int, work: _Work, share: Share) -> None:
        began = time.monotonic()
        try:
            async with self._slots:
                done = await self._tail_recovery.run(broker, storage, share)
        except NotClosed:
            work.retry_at = time.monotonic() + PASS_S
            return
        except FAILURES as error:
            if work.failed(error):
                log.warning(
                    "failover: tail recovery failed, retrying disk=%s error=%s: %s",
                    storage,
                    type(error).__name__,
                    error,
                )
            return
        took = time.monotonic() - began
        figures = self.figures
        figures.tail_recoveries += 1
        figures.tail_recovery_seconds += took
        figures.recovered_topics += len(done.topics)
        figures.recovered_messages += done.messages
        figures.recovered_bytes += done.bytes
        if done.others:
            work.help_at = min(work.help_at, time.monotonic() + HELP_S)
            work.retry_at = work.help_at
        log.info(
            "failover: tails recovered broker=%d disk=%s topics=%d messages=%d bytes=%d overtaken=%d ms=%.0f",
            *(broker, storage, len(done.topics), done.messages, done.bytes, len(done.overtaken), took * 1000),
        )
        if done.failed:
            topic, why = next(iter(done.failed.items()))
            if work.failed(SavaError(f"{len(done.failed)} topics wait ({topic}: {why})")):
                log.error("failover: not all tails are recovered disk=%s error=%s", storage, work.error)
        elif done.overtaken:
            work.retry_at = time.monotonic() + PASS_S

    def _begin(self, work: _Work, doing: Coroutine[object, object, None], name: str) -> None:
        work.task = spawn(_paced(work, doing), name=name)
        work.task.add_done_callback(lambda _: self._woken.set())

    # -- for operators -----------------------------------------------------------------------

    def trouble(self, ledger: LedgerId, origin: StorageId) -> str:
        """Why the last attempt at the ledger, or at its disk, came to nothing."""
        works = (self._recovering.get(ledger), self._recovering_tails.get(origin))
        return next((work.error for work in works if work is not None and work.error), "")

    def lacks_bytes(self, origin: StorageId) -> bool:
        """Whether the last attempt of this broker to recover the tails of the disk found a part of it
        nowhere."""
        work = self._recovering_tails.get(origin)
        return work is not None and work.lacks_bytes

    @property
    def waiting(self) -> int:
        """Recoveries that wait for disks which do not answer."""
        return sum(1 for ledger in self._recovering if self._is_waiting(ledger))

    def _is_waiting(self, ledger: LedgerId) -> bool:
        recoverer = self.recovery(ledger)
        return recoverer is not None and recoverer.loss() is not None and recoverer.seconds > PASS_S

    def recovery(self, ledger: LedgerId) -> Recoverer | None:
        """The one that runs here."""
        work = self._recovering.get(ledger)
        return work.recoverer if work is not None and work.is_running else None


async def _paced(work: _Work, doing: Coroutine[object, object, None]) -> None:
    """``spawn`` logs an unforeseen error. Its end wakes the next pass, which would otherwise begin it
    again at once, and so on."""
    try:
        await doing
    except Exception as error:
        work.failed(error)
        raise


@dataclass(frozen=True, slots=True)
class TopicLoss:
    """What giving up would mean for a topic, as far as is known."""

    topic: str
    stored: int
    """Up to here it is in segments."""
    kept: int
    """Up to here its messages would be there."""
    found: int
    """Messages behind a missing part reach up to here, and would go with it; 0: none were found."""


@dataclass(frozen=True, slots=True)
class LossReport:
    """What going on with what is there would cost."""

    loss: Loss
    answers_needed: int
    topics: tuple[TopicLoss, ...]


class UncleanRecovery:
    """Owned by the event loop."""

    def __init__(
        self,
        failover: Failover,
        store: MetadataStore,
        access: LedgerAccess,
        leadership: Leadership,
    ) -> None:
        self._failover = failover
        self._store = store
        self._access = access
        self._leadership = leadership

    async def report(self, ledger: LedgerId) -> LossReport:
        """What would be lost. Raises NotController, LedgerUnknown, NothingToAbandon."""
        stored = await self._stuck(ledger)
        if stored.record.state is LedgerState.CLOSED:
            loss = await self._missing(ledger, stored)
            return LossReport(
                loss, 0, await self._topics(ledger, steps.abandoned(stored.record, loss.missing))
            )
        recoverer = self._recovery(ledger)
        expected = recoverer.loss()
        if expected is None:
            raise NothingToAbandon(ledger, f"its recovery continues by itself ({recoverer.phase.value})")
        return LossReport(expected, recoverer.answers_needed, await self._topics(ledger, stored.record))

    async def accept(self, ledger: LedgerId, loss: Loss) -> bool:
        """Accept exactly this loss; False if it is not what would be lost now. Raises as ``report``."""
        stored = await self._stuck(ledger)
        if stored.record.state is not LedgerState.CLOSED:
            return self._recovery(ledger).accept_loss(loss, why="by an operator")
        if await self._missing(ledger, stored) != loss:
            return False
        abandoned = steps.abandoned(stored.record, loss.missing)

        def decide(found: Versioned[LedgerRecord]) -> RecordChange[LedgerRecord]:
            if found.revision != stored.revision:
                raise LedgerRecordChanged(ledger, None)
            return RecordChange(abandoned)

        try:
            await RecordStore(self._store).update(
                record_key(ledger),
                LedgerRecord,
                decide,
                what=f"the record of ledger {ledger}",
                fence_term=self._leadership.term(),
            )
        except LedgerRecordChanged:
            return False
        log.warning("ledgers: an operator accepted a loss ledger=%s loss=%s", ledger, loss)
        return True

    async def _stuck(self, ledger: LedgerId) -> Stored:
        if not self._leadership.term():
            raise NotController
        stored = await self._access.records.get(ledger)
        if stored is None:
            raise LedgerUnknown(ledger)
        if self._failover.is_continued(ledger):
            raise NothingToAbandon(ledger, "its broker is there and writes it")
        return stored

    def _recovery(self, ledger: LedgerId) -> Recoverer:
        recoverer = self._failover.recovery(ledger)
        if recoverer is None:
            raise NothingToAbandon(ledger, "its recovery is about to begin; ask again")
        return recoverer

    async def _missing(self, ledger: LedgerId, stored: Stored) -> Loss:
        """Of a closed ledger."""
        if self._access.live_brokers.find(stored.record.origin) is not None:
            raise NothingToAbandon(ledger, "it is closed, and its broker serves it")
        closed = LedgerReader(ledger, stored.record, self._access.peers, own=self._access.own)
        await closed.locate()
        missing = await closed.missing()
        if not missing:
            raise NothingToAbandon(ledger, "it is closed, and all of it can be read")
        return Loss(missing, None, closed.silent)

    async def _topics(self, ledger: LedgerId, record: LedgerRecord) -> tuple[TopicLoss, ...]:
        """``record`` is that of this ledger if the loss is accepted."""
        origin = record.origin
        states = unsettled(await named_states(self._store), origin)
        found = {each: kept.record for each, kept in (await self._access.records.of(ledger.broker)).items()}
        opened = [
            LedgerReader(each, kept, self._access.peers, own=self._access.own)
            for each, kept in sorted({**found, ledger: record}.items())
            if kept.origin == origin
        ]
        tails = await read_tails(states, opened, is_partial=True)
        return tuple(
            TopicLoss(tail.topic.path, tail.state.end, tail.end, tail.behind_a_hole)
            for tail in sorted(tails.by_id.values(), key=lambda tail: tail.topic.path)
        )
