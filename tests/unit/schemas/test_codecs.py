"""Codecs: a value goes out and comes back, and a wrong one is refused where it was made."""

from __future__ import annotations

import json
import struct
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.schemas.codecs import BytesCodec, ProtobufCodec, codec_for
from sava.schemas.definition import MAX_PAYLOAD_BYTES, PayloadRefusal, Validator, read_schema
from sava.schemas.errors import PayloadInvalid
from sava.schemas.types import SchemaType

PERSON_JSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
PERSON_AVRO = {
    "type": "record",
    "name": "Person",
    "fields": [
        {"name": "name", "type": "string"},
        {"name": "seen", "type": {"type": "long", "logicalType": "timestamp-millis"}, "default": 0},
        {"name": "score", "type": {"type": "double"}, "default": 1},
    ],
}
PERSON_PROTO = b'syntax = "proto3"; message Person { string name = 1; repeated int64 scores = 2; }'


def definition(schema: Any) -> bytes:
    return json.dumps(schema).encode()


@given(st.integers(-(10**300), 10**300) | st.floats(allow_nan=False, allow_infinity=False))
def test_numbers(value: float) -> None:
    codec = codec_for(SchemaType.NUMBER, b"number")
    payload = codec.encode(value)
    Validator(read_schema(SchemaType.NUMBER, b"")).validate(payload)
    back = codec.decode(payload)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "value", [True, None, "1", float("nan"), float("inf"), 10**400, 10**5000], ids=list("abcdefg")
)
def test_what_is_not_a_number_is_not_written(value: Any) -> None:
    with pytest.raises(PayloadInvalid):
        codec_for(SchemaType.NUMBER, b"").encode(value)


@pytest.mark.parametrize(
    "payload", [b"1", b"-0.5", b"1e10", b"1234", struct.pack("<d", 1.5), struct.pack(">i", 7)]
)
def test_a_number_is_text_or_the_four_or_eight_bytes_that_danube_takes(payload: bytes) -> None:
    Validator(read_schema(SchemaType.NUMBER, b"")).validate(payload)


@pytest.mark.parametrize("payload", [b"", b"one", b"01", b"1.", b"NaN", b"0x1", b" 1", b"1" * 400])
def test_other_bytes_are_no_number(payload: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        Validator(read_schema(SchemaType.NUMBER, b"")).validate(payload)
    with pytest.raises(PayloadInvalid):
        codec_for(SchemaType.NUMBER, b"").decode(payload)


def test_the_layout_of_a_binary_number_is_not_guessed() -> None:
    with pytest.raises(PayloadInvalid, match="layout"):
        codec_for(SchemaType.NUMBER, b"").decode(struct.pack("<q", 5))


def test_strings_and_bytes() -> None:
    text = codec_for(SchemaType.STRING, b"string")
    assert text.decode(text.encode("šola")) == "šola"
    for wrong in (b"x", 5, "\ud800"):
        with pytest.raises(PayloadInvalid):
            text.encode(wrong)
    with pytest.raises(PayloadInvalid, match="UTF-8"):
        text.decode(b"\xff")
    raw = codec_for(SchemaType.BYTES, b"bytes")
    assert isinstance(raw, BytesCodec)
    assert raw.decode(raw.encode(bytearray(b"\0\xff"))) == b"\0\xff"
    with pytest.raises(PayloadInvalid):
        raw.encode("text")


def test_json() -> None:
    codec = codec_for(SchemaType.JSON_SCHEMA, definition(PERSON_JSON))
    value = {"name": "Ana", "tags": ["a", None, 1.5, True], "big": 2**60}
    assert codec.decode(codec.encode(value)) == value
    with pytest.raises(PayloadInvalid, match="'name' is a required"):
        codec.encode({})
    with pytest.raises(PayloadInvalid, match="as JSON"):
        codec.encode({"name": object()})
    with pytest.raises(PayloadInvalid, match="not JSON"):
        codec.decode(b"{")
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(PayloadInvalid):
        codec.encode(circle)


def test_avro() -> None:
    codec = codec_for(SchemaType.AVRO, definition(PERSON_AVRO))
    seen = datetime(2024, 5, 1, 12, tzinfo=UTC)
    assert codec.decode(codec.encode({"name": "Ana", "seen": seen})) == {
        "name": "Ana",
        "seen": seen,
        "score": 1.0,
    }
    for wrong in ({}, {"name": 5}, "Ana", None, {"name": "Ana", "score": "high"}):
        with pytest.raises(PayloadInvalid):
            codec.encode(wrong)
    with pytest.raises(PayloadInvalid):
        codec.decode(b"\x06An")


def test_an_avro_date_beyond_the_calendar_is_valid_and_cannot_be_decoded() -> None:
    schema = definition({"type": "int", "logicalType": "date"})
    payload = codec_for(SchemaType.AVRO, b"int").encode(2**31 - 1)
    Validator(read_schema(SchemaType.AVRO, schema)).validate(payload)
    with pytest.raises(PayloadInvalid, match="logical type"):
        codec_for(SchemaType.AVRO, schema).decode(payload)


def test_protobuf_takes_messages_and_dictionaries() -> None:
    codec = codec_for(SchemaType.PROTOBUF, PERSON_PROTO)
    assert isinstance(codec, ProtobufCodec)
    from_dict = codec.encode({"name": "Ana", "scores": [1, 2]})
    from_message = codec.encode(codec.message_class(name="Ana", scores=[1, 2]))
    assert from_dict == from_message
    back: Any = codec.decode(from_dict)
    assert (back.name, list(back.scores)) == ("Ana", [1, 2])
    for wrong in ({"nmae": "x"}, {"scores": "x"}, 5, codec_for(SchemaType.BYTES, b"")):
        with pytest.raises(PayloadInvalid):
            codec.encode(wrong)
    other = codec_for(SchemaType.PROTOBUF, b'syntax = "proto3"; message Animal { string name = 1; }')
    assert isinstance(other, ProtobufCodec)
    with pytest.raises(PayloadInvalid, match="a Animal is not a Person"):
        codec.encode(other.message_class(name="Rex"))
    again = codec_for(SchemaType.PROTOBUF, PERSON_PROTO.replace(b"scores = 2", b"scores = 2; bool old = 3"))
    assert isinstance(again, ProtobufCodec)
    assert codec.encode(again.message_class(name="Ana")) == codec.encode({"name": "Ana"})


# -- validating many -----------------------------------------------------------------------------------------


def test_the_first_payload_that_does_not_fit_is_named() -> None:
    validator = Validator(read_schema(SchemaType.STRING, b""))
    assert validator.validate_many([]) is None
    assert validator.validate_many([b"a", b"b"]) is None
    refusal = validator.validate_many([b"a", b"\xff", b"\xfe"])
    assert isinstance(refusal, PayloadRefusal)
    assert (refusal.index, "UTF-8" in refusal.reason) == (1, True)
    assert Validator(read_schema(SchemaType.BYTES, b"")).validate_many([b"\xff"]) is None


def test_payloads_have_a_largest_size() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_PAYLOAD_BYTES + 1

    validator: Validator = Validator(read_schema(SchemaType.STRING, b""))
    with pytest.raises(PayloadInvalid, match="the limit is"):
        validator.validate(Huge())
