"""Message: one message as application code sees it.

Messages exist at the edges only. Between them (wire, journal, cache, dispatch) there are batches, and a batch
makes its messages when a caller asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec


class Origin(NamedTuple):
    """Where a replicated message was first published: the cluster, and its offset in the topic there."""

    cluster: str
    offset: int


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message to publish, or one that was read.

    ``publish_time`` is in microseconds since 1970-01-01 UTC. No attributes is the empty mapping.
    ``producer`` is a name for people to read and has no part in deduplication. ``offset`` and ``topic`` are
    None until a broker has assigned them; an encoder ignores them.

    ``gc=False``: a message cannot be part of a reference cycle, and a reader makes millions of them.
    """

    payload: bytes
    key: str | None = None
    attributes: Mapping[str, str] = msgspec.field(default_factory=dict)
    publish_time: int = 0
    schema_id: int | None = None
    schema_version: int | None = None
    origin: Origin | None = None
    producer: str | None = None
    offset: int | None = None
    topic: str | None = None
