"""BackgroundSaver: writes an image of the state to disk while the node goes on working.

Two resources must not be held: the event loop, which owns the state, and the log writer's thread, which
every write waits for. So the image is encoded on the loop in slices of about a millisecond, and the bytes are
hashed, written and synced on a thread of its own. Freezing made the image immune to later changes; nothing is
locked.

Two more are shared whether we like it or not: the processor and the filesystem. All nodes count the same
entries, so all of them snapshot at the same time, and a log's sync waits for whatever the filesystem has to
write before it. Nobody is in a hurry for a snapshot: pauses between the slices leave most of the time to
others, and the file is synced piece by piece, so that no log waits behind all of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from sava.metadata.machine.state_machine import FrozenState
from sava.metadata.snapshots import SnapshotBuilder, SnapshotStore
from sava.raft.types import SnapshotMeta
from sava.tasks import cancelled

SLICE_S = 0.001
PAUSE_S = 0.004
"""Between two slices: a fifth of the loop's time at most goes into a snapshot."""
FLUSH_BYTES = 1 << 20
"""Encoded bytes held before they are handed to the thread, and synced."""

Done = Callable[[SnapshotMeta | BaseException], None]


class BackgroundSaver:
    """``replica.SnapshotSaver``. Owned by the event loop."""

    def __init__(self, store: SnapshotStore, saved: Callable[[float, int], None]) -> None:
        """``saved`` is told how long each snapshot took and how large it is."""
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
