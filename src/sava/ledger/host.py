"""The host of this broker's ledgers: one for each generation of its journal, and this broker as a mirror of
others.

A generation begins when the broker is registered, under the number of that registration, and ends with it:

    registered ─▶ every earlier ledger of this disk is closed (the leader does that)
               ─▶ an uncommitted tail is left out of the index, a missing range is fetched
               ─▶ the tap is set, the generation is written down, the record is opened with the mirrors chosen
               ─▶ what was fetched is re-appended and committed ─▶ topics may be opened
    lost       ─▶ what is in flight fails; topics are dropped; the broker registers again

Being fenced while registered is possible, too (an operator ends the ledger of a broker that is there): the
registration is given up then, because its number is used.

The records of earlier ledgers are removed when nothing in the log needs them any more: all of their messages
are in registered segments.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec

from sava.errors import HostError, SavaError
from sava.ledger.endpoint import Ended, Generation, Generations, LedgerEndpoint
from sava.ledger.mirror_log import WalRangeReader
from sava.ledger.protocol import (
    LedgerId,
    LedgerRecord,
    LedgerState,
    StorageId,
)
from sava.ledger.protocol.record import LedgerFenced, opened
from sava.ledger.recoverer import LedgerReader
from sava.ledger.registry import LedgerRecordChanged, Stored, choose
from sava.ledger.store import MirrorStore
from sava.ledger.streams import RecentBytes
from sava.ledger.wire import LedgerSession, PeerClient, Write
from sava.ledger.writer import LedgerCluster, LedgerWriter, MirrorOptions, OwnLog
from sava.records import RecordBatch
from sava.storage.journal import Journal
from sava.storage.journal_index import BATCH
from sava.tasks import Backoff, cancelled, set_within, spawn
from sava.wal import DiskFull, LocalDisk

log = logging.getLogger(__name__)

RETRY_S: Final = 0.2
LONGEST_RETRY_S: Final = 2.0
LOOK_AGAIN_S: Final = 1.0
FORGET_S: Final = 5.0
MIRRORS: Final = "mirrors"
NEVER_OPENED: Final = 8
"""How many generations are remembered whose record was never seen: the write may have happened all the
same, and a recovery will ask for the end of that ledger."""


class LedgerHost:
    """Owned by the event loop."""

    def __init__(
        self,
        broker: int,
        disk: LocalDisk,
        journal: Journal,
        generations: Generations,
        *,
        cluster: LedgerCluster,
        options: MirrorOptions,
        renew: Callable[[str], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """``disk`` is the journal's. ``renew`` gives this broker's
        registration up and asks for another."""
        self._broker = broker
        self._journal = journal
        self._generations = generations
        self._cluster = cluster
        self._records = cluster.records
        self._live_brokers = cluster.live_brokers
        self._options = options
        self._renew = renew
        self._fail = fail
        self.storage = StorageId(journal.identity.storage_id)
        self._older = WalRangeReader(disk, origin=self.storage)
        self.copies = MirrorStore(disk.directory(MIRRORS), self.storage, fail=fail)
        self.own_disk = LedgerEndpoint(broker, journal, generations, self.copies, self._older, fail=fail)
        self.own_disk.end_generation = self._end
        self.peers = PeerClient(cluster.dialer, cluster.live_brokers, self.storage, self.own_disk)
        self._incarnation = 0
        self.owned: LedgerWriter | None = None
        """The open generation."""
        self._degraded_before = 0.0
        self._ended: dict[int, Ended] = {}
        """Generations that are over, until that is written down."""
        self._needs_replay = False
        self._beginning: asyncio.Task[None] | None = None
        self._forgetting: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Lock()

    @property
    def degraded_s(self) -> float:
        """How long fewer copies were enough than should be, in all generations of this process; for
        figures."""
        return self._degraded_before + (self.owned.degraded_s if self.owned is not None else 0.0)

    async def open(self) -> None:
        """Find what this disk holds. Raises LogCorrupt, DiskFailed."""
        await self._generations.belong_to(self.storage, self._journal.found_end)
        await self.copies.open()
        self.copies.start(self._records)
        self._forgetting = spawn(self._forget(), name="ledgers", failed=self._fail)

    def session(self, write: Write, broker: int) -> LedgerSession:
        """Another broker has connected to speak about ledgers."""
        return LedgerSession(self.own_disk, write, broker, self._records)

    # -- beginning ---------------------------------------------------------------------------

    def registered(self, incarnation: int) -> None:
        """This broker is there under this number; 0: it has lost it already, and will hear of it."""
        if not incarnation:
            return
        self._incarnation = incarnation
        self._journal.queue.expect_generation()
        self._beginning = spawn(self._begin(incarnation), name=f"ledger {incarnation}", failed=self._fail)

    async def _begin(self, incarnation: int) -> None:
        backoff, reason = Backoff(RETRY_S, LONGEST_RETRY_S, jitter=0), ""
        while True:
            try:
                await self._try_begin(LedgerId(self._broker, incarnation))
                return
            except HostError:
                raise
            except (SavaError, TimeoutError, OSError) as error:
                if str(error) != reason:
                    reason = str(error)
                    log.warning("ledgers: not open yet incarnation=%d error=%s", incarnation, reason)
                await backoff.pause()

    async def _try_begin(self, ledger: LedgerId) -> None:
        await self._write_ends()
        earlier = await self._closed_ones(ledger)
        reappended = await self._settle(earlier)
        members, qw, qa = await self._members(earlier)
        recent = RecentBytes(self._options.window_bytes, self._grown)
        tap = recent.tap if len(members) > 1 else None
        start = await self._journal.queue.set_tap(tap)
        recent.begin(start)
        if self._generations.known.get(ledger.incarnation) is not None:
            self._check_not_ended(ledger)
        await self._generations.change(ledger.incarnation, partial(_begun, ledger.incarnation, start))
        record = opened(start, members, qw=qw, qa=qa, by=uuid.uuid4().hex, is_degraded=len(members) < qa)
        revision = await self._open_record(ledger, record)
        self._check_not_ended(ledger)
        # No await from here on until it can be found: a task that ends it must not miss it.
        self.owned = LedgerWriter(
            ledger,
            record,
            revision,
            cluster=self._cluster,
            own_log=OwnLog(
                recent=recent,
                older=self._older,
                set_tap=self._journal.queue.set_tap,
                is_tapped=tap is not None,
                committed=self._journal.queue.committed,
            ),
            options=self._options,
            fenced=self._fenced,
            fail=self._fail,
        )
        self.owned.start()
        self.owned.grown()
        frames = [batch for _, batches in reappended for batch in batches]
        await self._journal.begin_generation(self.owned, frames)
        for generation, _ in reappended:
            await self._generations.change(
                generation.incarnation, partial(_changed, reappended=await self._journal.queue.drained())
            )
        log.info("ledgers: open ledger=%s from=%d disks=%s", ledger, start, ",".join(members))

    async def _closed_ones(self, ledger: LedgerId) -> Mapping[LedgerId, Stored]:
        """The records of this disk's earlier ledgers, when all of them are closed."""
        changed = asyncio.Event()
        end = self._records.listen(None, changed.set)
        is_logged = False
        try:
            while True:
                changed.clear()
                records = await self._records.of(self._broker)
                earlier = {
                    key: each
                    for key, each in records.items()
                    if key != ledger and each.record.origin == self.storage
                }
                still_open = [
                    str(key) for key, each in earlier.items() if each.record.state is not LedgerState.CLOSED
                ]
                if not still_open:
                    return earlier
                if not is_logged:
                    is_logged = True
                    log.info(
                        "ledgers: waiting until earlier ones are closed ledgers=%s", ",".join(still_open)
                    )
                await set_within(LOOK_AGAIN_S, changed)
        finally:
            end()

    async def _settle(self, earlier: Mapping[LedgerId, Stored]) -> list[tuple[Generation, list[RecordBatch]]]:
        """Know where each earlier generation ended, and have all of it."""
        lacking: list[tuple[Generation, list[RecordBatch]]] = []
        for generation in self._generations:
            ledger = LedgerId(self._broker, generation.incarnation)
            stored = earlier.get(ledger)
            if stored is None:
                continue  # forgotten soon, or never opened
            generation = self._generations.known.get(generation.incarnation) or generation
            if generation.closed != stored.record.end:
                await self._generations.change(
                    generation.incarnation, partial(_changed, closed=stored.record.end)
                )
                generation = self._generations.known.get(generation.incarnation) or generation
                self._needs_replay |= generation.end is not None and stored.record.end < generation.end
            if generation.missing_range is not None:
                lacking.append(
                    (generation, await self._fetch(ledger, stored.record, *generation.missing_range))
                )
        if self._needs_replay:
            await self._journal.replay(self._generations.uncommitted_tails)
            self._needs_replay = False
        return lacking

    async def _fetch(self, ledger: LedgerId, record: LedgerRecord, start: int, end: int) -> list[RecordBatch]:
        """What a ledger holds that this disk had not made durable. It is not much: what was on its way."""
        closed = LedgerReader(ledger, record, self.peers, own=self.storage)
        await closed.locate()
        found: list[RecordBatch] = []
        async for records in closed.records(start, end):
            found += [RecordBatch.parse(each.payload) for each in records if each.kind == BATCH]
        log.info("ledgers: read from other disks ledger=%s batches=%d", ledger, len(found))
        return found

    async def _members(self, earlier: Mapping[LedgerId, Stored]) -> tuple[tuple[StorageId, ...], int, int]:
        """The disks of a new ledger, this one first; how many there should be, and how many must
        acknowledge.

        If too few are there, the places of those that are missing go to disks of this broker's former
        ledgers. Nothing is acknowledged under such a record before one of them is back or another disk takes
        its place: appends are refused. But the ledger is open, so topics can be read. Without that, a broker
        that restarts while a mirror is away would serve nothing, where one that did not restart serves reads.
        """
        changed = asyncio.Event()
        end = self._live_brokers.listen(changed.set)
        deadline = asyncio.get_running_loop().time() + self._options.mirror_timeout_s
        is_logged = False
        try:
            while True:
                changed.clear()
                candidates = self._live_brokers.all()
                qw, qa = self._options.quorums(max(self._cluster.brokers(), len(candidates)))
                chosen = choose(candidates, own=self.storage, keep=(), avoid=(), count=qw - 1, needed=qa - 1)
                is_late = asyncio.get_running_loop().time() > deadline
                if 1 + len(chosen) >= qa or (self._options.may_degrade and is_late):
                    return (self.storage, *chosen), qw, qa
                former = _former_mirrors(earlier, (self.storage, *chosen))[: qa - 1 - len(chosen)]
                if is_late and not is_logged:
                    is_logged = True
                    log.warning(
                        "ledgers: %d disks must have a message, and %d are there; %s. Start the other "
                        "brokers, or set journal.degraded to allow",
                        *(qa, 1 + len(chosen)),
                        "messages are refused" if former else "no topic is served before",
                    )
                if is_late and 1 + len(chosen) + len(former) >= qa:
                    return (self.storage, *chosen, *former), qw, qa
                await set_within(LOOK_AGAIN_S, changed)
        finally:
            end()

    async def _open_record(self, ledger: LedgerId, record: LedgerRecord) -> int:
        while True:
            try:
                return await self._records.open(ledger, record)
            except LedgerRecordChanged as changed:
                if changed.found is not None and changed.found.record == record:
                    return changed.found.revision
                self._renew(f"ledger {ledger} exists already")
                raise
            except (SavaError, TimeoutError) as error:
                log.info("ledgers: writing the record again ledger=%s error=%s", ledger, error)
                await asyncio.sleep(RETRY_S)

    def _check_not_ended(self, ledger: LedgerId) -> None:
        """A fence that came while the record was written is answered with "nothing here", perhaps not yet:
        that it is written down takes as long as the disk likes, and the generation must not begin
        meanwhile."""
        generation = self._generations.known.get(ledger.incarnation)
        if generation is None or generation.end is not None or ledger.incarnation in self._ended:
            self._renew("its ledger was ended before it was open")
            raise LedgerFenced(ledger)

    def _grown(self) -> None:
        """(On the writer's thread.)"""
        self._journal.loop.call_soon_threadsafe(self._send)

    def _send(self) -> None:
        if self.owned is not None:
            self.owned.grown()

    # -- ending ------------------------------------------------------------------------------

    async def _end(self, incarnation: int) -> Ended | None:
        """End this generation, if it is open; where it ended."""
        async with self._stopping:  # another task that ends it has written down where by now
            generation = self._generations.known.get(incarnation)
            if incarnation in self._ended:
                return self._ended[incarnation]
            is_unopened = incarnation == self._incarnation and self.owned is None
            if is_unopened and generation is not None and generation.end is None:
                # It has yet to begin, and will find that it was ended.
                return self._ended.setdefault(incarnation, Ended(generation.start, generation.start))
        if incarnation != self._incarnation:
            return None
        ended = await self._stop(LedgerFenced(LedgerId(self._broker, incarnation)))
        if ended is not None:
            self._renew("its ledger was ended")
        return ended

    def _fenced(self) -> None:
        task = spawn(self._give_up(self._incarnation), name="fenced", failed=self._fail)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _give_up(self, incarnation: int) -> None:
        await self._end(incarnation)

    async def lost(self) -> None:
        """The registration is lost: nothing that is in flight will be acknowledged."""
        beginning, self._beginning = self._beginning, None
        await cancelled(beginning)
        why = LedgerFenced(LedgerId(self._broker, self._incarnation))
        self._journal.queue.fail_waiting(why)
        await self._stop(why)

    async def _stop(self, why: BaseException) -> Ended | None:
        """When this returns, the generation is over and its end is written down, also when another task was
        first to end it."""
        async with self._stopping:
            return await self._stop_now(why)

    async def _stop_now(self, why: BaseException) -> Ended | None:
        owned, self.owned = self.owned, None
        if owned is None:
            await self._end_unopened()
            return None
        owned.stop()
        self._degraded_before += owned.degraded_s
        self._journal.end_generation(why)
        end = await self._journal.queue.drained()
        await self._journal.queue.set_tap(None)
        self._needs_replay = True
        ended = self._ended[owned.owner.ledger.incarnation] = Ended(end, owned.owner.commit)
        await self._try_to_write_ends()
        await owned.close()
        return ended

    async def _end_unopened(self) -> None:
        """The registration was lost while its ledger was being opened. The record may be there, so a recovery
        will ask where the generation ended: where it was to begin."""
        await self._generations.settled()
        generation = self._generations.known.get(self._incarnation)
        if generation is not None and generation.end is None:
            self._ended.setdefault(self._incarnation, Ended(generation.start, generation.start))
            await self._try_to_write_ends()

    async def _try_to_write_ends(self) -> None:
        try:
            await self._write_ends()
        except DiskFull as error:
            log.warning("ledgers: the end of a generation is not written down yet error=%s", error)

    async def _write_ends(self) -> None:
        """Before the next generation begins. Raises DiskFull."""
        for incarnation, ended in list(self._ended.items()):
            await self._generations.change(incarnation, partial(_over, ended.end))
            self._ended.pop(incarnation, None)

    async def close(self) -> None:
        """Before the journal is closed. What is in flight fails; topics are closed by then."""
        await cancelled(self._beginning, self._forgetting)
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._stop(LedgerFenced(LedgerId(self._broker, self._incarnation)))
        await self.peers.close()
        await self.own_disk.close()
        await self.copies.close()
        await self._generations.settled()

    # -- forgetting --------------------------------------------------------------------------

    async def _forget(self) -> None:
        while True:
            await asyncio.sleep(FORGET_S)
            try:
                await self._forget_earlier()
            except HostError as error:
                self._fail(error)
                return
            except (SavaError, TimeoutError) as error:
                log.info("ledgers: cannot look through earlier ones, retrying error=%s", error)

    async def _forget_earlier(self) -> None:
        """Of the ledgers whose messages are all in registered segments."""
        if not self._journal.queue.has_generation:
            return
        never_opened = [
            generation.incarnation for generation in self._generations if generation.closed is None
        ]
        for incarnation in never_opened[:-NEVER_OPENED]:
            await self._generations.forget(incarnation)
        for generation in self._generations:
            is_over = generation.closed is not None and generation.missing_range is None
            if (
                generation.incarnation == self._incarnation
                or not is_over
                or self._journal.floor < generation.last
            ):
                continue
            ledger = LedgerId(self._broker, generation.incarnation)
            stored = await self._records.get(ledger)
            if stored is not None:
                await self._records.remove(ledger, revision=stored.revision)
            if (
                generation.uncommitted_tail is not None
                and await self._journal.queue.first() < generation.uncommitted_tail[1]
            ):
                continue  # the next start must know what to leave out
            await self._generations.forget(generation.incarnation)
            log.info("ledgers: forgotten, all is in segments ledger=%s", ledger)


def _former_mirrors(earlier: Mapping[LedgerId, Stored], besides: tuple[StorageId, ...]) -> list[StorageId]:
    """The disks of these ledgers, those of the newest first."""
    newest_first = [each.record for _, each in sorted(earlier.items(), reverse=True)]
    every = dict.fromkeys(disk for record in newest_first for disk in reversed(record.storages))
    return [disk for disk in every if disk not in besides]


def _begun(incarnation: int, start: int, generation: Generation | None) -> Generation | None:
    """None: a fence was faster, and where that generation ended must stay."""
    return (
        Generation(incarnation=incarnation, start=start)
        if generation is None or generation.end is None
        else None
    )


def _changed(generation: Generation | None, **fields: int) -> Generation | None:
    return msgspec.structs.replace(generation, **fields) if generation is not None else None


def _over(end: int, generation: Generation | None) -> Generation | None:
    return (
        msgspec.structs.replace(generation, end=end)
        if generation is not None and generation.end is None
        else None
    )
