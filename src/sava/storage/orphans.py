"""Orphans: objects that nothing names, and the proof that nothing ever will.

A crash between upload and registration, or between the dropping of a descriptor and the deletion of its
object, leaves an object that costs money and, worse, shows rows twice to a job that reads the topic's
directory with a glob. They are found by comparing the listing with the catalog. The danger is on the other
side:

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

``Catalog.replace`` is the other way to be named, and takes segments that begin before ``end``. Only the
owner merges, and it does not sweep meanwhile (``SegmentMaintenance``); one that lost the topic has an earlier
epoch. What is left is a transaction whose owner has given up waiting for it. The grace period covers that:
the metadata store answers no read of an hour later before it is decided.

The listing is made before the catalog is read: an object that is listed and registered in between is named by
the time it is looked up.

**Deleted topics.** What may still arrive of them.

    deletion   lists the objects of a topic and removes them; one is on its way to the store
    broker     its put succeeds. It finds the topic gone, and is to remove what it wrote
    broker     is killed before it does

The topic has no owner that would sweep it. So a deletion leaves a note before it removes anything, and an
hour later the next sweep of any broker deletes the topic once more. Ids of topics are given out once, and
only a topic that is marked as deleted gets a note: nothing under its id will be needed again.

    /storage/deleted/{topic id}    DeletedTopic

**Leftovers.** What the journal holds of topics that are not open here, and the proof that no topic needs it.

Such frames keep the journal from being trimmed until their topic is opened here again, which may be never:
the topic was deleted while this broker was down, or is elsewhere now. The topics' state records tell
which frames may go. The danger is to release a tail that no other broker has:

    deleted           no state names the topic id. A state is written before the first frame, ids are never
                      used twice, and nothing but a deletion removes a state: all frames may go.
    below ``end``     is in registered segments, whichever broker wrote it: may go.
    from ``end`` on   not history, if the state is sealed (nothing exists there) or names another journal
                      (which could take the topic over only when nothing existed there); else it is the tail
                      that this journal keeps, and stays. (Also if the state is clean: its owner may mark it
                      dirty, and have a tail, under the same epoch.)

A state may change between reading it and acting on it. ``end`` only grows, and a deleted topic stays
deleted. Only a tail can come into being meanwhile, when the topic moves here: it is of a later epoch than
the state that was read, and then nothing is disowned.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

import msgspec

from sava.metadata.commands import Compare, Delete, Put, Relation, Target
from sava.metadata.store import MetadataStore
from sava.storage import keys
from sava.storage.catalog import PAGE, Catalog, decode_record
from sava.storage.errors import CatalogCorrupt, TopicGone
from sava.storage.keys import ObjectName, objects_prefix, parse_object_key
from sava.storage.objectstore import ObjectInfo, ObjectStore
from sava.storage.types import Segment, TopicKey, TopicState

GRACE_MS: Final = 3_600_000


async def find_orphans(
    catalog: Catalog, store: ObjectStore, *, now_ms: int, grace_ms: int = GRACE_MS
) -> list[ObjectInfo]:
    """Objects of this topic id that can be deleted. This is the dry run of ``sweep_orphans`` and
    changes nothing. An object whose name is not Sava's is never one: an operator put it there for a
    reason."""
    listed = [info async for info in store.list(objects_prefix(catalog.topic))]
    state, segments = await _state_and_segments(catalog)
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


async def sweep_orphans(
    catalog: Catalog, store: ObjectStore, *, now_ms: int, grace_ms: int = GRACE_MS
) -> list[ObjectInfo]:
    """Delete the orphans of this topic id; returns them. Objects of other topics, of the same name too, are
    not looked at: for those that were deleted, see ``deleted``."""
    orphans = await find_orphans(catalog, store, now_ms=now_ms, grace_ms=grace_ms)
    await store.delete([info.key for info in orphans])
    return orphans


async def _state_and_segments(catalog: Catalog) -> tuple[TopicState | None, list[Segment]]:
    """State before descriptors: an object that the state cannot exclude stays, whatever is registered in
    between, and one that it excludes is registered before it or never."""
    try:
        return await catalog.load(), await catalog.segments()
    except TopicGone:
        return None, []


def can_be_registered(name: ObjectName, state: TopicState | None) -> bool:
    return state is not None and name.start >= state.end and name.epoch >= state.epoch


# -- deleted topics --------------------------------------------------------------------------------


_log = logging.getLogger(__name__)

NOTES: Final = "/storage/deleted/"
_PAGE: Final = 256


class DeletedTopic(msgspec.Struct, frozen=True, kw_only=True):
    topic: TopicKey
    at_ms: int
    """By the clock of the broker that deleted it, the last one if several did."""


class SweptObjects(NamedTuple):
    objects: int
    """That were removed."""
    unreadable: int
    """Notes that were skipped; they stay."""


async def note_deleted(metadata: MetadataStore, topic: TopicKey, *, now_ms: int) -> None:
    record = DeletedTopic(topic=topic, at_ms=now_ms)
    put = Put(f"{NOTES}{topic.topic_id:020}", msgspec.json.encode(record))
    await metadata.txn((), (put,))


async def sweep_deleted(metadata: MetadataStore, store: ObjectStore, *, now_ms: int) -> SweptObjects:
    """Remove what has arrived since, and the notes. Several brokers may do it at a time. A note that cannot
    be read is skipped: every sweep of every broker would stop at it, before the topics behind it."""
    count, unreadable, after = 0, 0, ""
    while True:
        page = await metadata.range(NOTES, limit=_PAGE, start_after=after)
        for kv in page.kvs:
            after = kv.key
            try:
                deleted = decode_record(kv.key, kv.value, DeletedTopic)
            except CatalogCorrupt as error:
                unreadable += 1
                _log.error("storage: the note of a deleted topic is skipped key=%s error=%s", kv.key, error)
                continue
            if deleted.at_ms + GRACE_MS > now_ms:
                continue
            count += await delete_topic(Catalog(metadata, deleted.topic), store)
            is_same = Compare(kv.key, Target.MOD_REVISION, Relation.EQUAL, kv.mod_revision)
            await metadata.txn((is_same,), (Delete(kv.key),))
        if not page.more:
            return SweptObjects(count, unreadable)


async def delete_topic(catalog: Catalog, store: ObjectStore) -> int:
    """Remove everything that storage has of a deleted topic; returns how many objects went. Can be repeated.

    All objects under the topic's id go, those included that no descriptor names: without a state record
    nothing can be registered under this id any more."""
    await catalog.delete_all()
    keys = [info.key async for info in store.list(objects_prefix(catalog.topic))]
    await store.delete(keys)
    return len(keys)


# -- leftovers in the journal ----------------------------------------------------------------------


_BEHIND: Final = "\U0010ffff"
"""Sorts behind every possible rest of a key."""


class Needless(NamedTuple):
    """Frames of a topic that may go: those below ``release`` and, if there is such an offset, those from
    ``disown`` on."""

    release: int
    disown: int | None


def needless(state: TopicState | None, *, storage_id: str, epoch: int) -> Needless:
    """What a journal need not keep of a topic, ``epoch`` being the latest of its frames."""
    if state is None:
        return Needless(0, 0)
    is_superseded = state.sealed or state.storage_id != storage_id
    is_known = epoch < state.epoch or (epoch == state.epoch and state.storage_id == storage_id)
    return Needless(state.end, state.end if is_superseded and is_known else None)


async def topic_states(metadata: MetadataStore) -> dict[int, TopicState]:
    """The states of all topics, by topic id. An id that is missing here has had no state at some moment since
    the call. Raises what keeps any of them from being read: unknown is not deleted."""
    return {topic.topic_id: state for topic, state in (await named_states(metadata)).items()}


async def named_states(metadata: MetadataStore) -> dict[TopicKey, TopicState]:
    """As ``topic_states``, with the topics' names."""
    states: dict[TopicKey, TopicState] = {}
    after, more = "", True
    while more:
        page = await metadata.range(keys.TOPICS, limit=PAGE, start_after=after)
        more = page.more
        for kv in page.kvs:
            after = kv.key
            if keys.is_state_key(kv.key):
                state = decode_record(kv.key, kv.value, TopicState)
                states[keys.topic_of_state_key(kv.key, state.topic_id)] = state
        if (segments := keys.segments_prefix_of(after)) is not None:
            after = segments + _BEHIND  # the other descriptors of this topic tell nothing
    return states
