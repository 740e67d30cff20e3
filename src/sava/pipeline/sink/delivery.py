"""Staging: what a task of the exactly-once sink leaves in the object store for the commit.

    object   | batches for orders-part-0 | batches for orders-part-1 | …
    section    ^ start .. end, checksum

A task collects encoded batches by partition and puts them as one object with a section for each partition;
one that writes more than OBJECT_BYTES puts several, so that memory stays bounded, no disk is needed, and no
object passes what a store takes in one request. Nothing in them is visible before the commit names it.
Names are new for every attempt of a task: attempts of the same task can run side by side, and the one that
Spark chooses is named by its commit message.

Publishing: what a task of the at-least-once sink does with its batches.

Each partition has a thread that publishes what it is handed, a few batches ahead of the receipts; the task
goes on encoding meanwhile, and waits when a partition is behind. The task has succeeded when every batch
has its receipt. One that fails, or whose process dies, is repeated by Spark from its beginning: hence at
least once.
"""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import google_crc32c

from sava.errors import SavaError
from sava.pipeline.per_process import Objects
from sava.proto import writers_pb2 as pb
from sava.records import RecordBatch

OBJECT_BYTES: Final = 64 << 20


@dataclass(slots=True)
class _StagedSection:
    batches: list[bytes] = field(default_factory=list)
    size: int = 0
    messages: int = 0
    largest: int = 0
    crc32c: int = 0


class TaskStage:
    """For one attempt of a task."""

    def __init__(self, where: pb.StagingResponse, name: str, *, object_bytes: int = OBJECT_BYTES) -> None:
        """``name`` is for people who look into the store."""
        self._url = where.store_url
        self._key = f"{where.prefix.rstrip('/')}/{name}-{uuid.uuid4().hex}"
        self._object_bytes = object_bytes
        self._parts: dict[str, _StagedSection] = {}
        self._size = 0
        self._objects = 0
        self._sections: list[pb.Section] = []
        self._put: Future[None] | None = None

    def add(self, topic: str, batch: RecordBatch, largest: int) -> None:
        data = batch.to_bytes()
        if self._size and self._size + len(data) > self._object_bytes:
            self._close_object()
        part = self._parts.get(topic)
        if part is None:
            part = self._parts[topic] = _StagedSection()
        part.batches.append(data)
        part.size += len(data)
        part.messages += len(batch)
        part.largest = max(part.largest, largest)
        part.crc32c = google_crc32c.extend(part.crc32c, data)
        self._size += len(data)

    def finish(self) -> list[pb.Section]:
        """Everything is in the store; what it is, in the order of the messages for each topic."""
        if self._size:
            self._close_object()
        self._wait()
        return self._sections

    def abandon(self) -> list[str]:
        """The keys of what may be in the store, when nothing is on its way any more."""
        with suppress(SavaError):
            self._wait()
        return [f"{self._key}-{number}" for number in range(self._objects)]

    def _close_object(self) -> None:
        key = f"{self._key}-{self._objects}"
        self._wait()
        data = [batch for part in self._parts.values() for batch in part.batches]
        self._put = Objects.of(self._url).start_put(key, data)
        start = 0
        for topic, part in self._parts.items():
            end = start + part.size
            self._sections.append(
                pb.Section(
                    topic=topic,
                    key=key,
                    start=start,
                    end=end,
                    messages=part.messages,
                    largest=part.largest,
                    crc32c=part.crc32c,
                )
            )
            start = end
        self._objects += 1
        self._parts, self._size = {}, 0

    def _wait(self) -> None:
        """One object is on its way while the next is filled, no more: memory is bounded."""
        put, self._put = self._put, None
        if put is not None:
            put.result()


AHEAD: Final = 4
"""Batches of a partition that wait for their turn."""
PUBLISH_WAITING_BYTES: Final = 8 << 20
"""Rows that wait to be encoded. Batches follow from it (``batching``), and from these how much can be on
its way: a partition has AHEAD of them here, and a few more with its producer."""
LOOK_S: Final = 0.5
"""How often somebody who waits for room looks whether the other side still takes anything."""

Publish = Callable[[str, Iterator[RecordBatch]], int]


class _Stopped(Exception):
    """The task has failed: what was not published yet need not be."""


class _PartitionThread:
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


class TaskPublisher:
    """For one attempt of a task. What is inside of the ``with`` is published completely, or the error is
    raised."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._lanes: dict[str, _PartitionThread] = {}

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
            lane = self._lanes[name] = _PartitionThread(self._publish, name)
        lane.put(batch)

    def finish(self) -> int:
        """How many messages were published."""
        for lane in self._lanes.values():
            lane.put(None)
        return sum(lane.join() for lane in self._lanes.values())
