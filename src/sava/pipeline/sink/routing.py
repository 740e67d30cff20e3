"""What a task of the sink does: rows go to partitions of topics and become record batches, whole Arrow
batches at a time; the batches go to staged objects (exactly once) or to brokers (at least once).

A row goes to its ``partition`` if it has one, else to the partition of its key (as in
``sava.client.producer``), else to the partition whose turn it is: rows without a key go in runs, since full
batches are worth more than an even spread within milliseconds. Rows of one destination keep their order.
Every step is an Arrow kernel over all rows. Destinations of all topics share one numbering, so several topics
in a batch cost no more than one.

Spark hands over about ten thousand rows at a time, and routing cuts them up. A record batch costs about the
same with ten messages or ten thousand. So rows wait in the ``Batcher``, as Arrow slices, until a partition
has enough of them, or all partitions together have too many.

**Exactly once** (``TaskStage``). A task leaves objects in the store for the commit:

    object   | batches for orders-part-0 | batches for orders-part-1 | …
    section    ^ start .. end, checksum

The task collects encoded batches by partition and puts them as one object with a section for each partition.
Beyond OBJECT_BYTES it starts another object, so that memory stays bounded, no disk is needed, and no object
exceeds what a store takes in one request. Readers see nothing of it before the commit names it. Object names
are new for every attempt of a task: attempts can run concurrently, and Spark's choice names its own objects
in its commit message.

**At least once** (``TaskPublisher``). A producer for each partition publishes a few batches ahead of the
receipts; the task encodes meanwhile and waits when a partition is behind. The task succeeds when every batch
has its receipt. Spark repeats a task that fails, or whose process dies, from its beginning: hence at least
once.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from types import TracebackType
from typing import Any, Final, Self

import google_crc32c
import pyarrow as pa
import pyarrow.compute as pc

from sava.client.producer import fnv1a
from sava.errors import SavaError
from sava.pipeline.cluster import Objects, PartitionPublisher, TopicPartitions
from sava.pipeline.errors import WriteRefused
from sava.proto import writers_pb2 as pb
from sava.records import BatchTooLarge, Compression, InvalidMessage, RecordBatch

RUN_ROWS: Final = 1000
"""Rows without a key that go to one partition before the next."""

ROUTING_COLUMNS: Final = ("topic", "partition")
"""Columns that name the destination and are not part of the message."""


@dataclass(slots=True)
class _Place:
    """A topic and the range of its destinations."""

    topic: str
    base: int
    count: int
    taken: int
    """The number of rows without a key so far, which decides whose turn it is."""

    @property
    def turn(self) -> int:
        return self.taken // RUN_ROWS % self.count


class RowRouter:
    """Routes the rows of one task. ``first`` decides where runs start: tasks with few rows start at different
    partitions."""

    def __init__(self, look_up: Callable[[str], TopicPartitions], *, topic: str = "", first: int = 0) -> None:
        """``topic`` applies to all rows; if empty, the column ``topic`` decides."""
        self._look_up = look_up
        self._topic = topic
        self._first = first
        self._names: list[str] = []
        self._places: dict[str, _Place] = {}

    def route(self, rows: Any) -> Iterator[tuple[str, Any]]:
        """Yield slices of a ``pa.RecordBatch`` with the partition of each, without the routing columns."""
        if not rows.num_rows:
            return
        places, topic_of = self._topics(rows)
        keys = _column(rows, "key", pa.utf8())
        wanted = _column(rows, "partition", pa.int32())
        messages = rows.select([name for name in rows.schema.names if name not in ROUTING_COLUMNS])
        place = places[0] if len(places) == 1 else None
        if place is not None and wanted is None and (keys is None or place.count == 1):
            yield from self._runs(place, messages)
            return
        destinations = self._destinations(places, topic_of, keys, wanted)
        bounds = pc.min_max(destinations)
        if bounds["min"].equals(bounds["max"]):
            yield self._names[bounds["min"].as_py()], messages
            return
        order = pc.sort_indices(destinations)  # stable: rows of a destination stay in order
        runs = pc.run_end_encode(destinations.take(order))
        start = 0
        for destination, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            # Each in memory of its own: a slice for a partition that gets a row now and then, and so keeps
            # it for long, would keep all of the rows that it was cut from.
            yield self._names[destination], messages.take(order.slice(start, end - start))
            start = end

    def _runs(self, place: _Place, messages: Any) -> Iterator[tuple[str, Any]]:
        start, rows = 0, messages.num_rows
        while start < rows:
            left = RUN_ROWS - place.taken % RUN_ROWS if place.count > 1 else rows
            part = messages.slice(start, left)
            yield self._names[place.base + place.turn], part
            place.taken += part.num_rows
            start += part.num_rows

    def _destinations(self, places: list[_Place], topic_of: Any, keys: Any, wanted: Any) -> Any:
        """The number of the destination for each row, int64."""
        bases = _per_row([place.base for place in places], topic_of)
        counts = _per_row([place.count for place in places], topic_of)
        turns = _per_row([place.base + place.turn for place in places], topic_of)
        for place in places:
            # Counted by whole batches here, although rows with a key are among them: one turn more or less
            # makes no difference.
            place.taken += RUN_ROWS
        chosen = turns
        if keys is not None:
            distinct = keys.dictionary_encode()
            hashes = fnv1a_of(distinct.dictionary).take(distinct.indices)
            divisors = pc.cast(counts, pa.uint64())
            rest = pc.subtract(hashes, pc.multiply(pc.divide(hashes, divisors), divisors))
            chosen = pc.coalesce(pc.add(bases, rest.cast(pa.int64())), turns)
        if wanted is not None:
            self._check_partitions(places, topic_of, wanted, counts)
            chosen = pc.coalesce(pc.add(bases, wanted.cast(pa.int64())), chosen)
        return chosen

    def _check_partitions(self, places: list[_Place], topic_of: Any, wanted: Any, counts: Any) -> None:
        is_wrong = pc.fill_null(pc.or_(pc.less(wanted, 0), pc.greater_equal(wanted, counts)), False)
        if pc.any(is_wrong).as_py():
            row = pc.index(is_wrong, True).as_py()
            place = places[topic_of[row].as_py() if topic_of is not None else 0]
            raise WriteRefused(
                f"column partition: {wanted[row].as_py()} for topic {place.topic}, which has {place.count}"
                f" partition{'s' * (place.count != 1)} (0 to {place.count - 1})"
            )

    # -- topics ----------------------------------------------------------------------------

    def _topics(self, rows: Any) -> tuple[list[_Place], Any]:
        """The topics of these rows, and the topic's index for each row if there are several."""
        if self._topic:
            return [self._place(self._topic)], None
        encoded = rows.column("topic").dictionary_encode()
        if encoded.null_count:
            raise WriteRefused(
                f"column topic: {encoded.null_count} rows have none; fill it, or set the option topic"
            )
        places = [self._place(topic) for topic in encoded.dictionary.to_pylist()]
        return places, encoded.indices if len(places) > 1 else None

    def _place(self, topic: str) -> _Place:
        place = self._places.get(topic)
        if place is None:
            names = self._look_up(topic).names
            count = len(names)
            place = _Place(topic, len(self._names), count, self._first % count * RUN_ROWS)
            self._places[topic] = place
            self._names += names
        return place


