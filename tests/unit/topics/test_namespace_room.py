"""How many topics a namespace may have, and how fast they may come about by themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sava.config import Config, LimitSettings
from sava.topics import registry
from sava.topics.errors import LimitReached
from sava.topics.names import TopicName
from sava.topics.registry import NamespaceRoom, Namespaces, Registry
from sava.topics.rules import MAX_WAIT_S
from tests.support.memory_store import MemoryStore
from tests.support.topics import World


def name(number: int) -> TopicName:
    return TopicName("default", f"topic-{number}")


async def limited(limit: int) -> Registry:
    store = MemoryStore()
    await Namespaces(store).ensure(("default", "other"))
    return Registry(store, NamespaceRoom(store, limit))


async def test_a_namespace_takes_so_many_topics_and_no_more() -> None:
    topics = await limited(3)
    await topics.create(name(1), reliable=True)
    await topics.ensure(name(1), reliable=True)
    await topics.create(TopicName("default", "parted"), reliable=True, partitions=1)  # with its partition: 2
    for attempt in (
        topics.create(name(2), reliable=True),
        topics.ensure(name(2), reliable=None),
        topics.create(name(2).partition(0), reliable=True),
        topics.grow(TopicName("default", "parted"), 2),
    ):
        with pytest.raises(LimitReached, match=r"default has 3 topics.*is 3 \(limits.topics_per_namespace\)"):
            await attempt
    await topics.create(TopicName("other", "topic"), reliable=True)


async def test_deleted_topics_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RECOUNT_S", 0.0)
    topics = await limited(1)
    await topics.create(name(1), reliable=True)
    await topics.finish_delete(await topics.begin_delete(name(1)))
    await topics.create(name(2), reliable=True)


async def test_a_flood_of_look_ups_is_slowed_down_and_refused(tmp_path: Path) -> None:
    config = Config(limits=LimitSettings(topic_creations_per_second=5))
    async with World(tmp_path).topics(config) as topics:
        made = await asyncio.gather(
            *(topics.ensure(name(number), None) for number in range(200)), return_exceptions=True
        )
        refused = [each for each in made if isinstance(each, LimitReached)]
        assert len(refused) >= 200 - 5 * (MAX_WAIT_S + 2)
        assert "limits.topic_creations_per_second" in str(refused[0])
        assert len(made) - len(refused) == len(topics.registry.list_local("default"))
        await topics.create(name(1000), reliable=True)  # an operator's is not slowed down
        async with asyncio.timeout(1.0):
            await topics.ensure(name(1000), None)  # nor is a topic that is there
