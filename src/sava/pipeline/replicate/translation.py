"""Translation: rows as the source stores them become ranges as the target gets them.

**Origins** (``CopyRoute``). Each row gets its origin. Pure, by column:

    of the source itself   origin = (source, offset there), path = "source", topic = the source's
    copies                 their origin and topic stay, path = "…,source"

A row is a *copy* if it has all three: origin, path and topic; the target needs all of them to tell where it
comes from. Any other row was published at the source, whatever its producer wrote into these attributes. Some
rows are left out, and the range has a hole there:

    excluded   by their attribute ``sava-replicate``: the clusters that a message may be copied to, with
               commas; empty or ``none`` for nowhere
    copies     unless the link forwards
    loops      copies that have been in the target

Most batches have the same attributes in all their rows, or none. Then one row stands for all.

**Schemas.** Each cluster has its own ids and versions. The definition of a message's schema is registered at
the target under the same subject, or found there, and the message gets the target's id and version. A process
keeps what it has learned: versions never change. The first message of the topic's subject assigns the subject
to the topic at the target. Messages of another subject (the topic had another one before) are mapped too.

**Ranges** (``RangeBuilder``).

    rows        as they were stored: a row group, a batch, some small batches
    portions    of about a megabyte: small ones joined, large ones cut
    ranges      the rows of a portion to copy, in one batch

A range states that nothing else is to be copied between its ends. So rows must be consecutive, and a gap is
an error.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from sava.client.errors import Denied, Refused
from sava.errors import CallerError, Outcome, SavaError
from sava.pipeline.cluster import ClusterClient
from sava.pipeline.errors import at_source
from sava.pipeline.replicate.target import EncodedRange, Errand, LinkEnds, TargetCluster
from sava.pipeline.source.reading import Rows
from sava.proto import replica_pb2 as pb
from sava.records import STORED_COLUMNS, BatchTooLarge, RecordBatch, schema_of
from sava.records.columns import ATTRIBUTES, COLUMNS, TEXT, map_array, nulls
from sava.records.decoder import null_rows_are_empty
from sava.storage.errors import DataGap
from sava.storage.segment_file import BATCH_BYTES, BATCH_ROWS, cut
from sava.storage.source_positions import ORIGIN_TOPIC, PATH, origin_topic

REPLICATE: Final = "sava-replicate"
NOWHERE: Final = "none"
_OURS: Final = pa.array([PATH, ORIGIN_TOPIC], TEXT)


class Translated(NamedTuple):
    """The rows of a portion that are copied."""

    rows: Any
    """A ``pa.RecordBatch``."""
    offsets: Any
    """The offset of each row at the source."""
    skipped: int

    def ranges(self) -> list[int]:
        """The offsets as start, end, start, end, …"""
        count = len(self.offsets)
        if not count:
            return []
        first, last = self.offsets[0].as_py(), self.offsets[count - 1].as_py()
        if last - first == count - 1:
            return [first, last + 1]
        before, after = self.offsets.slice(0, count - 1), self.offsets.slice(1)
        is_break = pc.greater(pc.subtract(after, before), 1)
        ends = pc.add(before.filter(is_break), 1).to_pylist()
        starts = after.filter(is_break).to_pylist()
        bounds = zip([first, *starts], [*ends, last + 1], strict=True)
        return [bound for pair in bounds for bound in pair]


class _Said(NamedTuple):
    """The replication attributes of rows: one column each, None if no row has it."""

    path: Any
    topic: Any
    replicate: Any

    def filter(self, mask: Any) -> _Said:
        return _Said(*(None if column is None else column.filter(mask) for column in self))


@dataclass(frozen=True, slots=True)
class CopyRoute:
    """The route from one partition to one cluster."""

    source: str
    """The name of the source cluster."""
    topic: str
    """The value of ``origin_topic``."""
    target: str
    forward: bool

    def translate(self, rows: Any, start: int) -> Translated:
        """Translate a ``pa.RecordBatch`` of all stored columns whose first row is at offset ``start``."""
        count = rows.num_rows
        offsets = pa.arange(start, start + count)
        said = _said(rows.column("attributes"))
        is_copy = _is_copy(rows.column("origin_cluster"), said)
        kept = self._kept(said, is_copy)
        if kept is not None:
            rows, offsets, said = rows.filter(kept), offsets.filter(kept), said.filter(kept)
            is_copy = None if is_copy is None else is_copy.filter(kept)
        if rows.num_rows:
            rows = self._marked(rows, offsets, said, is_copy)
        return Translated(rows, offsets, count - rows.num_rows)

    def _kept(self, said: _Said, is_copy: Any) -> Any:
        """The mask of rows to copy; None for all."""
        kept = None
        if said.replicate is not None:
            may = pc.and_not(
                pc.match_substring_regex(said.replicate, listed(self.target, spaces=True)),
                pc.equal(pc.utf8_trim_whitespace(said.replicate), NOWHERE),
            )
            kept = pc.fill_null(may, True)
        if is_copy is not None:
            leaves = is_copy
            if self.forward:
                has_been = pc.match_substring_regex(said.path, listed(self.target))
                leaves = pc.and_(is_copy, pc.fill_null(has_been, False))
            kept = pc.invert(leaves) if kept is None else pc.and_not(kept, leaves)
        return kept

    def _marked(self, rows: Any, offsets: Any, said: _Said, is_copy: Any) -> Any:
        """The rows with origin, path and topic set."""
        cluster, path, topic = (pa.scalar(each, TEXT) for each in (self.source, self.source, self.topic))
        if is_copy is not None:
            longer = pc.binary_join_element_wise(said.path, self.source, ",")
            cluster = pc.if_else(is_copy, rows.column("origin_cluster"), cluster)
            offsets = pc.if_else(is_copy, rows.column("origin_offset"), offsets)
            path, topic = pc.if_else(is_copy, longer, path), pc.if_else(is_copy, said.topic, topic)
        columns = {
            "attributes": _with_ours(rows.column("attributes"), path, topic),
            "origin_cluster": _written_out(cluster, rows.num_rows),
            "origin_offset": offsets,
        }
        names = rows.schema.names
        return pa.RecordBatch.from_arrays(
            [columns.get(name, rows.column(name)) for name in names], schema=rows.schema
        )


def listed(name: str, *, spaces: bool = False) -> str:
    """A pattern for comma-separated lists that contain the name."""
    around = r"\s*" if spaces else ""
    return f"(^|,){around}{re.escape(name)}{around}(,|$)"


def _is_copy(clusters: Any, said: _Said) -> Any:
    """The mask of copies; None if there are none."""
    if clusters.null_count == len(clusters) or said.path is None or said.topic is None:
        return None
    is_copy = pc.and_(pc.and_(clusters.is_valid(), said.path.is_valid()), said.topic.is_valid())
    return is_copy if pc.any(is_copy).as_py() else None


def _said(attributes: Any) -> _Said:
    count = len(attributes)
    if not count or attributes.null_count == count:
        return _Said(None, None, None)
    if _is_uniform(attributes):
        found = (pc.map_lookup(attributes.slice(0, 1), pa.scalar(name), "first") for name in _NAMES)
        return _Said(*(None if one.null_count else _written_out(one[0], count) for one in found))
    _, keys, _ = _entries(attributes)
    given = set(pc.unique(keys.filter(pc.is_in(keys, pa.array(_NAMES, TEXT)))).to_pylist())
    return _Said(
        *(pc.map_lookup(attributes, pa.scalar(name), "first") if name in given else None for name in _NAMES)
    )


_NAMES: Final = (PATH, ORIGIN_TOPIC, REPLICATE)


def _is_uniform(array: Any) -> bool:
    """Whether all rows are equal. The first and the last row are compared first: most other columns fail
    there."""
    last = len(array) - 1
    return bool(
        array.slice(0, 1).equals(array.slice(last, 1)) and array.slice(1).equals(array.slice(0, last))
    )


def _with_ours(attributes: Any, path: Any, topic: Any) -> Any:
    """The attributes of the messages, followed by path and topic (scalars, or one for each row)."""
    count = len(attributes)
    if count > 1 and all(_is_same(each) for each in (path, topic)) and _is_uniform(attributes):
        one = _rebuilt(attributes.slice(0, 1), *(_written_out(_first(each), 1) for each in (path, topic)))
        return one.take(_zeros(count))
    return _rebuilt(attributes, _written_out(path, count), _written_out(topic, count))


def _rebuilt(attributes: Any, paths: Any, topics: Any) -> Any:
    count = len(attributes)
    offsets, keys, items = _entries(attributes)
    parents = pc.list_parent_indices(pa.ListArray.from_arrays(offsets, keys)).cast(pa.int32())
    is_ours = pc.is_in(keys, _OURS)
    if pc.any(is_ours).as_py():
        theirs = pc.invert(is_ours)
        keys, items, parents = keys.filter(theirs), items.filter(theirs), parents.filter(theirs)
        offsets = _offsets(parents, count)
    rows = pa.arange(0, count).cast(pa.int32())
    # The sort is stable: for each row the message's own attributes, then path, then topic.
    order = pc.array_sort_indices(pa.concat_arrays([parents, rows, rows]))
    names = [_written_out(pa.scalar(name, TEXT), count) for name in (PATH, ORIGIN_TOPIC)]
    added = pc.multiply(pa.arange(0, count + 1), 2)
    return map_array(
        count,
        None,
        pc.add(offsets.cast(pa.int64()), added).cast(pa.int32()).buffers()[1],
        pa.concat_arrays([keys, *names]).take(order),
        pa.concat_arrays([items, paths, topics]).take(order),
    )


def _offsets(parents: Any, count: int) -> Any:
    """The offsets of lists whose elements have these row numbers."""
    per_row = pc.value_counts(pa.concat_arrays([parents, pa.arange(0, count).cast(pa.int32())]))
    order = pc.array_sort_indices(per_row.field(0))
    counts = pc.subtract(per_row.field(1).take(order), 1)
    return pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(counts)])


def _entries(attributes: Any) -> tuple[Any, Any, Any]:
    """Offsets from 0, names and values of exactly these rows."""
    if attributes.type != ATTRIBUTES:
        attributes = attributes.cast(ATTRIBUTES)
    if attributes.null_count and not null_rows_are_empty(attributes):
        attributes = attributes.take(pa.arange(0, len(attributes)))
    offsets = attributes.offsets
    first, end = offsets[0].as_py(), offsets[len(offsets) - 1].as_py()
    if first:
        offsets = pc.subtract(offsets, pa.scalar(first, pa.int32()))
    keys, items = (child.slice(first, end - first) for child in (attributes.keys, attributes.items))
    return offsets, keys, items


def _is_same(column: Any) -> bool:
    return isinstance(column, pa.Scalar) or _is_uniform(column)


def _first(column: Any) -> Any:
    return column if isinstance(column, pa.Scalar) else column[0]


def _written_out(column: Any, count: int) -> Any:
    return pa.repeat(column, count) if isinstance(column, pa.Scalar) else column


def _zeros(count: int) -> Any:
    return pa.repeat(pa.scalar(0, pa.int32()), count)


CACHED: Final = 4096


class SchemaConflict(CallerError):
    """The target refuses a schema of the source, or the source has deleted it."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.row = 0
        """The first of the translated rows that has this schema."""


