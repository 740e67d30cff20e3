"""Segment file: the Parquet file that a range of a topic becomes, and how to find one's way in it. No I/O.

Any Parquet reader (Spark, DuckDB, Polars, pyarrow, DataFusion) reads it as it is:

==  ==================  ==========================  ========================================================
1   ``topic``           string, not null            ``/namespace/topic``, of a partition its topic's
2   ``partition``       int32, not null             its number; 0 in a topic without partitions
3   ``offset``          int64, not null             sorted, without gaps: ``start .. end`` of the file
4   ``publish_time``    timestamp µs UTC, not null  the producer's; not sorted
5   ``key``             string
6   ``payload``         binary, not null            exactly the bytes that were published
7   ``attributes``      map<string, string>         null, or an empty map: the message has none; 8 its key, 9
                                                    its value
10  ``producer``        string                      the producer's name, if it gave one
11  ``schema_id``       int64
12  ``schema_version``  int32
13  ``origin_cluster``  string                      null, as the next, unless replicated from another cluster
14  ``origin_offset``   int64
==  ==================  ==========================  ========================================================

The numbers are Iceberg's field ids: a table that takes the files as its own needs no mapping of names, and a
column keeps its number for as long as the format exists. ``topic`` and ``partition`` are the same in all rows
of a file; they tell partitions apart where a reader takes many files at once. A topic without partitions has
partition 0, not null: (topic, partition, offset) names a message everywhere, a join finds it, a table can be
partitioned by it, and ``format("sava")`` says the same.

A producer's *id* and *sequences* are not stored: deduplication needs only the latest of each producer, which
``TopicState`` carries. A batch that is read back therefore has producer id 0, which means that it has no part
in deduplication; taking it for a producer's batch with sequence 0 would be worse than not knowing.

**Row groups** hold 4 MiB before compression. Scans want large ones, since each costs a reader a start in
every column; a consumer that begins in the middle wants small ones, since it fetches the footer and one row
group (docs/design/storage.md has the figures for 1, 4 and 16 MiB). What a reader gets of one is cut into
batches of ``BATCH_BYTES``, and of the first only the rows that it wants.

Statistics are written for all columns but payloads, whose minima would fill the footer. They also tell which
columns of a row group hold nothing but nulls: most messages use few, and reading the others would take longer
than reading the payloads. The page index has the same for pages, for readers that look for a few rows (Spark,
DataFusion, Trino); Sava does not read it.

**Checksums.** Every page carries one, checked when it is read. Parquet has none for the footer, which says
where pages are and which offsets they hold; the descriptor has it (``footer_crc32c``), and the checksum of
the whole.

The footer's key-values name topic, range, epoch and format, so that an object that lost its descriptor still
says what it is. Arrow's own schema, which pyarrow would add, says nothing that Parquet's does not, and would
be more than half of a small file.

**Rows.** Batches come in all sizes. A batch of a million messages is cut by the bytes of its rows; batches of
a thousand are joined. A batch of one or two costs far more as Arrow (ten arrays for one row) than as
messages, so runs of them are read as messages and encoded together: the one place in storage where work is
done per message, because there a message is a batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, groupby
from typing import Any, Final, NamedTuple

import google_crc32c
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sava.errors import CallerError
from sava.records import STORED_COLUMNS, RecordBatch, schema_of
from sava.storage.errors import DataGap, SegmentCorrupt
from sava.storage.keys import parse_object_key
from sava.storage.types import Segment, TopicKey

# -- row groups ------------------------------------------------------------------------------------


ROW_GROUP_BYTES: Final = 4 << 20
"""Before compression, every value written out."""
ROW_GROUP_ROWS: Final = 65_536
BATCH_BYTES: Final = 1 << 20
"""Of what a reader gets at once."""
BATCH_ROWS: Final = 16_384

TINY: Final = 4
"""Batches of fewer messages than this are cheaper to read as messages."""

_ROW_OVERHEAD: Final = 32
"""Bytes counted for the numbers of a row."""

_CONSTANTS: Final = (
    pa.field("topic", pa.utf8(), nullable=False),
    pa.field("partition", pa.int32(), nullable=False),
)
_COLUMNS: Final = (
    "offset",
    "publish_time",
    "key",
    "payload",
    "attributes",
    "producer",
    "schema_id",
    "schema_version",
    "origin_cluster",
    "origin_offset",
)
"""Those that come from batches, in the order of a segment."""

_FIELD_IDS: Final = {
    "topic": 1,
    "partition": 2,
    "offset": 3,
    "publish_time": 4,
    "key": 5,
    "payload": 6,
    "attributes": 7,
    "attributes.key": 8,
    "attributes.value": 9,
    "producer": 10,
    "schema_id": 11,
    "schema_version": 12,
    "origin_cluster": 13,
    "origin_offset": 14,
}
"""They never change: tables refer to columns by these numbers. A new column gets a new one."""

_OFFSET: Final = len(_CONSTANTS)
_PUBLISH_TIME: Final = _OFFSET + 1
"""Where these are among the columns of a row group."""


def _numbered(field: Any, name: str = "") -> Any:
    """The field with its id, and those of a map's entries."""
    name = name or field.name
    if pa.types.is_map(field.type):
        key, value = field.type.key_field, field.type.item_field
        field = field.with_type(pa.map_(_numbered(key, f"{name}.key"), _numbered(value, f"{name}.value")))
    return field.with_metadata({"PARQUET:field_id": str(_FIELD_IDS[name])})


