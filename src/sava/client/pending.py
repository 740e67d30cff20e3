"""Pending: messages on their way into a topic, gathered as columns until they are one batch.

The columns are kept until the batch has its receipt: its sequence stands under its checksum, so giving it
another one means to encode it again. Columns that no message uses do not exist.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sava.client.errors import ClientError
from sava.records import Codec, RecordBatch

MESSAGE_OVERHEAD: Final = 16
"""Bytes that a message takes besides its content, roughly: offsets of its columns, its place in the lists
here."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What all batches of a producer have in common."""

    producer: str
    codec: Codec = Codec.NONE
    schema_id: int | None = None
    schema_version: int | None = None


class Pending:
    __slots__ = (
        "attributes",
        "base_sequence",
        "data",
        "deadline",
        "is_plain",
        "is_settled",
        "keys",
        "payloads",
        "publish_time",
        "ready_at",
        "rows",
        "size",
        "times",
        "waiters",
        "was_sent",
        "watchers",
    )

    def __init__(self, *, ready_at: float, deadline: float) -> None:
        self.ready_at = ready_at
        self.deadline = deadline
        self.is_plain = True
        """No message has anything but its payload."""
        self.payloads: list[bytes] = []
        self.keys: list[str | None] | None = None
        self.attributes: list[Mapping[str, str]] | None = None
        self.times: list[int | None] | None = None
        self.size = 0
        self.waiters: list[asyncio.Future[int]] = []
        self.rows: list[int] | None = None
        """Of each waiter, the row whose offset it waits for. None: every row has its own."""
        self.watchers: list[asyncio.Future[None]] = []
        """They wait for the outcome, whatever it is."""
        self.publish_time = 0
        self.base_sequence = -1
        self.data: bytes | memoryview | None = None
        self.was_sent = False
        self.is_settled = False
        """Nobody waits any longer: it has its receipt, or its time is up."""

    def __len__(self) -> int:
        return len(self.payloads)

    @property
    def next_sequence(self) -> int:
        return self.base_sequence + len(self)

    # -- gathering -----------------------------------------------------------------

    def add(
        self,
        payload: bytes,
        key: str | None,
        attributes: Mapping[str, str] | None,
        publish_time: int | None,
        size: int,
        waiter: asyncio.Future[int],
    ) -> None:
        if not self.is_plain or key is not None or attributes or publish_time is not None:
            self._add_rest(key, attributes, publish_time)
        if self.rows is not None:
            self.rows.append(len(self.payloads))
        self.payloads.append(payload)
        self.waiters.append(waiter)
        self.size += size

    def _add_rest(
        self, key: str | None, attributes: Mapping[str, str] | None, publish_time: int | None
    ) -> None:
        self.is_plain = False
        row = len(self.payloads)
        if key is not None or self.keys is not None:
            self.keys = [None] * row if self.keys is None else self.keys
            self.keys.append(key)
        if attributes or self.attributes is not None:
            self.attributes = [{}] * row if self.attributes is None else self.attributes
            self.attributes.append(attributes or {})
        if publish_time is not None or self.times is not None:
            self.times = [None] * row if self.times is None else self.times
            self.times.append(publish_time)

    def extend(
        self,
        payloads: Sequence[bytes],
        keys: Sequence[str | None] | None,
        attributes: Sequence[Mapping[str, str]] | None,
        publish_time: int | None,
        size: int,
        waiter: asyncio.Future[int],
    ) -> None:
        row, count = len(self.payloads), len(payloads)
        self.is_plain = False
        if self.rows is None:
            self.rows = list(range(row))
        if keys is not None or self.keys is not None:
            self.keys = [None] * row if self.keys is None else self.keys
            self.keys.extend(keys if keys is not None else [None] * count)
        if attributes is not None or self.attributes is not None:
            self.attributes = [{}] * row if self.attributes is None else self.attributes
            self.attributes.extend(attributes if attributes is not None else [{}] * count)
        if publish_time is not None or self.times is not None:
            self.times = [None] * row if self.times is None else self.times
            self.times.extend([publish_time] * count)
        self.payloads.extend(payloads)
        self.waiters.append(waiter)
        self.rows.append(row)
        self.size += size

    # -- sending -----------------------------------------------------------------

    def number(self, base_sequence: int) -> None:
        if base_sequence != self.base_sequence:
            self.base_sequence = base_sequence
            self.data = None

    def encode(self, stamp: Stamp, producer_id: int) -> bytes | memoryview:
        """The batch's bytes, made once for a sequence. Raises InvalidMessage, BatchTooLarge."""
        if self.data is None:
            # Taken once: a batch that is sent again is the same batch.
            self.publish_time = now = self.publish_time or time.time_ns() // 1000
            self.data = RecordBatch.encode(
                self.payloads,
                publish_time=now if self.times is None else [now if t is None else t for t in self.times],
                keys=self.keys,
                attributes=self.attributes,
                schema_id=stamp.schema_id,
                schema_version=stamp.schema_version,
                producer=stamp.producer,
                producer_id=producer_id,
                base_sequence=self.base_sequence,
                codec=stamp.codec,
            ).data
        return self.data

    # -- settling -----------------------------------------------------------------

    def succeed(self, base_offset: int) -> None:
        """A negative offset is one that is not known."""
        rows = range(len(self.waiters)) if self.rows is None else self.rows
        for waiter, row in zip(self.waiters, rows, strict=True):
            if not waiter.done():
                waiter.set_result(base_offset + row if base_offset >= 0 else base_offset)
        self._settled()

    def fail(self, error: ClientError) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error.again())
        self._settled()

    def _settled(self) -> None:
        self.is_settled = True
        self.waiters, self.rows = [], None
        for watcher in self.watchers:
            if not watcher.done():
                watcher.set_result(None)
        self.watchers = []


class Ready(Pending):
    """A batch that came encoded: it gets its producer and its sequence, and goes as it is."""

    __slots__ = ("_records",)

    def __init__(self, records: RecordBatch, *, deadline: float, waiter: asyncio.Future[int]) -> None:
        super().__init__(ready_at=0.0, deadline=deadline)
        self._records = records
        self.size = records.header.length
        self.waiters, self.rows = [waiter], [0]

    def __len__(self) -> int:
        return len(self._records)

    def encode(self, stamp: Stamp, producer_id: int) -> bytes | memoryview:
        if self.data is None:
            self.data = self._records.stamped(producer_id=producer_id, base_sequence=self.base_sequence).data
        return self.data
