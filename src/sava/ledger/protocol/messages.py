"""Every message about a ledger. Encoding: one tagged msgpack array.

Each names the ledger and the disk (``storage``): the one that is asked, and in answers the one that speaks.
A request that reaches another disk than the one it names (the broker has lost its disk and has a new one) is
refused, never answered in the name of the other.

    owner   ── Join ─▶ member        once for each connection: where do we continue?
            ◀─ JoinAnswer ──
            ── LedgerAppend, LedgerAppend … ─▶   in order, without gaps; whole records
            ◀─ Durable ──            a fact that stays true: may be lost, late, or repeated
            ── Trim ─▶               what lies before it is in registered segments

    recoverer ── Fence ─▶ member   ◀─ FenceAnswer ──    stored before it is said, with the end, in one step
                ── Check ─▶          ◀─ CheckAnswer ──   which parts of the copy are not what was written
                ── Read ─▶           ◀─ ReadAnswer ──
                ── WriteBack ─▶      ◀─ Durable ──

    any sender  ◀─ LedgerRefused ──        and why
"""

from __future__ import annotations

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
    """The greatest commit position that it received."""


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
