"""Copies: one ledger's bytes and note on a simulated disk, as a broker keeps them.

    data-<base>   the bytes from ``base`` on
    note          the note; replaced by rename

The bytes are records of ``wal``, so that a flipped bit or a torn write is seen as it will be there."""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

from sava.ledger.protocol.member import MemberNote
from sava.ledger.protocol.record import LedgerId, Range
from sava.wal.format import FRAME_BYTES, crc32c, encode, read_frame, read_frames, seed_of
from tests.mirror_sim.tails import Frame
from tests.sim.disk import SimDisk, SimFile

BATCH = 1
_PAYLOAD = struct.Struct("<qqqI")
_note = msgspec.msgpack.Decoder(MemberNote)


class Batch(NamedTuple):
    """One record: one message of a topic."""

    frame: Frame
    hash: int
    position_end: int


def encode_batch(ledger: LedgerId, frame: Frame, hash_: int, size: int) -> bytes:
    payload = _PAYLOAD.pack(frame.topic, frame.epoch, frame.start, hash_) + bytes(size)
    return encode(
        BATCH,
        [payload],
        position=frame.position,
        durable=0,
        incarnation=ledger.incarnation,
        seed=seed(ledger),
    )


def seed(ledger: LedgerId) -> int:
    return seed_of(str(ledger))


def parse(ledger: LedgerId, position: int, data: bytes) -> list[Batch]:
    """Whole records; stops before the first that does not verify."""
    return [
        _batch(found)
        for found in read_frames(_InMemory(data), base=position, offset=0, end=len(data), seed=seed(ledger))
    ]


def _batch(found: tuple[int, int, int, int, bytes, int]) -> Batch:
    position, _, _, _, payload, end = found
    topic, epoch, offset, hash_ = _PAYLOAD.unpack_from(payload)
    return Batch(Frame(topic, epoch, offset, offset + 1, position), hash_, end)


class _InMemory:
    """As much of a file as reading needs."""

    name = "memory"

    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]

    def write(self, offset: int, buffers: object) -> int:
        raise NotImplementedError

    def truncate(self, size: int) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def directory_of(ledger: LedgerId) -> str:
    return f"{ledger.broker}-{ledger.incarnation}"


class Copy:
    """On one disk, of one ledger, in one life of the process."""

    def __init__(self, root: SimDisk, ledger: LedgerId) -> None:
        self.ledger = ledger
        self._disk = root.directory(directory_of(ledger))
        self._seed = seed(ledger)
        self.note = self._load()
        self._file: SimFile | None = None
        self.base = 0
        if self.note is not None and self.note.base is not None:
            self._open(self.note.base)

    def _load(self) -> MemberNote | None:
        if "note" not in self._disk.list():
            return None
        file = self._disk.open("note")
        data = file.read(0, file.size())
        if crc32c(0, data[4:]) != int.from_bytes(data[:4], "little"):
            raise AssertionError(f"the note of {self.ledger} was renamed before it was complete")
        return _note.decode(data[4:])

    def _open(self, base: int) -> None:
        self.base = base
        self._file = self._disk.open(f"data-{base}")

    # -- writing -----------------------------------------------------------------------------

    def begin(self, base: int) -> None:
        """Not yet durable: the note names the file that counts."""
        name = f"data-{base}"
        if name in self._disk.list():
            self._disk.remove(name)
        self._disk.open(name, create=True)
        self._open(base)

    def write(self, position: int, data: bytes) -> None:
        assert self._file is not None
        self._file.write(position - self.base, [data])

    def cut(self, end: int) -> None:
        if self._file is not None and self._file.size() > end - self.base:
            self._file.truncate(max(0, end - self.base))

    def sync(self) -> None:
        if self._file is not None:
            self._file.sync()
            self._disk.sync_dir()

    def store(self, note: MemberNote) -> None:
        data = msgspec.msgpack.encode(note)
        if "note.new" in self._disk.list():
            self._disk.remove("note.new")
        file = self._disk.open("note.new", create=True)
        file.write(0, [crc32c(0, data).to_bytes(4, "little") + data])
        file.sync()
        self._disk.rename("note.new", "note")
        self._disk.sync_dir()
        self.note = note

    # -- reading -----------------------------------------------------------------------------

    def intact(self, start: int, end: int | None = None) -> list[Range]:
        """Ranges of records that verify, from ``start`` on."""
        if self._file is None:
            return []
        size = self._file.size() if end is None else end - self.base
        found: list[Range] = []
        offset = start - self.base
        while offset + FRAME_BYTES <= size:
            at = offset
            for frame in read_frames(self._file, base=self.base, offset=offset, end=size, seed=self._seed):
                at = frame[5] - self.base
            if at > offset:
                found.append(Range(self.base + offset, self.base + at))
            offset = self._next_record(at + 8, size)
        return found

    def _next_record(self, offset: int, size: int) -> int:
        assert self._file is not None
        while offset + FRAME_BYTES <= size:
            if read_frame(self._file, base=self.base, offset=offset, end=size, seed=self._seed):
                return offset
            offset += 8
        return size

    def read(self, start: int, end: int, max_bytes: int) -> bytes:
        """Whole records that verify, at least one if there is one; nothing of what was trimmed."""
        if self._file is None or self.note is None or start < max(self.base, self.note.floor):
            return b""
        stop = start
        for frame in read_frames(
            self._file, base=self.base, offset=start - self.base, end=end - self.base, seed=self._seed
        ):
            if stop > start and frame[5] - start > max_bytes:
                break
            stop = frame[5]
        return self._file.read(start - self.base, stop - start)

    def rewrite(self, start: int, end: int) -> None:
        """What was read back may be in the cache only."""
        if self._file is not None and end > max(start, self.base):
            at = max(start, self.base) - self.base
            self._file.write(at, [self._file.read(at, end - self.base - at)])

    @property
    def end(self) -> int:
        return self.base + (self._file.size() if self._file is not None else 0)


def durable_note(root: SimDisk, ledger: LedgerId) -> MemberNote | None:
    """What a power cut would leave of the note, looked at from outside (the oracle)."""
    directory = root._directory.subdirectories.get(directory_of(ledger))
    if directory is None or "note" not in directory.durable:
        return None
    return _note.decode(bytes(directory.durable["note"].durable)[4:])


def durable_bytes(root: SimDisk, ledger: LedgerId, start: int, end: int) -> bytes:
    """What a power cut would leave of these bytes; shorter if it would not leave all of them."""
    note = durable_note(root, ledger)
    if note is None or note.base is None or start < note.base:
        return b""
    directory = root._directory.subdirectories[directory_of(ledger)]
    inode = directory.durable.get(f"data-{note.base}")
    if inode is None:
        return b""
    with memoryview(inode.durable) as image:
        return bytes(image[start - note.base : end - note.base])
