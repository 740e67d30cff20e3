"""Codec: how typed values become payloads and back. Whatever has these two methods will do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sava.proto import streams_pb2 as pb


class Codec(Protocol):
    """A codec may have ``schema_id`` and ``schema_version`` besides: messages then carry these numbers."""

    def encode(self, value: Any, /) -> bytes: ...

    def decode(self, payload: bytes, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class SchemaCodec:
    """One version of a registered schema."""

    subject: str
    schema_id: int
    schema_version: int
    codec: Codec

    def encode(self, value: Any, /) -> bytes:
        """Raises sava.schemas.errors.PayloadInvalid for a value that is not of the schema."""
        return self.codec.encode(value)

    def decode(self, payload: bytes, /) -> Any:
        return self.codec.decode(payload)


def codec_of(subject: str, schema: pb.SchemaResponse) -> SchemaCodec:
    """Blocks while it compiles Protobuf source."""
    # Only here: applications without schemas need not load the libraries of three schema languages.
    from sava.schemas.codecs import codec_for
    from sava.schemas.types import parse_type

    codec = codec_for(parse_type(schema.type), schema.definition)
    return SchemaCodec(subject, schema.schema_id, schema.version, codec)


def schema_of(codec: Codec | None) -> tuple[int | None, int | None]:
    return getattr(codec, "schema_id", None), getattr(codec, "schema_version", None)