SCHEMA: Final = pa.schema([*map(_numbered, (*_CONSTANTS, *schema_of(_COLUMNS)))])


def row_groups(batches: Sequence[RecordBatch]) -> Iterator[Any]:
    """Tables of the columns of batches, each of which makes one row group of the file. Of all batches, only
    one group's worth is held as rows."""
    group: list[Any] = []
    group_rows = group_bytes = 0
    for rows in chain.from_iterable(cut(each, ROW_GROUP_BYTES, ROW_GROUP_ROWS) for each in _rows(batches)):
        size = rows.nbytes
        if group and (group_bytes + size > ROW_GROUP_BYTES or group_rows + len(rows) > ROW_GROUP_ROWS):
            yield _table(group)
            group, group_rows, group_bytes = [], 0, 0
        group.append(rows)
        group_rows, group_bytes = group_rows + len(rows), group_bytes + size
    yield _table(group)


def _table(group: list[Any]) -> Any:
    """The writer goes chunk by chunk, so that many small ones would cost it dearly."""
    return pa.Table.from_batches(group).combine_chunks()


def _rows(batches: Sequence[RecordBatch]) -> Iterator[Any]:
    for is_tiny, run in groupby(batches, lambda batch: len(batch) < TINY):
        if is_tiny:
            yield from map(_merged, _gathered(run))
        else:
            for batch in run:
                yield batch.to_arrow(_COLUMNS)


def _gathered(batches: Iterable[RecordBatch]) -> Iterator[list[RecordBatch]]:
    """Tiny batches in lists that are not worth cutting."""
    gathered: list[RecordBatch] = []
    size = 0
    for batch in batches:
        if gathered and (
            size + batch.header.length > ROW_GROUP_BYTES or len(gathered) * TINY >= ROW_GROUP_ROWS
        ):
            yield gathered
            gathered, size = [], 0
        gathered.append(batch)
        size += batch.header.length
    yield gathered


def _merged(batches: list[RecordBatch]) -> Any:
    """The rows of adjacent batches."""
    first = batches[0].header
    merged = RecordBatch.from_messages(list(chain.from_iterable(batches))).assigned(
        topic_id=first.topic_id, epoch=first.epoch, base_offset=first.base_offset
    )
    return merged.to_arrow(_COLUMNS)


