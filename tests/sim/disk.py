"""SimDisk: a disk in memory that keeps POSIX's promises and not one more.

Every file has two images, ``cached`` (what reads see) and ``durable`` (what a power cut leaves), and the
operations that lie between them; so has every directory for its names. ``sync`` replays the pending
operations onto the durable image, so it costs what was written, not what the file holds.

``crash`` is a power cut: it returns the disk as the next start finds it, which is the durable image plus
whatever part of the pending operations the ``CrashPolicy`` keeps. ``kill`` is the death of the process alone:
the cache survives. ``clone`` is ``cp -a``. After ``crash`` and ``kill`` the old disk and every handle raise
``DiskFailed``, so that a part of the old process that the simulator forgot to stop cannot write to the new
one's disk.

A failed sync behaves as Linux does: some of the pending writes reached the disk, the others are held for
clean, so reads see them, the next sync reports success, and a power cut loses them.

Deterministic from the injected ``random.Random``; knows no clock. All disks made by ``directory`` share one
crash domain, one space budget, one fault hook and one set of counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from random import Random
from typing import NoReturn

from sava.wal.errors import DirectoryLocked, DiskFailed, DiskFull, FileExists, FileMissing

SECTOR = 512


class CrashPolicy(Enum):
    """What a power cut leaves of the writes that were not synced. Names that were not synced each vanish or
    not, by chance, except under LOSE and KEEP."""

    LOSE = "nothing of them"
    KEEP = "all of them"
    PREFIX = "the first of them in order, the last one cut at any byte"
    SECTORS = "any of their sectors"
    TORN = "any of their sectors, and one of these torn at any byte"
    ANY = "one of the above, by chance"


Write = tuple[int, bytes]
"""offset, data"""
Change = Write | int
"""A pending change of a file: a write, or the size that a truncation left."""


class _Inode:
    __slots__ = ("cached", "durable", "pending")

    def __init__(self) -> None:
        self.cached = bytearray()
        self.durable = bytearray()
        self.pending: list[Change] = []

    def copy(self) -> _Inode:
        twin = _Inode()
        twin.cached, twin.durable, twin.pending = self.cached[:], self.durable[:], self.pending[:]
        return twin

    def change(self, change: Change) -> None:
        _apply(self.cached, change)
        self.pending.append(change)

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.durable, change)
        self.pending.clear()

    def sync_last(self) -> None:
        """What changed last, and nothing before it."""
        _apply(self.durable, self.pending.pop())

    def after_crash(self, rng: Random, policy: CrashPolicy) -> _Inode:
        twin = _Inode()
        twin.durable = self.durable[:]
        for change in _survivors(rng, policy, self.pending):
            _apply(twin.durable, change)
        if policy is not CrashPolicy.LOSE and rng.random() < 0.25:  # the new size without the data: zeros
            growth = max(0, len(self.cached) - len(twin.durable))
            twin.durable.extend(bytes(rng.randrange(growth + 1)))
        twin.cached = twin.durable[:]
        return twin


def _apply(image: bytearray, change: Change) -> None:
    if isinstance(change, int):
        if change < len(image):
            del image[change:]
        else:
            image.extend(bytes(change - len(image)))
        return
    offset, data = change
    if offset > len(image):
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data


def _survivors(rng: Random, policy: CrashPolicy, pending: list[Change]) -> Iterator[Change]:
    if policy is CrashPolicy.LOSE or not pending:
        return
    if policy is CrashPolicy.KEEP:
        yield from pending
    elif policy is CrashPolicy.PREFIX:
        count = rng.randrange(len(pending) + 1)
        yield from pending[:count]
        if count < len(pending) and not isinstance(cut := pending[count], int):
            yield cut[0], cut[1][: rng.randrange(len(cut[1]) + 1)]
    else:
        yield from _surviving_sectors(rng, pending, tear=policy is CrashPolicy.TORN)


def _surviving_sectors(rng: Random, pending: list[Change], *, tear: bool) -> Iterator[Change]:
    keep = rng.choice((0.1, 0.5, 0.9))
    kept: list[Change] = []
    for change in pending:
        pieces = [change] if isinstance(change, int) else _sectors(change)
        kept += [piece for piece in pieces if rng.random() < keep]
    torn = rng.randrange(len(kept)) if tear and kept else -1
    for index, piece in enumerate(kept):
        if index == torn and not isinstance(piece, int):
            offset, data = piece
            cut = rng.randrange(len(data) + 1)
            yield (offset, data[:cut]) if rng.random() < 0.5 else (offset + cut, data[cut:])
        else:
            yield piece


def _sectors(write: Write) -> Iterator[Write]:
    offset, data = write
    at = 0
    while at < len(data):
        size = min(len(data) - at, SECTOR - (offset + at) % SECTOR)
        yield offset + at, data[at : at + size]
        at += size


Names = dict[str, _Inode]
NameChange = tuple[str | None, str | None, _Inode]
"""A pending change of a directory: (None, new) creates, (old, None) removes, (old, new) renames, as one
step."""


class _Directory:
    __slots__ = ("cached", "durable", "locked", "pending", "subdirectories")

    def __init__(self) -> None:
        self.cached: Names = {}
        self.durable: Names = {}
        self.pending: list[NameChange] = []
        self.subdirectories: dict[str, _Directory] = {}
        self.locked = False

    def change(self, change: NameChange) -> None:
        _apply_name(self.cached, change)
        self.pending.append(change)

    def sync(self) -> None:
        for change in self.pending:
            _apply_name(self.durable, change)
        self.pending.clear()

    def copy(self) -> _Directory:
        twin = _Directory()
        inodes: dict[int, _Inode] = {}

        def twin_of(inode: _Inode) -> _Inode:
            if id(inode) not in inodes:
                inodes[id(inode)] = inode.copy()
            return inodes[id(inode)]

        twin.cached = {name: twin_of(inode) for name, inode in self.cached.items()}
        twin.durable = {name: twin_of(inode) for name, inode in self.durable.items()}
        twin.pending = [(old, new, twin_of(inode)) for old, new, inode in self.pending]
        twin.subdirectories = {name: sub.copy() for name, sub in self.subdirectories.items()}
        return twin

    def after_crash(self, rng: Random, policy: CrashPolicy) -> _Directory:
        twin = _Directory()
        names = dict(self.durable)
        for change in self.pending:
            if policy is CrashPolicy.KEEP or (policy is not CrashPolicy.LOSE and rng.random() < 0.5):
                _apply_name(names, change)
        twin.durable = {name: inode.after_crash(rng, policy) for name, inode in names.items()}
        twin.cached = dict(twin.durable)
        twin.subdirectories = {
            name: sub.after_crash(rng, policy) for name, sub in self.subdirectories.items()
        }
        return twin


def _apply_name(names: Names, change: NameChange) -> None:
    old, new, inode = change
    if old is not None and names.get(old) is inode:
        del names[old]
    if new is not None:
        names[new] = inode


class _Machine:
    """What all directories of one machine share."""

    def __init__(self, rng: Random, capacity: int | None) -> None:
        self.rng = rng
        self.capacity = capacity
        self.used = 0
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.on_operation: Callable[[str], None] | None = None
        self.is_dead = False

    def successor(self) -> _Machine:
        twin = _Machine(self.rng, self.capacity)
        twin.counts, twin.on_operation = self.counts, self.on_operation
        return twin

    def check_alive(self) -> None:
        if self.is_dead:
            raise DiskFailed("this handle belongs to a process that was killed")

    def begin(self, operation: str) -> None:
        """Called before each operation that changes something."""
        self.check_alive()
        if self.on_operation is not None:
            self.on_operation(operation)
            self.check_alive()
        self.counts[operation] += 1

    def is_failing(self, operation: str) -> bool:
        if self.faults[operation] == 0:
            return False
        self.faults[operation] -= 1
        return True

    def reserve(self, growth: int) -> None:
        if growth > 0 and self.capacity is not None and self.used + growth > self.capacity:
            raise DiskFull(f"simulated: {self.used} of {self.capacity} bytes used, {growth} more wanted")
        self.used += growth


class SimFile:
    def __init__(self, machine: _Machine, name: str, inode: _Inode) -> None:
        self._machine = machine
        self._name = name
        self._inode = inode
        self._is_closed = False

    @property
    def name(self) -> str:
        return self._name

    def size(self) -> int:
        self._check_open()
        return len(self._inode.cached)

    def read(self, offset: int, length: int) -> bytes:
        self._check_open()
        if self._machine.is_failing("read"):
            raise DiskFailed(f"simulated: {self._name} cannot be read at {offset}")
        with memoryview(self._inode.cached) as view:
            return bytes(view[offset : offset + length])

    def write(self, offset: int, buffers: Sequence[bytes | memoryview]) -> int:
        self._check_open()
        self._machine.begin("write")
        data = b"".join(buffers)
        if self._machine.is_failing("write"):
            part = data[: self._machine.rng.randrange(len(data) + 1)]
            self._inode.change((offset, part))
            raise DiskFailed(f"simulated: {self._name} cannot be written")
        self._machine.reserve(max(0, offset + len(data) - len(self._inode.cached)))
        self._inode.change((offset, data))
        return len(data)

    def write_durably(self, offset: int, data: bytes) -> None:
        assert offset + len(data) <= self.size()
        self.write(offset, (data,))
        self._machine.begin("sync")
        if self._machine.is_failing("sync"):
            self._fail_sync()
        self._inode.sync_last()

    def truncate(self, size: int) -> None:
        self._check_open()
        self._machine.begin("truncate")
        self._machine.reserve(size - len(self._inode.cached))
        self._inode.change(size)

    def sync(self) -> None:
        self._check_open()
        self._machine.begin("sync")
        if self._machine.is_failing("sync"):
            self._fail_sync()
        self._inode.sync()

    def _fail_sync(self) -> NoReturn:
        inode = self._inode
        for change in _survivors(self._machine.rng, CrashPolicy.SECTORS, inode.pending):
            _apply(inode.durable, change)
        inode.pending.clear()
        raise DiskFailed(f"simulated: {self._name} cannot be synced")

    def close(self) -> None:
        self._is_closed = True

    def _check_open(self) -> None:
        self._machine.check_alive()
        if self._is_closed:
            raise ValueError(f"{self._name} is closed")


class SimDisk:
    """One simulated directory; the root of a machine unless made by ``directory``."""

    def __init__(self, rng: Random, *, path: str = "sim:", capacity: int | None = None) -> None:
        self._machine = _Machine(rng, capacity)
        self._path = path
        self._directory = _Directory()
        self._is_root = True

    @classmethod
    def _of(cls, machine: _Machine, path: str, directory: _Directory, *, is_root: bool) -> SimDisk:
        disk = cls.__new__(cls)
        disk._is_root = is_root
        disk._machine, disk._path, disk._directory = machine, path, directory
        return disk

    # The Disk protocol.

    @property
    def path(self) -> str:
        return self._path

    def list(self) -> list[str]:
        self._machine.check_alive()
        return sorted(self._directory.cached)

    def open(self, name: str, *, create: bool = False) -> SimFile:
        self._machine.check_alive()
        names = self._directory.cached
        if create:
            if name in names:
                raise FileExists(f"{self._path}/{name}")
            self._machine.begin("create")
            if self._machine.is_failing("create"):
                raise DiskFull(f"simulated: no room for the name {name}")
            self._directory.change((None, name, _Inode()))
        return SimFile(self._machine, name, self._inode(name))

    def rename(self, old: str, new: str) -> None:
        inode = self._inode(old)
        self._machine.begin("rename")
        if new in self._directory.cached:
            self._machine.reserve(-len(self._directory.cached[new].cached))
        self._directory.change((old, new, inode))

    def remove(self, name: str) -> None:
        inode = self._inode(name)
        self._machine.begin("remove")
        self._directory.change((name, None, inode))
        self._machine.reserve(-len(inode.cached))

    def sync_dir(self) -> None:
        self._machine.begin("sync_dir")
        if self._machine.is_failing("sync_dir"):
            raise DiskFailed(f"simulated: {self._path} cannot be synced")
        self._directory.sync()

    def directory(self, name: str) -> SimDisk:
        if name not in self._directory.subdirectories:
            self._machine.begin("mkdir")
            self._directory.subdirectories[name] = _Directory()
        return self._of(
            self._machine, f"{self._path}/{name}", self._directory.subdirectories[name], is_root=False
        )

    def lock(self) -> None:
        self._machine.check_alive()
        if self._directory.locked:
            raise DirectoryLocked(f"{self._path} is held by another process")
        self._directory.locked = True

    def unlock(self) -> None:
        self._directory.locked = False

    def _inode(self, name: str) -> _Inode:
        self._machine.check_alive()
        try:
            return self._directory.cached[name]
        except KeyError:
            raise FileMissing(f"{self._path}/{name}") from None

    # What a simulator does to it.

    @property
    def counts(self) -> Counter[str]:
        """Operations so far, by name: create, write, truncate, sync, rename, remove, sync_dir, mkdir."""
        return self._machine.counts

    def on_operation(self, hook: Callable[[str], None] | None) -> None:
        """Call ``hook`` with the operation's name before each operation that changes something. It may raise:
        then the operation has not happened. It outlives ``crash`` and ``kill``."""
        self._machine.on_operation = hook

    def fail_next(self, operation: str, times: int = 1) -> None:
        """Let the next ``read``, ``write``, ``sync`` or ``sync_dir`` raise DiskFailed, or the next ``create``
        DiskFull."""
        self._machine.faults[operation] += times

    def set_capacity(self, capacity: int | None) -> None:
        """Bytes that all files together may hold; beyond it, DiskFull. None for no limit."""
        self._machine.capacity = capacity

    @property
    def used(self) -> int:
        return self._machine.used

    def flip_bit(self, name: str, offset: int, bit: int = 0) -> None:
        """Rot: change a bit in both images, as if it had always been so."""
        inode = self._inode(name)
        for image in (inode.cached, inode.durable):
            if offset < len(image):
                image[offset] ^= 1 << bit

    def crash(self, policy: CrashPolicy = CrashPolicy.ANY) -> SimDisk:
        """Power cut of the whole machine (called on its root). Returns the disk as the next start finds
        it."""
        rng = self._machine.rng
        if policy is CrashPolicy.ANY:
            policy = rng.choice([policy for policy in CrashPolicy if policy is not CrashPolicy.ANY])
        return self._restart(self._directory.after_crash(rng, policy))

    def kill(self) -> SimDisk:
        """Death of the process (called on the root): the kernel keeps all that was written, and its lock is
        gone."""
        return self._restart(self._directory.copy())

    def clone(self, rng: Random | None = None) -> SimDisk:
        """A copy on another machine, unlocked, with the same contents, synced and not. This disk lives on."""
        machine = _Machine(rng or Random(self._machine.rng.random()), self._machine.capacity)
        machine.used = self._machine.used
        return self._of(machine, self._path, self._directory.copy(), is_root=True)

    def _restart(self, directory: _Directory) -> SimDisk:
        if not self._is_root:
            raise ValueError(f"{self._path} is a part of a machine; crash or kill its root")
        self._machine.is_dead = True
        machine = self._machine.successor()
        machine.used = _bytes_in(directory)
        return self._of(machine, self._path, directory, is_root=True)


def _bytes_in(directory: _Directory) -> int:
    here = sum(len(inode.cached) for inode in directory.cached.values())
    return here + sum(_bytes_in(sub) for sub in directory.subdirectories.values())