class NotLearned(SavaError):
    """The target's id of a schema is not known yet, and asking is not allowed here."""

    outcome = Outcome.NOT_DONE


class Named(NamedTuple):
    """A schema id and version of a message; None is the latest version."""

    schema_id: int
    version: int | None


class Schemas:
    """The schemas of one topic at one target. One thread owns it."""

    def __init__(
        self, ends: LinkEnds, topic: str, target_topic_id: int, subject: str, *, may_ask: bool = True
    ) -> None:
        """``may_ask`` allows calls to the clusters for schemas that this process does not know."""
        self._may_ask = may_ask
        self._ends = ends
        self._topic = topic
        self._target_topic_id = target_topic_id
        self._subject = subject

    def translate(self, rows: Any) -> Any:
        """The rows with the target's ids and versions. Raises SchemaConflict for the first row that cannot be
        translated, Unavailable, Denied, SourceFailed; NotLearned if a call is needed and not allowed."""
        ids, versions = rows.column("schema_id"), rows.column("schema_version")
        if ids.null_count == len(ids):
            return rows
        named = pa.table([ids, versions, pa.arange(0, len(ids))], ["schema_id", "schema_version", "row"])
        distinct = named.group_by(["schema_id", "schema_version"]).aggregate([("row", "min")])
        new_ids, new_versions = ids, versions
        for pair in distinct.sort_by("row_min").to_pylist():
            schema_id, version = pair["schema_id"], pair["schema_version"]
            if schema_id is None:
                continue
            try:
                there = self._there(Named(schema_id, version))
            except SchemaConflict as error:
                error.row = pair["row_min"]
                raise
            here = pc.equal(ids, schema_id)
            same = pc.is_null(versions) if version is None else pc.equal(versions, version)
            is_of = pc.fill_null(pc.and_(here, same), False)
            new_ids = pc.if_else(is_of, pa.scalar(there.schema_id, pa.int64()), new_ids)
            new_versions = pc.if_else(is_of, pa.scalar(there.version, pa.int32()), new_versions)
        columns = {"schema_id": new_ids, "schema_version": new_versions}
        return pa.RecordBatch.from_arrays(
            [columns.get(name, rows.column(name)) for name in rows.schema.names], schema=rows.schema
        )

    def _there(self, named: Named) -> Named:
        ends = self._ends
        of = (ends.source, ends.source_id, ends.target, self._target_topic_id, self._subject)
        asked = (self._topic, of, named)
        with _guard:
            known = _known.get(asked)
        if known is None:
            if not self._may_ask:
                raise NotLearned(f"{self._topic}: schema {named.schema_id} was not asked for yet")
            known = self._ensured(named)
            with _guard:
                _known[asked] = known
                while len(_known) > CACHED:
                    _known.popitem(last=False)
        return known

    def _ensured(self, named: Named) -> Named:
        schema_id, version = named
        try:
            with at_source():
                found = ClusterClient.of(self._ends.source).schema_of(schema_id, version)
        except Refused as error:
            which = f"schema {schema_id}" + ("" if version is None else f", version {version}")
            raise SchemaConflict(f"{which}, which messages name", f"the source says: {error}") from error
        request = pb.EnsureSchemaRequest(
            subject=found.subject,
            type=found.schema_type,
            definition=found.schema_definition,
            topic=self._topic if found.subject == self._subject else "",
        )
        try:
            there = TargetCluster.of(self._ends.target).ensure_schema(request)
        except Denied:
            raise
        except Refused as error:
            raise SchemaConflict(
                f"subject {found.subject!r}, version {found.version}", f"the target says: {error}"
            ) from error
        return Named(there.schema_id, None if version is None else there.version)

    @staticmethod
    def forget(topic: str) -> None:
        """Forget the schemas of a topic: a user may have deleted a subject there and registered it again."""
        with _guard:
            for asked in [each for each in _known if topic == each[0]]:
                del _known[asked]


