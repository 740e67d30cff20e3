"""Messages as an application hands them over and receives them: codecs of typed values, positions in a topic,
and batches as they came from a broker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any, Final, Literal, Protocol, overload

import msgspec

from sava.client.errors import Refused
from sava.proto import streams_pb2 as pb
from sava.records import STORED_COLUMNS, Message, RecordBatch

Range = tuple[int, int]
"""Offsets from the first to, and without, the second."""

Start = Literal["earliest", "latest"] | int | datetime
"""An offset, or a time: the first message that was not published before it."""
End = Literal["latest"] | int | datetime | None
"""Exclusive. None: continue with what comes; "latest": what is there when the reader opens."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


# -- codecs ------------------------------------------------------------------


class Codec(Protocol):
    """Turns typed values into payloads and back; any object with these two methods will do. A codec may have
    ``schema_id`` and ``schema_version`` besides: messages then carry these numbers."""

    def encode(self, value: Any, /) -> bytes: ...

    def decode(self, payload: bytes, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class SchemaCodec:
    """One version of a registered schema."""

    subject: str
    schema_id: int
    schema_version: int
    codec: Codec

    def encode(self, value: Any, /) -> bytes:
        """Raises sava.schemas.errors.PayloadInvalid for a value that is not of the schema."""
        return self.codec.encode(value)

    def decode(self, payload: bytes, /) -> Any:
        return self.codec.decode(payload)


def codec_of(subject: str, schema: pb.SchemaResponse) -> SchemaCodec:
    """Blocks while it compiles Protobuf source."""
    # Only here: applications without schemas need not load the libraries of three schema languages.
    from sava.schemas.codecs import codec_for
    from sava.schemas.types import parse_type

    codec = codec_for(parse_type(schema.type), schema.definition)
    return SchemaCodec(subject, schema.schema_id, schema.version, codec)


def schema_of(codec: Codec | None) -> tuple[int | None, int | None]:
    return getattr(codec, "schema_id", None), getattr(codec, "schema_version", None)


# -- positions ---------------------------------------------------------------


def microseconds(time: datetime) -> int:
    """Since 1970-01-01 UTC. Raises Refused for a time without a zone: it would mean something else on every
    machine."""
    if time.tzinfo is None:
        raise Refused(f"the time {time.isoformat()} has no time zone")
    return (time - _EPOCH) // _MICROSECOND


def position_of(start: Start) -> pb.Position:
    match start:
        case "earliest":
            return pb.Position(earliest=True)
        case "latest":
            return pb.Position(latest=True)
        case datetime():
            return pb.Position(publish_time=microseconds(start))
        case int() if start >= 0 and start is not True and start is not False:
            return pb.Position(offset=start)
        case _:
            raise Refused(f'start {start!r}: "earliest", "latest", an offset or a datetime')


# -- batches -----------------------------------------------------------------


class TypedMessage(Message, frozen=True, gc=False):
    """A message with a codec: ``value`` is its decoded payload. Decoded when asked for, so that a payload
    that cannot be decoded is still a message that can be nacked."""

    codec: Codec | None = None

    @property
    def value(self) -> Any:
        return self.payload if self.codec is None else self.codec.decode(self.payload)


class Batch(Sequence[Message]):
    """Messages of one topic or partition, in order, turned into objects only when the application looks at
    them. ``ranges`` names their offsets; a key-shared consumer
    gets some with others between them. ``attempt`` is 1 for the first delivery."""

    __slots__ = ("_codec", "_messages", "attempt", "ranges", "records", "topic")

    def __init__(
        self,
        records: RecordBatch,
        *,
        topic: str,
        ranges: tuple[Range, ...] = (),
        attempt: int = 1,
        codec: Codec | None = None,
    ) -> None:
        self.records = records
        self.topic = topic
        self.ranges = ranges or ((records.base_offset, records.next_offset),)
        self.attempt = attempt
        self._codec = codec
        self._messages: list[Message] | None = None

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} from {self.topic}, offsets {self.ranges}>"

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages) if self._messages is not None else self._make()

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if self._messages is None:
            self._messages = list(self._make())
        return self._messages[index]

    def offsets(self) -> Iterator[int]:
        return chain.from_iterable(range(start, end) for start, end in self.ranges)

    def payloads(self) -> list[bytes]:
        return self.records.payloads()

    def to_arrow(self, columns: Sequence[str] = STORED_COLUMNS) -> Any:
        """A ``pyarrow.RecordBatch`` of these columns, without a copy where that is possible."""
        return self.records.to_arrow(columns)

    def split(self, count: int) -> tuple[Batch, Batch]:
        """The first ``count`` messages, and the others; there must be some of both."""
        left: list[Range] = []
        right: list[Range] = []
        for start, end in self.ranges:
            cut = min(start + count, end)
            count -= cut - start
            if cut > start:
                left.append((start, cut))
            if end > cut:
                right.append((cut, end))
        return self._part(tuple(left), 0), self._part(tuple(right), len(self) - _count(right))

    def without(self, ranges: Sequence[Range]) -> Batch | None:
        """The messages whose offsets are not in ``ranges`` (ascending); None if there is none."""
        kept = difference(self.ranges, ranges)
        if not kept:
            return None
        return self if tuple(kept) == self.ranges else self._chosen(tuple(kept))

    def _part(self, ranges: tuple[Range, ...], first_row: int) -> Batch:
        """A range of rows."""
        if self.records.header.is_assigned:
            records = self.records.slice(ranges[0][0], ranges[-1][1])
        else:
            records = self.records.select(range(first_row, first_row + _count(ranges)))
        return self._like(records, ranges)

    def _chosen(self, ranges: tuple[Range, ...]) -> Batch:
        if self.records.header.is_assigned and len(ranges) == 1:
            return self._like(self.records.slice(*ranges[0]), ranges)
        wanted = set(chain.from_iterable(range(start, end) for start, end in ranges))
        rows = [row for row, offset in enumerate(self.offsets()) if offset in wanted]
        return self._like(self.records.select(rows), ranges)

    def _like(self, records: RecordBatch, ranges: tuple[Range, ...]) -> Batch:
        return Batch(records, topic=self.topic, ranges=ranges, attempt=self.attempt, codec=self._codec)

    def _make(self) -> Iterator[Message]:
        messages = self.records.messages(self.topic)
        if not self.records.header.is_assigned:
            messages = (
                msgspec.structs.replace(message, offset=offset)
                for message, offset in zip(messages, self.offsets(), strict=True)
            )
        if self._codec is None:
            return messages
        codec = self._codec
        return (TypedMessage(**msgspec.structs.asdict(message), codec=codec) for message in messages)


def difference(ranges: Sequence[Range], taken: Sequence[Range]) -> list[Range]:
    """What of ``ranges`` is not in ``taken``; both ascend."""
    left: list[Range] = []
    for start, end in ranges:
        for taken_start, taken_end in taken:
            if taken_end <= start or taken_start >= end:
                continue
            if taken_start > start:
                left.append((start, taken_start))
            start = min(taken_end, end)
        if start < end:
            left.append((start, end))
    return left


def _count(ranges: Sequence[Range]) -> int:
    return sum(end - start for start, end in ranges)
