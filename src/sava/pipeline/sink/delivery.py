"""Delivery: what a task of the sink does with its batches.

**Exactly once** (``TaskStage``). A task leaves objects in the store for the commit:

    object   | batches for orders-part-0 | batches for orders-part-1 | …
    section    ^ start .. end, checksum

The task collects encoded batches by partition and puts them as one object with a section for each partition.
Beyond OBJECT_BYTES it starts another object, so that memory stays bounded, no disk is needed, and no object
exceeds what a store takes in one request. Readers see nothing of it before the commit names it. Object names
are new for every attempt of a task: attempts can run concurrently, and Spark's choice names its own objects
in its commit message.

**At least once** (``TaskPublisher``). A thread for each partition publishes a few batches ahead of the
receipts; the task encodes meanwhile and waits when a partition is behind. The task succeeds when every batch
has its receipt. Spark repeats a task that fails, or whose process dies, from its beginning: hence at least
once.
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
    """The staged objects of one attempt of a task."""

    def __init__(self, where: pb.StagingResponse, name: str, *, object_bytes: int = OBJECT_BYTES) -> None:
        """``name`` helps people who look into the store."""
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
        """Put the rest and return all sections, in the order of messages for each partition."""
        if self._size:
            self._close_object()
        self._wait()
        return self._sections

    def abandon(self) -> list[str]:
        """Wait for the last put and return the keys of objects that may exist."""
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
        """Wait for the put in flight. Only one is in flight while the next object fills: memory is
        bounded."""
        put, self._put = self._put, None
        if put is not None:
            put.result()


AHEAD: Final = 4
"""Batches of a partition that wait for its thread."""
PUBLISH_WAITING_BYTES: Final = 8 << 20
"""Bytes of rows that wait for encoding. It bounds the batch size (``Batcher``) and so the bytes in flight: a
partition has AHEAD batches here, and a few more at its producer."""
LOOK_S: Final = 0.5
"""A thread that waits for the queue checks this often whether the other side has failed."""

Publish = Callable[[str, Iterator[RecordBatch]], int]


class _Stopped(Exception):
    """The task has failed; the thread stops publishing."""


class _PartitionThread:
    """The thread that publishes to one partition. It sets the error before it ends; the task reads it."""

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
        """Queue a batch; None marks the end."""
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
    """Publishes the batches of one attempt of a task: completely, or it raises the error."""

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
        """Wait until everything is published and return the number of messages."""
        for lane in self._lanes.values():
            lane.put(None)
        return sum(lane.join() for lane in self._lanes.values())
