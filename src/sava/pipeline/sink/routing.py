"""Routing: which partition of which topic a row goes to, for whole Arrow batches.

A row goes where its ``partition`` says, else where its key belongs (as in ``sava.client.routing``), else to
the partition whose turn it is: rows without a key go in runs, since full batches are worth more than an
even spread within milliseconds. Rows of one destination keep their order.

Every step is an Arrow kernel over all rows. Destinations of all topics are numbered in one row, so several
topics in a batch cost no more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from sava.pipeline.link import TopicParts
from sava.pipeline.sink.errors import WriteRefused
from sava.pipeline.sink.hashing import fnv1a_of

RUN_ROWS: Final = 1000
"""Rows without a key that go to one partition before it is the next one's turn."""

ROUTING_COLUMNS: Final = ("topic", "partition")
"""Say where a row goes, and are not part of the message."""


@dataclass(slots=True)
class _Place:
    """A topic among the destinations."""

    topic: str
    base: int
    count: int
    taken: int
    """Rows without a key so far; says whose turn it is."""

    @property
    def turn(self) -> int:
        return self.taken // RUN_ROWS % self.count


class Router:
    """For one task. ``first`` says where runs begin: tasks with few rows each begin elsewhere."""

    def __init__(self, look_up: Callable[[str], TopicParts], *, topic: str = "", first: int = 0) -> None:
        """``topic`` is that of all rows; without it the column says."""
        self._look_up = look_up
        self._topic = topic
        self._first = first
        self._names: list[str] = []
        self._places: dict[str, _Place] = {}

    def route(self, rows: Any) -> Iterator[tuple[str, Any]]:
        """Parts of a ``pa.RecordBatch`` with the partition that each is for; messages only, without the
        columns that say where they go."""
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
            # By whole batches here: those with a key are among them, and a turn more or less makes no
            # difference.
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
        """The topics of these rows and, unless it is one, which of them each row has."""
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
    """What each row's topic has: one value for all, or an array."""
    if topic_of is None:
        return pa.scalar(values[0], pa.int64())
    return pa.array(values, pa.int64()).take(topic_of)


def _column(rows: Any, name: str, kind: pa.DataType) -> Any:
    """None for a column that is not there, or has no value in any row."""
    if name not in rows.schema.names:
        return None
    column = rows.column(name)
    if column.null_count == len(column):
        return None
    try:
        return column if column.type == kind else column.cast(kind)
    except pa.ArrowInvalid as error:
        raise WriteRefused(f"column {name}: {error}") from None
