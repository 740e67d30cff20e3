"""MirroredJournal: the journal of a broker through its lives, and the broker as a mirror of others.

A life begins when the broker is registered, under the number of that registration, and ends with it:

    registered ─▶ every earlier journal of this disk is closed (the leader does that)
               ─▶ what was void is left out of the index, what this disk lacks is fetched
               ─▶ the tap is set, the life is written down, the record is opened with the mirrors chosen
               ─▶ what was fetched is appended and committed ─▶ topics may be opened
    lost       ─▶ what is in flight fails; topics are dropped; the broker registers anew

Being fenced while registered is possible, too (an operator ends the journal of a broker that is there): the
registration is given up then, because its number is used.

Earlier journals' records are removed when nothing in the log needs them any more: all of their messages are
in registered segments.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from sava.errors import HostError, SavaError
from sava.ledger.asking import Asking
from sava.ledger.closed import ClosedJournal, origin_of
from sava.ledger.copies import Copies
from sava.ledger.lives import Life, Lives
from sava.ledger.own_disk import Ended, OwnDisk
from sava.ledger.owner_host import MirrorOptions, OwnedJournal
from sava.ledger.ports import (
    Choose,
    JournalRecords,
    Neighbours,
    RecordChanged,
    Stored,
)
from sava.ledger.protocol import (
    JournalId,
    JournalRecord,
    JournalState,
    StorageId,
)
from sava.ledger.protocol.errors import JournalFenced
from sava.ledger.protocol.record import opened
from sava.ledger.recent import RecentBytes
from sava.ledger.server import Session, Write
from sava.ledger.stretches import Stretches
from sava.ledger.wire import Door
from sava.records import RecordBatch
from sava.storage.journal import Journal
from sava.storage.journal_index import BATCH
from sava.tasks import cancelled, spawn
from sava.wal import DiskFull, LocalDisk

log = logging.getLogger(__name__)

RETRY_S: Final = 0.2
LONGEST_RETRY_S: Final = 2.0
LOOK_AGAIN_S: Final = 1.0
TIDY_S: Final = 5.0
MIRRORS: Final = "mirrors"
NEVER_OPENED: Final = 8
"""So many lives are remembered whose record was never seen: the write may have happened all the same, and
somebody will ask for the end of that journal."""


class MirroredJournal:
    """Owned by the event loop."""

    def __init__(
        self,
        broker: int,
        disk: LocalDisk,
        journal: Journal,
        lives: Lives,
        *,
        records: JournalRecords,
        neighbours: Neighbours,
        choose: Choose,
        door: Door,
        brokers: Callable[[], int],
        options: MirrorOptions,
        renew: Callable[[str], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """``disk`` is the journal's. ``brokers``: how many the cluster has. ``renew`` gives this broker's
        registration up and asks for another."""
        self._broker = broker
        self._journal = journal
        self._lives = lives
        self._records = records
        self._neighbours = neighbours
        self._choose = choose
        self._door = door
        self._brokers = brokers
        self._options = options
        self._renew = renew
        self._fail = fail
        self.storage = StorageId(journal.identity.storage_id)
        self._older = Stretches(disk, origin=self.storage)
        self.copies = Copies(disk.directory(MIRRORS), self.storage, fail=fail)
        self.own_disk = OwnDisk(broker, journal, lives, self.copies, self._older, fail=fail)
        self.own_disk.end_life = self._end
        self.peers = Asking(door, neighbours, self.storage, self.own_disk)
        self._incarnation = 0
        self.owned: OwnedJournal | None = None
        """The life that goes on."""
        self._degraded_before = 0.0
        self._ended: dict[int, Ended] = {}
        """Lives that are over, until that is written down."""
        self._needs_replay = False
        self._beginning: asyncio.Task[None] | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Lock()

    @property
    def degraded_s(self) -> float:
        """How long fewer copies were enough than should be, in all lives of this process; for figures."""
        return self._degraded_before + (self.owned.degraded_s if self.owned is not None else 0.0)

    async def open(self) -> None:
        """Find what this disk holds. Raises LogCorrupt, DiskFailed."""
        await self._lives.belong_to(self.storage, self._journal.found_end)
        await self.copies.open()
        self.copies.start(self._records)
        self._tidying = spawn(self._tidy(), name="journals", failed=self._fail)

    def session(self, write: Write) -> Session:
        """Somebody has connected to speak about journals."""
        return Session(self.own_disk, write)

    # -- beginning ---------------------------------------------------------------------------

    def registered(self, incarnation: int) -> None:
        """This broker is there under this number; 0: it has lost it already, and will hear of it."""
        if not incarnation:
            return
        self._incarnation = incarnation
        self._journal.expect_life()
        self._beginning = spawn(self._begin(incarnation), name=f"journal {incarnation}", failed=self._fail)

    async def _begin(self, incarnation: int) -> None:
        pause, reason = RETRY_S, ""
        while True:
            try:
                await self._try_begin(JournalId(self._broker, incarnation))
                return
            except HostError:
                raise
            except (SavaError, TimeoutError, OSError) as error:
                if str(error) != reason:
                    reason = str(error)
                    log.warning("journals: not open yet incarnation=%d error=%s", incarnation, reason)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_RETRY_S)

    async def _try_begin(self, journal: JournalId) -> None:
        await self._write_ends()
        earlier = await self._closed_ones(journal)
        adopted = await self._settle(earlier)
        members, qw, qa = await self._members(earlier)
        recent = RecentBytes(self._options.window_bytes, self._grown)
        tap = recent.tap if len(members) > 1 else None
        start = await self._journal.set_tap(tap)
        recent.begin(start)
        if self._lives.get(journal.incarnation) is not None:
            self._check_not_ended(journal)
        await self._lives.change(journal.incarnation, partial(_begun, journal.incarnation, start))
        record = opened(start, members, qw=qw, qa=qa, by=uuid.uuid4().hex, is_degraded=len(members) < qa)
        revision = await self._open_record(journal, record)
        self._check_not_ended(journal)
        # No await from here on until it can be found: whoever ends it must not miss it.
        self.owned = OwnedJournal(
            journal,
            record,
            revision,
            records=self._records,
            neighbours=self._neighbours,
            choose=self._choose,
            door=self._door,
            recent=recent,
            older=self._older,
            brokers=self._brokers,
            set_tap=self._journal.set_tap,
            is_tapped=tap is not None,
            options=self._options,
            committed=self._journal.committed,
            fenced=self._fenced,
            fail=self._fail,
        )
        self.owned.start()
        self.owned.grown()
        await self._journal.begin_life(self.owned, [batch for _, batches in adopted for batch in batches])
        for life, _ in adopted:
            await self._lives.change(
                life.incarnation, partial(_changed, adopted=await self._journal.drained())
            )
        log.info("journals: open journal=%s from=%d disks=%s", journal, start, ",".join(members))

    async def _closed_ones(self, journal: JournalId) -> Mapping[JournalId, Stored]:
        """The records of this disk's earlier journals, when all of them are closed."""
        changed = asyncio.Event()
        end = self._records.listen(None, changed.set)
        is_told = False
        try:
            while True:
                changed.clear()
                records = await self._records.of(self._broker)
                earlier = {
                    key: each
                    for key, each in records.items()
                    if key != journal and origin_of(each.record) == self.storage
                }
                going_on = [
                    str(key) for key, each in earlier.items() if each.record.state is not JournalState.CLOSED
                ]
                if not going_on:
                    return earlier
                if not is_told:
                    is_told = True
                    log.info("journals: waiting for the end of others journals=%s", ",".join(going_on))
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await changed.wait()
        finally:
            end()

    async def _settle(self, earlier: Mapping[JournalId, Stored]) -> list[tuple[Life, list[RecordBatch]]]:
        """Know where each earlier life ended, and have all of it."""
        lacking: list[tuple[Life, list[RecordBatch]]] = []
        for life in self._lives:
            journal = JournalId(self._broker, life.incarnation)
            stored = earlier.get(journal)
            if stored is None:
                continue  # forgotten soon, or never opened
            life = self._lives.get(life.incarnation) or life
            if life.closed != stored.record.end:
                await self._lives.change(life.incarnation, partial(_changed, closed=stored.record.end))
                life = self._lives.get(life.incarnation) or life
                self._needs_replay |= life.end is not None and stored.record.end < life.end
            if life.lacks is not None:
                lacking.append((life, await self._fetch(journal, stored.record, *life.lacks)))
        if self._needs_replay:
            await self._journal.replay(self._lives.void)
            self._needs_replay = False
        return lacking

    async def _fetch(
        self, journal: JournalId, record: JournalRecord, start: int, end: int
    ) -> list[RecordBatch]:
        """What a journal holds that this disk had not made durable. It is not much: what was on its way."""
        closed = ClosedJournal(journal, record, self.peers, own=self.storage)
        await closed.locate()
        found: list[RecordBatch] = []
        async for records in closed.records(start, end):
            found += [RecordBatch.parse(each.payload) for each in records if each.kind == BATCH]
        log.info("journals: read from other disks journal=%s batches=%d", journal, len(found))
        return found

    async def _members(self, earlier: Mapping[JournalId, Stored]) -> tuple[tuple[StorageId, ...], int, int]:
        """The disks of a new journal, this one first; how many there should be, and how many must
        acknowledge.

        If too few are there, the places of those that are missing go to disks of this broker's former
        journals. Nothing is acknowledged under such a record before one of them is back or another disk takes
        its place: appends are refused. But the journal is open, so topics can be read. Without that, a broker
        that restarts while a mirror is away would serve nothing, where one that did not restart serves reads.
        """
        changed = asyncio.Event()
        end = self._neighbours.listen(changed.set)
        deadline = asyncio.get_running_loop().time() + self._options.mirror_timeout_s
        is_told = False
        try:
            while True:
                changed.clear()
                candidates = self._neighbours.all()
                qw, qa = self._options.quorums(max(self._brokers(), len(candidates)))
                chosen = self._choose(
                    candidates, own=self.storage, keep=(), avoid=(), count=qw - 1, needed=qa - 1
                )
                is_late = asyncio.get_running_loop().time() > deadline
                if 1 + len(chosen) >= qa or (self._options.may_degrade and is_late):
                    return (self.storage, *chosen), qw, qa
                former = _former_mirrors(earlier, (self.storage, *chosen))[: qa - 1 - len(chosen)]
                if is_late and not is_told:
                    is_told = True
                    log.warning(
                        "journals: %d disks must have a message, and %d are there; %s. Start the other "
                        "brokers, or set journal.degraded to allow",
                        *(qa, 1 + len(chosen)),
                        "messages are refused" if former else "no topic is served before",
                    )
                if is_late and 1 + len(chosen) + len(former) >= qa:
                    return (self.storage, *chosen, *former), qw, qa
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await changed.wait()
        finally:
            end()

    async def _open_record(self, journal: JournalId, record: JournalRecord) -> int:
        while True:
            try:
                return await self._records.open(journal, record)
            except RecordChanged as changed:
                if changed.found is not None and changed.found.record == record:
                    return changed.found.revision
                self._renew(f"journal {journal} exists already")
                raise
            except (SavaError, TimeoutError) as error:
                log.info("journals: a record is written again journal=%s error=%s", journal, error)
                await asyncio.sleep(RETRY_S)

    def _check_not_ended(self, journal: JournalId) -> None:
        """A fence that came while the record was written is answered with "nothing here", perhaps not yet:
        that it is written down takes as long as the disk likes, and the life must not begin meanwhile."""
        life = self._lives.get(journal.incarnation)
        if life is None or life.end is not None or journal.incarnation in self._ended:
            self._renew("its journal was ended before it was open")
            raise JournalFenced(journal)

    def _grown(self) -> None:
        """(On the writer's thread.)"""
        self._journal.loop.call_soon_threadsafe(self._send)

    def _send(self) -> None:
        if self.owned is not None:
            self.owned.grown()

    # -- ending ------------------------------------------------------------------------------

    async def _end(self, incarnation: int) -> Ended | None:
        """End this life, if it goes on; where it ended."""
        async with self._stopping:  # whoever else ends it has written down where, when this goes on
            life = self._lives.get(incarnation)
            if incarnation in self._ended:
                return self._ended[incarnation]
            is_unborn = incarnation == self._incarnation and self.owned is None
            if is_unborn and life is not None and life.end is None:
                # It has yet to begin, and will find that it was ended.
                return self._ended.setdefault(incarnation, Ended(life.start, life.start))
        if incarnation != self._incarnation:
            return None
        ended = await self._stop(JournalFenced(JournalId(self._broker, incarnation)))
        if ended is not None:
            self._renew("its journal was ended")
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
        why = JournalFenced(JournalId(self._broker, self._incarnation))
        self._journal.fail_waiting(why)
        await self._stop(why)

    async def _stop(self, why: BaseException) -> Ended | None:
        """When this returns, the life is over and its end is written down, whoever was first to end it."""
        async with self._stopping:
            return await self._stop_now(why)

    async def _stop_now(self, why: BaseException) -> Ended | None:
        owned, self.owned = self.owned, None
        if owned is None:
            await self._end_unborn()
            return None
        owned.stop()
        self._degraded_before += owned.degraded_s
        self._journal.end_life(why)
        end = await self._journal.drained()
        await self._journal.set_tap(None)
        self._needs_replay = True
        ended = self._ended[owned.owner.journal.incarnation] = Ended(end, owned.owner.commit)
        await self._try_to_write_ends()
        await owned.close()
        return ended

    async def _end_unborn(self) -> None:
        """The registration was lost while its journal was being opened. The record may be there, so somebody
        will ask where the life ended: where it was to begin."""
        await self._lives.settled()
        life = self._lives.get(self._incarnation)
        if life is not None and life.end is None:
            self._ended.setdefault(self._incarnation, Ended(life.start, life.start))
            await self._try_to_write_ends()

    async def _try_to_write_ends(self) -> None:
        try:
            await self._write_ends()
        except DiskFull as error:
            log.warning("journals: the end of a life is not written down yet error=%s", error)

    async def _write_ends(self) -> None:
        """Before the next life begins. Raises DiskFull."""
        for incarnation, ended in list(self._ended.items()):
            await self._lives.change(incarnation, partial(_over, ended.end))
            self._ended.pop(incarnation, None)

    async def close(self) -> None:
        """Before the journal is closed. What is in flight fails; topics are closed by then."""
        await cancelled(self._beginning, self._tidying)
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._stop(JournalFenced(JournalId(self._broker, self._incarnation)))
        await self.peers.close()
        await self.own_disk.close()
        await self.copies.close()
        await self._lives.settled()

    # -- tidying -----------------------------------------------------------------------------

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            try:
                await self._forget_earlier()
            except HostError as error:
                self._fail(error)
                return
            except (SavaError, TimeoutError) as error:
                log.info("journals: earlier ones were not looked through error=%s", error)

    async def _forget_earlier(self) -> None:
        """Of the journals whose messages are all in registered segments."""
        if not self._journal.is_alive:
            return
        never_opened = [life.incarnation for life in self._lives if life.closed is None]
        for incarnation in never_opened[:-NEVER_OPENED]:
            await self._lives.forget(incarnation)
        for life in self._lives:
            is_over = life.closed is not None and life.lacks is None
            if life.incarnation == self._incarnation or not is_over or self._journal.floor < life.last:
                continue
            journal = JournalId(self._broker, life.incarnation)
            stored = await self._records.get(journal)
            if stored is not None:
                await self._records.remove(journal, revision=stored.revision)
            if life.void is not None and await self._journal.first() < life.void[1]:
                continue  # the next start must know what to leave out
            await self._lives.forget(life.incarnation)
            log.info("journals: all is in segments, and it is forgotten journal=%s", journal)


def _former_mirrors(earlier: Mapping[JournalId, Stored], besides: tuple[StorageId, ...]) -> list[StorageId]:
    """The disks of these journals, those of the newest first."""
    newest_first = [each.record for _, each in sorted(earlier.items(), reverse=True)]
    every = dict.fromkeys(disk for record in newest_first for disk in reversed(record.storages))
    return [disk for disk in every if disk not in besides]


def _begun(incarnation: int, start: int, life: Life | None) -> Life | None:
    """None: a fence was faster, and where that life ended must stay."""
    return Life(incarnation=incarnation, start=start) if life is None or life.end is None else None


def _changed(life: Life | None, **fields: int) -> Life | None:
    return msgspec.structs.replace(life, **fields) if life is not None else None


def _over(end: int, life: Life | None) -> Life | None:
    return msgspec.structs.replace(life, end=end) if life is not None and life.end is None else None
