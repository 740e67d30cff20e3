"""Names: how users write topics, and how a partition is called.

A topic is ``/{namespace}/{topic}``. The partitions of a partitioned topic are topics of their own, called
``{topic}-part-{n}`` as Danube's clients expect. A name is parsed into its parts once, at the door, and
compared as a whole from then on: matching by prefix or substring would take ``/default/orders`` for a part of
``/default/order``.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from sava.errors import CallerError, shown
from sava.storage.keys import SLOT_PREFIX, is_replication_slot
from sava.storage.types import split_partition

MAX_NAME_BYTES: Final = 200
"""Leaves room for the suffix of a partition within what storage accepts."""

_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""ASCII only: permissions are granted by name, and letters of other scripts look like these. A name that
begins with ``-`` is an option to a command."""


class InvalidName(CallerError):
    """A name that cannot be one; says which and why."""


class TopicName(NamedTuple):
    namespace: str
    topic: str

    @classmethod
    def parse(cls, text: str) -> TopicName:
        """Raises InvalidName unless the text is ``/{namespace}/{topic}``."""
        parts = text.split("/", 3)
        if len(parts) != 3 or parts[0]:
            raise InvalidName(
                f"topic {shown(text)}: a topic is written /namespace/topic, such as /default/orders"
            )
        return cls(check_name(parts[1], "namespace"), check_name(parts[2], "topic"))

    def __str__(self) -> str:
        return f"/{self.namespace}/{self.topic}"

    def partition(self, index: int) -> TopicName:
        return TopicName(self.namespace, f"{self.topic}-part-{index}")

    @property
    def partition_of(self) -> tuple[TopicName, int] | None:
        """The partitioned topic and the index, if the name is that of a partition."""
        found = split_partition(self.topic)
        return (TopicName(self.namespace, found[0]), found[1]) if found else None

    @property
    def head(self) -> TopicName:
        """The topic that users know: the partitioned one if the name is that of a partition."""
        part = self.partition_of
        return part[0] if part is not None else self


def check_name(name: str, what: str) -> str:
    """The name itself. Raises InvalidName; ``what`` says what it was to be."""
    if len(name) > MAX_NAME_BYTES:
        raise InvalidName(f"{what} name {name[:20]!a}… is longer than {MAX_NAME_BYTES} bytes")
    if not _PART.fullmatch(name):
        raise InvalidName(
            f"{what} name {name!a}: ASCII letters, digits, '_', '-' and '.' can be used, and it begins with "
            "one of the first three"
        )
    return name


def check_unreserved(subscription: str) -> str:
    """The name itself. Raises InvalidName for one that is a link's."""
    if is_replication_slot(subscription):
        raise InvalidName(
            f"subscription name {shown(subscription)}: names that begin with {SLOT_PREFIX} are for the links "
            "of replication, which keep messages until other clusters have them; they come and go with "
            "replication policies (`sava replication`)"
        )
    return subscription
