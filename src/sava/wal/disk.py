"""The small part of a filesystem that a durable log needs, as a protocol with two implementations.

``LocalDisk`` is one real directory. The simulator has its twin, which forgets unsynced writes, tears sectors
and fails on request; everything above this file is the same code in production and in the simulator.

Durability contract, the same as POSIX gives and no more:

* bytes written are durable only after ``File.sync`` returns;
* a created, renamed or removed name is durable only after ``Disk.sync_dir`` returns;
* after ``sync`` has raised, nothing may be assumed about what is on disk: the process must stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Readable(Protocol):
    """Bytes that records are read from: a file, or what was received of one."""

    def read(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes; fewer only at the end."""
        ...


class File(Readable, Protocol):
    """An open file. Owned by one thread at a time."""

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
