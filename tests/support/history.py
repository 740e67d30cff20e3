"""A little history with values of all types as segments, and the rows that every engine must find in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sava.records import Message, Origin, RecordBatch
from sava.storage.objectstore import ObjectStore
from sava.storage.segment import write_segment
from sava.storage.types import Segment, TopicKey
from tests.support.messages import placed

COLUMNS = (
    *("topic", "partition", "offset", "publish_time", "key", "payload", "attributes", "producer"),
    *("schema_id", "schema_version", "origin_cluster", "origin_offset"),
)
TIME = 1_760_000_000_123_456
PLAIN = TopicKey("default", "orders", 7)
PARTITIONS = (TopicKey("default", "clicks-part-0", 9), TopicKey("default", "clicks-part-11", 10))

VARIED = [
    Message(b"one", "k", {"a": "1"}, TIME, 7, 2, Origin("eu", 5), "web"),
    Message(b"", None, {}, TIME - 1, None, None, None),
    Message(b"\x00\xff", "clé", {"b": "", "c": "22"}, TIME + 1, 1 << 40, 3, Origin("us", 1 << 41), "app"),
]


def orders(count: int, *, size: int = 0) -> list[Message]:
    """Messages as they are common: JSON, a key, a producer."""
    return [
        Message(
            json.dumps({"order": number, "amount": number * 7919 % 100_000 / 100, "to": "x" * size}).encode(),
            f"customer {number % 997}",
            {"region": "eu" if number % 3 else "us"} if number % 2 else {},
            TIME + number,
            producer="web",
        )
        for number in range(count)
    ]


async def write_history(folder: Path) -> None:
    """A topic without partitions in two segments, one of them small; one with two partitions, whose offsets
    are the same."""
    store = ObjectStore.open(f"file://{folder}")
    await _write(store, PLAIN, [VARIED, *([each] for each in VARIED)], 1000)
    await _write(store, PLAIN, [VARIED, orders(30_000, size=200)], 1006)
    for topic in PARTITIONS:
        await _write(store, topic, [orders(100)], 0)


async def _write(store: ObjectStore, topic: TopicKey, batches: list[list[Message]], start: int) -> Segment:
    encoded = placed([RecordBatch.from_messages(messages) for messages in batches], start, topic=topic)
    return await write_segment(store, topic, epoch=1, batches=encoded, created_ms=0)


def expected() -> list[tuple[Any, ...]]:
    plain = [*VARIED, *VARIED, *VARIED, *orders(30_000, size=200)]
    return [
        *_rows("/default/clicks", 0, 0, orders(100)),
        *_rows("/default/clicks", 11, 0, orders(100)),
        *_rows("/default/orders", 0, 1000, plain),
    ]


def _rows(topic: str, partition: int, start: int, messages: Iterable[Message]) -> Iterable[tuple[Any, ...]]:
    for offset, each in enumerate(messages, start):
        origin = each.origin or (None, None)
        yield (
            *(topic, partition, offset, each.publish_time, each.key, each.payload, each.attributes),
            *(each.producer, each.schema_id, each.schema_version, *origin),
        )


def normal(rows: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Rows of an engine, in order: times as microseconds, no attributes as none, maps as dictionaries."""
    return sorted((*row[:5], bytes(row[5]), dict(row[6] or ()), *row[7:]) for row in rows)
