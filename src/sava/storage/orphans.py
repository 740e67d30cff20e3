"""Orphans: objects that nothing names, and the proof that nothing ever will.

A crash between upload and registration, or between the dropping of a descriptor and the deletion of its
object, leaves an object that costs money and, worse, shows rows twice to whoever reads the topic's directory
with a glob. They are found by comparing the listing with the catalog. The danger is on the other side:

    broker   uploads 100..200, and stalls before it registers it
    sweep    lists it; the catalog does not name it; it is hours old; deletes it
    broker   wakes up and registers: a descriptor without an object, and soon the journal forgets the messages

However long the grace period, a broker can stall longer. So age alone never condemns: an object goes only if
no registration of it can succeed any more. ``Catalog.register`` takes a segment that begins at the registered
``end``, in the current epoch, of the current topic id; ``end`` and epoch only grow. Hence an object can never
be registered once

* the topic (by id) has no state: it was deleted, or never opened, or
* it begins before ``end``, or
* it is of an earlier epoch.

What is left is at most the upload that the current owner may be working on, or has repeated after a crash;
once it registers the next segment, ``end`` has passed that too.

``Catalog.replace`` is the other way to be named, and takes segments that begin before ``end``. Only the owner
merges, and it does not sweep meanwhile (``housekeeping``); one that lost the topic has an earlier epoch. What
is left is a transaction whose owner has given up waiting for it. The grace period covers that: the metadata
store answers no read of an hour later before it is decided.

The listing is made before the catalog is read: an object that is listed and registered in between is named by
the time it is looked up.
"""

from __future__ import annotations

from typing import Final

from sava.storage.catalog import Catalog
from sava.storage.errors import TopicGone
from sava.storage.keys import ObjectName, objects_prefix, parse_object_key
from sava.storage.objectstore import ObjectInfo, ObjectStore
from sava.storage.types import Segment, TopicState

GRACE_MS: Final = 3_600_000


async def find_orphans(
    catalog: Catalog, store: ObjectStore, *, now_ms: int, grace_ms: int = GRACE_MS
) -> list[ObjectInfo]:
    """Objects of this topic id that can be deleted. Changes nothing: this is the dry run of ``sweep``. An
    object whose name is not Sava's is never one: somebody put it there for a reason."""
    listed = [info async for info in store.list(objects_prefix(catalog.topic))]
    state, segments = await _read(catalog)
    named = {segment.key for segment in segments}
    return [
        info
        for info in listed
        if info.key not in named
        and info.modified_ms + grace_ms <= now_ms
        and (name := parse_object_key(info.key)) is not None
        and name.topic == catalog.topic
        and not can_be_registered(name, state)
    ]


async def sweep(
    catalog: Catalog, store: ObjectStore, *, now_ms: int, grace_ms: int = GRACE_MS
) -> list[ObjectInfo]:
    """Delete the orphans of this topic id; returns them. Objects of other topics, of the same name too, are
    not looked at: for those that were deleted, see ``deleted``."""
    orphans = await find_orphans(catalog, store, now_ms=now_ms, grace_ms=grace_ms)
    await store.delete([info.key for info in orphans])
    return orphans


async def _read(catalog: Catalog) -> tuple[TopicState | None, list[Segment]]:
    """State before descriptors: an object that the state cannot exclude stays, whatever is registered in
    between, and one that it excludes is registered before it or never."""
    try:
        return await catalog.load(), await catalog.segments()
    except TopicGone:
        return None, []


def can_be_registered(name: ObjectName, state: TopicState | None) -> bool:
    return state is not None and name.start >= state.end and name.epoch >= state.epoch
