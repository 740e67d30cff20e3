"""Parts of a batch, by offset."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.records import STORED_COLUMNS, BatchUnassigned, Compression, Message, OffsetOutside, RecordBatch
from tests.unit.records.samples import ALL_COLUMNS, MESSAGES, UNIFORM, numbered, placed, rich


@given(MESSAGES | UNIFORM, st.sampled_from(Compression), st.data())
def test_a_slice_holds_the_messages_of_its_offsets(
    messages: list[Message], codec: Compression, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(messages) - 1))
    end = data.draw(st.integers(start + 1, len(messages)))
    batch = RecordBatch.from_messages(messages, producer_id=3, base_sequence=50, codec=codec)
    whole = placed(batch, 100)
    part = whole.slice(100 + start, 100 + end)
    expected = list(whole)[start:end]
    assert list(part) == expected
    assert part.payloads() == [message.payload for message in expected]
    assert part.to_arrow(ALL_COLUMNS).equals(whole.to_arrow(ALL_COLUMNS).slice(start, end - start))

    # Encoded, it is a batch like any other, the same as if made of these messages, and still at its place.
    received = RecordBatch.parse(part.to_bytes()).verify()
    assert list(received) == expected
    header = received.header
    assert (header.topic_id, header.epoch, header.base_offset) == (1, 2, 100 + start)
    assert (header.producer_id, header.base_sequence, header.codec) == (3, 50 + start, codec)
    made = RecordBatch.from_messages(expected, producer_id=3, base_sequence=50 + start, codec=codec)
    assert received.to_bytes()[40:] == made.to_bytes()[40:]


def test_a_slice_of_a_slice() -> None:
    batch = placed(numbered(100), 1000)
    assert batch.slice(1010, 1090).slice(1020, 1022).payloads() == [b"20", b"21"]


def test_a_slice_is_cut_to_what_the_batch_holds() -> None:
    batch = placed(numbered(10), 100)
    assert batch.slice(0, 102).payloads() == [b"0", b"1"]
    assert batch.slice(108, 10**9).payloads() == [b"8", b"9"]
    assert batch.slice(0, 10**9) is batch


@pytest.mark.parametrize(("start", "end"), [(0, 100), (110, 120), (105, 105), (106, 104)])
def test_a_slice_of_nothing_is_an_error(start: int, end: int) -> None:
    with pytest.raises(OffsetOutside) as raised:
        placed(numbered(10), 100).slice(start, end)
    assert (raised.value.base_offset, raised.value.next_offset) == (100, 110)


def test_without_offsets_there_is_nothing_to_slice_by() -> None:
    with pytest.raises(BatchUnassigned):
        rich().slice(0, 1)
    with pytest.raises(BatchUnassigned):
        rich().to_arrow(["offset"])


def test_a_slice_tells_its_own_publish_times() -> None:
    part = placed(rich()).slice(101, 102)
    assert (part.header.min_publish_time, part.header.max_publish_time) == (1001, 1001)
    assert part.to_arrow(STORED_COLUMNS).column("publish_time").cast("int64").to_pylist() == [1001]
