"""What a task reads: exactly the columns that Spark expects, and every offset of its share or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from sava.pipeline.cluster import ClusterAccess, ClusterClient, OffsetGone
from sava.pipeline.errors import DataLost, SourceRefused
from sava.pipeline.options import TopicPartition
from sava.pipeline.source.columns import COLUMNS, Choice, check_schema
from sava.pipeline.source.planning import Piece, ReadTask
from sava.pipeline.source.reading import TaskReader
from sava.records import Message, Origin, RecordBatch
from sava.storage.errors import DataGap
from sava.storage.objectstore import ObjectStore
from sava.storage.segment import write_segment
from sava.storage.types import Segment
from tests.support.messages import TOPIC, numbered, placed

PART = TopicPartition("/default/orders", 3)
NAME = "/default/orders-part-3"


class Owner:
    """Takes the place of a link to a broker that has these batches."""

    def __init__(self, batches: list[RecordBatch], first: int = 0) -> None:
        self.batches = batches
        self.first = first
        self.asked: list[tuple[int, int]] = []

    def read(self, name: str, start: int, end: int) -> Iterator[RecordBatch]:
        assert name == NAME
        self.asked.append((start, end))
        if start < self.first:
            raise OffsetGone(name, start, self.first)
        for batch in self.batches:
            if batch.base_offset < end and batch.next_offset > start:
                yield batch.slice(start, end)


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> Callable[[Owner], Owner]:
    def own(owner: Owner) -> Owner:
        monkeypatch.setattr(ClusterClient, "of", lambda access: owner)
        return owner

    return own


def reader(schema: StructType = COLUMNS, *, fails: bool = True) -> TaskReader:
    return TaskReader(ClusterAccess("nowhere:1"), Choice(schema), fail_on_data_loss=fails)


def tail(start: int, end: int) -> Piece:
    return Piece(PART, NAME, start, end, None, 100.0)


def offsets(batches: Iterator[Any]) -> list[int]:
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


async def stored(tmp_path: Path, batches: list[RecordBatch]) -> Segment:
    store = ObjectStore.open(f"file://{tmp_path}")
    return await write_segment(store, TOPIC, epoch=1, batches=batches, created_ms=0)


RICH = placed(
    [
        RecordBatch.from_messages(
            [
                Message(b"one", "k", {"a": "1"}, 1_000_000, 7, 2, Origin("eu", 5), "web"),
                Message(b"", None, {}, 1_000_001, None, None, None),
            ]
        ),
        RecordBatch.encode([b"x"] * 600, publish_time=5),
    ],
    40,
)


async def test_segments_and_tails_are_the_same_rows(tmp_path: Path, owned: Callable[[Owner], Owner]) -> None:
    owned(Owner(RICH))
    segment = await stored(tmp_path, RICH)
    from_segment = ReadTask((Piece(PART, NAME, 40, 642, segment, 100.0),), f"file://{tmp_path}")
    rows = []
    for share in (ReadTask((tail(40, 642),), ""), from_segment):
        batches = list(reader().read(share))
        assert all(batch.schema.equals(to_arrow_schema(COLUMNS, timezone="UTC")) for batch in batches)
        for batch in batches:
            batch.validate(full=True)
        rows.append([row for batch in batches for row in batch.to_pylist()])
    for row in (row for each in rows for row in each):
        row["attributes"] = dict(row["attributes"] or ())
    assert rows[0] == rows[1]
    assert len(rows[0]) == 602
    assert (rows[0][0]["topic"], rows[0][0]["partition"], rows[0][0]["offset"]) == ("/default/orders", 3, 40)
    assert rows[0][0]["attributes"] == {"a": "1"}


def test_many_small_batches_are_few_for_spark(owned: Callable[[Owner], Owner]) -> None:
    owned(Owner(numbered(0, 3000, per_batch=1)))
    batches = list(reader().read(ReadTask((tail(5, 2995),), "")))
    assert offsets(iter(batches)) == list(range(5, 2995))
    assert len(batches) < 5


async def test_the_rest_of_a_deleted_segment_comes_from_the_owner(
    tmp_path: Path, owned: Callable[[Owner], Owner]
) -> None:
    batches = numbered(0, 100)
    segment = await stored(tmp_path, batches)
    (tmp_path / segment.key).unlink()
    owner = owned(Owner(batches))
    share = ReadTask((Piece(PART, NAME, 10, 90, segment, 100.0), tail(90, 95)), f"file://{tmp_path}")
    assert offsets(reader().read(share)) == list(range(10, 95))
    assert owner.asked == [(10, 90), (90, 95)]


def test_what_is_gone_is_an_error(owned: Callable[[Owner], Owner]) -> None:
    owned(Owner(numbered(50, 100), first=50))
    expected = r"topic /default/orders, partition 3: offsets 10 to 50 cannot be read any more"
    with pytest.raises(DataLost, match=expected) as lost:
        list(reader().read(ReadTask((tail(10, 90),), "")))
    assert "\n" not in str(lost.value)


def test_or_is_skipped(owned: Callable[[Owner], Owner], caplog: pytest.LogCaptureFixture) -> None:
    owned(Owner(numbered(50, 100), first=50))
    assert offsets(reader(fails=False).read(ReadTask((tail(10, 90),), ""))) == list(range(50, 90))
    assert offsets(reader(fails=False).read(ReadTask((tail(10, 20), tail(60, 61)), ""))) == [60]
    assert "offsets 10 to 50 are skipped" in caplog.text


def test_an_owner_that_has_less_than_it_said_is_an_error(owned: Callable[[Owner], Owner]) -> None:
    owned(Owner(numbered(0, 50)))
    with pytest.raises(DataGap, match="has no offset 50, and 89 was there"):
        list(reader(fails=False).read(ReadTask((tail(10, 90),), "")))


def test_only_wanted_columns_in_the_wanted_order(owned: Callable[[Owner], Owner]) -> None:
    owned(Owner(numbered(0, 10)))
    schema = StructType([COLUMNS["publish_time"], COLUMNS["partition"], COLUMNS["key"]])
    (batch,) = reader(schema).read(ReadTask((tail(0, 10),), ""))
    assert batch.schema.equals(to_arrow_schema(schema, timezone="UTC"))
    assert batch.column("partition").to_pylist() == [3] * 10
    assert batch.column("key").null_count == 10


def test_a_schema_is_checked() -> None:
    check_schema(StructType([COLUMNS["key"], COLUMNS["offset"]]), decode=False)
    with pytest.raises(SourceRefused, match=r"no column value.*decode=true"):
        check_schema(StructType().add("value", "string"), decode=False)
    with pytest.raises(SourceRefused, match="column offset is bigint, and int was asked for"):
        check_schema(StructType().add("offset", "integer"), decode=False)
