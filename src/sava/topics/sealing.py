"""Sealing a topic that is not loaded: a former life of this broker began to hand it over and did not finish,
or the move was begun before it was ever taken up.

Nobody uses the topic here, so there are no publishers to hold and no positions to write; but what the journal
holds of it goes with it, and only this broker has that.
"""

from __future__ import annotations

from sava.metadata.store import MetadataStore
from sava.storage.broker_storage import BrokerStorage
from sava.storage.catalog import Catalog
from sava.storage.errors import DataGap, TopicSealed
from sava.topics import tenure
from sava.topics.deletions import topic_key
from sava.topics.names import TopicName
from sava.topics.registry import Registry


async def seal_unloaded(
    registry: Registry,
    store: MetadataStore,
    storage: BrokerStorage,
    name: TopicName,
    *,
    broker: int,
    timeout: float,
) -> int:
    """The exclusive end; 0 if nothing is kept. Raises NotOwner unless the topic is this broker's and moving,
    and as ``BrokerStorage.open_topic`` and ``TopicLog.seal``."""
    if not (await registry.need(name)).reliable:
        return 0
    try:
        return await _seal(registry, store, storage, name, broker, timeout)
    except DataGap:
        # An earlier opening under this epoch may have had an upload on its way, which was registered after
        # this one had read where segments end. If that is not it, there is a gap the second time too.
        return await _seal(registry, store, storage, name, broker, timeout)


async def _seal(
    registry: Registry,
    store: MetadataStore,
    storage: BrokerStorage,
    name: TopicName,
    broker: int,
    timeout: float,
) -> int:
    resumed = await tenure.resume(registry, store, name, broker)
    key = topic_key(name, resumed.located.spec)
    try:
        log = await storage.open_topic(key, epoch=resumed.epoch, guard=resumed)
    except TopicSealed:
        state = await Catalog(store, key).load()
        if state is None or state.epoch != resumed.epoch or not state.sealed:
            raise
        return state.end  # only the ownership record does not say so yet
    try:
        return (await log.seal(timeout=timeout)).end
    finally:
        await log.close()
