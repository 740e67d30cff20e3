"""A schema of any type: read it, check payloads with it, compare it with the versions before it.

``read_schema`` is the one way in. For Protobuf it runs a compiler in a child process unless the compiled
form is at hand, so it blocks; callers on an event loop use a thread.

A ``Validator`` is made once for a version and used for all its messages, from any thread. It raises
``PayloadInvalid`` for every payload that it does not accept, hostile ones included: depth, size and work
are bounded for every type.

``find_problems`` answers whether a schema may follow others, in the direction that the mode demands.
Backward: the new schema must read what was written with the old one. Forward: the old one must read what
will be written with the new one. Full: both. Schemas of the primitive types never change, so they always
may.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sava.schemas import avro, json_containment, protobuf
from sava.schemas.avro_payload import Malformed, compile_check
from sava.schemas.bounds import MAX_PROBLEMS, canonical, decode_definition, decode_payload
from sava.schemas.errors import PayloadInvalid, SchemaInvalid
from sava.schemas.json_schema import Budget, Document, Evaluator, NotEasy
from sava.schemas.protobuf import Descriptors, compile_definition, descriptors_of
from sava.schemas.types import CompatibilityMode, SchemaType, check_definition_size


@dataclass(frozen=True, slots=True)
class PrimitiveSchema:
    """A schema of type bytes, string or number: the type says it all, and the definition is ignored."""

    type: SchemaType

    @property
    def canonical(self) -> bytes:
        return self.type.value.encode()

    compiled = b""


@dataclass(frozen=True, slots=True)
class AvroSchema:
    root: avro.Node
    plain: Any
    """The canonical form as lists and dictionaries."""
    type = SchemaType.AVRO
    compiled = b""

    @property
    def canonical(self) -> bytes:
        """Keys keep their order: it is part of Avro's canonical form."""
        return canonical(self.plain, sort_keys=False)


@dataclass(frozen=True, slots=True)
class JsonSchema:
    document: Document
    type = SchemaType.JSON_SCHEMA
    compiled = b""

    @property
    def canonical(self) -> bytes:
        return canonical(self.document.root)


@dataclass(frozen=True, slots=True)
class ProtobufSchema:
    compiled: bytes
    """The canonical ``FileDescriptorSet``; the registry keeps it with the version, so it is compiled once."""
    type = SchemaType.PROTOBUF

    @property
    def canonical(self) -> bytes:
        return self.compiled

    @property
    def descriptors(self) -> Descriptors:
        return descriptors_of(self.compiled)


Schema = PrimitiveSchema | AvroSchema | JsonSchema | ProtobufSchema


def read_schema(kind: SchemaType, definition: bytes, compiled: bytes = b"") -> Schema:
    """Reads a definition; raises SchemaInvalid, SchemaTooLarge. ``compiled`` is the compiled form that an
    earlier reading of this definition gave."""
    check_definition_size(definition)
    match kind:
        case SchemaType.AVRO:
            root = avro.read(_avro_json(definition))
            return AvroSchema(root, avro.canonical(root))
        case SchemaType.JSON_SCHEMA:
            return JsonSchema(Document(_json(definition)))
        case SchemaType.PROTOBUF:
            schema = ProtobufSchema(compiled or compile_definition(definition))
            _ = schema.descriptors
            return schema
        case _:
            return PrimitiveSchema(kind)


def fingerprint(schema: Schema) -> str:
    return f"sha256:{hashlib.sha256(schema.canonical).hexdigest()}"


def _json(definition: bytes) -> Any:
    try:
        return decode_definition(definition)
    except ValueError as error:
        raise SchemaInvalid(f"the definition is not JSON: {error}") from None


def _avro_json(definition: bytes) -> Any:
    """A primitive schema may come as its bare name (``string``), which is not JSON."""
    name = definition.strip().decode(errors="replace") if len(definition) < 16 else ""
    return name if name in avro.PRIMITIVES else _json(definition)


MAX_PAYLOAD_BYTES: Final = 64 << 20
"""Larger payloads are invalid. Brokers have a lower limit of their own for messages."""
MAX_COMPARING_ALL_S: Final = 20.0
"""Of processor time, for all versions of a subject; there may be thousands."""
EASY_BYTES: Final = 32 << 10
"""Of payloads that are checked on an event loop: the checks take up to a microsecond for a byte."""
NUMBER_TEXT: Final = re.compile(rb"-?(?:0|[1-9][0-9]{0,308})(?:\.[0-9]{1,308})?(?:[eE][+-]?[0-9]{1,4})?")
"""A number as JSON writes it."""
BINARY_NUMBER_BYTES: Final = (4, 8)
"""Danube's broker takes this many bytes for a number: a 32 or 64 bit integer or floating point number."""


@dataclass(frozen=True, slots=True)
class PayloadRefusal:
    """The first payload of several that does not fit."""

    index: int
    reason: str


