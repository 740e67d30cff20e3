"""LedgerMember: one disk's copy of one ledger; and every message about a ledger.

It takes bytes that continue what it has, says how far they are durable, and obeys the greatest epoch that it
has heard. Two promises make recovery sound:

**Said is synced.** ``Durable`` and ``FenceAnswer`` leave after the sync that covers them.

**The fence and the end are one step.** From the moment a fence is taken, nothing of a lower epoch is; what
was taken before is synced, then the fence is stored, then both are said together:

    member   has 100, hears Fence(1), answers "100"         (the fence only in memory)
    power    is cut; the member returns, knows of no fence
    owner    sends 100..120; the member syncs, says Durable(120); acknowledged
    recovery closes the ledger at 100                        → lost

A disk that knows nothing of the ledger is fenced all the same: it stores the epoch and answers that it has
no copy. That is an answer, and it counts, because it is given by the disk that is listed: had it ever said
Durable, it would have a copy.

**The note** is a small record beside the data, synced: fence, where the copy begins, and a *watermark*, up to
where the data is known to be durable. After a restart a bad record before the watermark is damage: the disk
still answers for its end, and says which part it cannot give back. A bad record behind the watermark is taken
for a torn write, and the copy ends there. So the watermark follows the data closely: with each note, after
every ``note_bytes``, and when nothing else is to be done.

The host's part: do each ``Work`` in this order and then call ``done``: begin the copy again if ``base`` is
there; write ``writes``; sync; store ``note`` in place of the former one and sync; delete what lies before
``floor``. Nothing else is to be written meanwhile. When a write finds no room: take back all of this work's
writes, then ``refuse``; when only the note finds none, the writes stay (others may have got them, if this is
the owner's disk): ``done`` without it, and try again later. When a write or sync fails: stop the process;
this object must hear of nothing more, and no broker of it. ``Check`` and ``Read`` are the host's alone: only
what is durable, and only what verifies. After a restart: scan the data, ``held_after_restart``, cut off what
is torn, write again what lies behind the watermark, and sync, before the first message.

**What a disk is asked.** Each message names the ledger and the disk (``storage``): the one that is asked, and
in answers the one that speaks. A request that reaches another disk than the one it names (the broker has lost
its disk and has a new one) is refused, never answered in the name of the other.

    owner   ── Join ─▶ member        once for each connection: where do we continue?
            ◀─ JoinAnswer ──
            ── LedgerAppend, LedgerAppend … ─▶   in order, without gaps; whole records
            ◀─ Durable ──            a fact that stays true: may be lost, late, or repeated
            ── Trim ─▶               what lies before it is in registered segments

    recoverer ── Fence ─▶ member   ◀─ FenceAnswer ──    stored before it is said, with the end, in one step
                ── Check ─▶          ◀─ CheckAnswer ──   which parts of the copy are not what was written
                ── Read ─▶           ◀─ ReadAnswer ──
                ── WriteBack ─▶      ◀─ Durable ──

    either      ◀─ LedgerRefused ──        and why
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import msgspec

from sava.ledger.protocol.record import LedgerId, Range, StorageId


class Join(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A disk without a copy begins one at ``start``. One that has a copy continues at its end, unless that
    lies before ``floor``: the owner no longer has what comes next, and all of the copy is in segments; it
    then begins again at ``start``."""

    ledger: LedgerId
    storage: StorageId
    epoch: int
    start: int
    floor: int


