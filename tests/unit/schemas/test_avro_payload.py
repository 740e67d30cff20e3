"""Avro payloads: what is a value of the schema to the last byte, and what only looks like one."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.schemas.definition import Validator, read_schema
from sava.schemas.errors import PayloadInvalid
from sava.schemas.types import SchemaType

LIST = {"type": "record", "name": "L", "fields": [{"name": "next", "type": ["null", "L"]}]}
EVERYTHING = {
    "type": "record",
    "name": "Everything",
    "fields": [
        {"name": "n", "type": "null"},
        {"name": "b", "type": "boolean"},
        {"name": "i", "type": "int"},
        {"name": "l", "type": "long"},
        {"name": "f", "type": "float"},
        {"name": "d", "type": "double"},
        {"name": "y", "type": "bytes"},
        {"name": "s", "type": "string"},
        {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A", "B"]}},
        {"name": "x", "type": {"type": "fixed", "name": "X", "size": 3}},
        {"name": "a", "type": {"type": "array", "items": "int"}},
        {"name": "m", "type": {"type": "map", "values": ["null", "string"]}},
    ],
}


def number(value: int) -> bytes:
    """Zig-zag and seven bits at a time, as Avro writes longs."""
    rest, out = (value << 1) ^ (value >> 63), bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes((*out, rest))


def validator(schema: Any) -> Validator:
    return Validator(read_schema(SchemaType.AVRO, json.dumps(schema).encode()))


def written(schema: Any, value: Any) -> bytes:
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(schema), value)
    return buffer.getvalue()


@given(
    st.fixed_dictionaries(
        {
            "n": st.none(),
            "b": st.booleans(),
            "i": st.integers(-(1 << 31), (1 << 31) - 1),
            "l": st.integers(-(1 << 63), (1 << 63) - 1),
            "f": st.floats(width=32),
            "d": st.floats(),
            "y": st.binary(max_size=200),
            "s": st.text(max_size=200),
            "e": st.sampled_from(["A", "B"]),
            "x": st.binary(min_size=3, max_size=3),
            "a": st.lists(st.integers(-1000, 1000), max_size=100),
            "m": st.dictionaries(st.text(max_size=5), st.none() | st.text(max_size=5), max_size=5),
        }
    )
)
def test_whatever_another_writer_writes_is_valid(value: dict[str, Any]) -> None:
    payload = written(EVERYTHING, value)
    validator(EVERYTHING).validate(payload)
    with pytest.raises(PayloadInvalid):
        validator(EVERYTHING).validate(payload[:-1])
    with pytest.raises(PayloadInvalid, match="after the value"):
        validator(EVERYTHING).validate(payload + b"\0")


def test_a_block_may_say_its_size() -> None:
    check = validator({"type": "array", "items": "int"})
    check.validate(number(-2) + number(2) + number(1) + number(2) + b"\0")
    with pytest.raises(PayloadInvalid, match="as long as it says"):
        check.validate(number(-2) + number(3) + number(1) + number(2) + b"\0")
    with pytest.raises(PayloadInvalid, match="as long as it says"):
        check.validate(number(-1) + number(-9) + number(1) + b"\0")


@pytest.mark.parametrize(
    ("schema", "payload"),
    [
        pytest.param("int", b"", id="nothing"),
        pytest.param("int", number(1 << 40), id="an int of 41 bits"),
        pytest.param("long", b"\xff" * 100 + b"\0", id="a number without end"),
        pytest.param("long", b"\xff" * 9 + b"\x7f", id="a number of 70 bits"),
        pytest.param("boolean", b"\x07", id="a boolean of 7"),
        pytest.param("double", b"\0\0", id="half a double"),
        pytest.param("bytes", number(1 << 50), id="more bytes than there are"),
        pytest.param("bytes", number(-5), id="less than no bytes"),
        pytest.param("string", number(2) + b"\xff\xfe", id="not UTF-8"),
        pytest.param(["null", "int"], number(7), id="a branch that is not there"),
        pytest.param(["null", "int"], number(-1) + number(1), id="a negative branch"),
        pytest.param({"type": "enum", "name": "E", "symbols": ["A"]}, number(-1), id="a negative symbol"),
        pytest.param({"type": "array", "items": "int"}, number(1 << 60), id="items without end"),
        pytest.param({"type": "array", "items": "int"}, number(-(1 << 63)), id="items without beginning"),
        pytest.param({"type": "map", "values": "int"}, number(1) + number(1) + b"\xff\0\0", id="a bad key"),
    ],
)
def test_what_is_not_a_value_is_refused(schema: Any, payload: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        validator(schema).validate(payload)


def test_nesting_is_bounded() -> None:
    """The decoder of the library ends the process on the second payload."""
    check = validator(LIST)
    check.validate(number(1) * 50 + number(0))
    with pytest.raises(PayloadInvalid, match="levels deep"):
        check.validate(number(1) * 100_000 + number(0))


def test_a_type_within_itself_without_a_way_out_has_no_value() -> None:
    check = validator({"type": "record", "name": "R", "fields": [{"name": "r", "type": "R"}]})
    with pytest.raises(PayloadInvalid, match="levels deep"):
        check.validate(b"")


def test_the_work_is_in_proportion_to_the_payload() -> None:
    """A hundred thousand announced items, and blocks of one item each."""
    check = validator({"type": "array", "items": {"type": "array", "items": "boolean"}})
    payload = (number(1) + number(1) + b"\1\0") * 50_000 + b"\0"
    started = time.thread_time()
    check.validate(payload)
    assert time.thread_time() - started < 5
