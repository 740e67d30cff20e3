"""Topics that are put to rest when a test says so, and transactions that are held up on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from sava.storage import keys
from sava.storage.broker_storage import BrokerStorage, StorageOptions
from sava.storage.topic_log import TopicLog
from sava.storage.types import TopicState
from sava.storage.uploader import UploadOptions
from tests.support.storage import (
    TOPIC,
    Cluster,
    append_each,
)
from tests.support.waiting import PATIENCE_S
from tests.unit.storage.faults import UNAVAILABLE, UNKNOWN, FaultyMetadata, refuse

QUICK = StorageOptions(upload=UploadOptions(segment_age_s=0.0, clean_after_s=0.02))
"""Uploads at once, and rests soon after."""
TOLD = StorageOptions(upload=UploadOptions(segment_age_s=3600, clean_after_s=3600))
"""Uploads and rests when the test says so."""


async def state_of(cluster: Cluster) -> TopicState:
    state = await cluster.catalog().load()
    assert state is not None
    return state


async def marked(cluster: Cluster, *, is_clean: bool) -> TopicState:
    """Wait for the record to say so."""
    watch = cluster.metadata.watch(keys.state_key(TOPIC))
    async with asyncio.timeout(PATIENCE_S):
        while (state := await state_of(cluster)).is_clean is not is_clean:
            await anext(watch)
    watch.close()
    return state


def resting(log: TopicLog) -> asyncio.Task[None]:
    """The write that puts the topic to rest, begun now."""
    log._marker._due()
    assert log._marker._task is not None
    return log._marker._task


async def store(log: TopicLog) -> None:
    await log._parts.uploader.flush(log._backlog, log.next_offset)


async def opened(broker: BrokerStorage, *, epoch: int = 1, end: int = 5) -> TopicLog:
    """Awake, idle, and with everything in segments."""
    log = await broker.open_topic(TOPIC, epoch=epoch)
    await append_each(log, log.next_offset, end)
    await store(log)
    return log


class Held:
    """A transaction that is on its way until the test says otherwise."""

    def __init__(self) -> None:
        self.has_come = asyncio.Event()
        self.may_go_on = asyncio.Event()

    async def __call__(self, call: Callable[[], Awaitable[Any]]) -> Any:
        self.has_come.set()
        await self.may_go_on.wait()
        return await call()


class Late:
    """A transaction whose answer is lost and that takes effect, if it can, when the test says so."""

    def __init__(self) -> None:
        self._call: Callable[[], Awaitable[Any]] | None = None

    async def __call__(self, call: Callable[[], Awaitable[Any]]) -> Any:
        self._call = call
        raise UNKNOWN

    async def arrive(self) -> Any:
        assert self._call is not None
        return await self._call()


def lose_sight(metadata: FaultyMetadata, fault: Callable[..., Awaitable[Any]]) -> None:
    """The next transaction fares so, and the state cannot be read afterwards."""

    async def blinded(call: Callable[[], Awaitable[Any]]) -> Any:
        metadata.plan("get", refuse(UNAVAILABLE))
        return await fault(call)

    metadata.plan("txn", blinded)
