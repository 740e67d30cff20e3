"""Codecs: values of a program to payloads, and back.

| type | value | payload |
|---|---|---|
| bytes | ``bytes`` | itself |
| string | ``str`` | UTF-8 |
| number | ``int``, ``float`` | the text of a JSON number |
| json_schema | what JSON has: ``dict``, ``list``, ``str``, numbers, ``bool``, ``None`` | JSON |
| avro | what ``fastavro`` takes and gives | Avro binary, without a header |
| protobuf | a message, or a ``dict`` in Protobuf's JSON mapping | Protobuf binary |

Encoding checks what it has made with the validator of the schema, so that a producer learns of a wrong value
where it was made. Decoding checks first and reads afterwards. Both raise ``PayloadInvalid``.
"""

from __future__ import annotations

import io
import struct
from typing import Any

import fastavro
import msgspec
from fastavro.types import Schema as FastavroSchema
from google.protobuf import json_format
from google.protobuf.message import EncodeError, Message

from sava.schemas.bounds import decode_payload
from sava.schemas.definition import (
    BINARY_NUMBER_BYTES,
    NUMBER_TEXT,
    AvroSchema,
    JsonSchema,
    ProtobufSchema,
    Validator,
    read_schema,
)
from sava.schemas.errors import PayloadInvalid
from sava.schemas.types import SchemaType


def codec_for(kind: SchemaType, definition: bytes) -> SchemaCodec:
    """The codec of a definition. Raises SchemaInvalid, SchemaTooLarge. Compiling Protobuf source blocks and
    needs grpcio-tools."""
    schema = read_schema(kind, definition)
    match schema:
        case AvroSchema():
            return AvroCodec(schema)
        case JsonSchema():
            return JsonCodec(schema)
        case ProtobufSchema():
            return ProtobufCodec(schema)
    match schema.type:
        case SchemaType.STRING:
            return StringCodec()
        case SchemaType.NUMBER:
            return NumberCodec()
        case _:
            return BytesCodec()


class BytesCodec:
    def encode(self, value: Any) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise PayloadInvalid(f"{type(value).__name__} is not bytes")
        return bytes(value)

    def decode(self, payload: bytes) -> bytes:
        return payload


class StringCodec:
    def encode(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise PayloadInvalid(f"{type(value).__name__} is not str")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise PayloadInvalid(f"not valid Unicode: {error.reason}") from None

    def decode(self, payload: bytes) -> str:
        try:
            return payload.decode()
        except UnicodeDecodeError as error:
            raise PayloadInvalid(f"not UTF-8: {error.reason} at byte {error.start}") from None


class NumberCodec:
    """Written as text, which says whether it is an integer or a fraction. Four or eight bytes of a binary
    number are valid (programs written for Danube send them), but nothing says whether they are an integer or
    a fraction, nor in which order: they are not guessed at."""

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PayloadInvalid(f"{type(value).__name__} is not a number")
        try:
            text = repr(value).encode()
        except ValueError as error:
            raise PayloadInvalid(str(error)) from None
        if not NUMBER_TEXT.fullmatch(text):
            raise PayloadInvalid("not finite, or of too many digits")
        return text

    def decode(self, payload: bytes) -> int | float:
        if NUMBER_TEXT.fullmatch(payload):
            return float(payload) if any(mark in payload for mark in b".eE") else int(payload)
        if len(payload) in BINARY_NUMBER_BYTES:
            raise PayloadInvalid(f"{len(payload)} bytes of a binary number, whose layout is not known")
        raise PayloadInvalid("not the text of a number")


class JsonCodec:
    def __init__(self, schema: JsonSchema) -> None:
        self._validator = Validator(schema)

    def encode(self, value: Any) -> bytes:
        try:
            payload = msgspec.json.encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise PayloadInvalid(f"cannot be written as JSON: {error}") from None
        self._validator.validate(payload)
        return payload

    def decode(self, payload: bytes) -> Any:
        self._validator.validate(payload)
        return decode_payload(payload)


class AvroCodec:
    def __init__(self, schema: AvroSchema) -> None:
        self._validator = Validator(schema)
        self._schema: FastavroSchema = fastavro.parse_schema(schema.plain)

    def encode(self, value: Any) -> bytes:
        buffer = io.BytesIO()
        try:
            fastavro.schemaless_writer(buffer, self._schema, value)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, struct.error) as error:
            raise PayloadInvalid(f"not a value of this schema: {error}") from None
        except RecursionError:
            raise PayloadInvalid("nested too deeply") from None
        payload = buffer.getvalue()
        self._validator.validate(payload)
        return payload

    def decode(self, payload: bytes) -> Any:
        """What passes the check is what the decoder can read without harm; what is left to fail is a logical
        type, like a date beyond the calendar."""
        self._validator.validate(payload)
        try:
            return fastavro.schemaless_reader(io.BytesIO(payload), self._schema, None)
        except (ValueError, ArithmeticError, EOFError, LookupError, RecursionError) as error:
            raise PayloadInvalid(f"a logical type cannot be read: {error}") from None


class ProtobufCodec:
    """``message_class`` makes messages to be filled in; a message of generated code is taken if it has the
    same full name."""

    def __init__(self, schema: ProtobufSchema) -> None:
        self._descriptors = schema.descriptors
        self.message_class = schema.descriptors.message_class
        self.decode = schema.descriptors.parse

    def encode(self, value: Any) -> bytes:
        message = self._as_message(value)
        try:
            payload = message.SerializeToString()
        except (EncodeError, ValueError) as error:
            raise PayloadInvalid(f"cannot be written: {error}") from None
        if not isinstance(message, self.message_class):
            self._descriptors.parse(payload)
        return payload

    def _as_message(self, value: Any) -> Message:
        name = self._descriptors.payload.full_name
        if isinstance(value, Message):
            if value.DESCRIPTOR.full_name != name:
                raise PayloadInvalid(f"a {value.DESCRIPTOR.full_name} is not a {name}")
            return value
        if not isinstance(value, dict):
            raise PayloadInvalid(f"{type(value).__name__} is neither a message nor a dict")
        try:
            return json_format.ParseDict(value, self.message_class(), descriptor_pool=self._descriptors.pool)
        except (json_format.ParseError, TypeError, ValueError, RecursionError) as error:
            raise PayloadInvalid(f"not a {name}: {error}") from None


SchemaCodec = BytesCodec | StringCodec | NumberCodec | JsonCodec | AvroCodec | ProtobufCodec
