"""Retention: what a topic may forget, and the deletion of what nobody needs.

Whole segments go, oldest first: descriptors in the catalog, then objects. A crash in between leaves objects
that nothing names, which ``orphans`` finds; the other order would leave a descriptor without its object,
which is a hole.

A segment's age counts from when it was stored, by the later of two clocks: the broker's that stored it and
the object store's. It is over by the earlier of the same two (``expiry_clock``). Publish times are the
producers' to choose: one message from a machine whose clock is a year ahead would keep its segment for a
year, and a backfill of old data would be deleted as soon as it arrived. So a message lives at least as long
as the policy says, and at most as much longer as its segment was open, or holds an age of (``housekeeping``).

Only what the catalog has is ever dropped: the tail of an open topic is in its owner's journal and no concern
of retention.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sava.storage.catalog import Catalog
from sava.storage.keys import objects_prefix
from sava.storage.objectstore import ObjectStore
from sava.storage.types import Segment


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """None: no limit. With both, a segment goes as soon as one of them lets it."""

    max_age_ms: int | None = None
    max_bytes: int | None = None
    """Stored bytes that are kept at least: a segment goes when those after it have this much without it."""

    def __post_init__(self) -> None:
        if min(self.max_age_ms or 0, self.max_bytes or 0) < 0:
            raise ValueError("retention limits must not be negative")


def expired_end(segments: Sequence[Segment], policy: RetentionPolicy, now_ms: int) -> int:
    """The offset before which ``policy`` lets everything go; the first segment's start when nothing may.
    ``segments`` are all of the topic, in order."""
    kept_bytes = sum(segment.size for segment in segments)
    end = segments[0].start if segments else 0
    for segment in segments:
        kept_bytes -= segment.size
        is_old = policy.max_age_ms is not None and segment.created_ms + policy.max_age_ms <= now_ms
        is_surplus = policy.max_bytes is not None and kept_bytes >= policy.max_bytes
        if not (is_old or is_surplus):
            # Also when a later one is old (its writer's clock went back): a hole is worse than a segment too
            # many.
            break
        end = segment.end
    return end


async def enforce(
    catalog: Catalog,
    store: ObjectStore,
    policy: RetentionPolicy,
    *,
    epoch: int,
    now_ms: int,
    keep_from: int | None = None,
) -> list[Segment]:
    """Drop what ``policy`` lets go, as the owner of ``epoch``; returns what went. ``keep_from``: nothing from
    this offset on goes, whatever the policy says (the slowest subscription's cursor, where unread messages
    must stay).

    Raises Fenced: another broker owns the topic and its retention. A failure after the catalog's part leaves
    orphans."""
    before = expired_end(await catalog.segments(), policy, now_ms)
    if keep_from is not None:
        before = min(before, keep_from)
    dropped = await catalog.drop(epoch=epoch, before=before)
    await store.delete([segment.key for segment in dropped])
    return dropped


async def delete_topic(catalog: Catalog, store: ObjectStore) -> int:
    """Remove everything that storage has of a deleted topic; returns how many objects went. Can be repeated.

    All objects under the topic's id go, those included that no descriptor names: without a state record
    nothing can be registered under this id any more."""
    await catalog.delete_all()
    keys = [info.key async for info in store.list(objects_prefix(catalog.topic))]
    await store.delete(keys)
    return len(keys)
