"""What the registry answers: subjects and versions as its callers see them."""

from __future__ import annotations

import msgspec

from sava.schemas.types import Mode, SchemaType


class Registered(msgspec.Struct, frozen=True):
    schema_id: int
    version: int
    is_new_version: bool
    fingerprint: str


class SchemaVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version with all that is known about it. ``definition`` is exactly what was registered."""

    schema_id: int
    subject: str
    type: SchemaType
    mode: Mode
    version: int
    fingerprint: str
    created_ms: int
    created_by: str
    description: str
    tags: tuple[str, ...]
    definition: bytes
    compiled: bytes = b""


class VersionInfo(msgspec.Struct, frozen=True, kw_only=True):
    schema_id: int
    version: int
    fingerprint: str
    created_ms: int
    created_by: str
    description: str
    tags: tuple[str, ...]


class SubjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``latest`` is 0 when all versions are deleted."""

    subject: str
    schema_id: int
    type: SchemaType
    mode: Mode
    latest: int
    versions: int
    tags: tuple[str, ...]
