"""The errors of schemas and their registry."""

from __future__ import annotations

from collections.abc import Sequence

from sava.errors import CallerError, HostError, RetryableError, cut, shown

SHOWN_CHARS = 300
"""Reasons quote what they refuse; a payload of megabytes must not become an error text of megabytes."""
SHOWN_TOPICS = 5
MAX_PROBLEM_CHARS = 4000
"""Of all problems of one comparison together."""


def shortened(text: str, limit: int = SHOWN_CHARS) -> str:
    return cut(text, limit)


class SchemaError(CallerError):
    """Base of the errors that the caller of a schema operation can mend."""


class SubjectUnknown(SchemaError):
    """Nothing was ever registered under this subject (or schema id)."""

    def __init__(self, subject: str | int) -> None:
        what = f"schema id {subject}" if isinstance(subject, int) else f"subject {shown(subject)}"
        super().__init__(f"{what} not found: no version of it is registered")
        self.subject = subject


class SubjectInvalid(SchemaError):
    """The name cannot be the name of a subject."""


class VersionUnknown(SchemaError):
    """The subject exists, but this version of it does not, or does not any more. ``version`` is None when the
    subject has no version at all."""

    def __init__(self, subject: str, version: int | None, reason: str = "") -> None:
        reason = reason or ("it has no version" if version is None else f"it has no version {version}")
        super().__init__(f"subject {shown(subject)}: {reason}")
        self.subject, self.version = subject, version


class VersionInUse(SchemaError):
    """A topic enforces the subject: without this version it would refuse messages that it accepts now."""

    def __init__(self, subject: str, version: int, topics: Sequence[str]) -> None:
        some = ", ".join(topics[:SHOWN_TOPICS]) + (" and others" if len(topics) > SHOWN_TOPICS else "")
        super().__init__(
            f"version {version} of subject {shown(subject)} cannot be deleted: topic {some} refuses messages "
            "that do not follow the subject; change its policy first (`sava schemas configure-topic --help`)"
        )
        self.subject, self.version, self.topics = subject, version, tuple(topics)


class SchemaInvalid(SchemaError):
    """The definition is not a schema of its type."""


class SchemaTooLarge(SchemaError):
    """The definition, or what comes with it, is over a limit."""


class TooManyVersions(SchemaError):
    """The subject has as many versions as it may have; delete some that no message needs."""


class SchemaIncompatible(SchemaError):
    """The new schema breaks what the subject's compatibility mode promises; ``problems`` says where."""

    def __init__(self, subject: str, problems: Sequence[str]) -> None:
        super().__init__(f"subject {shown(subject)}: {shortened('; '.join(problems), MAX_PROBLEM_CHARS)}")
        self.subject, self.problems = subject, tuple(problems)


class SubjectTypeMismatch(SchemaError):
    """The definition has another type than the subject; the type of a subject never changes."""

    def __init__(self, subject: str, expected: str, given: str) -> None:
        super().__init__(f"subject {shown(subject)} holds schemas of type {expected}, not {given}")
        self.subject, self.expected, self.given = subject, expected, given


class TypeUnknown(SchemaError):
    """The schema type does not exist."""


class ModeUnknown(SchemaError):
    """The compatibility mode does not exist."""


class PolicyUnknown(SchemaError):
    """The validation policy does not exist."""


class PayloadInvalid(SchemaError):
    """The payload is not what its schema says, or it is beyond the limits of checking."""

    def __init__(self, reason: str) -> None:
        super().__init__(shortened(reason))
        self.reason = shortened(reason)


class SchemasBusy(RetryableError):
    """Too many schemas or payloads wait for a thread that checks them."""


class CompilerBusy(RetryableError):
    """The Protobuf compiler did not finish in time."""


class CompilerMissing(HostError):
    """The Protobuf compiler cannot be run on this machine."""


class RegistryCorrupt(HostError):
    """This version of Sava cannot read a definition that was registered."""
