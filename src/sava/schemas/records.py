"""The records of the registry: what it keeps in the metadata store, under which keys, and what it answers.

    /schemas/next_id                               the counter of schema ids
    /schemas/ids/{schema id}                       the subject, as text
    /schemas/subjects/{subject}                    SubjectRecord
    /schemas/versions/{subject}/{version}          VersionRecord: small, so that a list of versions is cheap
    /schemas/definitions/{subject}/{version}       DefinitionRecord: up to some hundred KiB each

One key for each version keeps every value far below the store's limit, however many versions a subject
has. Subjects are quoted as in URLs: whatever is in a name, it is one segment of a key. Versions have ten
digits, so that the order of keys is the order of versions. Values are JSON, readable by an operator;
definitions are in base64 there, since they may be any bytes.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, unquote

import msgspec

from sava.schemas.types import CompatibilityMode, SchemaType

ID_COUNTER: Final = "/schemas/next_id"
SUBJECTS: Final = "/schemas/subjects/"


class SubjectRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A subject. Every change of the subject writes it, so one compare-and-swap on it covers all of the
    subject."""

    schema_id: int
    type: SchemaType
    mode: CompatibilityMode
    next_version: int
    """Only grows: the number of a deleted version is never given to another schema."""
    latest: int
    """The highest version that exists; 0 when all are deleted."""
    count: int
    tags: tuple[str, ...] = ()
    """The tags of the latest version."""


class VersionRecord(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    fingerprint: str
    created_ms: int
    created_by: str
    description: str
    tags: tuple[str, ...]


class DefinitionRecord(msgspec.Struct, frozen=True, kw_only=True):
    definition: bytes
    compiled: bytes = b""


def id_key(schema_id: int) -> str:
    return f"/schemas/ids/{schema_id}"


def subject_key(subject: str) -> str:
    return f"{SUBJECTS}{quote(subject, safe='')}"


def subject_of(key: str) -> str:
    return unquote(key.removeprefix(SUBJECTS))


def versions_prefix(subject: str) -> str:
    return f"/schemas/versions/{quote(subject, safe='')}/"


def version_key(subject: str, version: int) -> str:
    return f"{versions_prefix(subject)}{version:010}"


def definitions_prefix(subject: str) -> str:
    return f"/schemas/definitions/{quote(subject, safe='')}/"


def definition_key(subject: str, version: int) -> str:
    return f"{definitions_prefix(subject)}{version:010}"


class RegisteredVersion(msgspec.Struct, frozen=True):
    schema_id: int
    version: int
    is_new_version: bool
    fingerprint: str


class SchemaVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version with its definition, exactly as it was registered."""

    schema_id: int
    subject: str
    type: SchemaType
    mode: CompatibilityMode
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
    """A subject as the registry's callers see it. ``latest`` is 0 when all versions are deleted."""

    subject: str
    schema_id: int
    type: SchemaType
    mode: CompatibilityMode
    latest: int
    versions: int
    tags: tuple[str, ...]
