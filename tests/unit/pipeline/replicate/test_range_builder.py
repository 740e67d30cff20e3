"""Portions: no row is left out, whatever the rows come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sava.pipeline.replicate.target import EncodedRange
from sava.pipeline.replicate.translation import (
    CopyRoute,
    MessageTooLargeForTarget,
    RangeBuilder,
    SchemaConflict,
)
from sava.pipeline.source.reading import Rows
from sava.records import STORED_COLUMNS, Message, RecordBatch, iter_batches
from sava.storage.errors import DataGap


def rows(start: int, end: int, size: int = 0) -> Rows:
    payloads = [b"%d" % offset + b" " * size for offset in range(start, end)]
    found = RecordBatch.encode(payloads, publish_time=1).to_arrow(STORED_COLUMNS)
    return Rows(
        start, end, {"payload": found.column("payload"), "publish_time": found.column("publish_time")}
    )


def as_they_are(rows: Any) -> Any:
    return rows


def builder(schemas: Callable[[Any], Any] = as_they_are, *, max_message_size: int = 0) -> RangeBuilder:
    way = CopyRoute("eu", "aa", "us", False)
    return RangeBuilder("/default/t", way, schemas, max_message_size=max_message_size)


def test_ranges_follow_one_another_whatever_the_rows_come_in() -> None:
    given = [
        rows(5, 6),
        rows(6, 900),
        rows(900, 960, size=60_000),
        rows(960, 961, size=3 << 20),
        rows(961, 990),
    ]
    found = list(builder().ranges(given, 5, begin=True))
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
    """A range says that there is nothing else between its ends, so a hole in what was read would be lost
    for good."""
    with pytest.raises(DataGap, match=f"offset {second.start} follows 10"):
        list(builder().ranges([rows(0, 10), second], 0, begin=True))
    with pytest.raises(DataGap, match="offset 3 follows 0"):
        list(builder().ranges([rows(3, 10)], 0, begin=True))


LARGE = 1000


def told(*messages: str) -> Rows:
    """Of which some are to stay in their cluster, some are large, and some name a schema."""
    batch = RecordBatch.from_messages(
        [
            Message(
                b"x" * (LARGE if what == "large" else 1),
                None,
                {"sava-replicate": "none"} if what == "stays" else {},
                1,
                7 if what == "named" else None,
                1 if what == "named" else None,
            )
            for what in messages
        ]
    )
    found = batch.to_arrow(STORED_COLUMNS)
    return Rows(0, len(messages), dict(zip(found.schema.names, found.columns, strict=True)))


def refuse_schemas(rows: Any) -> Any:
    named = [row for row, schema_id in enumerate(rows.column("schema_id").to_pylist()) if schema_id]
    if named:
        refused = SchemaConflict("subject 's'", "the target says: no")
        refused.row = named[0]
        raise refused
    return rows


@pytest.mark.parametrize(
    ("messages", "trouble", "end"),
    [
        (("plain", "plain", "named", "plain"), SchemaConflict, 2),
        (("plain", "plain", "large", "plain"), MessageTooLargeForTarget, 2),
        (("plain", "stays", "plain", "named"), SchemaConflict, 3),
        (("plain", "named", "plain", "large"), SchemaConflict, 1),
        (("plain", "large", "plain", "named"), MessageTooLargeForTarget, 1),
        (("stays", "stays", "named"), SchemaConflict, 2),
        (("named", "plain", "large"), SchemaConflict, 0),
    ],
)
def test_what_is_before_a_message_that_cannot_be_copied_is_copied(
    messages: tuple[str, ...], trouble: type[Exception], end: int
) -> None:
    """Five messages and one whose schema the target does not take: read one by one, the five were copied;
    read together, nothing was."""
    found: list[EncodedRange] = []
    with pytest.raises(trouble):
        found.extend(
            builder(refuse_schemas, max_message_size=LARGE - 1).ranges([told(*messages)], 0, begin=True)
        )
    assert [(each.start, each.end, each.begin) for each in found] == ([(0, end, True)] if end else [])
    sent = sum(len(batch.payloads()) for each in found for batch in iter_batches(each.batches))
    assert sent == end - messages[:end].count("stays")
