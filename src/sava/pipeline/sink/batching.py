"""Batching: rows that come in pieces, made into record batches of a good size for each partition.

Spark hands over about ten thousand rows at a time, routing cuts them up, and a batch costs about the same
whether it holds ten messages or ten thousand. So rows wait here, as Arrow slices, until there are enough of
them for a partition, or too many over all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from sava.pipeline.sink.errors import WriteRefused
from sava.records import BatchTooLarge, Codec, InvalidMessage, RecordBatch

BATCH_BYTES: Final = 1 << 20
WAITING_BYTES: Final = 32 << 20
"""Of all partitions together. With many partitions each gets its share, and smaller batches."""

Emit = Callable[[str, RecordBatch, int], None]
"""Gets a partition, its next batch, and the size of the largest payload in it."""


@dataclass(slots=True)
class _Waiting:
    rows: list[Any] = field(default_factory=list)
    size: int = 0


class Batcher:
    def __init__(
        self,
        emit: Emit,
        *,
        codec: Codec = Codec.NONE,
        batch_bytes: int = BATCH_BYTES,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        self._emit = emit
        self._codec = codec
        self._batch_bytes = batch_bytes
        self._waiting_bytes = waiting_bytes
        self._waiting: dict[str, _Waiting] = {}
        self._size = 0

    def add(self, name: str, rows: Any) -> None:
        """Rows (a ``pa.RecordBatch`` of columns that a message has) for a partition."""
        size = rows.nbytes
        if size > self._batch_bytes and rows.num_rows > 1:
            # Halves, not equal shares: one large payload among small ones ends up by itself.
            middle = rows.num_rows // 2
            self.add(name, rows.slice(0, middle))
            self.add(name, rows.slice(middle))
            return
        waiting = self._waiting.get(name)
        if waiting is None:
            waiting = self._waiting[name] = _Waiting()
        waiting.rows.append(rows)
        waiting.size += size
        self._size += size
        if waiting.size >= min(self._batch_bytes, self._waiting_bytes // len(self._waiting)):
            self._encode(name, waiting)
        elif self._size >= self._waiting_bytes:
            self.flush()  # those that were alone for long have more than their share

    def flush(self) -> None:
        for name, waiting in self._waiting.items():
            if waiting.rows:
                self._encode(name, waiting)

    def _encode(self, name: str, waiting: _Waiting) -> None:
        rows = waiting.rows[0] if len(waiting.rows) == 1 else pa.concat_batches(waiting.rows)
        self._size -= waiting.size
        waiting.rows, waiting.size = [], 0
        now = time.time_ns() // 1000
        try:
            batch = RecordBatch.from_arrow(_with_times(rows, now), publish_time=now, codec=self._codec)
        except (InvalidMessage, BatchTooLarge) as error:
            raise WriteRefused(f"{name}: {error}") from None
        self._emit(name, batch, pc.max(pc.binary_length(rows.column("payload"))).as_py())


def _with_times(rows: Any, now: int) -> Any:
    """A row without a publish time is published now."""
    index = rows.schema.get_field_index("publish_time")
    if index < 0 or not rows.column(index).null_count:
        return rows
    times = rows.column(index)
    filled = pc.fill_null(times, pa.scalar(now, pa.timestamp("us", tz="UTC")).cast(times.type))
    return rows.set_column(index, "publish_time", filled)
