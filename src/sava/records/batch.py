"""RecordBatch: the one form that messages have in memory, on the wire and in the journal.

A batch is its bytes. Everything else is a view of them that is made when first asked for: the header is read
at once (88 bytes), the columns when a value is wanted, messages when a caller iterates. A batch never
changes. An assigned batch shares all of its parent's bytes but the prefix, and gets bytes of its own only if
a caller asks for these in one piece; a slice has its own.

Safe to share between threads: the cached views are computed from immutable bytes, and computing one twice is
harmless.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeVar

import google_crc32c
import msgspec
import pyarrow as pa

from sava.records import single
from sava.records.columns import PRODUCER, STORED_COLUMNS, Column, Encoding, join, schema_of
from sava.records.decoder import decompress, read_columns
from sava.records.encoder import (
    BatchPlace,
    EncodedBody,
    assemble,
    encode_arrow,
    encode_columns,
    encode_values,
)
from sava.records.errors import BatchCorrupt, BatchUnassigned, OffsetOutside
from sava.records.header import (
    HEADER_BYTES,
    INT64_END,
    PREFIX_BYTES,
    UNASSIGNED,
    Buffer,
    Compression,
    Header,
    check_header,
    peek_header,
)
from sava.records.message import Message, Origin, messages_of, payloads_of

T = TypeVar("T")


class RecordBatch:
    """One to about a million messages that belong together. Made by ``encode``, ``from_messages``,
    ``from_arrow`` or ``parse``."""

    __slots__ = ("_columns", "_data", "_prefix", "header")

    def __init__(
        self,
        header: Header,
        data: bytes | memoryview,
        columns: tuple[Column, ...] | None,
        prefix: bytes | None = None,
    ) -> None:
        """Not for callers: ``data``, and ``columns`` if there are any, must agree with ``header``; ``prefix``
        stands for the first bytes of ``data``."""
        self.header = header
        self._data = data
        self._columns = columns
        self._prefix = prefix

    # -- making ---------------------------------------------------------------------

    @classmethod
    def encode(
        cls,
        payloads: Sequence[bytes],
        *,
        publish_time: int | Sequence[int],
        keys: Sequence[str | None] | None = None,
        attributes: Sequence[Mapping[str, str]] | None = None,
        schema_id: int | Sequence[int | None] | None = None,
        schema_version: int | Sequence[int | None] | None = None,
        origins: Sequence[Origin | None] | None = None,
        producer: str | Sequence[str | None] | None = None,
        producer_id: int = 0,
        base_sequence: int = 0,
        codec: Compression = Compression.NONE,
    ) -> RecordBatch:
        """A batch from one sequence per column; a single value stands for one that all messages have
        (the ``producer``'s name, usually). Producer id 0 is no producer: such a batch has no part in
        deduplication. Raises InvalidMessage, BatchTooLarge."""
        if (
            len(payloads) == 1
            and type(payloads[0]) is bytes
            and type(publish_time) is int
            and type(producer) is str
            and keys is None
            and attributes is None
            and schema_id is None
            and schema_version is None
            and origins is None
            and codec is Compression.NONE
        ):
            made = single.encode(
                payloads[0],
                publish_time=publish_time,
                producer=producer,
                producer_id=producer_id,
                base_sequence=base_sequence,
            )
            if made is not None:
                return cls(*made, None)
        body = encode_values(
            payloads,
            publish_time=publish_time,
            keys=keys,
            attributes=attributes,
            schema_id=schema_id,
            schema_version=schema_version,
            origins=origins,
            producer=producer,
        )
        return cls._of(body, producer_id, base_sequence, codec)

    @classmethod
    def from_messages(
        cls,
        messages: Sequence[Message],
        *,
        producer_id: int = 0,
        base_sequence: int = 0,
        codec: Compression = Compression.NONE,
    ) -> RecordBatch:
        """A batch from messages; their ``offset`` and ``topic`` are not part of it."""
        attributes = [message.attributes for message in messages]
        return cls.encode(
            [message.payload for message in messages],
            publish_time=[message.publish_time for message in messages],
            keys=_given([message.key for message in messages]),
            attributes=attributes if any(attributes) else None,
            schema_id=_given([message.schema_id for message in messages]),
            schema_version=_given([message.schema_version for message in messages]),
            origins=_given([message.origin for message in messages]),
            producer=_given([message.producer for message in messages]),
            producer_id=producer_id,
            base_sequence=base_sequence,
            codec=codec,
        )

    @classmethod
    def from_arrow(
        cls,
        rows: Any,
        *,
        publish_time: int | None = None,
        producer_id: int = 0,
        base_sequence: int = 0,
        codec: Compression = Compression.NONE,
    ) -> RecordBatch:
        """A batch from the rows of a ``pa.RecordBatch`` with columns named as in STORED_COLUMNS.

        ``payload`` must be there, and ``publish_time`` unless it is given here; what else is missing is null.
        Types that Arrow can cast without loss are accepted. A column of another name is refused, not ignored.
        """
        return cls._of(encode_arrow(rows, publish_time=publish_time), producer_id, base_sequence, codec)

    @classmethod
    def _of(cls, body: EncodedBody, producer_id: int, base_sequence: int, codec: Compression) -> RecordBatch:
        header, data = assemble(
            body, producer_id=producer_id, base_sequence=base_sequence, codec=codec, place=BatchPlace()
        )
        return cls(header, data, None)

    @classmethod
    def joined(
        cls, batches: Sequence[RecordBatch], *, producer_id: int = 0, base_sequence: int = 0
    ) -> RecordBatch:
        """One batch of the messages of several, in their order, compressed as the first of them. It has no
        place. A single one is only ``stamped``. Raises BatchTooLarge when no batch can hold them all."""
        if len(batches) == 1:
            return batches[0].stamped(producer_id=producer_id, base_sequence=base_sequence)
        counts = [len(batch) for batch in batches]
        decoded = [batch._decoded() for batch in batches]
        columns = [join(parts, counts) for parts in zip(*decoded, strict=True)]
        body = encode_columns(columns, sum(counts))
        return cls._of(body, producer_id, base_sequence, batches[0].header.codec)

    @classmethod
    def parse(cls, data: Buffer) -> RecordBatch:
        """The batch that ``data`` is, without a copy. Only the header is checked: see ``verify``.

        A writable buffer is copied: bytes that change after they were checked would be unchecked bytes.
        """
        view = data if isinstance(data, bytes) else memoryview(data).cast("B")
        if isinstance(view, memoryview) and not view.readonly:
            view = bytes(view)
        header = peek_header(view)
        if header.length != len(view):
            raise BatchCorrupt(f"has {len(view)} bytes and says {header.length}")
        return cls(header, view, None)

    # -- knowing ---------------------------------------------------------------------

    @property
    def base_offset(self) -> int:
        return self.header.base_offset

    @property
    def next_offset(self) -> int:
        return self.header.next_offset

    def __len__(self) -> int:
        return self.header.count

    def __repr__(self) -> str:
        header = self.header
        return (
            f"<RecordBatch of {header.count}, offsets [{header.base_offset}, {header.next_offset}), "
            f"epoch {header.epoch}, producer {header.producer_id} from {header.base_sequence}>"
        )

    @property
    def data(self) -> bytes | memoryview:
        """The encoded batch in one piece. Of a batch from ``assigned`` it is put together now, and kept."""
        if self._prefix is not None:
            # In this order: a thread that comes between the two puts the same bytes together once more.
            self._data = b"".join((self._prefix, memoryview(self._data)[PREFIX_BYTES:]))
            self._prefix = None
        return self._data

    @property
    def buffers(self) -> tuple[bytes, Any]:
        """The encoded batch in two pieces: the prefix, and the rest, which is not copied (a ``pa.Buffer``)
        unless it is small."""
        return self._prefix or self.header.prefix(), self._rest()

    def to_bytes(self) -> bytes:
        return bytes(self.data)

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return RecordBatch.parse, (self.to_bytes(),)

    # -- checking ---------------------------------------------------------------------

    def verify_crc(self) -> None:
        """Raise BatchCorrupt unless the bytes are those that were sealed. Says nothing of who sealed them."""
        if google_crc32c.value(self._rest()) != self.header.crc:
            raise BatchCorrupt("the checksum does not match")

    def verify(self) -> RecordBatch:
        """Raise unless checksum and structure are right, after which every other method works; the batch
        itself.

        Structure is checked before columns are used in any case, so skipping this is never unsafe. A broker
        calls it once at the door, so that no consumer ever meets a batch that it cannot read.
        """
        self.verify_crc()
        if not single.is_sound(self._data, self.header):
            self._decoded()
        return self

    def drop_views(self) -> None:
        """Let go of the decoded columns of a compressed batch; what asks for them next decodes them again."""
        if self._data is not None and self.header.codec is not Compression.NONE:
            self._columns = None

    # -- reading ---------------------------------------------------------------------

    def payloads(self) -> list[bytes]:
        return payloads_of(self._decoded())

    def messages(self, topic: str | None = None) -> Iterator[Message]:
        """The messages in order, with their offsets if assigned, and ``topic`` if given."""
        header = self.header
        offsets = range(header.base_offset, header.next_offset) if header.is_assigned else repeat(None)
        return messages_of(self._decoded(), header.count, offsets, topic)

    __iter__ = messages

    def constant(self, name: str) -> Any:
        """The value that all rows have in a stored column which is encoded as one value; None for any other
        column."""
        column = self._decoded()[STORED_COLUMNS.index(name)]
        return column.array[0].as_py() if column.encoding is Encoding.CONSTANT else None

    def is_of(self, producer: str) -> bool:
        """Whether the messages of a verified batch name this producer, or none."""
        if single.is_of(self._data, self.header, producer):
            return True
        column = self._decoded()[PRODUCER]
        return column.encoding is Encoding.ABSENT or self.constant("producer") == producer

    def to_arrow(self, columns: Sequence[str] = STORED_COLUMNS) -> Any:
        """A ``pa.RecordBatch`` of these columns, out of STORED_COLUMNS and DERIVED_COLUMNS.

        Stored columns are views of the batch's bytes and keep them alive; their cost does not depend on how
        many rows there are. Constant and derived columns are written out (about 1 ns per row).
        """
        schema = schema_of(tuple(columns))
        stored = {column.spec.name: column for column in self._decoded()}
        count = self.header.count
        arrays = [stored[name].to_arrow(count) if name in stored else self._derived(name) for name in columns]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _derived(self, name: str) -> Any:
        header = self.header
        if name == "sequence":
            return pa.arange(header.base_sequence, header.next_sequence)
        if name == "producer_id":
            return pa.repeat(pa.scalar(header.producer_id, pa.int64()), header.count)
        if not header.is_assigned:
            raise BatchUnassigned
        return pa.arange(header.base_offset, header.next_offset)

    # -- placing ---------------------------------------------------------------------

    def assigned(self, *, topic_id: int, epoch: int, base_offset: int) -> RecordBatch:
        """The same batch at its place in a topic. It shares the bytes of this one: see ``buffers``."""
        if topic_id < 0 or epoch < 0 or not 0 <= base_offset <= INT64_END - self.header.count:
            raise BatchCorrupt(f"has no place at offset {base_offset} of topic {topic_id}, epoch {epoch}")
        header = msgspec.structs.replace(self.header, topic_id=topic_id, epoch=epoch, base_offset=base_offset)
        return RecordBatch(header, self._data, None, header.prefix())

    def stamped(self, *, producer_id: int, base_sequence: int) -> RecordBatch:
        """The same messages, of this producer from this sequence on, without a place. Both are under the
        checksum, so the bytes are summed again and copied once; nothing is decoded."""
        header = self.header.replace(
            producer_id=producer_id,
            base_sequence=base_sequence,
            topic_id=0,
            epoch=0,
            base_offset=UNASSIGNED,
        )
        check_header(header)
        sealed, body = header.sealed(), pa.py_buffer(self._data).slice(HEADER_BYTES)
        header = header.replace(crc=google_crc32c.extend(google_crc32c.value(sealed), body))
        return RecordBatch(header, b"".join((header.prefix(), sealed, body)), None)

    def slice(self, start: int, end: int) -> RecordBatch:
        """The messages with offsets in [start, end), as far as they are here. Raises OffsetOutside if none
        is.

        The slice keeps topic, epoch, producer, and each message its offset and sequence.
        """
        header = self.header
        if not header.is_assigned:
            raise BatchUnassigned
        first = max(start, header.base_offset)
        next_offset = min(end, header.next_offset)
        if first >= next_offset:
            raise OffsetOutside(start, end, base_offset=header.base_offset, next_offset=header.next_offset)
        if next_offset - first == header.count:
            return self
        skip, stop = first - header.base_offset, next_offset - header.base_offset
        columns = tuple(column.slice(skip, stop) for column in self._decoded())
        part, data = assemble(
            encode_columns(columns, stop - skip),
            producer_id=header.producer_id,
            base_sequence=header.base_sequence + skip,
            codec=header.codec,
            place=BatchPlace(header.topic_id, header.epoch, first),
        )
        return RecordBatch(part, data, columns)

    def select(self, rows: Sequence[int] | pa.Array) -> RecordBatch:
        """A new batch of the messages at these rows (counted from 0, ascending): a part of a batch for one of
        several consumers. It has no place and no producer id, since its messages do not follow one another.
        Raises IndexError for a row that is not here, InvalidMessage for no row at all."""
        chosen = rows if isinstance(rows, pa.Array) else pa.array(rows, pa.int32())
        body = encode_columns([column.take(chosen) for column in self._decoded()], len(chosen))
        return self._of(body, 0, 0, self.header.codec)

    # -- views, made once ----------------------------------------------------------

    def _rest(self) -> Any:
        """The sealed part. pa.Buffer lends its memory to checksums; a memoryview would have to be copied."""
        data = self._data
        if type(data) is bytes and len(data) <= single.SMALL:
            return data[PREFIX_BYTES:]
        return pa.py_buffer(data).slice(PREFIX_BYTES)

    def _decoded(self) -> tuple[Column, ...]:
        if self._columns is None:
            self._columns = read_columns(self._body(), self.header)
        return self._columns

    def _body(self) -> Any:
        body = pa.py_buffer(self._data).slice(HEADER_BYTES)
        if self.header.codec is not Compression.NONE:
            return decompress(self.header.codec, body, self.header.body_size)
        if body.address % 8:
            # Arrow's kernels may assume that numbers are aligned. A batch in a buffer of its own always is.
            return pa.py_buffer(body.to_pybytes())
        return body


def iter_batches(data: Buffer) -> Iterator[RecordBatch]:
    """The batches of a buffer that holds several, end to end, each checked as ``RecordBatch.parse`` does."""
    view = memoryview(data).cast("B")
    position = 0
    while position < len(view):
        header = peek_header(view, position)
        end = position + header.length
        if end > len(view):
            raise BatchCorrupt(f"{len(view) - position} bytes are left for a batch of {header.length}")
        yield RecordBatch.parse(view[position:end])
        position = end


def _given(column: list[T | None]) -> list[T | None] | None:
    """None for a column that no message has: it costs nothing then, and small batches have many of them."""
    return column if any(value is not None for value in column) else None
