"""A copier into a topic's log, as a broker has it, without the broker."""

from __future__ import annotations

from contextlib import suppress

from sava.config import Config
from sava.metadata.store import MetadataStore
from sava.schemas.registry import SchemaRegistry
from sava.storage.broker_storage import BrokerStorage
from sava.storage.topic_log import TopicLog
from sava.topics.names import TopicName
from sava.topics.publishing import Publisher
from sava.topics.rules import SchemaChecks, TopicLimits
from sava.topics.source_copier import CopyCounts, Source, SourceCopier
from sava.wal import DiskFailed
from tests.sim.disk import SimDisk

HERE = "us"
"""The cluster that is copied into."""


async def copier_into(
    log: TopicLog, source: Source, store: MetadataStore, copies: CopyCounts | None = None
) -> SourceCopier:
    topic = TopicName(log.topic.namespace, log.topic.name)
    gate = SchemaChecks(store, SchemaRegistry(store))
    publisher = Publisher(topic, log, TopicLimits(store, Config().policies), gate)
    copier = SourceCopier(source, publisher, log, copies or CopyCounts(), cluster=HERE, check=lambda: None)
    await copier.progress()
    return copier


async def kill(broker: BrokerStorage, disk: SimDisk) -> SimDisk:
    """The process dies; the disk as the next one finds it."""
    left = disk.kill()
    with suppress(DiskFailed):
        await broker.close()
    return left