class JoinAnswer(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """``end`` is where the copy continues. ``durable`` is said again here: the Durable that said it may have
    been lost with the connection, and nothing else would ever repeat it."""

    ledger: LedgerId
    storage: StorageId
    end: int
    durable: int


class LedgerAppend(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """``data`` is whole records. ``commit`` and ``floor`` are how far the ledger was committed, and how far
    it may be trimmed, when this was sent."""

    ledger: LedgerId
    storage: StorageId
    epoch: int
    position: int
    data: bytes
    commit: int = 0
    floor: int = 0


class Durable(msgspec.Struct, frozen=True, array_like=True, tag=4):
    ledger: LedgerId
    storage: StorageId
    end: int


class Fence(msgspec.Struct, frozen=True, array_like=True, tag=5):
    ledger: LedgerId
    storage: StorageId
    epoch: int


class CopyState(msgspec.Struct, frozen=True, array_like=True):
    """What a disk has of a ledger."""

    base: int
    """Where its copy began."""
    floor: int
    """What lies before it may have been deleted, because it is in registered segments."""
    end: int
    """Durable, and it will not grow by anything of a lower epoch than the one in the answer."""
    commit: int
    """The greatest commit position that it has heard."""


class FenceAnswer(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """``copy`` is None when this disk never had one: it has said Durable to no owner."""

    ledger: LedgerId
    storage: StorageId
    epoch: int
    copy: CopyState | None


class Check(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Read the copy from ``start`` to ``end`` and verify each record."""

    ledger: LedgerId
    storage: StorageId
    start: int
    end: int


class CheckAnswer(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """``bad`` are the parts of ``start .. end`` that this disk cannot give back as they were written."""

    ledger: LedgerId
    storage: StorageId
    start: int
    end: int
    bad: tuple[Range, ...]


class Read(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Whole records from ``start``, about as many as fit into ``max_bytes``, at least one, none from ``end``
    on."""

    ledger: LedgerId
    storage: StorageId
    start: int
    end: int
    max_bytes: int


class ReadAnswer(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Verified. Empty: not here, or not intact."""

    ledger: LedgerId
    storage: StorageId
    position: int
    data: bytes


class WriteBack(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Of a recovery, to a disk that it has fenced under the same epoch. Continues the copy at its end, or
    repairs a part of it. ``is_first``: begin a copy here, also if there is one that ends before; all of that
    one is in segments."""

    ledger: LedgerId
    storage: StorageId
    epoch: int
    position: int
    data: bytes
    is_first: bool = False


class Trim(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """What lies before ``floor`` is in registered segments. That is true whichever broker says it; it has an
    epoch because a recovery counts on what a disk said it holds until the ledger is closed."""

    ledger: LedgerId
    storage: StorageId
    epoch: int
    floor: int


class RefusalReason(IntEnum):
    FENCED = 1
    """A greater epoch was promised (``epoch``)."""
    GAP = 2
    """It does not continue the copy, which ends at ``end``."""
    FULL = 3
    """No room on the disk; the copy ends at ``end``."""
    OTHER_DISK = 4
    """The disk that was asked for is not here; ``storage`` is the one that is."""
    NOT_JOINED = 5
    """There is no copy to continue."""


class LedgerRefused(msgspec.Struct, frozen=True, array_like=True, tag=13):
    ledger: LedgerId
    storage: StorageId
    reason: RefusalReason
    epoch: int = 0
    end: int = 0


Message = (
    Join
    | JoinAnswer
    | LedgerAppend
    | Durable
    | Fence
    | FenceAnswer
    | Check
    | CheckAnswer
    | Read
    | ReadAnswer
    | WriteBack
    | Trim
    | LedgerRefused
)

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(data)


# -- a disk's copy -------------------------------------------------------------------------------------------


class MemberNote(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored beside the data."""

    ledger: LedgerId
    fence: int = 0
    base: int | None = None
    """None: there is no copy, only a fence."""
    floor: int = 0
    watermark: int = 0
    commit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the host is to make durable, in the order of the fields."""

    number: int
    base: int | None
    """Begin the copy here; whatever there was of one goes."""
    writes: tuple[tuple[int, bytes], ...]
    note: MemberNote | None
    floor: int | None
    """Delete what lies before it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a scan after a restart makes of a copy."""

    end: int
    bad: tuple[Range, ...]
    """Before ``end``, and not to be given back."""


def held_after_restart(note: MemberNote, intact: Sequence[Range]) -> Kept:
    """``intact`` are the ranges of verified records from ``max(base, floor)`` on, in order."""
    assert note.base is not None
    at = max(note.base, note.floor)
    bad: list[Range] = []
    for part in intact:
        if part.start > at:
            if at >= note.watermark:
                break
            bad.append(Range(at, part.start))
        at = part.end
    if at < note.watermark:
        bad.append(Range(at, note.watermark))
        at = note.watermark
    return Kept(at, tuple(bad))


class LedgerMember:
    """Owned by one task."""

    def __init__(
        self,
        storage: StorageId,
        note: MemberNote,
        *,
        end: int = 0,
        note_bytes: int = 4 << 20,
    ) -> None:
        """``note`` as it was stored (a new one for a ledger that is not known here), and the durable end of
        its copy."""
        self.storage = storage
        self.ledger = note.ledger
        self._note = note
        """As stored."""
        self._note_bytes = note_bytes
        self._fence = note.fence
        self._base = note.base
        self._floor = note.floor
        self._commit = note.commit
        self._end = end
        """Of what was taken."""
        self._durable = end
        self._new_base: int | None = None
        self._writes: list[tuple[int, bytes]] = []
        self._asked: list[int] = []
        """Epochs of fences to be answered when all that was taken before them is durable."""
        self._under_way: tuple[Work, int, list[int]] | None = None
        self._trimmed = note.floor
        self._number = 0

    @property
    def end(self) -> int:
        return self._end

    @property
    def durable_end(self) -> int:
        return self._durable

    # -- messages ----------------------------------------------------------------------------

    def receive(self, message: Join | LedgerAppend | Fence | WriteBack | Trim) -> list[Message]:
        """Take a message; what can be answered at once. More is answered by ``done``."""
        if message.storage != self.storage:
            return [LedgerRefused(self.ledger, self.storage, RefusalReason.OTHER_DISK)]
        if message.epoch < self._fence:
            return [LedgerRefused(self.ledger, self.storage, RefusalReason.FENCED, self._fence, self._end)]
        if isinstance(message, Fence):
            return self._take_fence(message)
        if isinstance(message, Trim):
            self._raise_floor(message.floor)
            return []
        if isinstance(message, Join):
            return self._join(message)
        if isinstance(message, WriteBack):
            return self._write_back(message)
        self._commit = max(self._commit, message.commit)
        self._raise_floor(message.floor)
        return self._take(message.position, message.data)

    def _join(self, message: Join) -> list[Message]:
        if self._base is None or self._end < message.floor:
            self._begin(message.start)
        self._raise_floor(message.floor)
        return [JoinAnswer(self.ledger, self.storage, self._end, self._durable)]

    def _begin(self, base: int) -> None:
        self._base = self._new_base = self._end = base
        self._writes.clear()

    def _take(self, position: int, data: bytes) -> list[Message]:
        if self._base is None:
            return [LedgerRefused(self.ledger, self.storage, RefusalReason.NOT_JOINED, self._fence)]
        if position > self._end:
            return [LedgerRefused(self.ledger, self.storage, RefusalReason.GAP, self._fence, self._end)]
        # All that is ever sent is one stream: what is here already is the same bytes.
        news = data[self._end - position :]
        if news:
            self._writes.append((self._end, news))
            self._end += len(news)
        elif self._durable >= position + len(data):
            return [Durable(self.ledger, self.storage, self._durable)]
        return []

    def _take_fence(self, message: Fence) -> list[Message]:
        self._fence = message.epoch
        self._asked = [message.epoch]
        return []

    def _write_back(self, message: WriteBack) -> list[Message]:
        if message.epoch != self._fence:
            return [LedgerRefused(self.ledger, self.storage, RefusalReason.FENCED, self._fence, self._end)]
        if message.is_first and (self._base is None or self._end < message.position):
            self._begin(message.position)
        if self._base is None:
            return [LedgerRefused(self.ledger, self.storage, RefusalReason.NOT_JOINED, self._fence)]
        if not self._base <= message.position <= self._end:
            return [LedgerRefused(self.ledger, self.storage, RefusalReason.GAP, self._fence, self._end)]
        # What is here already may be damaged: it is written again, the same bytes at the same place.
        self._writes.append((message.position, message.data))
        self._end = max(self._end, message.position + len(message.data))
        return []

    def _raise_floor(self, floor: int) -> None:
        if self._base is not None:
            self._floor = max(self._floor, min(floor, self._end))

    # -- the disk ----------------------------------------------------------------------------

    def poll(self, *, is_idle: bool = False) -> Work | None:
        """The next work, when the one before it is done. ``is_idle``: nothing else is to be done, so bring
        the note up to date."""
        if self._under_way is not None:
            return None
        behind = self._durable - self._note.watermark if self._base is not None else 0
        must_note = bool(self._asked) or self._new_base is not None or self._floor > self._trimmed
        wants_note = behind >= (1 if is_idle else self._note_bytes)
        if not (must_note or wants_note or self._writes):
            return None
        self._number += 1
        work = Work(
            number=self._number,
            base=self._new_base,
            writes=tuple(self._writes),
            note=self._next_note() if must_note or wants_note else None,
            floor=self._floor if self._floor > self._trimmed else None,
        )
        self._under_way = (work, self._end, self._asked)
        self._new_base, self._writes, self._asked = None, [], []
        return work

    def _next_note(self) -> MemberNote:
        """Stored after the sync of all that was taken so far."""
        return MemberNote(
            ledger=self.ledger,
            fence=self._fence,
            base=self._base,
            floor=self._floor,
            watermark=self._end if self._base is not None else 0,
            commit=self._commit,
        )

    def done(self, number: int, *, is_noted: bool = True) -> list[Message]:
        """The work is durable; what may be said now. Not ``is_noted``: the disk had no room for the note
        (which is wanted again), but all else was done."""
        assert self._under_way is not None
        work, end, asked = self._under_way
        assert work.number == number
        assert is_noted or work.base is None
        self._under_way = None
        self._durable = end
        if not is_noted:
            self._asked, asked = self._asked or asked, []
        elif work.note is not None:
            self._note = work.note
            self._trimmed = self._note.floor
        said: list[Message] = []
        if work.writes or work.base is not None:
            # Also of a copy that has only begun: while nothing is written, its owner would take it for stuck.
            said.append(Durable(self.ledger, self.storage, end))
        said += [FenceAnswer(self.ledger, self.storage, epoch, self._copy_state()) for epoch in asked]
        return said

    def _copy_state(self) -> CopyState | None:
        note = self._note
        if note.base is None:
            return None
        return CopyState(note.base, note.floor, self._durable, note.commit)

    def refuse(self, number: int) -> list[Message]:
        """The disk had no room for the work, and holds nothing of it."""
        assert self._under_way is not None
        work, _, asked = self._under_way
        assert work.number == number
        self._under_way = None
        self._asked = self._asked or asked
        self._base, self._new_base = self._note.base, None
        self._writes.clear()
        self._end = self._durable
        # The floor may be that of a copy which was to begin behind this one's end.
        self._floor = max(self._note.floor, min(self._floor, self._end))
        return [LedgerRefused(self.ledger, self.storage, RefusalReason.FULL, self._fence, self._end)]
