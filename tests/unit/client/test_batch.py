"""Batches: offsets of every message, whatever part of a batch it is in."""

from __future__ import annotations

import json
from typing import Any

from sava.client import Batch, TypedMessage
from sava.records import RecordBatch


def records(count: int, *, base_offset: int | None = None) -> RecordBatch:
    batch = RecordBatch.encode([b"%d" % row for row in range(count)], publish_time=1)
    return batch if base_offset is None else batch.assigned(topic_id=1, epoch=1, base_offset=base_offset)


def offsets(batch: Batch) -> list[int | None]:
    return [message.offset for message in batch]


def test_a_batch_is_a_sequence_of_messages_with_topic_and_offset() -> None:
    batch = Batch(records(3, base_offset=100), topic="/default/t")
    assert batch.ranges == ((100, 103),)
    assert [(m.topic, m.offset, m.payload) for m in batch] == [
        ("/default/t", 100 + row, b"%d" % row) for row in range(3)
    ]
    assert batch[-1].offset == 102
    assert [message.offset for message in batch[:2]] == [100, 101]
    assert batch.payloads() == [b"0", b"1", b"2"]
    assert batch.to_arrow(["payload", "offset"]).column("offset").to_pylist() == [100, 101, 102]


def test_rows_with_others_between_them_have_their_own_offsets() -> None:
    batch = Batch(records(4), topic="/default/t", ranges=((5, 7), (10, 12)))
    assert offsets(batch) == [5, 6, 10, 11]


def test_a_split_keeps_offsets_on_both_sides() -> None:
    whole = Batch(records(4, base_offset=100), topic="/default/t", attempt=3)
    left, right = whole.split(1)
    assert (offsets(left), offsets(right)) == ([100], [101, 102, 103])
    assert right.attempt == 3
    scattered = Batch(records(4), topic="/default/t", ranges=((5, 7), (10, 12)))
    left, right = scattered.split(3)
    assert (offsets(left), offsets(right)) == ([5, 6, 10], [11])
    assert right.payloads() == [b"3"]


def test_messages_can_be_left_out_by_offset() -> None:
    whole = Batch(records(6, base_offset=10), topic="/default/t")
    assert whole.without([(0, 5), (20, 30)]) is whole
    assert whole.without([(0, 13), (13, 20)]) is None
    kept = whole.without([(11, 13), (15, 99)])
    assert kept is not None
    assert offsets(kept) == [10, 13, 14]
    assert kept.payloads() == [b"0", b"3", b"4"]


def test_a_codec_gives_messages_a_value() -> None:
    class Json:
        def encode(self, value: Any) -> bytes:
            return json.dumps(value).encode()

        def decode(self, payload: bytes) -> Any:
            return json.loads(payload)

    (message,) = Batch(records(1, base_offset=7), topic="/default/t", codec=Json())
    assert isinstance(message, TypedMessage)
    assert (message.value, message.payload, message.offset) == (0, b"0", 7)
