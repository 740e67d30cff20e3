"""FrameReader: a journal's frames, read back by a few threads while another one writes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sava.records import RecordBatch
from sava.storage.journal_index import JournalCorrupt, Span
from sava.storage.replay import BATCH
from sava.wal import Disk, Record
from sava.wal.reader import Reader


class FrameReader:
    """Owned by the event loop."""

    def __init__(self, disk: Disk, *, storage_id: str, threads: int) -> None:
        self._reader = Reader(disk, storage_id=storage_id)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="sava-journal-read")

    async def read(self, topic_id: int, spans: Sequence[Span]) -> list[RecordBatch]:
        """Raises PositionOutside (it was trimmed away), JournalCorrupt, LogCorrupt."""
        wanted = [(span.position, span.length) for span in spans]
        loop = asyncio.get_running_loop()
        records = await loop.run_in_executor(self._threads, self._reader.read, wanted)
        return [_batch_at(span, record, topic_id) for span, record in zip(spans, records, strict=True)]

    def forget(self, floor: int) -> None:
        """Files before the position are gone."""
        self._threads.submit(self._reader.forget, floor)

    def close(self) -> None:
        self._threads.shutdown()
        self._reader.close()


def _batch_at(span: Span, record: Record, topic_id: int) -> RecordBatch:
    batch = RecordBatch.parse(record.payload)
    if record.kind != BATCH or batch.header.topic_id != topic_id or batch.base_offset != span.base_offset:
        raise JournalCorrupt(f"the frame at {span.position} is not offset {span.base_offset} of {topic_id}")
    return batch