class Validator:
    def __init__(self, schema: Schema) -> None:
        self.type = schema.type
        self._evaluator = Evaluator(schema.document) if isinstance(schema, JsonSchema) else None
        self._check = _check_of(schema, self._evaluator)

    def validate(self, payload: bytes) -> None:
        """Raises PayloadInvalid."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise PayloadInvalid(f"a payload of {len(payload)} bytes; the limit is {MAX_PAYLOAD_BYTES}")
        self._check(payload)

    def validate_many(self, payloads: Sequence[bytes]) -> PayloadRefusal | None:
        """None when all fit. A batch of raw bytes costs nothing."""
        if self.type is SchemaType.BYTES:
            return None
        for index, payload in enumerate(payloads):
            try:
                self.validate(payload)
            except PayloadInvalid as error:
                return PayloadRefusal(index, error.reason)
        return None

    def validate_easy(self, payloads: Sequence[bytes]) -> PayloadRefusal | None:
        """The same on an event loop. Raises NotEasy, without an answer, when it takes more than some
        milliseconds: what a payload costs is up to its schema, which a client wrote."""
        if self.type is SchemaType.BYTES:
            return None
        if sum(map(len, payloads)) > EASY_BYTES:
            raise NotEasy
        budget = Budget.easy()
        for index, payload in enumerate(payloads):
            try:
                if self._evaluator is None:
                    self._check(payload)
                else:
                    _check_json(self._evaluator, payload, budget)
            except PayloadInvalid as error:
                return PayloadRefusal(index, error.reason)
        return None


def _check_of(schema: Schema, evaluator: Evaluator | None) -> Callable[[bytes], object]:
    match schema:
        case AvroSchema():
            return _avro_check(schema)
        case JsonSchema(document):
            return partial(_check_json, evaluator or Evaluator(document))
        case ProtobufSchema():
            return schema.descriptors.parse
        case PrimitiveSchema(SchemaType.STRING):
            return _check_string
        case PrimitiveSchema(SchemaType.NUMBER):
            return _check_number
        case PrimitiveSchema():
            return _accept


def _avro_check(schema: AvroSchema) -> Callable[[bytes], None]:
    check = compile_check(schema.root)

    def check_avro(payload: bytes) -> None:
        try:
            check(payload)
        except Malformed as error:
            raise PayloadInvalid(f"not Avro of this schema: {error}") from None
        except RecursionError:
            raise PayloadInvalid("nested too deeply") from None

    return check_avro


def _check_json(evaluator: Evaluator, payload: bytes, budget: Budget | None = None) -> None:
    try:
        value = decode_payload(payload)
    except ValueError as error:
        raise PayloadInvalid(f"not JSON: {error}") from None
    evaluator.check(value, budget)


def _accept(payload: bytes) -> None:
    """Every payload is valid."""


def _check_string(payload: bytes) -> None:
    try:
        payload.decode()
    except UnicodeDecodeError as error:
        raise PayloadInvalid(f"not UTF-8: {error.reason} at byte {error.start}") from None


def _check_number(payload: bytes) -> None:
    if len(payload) not in BINARY_NUMBER_BYTES and not NUMBER_TEXT.fullmatch(payload):
        raise PayloadInvalid("neither the text of a number nor 4 or 8 bytes of one")


def find_problems(new: Schema, older: Iterable[tuple[int, Schema]], mode: CompatibilityMode) -> list[str]:
    """The problems of ``new`` beside the versions before it. ``older`` has the versions that count, with
    their numbers; under a mode that is not transitive, only the latest one."""
    problems: list[str] = []
    until = time.thread_time() + MAX_COMPARING_ALL_S
    for version, old in older:
        if time.thread_time() > until:
            # Unknown is not compatible.
            problems.append(f"comparing with version {version} and others would take too long")
            break
        if mode.is_backward:
            problems += [
                f"version {version}, backward: {each}" for each in compare(old, new, new_reads_old=True)
            ]
        if mode.is_forward:
            problems += [
                f"version {version}, forward: {each}" for each in compare(old, new, new_reads_old=False)
            ]
        if len(problems) >= MAX_PROBLEMS:
            break
    return problems[:MAX_PROBLEMS]


def compare(old: Schema, new: Schema, *, new_reads_old: bool) -> list[str]:
    """The problems of one direction between two schemas."""
    if old.type is not new.type:
        return [f"the type was {old.type} and is now {new.type}"]
    match old, new:
        case AvroSchema(), AvroSchema():
            reader, writer = (new, old) if new_reads_old else (old, new)
            return avro.find_problems(reader.root, writer.root)
        case JsonSchema(), JsonSchema():
            read, written = (new, old) if new_reads_old else (old, new)
            return json_containment.find_problems(read.document, written.document)
        case ProtobufSchema(), ProtobufSchema():
            return protobuf.find_problems(old.descriptors, new.descriptors, new_reads_old=new_reads_old)
        case _:
            return []