_guard: Final = threading.Lock()
_known: Final[OrderedDict[tuple[str, Hashable, Named], Named]] = OrderedDict()
"""By topic, what it is copied from and to, and the schema at the source."""


_SCHEMA: Final = schema_of(STORED_COLUMNS)


class MessageTooLargeForTarget(CallerError):
    """A message exceeds the limit of the target."""

    def __init__(self, name: str, offset: int, size: int, limit: int) -> None:
        super().__init__(
            f"{name}: the message at offset {offset} has {size} bytes, and the target takes {limit}: raise "
            "max_message_size there"
        )
        self.name, self.offset, self.size, self.limit = name, offset, size, limit


class RangeBuilder:
    """Builds the ranges of one partition."""

    def __init__(
        self, name: str, way: CopyRoute, schemas: Callable[[Any], Any], *, max_message_size: int
    ) -> None:
        """``schemas`` translates the schemas of rows. ``max_message_size`` is 0 for no limit."""
        self._name = name
        self._way = way
        self._schemas = schemas
        self._limit = max_message_size

    @classmethod
    def of(
        cls, ends: LinkEnds, errand: Errand, *, max_message_size: int, may_ask: bool = True
    ) -> RangeBuilder:
        """``may_ask`` is that of ``Schemas``."""
        schemas = Schemas(ends, errand.name, errand.target_topic_id, errand.subject, may_ask=may_ask)
        topic = origin_topic(ends.source_id, errand.topic_id)
        way = CopyRoute(ends.source_name, topic, ends.target_name, errand.forward)
        return cls(errand.name, way, schemas.translate, max_message_size=max_message_size)

    def ranges(self, rows: Iterable[Rows], start: int, *, begin: bool) -> Generator[EncodedRange, None, None]:
        """Yield what comes before a message that cannot be copied, then raise MessageTooLargeForTarget,
        SchemaConflict, DataGap or what ``schemas`` raises."""
        for at, portion in self._portions(rows, start):
            for source_range in self._cut(at, portion):
                yield source_range._replace(begin=begin)
                begin = False

    def _cut(self, at: int, portion: Any) -> Iterator[EncodedRange]:
        """The whole portion, or the part before the first message that cannot be copied. Which messages share
        a portion is chance: the progress of a partition must not depend on it."""
        end = at + portion.num_rows
        trouble: CallerError | None = None
        while end > at:
            translated = self._way.translate(portion.slice(0, end - at), at)
            try:
                source_range = self._encoded(at, end, translated)
            except MessageTooLargeForTarget as error:
                end, trouble = error.offset, error
            except SchemaConflict as error:
                end, trouble = translated.offsets[error.row].as_py(), error
            else:
                yield source_range
                break
        if trouble is not None:
            raise trouble

    def _encoded(self, start: int, end: int, translated: Translated) -> EncodedRange:
        batches = b""
        if len(translated.offsets):
            self._check_sizes(translated)
            rows = self._schemas(translated.rows)
            try:
                batches = RecordBatch.from_arrow(rows).to_bytes()
            except BatchTooLarge as error:  # a portion is that large only if it is one message
                size = rows.column("payload").nbytes
                raise MessageTooLargeForTarget(self._name, start, size, error.limit) from error
        return EncodedRange(start, end, False, batches, translated.ranges(), translated.skipped)

    def _check_sizes(self, translated: Translated) -> None:
        sizes = pc.binary_length(translated.rows.column("payload"))
        if not self._limit or pc.max(sizes).as_py() <= self._limit:
            return
        row = pc.index(pc.greater(sizes, self._limit), True).as_py()
        raise MessageTooLargeForTarget(
            self._name, translated.offsets[row].as_py(), sizes[row].as_py(), self._limit
        )

    def _portions(self, rows: Iterable[Rows], at: int) -> Iterator[tuple[int, Any]]:
        """Yield portions, each with the offset of its first row."""
        few: list[Any] = []
        count = size = 0
        for each in rows:
            if each.start != at + count:
                raise DataGap(f"{self._name}: offset {each.start} follows {at + count}")
            for part in cut(_whole(each), BATCH_BYTES, BATCH_ROWS):
                if few and (count + len(part) > BATCH_ROWS or size + part.nbytes > BATCH_BYTES):
                    yield at, pa.concat_batches(few)
                    at, few, count, size = at + count, [], 0, 0
                few.append(part)
                count, size = count + len(part), size + part.nbytes
        if few:
            yield at, pa.concat_batches(few)


def _whole(rows: Rows) -> Any:
    """The rows with all columns, also empty ones."""
    count = rows.end - rows.start
    arrays = [
        rows.columns[spec.name] if spec.name in rows.columns else nulls(spec, count) for spec in COLUMNS
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)
