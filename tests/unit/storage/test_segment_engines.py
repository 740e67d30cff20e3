"""Segments in the hands of others: every engine finds all rows, all types, and what lets it skip the rest."""

from __future__ import annotations

import random
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import datafusion
import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import pytest_asyncio

from sava.records import RecordBatch
from sava.storage import segment_file
from sava.storage.objectstore import ObjectStore
from sava.storage.segment import write_segment
from tests.support.history import COLUMNS, PLAIN, expected, normal, orders, write_history
from tests.support.messages import placed

TIME = COLUMNS.index("publish_time")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def folder(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    folder = tmp_path_factory.mktemp("history")
    await write_history(folder)
    yield folder
    shutil.rmtree(folder)


def rows_of(table: Any) -> list[tuple[Any, ...]]:
    """The rows of an Arrow table, its types checked first."""
    for name in ("topic", "key", "producer", "origin_cluster"):
        assert pa.types.is_string(table.schema.field(name).type) or str(table.schema.field(name).type) in (
            "large_string",
            "string_view",
        ), name
    assert str(table.schema.field("publish_time").type) in (
        "timestamp[us, tz=UTC]",
        "timestamp[us, tz=Etc/UTC]",
    )
    table = table.set_column(TIME, "publish_time", table.column("publish_time").cast(pa.int64()))
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def with_duckdb(folder: Path) -> list[Any]:
    files = f"{folder}/topics/**/*.parquet"
    found = duckdb.sql(f"SELECT * REPLACE (epoch_us(publish_time) AS publish_time) FROM '{files}'")
    assert found is not None
    assert [str(kind) for kind in found.types] == [
        *("VARCHAR", "INTEGER", "BIGINT", "BIGINT", "VARCHAR", "BLOB", "MAP(VARCHAR, VARCHAR)", "VARCHAR"),
        *("BIGINT", "INTEGER", "VARCHAR", "BIGINT"),
    ]
    assert tuple(found.columns) == COLUMNS
    return list(found.fetchall())


def with_polars(folder: Path) -> list[Any]:
    found = polars.scan_parquet(f"{folder}/topics/**/*.parquet").collect()
    assert tuple(found.columns) == COLUMNS
    assert (str(found.schema["partition"]), str(found.schema["payload"])) == ("Int32", "Binary")
    return rows_of(found.to_arrow())


def with_pyarrow(folder: Path) -> list[Any]:
    found = pyarrow.dataset.dataset(folder / "topics", format="parquet").to_table()
    assert tuple(found.column_names) == COLUMNS
    return rows_of(found)


def with_pandas(folder: Path) -> list[Any]:
    found = pandas.read_parquet(folder / "topics", dtype_backend="pyarrow")
    assert tuple(found.columns) == COLUMNS
    assert str(found.dtypes["schema_version"]) == "int32[pyarrow]"
    return rows_of(pa.Table.from_pandas(found, preserve_index=False))


def with_datafusion(folder: Path) -> list[Any]:
    context = datafusion.SessionContext()
    found: list[Any] = []
    for place in sorted({file.parent for file in folder.rglob("*.parquet")}):
        frame = context.read_parquet(str(place))
        assert tuple(frame.schema().names) == COLUMNS
        found += rows_of(frame.to_arrow_table())
    return found


@pytest.mark.parametrize(
    "read",
    [with_duckdb, with_polars, with_pyarrow, with_pandas, with_datafusion],
    ids=lambda read: read.__name__,
)
def test_an_engine_finds_all_rows_and_types(folder: Path, read: Callable[[Path], list[Any]]) -> None:
    assert normal(read(folder)) == expected()


def test_partitions_can_be_told_apart_in_a_glob(folder: Path) -> None:
    found = duckdb.sql(
        f"""SELECT topic, partition, count(*), count(DISTINCT "offset") FROM '{folder}/topics/**/*.parquet'
            WHERE "offset" < 10 GROUP BY ALL ORDER BY ALL"""
    )
    assert found is not None
    assert found.fetchall() == [("/default/clicks", 0, 10, 10), ("/default/clicks", 11, 10, 10)]


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.parquet"))


def test_every_column_has_the_number_that_tables_know_it_by(folder: Path) -> None:
    """The numbers are written out here once more: they may never change."""
    for file in files(folder):
        schema = pq.read_schema(file)
        ids = {field.name: int(field.metadata[b"PARQUET:field_id"]) for field in schema}
        entries = schema.field("attributes").type
        ids["attributes.key"] = int(entries.key_field.metadata[b"PARQUET:field_id"])
        ids["attributes.value"] = int(entries.item_field.metadata[b"PARQUET:field_id"])
        assert ids == {
            **dict(zip(COLUMNS[:7], range(1, 8), strict=True)),
            "attributes.key": 8,
            "attributes.value": 9,
            **dict(zip(COLUMNS[7:], range(10, 15), strict=True)),
        }


def test_a_reader_can_skip_what_it_does_not_want(folder: Path) -> None:
    """Order, statistics and page index of all columns; no statistics of payloads."""
    for file in files(folder):
        metadata = pq.read_metadata(file)
        assert set(metadata.metadata) == {
            b"sava." + name for name in (b"topic_id", b"epoch", b"start", b"end", b"format")
        }
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            assert group.sorting_columns == (pq.SortingColumn(COLUMNS.index("offset")),)
            for index in range(group.num_columns):
                column = group.column(index)
                is_payload = column.path_in_schema == "payload"
                assert column.has_offset_index
                assert column.has_column_index == column.is_stats_set == (not is_payload), (
                    column.path_in_schema
                )
            names = [group.column(index).path_in_schema for index in range(2)]
            assert names == ["topic", "partition"]
            assert all(group.column(index).has_dictionary_page for index in range(2))


async def test_what_engines_like_costs_less_than_a_hundredth(tmp_path: Path) -> None:
    """Beside the same rows without it: no columns for topic and partition, no numbers, no page index."""
    store = ObjectStore.open(f"file://{tmp_path}")
    random.seed(24)
    messages = orders(100_000)
    random.shuffle(messages)
    batches = [RecordBatch.from_messages(messages[at : at + 1000]) for at in range(0, len(messages), 1000)]
    segment = await write_segment(
        store, PLAIN, epoch=1, batches=placed(batches, 0, topic=PLAIN), created_ms=0
    )
    file = pq.ParquetFile(tmp_path / segment.key)
    options = {
        name: [column for column in value if column not in ("topic", "partition")]
        for name, value in segment_file._WRITER_OPTIONS.items()
        if name in ("use_dictionary", "write_statistics")
    }
    kept = {"compression", "compression_level", "column_encoding", "write_page_checksum"}
    options |= {name: value for name, value in segment_file._WRITER_OPTIONS.items() if name in kept}
    plain = pa.schema([field.remove_metadata() for field in segment_file.SCHEMA][2:])
    with pq.ParquetWriter(tmp_path / "plain", plain, **options) as writer:
        for number in range(file.num_row_groups):
            rows = file.read_row_group(number).drop_columns(["topic", "partition"]).cast(plain)
            writer.write_table(rows, row_group_size=len(rows))
    growth = segment.size / (tmp_path / "plain").stat().st_size - 1
    print(f"\ngrowth of a segment of {segment.size:,} bytes: {growth:+.2%}")
    assert growth < 0.01
