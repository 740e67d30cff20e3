"""Payload validation: is this payload what its schema says?

A ``Validator`` is made once for a version and used for all its messages, from any thread. It raises
``PayloadInvalid`` for whatever it does not accept, hostile payloads included: depth, size and work are
bounded for every type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sava.schemas.avro.payload import Malformed, compile_check
from sava.schemas.bounded_json import decode_payload
from sava.schemas.definition import (
    AvroSchema,
    JsonSchema,
    PrimitiveSchema,
    ProtobufSchema,
    Schema,
)
from sava.schemas.errors import PayloadInvalid
from sava.schemas.json_schema.evaluation import Evaluator
from sava.schemas.types import SchemaType

MAX_PAYLOAD_BYTES: Final = 64 << 20
"""Nothing larger is looked at. Brokers have a lower limit of their own for messages."""
NUMBER_TEXT: Final = re.compile(rb"-?(?:0|[1-9][0-9]{0,308})(?:\.[0-9]{1,308})?(?:[eE][+-]?[0-9]{1,4})?")
"""A number as JSON writes it."""
BINARY_NUMBER_BYTES: Final = (4, 8)
"""What Danube's broker takes for a number: the bytes of a 32 or 64 bit integer or floating point number."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The first payload of several that does not fit."""

    index: int
    reason: str


class Validator:
    def __init__(self, schema: Schema) -> None:
        self.type = schema.type
        self._check = _check_of(schema)

    def validate(self, payload: bytes) -> None:
        """Raises PayloadInvalid."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise PayloadInvalid(f"a payload of {len(payload)} bytes; the limit is {MAX_PAYLOAD_BYTES}")
        self._check(payload)

    def validate_many(self, payloads: Sequence[bytes]) -> Refusal | None:
        """None when all fit. A batch of raw bytes costs nothing."""
        if self.type is SchemaType.BYTES:
            return None
        for index, payload in enumerate(payloads):
            try:
                self.validate(payload)
            except PayloadInvalid as error:
                return Refusal(index, error.reason)
        return None


def _check_of(schema: Schema) -> Callable[[bytes], object]:
    match schema:
        case AvroSchema():
            return _avro(schema)
        case JsonSchema():
            return _json(schema)
        case ProtobufSchema():
            return schema.descriptors.parse
        case PrimitiveSchema(SchemaType.STRING):
            return _check_string
        case PrimitiveSchema(SchemaType.NUMBER):
            return _check_number
        case PrimitiveSchema():
            return _accept


def _avro(schema: AvroSchema) -> Callable[[bytes], None]:
    check = compile_check(schema.root)

    def check_avro(payload: bytes) -> None:
        try:
            check(payload)
        except Malformed as error:
            raise PayloadInvalid(f"not Avro of this schema: {error}") from None
        except RecursionError:
            raise PayloadInvalid("nested too deeply") from None

    return check_avro


def _json(schema: JsonSchema) -> Callable[[bytes], None]:
    evaluator = Evaluator(schema.document)

    def check_json(payload: bytes) -> None:
        try:
            value = decode_payload(payload)
        except ValueError as error:
            raise PayloadInvalid(f"not JSON: {error}") from None
        evaluator.check(value)

    return check_json


def _accept(payload: bytes) -> None:
    """Bytes are bytes."""


def _check_string(payload: bytes) -> None:
    try:
        payload.decode()
    except UnicodeDecodeError as error:
        raise PayloadInvalid(f"not UTF-8: {error.reason} at byte {error.start}") from None


def _check_number(payload: bytes) -> None:
    if len(payload) not in BINARY_NUMBER_BYTES and not NUMBER_TEXT.fullmatch(payload):
        raise PayloadInvalid("neither the text of a number nor 4 or 8 bytes of one")
