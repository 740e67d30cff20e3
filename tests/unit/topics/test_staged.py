"""Staged messages come into a topic once, whoever asks for them and however often, and wherever it breaks
off."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from sava.config import Config, PolicySettings
from sava.records import Compression, RecordBatch
from sava.schemas.registry import SchemaRegistry
from sava.schemas.types import Policy, TopicSchema
from sava.storage import staging
from sava.storage.errors import ObjectMissing, StagedInvalid
from sava.storage.staging import Section
from sava.topics.errors import (
    MessageTooLarge,
    ProducerBusy,
    SchemaRefused,
    TopicMismatch,
    TopicMoved,
)
from sava.topics.producers import AccessMode
from sava.topics.publishing import Run, Stage
from sava.topics.rules import TopicSchemas
from sava.topics.topic import Topic
from tests.support.objects import batch, section_of
from tests.support.storage import EAGER, contents
from tests.support.topics import (
    GIVEN,
    ORDERS,
    World,
    crash,
)
from tests.support.waiting import PATIENCE_S

WRITER = 77


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def stage(world: World) -> Stage:
    return Stage(world.store)


async def staged(world: World, name: str, *batches: RecordBatch) -> Section:
    data, section = section_of(f"{staging.parts_prefix('w')}/{name}", 0, batches)
    await world.store.put_new(section.key, data)
    return section


def numbers(
    start: int, end: int, *, each: int = 10, codec: Compression = Compression.NONE
) -> list[RecordBatch]:
    return [
        batch([b"%d" % number for number in range(first, min(first + each, end))], codec=codec)
        for first in range(start, end, each)
    ]


def texts(start: int, end: int) -> list[str]:
    return [str(number) for number in range(start, end)]


async def read(topic: Topic) -> list[str]:
    assert topic.log is not None
    return await contents(topic.log)


async def frames(topic: Topic) -> list[int]:
    assert topic.log is not None
    return [len(each) async for each in topic.log.read(0)]


class FailingSections:
    """An object store that fails after so many reads."""

    def __init__(self, world: World, reads: int) -> None:
        self._store = world.store
        self.left = reads

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise ObjectMissing(key)
        return await self._store.get_range(key, start, end)


@pytest.mark.parametrize("codec", Compression)
async def test_small_batches_of_many_tasks_become_one_frame(
    world: World, stage: Stage, codec: Compression
) -> None:
    sections = [
        await staged(world, f"{start}", *numbers(start, start + 30, codec=codec))
        for start in range(0, 300, 30)
    ]
    async with world.topics() as topics:
        topic = await topics.get_or_create(ORDERS, True)
        await topic.staged.publish(stage, Run(WRITER, 1, sections))
        assert await read(topic) == texts(0, 300)
        assert await frames(topic) == [300]


async def test_repeating_a_run_changes_nothing_even_when_what_was_staged_is_gone(
    world: World, stage: Stage
) -> None:
    run = Run(WRITER, 1, [await staged(world, "a", *numbers(0, 50))])
    async with world.topics() as topics:
        topic = await topics.get_or_create(ORDERS, True)
        counted: Any = FailingSections(world, 1)  # one read must do for all who ask at once
        await asyncio.gather(*(topic.staged.publish(Stage(counted), run) for _ in range(5)))
        await world.store.delete([run.sections[0].key])
        await topic.staged.publish(stage, run)
        assert await read(topic) == texts(0, 50)
        following = Run(WRITER, 4, [await staged(world, "b", *numbers(50, 60))])
        await topic.staged.publish(stage, following)
        await topic.staged.publish(stage, run)  # somebody who is late
        assert await read(topic) == texts(0, 60)


async def large_run(world: World, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Of three sections, which are read and published one by one."""
    first, *rest = (numbers(start, start + 30) for start in (0, 30, 60))
    sections = [await staged(world, f"s{index}", *part) for index, part in enumerate((first, *rest))]
    size = sections[0].end
    monkeypatch.setattr(staging, "PIECE_BYTES", size)
    monkeypatch.setattr(staging, "FRAME_BYTES", sum(each.header.body_size for each in first))
    return Run(WRITER, 1, sections)


