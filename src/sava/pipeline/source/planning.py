"""Planning: offset ranges of partitions become pieces, and pieces become tasks.

    offsets     start ──────────────────────── stored ────────── end
    where       segment │ segment │ segment            tail
                executors read the object store         … the owner of the partition

``resolve`` turns the options into offsets, ``admit`` limits a micro-batch, ``SegmentHistory`` finds out where
messages are, and ``read_tasks`` deals pieces to tasks.

A Spark task costs about 60 ms, and an idle core costs more. So a tiny batch is one task, a larger one has a
task for each core, and no task reads more than TASK_BYTES. Pieces are cut where that makes tasks equal. A
task reads its pieces in order.

The driver keeps segment descriptors: a query that lags needs thousands of them, a few for each batch. A
descriptor becomes stale when retention deletes its object; the task that reads it then asks the owner.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from pyspark.sql.datasource import InputPartition

from sava.pipeline.cluster import ClusterClient
from sava.pipeline.options import (
    EARLIEST,
    LATEST,
    OptionError,
    Position,
    TopicPartition,
    to_positions,
)
from sava.pipeline.source.columns import Bounds
from sava.proto import streams_pb2 as pb
from sava.storage.keys import parse_object_key
from sava.storage.types import Segment

TASK_BYTES: Final = 64 << 20
"""The largest task, in compressed bytes."""
WORTH_A_TASK: Final = 1 << 20
"""With fewer bytes another task costs more than it saves."""
ROW_BYTES: Final = 16
"""The least weight of a row, however well it is compressed."""


class Piece(NamedTuple):
    """Offsets ``start .. end`` of a partition, all in one segment or all at the owner."""

    part: TopicPartition
    name: str
    """The partition's name at the brokers."""
    start: int
    end: int
    segment: Segment | None
    """None if the owner has them."""
    message_bytes: float
    """The estimated size of a message."""

    @property
    def row_weight(self) -> float:
        return max(self.message_bytes, ROW_BYTES)

    @property
    def weight(self) -> float:
        return (self.end - self.start) * self.row_weight


@dataclass
class ReadTask(InputPartition):
    """The pieces that one Spark task reads."""

    pieces: tuple[Piece, ...]
    store_url: str


