"""What a topic says about its schema, and how a producer names the version that it writes.

``TopicSchema`` is the record under ``/topics/{namespace}/{topic}/schema``. The broker writes it; it is here
so that everybody reads the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sava.schemas.errors import VersionUnknown
from sava.schemas.types import Policy


class TopicSchema(msgspec.Struct, frozen=True, kw_only=True):
    subject: str
    policy: Policy = Policy.WARN
    """What happens to a message that names another subject or an unknown version, or whose payload is
    invalid."""
    validate_payload: bool = False
    """Whether the broker looks into payloads at all."""


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
