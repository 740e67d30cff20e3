"""Batches of a topic, for the tests of what stores them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from sava.records import Message, RecordBatch
from sava.storage.keys import objects_prefix
from sava.storage.objectstore import ObjectStore
from sava.storage.segment import SegmentReader, write_segment
from sava.storage.types import Segment, TopicKey

TOPIC = TopicKey("default", "orders", 7)


def placed(
    batches: Sequence[RecordBatch], start: int, *, topic: TopicKey = TOPIC, epoch: int = 1
) -> list[RecordBatch]:
    """The batches one after the other, from offset ``start`` on."""
    starts = accumulate(map(len, batches), initial=start)
    return [
        batch.assigned(topic_id=topic.topic_id, epoch=epoch, base_offset=base)
        for batch, base in zip(batches, starts, strict=False)
    ]


def numbered(start: int, end: int, *, size: int = 10, per_batch: int = 1000) -> list[RecordBatch]:
    """Messages whose payload is their offset, and whose publish time in µs is twice it."""
    return placed(
        [
            RecordBatch.encode(
                [b"%0*d" % (size, offset) for offset in range(first, min(first + per_batch, end))],
                publish_time=[2 * offset for offset in range(first, min(first + per_batch, end))],
            )
            for first in range(start, end, per_batch)
        ],
        start,
    )


async def write(
    store: ObjectStore, start: int, end: int, *, topic: TopicKey = TOPIC, epoch: int = 1, created_ms: int = 0
) -> Segment:
    """A small segment of ``numbered`` messages."""
    batches = [
        batch.assigned(topic_id=topic.topic_id, epoch=epoch, base_offset=batch.base_offset)
        for batch in numbered(start, end)
    ]
    return await write_segment(store, topic, epoch=epoch, batches=batches, created_ms=created_ms)


async def read_messages(
    reader: SegmentReader, segment: Segment, start: int = 0, end: int = 1 << 63
) -> list[Message]:
    """All messages, after a check that batches follow each other and belong to the segment."""
    found: list[Message] = []
    expected = max(start, segment.start)
    async for batch in reader.read(segment, start, end):
        header = batch.verify().header
        assert (header.topic_id, header.epoch) == (segment.topic_id, segment.epoch)
        assert batch.base_offset == expected
        expected = batch.next_offset
        found += batch.messages()
    return found


async def keys(store: ObjectStore, topic: TopicKey = TOPIC) -> list[str]:
    """Of the objects that there are of a topic."""
    return [info.key async for info in store.list(objects_prefix(topic))]
