"""Snapshot files: the state machine at one index of the log, complete or not there at all.

    snap-<index>-<term>.snap :=  magic, version, length of meta, size, sha256, crc  |  meta  |  payload

A file gets its name last: temporary file -> payload -> header -> sync -> rename -> sync of the directory. So
every file with a snapshot's name is whole, and whatever a power cut leaves in between has a temporary name
and is removed at the next open. The log is compacted only after the last of these steps; without that
order a power cut leaves a log that begins after a snapshot which does not exist.

The payload's digest is checked whenever it is loaded. A state that no other replica has is worse than a node
that does not start.

A snapshot that is received goes into a temporary file chunk by chunk, and is verified as a whole before it
gets its name. What travels between nodes is the payload; the meta travels in the messages. The state machine
is deterministic, so the chunks may even come from two different leaders.

Threads: ``read`` and ``latest`` belong to the replica's thread, building to the saver's, everything else to
the log writer's. They meet only in the table of complete files, whose single operations are atomic.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import google_crc32c
import msgspec

from sava.errors import HostError
from sava.metadata.errors import SnapshotCorrupt
from sava.metadata.machine.state_machine import FrozenState
from sava.raft.types import SnapshotMeta
from sava.tasks import cancelled
from sava.wal.disk import Disk, File

_MAGIC = b"SAVASNAP"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ32sI")
"""magic, version, length of meta, size of payload, sha256 of payload, crc32c of what stands before and of
meta."""
_NAME = re.compile(r"snap-(\d{20})-(\d{20})\.snap")
_BUILDING = "building.tmp"
_RECEIVING = "receiving.tmp"
_TEMPORARY = ".tmp"
_READ_BYTES = 1 << 20

_encode = msgspec.msgpack.Encoder().encode
_decode_meta = msgspec.msgpack.Decoder(SnapshotMeta).decode


class SnapshotMissing(HostError):
    """The log continues a snapshot whose file is not there (or not readable): what it held cannot be
    replayed."""

    def __init__(self, path: str, file: str, detail: str) -> None:
        super().__init__(
            f"{path}/{file}: {detail}, but the log begins after it. Restore the file from a copy, or move "
            "the data directory away and let this node join as a new one; starting without it would forget "
            "acknowledged data"
        )
        self.path = path
        self.file = file


def file_name(meta: SnapshotMeta) -> str:
    return f"snap-{meta.index:020}-{meta.term:020}.snap"


class SnapshotStore:
    """All snapshot files of one node."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._metas: dict[str, SnapshotMeta] = {}
        self._reading: tuple[str, File] | None = None
        self._receiving: tuple[SnapshotMeta, File] | None = None
        self._installed: SnapshotMeta | None = None
        for name in disk.list():
            if name.endswith(_TEMPORARY):
                disk.remove(name)
            elif _NAME.fullmatch(name) and (meta := self._read_meta(name)) is not None:
                self._metas[name] = meta

    @property
    def path(self) -> str:
        return self._disk.path

    def latest(self) -> SnapshotMeta | None:
        return max(list(self._metas.values()), key=lambda meta: (meta.index, meta.term), default=None)

    def require(self, meta: SnapshotMeta) -> None:
        """Raise SnapshotMissing unless exactly this snapshot is held, intact."""
        name = file_name(meta)
        held = self._metas.get(name)
        if held is None:
            raise SnapshotMissing(self.path, name, "the snapshot is missing or its header is damaged")
        if held.digest != meta.digest:
            raise SnapshotMissing(self.path, name, "the snapshot is another one than the log names")
        try:
            for _ in self.load(meta):
                pass
        except SnapshotCorrupt as error:
            raise SnapshotMissing(self.path, name, str(error)) from error

    # -- reading -----------------------------------------------------------------------------------------

    def read(self, meta: SnapshotMeta, offset: int, length: int) -> bytes:
        """A piece of the payload, for sending. Not verified: the receiver checks the whole. Raises
        FileMissing."""
        name = file_name(meta)
        if self._reading is None or self._reading[0] != name:
            self._close_reading()
            self._reading = name, self._disk.open(name)
        return self._reading[1].read(_payload_offset(meta) + offset, length)

    def load(self, meta: SnapshotMeta) -> Iterator[bytes]:
        """The payload piece by piece. Raises SnapshotCorrupt, at the latest after the last piece: a caller
        that builds something from the pieces must not use it before the end."""
        name = file_name(meta)
        file = self._disk.open(name)
        try:
            yield from _verified(file, meta, f"{self.path}/{name}")
        finally:
            file.close()

    def _read_meta(self, name: str) -> SnapshotMeta | None:
        """None when the header is damaged: harmless unless the log needs this file (``require``)."""
        file = self._disk.open(name)
        try:
            head = file.read(0, _HEADER.size)
            if len(head) < _HEADER.size:
                return None
            magic, version, length, size, digest, crc = _HEADER.unpack(head)
            body = file.read(_HEADER.size, length)
        finally:
            file.close()
        if magic != _MAGIC or version != _VERSION or crc != _crc(head[:-4], body):
            return None
        try:
            meta = _decode_meta(body)
        except msgspec.DecodeError:
            return None
        return msgspec.structs.replace(meta, size=size, digest=digest)

    def _close_reading(self) -> None:
        if self._reading is not None:
            self._reading[1].close()
            self._reading = None

    # -- building a local one ----------------------------------------------------------------------------

    def build(self, base: SnapshotMeta) -> SnapshotBuilder:
        """Begin a file for the state at ``base.index``; one at a time."""
        return SnapshotBuilder(self._disk, base, self._metas)

    # -- receiving ---------------------------------------------------------------------------------------

    def write_chunk(self, meta: SnapshotMeta, offset: int, data: bytes) -> None:
        """Not synced: a snapshot that is not installed is asked for again after a crash."""
        if offset == 0:
            self._drop_received()
            self._receiving = meta, self._disk.open(_RECEIVING, create=True)
        elif self._receiving is None and self._installed == meta:
            return  # it arrived; what failed was the step after
        if self._receiving is None or self._receiving[0] != meta:
            raise SnapshotCorrupt(
                f"bytes from {offset} of a snapshot at {meta.index} that was not begun here"
            )
        self._receiving[1].write(_payload_offset(meta) + offset, [data])

    def install(self, meta: SnapshotMeta) -> None:
        """Verify the received file, make it durable under its final name. Raises SnapshotCorrupt with nothing
        changed. Repeating it is harmless (the record in the log that follows it may have met a full disk)."""
        name = file_name(meta)
        if (
            self._receiving is None
            and (held := self._metas.get(name)) is not None
            and held.digest == meta.digest
        ):
            return
        if self._receiving is None or self._receiving[0] != meta:
            raise SnapshotCorrupt(f"the snapshot at {meta.index} was not received")
        file = self._receiving[1]
        try:
            for _ in _verified(file, meta, f"{self.path}/{_RECEIVING}"):
                pass
        except SnapshotCorrupt:
            self._drop_received()
            raise
        _finish(self._disk, file, meta, _RECEIVING)
        self._receiving = None
        self._installed = meta
        self._metas[name] = meta

    def _drop_received(self) -> None:
        if self._receiving is not None:
            self._receiving[1].close()
            self._receiving = None
            self._disk.remove(_RECEIVING)

    # -- forgetting --------------------------------------------------------------------------------------

    def prune(self, keep: SnapshotMeta) -> None:
        """Remove what is older than ``keep``, except one: should ``keep`` rot, a person can still find the
        state before it. Call only once the log no longer names the removed ones."""
        last_kept = file_name(keep)
        older = sorted(name for name in list(self._metas) if name < last_kept)
        for name in older[:-1]:
            self._disk.remove(name)
            del self._metas[name]
        if len(older) > 1:
            self._disk.sync_dir()

    def prune_newer(self, keep: SnapshotMeta) -> None:
        """Remove what is newer than ``keep``, the one that the log names: a crash came before the log named
        it."""
        newer = [name for name in list(self._metas) if name > file_name(keep)]
        for name in newer:
            self._disk.remove(name)
            del self._metas[name]
        if newer:
            self._disk.sync_dir()

    def close(self) -> None:
        self._close_reading()
        self._drop_received()


