"""Generations: which part of the own log belongs to which ledger, written down beside the log.

A broker has one log, and a ledger for each of its generations: from where it was opened to where it was
ended, by a fence or by the end of the process. Positions continue from one to the next.

    log     ──────────────┬─────────────┬──────────────────────────────
    ledger  41            │ uncommitted │ 57
                 end of 41 ┘             └ start of 57

A recovery decides where a ledger ends (``closed``). What stands in the log between there and the end of that
generation was never acknowledged: this *uncommitted tail* is left out when the log is read at the next start.
So a generation with an uncommitted tail is remembered until the log does not hold that part any more, which
may be long after any topic needs the ledger itself. The other way round the ledger may continue where this
disk lost its last writes: this *missing range* is fetched from the disks that have it, and *re-appended* in
the next ledger before that is opened to topics.

The file is replaced as a whole: written under another name, synced, renamed, the directory synced. A thread
does that, since a disk may hang for seconds, and the event loop has heartbeats to send meanwhile. So a change
takes time: others see it when it is durable, and each change is decided on what the one before it left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import msgspec

from sava.ledger.protocol import StorageId
from sava.wal import Disk, FileMissing, LogCorrupt

_FILE: Final = "generations.json"
_NEW: Final = "generations.new"


class Generation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One ledger of this disk."""

    incarnation: int
    start: int
    end: int | None = None
    """Where the log was when it ended; None: it is open."""
    fence: int = 0
    """The greatest epoch that was promised."""
    closed: int | None = None
    """Where the ledger ends, once that was decided."""
    reappended: int | None = None
    """Where what was fetched from other disks ends in the log, once it is there, in the next ledger."""

    @property
    def missing_range(self) -> tuple[int, int] | None:
        """The part of the ledger that this disk does not have."""
        if self.closed is None or self.end is None or self.reappended is not None or self.closed <= self.end:
            return None
        return self.end, self.closed

    @property
    def uncommitted_tail(self) -> tuple[int, int] | None:
        """What stands in the log and is not part of the ledger."""
        if self.closed is None or self.end is None or self.closed >= self.end:
            return None
        return self.closed, self.end

    @property
    def last(self) -> int:
        """Where the last of it ends in the log."""
        return max(self.end or 0, self.reappended or 0)


class _Kept(msgspec.Struct, frozen=True):
    storage: str
    generations: tuple[Generation, ...]


Decide = Callable[[Generation | None], Generation | None]
"""What becomes of a generation; None: nothing changes."""


class Generations:
    """Owned by the event loop. A thread writes the file, for one change at a time."""

    def __init__(self, disk: Disk) -> None:
        """Raises LogCorrupt."""
        self._disk = disk
        self._generations: dict[int, Generation] = {}
        self._storage = ""
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        with suppress(FileMissing):
            file = disk.open(_FILE)
            try:
                data = file.read(0, file.size())
            finally:
                file.close()
            try:
                kept = msgspec.json.decode(data, type=_Kept)
            except msgspec.DecodeError as error:
                raise LogCorrupt(disk.path, _FILE, 0, f"not a list of ledgers ({error})") from error
            self._storage = kept.storage
            self._generations = {generation.incarnation: generation for generation in kept.generations}

    async def belong_to(self, storage: StorageId, found_end: int) -> None:
        """The log is open: it ended at ``found_end``. Generations of another disk's log are dropped.

        A generation whose end was not written down ended where the next one began, at the latest. The
        messages of that one must not be left out with it."""
        if self._storage != storage:
            self._storage, self._generations = storage, {}
        end = found_end
        for generation in reversed(list(self._generations.values())):
            if generation.end is None:
                await self.keep(msgspec.structs.replace(generation, end=max(generation.start, end)))
            end = min(end, generation.start)

    @property
    def uncommitted_tails(self) -> list[tuple[int, int]]:
        return [
            generation.uncommitted_tail
            for generation in self._generations.values()
            if generation.uncommitted_tail is not None
        ]

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._generations.values()))

    def get(self, incarnation: int) -> Generation | None:
        return self._generations.get(incarnation)

    async def keep(self, generation: Generation) -> None:
        """Durable on return. Raises DiskFull, DiskFailed."""
        await self.change(generation.incarnation, lambda _: generation)

    async def forget(self, incarnation: int) -> None:
        await self._change(
            lambda: {
                number: generation
                for number, generation in self._generations.items()
                if number != incarnation
            }
        )

    async def change(self, incarnation: int, decide: Decide) -> None:
        """Durable on return. ``decide`` gets the generation as the last change left it: two changes that are
        under way together (an end, and a promise to a recoverer) must not undo each other. Raises DiskFull,
        DiskFailed."""

        def changed() -> dict[int, Generation]:
            generation = decide(self._generations.get(incarnation))
            return self._generations if generation is None else {**self._generations, incarnation: generation}

        await self._change(changed)

    async def settled(self) -> None:
        """Wait for changes whose callers were cancelled."""
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _change(self, changed: Callable[[], dict[int, Generation]]) -> None:
        """A caller that is cancelled leaves its change under way: the thread writes the file all the same.
        The next change must not write it at the same time, nor start from what was before."""
        task = asyncio.create_task(self._change_alone(changed), name="generations")
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    async def _change_alone(self, changed: Callable[[], dict[int, Generation]]) -> None:
        async with self._changing:
            generations = changed()
            if generations != self._generations:
                await asyncio.to_thread(self._store, generations)
                self._generations = generations

    def _store(self, generations: dict[int, Generation]) -> None:
        """(On a thread.)"""
        with suppress(FileMissing):
            self._disk.remove(_NEW)
        file = self._disk.open(_NEW, create=True)
        try:
            file.write(0, [msgspec.json.encode(_Kept(self._storage, tuple(generations.values())))])
            file.sync()
        finally:
            file.close()
        self._disk.rename(_NEW, _FILE)
        self._disk.sync_dir()
