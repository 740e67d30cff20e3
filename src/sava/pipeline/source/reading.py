"""Reading: what a task does with its share.

Every piece is read to its end or fails: a segment that was deleted since it was planned leaves its rest to
the owner of the partition, and what the owner has not either is lost, which only the user can forgive.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from sava.pipeline.link import Access, Link, OffsetGone
from sava.pipeline.positions import Part
from sava.pipeline.source.columns import VALUE, Choice
from sava.pipeline.source.errors import DELETED, DataLost, TopicReplaced
from sava.pipeline.source.filters import Bounds, in_time
from sava.pipeline.source.planning import Piece, Share
from sava.pipeline.source.segments import Rows, open_source, read_segment
from sava.records import RecordBatch
from sava.records.columns import COLUMNS, nulls
from sava.storage.errors import DataGap, ObjectMissing
from sava.storage.row_groups import row_groups

if TYPE_CHECKING:
    from sava.pipeline.source.decoding import Decoder

log = logging.getLogger(__name__)

LARGE: Final = 512
"""Batches of fewer messages are joined before Spark gets them: each that it gets has its price."""
JOINED: Final = 1 << 20
"""Bytes of small batches that are joined."""
_COMMON_ROWS: Final = 1 << 14
_SPECS: Final = {spec.name: spec for spec in COLUMNS}


class ShareReader:
    """Travels to executors; holds nothing but values."""

    def __init__(
        self,
        access: Access,
        choice: Choice,
        *,
        fail_on_data_loss: bool,
        decoder: Decoder | None = None,
        times: Bounds | None = None,
    ) -> None:
        self._access = access
        self._choice = choice
        self._fail_on_data_loss = fail_on_data_loss
        self._decoder = decoder
        self._times = times

    def read(self, share: Share) -> Iterator[Any]:
        """Record batches of the columns that were asked for."""
        for piece in share.pieces:
            batches = (self._batch(piece.part, rows) for rows in self._rows(share, piece))
            yield from batches if self._times is None else in_time(batches, self._times)

    def _rows(self, share: Share, piece: Piece) -> Iterator[Rows]:
        while piece.start < piece.end:
            try:
                for rows in rows_of(self._access, share.store_url, piece, self._choice.stored, self._times):
                    yield rows
                    piece = piece._replace(start=rows.end)
                return
            except OffsetGone as gone:
                start, lost = piece.start, min(gone.first, piece.end)
                if self._fail_on_data_loss:
                    raise DataLost(piece.part, start, lost, DELETED) from None
                log.warning("source: %s: offsets %s to %s are skipped: %s", piece.part, start, lost, DELETED)
                piece = piece._replace(start=lost, segment=None)

    def _batch(self, part: Part, rows: Rows) -> Any:
        count = rows.end - rows.start
        arrays = [self._column(name, part, rows, count) for name in self._choice.names]
        return pa.RecordBatch.from_arrays(arrays, schema=self._choice.arrow)

    def _column(self, name: str, part: Part, rows: Rows, count: int) -> Any:
        if name == "offset":
            return pa.arange(rows.start, rows.end)
        if name == "topic":
            return _constant(part.topic, pa.string(), count)
        if name == "partition":
            return _constant(part.number, pa.int32(), count)
        if name == VALUE:
            assert self._decoder is not None
            columns = rows.columns
            return self._decoder.decode(
                columns["payload"], columns.get("schema_id"), columns.get("schema_version")
            )
        array = rows.columns.get(name)
        return nulls(_SPECS[name], count) if array is None else array


def rows_of(
    access: Access,
    store_url: str,
    piece: Piece,
    columns: Sequence[str],
    times: Bounds | None = None,
    *,
    topic_id: int = 0,
) -> Iterator[Rows]:
    """The rows of a piece, in order, wherever they are by now; those of row groups that hold nothing within
    ``times`` may be left out. ``topic_id``: that the messages must be of, if it is given. Raises OffsetGone
    when neither the store nor the owner has them any more; TopicReplaced; DataGap."""
    at = piece.start
    if piece.segment is not None:
        _check_topic(piece.name, topic_id, piece.segment.topic_id)
        try:
            source = open_source(store_url, piece.segment)
            for rows in read_segment(source, piece.segment, at, piece.end, columns, times):
                yield rows
                at = rows.end
            return
        except ObjectMissing:
            log.info(
                "source: %s is gone; offsets %s to %s come from the owner", piece.segment.key, at, piece.end
            )
    batches = Link.of(access).read(piece.name, at, piece.end)
    for rows in rows_in(batches, piece.name, at, columns, topic_id=topic_id):
        yield rows
        at = rows.end
    if at < piece.end:
        raise DataGap(f"{piece.name}: the owner has no offset {at}, and {piece.end - 1} was there")


def rows_in(
    batches: Iterable[RecordBatch], name: str, at: int, columns: Sequence[str], *, topic_id: int = 0
) -> Iterator[Rows]:
    """The rows of batches of a partition, of which the first is at ``at``, and the others follow. Raises
    TopicReplaced; DataGap."""
    return _joined(_checked(batches, name, at, topic_id), columns)


def _checked(batches: Iterable[RecordBatch], name: str, at: int, topic_id: int) -> Iterator[RecordBatch]:
    """Joined, batches have only the offset of the first: they must follow one another."""
    for batch in batches:
        _check_topic(name, topic_id, batch.header.topic_id)
        if batch.base_offset != at:
            raise DataGap(f"{name}: offset {batch.base_offset} follows {at}")
        at = batch.next_offset
        yield batch


def _check_topic(name: str, wanted: int, found: int) -> None:
    if wanted not in (0, found):
        raise TopicReplaced(name, wanted, found)


def _joined(batches: Iterator[RecordBatch], columns: Sequence[str]) -> Iterator[Rows]:
    """Rows of batches that follow one another, small ones together."""
    for is_small, run in groupby(batches, lambda batch: len(batch) < LARGE):
        if is_small:
            for few in _gathered(run):
                at = few[0].base_offset
                for table in row_groups(few):
                    yield Rows(at, at + len(table), {name: _whole(table.column(name)) for name in columns})
                    at += len(table)
        else:
            for batch in run:
                rows = batch.to_arrow(columns)
                yield Rows(
                    batch.base_offset, batch.next_offset, dict(zip(columns, rows.columns, strict=True))
                )


def _gathered(batches: Iterator[RecordBatch]) -> Iterator[list[RecordBatch]]:
    few: list[RecordBatch] = []
    size = 0
    for batch in batches:
        few.append(batch)
        size += batch.header.length
        if size > JOINED:
            yield few
            few, size = [], 0
    if few:
        yield few


def _whole(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _constant(value: Any, kind: Any, count: int) -> Any:
    if count > _COMMON_ROWS:
        return pa.repeat(pa.scalar(value, kind), count)
    return _common(value, kind).slice(0, count)


@lru_cache(maxsize=256)
def _common(value: Any, kind: Any) -> Any:
    return pa.repeat(pa.scalar(value, kind), _COMMON_ROWS)
