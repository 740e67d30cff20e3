"""The readers of the source, as Spark calls them.

A ``BatchReader`` reads a range of offsets that is fixed when Spark plans the query.

Spark makes two ``StreamReader``s. One lives on the driver, in a process of its own, for as long as the query:
it answers for offsets and partitions and keeps a ``Query``. Executors get the other one for its ``read``
only.

Spark asks for the latest offset a hundred times a second when nothing comes. So the answer waits until there
are messages, or until a timeout. The timeout grows while nothing happens and is short after a batch: with
several sources in a query each one waits while the others have messages. Spark stops a query without regard
to that wait.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from sava.pipeline.cluster import ClusterClient
from sava.pipeline.errors import DELETED, DataLost
from sava.pipeline.options import Positions, SourceOptions, TopicPartition, to_offsets, to_positions
from sava.pipeline.source.columns import Choice, Conditions
from sava.pipeline.source.planning import Piece, ReadTask, SegmentHistory, read_tasks, resolve
from sava.pipeline.source.query import Query, QueryTopics
from sava.pipeline.source.reading import TaskReader

if TYPE_CHECKING:
    from sava.pipeline.source.decoding import Decoder

log = logging.getLogger(__name__)


class BatchReader(DataSourceReader):
    """A range of offsets as a table. Spark pickles it before ``partitions``: it holds only values."""

    def __init__(self, options: SourceOptions, choice: Choice, decoder: Decoder | None) -> None:
        self._options = options
        self._choice = choice
        self._decoder = decoder
        self._conditions = Conditions()

    def partitions(self) -> list[InputPartition]:
        options, conditions = self._options, self._conditions
        cluster = ClusterClient.of(options.access)
        names = QueryTopics(cluster, options.topics).look_up()
        starts = resolve(cluster, options.start, names, "startingOffsets")
        ends = resolve(cluster, options.end, names, "endingOffsets")
        extents = cluster.extents(list(names.values()))
        history = SegmentHistory(cluster)
        pieces: list[Piece] = []
        for part, name in names.items():
            if not conditions.accept(part):
                continue
            start, end = max(starts[part], conditions.offset.start), min(ends[part], conditions.offset.end)
            start = self._kept(part, start, end, extents[name].start)
            if start < end:
                pieces += history.pieces(part, name, start, end, times=conditions.times)
        # Spark makes one task of an empty list, with a partition of its own.
        return [*read_tasks(pieces, history.store_url, min_partitions=options.min_partitions)] or [
            ReadTask((), "")
        ]

    def _kept(self, part: TopicPartition, start: int, end: int, kept: int) -> int:
        """The first offset to read. Only offsets that the user gave by number can be lost."""
        if start >= kept or start >= end:
            return start
        lost = min(kept, end)
        if not isinstance(self._options.start, Mapping):
            return kept
        if self._options.fail_on_data_loss:
            raise DataLost(part, start, lost, DELETED)
        log.warning("source: %s: offsets %s to %s are skipped: %s", part, start, lost, DELETED)
        return kept

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, ReadTask)
        reader = TaskReader(
            self._options.access,
            self._choice,
            fail_on_data_loss=self._options.fail_on_data_loss,
            decoder=self._decoder,
            times=self._conditions.times,
        )
        return reader.read(partition)


class FilteringReader(BatchReader):
    """A BatchReader with filters. It is a class of its own because Spark refuses a reader with
    ``pushFilters`` unless ``spark.sql.python.filterPushdown.enabled`` is set."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        self._conditions, left = self._conditions.push(filters)
        return left


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Topics as an unbounded table."""

    def __init__(self, options: SourceOptions, choice: Choice, decoder: Decoder | None) -> None:
        self._options = options
        self._choice = choice
        self._decoder = decoder
        self._started: Query | None = None

    @property
    def _query(self) -> Query:
        if self._started is None:
            self._started = Query(self._options)
        return self._started

    # -- on the driver ---------------------------------------------------------------------

    def initialOffset(self) -> Positions:  # noqa: N802
        return to_positions(self._query.beginning())

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._query.stop_at_present_end()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Spark passes one limit to ``latestOffset``; the options hold the other."""
        options = self._options
        if options.max_messages is not None:
            return ReadMaxRows(options.max_messages)
        return ReadMaxBytes(options.max_bytes) if options.max_bytes is not None else ReadAllAvailable()

    def latestOffset(self, start: Mapping[str, Mapping[str, int]], limit: ReadLimit) -> Positions:  # noqa: N802
        max_messages = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        if not isinstance(limit, ReadAllAvailable):
            max_bytes = max_bytes or self._options.max_bytes
        return to_positions(
            self._query.advance(to_offsets(start), max_messages=max_messages, max_bytes=max_bytes)
        )

    def reportLatestOffset(self) -> Positions | None:  # noqa: N802
        return to_positions(self._query.ends()) or None

    def partitions(
        self, start: Mapping[str, Mapping[str, int]], end: Mapping[str, Mapping[str, int]]
    ) -> list[InputPartition]:
        return [*self._query.plan(to_offsets(start), to_offsets(end))]

    def commit(self, end: Mapping[str, Mapping[str, int]]) -> None:
        self._query.committed()

    # -- on executors ----------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, ReadTask)
        reader = TaskReader(
            self._options.access,
            self._choice,
            fail_on_data_loss=self._options.fail_on_data_loss,
            decoder=self._decoder,
        )
        return reader.read(partition)