async def test_a_run_that_broke_off_goes_on_behind_what_is_there(
    world: World, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await large_run(world, monkeypatch)
    async with world.topics() as topics:
        topic = await topics.get_or_create(ORDERS, True)
        broken: Any = FailingSections(world, 2)
        with pytest.raises(ObjectMissing):
            await topic.staged.publish(Stage(broken), run)
        published = await read(topic)
        assert published == texts(0, len(published))
        assert 0 < len(published) < 90
        # Whoever goes on may cut frames in another way: another version of the program does.
        monkeypatch.setattr(staging, "FRAME_BYTES", 1)
        await topic.staged.publish(stage, run)
        assert await read(topic) == texts(0, 90)


@pytest.mark.parametrize("is_uploaded", [False, True])
async def test_the_next_life_goes_on_with_a_run_that_a_crash_has_cut(
    world: World, stage: Stage, monkeypatch: pytest.MonkeyPatch, is_uploaded: bool
) -> None:
    """The journal, or the state that is registered with the last segment, remembers how far it came."""
    run = await large_run(world, monkeypatch)
    topics, storage = await world.start_topics()
    topic = await topics.get_or_create(ORDERS, True)
    broken: Any = FailingSections(world, 2)
    with pytest.raises(ObjectMissing):
        await topic.staged.publish(Stage(broken), run)
    published = len(await read(topic))
    if is_uploaded:
        assert topic.log is not None
        await topic.log.seal()
    await crash(topics, storage)
    async with world.topics(storage=EAGER) as topics:
        topic = await topics.get(ORDERS)
        assert await read(topic) == texts(0, published)
        await topic.staged.publish(stage, run)
        await topic.staged.publish(stage, run)
        assert await read(topic) == texts(0, 90)


async def test_a_topic_that_moves_under_a_run_sends_it_to_the_next_owner(
    world: World, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held while it is handed over, then told; the next owner goes on behind what came along."""
    run = await large_run(world, monkeypatch)
    await world.assigned(1)
    async with world.topics(broker=1, **GIVEN) as topics:
        topic = await topics.get(ORDERS)
        broken: Any = FailingSections(world, 2)
        with pytest.raises(ObjectMissing):
            await topic.staged.publish(Stage(broken), run)
        published = len(await read(topic))
        await world.step("move", target=2)
        handing = asyncio.create_task(topics.hand_over(ORDERS, timeout=PATIENCE_S))
        with pytest.raises(TopicMoved):
            await topic.staged.publish(stage, run)
        assert await handing == published
        await world.step("seal", end=published)
        await world.step("assign", owner=2)
        async with world.topics(broker=2, **GIVEN) as others:
            moved = await others.get(ORDERS)
            await moved.staged.publish(stage, run)
            assert await read(moved) == texts(0, 90)


async def test_what_a_topic_would_refuse_is_known_before_anything_is_published(
    world: World, stage: Stage
) -> None:
    large = await staged(world, "large", batch([bytes(2000)]))
    config = Config(policies=PolicySettings(max_message_size=1000))
    async with world.topics(config) as topics:
        topic = await topics.get_or_create(ORDERS, True)
        with pytest.raises(MessageTooLarge):
            await topic.check_staged(stage, "w", [large])
        await topic.check_staged(stage, "w", [await staged(world, "small", *numbers(0, 10))])
        transient = await topics.get_or_create(ORDERS._replace(topic="transient"), False)
        with pytest.raises(TopicMismatch, match="not reliable"):
            await transient.check_staged(stage, "w", [large])
        exclusive = await topic.producers.open("only", access=AccessMode.EXCLUSIVE, takeover=True)
        with pytest.raises(ProducerBusy):
            await topic.check_staged(stage, "w", [])
        exclusive.close()
        await topic.check_staged(stage, "w", [])
        assert await read(topic) == []


async def test_messages_against_the_schema_are_refused_before_the_decision(
    world: World, stage: Stage
) -> None:
    registry = SchemaRegistry(world.metadata)
    async with world.topics() as topics:
        topic = await topics.get_or_create(ORDERS, True)
        found = await registry.register("orders", "bytes", b"")
        await TopicSchemas(world.metadata).set(ORDERS, TopicSchema(subject="orders", policy=Policy.ENFORCE))
        with pytest.raises(SchemaRefused):
            await topic.check_staged(stage, "w", [await staged(world, "a", batch([b"x"]))])
        good = batch([b"x"], schema_id=found.schema_id)
        await topic.check_staged(stage, "w", [await staged(world, "b", good)])


@pytest.mark.parametrize("is_large", [True, False])
async def test_batches_that_are_not_what_was_announced_are_not_published(
    world: World, stage: Stage, is_large: bool
) -> None:
    if is_large:
        section = await staged(world, "a", batch([bytes(500)]))
        wrong = Section(section.key, 0, section.end, 1, 10, section.crc32c)
    else:
        spoilt = bytearray(batch([b"x" * 100]).to_bytes())
        spoilt[-1] ^= 1
        key, data = f"{staging.parts_prefix('w')}/a", bytes(spoilt)
        await world.store.put_new(key, data)
        wrong = Section(key, 0, len(data), 1, 100, google_crc32c.value(data))
    async with world.topics() as topics:
        topic = await topics.get_or_create(ORDERS, True)
        with pytest.raises(StagedInvalid):
            await topic.staged.publish(stage, Run(WRITER, 1, [wrong]))
        assert await read(topic) == []
