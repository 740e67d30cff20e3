"""Deleted topics: what may still arrive of them.

    deletion   lists the objects of a topic and removes them; one is on its way to the store
    broker     its put succeeds. It finds the topic gone, and is to remove what it wrote
    broker     is killed before it does

The topic has no owner that would sweep it. So a deletion leaves a note before it removes anything, and an
hour later whoever comes by deletes the topic once more. Ids of topics are given out once, and only a topic
that is marked as deleted gets a note: nothing under its id will be needed again.

    /storage/deleted/{topic id}    DeletedTopic
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

import msgspec

from sava.metadata.commands import Compare, Delete, Put, Relation, Target
from sava.metadata.store import MetadataStore
from sava.storage import retention
from sava.storage.catalog import Catalog, decode_record
from sava.storage.errors import CatalogCorrupt
from sava.storage.objectstore import ObjectStore
from sava.storage.orphans import GRACE_MS
from sava.storage.types import TopicKey

log = logging.getLogger(__name__)

NOTES: Final = "/storage/deleted/"
_PAGE: Final = 256


class DeletedTopic(msgspec.Struct, frozen=True, kw_only=True):
    topic: TopicKey
    at_ms: int
    """By the clock of the broker that deleted it, the last one if several did."""


class Swept(NamedTuple):
    objects: int
    """That were removed."""
    unreadable: int
    """Notes that were skipped; they stay."""


async def note(metadata: MetadataStore, topic: TopicKey, *, now_ms: int) -> None:
    record = DeletedTopic(topic=topic, at_ms=now_ms)
    put = Put(f"{NOTES}{topic.topic_id:020}", msgspec.json.encode(record))
    await metadata.txn((), (put,))


async def sweep(metadata: MetadataStore, store: ObjectStore, *, now_ms: int) -> Swept:
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
                log.error("storage: the note of a deleted topic is skipped key=%s error=%s", kv.key, error)
                continue
            if deleted.at_ms + GRACE_MS > now_ms:
                continue
            count += await retention.delete_topic(Catalog(metadata, deleted.topic), store)
            is_same = Compare(kv.key, Target.MOD_REVISION, Relation.EQUAL, kv.mod_revision)
            await metadata.txn((is_same,), (Delete(kv.key),))
        if not page.more:
            return Swept(count, unreadable)
