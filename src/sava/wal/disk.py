"""The small part of a filesystem that a durable log needs, as a protocol with two implementations.

``LocalDisk`` is one real directory. The simulator has its twin, which forgets unsynced writes, tears sectors
and fails on request; everything above this file is the same code in production and in the simulator.

Durability contract, the same as POSIX gives and no more:

* bytes written are durable only after ``File.sync`` returns;
* a created, renamed or removed name is durable only after ``Disk.sync_dir`` returns;
* after ``sync`` has raised, nothing may be assumed about what is on disk: the process must stop.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from sava.wal.errors import DirectoryLocked, DiskFailed, DiskFull, FileExists, FileMissing


class Readable(Protocol):
    """Bytes that records are read from: a file, or what was received of one."""

    def read(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes; fewer only at the end."""
        ...


class File(Readable, Protocol):
    """An open file. Owned by one thread at a time. A Protocol, as the simulator has files in memory that lose
    what was not synced."""

    @property
    def name(self) -> str: ...

    def size(self) -> int: ...

    def write(self, offset: int, buffers: Sequence[bytes | memoryview]) -> int:
        """Write all buffers, in order, starting at ``offset``; returns the bytes written (always all of
        them). Raises DiskFailed, or DiskFull with the file cut back to its former size, durably: records that
        were refused must not come back with a power cut, where others have been written since."""
        ...

    def write_durably(self, offset: int, data: bytes) -> None:
        """As ``write`` and ``sync`` in one, within the size of a file of which all the rest is synced. Raises
        as they do."""
        ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Data and size are durable on return. Raises DiskFailed, after which the file must not be used."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """One directory, flat."""

    @property
    def path(self) -> str:
        """For messages to people."""
        ...

    def list(self) -> list[str]:
        """Names of the files, sorted."""
        ...

    def open(self, name: str, *, create: bool = False) -> File:
        """Raises FileMissing unless ``create``; ``create`` raises FileExists when the name is taken."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Atomic replacement."""
        ...

    def remove(self, name: str) -> None: ...

    def sync_dir(self) -> None: ...

    def directory(self, name: str) -> Disk:
        """A sub-directory, created durably when missing."""
        ...

    def lock(self) -> None:
        """Hold this directory for this process until ``unlock`` or exit. Raises DirectoryLocked."""
        ...

    def unlock(self) -> None: ...


# -- a real directory ----------------------------------------------------------------------------------------


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_SUCH_CALL = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
LOCK_FILE = ".lock"
_IOV_MAX = 1024
_CALL_BYTES = 1 << 20
"""Written in one call. Linux fills its page cache in pieces up to the size of the call, and from 2 MB on in
huge pages, which on a virtual machine are mostly memory that the host has yet to find: ten times slower."""
_fdatasync = getattr(os, "fdatasync", os.fsync)
_DSYNC: int = getattr(os, "RWF_DSYNC", 0)
"""The flag of ``pwritev`` by which one call writes and syncs; 0 where there is none."""


