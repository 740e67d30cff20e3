"""Stretches: rows of a source, in the portions in which they are sent.

    rows        as they were stored: a row group, a batch, some small batches
    portions    of about a megabyte: small ones joined, large ones cut
    stretches   what of a portion is to be copied, in one batch

A stretch says that there is nothing else to be copied between its ends. So rows must follow one another from
the first to the last, and it is an error if they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from sava.errors import CallerError
from sava.pipeline.replicate.chains import Stretch
from sava.pipeline.replicate.origins import Translated, Way
from sava.pipeline.replicate.schemas import SchemaConflict, Schemas
from sava.pipeline.replicate.work import Errand, LinkEnds
from sava.pipeline.source.segments import Rows
from sava.records import STORED_COLUMNS, BatchTooLarge, RecordBatch, schema_of
from sava.records.columns import COLUMNS, nulls
from sava.storage.chains import origin_topic
from sava.storage.errors import DataGap
from sava.storage.row_groups import ROW_GROUP_BYTES, ROW_GROUP_ROWS, cut

_SCHEMA: Final = schema_of(STORED_COLUMNS)


class MessageTooLarge(CallerError):
    """The target takes no message of this size."""

    def __init__(self, name: str, offset: int, size: int, limit: int) -> None:
        super().__init__(
            f"{name}: the message at offset {offset} has {size} bytes, and the target takes {limit}: raise "
            "max_message_size there"
        )
        self.name, self.offset, self.size, self.limit = name, offset, size, limit


class Stretcher:
    """Of one partition."""

    def __init__(self, name: str, way: Way, schemas: Callable[[Any], Any], *, max_message_size: int) -> None:
        """``schemas``: the same rows with the target's schemas. ``max_message_size``: 0 for no limit."""
        self._name = name
        self._way = way
        self._schemas = schemas
        self._limit = max_message_size

    @classmethod
    def of(cls, ends: LinkEnds, errand: Errand, *, max_message_size: int, may_ask: bool = True) -> Stretcher:
        """``may_ask``: as of ``Schemas``."""
        schemas = Schemas(ends, errand.name, errand.target_topic_id, errand.subject, may_ask=may_ask)
        topic = origin_topic(ends.source_id, errand.topic_id)
        way = Way(ends.source_name, topic, ends.target_name, errand.forward)
        return cls(errand.name, way, schemas.translate, max_message_size=max_message_size)

    def stretches(self, rows: Iterable[Rows], start: int, *, begin: bool) -> Generator[Stretch, None, None]:
        """Raises MessageTooLarge, SchemaConflict, DataGap; what is before the message in question has been
        yielded then. And what else ``schemas`` raises."""
        for at, portion in self._portions(rows, start):
            for stretch in self._stretches(at, portion):
                yield stretch._replace(begin=begin)
                begin = False

    def _stretches(self, at: int, portion: Any) -> Iterator[Stretch]:
        """All of it, or what is before the first message that cannot be copied. Which messages share a
        portion is chance: how far a partition gets must not depend on that."""
        end = at + portion.num_rows
        trouble: CallerError | None = None
        while end > at:
            translated = self._way.translate(portion.slice(0, end - at), at)
            try:
                stretch = self._stretch(at, end, translated)
            except MessageTooLarge as error:
                end, trouble = error.offset, error
            except SchemaConflict as error:
                end, trouble = translated.offsets[error.row].as_py(), error
            else:
                yield stretch
                break
        if trouble is not None:
            raise trouble

    def _stretch(self, start: int, end: int, translated: Translated) -> Stretch:
        batches = b""
        if len(translated.offsets):
            self._check_sizes(translated)
            rows = self._schemas(translated.rows)
            try:
                batches = RecordBatch.from_arrow(rows).to_bytes()
            except BatchTooLarge as error:  # a portion is that large only if it is one message
                size = rows.column("payload").nbytes
                raise MessageTooLarge(self._name, start, size, error.limit) from error
        return Stretch(start, end, False, batches, translated.ranges(), translated.skipped)

    def _check_sizes(self, translated: Translated) -> None:
        sizes = pc.binary_length(translated.rows.column("payload"))
        if not self._limit or pc.max(sizes).as_py() <= self._limit:
            return
        row = pc.index(pc.greater(sizes, self._limit), True).as_py()
        raise MessageTooLarge(self._name, translated.offsets[row].as_py(), sizes[row].as_py(), self._limit)

    def _portions(self, rows: Iterable[Rows], at: int) -> Iterator[tuple[int, Any]]:
        """With the offset of the first row of each."""
        few: list[Any] = []
        count = size = 0
        for each in rows:
            if each.start != at + count:
                raise DataGap(f"{self._name}: offset {each.start} follows {at + count}")
            for part in cut(_whole(each)):
                if few and (count + len(part) > ROW_GROUP_ROWS or size + part.nbytes > ROW_GROUP_BYTES):
                    yield at, pa.concat_batches(few)
                    at, few, count, size = at + count, [], 0, 0
                few.append(part)
                count, size = count + len(part), size + part.nbytes
        if few:
            yield at, pa.concat_batches(few)


def _whole(rows: Rows) -> Any:
    """With all columns, also those that hold nothing."""
    count = rows.end - rows.start
    arrays = [
        rows.columns[spec.name] if spec.name in rows.columns else nulls(spec, count) for spec in COLUMNS
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)
