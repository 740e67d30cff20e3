"""Publishing: what a task of the at-least-once sink does with its batches.

Each partition has a thread that publishes what it is handed, a few batches ahead of the receipts; the task
goes on encoding meanwhile, and waits when a partition is behind. The task has succeeded when every batch
has its receipt. One that fails, or whose process dies, is repeated by Spark from its beginning: hence at
least once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self

from sava.records import RecordBatch

AHEAD: Final = 4
"""Batches of a partition that wait for their turn."""
WAITING_BYTES: Final = 8 << 20
"""Rows that wait to be encoded. Batches follow from it (``batching``), and from these how much can be on
its way: a partition has AHEAD of them here, and a few more with its producer."""
LOOK_S: Final = 0.5
"""How often somebody who waits for room looks whether the other side still takes anything."""

Publish = Callable[[str, Iterator[RecordBatch]], int]


class _Stopped(Exception):
    """The task has failed: what was not published yet need not be."""


class _Lane:
    """A partition. The error, if there is one, is set by the thread before it ends, and read by the task."""

    def __init__(self, publish: Publish, name: str) -> None:
        self._publish = publish
        self._name = name
        self._queue: queue.Queue[RecordBatch | None] = queue.Queue(AHEAD)
        self._is_stopped = False
        self._error: BaseException | None = None
        self._messages = 0
        self._thread = threading.Thread(target=self._run, name=f"sava sink {name}", daemon=True)
        self._thread.start()

    def put(self, batch: RecordBatch | None) -> None:
        """None is the end."""
        while True:
            self._check()
            try:
                self._queue.put(batch, timeout=LOOK_S)
            except queue.Full:
                continue
            return

    def stop(self) -> None:
        self._is_stopped = True

    def join(self) -> int:
        self._thread.join()
        self._check()
        return self._messages

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._messages = self._publish(self._name, self._batches())
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 (goes to the task)
            self._error = error

    def _batches(self) -> Iterator[RecordBatch]:
        while not self._is_stopped:
            try:
                batch = self._queue.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            if batch is None:
                return
            yield batch
        raise _Stopped


class Publisher:
    """For one attempt of a task. What is inside of the ``with`` is published completely, or the error is
    raised."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._lanes: dict[str, _Lane] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lane in self._lanes.values():
            lane.stop()

    def add(self, name: str, batch: RecordBatch, largest: int) -> None:
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(self._publish, name)
        lane.put(batch)

    def finish(self) -> int:
        """How many messages were published."""
        for lane in self._lanes.values():
            lane.put(None)
        return sum(lane.join() for lane in self._lanes.values())
