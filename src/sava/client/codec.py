"""Codec: how typed values become payloads and back. Whatever has these two methods will do."""

from __future__ import annotations

from typing import Any, Protocol


class Codec(Protocol):
    """A codec may have ``schema_id`` and ``schema_version`` besides: messages then carry these numbers."""

    def encode(self, value: Any, /) -> bytes: ...

    def decode(self, payload: bytes, /) -> Any: ...


def schema_of(codec: Codec | None) -> tuple[int | None, int | None]:
    return getattr(codec, "schema_id", None), getattr(codec, "schema_version", None)