def cut(rows: Any, max_bytes: int, max_rows: int) -> Iterator[Any]:
    """Rows in pieces of at most so much; a message that alone is larger is a piece of its own."""
    if len(rows) <= max_rows and rows.nbytes <= max_bytes:
        yield rows
        return
    ends = memoryview(_running_bytes(rows).buffers()[1]).cast("q")
    first, before = 0, 0
    while first < len(rows):
        fitting = bisect_right(ends, before + max_bytes, first, len(rows))
        end = max(first + 1, min(fitting, first + max_rows))
        yield rows.slice(first, end - first)
        first, before = end, ends[end - 1]


def _running_bytes(rows: Any) -> Any:
    """For each row the bytes of all rows up to and with it, as they will be once every value is written
    out."""
    names = rows.schema.names
    sizes = pa.repeat(pa.scalar(_ROW_OVERHEAD, pa.int64()), len(rows))
    for name in {"payload", "key", "origin_cluster", "producer"}.intersection(names):
        sizes = pc.add(sizes, pc.fill_null(pc.binary_length(rows.column(name)), 0).cast(pa.int64()))
    running = pc.cumulative_sum(sizes)
    if "attributes" not in names:
        return running
    attributes = rows.column("attributes")
    entries = pc.add(pc.binary_length(attributes.keys), pc.binary_length(attributes.items)).cast(pa.int64())
    running_entries = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(entries)])
    ends = pc.take(running_entries, attributes.offsets)
    return pc.add(running, pc.subtract(ends.slice(1), ends[0]))


# -- the file --------------------------------------------------------------------------------------


FORMAT_VERSION: Final = 1

_ATTRIBUTES: Final = ("attributes.key_value.key", "attributes.key_value.value")
_LEAVES: Final = [name for name in SCHEMA.names if name not in ("payload", "attributes")] + [*_ATTRIBUTES]
"""As Parquet calls the columns that have statistics."""

_WRITER_OPTIONS: Final[Mapping[str, Any]] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": [
        "topic",
        "partition",
        "key",
        *_ATTRIBUTES,
        "producer",
        "schema_id",
        "schema_version",
        "origin_cluster",
    ],
    "column_encoding": dict.fromkeys(("offset", "publish_time", "origin_offset"), "DELTA_BINARY_PACKED"),
    "write_statistics": _LEAVES,
    "write_page_checksum": True,
    "write_page_index": True,
    "sorting_columns": [pq.SortingColumn(_OFFSET)],
    "store_schema": False,
}


_SMALL_ROWS: Final = 16
_SMALL_BYTES: Final = 16 << 10
_SMALL_OPTIONS: Final[Mapping[str, Any]] = {
    name: value for name, value in _WRITER_OPTIONS.items() if name != "compression_level"
} | {"compression": "none", "use_dictionary": ["topic", "partition"]}
"""Of a few messages there is nothing to be gained by compression and dictionaries, which cost half of the
time of writing them. After a failover there may be a thousand such segments."""


_MODEST_BYTES: Final = 256 << 10
_MODEST_OPTIONS: Final[Mapping[str, Any]] = dict(_WRITER_OPTIONS) | {
    "compression": dict.fromkeys(_LEAVES, "none") | {"payload": "zstd"},
    "compression_level": {"payload": 1},
}
"""Of some kilobytes the payloads are what is worth compressing: a compressor for each column takes a quarter
of the time, and makes the file larger."""


class Encoded(NamedTuple):
    """A segment's bytes, and what its descriptor must say of them."""

    chunks: Sequence[bytes]
    size: int
    raw_bytes: int
    start: int
    end: int
    crc32c: int
    footer_size: int
    footer_crc32c: int
    min_publish_time: int
    max_publish_time: int


# -- writing -----------------------------------------------------------------------------


