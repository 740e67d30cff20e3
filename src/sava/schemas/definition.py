"""A schema of any type, read and checked: what the other modules work with.

``read_schema`` is the one way in. For Protobuf it runs a compiler in a child process unless the compiled form
is at hand, so it blocks; callers on an event loop use a thread.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from sava.schemas.avro import model as avro
from sava.schemas.bounded_json import canonical, decode_definition
from sava.schemas.errors import SchemaInvalid
from sava.schemas.json_schema.document import Document
from sava.schemas.protobuf.compiler import compile_definition
from sava.schemas.protobuf.descriptors import Descriptors, descriptors_of
from sava.schemas.types import SchemaType, check_definition_size


@dataclass(frozen=True, slots=True)
class PrimitiveSchema:
    """bytes, string and number: the type says it all, the definition is not looked at."""

    type: SchemaType

    @property
    def canonical(self) -> bytes:
        return self.type.value.encode()

    compiled = b""


@dataclass(frozen=True, slots=True)
class AvroSchema:
    root: avro.Node
    plain: Any
    """Canonical, as lists and dictionaries."""
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
    """Canonical ``FileDescriptorSet``; kept with the version so that nobody compiles it again."""
    type = SchemaType.PROTOBUF

    @property
    def canonical(self) -> bytes:
        return self.compiled

    @property
    def descriptors(self) -> Descriptors:
        return descriptors_of(self.compiled)


Schema = PrimitiveSchema | AvroSchema | JsonSchema | ProtobufSchema


def read_schema(kind: SchemaType, definition: bytes, compiled: bytes = b"") -> Schema:
    """Raises SchemaInvalid, SchemaTooLarge. ``compiled``: of this definition, as an earlier reading gave
    it."""
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
