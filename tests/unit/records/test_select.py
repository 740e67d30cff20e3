"""Some messages of a batch, for one of several consumers."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.records import Compression, InvalidMessage, Message, RecordBatch
from tests.unit.records.samples import MESSAGES, RICH, UNIFORM, numbered, placed, rich


@given(MESSAGES | UNIFORM, st.sampled_from(Compression), st.data())
def test_a_selection_is_a_batch_of_these_messages(
    messages: list[Message], codec: Compression, data: st.DataObject
) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, len(messages) - 1), min_size=1)))
    whole = placed(RecordBatch.from_messages(messages, producer_id=3, base_sequence=50, codec=codec))
    part = whole.select(rows)
    chosen = [messages[row] for row in rows]
    assert list(RecordBatch.parse(part.to_bytes()).verify()) == chosen
    assert part.to_bytes() == RecordBatch.from_messages(chosen, codec=codec).to_bytes()
    assert not part.header.is_assigned
    assert (part.header.producer_id, part.header.base_sequence) == (0, 0)


@pytest.mark.parametrize("rows", [[0, 2], range(0, 3, 2), pa.array([0, 2]), pa.array([0, 2], pa.uint16())])
def test_rows_are_given_as_python_or_arrow_integers(rows: Any) -> None:
    assert list(rich().select(rows)) == [RICH[0], RICH[2]]


def test_a_part_of_a_slice() -> None:
    part = placed(numbered(100), 1000).slice(1010, 1090)
    assert part.select([0, 5, 79]).payloads() == [b"10", b"15", b"89"]


@pytest.mark.parametrize("rows", [[3], [-1], [0, 100]])
def test_a_row_that_is_not_there(rows: list[int]) -> None:
    with pytest.raises(IndexError):
        rich().select(rows)


def test_no_row_is_no_batch() -> None:
    with pytest.raises(InvalidMessage):
        rich().select([])
