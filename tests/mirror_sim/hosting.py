"""Hosting: the disk side of a ledger, a broker's own or another's: one ``LedgerMember`` over one ``Copy``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sava.ledger.protocol.member import (
    Check,
    CheckAnswer,
    Durable,
    Fence,
    FenceAnswer,
    Join,
    LedgerAppend,
    LedgerMember,
    LedgerRefused,
    MemberNote,
    Message,
    Read,
    ReadAnswer,
    RefusalReason,
    Trim,
    Work,
    WriteBack,
    held_after_restart,
)
from sava.ledger.protocol.record import LedgerId, Range, without
from sava.wal.errors import DiskFailed, DiskFull
from tests.mirror_sim.copies import Copy

if TYPE_CHECKING:
    from tests.mirror_sim.broker import Broker

IDLE_US = 60_000


class Host:
    """Of one life of the process."""

    def __init__(self, broker: Broker, ledger: LedgerId) -> None:
        self.broker = broker
        self.world = broker.world
        self.ledger = ledger
        self.copy = Copy(broker.disk, ledger)
        note = self.copy.note
        end = 0
        if note is not None and note.base is not None:
            end = self._restore(note)
        self.member = LedgerMember(
            broker.storage,
            note or MemberNote(ledger=ledger),
            end=end,
            note_bytes=self.world.knobs.note_bytes,
        )
        self._is_busy = False
        self._writer: tuple[int, int] | None = None
        """Who hears of durable ends: broker and channel."""
        self._askers: dict[int, int] = {}
        self._idle_at = 0

    def _restore(self, note: MemberNote) -> int:
        assert note.base is not None
        kept = held_after_restart(note, self.copy.intact(max(note.base, note.floor)))
        self.copy.cut(kept.end)
        self.copy.rewrite(note.watermark, kept.end)
        self.copy.sync()
        if kept.bad:
            self.world.count("damage seen at a restart")
        return kept.end

    # -- messages ----------------------------------------------------------------------------

    def receive(
        self, source: int, channel: int, message: Join | LedgerAppend | Fence | WriteBack | Trim
    ) -> None:
        if isinstance(message, Fence):
            self._askers[message.epoch] = source
        elif not isinstance(message, Trim):
            self._writer = (source, channel)
        before = self.member.end
        answers = self.member.receive(message)
        if self.member.end > before and isinstance(message, LedgerAppend | WriteBack):
            self.world.oracle.taken(self.broker.storage, self.ledger, message.epoch)
        for answer in answers:
            if isinstance(answer, FenceAnswer):
                self.world.oracle.fenced(self.broker, answer)
            self.broker.send(source, answer, channel)
        self.pump()

    def answer(self, source: int, message: Check | Read) -> None:
        """Only what is durable, and only what verifies."""
        if message.storage != self.broker.storage:
            self.broker.send(
                source, LedgerRefused(self.ledger, self.broker.storage, RefusalReason.OTHER_DISK)
            )
            return
        note = self.copy.note
        lowest = max(note.base or 0, note.floor) if note is not None else 0
        end = min(message.end, self.member.durable_end)
        if isinstance(message, Read):
            data = b""
            if lowest <= message.start < end:
                data = self.copy.read(message.start, end, message.max_bytes)
            self.broker.send(source, ReadAnswer(self.ledger, self.broker.storage, message.start, data))
            return
        intact = self.copy.intact(message.start, end) if lowest <= message.start < end else []
        bad = without(Range(message.start, message.end), intact)
        reply = CheckAnswer(self.ledger, self.broker.storage, message.start, message.end, tuple(bad))
        self.broker.send(source, reply)

    # -- the disk ----------------------------------------------------------------------------

    def pump(self, *, is_idle: bool = False) -> None:
        if self._is_busy:
            return
        work = self.member.poll(is_idle=is_idle)
        if work is None:
            return
        try:
            if work.base is not None:
                self.copy.begin(work.base)
            for position, data in work.writes:
                self.world.oracle.wrote(self.ledger, self.copy.end, position, data)
                self.copy.write(position, data)
        except DiskFull:
            self._refuse(work)
            return
        except DiskFailed:
            self.broker.die("a write failed")
            return
        self._is_busy = True
        if self.broker.ledger is not None and self.broker.ledger.host is self and work.writes:
            position, data = work.writes[-1]
            self.broker.ledger.written(position + len(data))
        self.world.after(self.broker.sync_us(), self._finish, work, self.broker.life)

    def _finish(self, work: Work, life: int) -> None:
        broker = self.broker
        if not broker.is_life(life):
            return
        if broker.is_paused:
            self.world.after(20_000, self._finish, work, life)
            return
        is_noted = True
        try:
            self.copy.sync()
            if work.note is not None:
                self.copy.store(work.note)
        except DiskFull:
            is_noted = False
        except DiskFailed:
            broker.die("a sync failed")
            return
        self._is_busy = False
        if not is_noted and work.base is not None:
            self._refuse(work)
            return
        if is_noted and work.floor is not None:
            self.world.oracle.trimmed(self.ledger, work.floor)
        for message in self.member.done(work.number, is_noted=is_noted):
            self._tell(message)
        if is_noted:
            self.pump()
        else:
            self.world.after(100_000, self._retry, life)
        self._idle_at = self.world.now + IDLE_US
        self.world.after(IDLE_US, self._idle, life)

    def _idle(self, life: int) -> None:
        if self.broker.is_life(life) and self.world.now >= self._idle_at:
            self.pump(is_idle=True)

    def _refuse(self, work: Work) -> None:
        self.world.count("refused by a full disk")
        try:
            if work.base is not None and self.copy.note is not None and self.copy.note.base is not None:
                self.copy._open(self.copy.note.base)
            self.copy.cut(self.member.durable_end)
            self.copy.sync()
        except DiskFailed:
            self.broker.die("a cut failed")
            return
        for message in self.member.refuse(work.number):
            self._tell(message)
        if self.broker.ledger is not None and self.broker.ledger.host is self:
            self.broker.ledger.own_disk_full(self.member.end)
        self.world.after(100_000, self._retry, self.broker.life)

    def _retry(self, life: int) -> None:
        if self.broker.is_life(life):
            self.pump()

    def _tell(self, message: Message) -> None:
        if isinstance(message, FenceAnswer):
            self.world.oracle.fenced(self.broker, message)
            self.broker.send(self._askers.get(message.epoch, self.broker.id), message)
            return
        if isinstance(message, Durable | LedgerRefused):
            ledger = self.broker.ledger
            if ledger is not None and ledger.host is self:
                if isinstance(message, Durable):
                    ledger.receive(self.broker.id, 0, message)
            elif self._writer is not None:
                self.broker.send(self._writer[0], message, self._writer[1])