def encode(topic: TopicKey, epoch: int, batches: Sequence[RecordBatch]) -> Encoded:
    """One Parquet file of contiguous batches. Needs memory for the compressed file and a few row groups.

    Called in a worker thread: pyarrow lets go of the interpreter while it encodes. Raises DataGap,
    ValueError."""
    _check_contiguous(topic, epoch, batches)
    start, end = batches[0].base_offset, batches[-1].next_offset
    sink = _Chunks()
    raw_bytes = 0
    size = sum(batch.header.length for batch in batches)
    is_modest = size <= _MODEST_BYTES
    options = _MODEST_OPTIONS if is_modest else _WRITER_OPTIONS
    if end - start <= _SMALL_ROWS and size <= _SMALL_BYTES:
        options = _SMALL_OPTIONS
    with pq.ParquetWriter(sink.open(buffered=is_modest), _DECLARED, **options) as writer:
        for rows in row_groups(batches):
            raw_bytes += rows.nbytes
            writer.write_table(_completed(topic, rows), row_group_size=ROW_GROUP_ROWS)
        facts = {"topic_id": topic.topic_id, "epoch": epoch, "start": start, "end": end}
        writer.add_key_value_metadata(
            {f"sava.{name}": str(value) for name, value in {**facts, "format": FORMAT_VERSION}.items()}
        )
    sink.finish()
    footer = sink.last(int.from_bytes(sink.last(8)[:4], "little") + 8)
    return Encoded(
        chunks=sink.chunks,
        size=sink.tell(),
        raw_bytes=raw_bytes,
        start=start,
        end=end,
        crc32c=sink.crc32c,
        footer_size=len(footer),
        footer_crc32c=google_crc32c.value(footer),
        min_publish_time=min(batch.header.min_publish_time for batch in batches),
        max_publish_time=max(batch.header.max_publish_time for batch in batches),
    )


_WRITTEN: Final = pa.schema(
    [pa.field("topic", pa.dictionary(pa.int32(), pa.utf8()), nullable=False), *list(schema_of(_COLUMNS))]
).insert(1, _CONSTANTS[1])
"""As the writer gets the rows: the topic's name once, with an index for each row."""
_DECLARED: Final = SCHEMA.set(0, SCHEMA.field(0).with_type(_WRITTEN.field(0).type))
"""The same, with the ids of the columns."""
_ZEROS: Final = pa.py_buffer(bytes(4 * ROW_GROUP_ROWS))


def _completed(topic: TopicKey, rows: Any) -> Any:
    """All columns of a segment, from those that its batches have."""
    head, number = topic.partition
    count = len(rows)
    indices = pa.Array.from_buffers(pa.int32(), count, [None, _ZEROS])
    name = pa.DictionaryArray.from_arrays(indices, pa.array([head]), safe=False)
    partition = pa.repeat(pa.scalar(number, pa.int32()), count) if number else indices
    return pa.Table.from_arrays([name, partition, *rows.columns], schema=_WRITTEN)


class _Chunks:
    """The file object that pyarrow writes to: the file in pieces, each copied once. (One growing buffer would
    take twice the size of the file, and more while it grows.)"""

    closed = False
    chunk_bytes = 1 << 20

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.crc32c = 0
        self._pending = bytearray()
        self._size = 0
        self._buffer: Any = None

    def open(self, *, buffered: bool) -> Any:
        """What pyarrow writes to. ``buffered``: the whole file is one piece, and pyarrow does not call Python
        for each of its forty small writes."""
        if buffered:
            self._buffer = pa.BufferOutputStream()
            return self._buffer
        return pa.PythonFile(self, mode="w")

    def finish(self) -> None:
        if self._buffer is not None:
            self.write(self._buffer.getvalue().to_pybytes())
        self.flush_pending()

    def write(self, data: bytes) -> int:
        self._pending += data
        self._size += len(data)
        if len(self._pending) >= self.chunk_bytes:
            self.flush_pending()
        return len(data)

    def flush_pending(self) -> None:
        self.chunks.append(bytes(self._pending))
        self.crc32c = google_crc32c.extend(self.crc32c, self.chunks[-1])
        self._pending.clear()

    def flush(self) -> None:
        """Called after each row group; chunks go by size."""

    def tell(self) -> int:
        return self._size

    def last(self, length: int) -> bytes:
        """The last bytes of what was flushed."""
        tail: list[bytes] = []
        for chunk in reversed(self.chunks):
            if sum(map(len, tail)) >= length:
                break
            tail.insert(0, chunk)
        return b"".join(tail)[-length:]