class SnapshotBuilder:
    """One snapshot file in the making. Owned by one thread; each ``write`` is one small step, so that an
    event loop or a simulator can do other work in between."""

    def __init__(self, disk: Disk, base: SnapshotMeta, metas: dict[str, SnapshotMeta]) -> None:
        self._disk = disk
        self._base = base
        self._metas = metas
        self._hash = hashlib.sha256()
        self._size = 0
        if _BUILDING in disk.list():
            disk.remove(_BUILDING)
        self._file = disk.open(_BUILDING, create=True)

    def write(self, chunk: bytes) -> None:
        self._file.write(_payload_offset(self._base) + self._size, [chunk])
        self._hash.update(chunk)
        self._size += len(chunk)

    def flush(self) -> None:
        """Let the disk have what was written so far; nothing relies on it, but ``finish`` has less to do."""
        self._file.sync()

    def finish(self) -> SnapshotMeta:
        """Durable under its final name on return."""
        meta = msgspec.structs.replace(self._base, size=self._size, digest=self._hash.digest())
        _finish(self._disk, self._file, meta, _BUILDING)
        self._metas[file_name(meta)] = meta
        return meta

    def abort(self) -> None:
        self._file.close()
        if _BUILDING in self._disk.list():
            self._disk.remove(_BUILDING)


