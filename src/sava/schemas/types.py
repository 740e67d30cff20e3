"""The vocabulary of the registry: schema types, compatibility modes, validation policies, their limits, and
how a topic and a producer name a schema.

Input is case-insensitive and knows the aliases that Danube's broker knows; Sava stores and shows the one
lower-case name. ``TopicSchema`` is the record under ``/topics/{namespace}/{topic}/schema``. The broker
writes it; it is defined here so that the registry, the services and replication read the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from sava.schemas.errors import (
    ModeUnknown,
    PolicyUnknown,
    SchemaTooLarge,
    SubjectInvalid,
    TypeUnknown,
    VersionUnknown,
)

MAX_DEFINITION_BYTES: Final = 256 << 10
MAX_SUBJECT_BYTES: Final = 255
MAX_DESCRIPTION_BYTES: Final = 4096
MAX_CREATED_BY_BYTES: Final = 256
MAX_TAGS: Final = 32
MAX_TAG_BYTES: Final = 128


class SchemaType(StrEnum):
    BYTES = "bytes"
    STRING = "string"
    NUMBER = "number"
    JSON_SCHEMA = "json_schema"
    AVRO = "avro"
    PROTOBUF = "protobuf"


_TYPE_ALIASES: Final = {
    "json": SchemaType.JSON_SCHEMA,
    "jsonschema": SchemaType.JSON_SCHEMA,
    "proto": SchemaType.PROTOBUF,
    "int": SchemaType.NUMBER,
    "int64": SchemaType.NUMBER,
    "float": SchemaType.NUMBER,
    "double": SchemaType.NUMBER,
}


class CompatibilityMode(StrEnum):
    """What a new version must keep of the versions before it. 'Backward': a consumer with the new schema can
    read what was written with the old one. 'Forward': a consumer with the old one can read what is written
    with the new one."""

    NONE = "none"
    BACKWARD = "backward"
    FORWARD = "forward"
    FULL = "full"
    BACKWARD_TRANSITIVE = "backward_transitive"
    FORWARD_TRANSITIVE = "forward_transitive"
    FULL_TRANSITIVE = "full_transitive"

    @property
    def is_backward(self) -> bool:
        return self in (
            CompatibilityMode.BACKWARD,
            CompatibilityMode.FULL,
            CompatibilityMode.BACKWARD_TRANSITIVE,
            CompatibilityMode.FULL_TRANSITIVE,
        )

    @property
    def is_forward(self) -> bool:
        return self in (
            CompatibilityMode.FORWARD,
            CompatibilityMode.FULL,
            CompatibilityMode.FORWARD_TRANSITIVE,
            CompatibilityMode.FULL_TRANSITIVE,
        )

    @property
    def is_transitive(self) -> bool:
        """All versions count, not only the latest."""
        return self.value.endswith("_transitive")


DEFAULT_MODE: Final = CompatibilityMode.BACKWARD


class Policy(StrEnum):
    """What a broker does with a message that does not fit its topic's schema."""

    NONE = "none"
    WARN = "warn"
    ENFORCE = "enforce"


def parse_type(text: str) -> SchemaType:
    name = text.strip().lower()
    if name in _TYPE_ALIASES:
        return _TYPE_ALIASES[name]
    try:
        return SchemaType(name)
    except ValueError:
        known = ", ".join(SchemaType)
        raise TypeUnknown(f"{text[:80]!a} is not a schema type; known are {known}") from None


def parse_mode(text: str) -> CompatibilityMode:
    try:
        return CompatibilityMode(text.strip().lower())
    except ValueError:
        raise ModeUnknown(
            f"{text[:80]!a} is not a compatibility mode; known are {', '.join(CompatibilityMode)}"
        ) from None


def parse_policy(text: str) -> Policy:
    try:
        return Policy(text.strip().lower())
    except ValueError:
        raise PolicyUnknown(
            f"{text[:80]!a} is not a validation policy; known are {', '.join(Policy)}"
        ) from None


def check_subject(subject: str) -> str:
    """Any printable name in ASCII, so that names of Danube's clients work; raises SubjectInvalid."""
    if not subject or not subject.isascii() or not subject.isprintable() or subject != subject.strip():
        raise SubjectInvalid(
            f"{subject[:80]!a} cannot be a subject: it must be printable ASCII, without spaces around it"
        )
    check_text("subject", subject, MAX_SUBJECT_BYTES)
    return subject


def check_definition_size(definition: bytes) -> None:
    if len(definition) > MAX_DEFINITION_BYTES:
        raise SchemaTooLarge(f"a definition of {len(definition)} bytes; the limit is {MAX_DEFINITION_BYTES}")


def check_text(what: str, text: str, limit: int) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise SubjectInvalid(f"the {what} is not valid Unicode") from None
    if size > limit:
        raise SchemaTooLarge(f"the {what} has {size} bytes; the limit is {limit}")
    return text


def check_tags(tags: tuple[str, ...]) -> tuple[str, ...]:
    if len(tags) > MAX_TAGS:
        raise SchemaTooLarge(f"{len(tags)} tags; the limit is {MAX_TAGS}")
    return tuple(check_text("tag", tag, MAX_TAG_BYTES) for tag in tags)


class TopicSchema(msgspec.Struct, frozen=True, kw_only=True):
    subject: str
    policy: Policy = Policy.WARN
    """What happens to a message that names another subject or an unknown version, or whose payload is
    invalid."""
    validate_payload: bool = False
    """Whether the broker validates payloads."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A subject, and which version of it: exactly ``pinned_version``, or the latest if it is at least
    ``min_version``, or the latest."""

    subject: str
    pinned_version: int | None = None
    min_version: int | None = None

    def __post_init__(self) -> None:
        if self.pinned_version is not None and self.min_version is not None:
            raise ValueError("a reference either pins a version or names the least one")


@dataclass(frozen=True, slots=True)
class Resolved:
    schema_id: int
    version: int


def choose_version(reference: Reference, versions: list[int]) -> int:
    """The version that a reference means, of those that exist; raises VersionUnknown."""
    if not versions:
        raise VersionUnknown(reference.subject, None)
    latest = max(versions)
    if reference.pinned_version is not None:
        if reference.pinned_version not in versions:
            raise VersionUnknown(reference.subject, reference.pinned_version)
        return reference.pinned_version
    if reference.min_version is not None and latest < reference.min_version:
        raise VersionUnknown(
            reference.subject,
            reference.min_version,
            f"the latest version is {latest}, and at least {reference.min_version} is asked for",
        )
    return latest