def _check_contiguous(topic: TopicKey, epoch: int, batches: Sequence[RecordBatch]) -> None:
    if not batches:
        raise ValueError(f"a segment of {topic.path} without messages")
    expected = batches[0].base_offset
    for batch in batches:
        header = batch.header
        if not header.is_assigned or header.topic_id != topic.topic_id or header.epoch > epoch:
            raise ValueError(
                f"{batch!r} does not belong to {topic.path} (id {topic.topic_id}) in epoch {epoch}"
            )
        if header.base_offset != expected:
            raise DataGap(f"topic {topic.path}: offset {expected} is missing, {batch!r} follows")
        expected = header.next_offset


# -- reading -----------------------------------------------------------------------------


class RowGroup(NamedTuple):
    """Which offsets and times a row group holds, and where in the object it is."""

    number: int
    start: int
    end: int
    first_byte: int
    end_byte: int
    raw_bytes: int
    """Before compression."""
    min_publish_time: int
    max_publish_time: int
    columns: tuple[str, ...]
    """The columns of a record batch, without those that hold only nulls."""


class Footer(NamedTuple):
    metadata: Any
    """pyarrow's FileMetaData."""
    row_groups: tuple[RowGroup, ...]

    def covering(self, start: int, end: int) -> Sequence[RowGroup]:
        """Row groups that overlap ``start .. end``."""
        first = bisect_right(self.row_groups, start, key=lambda group: group.end)
        groups = self.row_groups[first:]
        return groups[: bisect_right(groups, end - 1, key=lambda group: group.start)]


def parse_footer(segment: Segment, data: bytes) -> Footer:
    """From the last ``footer_size`` bytes of the object. Raises SegmentCorrupt unless they are what was
    written, for this segment."""
    if google_crc32c.value(data) != segment.footer_crc32c:
        raise SegmentCorrupt(f"{segment.key}: the checksum of the footer does not match")
    try:
        metadata = pq.read_metadata(pa.BufferReader(data))
        groups = tuple(
            _row_group(metadata.row_group(number), number) for number in range(metadata.num_row_groups)
        )
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SegmentCorrupt(f"{segment.key}: the footer cannot be read: {error}") from error
    _check_facts(segment, metadata)
    expected = segment.start
    for group in groups:
        if group.start != expected:
            raise SegmentCorrupt(f"{segment.key}: offset {expected} is missing, {group.start} follows")
        expected = group.end
    if expected != segment.end:
        raise SegmentCorrupt(f"{segment.key}: its row groups end at {expected} instead of {segment.end}")
    return Footer(metadata, groups)


def _check_facts(segment: Segment, metadata: Any) -> None:
    said = {key.decode(): value.decode() for key, value in (metadata.metadata or {}).items()}
    if said.get("sava.format") != str(FORMAT_VERSION):
        raise SegmentCorrupt(
            f"{segment.key}: format {said.get('sava.format')}, this version reads {FORMAT_VERSION}"
        )
    for name in ("topic_id", "epoch", "start", "end"):
        if said.get(f"sava.{name}") != str(getattr(segment, name)):
            raise SegmentCorrupt(
                f"{segment.key}: {name} is {said.get(f'sava.{name}')}, which its descriptor denies"
            )
    if not metadata.schema.to_arrow_schema().equals(SCHEMA):
        raise SegmentCorrupt(f"{segment.key}: its columns are not those of a segment")


def _row_group(group: Any, number: int) -> RowGroup:
    columns = [group.column(index) for index in range(group.num_columns)]
    first_bytes = [column.dictionary_page_offset or column.data_page_offset for column in columns]
    offsets, times = columns[_OFFSET].statistics, columns[_PUBLISH_TIME].statistics
    if offsets is None or times is None:
        raise ValueError(f"row group {number} has no statistics")
    # Raw: as numbers, since a time may lie outside of what datetime can hold.
    start, end = offsets.min_raw, offsets.max_raw + 1
    if end - start != group.num_rows:
        raise ValueError(f"row group {number} has {group.num_rows} rows for the offsets {start}..{end}")
    ends = [first + column.total_compressed_size for first, column in zip(first_bytes, columns, strict=True)]
    return RowGroup(
        number,
        start,
        end,
        min(first_bytes),
        max(ends),
        group.total_byte_size,
        times.min_raw,
        times.max_raw,
        _used_columns(columns),
    )


