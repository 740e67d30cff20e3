"""Staging: what a task of the exactly-once sink leaves in the object store for the commit.

    object   | batches for orders-part-0 | batches for orders-part-1 | …
    section    ^ start .. end, checksum

A task collects encoded batches by partition and puts them as one object with a section for each partition;
one that writes more than OBJECT_BYTES puts several, so that memory stays bounded, no disk is needed, and no
object passes what a store takes in one request. Nothing in them is visible before the commit names it.
Names are new for every attempt of a task: attempts of the same task can run side by side, and the one that
Spark chooses is named by its commit message.
"""

from __future__ import annotations

import uuid
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import google_crc32c

from sava.errors import SavaError
from sava.pipeline.objects import Objects
from sava.proto import writers_pb2 as pb
from sava.records import RecordBatch

OBJECT_BYTES: Final = 64 << 20


@dataclass(slots=True)
class _Part:
    batches: list[bytes] = field(default_factory=list)
    size: int = 0
    messages: int = 0
    largest: int = 0
    crc32c: int = 0


class Stage:
    """For one attempt of a task."""

    def __init__(self, where: pb.StagingResponse, name: str, *, object_bytes: int = OBJECT_BYTES) -> None:
        """``name`` is for people who look into the store."""
        self._url = where.store_url
        self._key = f"{where.prefix.rstrip('/')}/{name}-{uuid.uuid4().hex}"
        self._object_bytes = object_bytes
        self._parts: dict[str, _Part] = {}
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
            part = self._parts[topic] = _Part()
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