def _per_row(values: list[int], topic_of: Any) -> Any:
    """The value of each row's topic: a scalar for one topic, otherwise an array."""
    if topic_of is None:
        return pa.scalar(values[0], pa.int64())
    return pa.array(values, pa.int64()).take(topic_of)


def _column(rows: Any, name: str, kind: pa.DataType) -> Any:
    """The column as ``kind``; None if it is missing or null in every row."""
    if name not in rows.schema.names:
        return None
    column = rows.column(name)
    if column.null_count == len(column):
        return None
    try:
        return column if column.type == kind else column.cast(kind)
    except pa.ArrowInvalid as error:
        raise WriteRefused(f"column {name}: {error}") from None


FEW: Final = 256
"""Up to this number of keys Python is faster, since each kernel call has a fixed cost."""
LONG: Final = 256
"""A longer key is hashed by itself: one long key among short ones would cause many kernel calls."""

_BASIS: Final = fnv1a("")
_PRIME: Final = pa.scalar(0x100000001B3, pa.uint64())


def fnv1a_of(keys: pa.Array) -> pa.Array:
    """The routing hashes (uint64) of a string array with 32-bit positions and without nulls.

    ``sava.client.producer.fnv1a`` takes about 0.1 µs for each byte of a key and caches repeated keys. A Spark
    task sees millions of keys, many of them once, so here all keys advance together, byte by byte, through
    Arrow's kernels, which wrap around at 64 bits as the hash demands. A test compares both for equal results.
    """
    if len(keys) <= FEW:
        return pa.array(map(fnv1a, keys.to_pylist()), pa.uint64())
    lengths = pc.binary_length(keys)
    order = pc.sort_indices(lengths, sort_keys=[("", "descending")])
    _, positions, data = keys.buffers()
    starts = pa.Array.from_buffers(pa.int32(), len(keys), [None, positions], offset=keys.offset).take(order)
    text = pa.Array.from_buffers(pa.uint8(), data.size if data is not None else 0, [None, data])
    longer_than = _longer_than(lengths)
    values = pa.repeat(pa.scalar(_BASIS, pa.uint64()), len(keys))
    done = []
    for step, alive in enumerate(longer_than):
        done.append(values.slice(alive))
        if step == LONG:
            values = pa.array(map(fnv1a, keys.take(order.slice(0, alive)).to_pylist()), pa.uint64())
            break
        letters = text.take(pc.add(starts.slice(0, alive), pa.scalar(step, pa.int32()))).cast(pa.uint64())
        values = pc.multiply(pc.bit_wise_xor(values.slice(0, alive), letters), _PRIME)
    done.append(values)
    return pa.concat_arrays(reversed(done)).take(pc.sort_indices(order))


