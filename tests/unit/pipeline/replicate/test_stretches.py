"""Portions: no row is left out, whatever the rows come in."""

from __future__ import annotations

from typing import Any

import pytest

from sava.pipeline.replicate.origins import Way
from sava.pipeline.replicate.stretches import Stretcher
from sava.pipeline.source.segments import Rows
from sava.records import STORED_COLUMNS, RecordBatch, iter_batches
from sava.storage.errors import DataGap


def rows(start: int, end: int, size: int = 0) -> Rows:
    payloads = [b"%d" % offset + b" " * size for offset in range(start, end)]
    found = RecordBatch.encode(payloads, publish_time=1).to_arrow(STORED_COLUMNS)
    return Rows(
        start, end, {"payload": found.column("payload"), "publish_time": found.column("publish_time")}
    )


def as_they_are(rows: Any) -> Any:
    return rows


def stretcher() -> Stretcher:
    return Stretcher("/default/t", Way("eu", "aa", "us", False), as_they_are, max_message_size=0)


def test_stretches_follow_one_another_whatever_the_rows_come_in() -> None:
    given = [
        rows(5, 6),
        rows(6, 900),
        rows(900, 960, size=60_000),
        rows(960, 961, size=3 << 20),
        rows(961, 990),
    ]
    found = list(stretcher().stretches(given, 5, begin=True))
    assert [each.start for each in found] == [5, *(each.end for each in found[:-1])]
    assert found[-1].end == 990
    assert [each.begin for each in found] == [True] + [False] * (len(found) - 1)
    sent = [
        int(payload) for each in found for batch in iter_batches(each.batches) for payload in batch.payloads()
    ]
    assert sent == list(range(5, 990))
    assert (960, 961) in [(each.start, each.end) for each in found], "a large one goes alone"


@pytest.mark.parametrize("second", [rows(11, 20), rows(9, 20)])
def test_rows_that_do_not_follow_are_an_error(second: Rows) -> None:
    """A stretch says that there is nothing else between its ends, so a hole in what was read would be lost
    for good."""
    with pytest.raises(DataGap, match=f"offset {second.start} follows 10"):
        list(stretcher().stretches([rows(0, 10), second], 0, begin=True))
    with pytest.raises(DataGap, match="offset 3 follows 0"):
        list(stretcher().stretches([rows(3, 10)], 0, begin=True))
