"""Lives: which part of the own log belongs to which journal, written down beside the log.

A broker has one log, and a journal for each of its lives: from where it was opened to where it was ended,
by a fence or by the end of the process. Positions go on from one to the next.

    log      ──────────────┬───────┬──────────────────────────────
    journal  41            │ void  │ 57
                  end of 41 ┘       └ start of 57

Whoever recovers a journal decides where it ends (``closed``). What stands in the log between there and the
end of that life was never acknowledged, and is *void*: it is left out when the log is read at the next start.
So a life with a void part is remembered until the log does not hold that part any more, which may be long
after the journal itself is needed by nobody.
The other way round the journal may go on where this disk lost its last writes: the rest is fetched from the
disks that have it, and *adopted* into the next journal before that is opened to topics.

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

_FILE: Final = "lives.json"
_NEW: Final = "lives.new"


class Life(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One journal of this disk."""

    incarnation: int
    start: int
    end: int | None = None
    """Where the log was when it ended; None: it goes on."""
    fence: int = 0
    """The greatest epoch that was promised."""
    closed: int | None = None
    """Where the journal ends, once that was decided."""
    adopted: int | None = None
    """Where what was fetched from other disks ends in the log, once it is there, in the next journal."""

    @property
    def lacks(self) -> tuple[int, int] | None:
        """The part of the journal that this disk does not have."""
        if self.closed is None or self.end is None or self.adopted is not None or self.closed <= self.end:
            return None
        return self.end, self.closed

    @property
    def void(self) -> tuple[int, int] | None:
        """What stands in the log and is not part of the journal."""
        if self.closed is None or self.end is None or self.closed >= self.end:
            return None
        return self.closed, self.end

    @property
    def last(self) -> int:
        """Where the last of it ends in the log."""
        return max(self.end or 0, self.adopted or 0)


class _Kept(msgspec.Struct, frozen=True):
    storage: str
    lives: tuple[Life, ...]


Decide = Callable[[Life | None], Life | None]
"""What becomes of a life; None: nothing changes."""


class Lives:
    """Owned by the event loop. A thread writes the file, for one change at a time."""

    def __init__(self, disk: Disk) -> None:
        """Raises LogCorrupt."""
        self._disk = disk
        self._lives: dict[int, Life] = {}
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
                raise LogCorrupt(disk.path, _FILE, 0, f"not a list of journals ({error})") from error
            self._storage = kept.storage
            self._lives = {life.incarnation: life for life in kept.lives}

    async def belong_to(self, storage: StorageId, found_end: int) -> None:
        """The log is open: it ended at ``found_end``. Lives of another disk's log are nobody's.

        A life whose end was not written down ended where the next one began, at the latest. The messages of
        that one must not become void with it."""
        if self._storage != storage:
            self._storage, self._lives = storage, {}
        end = found_end
        for life in reversed(list(self._lives.values())):
            if life.end is None:
                await self.keep(msgspec.structs.replace(life, end=max(life.start, end)))
            end = min(end, life.start)

    @property
    def void(self) -> list[tuple[int, int]]:
        return [life.void for life in self._lives.values() if life.void is not None]

    def __iter__(self) -> Iterator[Life]:
        return iter(list(self._lives.values()))

    def get(self, incarnation: int) -> Life | None:
        return self._lives.get(incarnation)

    async def keep(self, life: Life) -> None:
        """Durable on return. Raises DiskFull, DiskFailed."""
        await self.change(life.incarnation, lambda _: life)

    async def forget(self, incarnation: int) -> None:
        await self._change(
            lambda: {number: life for number, life in self._lives.items() if number != incarnation}
        )

    async def change(self, incarnation: int, decide: Decide) -> None:
        """Durable on return. ``decide`` gets the life as the last change left it: two changes that are under
        way together (an end, and a promise to a coordinator) must not undo each other.
        Raises DiskFull, DiskFailed."""

        def changed() -> dict[int, Life]:
            life = decide(self._lives.get(incarnation))
            return self._lives if life is None else {**self._lives, incarnation: life}

        await self._change(changed)

    async def settled(self) -> None:
        """Wait for changes whose callers were cancelled."""
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _change(self, changed: Callable[[], dict[int, Life]]) -> None:
        """A caller that is cancelled leaves its change under way: the thread writes the file all the same.
        The next change must not write it at the same time, nor start from what was before."""
        task = asyncio.create_task(self._change_alone(changed), name="lives")
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    async def _change_alone(self, changed: Callable[[], dict[int, Life]]) -> None:
        async with self._changing:
            lives = changed()
            if lives != self._lives:
                await asyncio.to_thread(self._store, lives)
                self._lives = lives

    def _store(self, lives: dict[int, Life]) -> None:
        """(On a thread.)"""
        with suppress(FileMissing):
            self._disk.remove(_NEW)
        file = self._disk.open(_NEW, create=True)
        try:
            file.write(0, [msgspec.json.encode(_Kept(self._storage, tuple(lives.values())))])
            file.sync()
        finally:
            file.close()
        self._disk.rename(_NEW, _FILE)
        self._disk.sync_dir()
