"""Reading: an open position in a topic's log, from which a subscription takes batch after batch.

The batch at hand and the stream behind it are kept: a consumer that takes ten messages at a time does not
make the log look for its place each time, nor open a Parquet file again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Final, Protocol

from sava.records import RecordBatch
from sava.storage.errors import DataGap
from sava.topics.dispatch.core import Page
from sava.topics.dispatch.members import effective_keys

DELIVERY_BYTES: Final = 1 << 20
DELIVERY_MESSAGES: Final = 10_000
_STREAM_ON: Final = 10_000
"""Offsets that are reached by reading on; further ahead a new place is looked for."""


class LogView(Protocol):
    """What a subscription needs of a topic's log."""

    @property
    def start_offset(self) -> int: ...

    @property
    def next_offset(self) -> int: ...

    def read(
        self, start: int, end: int | None = None, *, max_bytes: int | None = None
    ) -> AsyncGenerator[RecordBatch, None]: ...

    async def wait_beyond(self, offset: int) -> None: ...


class Chunk:
    """A batch at hand."""

    __slots__ = ("_keys", "batch", "per_page", "size")

    def __init__(self, batch: RecordBatch) -> None:
        self.batch = batch
        self.size = batch.header.length
        self.per_page = max(1, min(DELIVERY_MESSAGES, len(batch) * DELIVERY_BYTES // self.size))
        if self.size <= DELIVERY_BYTES and len(batch) <= DELIVERY_MESSAGES:
            self.per_page = len(batch)
        self._keys: Sequence[str] | None = None

    def page(self, start: int, log_end: int) -> Page:
        """From this offset on, as much as one delivery may carry."""
        batch = self.batch
        end = min(batch.next_offset, start + self.per_page)
        return Page(start, end, self.size * (end - start) // len(batch), log_end - start, self.keys)

    def keys(self, start: int, end: int) -> Sequence[str]:
        if self._keys is None:
            self._keys = effective_keys(self.batch)
        base = self.batch.base_offset
        return self._keys[start - base : end - base]


class LogReader:
    """Owned by one task."""

    def __init__(self, log: LogView) -> None:
        self._log = log
        self._chunk: Chunk | None = None
        self._stream: AsyncGenerator[RecordBatch, None] | None = None
        self._next = 0
        """Where the stream continues."""

    async def at(self, offset: int) -> Chunk:
        """The batch that holds the offset, which must be below the log's end. Raises as the log's
        ``read``."""
        chunk = self._chunk
        if chunk is not None and chunk.batch.base_offset <= offset < chunk.batch.next_offset:
            return chunk
        if not self._next <= offset < self._next + _STREAM_ON:
            await self.close()
        for _ in range(2):  # a stream ends where the log ended when it was opened
            if self._stream is None:
                self._stream = self._log.read(offset)
            async for batch in self._stream:
                self._next = batch.next_offset
                if offset < batch.next_offset:
                    self._chunk = Chunk(batch)
                    return self._chunk
            await self.close()
        raise DataGap(f"offset {offset} was asked for, and the log has nothing to read there")

    def forget_below(self, offset: int) -> None:
        """The batch at hand is not needed any more if it ends here or before."""
        if self._chunk is not None and self._chunk.batch.next_offset <= offset:
            self._chunk = None

    async def close(self) -> None:
        stream, self._stream, self._chunk = self._stream, None, None
        if stream is not None:
            await stream.aclose()
