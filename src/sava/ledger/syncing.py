"""Syncing: the threads that write and sync copies.

A mirror is waited for by a producer somewhere, so what lies between a message and its sync counts: a job goes
to a thread by a queue, and its outcome back to the event loop by one call, with no future in between. Threads
come as they are needed, up to a bound, and stay.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], None]
Done = Callable[[BaseException | None], None]


class Syncing:
    """Owned by the event loop that made it; ``done`` is called there."""

    def __init__(self, threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[tuple[Job, Done] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._max_threads = threads
        self._busy = 0

    def do(self, job: Job, done: Done) -> None:
        """Run the job on a thread, then ``done`` with None or what it raised."""
        self._busy += 1
        if self._busy > len(self._threads) < self._max_threads:
            thread = threading.Thread(target=self._serve, name="sava-mirror", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queue.put((job, done))

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            job, done = item
            outcome: BaseException | None = None
            try:
                job()
            except BaseException as error:  # noqa: BLE001 (it belongs to whoever waits)
                outcome = error
            try:
                self._loop.call_soon_threadsafe(self._finish, done, outcome)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more

    def _finish(self, done: Done, outcome: BaseException | None) -> None:
        self._busy -= 1
        done(outcome)

    def close(self) -> None:
        """When nothing is under way."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
