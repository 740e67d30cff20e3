"""Failover: journals of brokers that are gone are recovered, and what their topics have in them is salvaged.

=================================================================  =====================  ==================
a journal that is                                                  gets                   by
=================================================================  =====================  ==================
open or recovering, and its broker is not registered under its     a recovery, until it   the leader
number any more                                                    is closed
closed, as all others of its disk, and the disk is not there       a salvage, until its   the brokers that
                                                                   record is gone         have a copy
=================================================================  =====================  ==================

Level-triggered as the controller: a pass looks at all records, whenever one of them or a registration changes
and every few seconds. A leader that is deposed leaves off where it is; the next one claims anew.

Then the storage state of each topic says where it ends, and the controller gives it to another broker. A disk
that is there keeps its topics: its broker serves them from its own bytes.

**The number of a journal is its broker's registration.** So a broker that came back within the time of its
lease, or that lost the lease and got another, has left a journal that nobody continues, and it is recovered
like that of a dead one. That the registration has another number by then is a condition of the claim.

**What nobody needs is not waited for.** A broker that was drained and taken away may have been the only one
that had its journal. If it is a member of the cluster no more, it cannot take up a topic again; if no topic
is its, and no state that is not sealed names its disk, whatever was acknowledged is in segments. Then it is
closed without the parts that cannot be had, and no operator is asked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from sava.cluster import records as cluster_records
from sava.cluster.controller import Leadership
from sava.cluster.view import ClusterView
from sava.errors import SavaError
from sava.ledger.choice import choose
from sava.ledger.closed import BytesMissing, origin_of
from sava.ledger.coordinator import Coordinator
from sava.ledger.neighbours import Registered
from sava.ledger.ports import Peers, Stored
from sava.ledger.protocol import JournalId, JournalState, StorageId
from sava.ledger.records import RecordCorrupt, Records
from sava.ledger.salvage import (
    WHOLE,
    NotClosed,
    Salvage,
    Share,
    share_of,
)
from sava.metadata.commands import Compare, Relation, Target
from sava.metadata.errors import Deposed
from sava.metadata.store import MetadataStore
from sava.storage.orphans import named_states
from sava.supervisor import Supervisor
from sava.tasks import cancelled, spawn
from sava.topics.names import TopicName

log = logging.getLogger(__name__)

FAILURES: Final = (SavaError, TimeoutError, OSError)
PASS_S: Final = 2.0
FIRST_RETRY_S: Final = 0.2
LONGEST_RETRY_S: Final = 30.0
DISKS: Final = 2
"""Salvaged at a time."""
LOOK_S: Final = 10.0
"""So often all topics are looked through for a journal that waits."""
HELP_S: Final = 5.0
"""A holder that has done its own share waits this long before it does what is left of the others': another
holder may be stopped, or may not reach the object store. Below the time that a busy holder needs it would
make the same segments a second time."""
TURN_S: Final = 30.0
"""The leader, if it holds nothing, salvages after this time, and the other brokers after twice this time: it
may be that no holder can."""


@dataclass(slots=True)
class Figures:
    """Since this process began."""

    claims: int = 0
    recoveries: int = 0
    recovery_seconds: float = 0.0
    salvages: int = 0
    salvage_seconds: float = 0.0
    salvaged_topics: int = 0
    salvaged_messages: int = 0
    salvaged_bytes: int = 0


@dataclass(slots=True)
class _Work:
    """Something under way, or to be tried again."""

    task: asyncio.Task[None] | None = None
    coordinator: Coordinator | None = None
    failures: int = 0
    retry_at: float = 0.0
    error: str = ""
    lacks_bytes: bool = False
    """The last attempt found a part of a closed journal on no disk."""
    looked_at: float = 0.0
    """When it was last asked whether anybody needs what it waits for."""
    share: Share | None = None
    """Of a salvage: what the last attempt was about."""
    help_at: float = math.inf
    """Of a salvage: from then on an attempt is about other brokers' shares, too."""

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    def failed(self, error: Exception) -> bool:
        """Whether it is news."""
        is_news = self.error != str(error)
        self.error = str(error)
        self.lacks_bytes = isinstance(error, BytesMissing)
        self.retry_at = time.monotonic() + min(FIRST_RETRY_S * 2 ** min(self.failures, 10), LONGEST_RETRY_S)
        self.failures += 1
        return is_news


