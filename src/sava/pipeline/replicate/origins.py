"""Origins: rows as the source has them become rows as the target gets them. Pure, by column.

    of the source itself   origin = (source, offset there), path = "source", topic = the source's
    copies                 their origin and topic stay, path = "…,source"

A row is a *copy* if it says all three: origin, path and topic; that is how chains write them, and nothing
less lets the target tell where it comes from. Any other row was published at the source, whatever it says of
itself in the attributes that are not its own to give.

Not every row goes to every target. Some are left out, and the stretch has a hole there:

    excluded   by their attribute ``sava-replicate``: the clusters that a message may be copied to, with
               commas; empty or ``none`` for nowhere
    copies     unless the link forwards
    loops      copies that have been in the target

Most batches have the same attributes in all their rows, or none. Then one row is looked at, and stands for
all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from sava.records.columns import ATTRIBUTES, TEXT, map_array
from sava.records.decoder import null_rows_are_empty
from sava.storage.chains import ORIGIN_TOPIC, PATH

REPLICATE: Final = "sava-replicate"
NOWHERE: Final = "none"
_OURS: Final = pa.array([PATH, ORIGIN_TOPIC], TEXT)


class Translated(NamedTuple):
    rows: Any
    """A ``pa.RecordBatch`` of those that are to be copied."""
    offsets: Any
    """Of each, at the source."""
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
    """What rows say in attributes: a column of each, None if no row does."""

    path: Any
    topic: Any
    replicate: Any

    def filter(self, mask: Any) -> _Said:
        return _Said(*(None if column is None else column.filter(mask) for column in self))


@dataclass(frozen=True, slots=True)
class Way:
    """From one partition to one cluster."""

    source: str
    """The cluster's name."""
    topic: str
    """As ``origin_topic`` has it."""
    target: str
    forward: bool

    def translate(self, rows: Any, start: int) -> Translated:
        """``rows``: a ``pa.RecordBatch`` of all stored columns, whose first is at offset ``start``."""
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
        """Which rows are to be copied; None: all."""
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
        """With origin, path and topic."""
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
    """A pattern for lists with commas that have the name."""
    around = r"\s*" if spaces else ""
    return f"(^|,){around}{re.escape(name)}{around}(,|$)"


def _is_copy(clusters: Any, said: _Said) -> Any:
    """None: no row is."""
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
    """First and last are compared first: most columns that are not fail there."""
    last = len(array) - 1
    return bool(
        array.slice(0, 1).equals(array.slice(last, 1)) and array.slice(1).equals(array.slice(0, last))
    )


def _with_ours(attributes: Any, path: Any, topic: Any) -> Any:
    """The attributes with path and topic (scalars, or one for each row) behind those of the message."""
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
    # Sorting is stable: of each row first the message's own, then path, then topic.
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
    """Of lists whose elements have these row numbers: how many are below 0, below 1, … below ``count``."""
    per_row = pc.value_counts(pa.concat_arrays([parents, pa.arange(0, count).cast(pa.int32())]))
    order = pc.array_sort_indices(per_row.field(0))
    counts = pc.subtract(per_row.field(1).take(order), 1)
    return pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(counts)])


def _entries(attributes: Any) -> tuple[Any, Any, Any]:
    """Offsets that begin with 0, names and values of exactly these rows."""
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
