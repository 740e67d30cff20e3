"""To Arrow and back."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given

from sava.records import STORED_COLUMNS, InvalidMessage, Message, RecordBatch, schema_of
from tests.unit.records.samples import ALL_COLUMNS, MESSAGES, UNIFORM, numbered, placed, rich

MAP = pa.map_(pa.utf8(), pa.utf8())


def rows(**columns: Any) -> Any:
    return pa.RecordBatch.from_pydict(columns)


@given(MESSAGES | UNIFORM)
def test_from_arrow_inverts_to_arrow(messages: list[Message]) -> None:
    batch = RecordBatch.from_messages(messages)
    arrow = batch.to_arrow()
    arrow.validate(full=True)
    again = RecordBatch.from_arrow(arrow)
    assert again.to_bytes() == batch.to_bytes()
    assert again.to_arrow().equals(arrow)


@given(MESSAGES)
def test_arrow_says_what_the_messages_say(messages: list[Message]) -> None:
    arrow = placed(RecordBatch.from_messages(messages, producer_id=8, base_sequence=9), 70).to_arrow(
        ALL_COLUMNS
    )
    count = len(messages)
    assert arrow.column("payload").to_pylist() == [message.payload for message in messages]
    assert arrow.column("key").to_pylist() == [message.key for message in messages]
    assert arrow.column("schema_id").to_pylist() == [message.schema_id for message in messages]
    assert arrow.column("publish_time").cast(pa.int64()).to_pylist() == [m.publish_time for m in messages]
    attributes = [dict(pairs) if pairs else {} for pairs in arrow.column("attributes").to_pylist()]
    assert attributes == [message.attributes for message in messages]
    assert [pairs is None for pairs in arrow.column("attributes").to_pylist()] == [not a for a in attributes]
    assert arrow.column("offset").to_pylist() == list(range(70, 70 + count))
    assert arrow.column("sequence").to_pylist() == list(range(9, 9 + count))
    assert arrow.column("producer_id").to_pylist() == [8] * count
    assert arrow.column("producer").to_pylist() == [message.producer for message in messages]


def leaves(array: Any) -> list[Any]:
    return [buffer for buffer in array.buffers() if buffer is not None and buffer.size]


def test_columns_are_views_of_the_batch() -> None:
    data = rich().to_bytes()
    source = pa.py_buffer(data)
    arrow = RecordBatch.parse(data).to_arrow()
    for name in STORED_COLUMNS:
        if name == "schema_id":  # constant: written out
            continue
        for buffer in leaves(arrow.column(name)):
            assert source.address <= buffer.address
            assert buffer.address + buffer.size <= source.address + source.size


def test_a_view_keeps_the_bytes_alive() -> None:
    arrow = RecordBatch.parse(bytes(bytearray(rich().to_bytes()))).to_arrow()
    assert arrow.column("payload").to_pylist()[0] == b"one"


def test_only_the_columns_asked_for() -> None:
    arrow = placed(numbered(2), 5).to_arrow(["offset", "payload"])
    assert arrow.to_pydict() == {"offset": [5, 6], "payload": [b"0", b"1"]}
    assert arrow.schema == schema_of(("offset", "payload"))
    with pytest.raises(KeyError):
        numbered(2).to_arrow(["offsets"])


def test_every_batch_has_the_same_schema() -> None:
    assert numbered(1).to_arrow().schema == rich().to_arrow().schema == schema_of(STORED_COLUMNS)


def test_from_arrow_takes_what_spark_and_others_send() -> None:
    batch = RecordBatch.from_arrow(
        pa.RecordBatch.from_arrays(
            [
                pa.array([b"a", b"b"], pa.large_binary()),
                pa.array(["x", None], pa.large_utf8()).dictionary_encode(),
                pa.array([1, 2], pa.timestamp("ms")),
                pa.array([{"k": "v"}, {}], pa.map_(pa.large_utf8(), pa.large_utf8())),
                pa.array([3, None], pa.int32()),
            ],
            names=["payload", "key", "publish_time", "attributes", "schema_id"],
        )
    )
    assert list(batch.verify()) == [
        Message(b"a", "x", {"k": "v"}, 1000, schema_id=3),
        Message(b"b", None, {}, 2000),
    ]


def test_from_arrow_with_one_publish_time_for_all() -> None:
    batch = RecordBatch.from_arrow(rows(payload=[b"a", b"b"]), publish_time=77)
    assert [message.publish_time for message in batch.verify()] == [77, 77]


def test_from_arrow_of_a_part_of_a_larger_array() -> None:
    whole = rich().to_arrow()
    assert list(RecordBatch.from_arrow(whole.slice(1))) == list(rich())[1:]


def test_what_lies_under_nulls_does_not_get_into_the_batch() -> None:
    """Arrow allows anything there; here the same rows have the same bytes, and no foreign data leaks."""
    names = pa.array(["a", "b", "c"])
    offsets = pa.py_buffer(bytes(pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]))
    validity = pa.py_buffer(b"\xfd")
    pairs = pa.StructArray.from_arrays([names, names], fields=[MAP.key_field, MAP.item_field])
    attributes = pa.Array.from_buffers(MAP, 3, [validity, offsets], children=[pairs])
    keys = pa.Array.from_buffers(pa.utf8(), 3, [validity, offsets, pa.py_buffer(b"xyz")])
    numbers = pa.Array.from_buffers(pa.int64(), 3, [validity, pa.py_buffer(b"\x09" * 24)])
    arrow = pa.RecordBatch.from_arrays(
        [pa.array([b"", b"", b""]), attributes, keys, numbers],
        names=["payload", "attributes", "key", "schema_id"],
    )
    number = int.from_bytes(b"\x09" * 8, "little")
    clean = [
        Message(b"", "x", {"a": "a"}, schema_id=number),
        Message(b""),
        Message(b"", "z", {"c": "c"}, schema_id=number),
    ]
    batch = RecordBatch.from_arrow(arrow, publish_time=0)
    assert list(batch.verify()) == clean
    assert batch.to_bytes() == RecordBatch.from_messages(clean).to_bytes()


def test_an_empty_map_stays_an_empty_map() -> None:
    arrow = pa.RecordBatch.from_arrays(
        [pa.array([b"", b"", b""]), pa.array([[], None, []], MAP)], names=["payload", "attributes"]
    )
    batch = RecordBatch.from_arrow(arrow, publish_time=0).verify()
    assert batch.to_arrow().column("attributes").to_pylist() == [[], None, []]
    assert [message.attributes for message in batch] == [{}, {}, {}]


@pytest.mark.parametrize(
    "arrow",
    [
        rows(payload=pa.array([], pa.binary()), publish_time=pa.array([], pa.int64())),
        rows(publish_time=[1]),
        rows(payload=[b"a"]),
        rows(payload=[b"a", None], publish_time=[1, 1]),
        rows(payload=[b"a", b"b"], publish_time=[1, None]),
        rows(payload=[b"a"], publish_time=[1], keys=["typo"]),
        pa.RecordBatch.from_arrays([pa.array([b"a"])] * 2, names=["payload", "payload"]),
        rows(payload=[b"a"], publish_time=[1], key=[1.5], schema_id=["x"]),
        rows(payload=[b"a"], publish_time=[1], schema_version=[2**31]),
        rows(payload=[b"a"], publish_time=[1], key=pa.array([b"\xff"], pa.binary())),
        rows(payload=[b"a"], publish_time=pa.array([1], pa.timestamp("ns"))),
        rows(payload=[b"a"], publish_time=[1], origin_cluster=["eu"]),
        rows(payload=[b"a"], publish_time=[1], origin_offset=[4]),
        rows(payload=[b"a", b"b"], publish_time=[1, 1], origin_cluster=["eu", None], origin_offset=[None, 4]),
        rows(payload=[b"a"], publish_time=[1], attributes=pa.array([[("a", None)]], MAP)),
    ],
)
def test_rows_that_are_no_messages(arrow: Any) -> None:
    with pytest.raises(InvalidMessage):
        RecordBatch.from_arrow(arrow)