@contextmanager
def _doing(what: str) -> Iterator[None]:
    """Turn the kernel's refusals into the log's errors."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileMissing(f"{what}: {error.strerror}") from error
    except FileExistsError as error:
        raise FileExists(f"{what}: {error.strerror}") from error
    except OSError as error:
        kind = DiskFull if error.errno in _NO_ROOM else DiskFailed
        raise kind(f"{what}: {error.strerror}") from error


class LocalFile:
    """Owned by one thread at a time."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @property
    def name(self) -> str:
        return self._path.name

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        try:
            data = os.pread(self._fd, length, offset)
            while len(data) < length and (more := os.pread(self._fd, length - len(data), offset + len(data))):
                data += more
        except OSError as error:
            raise DiskFailed(f"{self._path}: cannot read at {offset}: {error.strerror}") from error
        return data

    def write(self, offset: int, buffers: Sequence[bytes | memoryview]) -> int:
        former = self.size()
        try:
            return self._write_all(offset, buffers)
        except OSError as error:
            if error.errno in _NO_ROOM:
                self.truncate(former)
                self.sync()
                raise DiskFull(f"{self._path}: {error.strerror}") from error
            raise DiskFailed(f"{self._path}: cannot write at {offset}: {error.strerror}") from error

    def write_durably(self, offset: int, data: bytes) -> None:
        """One call instead of two: between them, a thread of Python waits for its turn. For want of room, or
        of the call, it is done again in two, which tell a full disk from a sync that failed. Nothing but this
        range, written again, depends on that sync."""
        if _DSYNC:
            try:
                if os.pwritev(self._fd, (data,), offset, _DSYNC) == len(data):
                    return
            except OSError as error:
                if error.errno not in (*_NO_ROOM, *_NO_SUCH_CALL):
                    raise DiskFailed(f"{self._path}: cannot write at {offset}: {error.strerror}") from error
        self.write(offset, (data,))
        self.sync()

    def _write_all(self, offset: int, buffers: Sequence[bytes | memoryview]) -> int:
        if len(buffers) == 1 and type(buffers[0]) is bytes and len(buffers[0]) <= _CALL_BYTES:
            written = os.pwritev(self._fd, buffers, offset)
            if written == len(buffers[0]):  # nearly always; else once more from the beginning
                return written
        total = 0
        for group, size in _calls(buffers):
            written = os.pwritev(self._fd, group, offset + total)
            if written < size:  # a signal, or the last bytes of a nearly full disk
                rest = memoryview(b"".join(group))
                while written < size:
                    written += os.pwrite(self._fd, rest[written:], offset + total + written)
            total += size
        return total

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise DiskFailed(f"{self._path}: cannot truncate to {size}: {error.strerror}") from error

    def sync(self) -> None:
        try:
            _fdatasync(self._fd)
        except OSError as error:
            raise DiskFailed(f"{self._path}: cannot sync: {error.strerror}") from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalDisk:
    """One real directory as a Disk.

    Errors are sorted here, once. No room (ENOSPC, EDQUOT) on a write is ``DiskFull``, after the file was cut
    back to its former size: the complete records of a half-written batch would else be replayed after a
    restart, though their caller had learned that nothing was appended. No room on a *sync* is
    ``DiskFailed``: a filesystem that allocates late has then dropped bytes of writes that the log cannot
    name. So is everything else the kernel refuses.

    The lock is ``flock`` on a file: the kernel releases it when the process dies, however it dies, so no
    stale lock has to be broken by hand. It holds against other processes and against a second LocalDisk in
    this one.

    One directory, created durably when missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._lock_fd = -1
        with _doing(f"{self._path}: cannot create"):
            _make_directory(self._path)

    @property
    def path(self) -> str:
        return str(self._path)

    def list(self) -> list[str]:
        with _doing(f"{self._path}: cannot list"), os.scandir(self._path) as entries:
            return sorted(entry.name for entry in entries if entry.is_file() and entry.name != LOCK_FILE)

    def open(self, name: str, *, create: bool = False) -> LocalFile:
        path = self._path / name
        with _doing(f"{path}: cannot open"):
            return LocalFile(
                path, os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o640)
            )

    def rename(self, old: str, new: str) -> None:
        with _doing(f"{self._path / old}: cannot rename to {new}"):
            (self._path / old).replace(self._path / new)

    def remove(self, name: str) -> None:
        with _doing(f"{self._path / name}: cannot remove"):
            (self._path / name).unlink()

    def sync_dir(self) -> None:
        try:
            _sync_directory(self._path)
        except OSError as error:
            raise DiskFailed(f"{self._path}: cannot sync: {error.strerror}") from error

    def directory(self, name: str) -> LocalDisk:
        return LocalDisk(self._path / name)

    def directories(self) -> Sequence[str]:
        """Names of the sub-directories, sorted."""
        with _doing(f"{self._path}: cannot list"), os.scandir(self._path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def remove_directory(self, name: str) -> None:
        """An empty one; not durable before ``sync_dir``."""
        with _doing(f"{self._path / name}: cannot remove"):
            (self._path / name).rmdir()

    def lock(self) -> None:
        if self._lock_fd >= 0:
            raise DirectoryLocked(f"{self._path} is already in use by this process")
        with _doing(f"{self._path / LOCK_FILE}: cannot open"):
            fd = os.open(self._path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode(errors="replace") or "unknown"
            os.close(fd)
            raise DirectoryLocked(f"{self._path} is in use by another process (pid {holder})") from error
        self._lock_fd = fd
        self._name_holder(fd)

    @staticmethod
    def _name_holder(fd: int) -> None:
        """The text for the process that comes second; the lock itself does not depend on it."""
        with suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)

    def unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _calls(buffers: Sequence[bytes | memoryview]) -> Iterator[tuple[Sequence[bytes | memoryview], int]]:
    """The buffers, cut and grouped into what one call writes, each group with its size."""
    group: list[bytes | memoryview] = []
    size = 0
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest:
            part = rest[: _CALL_BYTES - size]
            group.append(part)
            size += len(part)
            rest = rest[len(part) :]
            if size == _CALL_BYTES or len(group) == _IOV_MAX:
                yield group, size
                group, size = [], 0
    if group:
        yield group, size


def _make_directory(path: Path) -> None:
    missing = [path, *path.parents]
    missing = missing[: next(index for index, parent in enumerate(missing) if parent.is_dir())]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True, mode=0o700)  # messages, and the secret of the cluster
        _sync_directory(directory.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
