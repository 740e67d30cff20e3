"""Disks that answer about journals without files or sockets, and real bytes of journals to put on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sava.ledger.protocol import (
    Check,
    CheckAnswer,
    CopyState,
    Durable,
    Fence,
    FenceAnswer,
    LedgerId,
    LedgerRefused,
    Message,
    Range,
    Read,
    ReadAnswer,
    RefusalReason,
    StorageId,
    WriteBack,
)
from sava.ledger.recoverer import parse
from sava.ledger.registry import PeerUnreachable
from sava.wal import LocalDisk, Log, LogOptions


@dataclass
class Copy:
    base: int = 0
    data: bytearray = field(default_factory=bytearray)
    floor: int = 0
    commit: int = 0
    fence: int = 0
    bad: tuple[Range, ...] = ()

    @property
    def end(self) -> int:
        return self.base + len(self.data)


@dataclass
class Disks:
    """``live_brokers.LedgerPeers``."""

    copies: dict[tuple[StorageId, LedgerId], Copy] = field(default_factory=dict)
    known: set[StorageId] = field(default_factory=set)
    """Of brokers that are there."""
    asked: list[tuple[StorageId, Message]] = field(default_factory=list)
    before: Callable[[StorageId, Message], Awaitable[None]] | None = None

    def put(self, storage: str, journal: LedgerId, data: bytes, **facts: Any) -> Copy:
        copy = self.copies[StorageId(storage), journal] = Copy(data=bytearray(data), **facts)
        self.known.add(StorageId(storage))
        return copy

    def lose(self, *storages: str) -> None:
        self.known -= {StorageId(storage) for storage in storages}

    async def ask(
        self, storage: StorageId, message: Message, *, origin: StorageId, timeout: float
    ) -> Message:
        self.asked.append((storage, message))
        if self.before is not None:
            await self.before(storage, message)
        if storage not in self.known:
            raise PeerUnreachable(f"disk {storage} is not there")
        return self._answer(storage, message, origin)

    def _answer(self, storage: StorageId, message: Message, origin: StorageId) -> Message:
        journal = message.ledger
        copy = self.copies.get((storage, journal))
        match message:
            case Fence(epoch=epoch):
                copy = copy or Copy(base=-1)
                if epoch < copy.fence:
                    return LedgerRefused(journal, storage, RefusalReason.FENCED, copy.fence, copy.end)
                copy.fence = epoch
                self.copies[storage, journal] = copy
                has_copy = copy.base >= 0
                state = CopyState(copy.base, copy.floor, copy.end, copy.commit) if has_copy else None
                return FenceAnswer(journal, storage, epoch, state)
            case Check(start=start, end=end):
                assert copy is not None
                return CheckAnswer(journal, storage, start, end, copy.bad)
            case Read(start=start, end=end, max_bytes=max_bytes):
                assert copy is not None
                data = bytes(copy.data[max(0, start - copy.base) : end - copy.base])
                is_bad = any(part.start <= start < part.end for part in copy.bad)
                whole = b"" if is_bad or start < copy.base else _whole(data, start, max_bytes, origin)
                return ReadAnswer(journal, storage, start, whole)
            case WriteBack(epoch=epoch, position=position, data=data):
                copy = copy or Copy()
                if copy.base < 0:
                    copy.base = position
                assert epoch == copy.fence
                copy.data += data[copy.end - position :]
                self.copies[storage, journal] = copy
                return Durable(journal, storage, copy.end)
        raise AssertionError(message)


def _whole(data: bytes, position: int, max_bytes: int, origin: StorageId) -> bytes:
    records, _ = parse(data, position, origin)
    borders = [record.position - position for record in records] + [len(data)]
    fitting = [border for border in borders if 0 < border <= max_bytes]
    return data[: max(fitting, default=min((b for b in borders if b), default=0))]


class Writing:
    """A log on a real disk, whose bytes are then somewhere else."""

    def __init__(self, path: Path, *, file_bytes: int = 64 << 20) -> None:
        self._path = path
        self._options = LogOptions(file_bytes=file_bytes)
        self.log = self.open()
        self.origin = StorageId(self.log.identity.storage_id)

    def open(self) -> Log:
        return Log.open(
            LocalDisk(self._path), owner="1", new_storage_id=lambda: "disk-of-1", options=self._options
        )

    def append(self, kind: int, *payloads: Sequence[bytes | memoryview]) -> list[int]:
        positions = self.log.append_many([(kind, payload) for payload in payloads])
        self.log.sync()
        return positions

    def bytes(self, start: int = 0, end: int | None = None) -> bytes:
        """As a copy of the log would hold them."""
        data = b""
        for path in sorted(self._path.glob("log-*.wal")):
            data += path.read_bytes()
        return data[start : self.log.end if end is None else end]