def _longer_than(lengths: pa.Array) -> list[int]:
    """The number of keys longer than 0, 1, 2 … bytes, up to LONG or the longest key."""
    counted = pc.value_counts(pc.min_element_wise(lengths, pa.scalar(LONG + 1, pa.int32())))
    by_length = dict(zip(counted.field(0).to_pylist(), counted.field(1).to_pylist(), strict=True))
    at_most = list(accumulate(by_length.get(length, 0) for length in range(LONG + 1)))
    return [alive for number in at_most if (alive := len(lengths) - number)]


BATCH_BYTES: Final = 1 << 20
WAITING_BYTES: Final = 32 << 20
"""The limit of all partitions together. With many partitions each has a smaller share and smaller batches."""

Emit = Callable[[str, RecordBatch, int], None]
"""Takes a partition, its next batch, and the size of the largest payload in it."""


@dataclass(slots=True)
class _PendingRows:
    rows: list[Any] = field(default_factory=list)
    size: int = 0


class Batcher:
    """Collects rows of each partition and emits record batches."""

    def __init__(
        self,
        emit: Emit,
        *,
        codec: Compression = Compression.NONE,
        batch_bytes: int = BATCH_BYTES,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        self._emit = emit
        self._codec = codec
        self._batch_bytes = batch_bytes
        self._waiting_bytes = waiting_bytes
        self._waiting: dict[str, _PendingRows] = {}
        self._size = 0

    def add(self, name: str, rows: Any) -> None:
        """Add rows (a ``pa.RecordBatch`` of message columns) for a partition."""
        size = rows.nbytes
        if size > self._batch_bytes and rows.num_rows > 1:
            # Halves, not equal shares: one large payload among small ones ends in a batch by itself.
            middle = rows.num_rows // 2
            self.add(name, rows.slice(0, middle))
            self.add(name, rows.slice(middle))
            return
        waiting = self._waiting.get(name)
        if waiting is None:
            waiting = self._waiting[name] = _PendingRows()
        waiting.rows.append(rows)
        waiting.size += size
        self._size += size
        if waiting.size >= min(self._batch_bytes, self._waiting_bytes // len(self._waiting)):
            self._encode(name, waiting)
        elif self._size >= self._waiting_bytes:
            self.flush()  # early partitions hold more than their share

    def flush(self) -> None:
        for name, waiting in self._waiting.items():
            if waiting.rows:
                self._encode(name, waiting)

    def _encode(self, name: str, waiting: _PendingRows) -> None:
        rows = waiting.rows[0] if len(waiting.rows) == 1 else pa.concat_batches(waiting.rows)
        self._size -= waiting.size
        waiting.rows, waiting.size = [], 0
        now = time.time_ns() // 1000
        try:
            batch = RecordBatch.from_arrow(_with_times(rows, now), publish_time=now, codec=self._codec)
        except (InvalidMessage, BatchTooLarge) as error:
            raise WriteRefused(f"{name}: {error}") from None
        self._emit(name, batch, pc.max(pc.binary_length(rows.column("payload"))).as_py())


def _with_times(rows: Any, now: int) -> Any:
    """Set the publish time of rows without one to ``now``."""
    index = rows.schema.get_field_index("publish_time")
    if index < 0 or not rows.column(index).null_count:
        return rows
    times = rows.column(index)
    filled = pc.fill_null(times, pa.scalar(now, pa.timestamp("us", tz="UTC")).cast(times.type))
    return rows.set_column(index, "publish_time", filled)


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


PUBLISH_WAITING_BYTES: Final = 8 << 20
"""Bytes of rows that wait for encoding. It bounds the batch size (``Batcher``) and so the bytes in flight: a
partition has a few batches that wait, and a few more at its producer."""


class TaskPublisher:
    """Publishes the batches of one attempt of a task: completely, or it raises the error."""

    def __init__(self, open_publisher: Callable[[str], PartitionPublisher]) -> None:
        """``open_publisher``: for the batches of one partition."""
        self._open = open_publisher
        self._publishers: dict[str, PartitionPublisher] = {}
        self._messages = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for publisher in self._publishers.values():
            publisher.close()

    def add(self, name: str, batch: RecordBatch, largest: int) -> None:
        publisher = self._publishers.get(name)
        if publisher is None:
            publisher = self._publishers[name] = self._open(name)
        publisher.put(batch)
        self._messages += len(batch)

    def finish(self) -> int:
        """Wait until everything is published and return the number of messages."""
        for publisher in self._publishers.values():
            publisher.settle()
        return self._messages