def save(store: SnapshotStore, base: SnapshotMeta, chunks: Iterable[bytes]) -> SnapshotMeta:
    """Build a whole snapshot at once; nothing remains when it fails."""
    builder = store.build(base)
    try:
        for chunk in chunks:
            builder.write(chunk)
        return builder.finish()
    except BaseException:
        builder.abort()
        raise


def _finish(disk: Disk, file: File, meta: SnapshotMeta, temporary: str) -> None:
    body = _meta_body(meta)
    head = _HEADER.pack(_MAGIC, _VERSION, len(body), meta.size, meta.digest, 0)[:-4]
    file.write(0, [head, _crc(head, body).to_bytes(4, "little"), body])
    file.sync()
    file.close()
    disk.rename(temporary, file_name(meta))
    disk.sync_dir()


def _verified(file: File, meta: SnapshotMeta, path: str) -> Iterator[bytes]:
    digest = hashlib.sha256()
    start = _payload_offset(meta)
    for offset in range(0, meta.size, _READ_BYTES):
        piece = file.read(start + offset, min(_READ_BYTES, meta.size - offset))
        digest.update(piece)
        yield piece
    if file.size() != start + meta.size or digest.digest() != meta.digest:
        raise SnapshotCorrupt(
            f"{path}: the content does not match the digest of the snapshot at {meta.index}"
        )


def _meta_body(meta: SnapshotMeta) -> bytes:
    """Size and digest stand in the fixed header: they are known last, and must not move the payload."""
    return _encode(msgspec.structs.replace(meta, size=0, digest=b""))


def _payload_offset(meta: SnapshotMeta) -> int:
    return _HEADER.size + len(_meta_body(meta))


def _crc(head: bytes, body: bytes) -> int:
    return int(google_crc32c.extend(google_crc32c.extend(0, head), body))


# -- saving in the background --------------------------------------------------------------------------------


SLICE_S = 0.001
PAUSE_S = 0.004
"""Between two slices: a fifth of the loop's time at most goes into a snapshot."""
FLUSH_BYTES = 1 << 20
"""Encoded bytes held before they are handed to the thread, and synced."""

Done = Callable[[SnapshotMeta | BaseException], None]


class BackgroundSaver:
    """Writes an image of the state to disk while the node continues to work.

    Two resources must not be held: the event loop, which owns the state, and the log writer's thread, which
    every write waits for. So the image is encoded on the loop in slices of about a millisecond, and the bytes
    are hashed, written and synced on a thread of its own. Freezing made the image immune to later changes;
    nothing is locked.

    Two more are shared whether we like it or not: the processor and the filesystem. All nodes count the same
    entries, so all of them snapshot at the same time, and a log's sync waits for whatever the filesystem has
    to write before it. A snapshot is never urgent: pauses between the slices leave most of the time
    to others, and the file is synced piece by piece, so that no log waits behind all of it.

    ``replica.SnapshotSaver``. Owned by the event loop.
    """

    def __init__(self, store: SnapshotStore, saved: Callable[[float, int], None]) -> None:
        """``saved`` receives how long each snapshot took and how large it is."""
        self._store = store
        self._saved = saved
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sava-snapshot")
        self._tasks: set[asyncio.Task[None]] = set()

    def save(self, base: SnapshotMeta, frozen: FrozenState, done: Done) -> None:
        task = asyncio.get_running_loop().create_task(self._save(base, frozen, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await cancelled(*self._tasks)
        # Not on the loop: a disk that hangs would stop it, and with it every limit for stopping.
        await asyncio.to_thread(self._thread.shutdown)

    async def _save(self, base: SnapshotMeta, frozen: FrozenState, done: Done) -> None:
        loop = asyncio.get_running_loop()
        started = time.perf_counter()
        try:
            builder = await loop.run_in_executor(self._thread, self._store.build, base)
            try:
                await self._write(builder, frozen)
                meta = await loop.run_in_executor(self._thread, builder.finish)
            except BaseException:
                await asyncio.shield(loop.run_in_executor(self._thread, builder.abort))
                raise
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 (the replica decides what each means)
            done(error)
            return
        self._saved(time.perf_counter() - started, meta.size)
        done(meta)

    async def _write(self, builder: SnapshotBuilder, frozen: FrozenState) -> None:
        loop = asyncio.get_running_loop()
        held: list[bytes] = []
        size = 0
        slice_end = time.perf_counter() + SLICE_S
        for chunk in frozen.chunks():
            held.append(chunk)
            size += len(chunk)
            if time.perf_counter() < slice_end:
                continue
            if size >= FLUSH_BYTES:
                await loop.run_in_executor(self._thread, _write_all, builder, held)
                held, size = [], 0
            await asyncio.sleep(PAUSE_S)
            slice_end = time.perf_counter() + SLICE_S
        await loop.run_in_executor(self._thread, _write_all, builder, held)


def _write_all(builder: SnapshotBuilder, chunks: Sequence[bytes]) -> None:
    for chunk in chunks:
        builder.write(chunk)
    builder.flush()
