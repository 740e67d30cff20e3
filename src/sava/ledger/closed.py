"""ClosedJournal: the records of a journal that nobody writes any more, read from whichever disks hold them.

A journal's bytes are at the same positions on every disk, so a reader goes on with another one wherever one
has nothing, or nothing intact. Each disk tells what it has when it is fenced once more under the epoch that
the record has anyway. What lies before the greatest floor that any of them tells is in registered segments.

    disk a   base 0    floor 400 ──────────── end 900
    disk b   base 600              600 ────── end 1000 (written back)
    read                   400 ──── a ──── 900 ─ b ─ 1000

Works for a journal that is being recovered as well: with what is there, up to whatever end the caller wants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

from sava.errors import RetryableError, SavaError
from sava.ledger.ports import Peers
from sava.ledger.protocol import (
    Bytes,
    Check,
    Checked,
    CopyState,
    Fence,
    Fenced,
    JournalId,
    JournalRecord,
    Range,
    Read,
    StorageId,
)
from sava.ledger.protocol.types import without
from sava.wal import Record
from sava.wal.errors import LogCorrupt
from sava.wal.format import HEADER, KINDS, read_frame, read_frames, seed_of

READ_BYTES: Final = 1 << 20
ASK_S: Final = 5.0
READ_S: Final = 15.0
CHECK_S: Final = 90.0
"""All of a copy is read."""


class BytesMissing(RetryableError):
    """No disk that answers has this part of a journal."""


def origin_of(record: JournalRecord) -> StorageId:
    """The owner's disk."""
    return record.fragments[0].members[0]


class ClosedJournal:
    """Owned by one task."""

    def __init__(self, journal: JournalId, record: JournalRecord, peers: Peers, *, own: StorageId) -> None:
        """``own`` is this broker's disk, which is asked first."""
        self.journal = journal
        self.record = record
        self._peers = peers
        self._own = own
        self._copies: dict[StorageId, CopyState] = {}
        self.silent: tuple[StorageId, ...] = ()
        """Disks that may have a part, and did not answer."""

    async def locate(self) -> None:
        """Find out who has what. Who does not answer has nothing for now."""
        storages = sorted(self.record.storages, key=lambda storage: storage != self._own)
        holders = list(dict.fromkeys((*storages, *self.record.holders)))
        answers = await asyncio.gather(*map(self._fence, holders))
        self.silent = tuple(
            storage for storage, answer in zip(holders, answers, strict=True) if answer is None
        )
        self._copies = {
            answer.storage: answer.copy
            for answer in answers
            if answer is not None and answer.copy is not None
        }

    async def _fence(self, storage: StorageId) -> Fenced | None:
        try:
            answer = await self._ask(storage, Fence(self.journal, storage, self.record.epoch), ASK_S)
        except (SavaError, TimeoutError):
            return None
        return answer if isinstance(answer, Fenced) else None

    @property
    def start(self) -> int:
        """What lies before it is in registered segments, or was never part of the journal."""
        floors = [copy.floor for copy in self._copies.values()]
        return max([self.record.fragments[0].start, self.record.floor, *floors])

    @property
    def known_end(self) -> int:
        """The greatest that any disk has told."""
        return max((copy.end for copy in self._copies.values()), default=self.start)

    async def missing(self) -> tuple[Range, ...]:
        """What is to be read, and no disk that answers has intact."""
        held = [part for parts in await asyncio.gather(*map(self._intact, self._copies)) for part in parts]
        whole = Range(self.start, max(self.start, self.record.end))
        return tuple(without(whole, [*held, *self.record.lost]))

    async def _intact(self, storage: StorageId) -> list[Range]:
        copy = self._copies[storage]
        part = Range(max(copy.base, copy.floor), copy.end)
        try:
            answer = await self._ask(storage, Check(self.journal, storage, *part), CHECK_S)
        except (SavaError, TimeoutError):
            return []
        return without(part, list(answer.bad)) if isinstance(answer, Checked) else []

    async def records(self, start: int, end: int) -> AsyncIterator[Sequence[Record]]:
        """Of callers' kinds, a few at a time; what was given up (``record.lost``) is passed over. Raises
        BytesMissing."""
        for part in without(Range(start, end), list(self.record.lost)):
            at = part.start
            while at < part.end:
                data = await self._read(Range(at, part.end))
                found, at = await asyncio.to_thread(parse, data, at, origin_of(self.record))
                yield found

    async def _read(self, wanted: Range) -> bytes:
        for storage, copy in self._copies.items():
            end = min(wanted.end, copy.end)
            if not max(copy.base, copy.floor) <= wanted.start < end:
                continue
            try:
                answer = await self._ask(
                    storage, Read(self.journal, storage, wanted.start, end, READ_BYTES), READ_S
                )
            except (SavaError, TimeoutError):
                continue
            if isinstance(answer, Bytes) and answer.data and answer.position == wanted.start:
                return answer.data
        raise BytesMissing(
            f"no disk that answers has journal {self.journal} from {wanted.start} on; asked: "
            f"{', '.join(self._copies) or 'nobody'}"
        )

    async def _ask(self, storage: StorageId, message: Fence | Check | Read, timeout: float) -> object:
        async with asyncio.timeout(timeout + 1):  # whatever the other side of this port does
            return await self._peers.ask(storage, message, origin=origin_of(self.record), timeout=timeout)


class _Received:
    """Bytes as ``wal`` reads them."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length] if offset or length < len(self._data) else self._data


def parse(data: bytes, position: int, origin: StorageId) -> tuple[list[Record], int]:
    """The callers' records in these bytes, which begin with a record at ``position`` and hold whole ones, and
    where the next one begins. Raises LogCorrupt."""
    file, seed, records = _Received(data), seed_of(origin), []
    at = 0
    while at < len(data):
        before = at
        frames = read_frames(file, base=position, offset=at, end=len(data), seed=seed, chunk=len(data))
        for where, kind, _, _, payload, following in frames:
            at = following - position
            if kind < KINDS:
                records.append(Record(where, kind, payload))
        if at < len(data):
            # A file of the log begins here, with a header that tells the seed.
            header = read_frame(file, base=position, offset=at, end=len(data), seed=0)
            if header is None or header[1] != HEADER:
                raise LogCorrupt("journal", "received bytes", position + at, "no intact record")
            at = header[5] - position
        assert at > before
    return records, position + at
