"""Batches joined into one, and batches given to a producer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sava.records import UNASSIGNED, BatchTooLarge, Compression, Message, RecordBatch
from sava.records.header import MAX_BATCH_BYTES
from tests.unit.records.samples import MESSAGES, RICH, UNIFORM, numbered, rich


@settings(max_examples=50)
@given(st.lists(st.tuples(MESSAGES | UNIFORM, st.sampled_from(Compression)), min_size=1, max_size=3))
def test_a_joined_batch_is_the_batch_of_all_messages(parts: list[tuple[list[Message], Compression]]) -> None:
    batches = [RecordBatch.from_messages(messages, codec=codec) for messages, codec in parts]
    joined = RecordBatch.joined(batches, producer_id=5, base_sequence=40)
    together = [message for messages, _ in parts for message in messages]
    whole = RecordBatch.from_messages(together, producer_id=5, base_sequence=40, codec=parts[0][1])
    assert RecordBatch.parse(joined.data).verify().to_bytes() == whole.to_bytes()


def test_a_joined_batch_has_no_place() -> None:
    placed = [rich().assigned(topic_id=1, epoch=2, base_offset=30) for _ in range(2)]
    joined = RecordBatch.joined(placed)
    assert (joined.header.topic_id, joined.header.epoch, joined.base_offset) == (0, 0, UNASSIGNED)
    assert [message.payload for message in joined] == [message.payload for message in RICH * 2]


def test_what_no_batch_can_hold_is_not_joined() -> None:
    half = RecordBatch.encode([bytes(MAX_BATCH_BYTES // 2)], publish_time=1)
    with pytest.raises(BatchTooLarge):
        RecordBatch.joined([half, half])


@given(MESSAGES, st.sampled_from(Compression))
def test_a_stamped_batch_is_the_one_that_its_producer_would_have_made(
    messages: list[Message], codec: Compression
) -> None:
    batch = RecordBatch.from_messages(messages, codec=codec)
    stamped = batch.stamped(producer_id=9, base_sequence=7 << 32)
    made = RecordBatch.from_messages(messages, codec=codec, producer_id=9, base_sequence=7 << 32)
    assert stamped.to_bytes() == made.to_bytes()
    assert RecordBatch.parse(stamped.data).verify().header.next_sequence == (7 << 32) + len(messages)


def test_a_stamped_batch_shares_nothing_with_one_that_has_a_place() -> None:
    placed = numbered(5).assigned(topic_id=1, epoch=2, base_offset=30)
    stamped = placed.stamped(producer_id=9, base_sequence=3)
    assert not stamped.header.is_assigned
    assert placed.header.is_assigned
    part = placed.slice(31, 33).stamped(producer_id=9, base_sequence=0)
    assert part.verify().payloads() == placed.payloads()[1:3]
