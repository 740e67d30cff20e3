"""StreamReader: topics as an unbounded table.

Spark makes two of them. One lives on the driver, in a process of its own, for as long as the query: it is
asked for offsets and partitions and keeps a ``Query``. The other is made for its ``read`` only, which is all
that goes to executors.

Spark asks for the latest offset all the time, a hundred times a second when nothing comes. So the answer is
held back until there is something, or the patience is over; patience grows while nothing happens and is short
after a batch, because with several sources in a query each one waits while the others have something. Spark
stops a query without asking whether it waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from sava.pipeline.options import SourceOptions
from sava.pipeline.positions import Positions, to_offsets, to_positions
from sava.pipeline.source.columns import Choice
from sava.pipeline.source.planning import Share
from sava.pipeline.source.query import Query
from sava.pipeline.source.reading import ShareReader

if TYPE_CHECKING:
    from sava.pipeline.source.decoding import Decoder


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
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
        """Of two limits Spark carries one, and the query knows the other."""
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
        assert isinstance(partition, Share)
        reader = ShareReader(
            self._options.access,
            self._choice,
            fail_on_data_loss=self._options.fail_on_data_loss,
            decoder=self._decoder,
        )
        return reader.read(partition)