def _used_columns(columns: Sequence[Any]) -> tuple[str, ...]:
    used = {column.path_in_schema.partition(".")[0] for column in columns if not _is_all_null(column)}
    return _stored_columns(frozenset(used))


def _is_all_null(column: Any) -> bool:
    statistics = column.statistics
    return (
        statistics is not None
        and statistics.has_null_count
        and bool(statistics.null_count == column.num_values)
    )


@cache
def _stored_columns(used: frozenset[str]) -> tuple[str, ...]:
    """One tuple for all row groups with the same columns: footers are kept in memory."""
    return tuple(name for name in STORED_COLUMNS if name in used)


class PartialFile:
    """The file object that pyarrow reads, of which only a part is here; subclasses know which. Parquet names
    places by their position in the whole file. What is read is lent, not copied."""

    closed = False

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset if whence == 0 else self._size + offset
        return self._at

    def tell(self) -> int:
        return self._at


class _Part(PartialFile):
    """The bytes from ``position`` on."""

    def __init__(self, size: int, position: int, data: bytes) -> None:
        super().__init__(size)
        self._first = position
        self._data = memoryview(data)

    def read(self, length: int) -> memoryview:
        skip = self._at - self._first
        self._at += length
        return self._data[max(skip, 0) : max(skip + length, 0)]


def open_part(segment: Segment, footer: Footer, position: int, data: bytes) -> Any:
    """A ``pq.ParquetFile`` of an object of which only ``data``, at ``position``, is here."""
    part = pa.PythonFile(_Part(segment.size, position, data), mode="r")
    return pq.ParquetFile(part, metadata=footer.metadata, page_checksum_verification=True, pre_buffer=False)


def read_columns(segment: Segment, file: Any, group: RowGroup, columns: Sequence[str]) -> Any:
    """A ``pa.RecordBatch`` of some columns of a row group. Raises SegmentCorrupt."""
    try:
        table = file.read_row_group(group.number, columns=list(columns), use_threads=False)
        rows = table.combine_chunks().to_batches()
    except (pa.ArrowException, OSError) as error:
        raise SegmentCorrupt(f"{segment.key}: row group {group.number} cannot be read: {error}") from error
    if len(rows) != 1 or rows[0].num_rows != group.end - group.start:
        raise SegmentCorrupt(
            f"{segment.key}: row group {group.number} has other rows than its statistics say"
        )
    return rows[0]


def read_batches(segment: Segment, file: Any, group: RowGroup, start: int, end: int) -> Iterator[RecordBatch]:
    """The messages of a row group within ``start .. end``, at their offsets, in batches of about BATCH_BYTES.
    Raises SegmentCorrupt."""
    rows = read_columns(segment, file, group, group.columns)
    position = max(start, group.start)
    wanted = rows.slice(position - group.start, min(end, group.end) - position)
    for part in cut(wanted, BATCH_BYTES, BATCH_ROWS):
        try:
            batch = RecordBatch.from_arrow(part)
        except CallerError as error:
            raise SegmentCorrupt(
                f"{segment.key}: row group {group.number} holds no messages: {error}"
            ) from error
        yield batch.assigned(topic_id=segment.topic_id, epoch=segment.epoch, base_offset=position)
        position += len(part)


def check_constants(segment: Segment, file: Any, group: RowGroup) -> None:
    """Raises SegmentCorrupt unless each row names the topic and the partition that the object's key names."""
    named = parse_object_key(segment.key)
    rows = read_columns(segment, file, group, ["topic", "partition"])
    for column, value in zip(rows.columns, named.topic.partition if named is not None else (), strict=True):
        if not pc.all(pc.equal(column, value)).as_py():
            raise SegmentCorrupt(
                f"{segment.key}: row group {group.number} has rows of another topic or partition than its key"
            )