def read_tasks(
    pieces: Sequence[Piece], store_url: str, *, min_partitions: int = 0, cores: int = 0
) -> list[ReadTask]:
    """Tasks of about equal weight."""
    rows = sum(piece.end - piece.start for piece in pieces)
    if not rows:
        return []
    total = sum(piece.weight for piece in pieces)
    cores = cores or os.cpu_count() or 1
    count = max(min(cores, int(total / WORTH_A_TASK)), -int(-total // TASK_BYTES), min_partitions, 1)
    return [ReadTask(tuple(share), store_url) for share in _dealt(pieces, total / min(count, rows)) if share]


def _dealt(pieces: Sequence[Piece], weight: float) -> Iterator[list[Piece]]:
    """Deal in order, ``weight`` to each task; a rounding error passes to the next task."""
    share: list[Piece] = []
    room = weight
    for each in pieces:
        piece = each
        row = piece.row_weight
        while piece.start < piece.end and piece.weight > room + row / 2:
            rows = max(round(room / row), 0 if share else 1)
            if rows > 0:
                share.append(piece._replace(end=piece.start + rows))
                piece = piece._replace(start=piece.start + rows)
            yield share
            share, room = [], room - max(rows, 0) * row + weight
        if piece.start < piece.end:
            share.append(piece)
            room -= piece.weight
    yield share


def admit(
    available: Mapping[TopicPartition, int],
    *,
    max_messages: int | None = None,
    max_bytes: int | None = None,
    message_bytes: Callable[[TopicPartition], float] = lambda part: 1.0,
) -> dict[TopicPartition, int]:
    """The number of messages of each partition for the next batch. Limits are shared in proportion to what is
    available, and every partition with messages gets at least one: none starves behind a large partition, and
    none stalls because a message exceeds the limit."""
    admitted = {part: count for part, count in available.items() if count > 0}
    if max_messages is not None:
        admitted = prorate(admitted, max_messages)
    if max_bytes is not None:
        sizes = {part: max(message_bytes(part), 1.0) for part in admitted}
        wanted = {part: max(1, int(count * sizes[part])) for part, count in admitted.items()}
        shares = prorate(wanted, max_bytes)
        admitted = {
            part: count
            if shares[part] == wanted[part]
            else max(1, min(count, int(shares[part] / sizes[part])))
            for part, count in admitted.items()
        }
    return admitted


def prorate(wanted: Mapping[TopicPartition, int], limit: int) -> dict[TopicPartition, int]:
    """Shares of ``limit`` in proportion to ``wanted``, at least 1 each. Their sum exceeds the limit only if
    there are more partitions than that."""
    total = sum(wanted.values())
    if total <= limit:
        return dict(wanted)
    shares = {part: max(1, count * limit // total) for part, count in wanted.items()}
    left = limit - sum(shares.values())
    for part in sorted(shares, key=lambda part: (-shares[part], part)):
        # Correct the sum: rounding down left a rest, or shares below 1 were rounded up.
        change = min(left, 1, wanted[part] - shares[part]) if left > 0 else max(left, 1 - shares[part])
        shares[part] += change
        left -= change
    return shares


KEPT_S: Final = 30.0
MESSAGE_BYTES: Final = 256.0
"""The assumed size of a message before one is seen."""
SAMPLE: Final = 100


class _KnownSegments(NamedTuple):
    segments: tuple[Segment, ...]
    start: int
    """All segments from this offset on are known."""
    stored: int
    asked_at: float


class SegmentHistory:
    """The segments of the topics of one query, on the driver."""

    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster
        self._known: dict[str, _KnownSegments] = {}
        self._message_bytes: dict[str, float] = {}
        self.store_url = ""

    def pieces(
        self,
        part: TopicPartition,
        name: str,
        start: int,
        end: int,
        *,
        stored: int | None = None,
        times: Bounds | None = None,
    ) -> list[Piece]:
        """Pieces that cover the range without a gap, except segments without messages within ``times``.
        ``stored`` is the end of the segments, if known."""
        segments = () if stored is not None and stored <= start else self._segments(name, start, end, stored)
        return list(self._cover(part, name, start, end, segments, times))

    def _cover(
        self,
        part: TopicPartition,
        name: str,
        start: int,
        end: int,
        segments: tuple[Segment, ...],
        times: Bounds | None,
    ) -> Iterator[Piece]:
        at = start
        for segment in segments:
            if segment.end <= at:
                continue
            if segment.start >= end:
                break
            if segment.start > at:
                yield Piece(part, name, at, segment.start, None, self._guess(name))
                at = segment.start
            stop = min(segment.end, end)
            message_bytes = segment.size / (segment.end - segment.start)
            self._message_bytes[name] = message_bytes
            if times is None or (
                segment.max_publish_time >= times.start and segment.min_publish_time < times.end
            ):
                yield Piece(part, name, at, stop, segment, message_bytes)
            at = stop
        if at < end:
            yield Piece(part, name, at, end, None, self._guess(name))

    def message_bytes(self, name: str, start: int, end: int, *, stored: int) -> float:
        """The estimated size of the next messages, compressed as in their segment. Reads a few if none has
        been seen yet."""
        for segment in self._segments(name, start, min(end, stored), stored) if start < stored else ():
            if segment.start <= start < segment.end:
                return segment.size / (segment.end - segment.start)
        if name not in self._message_bytes:
            for batch in self._cluster.read(name, start, min(start + SAMPLE, end)):
                self._message_bytes[name] = batch.header.length / len(batch)
                break
        return self._guess(name)

    def _guess(self, name: str) -> float:
        return self._message_bytes.get(name, MESSAGE_BYTES)

    def _segments(self, name: str, start: int, end: int, stored: int | None) -> tuple[Segment, ...]:
        known = self._known.get(name)
        if (
            known is None
            or not known.start <= start
            or (end > known.stored and stored != known.stored)
            or time.monotonic() > known.asked_at + KEPT_S
        ):
            response = self._cluster.segments(name, start)
            self.store_url = response.store_url
            known = _KnownSegments(
                # Only the broker itself can read a store in its memory.
                ()
                if urlsplit(response.store_url).scheme == "memory"
                else tuple(map(_segment, response.segments)),
                start,
                response.stored_offset,
                time.monotonic(),
            )
            self._known[name] = known
        return known.segments


def _segment(described: pb.Segment) -> Segment:
    name = parse_object_key(described.key)
    return Segment(
        # The check of the footer detects an object with another name.
        topic_id=name.topic.topic_id if name is not None else 0,
        start=described.start_offset,
        end=described.end_offset,
        epoch=described.epoch,
        key=described.key,
        size=described.size,
        crc32c=described.crc32c,
        footer_size=described.footer_size,
        footer_crc32c=described.footer_crc32c,
        min_publish_time=described.min_publish_time,
        max_publish_time=described.max_publish_time,
        created_ms=described.created_ms,
    )


def begins_at_end(position: Position) -> bool:
    """Whether the position moves with every published message."""
    return position == "latest" or (isinstance(position, Mapping) and LATEST in position.values())


def resolve(
    cluster: ClusterClient, position: Position, names: Mapping[TopicPartition, str], option: str
) -> dict[TopicPartition, int]:
    """The offset of every partition. ``option`` names the option in errors. Raises OptionError when offsets
    by partition leave out a partition, or name a partition that is not read or an offset beyond the end."""
    if isinstance(position, int):
        return {part: cluster.offset_at(name, position) for part, name in names.items()}
    extents = cluster.extents(list(names.values()))
    if position == "earliest":
        return {part: extents[name].start for part, name in names.items()}
    if position == "latest":
        return {part: extents[name].end for part, name in names.items()}
    given = str(to_positions(position)).replace("'", '"')
    if missing := sorted(names.keys() - position.keys()):
        raise OptionError(option, given, f"{missing[0]} is missing; name every partition that is read")
    if foreign := sorted(position.keys() - names.keys()):
        raise OptionError(option, given, f"{foreign[0]} is not read by this query")
    offsets: dict[TopicPartition, int] = {}
    for part, name in names.items():
        offset, extent = position[part], extents[name]
        if offset > extent.end:
            raise OptionError(option, given, f"{part} ends at {extent.end}")
        offsets[part] = {EARLIEST: extent.start, LATEST: extent.end}.get(offset, offset)
    return offsets
