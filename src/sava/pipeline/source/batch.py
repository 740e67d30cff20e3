"""BatchReader: a range of offsets as a table. The range is fixed when Spark plans the query."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from sava.pipeline.link import Link
from sava.pipeline.options import SourceOptions
from sava.pipeline.positions import Part
from sava.pipeline.source.beginnings import resolve
from sava.pipeline.source.columns import Choice
from sava.pipeline.source.errors import DELETED, DataLost
from sava.pipeline.source.filters import Conditions
from sava.pipeline.source.history import History
from sava.pipeline.source.planning import Piece, Share, shares
from sava.pipeline.source.reading import ShareReader
from sava.pipeline.source.topics import Topics

if TYPE_CHECKING:
    from sava.pipeline.source.decoding import Decoder

log = logging.getLogger(__name__)


class BatchReader(DataSourceReader):
    """Pickled before ``partitions`` is called: it holds nothing but values."""

    def __init__(self, options: SourceOptions, choice: Choice, decoder: Decoder | None) -> None:
        self._options = options
        self._choice = choice
        self._decoder = decoder
        self._conditions = Conditions()

    def partitions(self) -> list[InputPartition]:
        options, conditions = self._options, self._conditions
        link = Link.of(options.access)
        names = Topics(link, options.topics).look_up()
        starts = resolve(link, options.start, names, "startingOffsets")
        ends = resolve(link, options.end, names, "endingOffsets")
        extents = link.extents(list(names.values()))
        history = History(link)
        pieces: list[Piece] = []
        for part, name in names.items():
            if not conditions.accept(part):
                continue
            start, end = max(starts[part], conditions.offset.start), min(ends[part], conditions.offset.end)
            start = self._kept(part, start, end, extents[name].start)
            if start < end:
                pieces += history.pieces(part, name, start, end, times=conditions.times)
        # Spark makes one task of an empty list, with a partition of its own.
        return [*shares(pieces, history.store_url, min_partitions=options.min_partitions)] or [Share((), "")]

    def _kept(self, part: Part, start: int, end: int, kept: int) -> int:
        """Where to begin. Only offsets that were asked for by number can be lost."""
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
        assert isinstance(partition, Share)
        reader = ShareReader(
            self._options.access,
            self._choice,
            fail_on_data_loss=self._options.fail_on_data_loss,
            decoder=self._decoder,
            times=self._conditions.times,
        )
        return reader.read(partition)


class FilteringReader(BatchReader):
    """Spark refuses a reader that knows of filters unless ``spark.sql.python.filterPushdown.enabled`` is set,
    so that this is a class of its own."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        self._conditions, left = self._conditions.push(filters)
        return left