@dataclass(slots=True)
class _Disk:
    """A disk, and the records of its journals."""

    broker: int
    journals: dict[JournalId, Stored] = field(default_factory=dict)

    @property
    def is_closed(self) -> bool:
        return all(each.record.state is JournalState.CLOSED for each in self.journals.values())

    @property
    def holders(self) -> dict[StorageId, None]:
        """Who has the bytes, of the newest journal first."""
        newest_first = reversed(list(self.journals.values()))
        return dict.fromkeys(holder for each in newest_first for holder in each.record.holders)


class Failover:
    """Owned by the event loop."""

    def __init__(
        self,
        view: ClusterView,
        store: MetadataStore,
        records: Records,
        neighbours: Registered,
        peers: Peers,
        salvage: Salvage,
        leadership: Leadership,
        *,
        is_member: Callable[[int], bool],
        may_degrade: bool,
        broker: int,
        own: StorageId,
    ) -> None:
        self._view = view
        self._store = store
        self._records = records
        self._neighbours = neighbours
        self._peers = peers
        self._salvage = salvage
        self._leadership = leadership
        self._is_member = is_member
        self._may_degrade = may_degrade
        self._broker = broker
        self._own = own
        self._term = 0
        self._recovering: dict[JournalId, _Work] = {}
        self._salvaging: dict[StorageId, _Work] = {}
        self._closed_since: dict[StorageId, float] = {}
        """Disks that are to be salvaged, and since when this broker knows."""
        self._slots = asyncio.Semaphore(DISKS)
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.figures = Figures()

    # -- running -----------------------------------------------------------------------------

    def start(self, supervisor: Supervisor, resign: Callable[[], Awaitable[None]]) -> None:
        """``resign``: let another broker lead."""
        self._view.listen(self._on_change)
        self._records.listen(None, self._woken.set)
        self._task = supervisor.repeated(self._run, name="failover", resign=resign)

    async def close(self) -> None:
        works = [*self._recovering.values(), *self._salvaging.values()]
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
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._woken.wait()

    def _pause(self) -> float:
        now = time.monotonic()
        works = (*self._recovering.values(), *self._salvaging.values())
        due = [max(0.0, work.retry_at - now) for work in works if not work.is_running and work.retry_at]
        return min([PASS_S, *due])

    async def _pass(self) -> None:
        known = self._records.known()
        await self._recover(known)
        self._salvage_disks(known)

    # -- recovering --------------------------------------------------------------------------

    async def _recover(self, known: Mapping[JournalId, Stored]) -> None:
        term = self._leadership.term()
        if term != self._term:
            await self._stop_recoveries()
            self._term = term
        for journal in [each for each in self._recovering if each not in known]:
            if not self._recovering[journal].is_running:
                del self._recovering[journal]
        if not term:
            return
        for journal, stored in known.items():
            if stored.record.state is not JournalState.CLOSED and not self.is_continued(journal):
                work = self._recovering.setdefault(journal, _Work())
                if not work.is_running and work.retry_at <= time.monotonic():
                    work.coordinator = self._coordinator(journal, stored, term)
                    self._begin(work, self._run_recovery(journal, work), f"recovery of {journal}")
        for journal, stored in known.items():
            if self._is_waiting(journal):
                await self._forgo(journal, stored)

    async def _forgo(self, journal: JournalId, stored: Stored) -> None:
        """Close it with what is there, if nobody needs the rest, or all that is missing is a second copy."""
        work, coordinator = self._recovering[journal], self.recovery(journal)
        loss = coordinator.loss() if coordinator is not None else None
        if coordinator is None or loss is None:
            return
        if self._may_degrade and not loss.missing and loss.unknown_from is None:
            coordinator.give_up(loss, why="fewer copies are allowed")
            return
        if self._is_member(journal.broker):
            return
        if time.monotonic() < work.looked_at + LOOK_S:
            return
        work.looked_at = time.monotonic()
        try:
            states = await named_states(self._store)
        except FAILURES as error:
            log.info("failover: topics were not looked through journal=%s error=%s", journal, error)
            return
        origin = origin_of(stored.record)
        is_named = any(state.storage_id == origin and not state.sealed for state in states.values())
        if not is_named and not self._view.owned_by(journal.broker):
            coordinator.give_up(loss, why="no topic needs it")

    async def _stop_recoveries(self) -> None:
        tasks = [work.task for work in self._recovering.values() if work.task is not None]
        await cancelled(*tasks)
        self._recovering.clear()

    def is_continued(self, journal: JournalId) -> bool:
        """By what this node knows; that it is not is a condition of the claim."""
        kv = self._store.local.get(cluster_records.registration_key(journal.broker))
        return kv is not None and kv.lease == journal.incarnation

    def _coordinator(self, journal: JournalId, stored: Stored, term: int) -> Coordinator:
        key = cluster_records.registration_key(journal.broker)
        is_gone = Compare(key, Target.LEASE, Relation.NOT_EQUAL, journal.incarnation)
        spares = partial(
            choose,
            own=origin_of(stored.record),
            keep=(),
            avoid=frozenset(stored.record.storages),
            count=stored.record.qw,
        )
        return Coordinator(
            journal,
            self._records,
            self._peers,
            name=f"broker-{self._broker}",
            conditions=(is_gone,),
            term=term,
            spares=lambda: spares(self._neighbours.all()),
        )

    async def _run_recovery(self, journal: JournalId, work: _Work) -> None:
        coordinator = work.coordinator
        assert coordinator is not None
        log.info("failover: the journal of a broker that is gone is recovered journal=%s", journal)
        self.figures.claims += 1
        try:
            record = await coordinator.run()
        except Deposed:
            work.retry_at = time.monotonic() + FIRST_RETRY_S  # if it is not known here yet
            return
        except FAILURES as error:
            if work.failed(error):
                log.warning("failover: journal=%s error=%s: %s", journal, type(error).__name__, error)
            return
        if record is None:
            work.retry_at = time.monotonic() + PASS_S
            return
        self.figures.recoveries += 1
        self.figures.recovery_seconds += coordinator.seconds
        log.info(
            "failover: a journal is closed journal=%s end=%d holders=%s lost=%s ms=%.0f",
            journal,
            record.end,
            ",".join(record.holders) or "-",
            ",".join(f"{part.start}..{part.end}" for part in record.lost) or "-",
            coordinator.seconds * 1000,
        )

    # -- salvaging ---------------------------------------------------------------------------

    def _salvage_disks(self, known: Mapping[JournalId, Stored]) -> None:
        disks = self._disks(known)
        for storage in [each for each in self._salvaging if each not in disks]:
            if not self._salvaging[storage].is_running:
                del self._salvaging[storage]
        present = {StorageId(each.storage_id) for each in self._view.brokers.values()}
        now = time.monotonic()
        waiting = [storage for storage, disk in disks.items() if storage not in present and disk.is_closed]
        self._closed_since = {storage: self._closed_since.get(storage, now) for storage in waiting}
        for storage in waiting:
            work = self._salvaging.setdefault(storage, _Work())
            share = self._share(disks[storage], present, now - self._closed_since[storage])
            if share is None or work.is_running:
                continue
            # A share that grew is due at once: the broker that had the rest is gone.
            if work.retry_at <= now or share != work.share:
                work.share = share
                part = WHOLE if now >= work.help_at else share
                salvage = self._run_salvage(storage, disks[storage].broker, work, part)
                self._begin(work, salvage, f"salvage of {storage}")

    def _disks(self, known: Mapping[JournalId, Stored]) -> dict[StorageId, _Disk]:
        disks: dict[StorageId, _Disk] = {}
        for journal, stored in known.items():
            disk = disks.setdefault(origin_of(stored.record), _Disk(journal.broker))
            disk.journals[journal] = stored
        return disks

    def _share(self, disk: _Disk, present: Set[StorageId], waited_s: float) -> Share | None:
        """What this broker salvages of the disk by now. The leader may find that nothing is needed."""
        share = share_of(list(disk.holders), present, self._own)
        if share is not None:
            return share
        has_holders = any(storage in present for storage in disk.holders)
        turn = has_holders + (self._leadership.term() == 0)
        return WHOLE if waited_s >= turn * TURN_S else None

    async def _run_salvage(self, storage: StorageId, broker: int, work: _Work, share: Share) -> None:
        began = time.monotonic()
        try:
            async with self._slots:
                done = await self._salvage.run(broker, storage, share)
        except NotClosed:
            work.retry_at = time.monotonic() + PASS_S
            return
        except FAILURES as error:
            if work.failed(error):
                log.warning("failover: disk=%s error=%s: %s", storage, type(error).__name__, error)
            return
        took = time.monotonic() - began
        figures = self.figures
        figures.salvages += 1
        figures.salvage_seconds += took
        figures.salvaged_topics += len(done.topics)
        figures.salvaged_messages += done.messages
        figures.salvaged_bytes += done.bytes
        if done.others:
            work.help_at = min(work.help_at, time.monotonic() + HELP_S)
            work.retry_at = work.help_at
        log.info(
            "failover: salvaged broker=%d disk=%s topics=%d messages=%d bytes=%d overtaken=%d ms=%.0f",
            *(broker, storage, len(done.topics), done.messages, done.bytes, len(done.overtaken), took * 1000),
        )
        if done.failed:
            topic, why = next(iter(done.failed.items()))
            if work.failed(SavaError(f"{len(done.failed)} topics wait ({topic}: {why})")):
                log.error("failover: not all topics are salvaged disk=%s error=%s", storage, work.error)
        elif done.overtaken:
            work.retry_at = time.monotonic() + PASS_S

    def _begin(self, work: _Work, doing: Coroutine[object, object, None], name: str) -> None:
        work.task = spawn(_paced(work, doing), name=name)
        work.task.add_done_callback(lambda _: self._woken.set())

    # -- for operators -----------------------------------------------------------------------

    def trouble(self, journal: JournalId, origin: StorageId) -> str:
        """Why the last attempt at the journal, or at its disk, came to nothing."""
        works = (self._recovering.get(journal), self._salvaging.get(origin))
        return next((work.error for work in works if work is not None and work.error), "")

    def lacks_bytes(self, origin: StorageId) -> bool:
        """Whether the last attempt of this broker to salvage the disk found a part of it nowhere."""
        work = self._salvaging.get(origin)
        return work is not None and work.lacks_bytes

    @property
    def waiting(self) -> int:
        """Recoveries that wait for disks which do not answer."""
        return sum(1 for journal in self._recovering if self._is_waiting(journal))

    def _is_waiting(self, journal: JournalId) -> bool:
        coordinator = self.recovery(journal)
        return coordinator is not None and coordinator.loss() is not None and coordinator.seconds > PASS_S

    def recovery(self, journal: JournalId) -> Coordinator | None:
        """The one that runs here."""
        work = self._recovering.get(journal)
        return work.coordinator if work is not None and work.is_running else None


async def _paced(work: _Work, doing: Coroutine[object, object, None]) -> None:
    """What nobody foresaw is told by ``spawn``. Its end wakes the next pass, which would otherwise begin it
    again at once, and so on."""
    try:
        await doing
    except Exception as error:
        work.failed(error)
        raise
