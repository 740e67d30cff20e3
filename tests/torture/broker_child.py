"""A broker in a process of its own whose disk and clock obey the torture: ``python -m
tests.torture.broker_child broker …``.

It is the ``sava`` command. The environment variable ``SAVA_TORTURE`` names a file with ``Knobs`` as JSON; a
thread looks at it, so that the orchestrator turns them while the broker runs:

* the wall clock is off by ``clock_ms`` (the monotonic clock is not: no kernel lets it jump);
* each sync takes ``sync_ms`` longer;
* with ``no_room`` each write that makes a file longer is refused with ENOSPC.

With ``holds_back`` (read once, at the start) unsynced writes stay in the memory of this process: what
``File.sync`` has not returned for is lost with SIGKILL, as with the power. Names are the kernel's at once in
this mode: a lost rename is left to disk images and to the simulator.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from sava.cli.main import main
from sava.wal import disk
from sava.wal.disk import LocalDisk, LocalFile
from sava.wal.errors import DiskFull

VARIABLE: Final = "SAVA_TORTURE"
_LOOK_S: Final = 0.05


class Knobs(msgspec.Struct):
    clock_ms: int = 0
    sync_ms: int = 0
    no_room: bool = False
    holds_back: bool = False

    def save(self, path: Path) -> None:
        """In one step: the broker may be reading."""
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(self))
        draft.rename(path)


class _Current:
    """The knobs as they are now. Written by one thread, read by all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.knobs = self._read()
        threading.Thread(target=self._follow, name="torture knobs", daemon=True).start()

    def _read(self) -> Knobs:
        return msgspec.json.decode(self._path.read_bytes(), type=Knobs)

    def _follow(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            self.knobs = self._read()


def _turn_clock(current: _Current) -> None:
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + current.knobs.clock_ms / 1000
    time.time_ns = lambda: real_ns() + current.knobs.clock_ms * 1_000_000


def _slow_syncs(current: _Current) -> None:
    fdatasync, fsync = os.fdatasync, os.fsync

    def slowly() -> None:
        if current.knobs.sync_ms:
            time.sleep(current.knobs.sync_ms / 1000)

    def slow_fdatasync(descriptor: int) -> None:
        slowly()
        fdatasync(descriptor)

    def slow_fsync(descriptor: int) -> None:
        slowly()
        fsync(descriptor)

    disk._fdatasync = slow_fdatasync
    os.fsync = slow_fsync  # type: ignore[assignment]
    durably = LocalFile.write_durably

    def write_durably(self: LocalFile, offset: int, data: bytes) -> None:
        slowly()
        durably(self, offset, data)

    LocalFile.write_durably = write_durably  # type: ignore[method-assign]


def _refuse_room(current: _Current, kind: type[LocalFile]) -> None:
    write = kind.write

    def checked(self: LocalFile, offset: int, buffers: Sequence[bytes | memoryview]) -> int:
        if current.knobs.no_room and offset + sum(map(len, buffers)) > self.size():
            raise DiskFull(f"{self._path}: {os.strerror(errno.ENOSPC)}")
        return write(self, offset, buffers)

    kind.write = checked  # type: ignore[method-assign]


class _Held:
    """The unsynced writes of one file, which all handles of the file see, as they see the kernel's cache."""

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self.writes: list[tuple[int, bytes]] = []
        self.size = size


_held: dict[tuple[int, int], _Held] = {}
"""By device and inode. An entry outlives its handles: closing a file syncs nothing."""


class HeldFile(LocalFile):
    """Writes wait in memory until ``sync``."""

    def __init__(self, path: Path, fd: int, *, is_new: bool) -> None:
        super().__init__(path, fd)
        about = os.fstat(fd)
        inode = about.st_dev, about.st_ino
        if is_new or inode not in _held:  # the inode of a removed file may come again
            _held[inode] = _Held(about.st_size)
        self._state = _held[inode]

    def size(self) -> int:
        return self._state.size

    def read(self, offset: int, length: int) -> bytes:
        with self._state.lock:
            length = max(0, min(length, self._state.size - offset))
            data = bytearray(super().read(offset, length))
            data += bytes(length - len(data))
            for start, held in self._state.writes:
                low, high = max(start, offset), min(start + len(held), offset + length)
                if low < high:
                    data[low - offset : high - offset] = held[low - start : high - start]
        return bytes(data)

    def write(self, offset: int, buffers: Sequence[bytes | memoryview]) -> int:
        data = b"".join(buffers)
        with self._state.lock:
            self._state.writes.append((offset, data))
            self._state.size = max(self._state.size, offset + len(data))
        return len(data)

    def write_durably(self, offset: int, data: bytes) -> None:
        self.write(offset, (data,))
        self.sync()

    def truncate(self, size: int) -> None:
        """Applied at once, with what was held before it: only what is written later can be lost."""
        with self._state.lock:
            self._apply()
            super().truncate(size)
            self._state.size = size

    def sync(self) -> None:
        with self._state.lock:
            self._apply()
        super().sync()

    def _apply(self) -> None:
        for offset, data in self._state.writes:
            self._write_all(offset, (data,))
        self._state.writes.clear()


def _hold_back() -> None:
    opened = LocalDisk.open

    def open_held(self: LocalDisk, name: str, *, create: bool = False) -> LocalFile:
        found = opened(self, name, create=create)
        return HeldFile(found._path, found._fd, is_new=create)

    LocalDisk.open = open_held  # type: ignore[method-assign]


def run() -> None:
    current = _Current(Path(os.environ[VARIABLE]))
    _turn_clock(current)
    _slow_syncs(current)
    _refuse_room(current, HeldFile if current.knobs.holds_back else LocalFile)
    if current.knobs.holds_back:
        _hold_back()
    main()


if __name__ == "__main__":
    run()
