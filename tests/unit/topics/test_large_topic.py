"""A topic with 10,000 subscriptions, 2,000 producers and 1,000 segments: whatever is done with it as a whole
is done in slices, for heartbeats and lease renewals run on the same event loop. A broker that took such a
topic up in one piece lost its registration, and so did the next one."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from sava.api.admin.descriptions import topic_description
from sava.api.http import written
from sava.api.metrics.topics import TopicsCollector
from sava.metadata.commands import Operation, Put
from sava.storage import keys
from sava.storage.types import EpochTable, ProducerState, Segment, TopicKey, TopicState
from sava.topics import specs
from sava.topics.specs import CursorRecord, SubscriptionSpec, SubscriptionType
from tests.support.memory_store import MemoryStore
from tests.support.topics import GIVEN, ORDERS, World

SUBSCRIPTIONS, PRODUCERS, SEGMENTS = 10_000, 2_000, 1_000
HELD_S = 0.05
TAKEN_UP_S = 2.0
EACH = 100
"""Messages in a segment."""


class Turns:
    """How long the event loop was held in one turn at most: in CPU time of this thread, for on a busy machine
    the clock also counts what others do. Python's garbage collector is counted apart: it looks through all
    objects of the process whenever it likes, and no slicing of the work changes that."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.cpu_s = 0.0
        self.collector_s = 0.0
        """The longest look of the collector."""

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        began = last = time.thread_time()
        collecting = 0.0
        is_on = True

        def collected(phase: str, _: object) -> None:
            nonlocal collecting, last
            if phase == "start":
                collecting = time.thread_time()
            else:
                took = time.thread_time() - collecting
                last += took
                self.collector_s = max(self.collector_s, took)

        def turn() -> None:
            nonlocal last
            if not is_on:  # what comes after the end is not watched
                return
            now = time.thread_time()
            self.longest_s, last = max(self.longest_s, now - last), now
            loop.call_soon(turn)

        loop.call_soon(turn)
        gc.callbacks.append(collected)
        try:
            yield
            await asyncio.sleep(0)
        finally:
            is_on = False
            gc.callbacks.remove(collected)
            self.cpu_s = time.thread_time() - began


class _Yielding(MemoryStore):
    """Lets others run at each call, as the replicated store does."""

    async def get(self, *args: Any, **more: Any) -> Any:
        await asyncio.sleep(0)
        return await super().get(*args, **more)

    async def range(self, *args: Any, **more: Any) -> Any:
        await asyncio.sleep(0)
        return await super().range(*args, **more)

    async def txn(self, *args: Any, **more: Any) -> Any:
        await asyncio.sleep(0)
        return await super().txn(*args, **more)


async def write(world: World, operations: list[Operation]) -> None:
    for start in range(0, len(operations), 400):
        await world.metadata.txn((), operations[start : start + 400])


async def large_topic(world: World) -> None:
    """As an owner that is gone has left it: at rest, all of it in segments."""
    await world.assigned(1)
    key = keys.state_key(TopicKey(ORDERS.namespace, ORDERS.topic, 1))
    topic = TopicKey(ORDERS.namespace, ORDERS.topic, 1)
    end = SEGMENTS * EACH
    operations: list[Operation] = []
    for number in range(SUBSCRIPTIONS):
        name = f"subscription-{number}"
        spec = SubscriptionSpec(type=SubscriptionType(number % 4), owner=f"user:{number % 7}")
        acked = tuple(bound for start in range(10) for bound in (200 + 10 * start, 205 + 10 * start))
        operations.append(Put(specs.subscription_key(ORDERS, name), specs.encode(spec)))
        operations.append(
            Put(specs.cursor_key(ORDERS, name), specs.encode(CursorRecord(number % 100, acked, 1)))
        )
    for start in range(0, end, EACH):
        segment = Segment(
            topic_id=1,
            start=start,
            end=start + EACH,
            epoch=1,
            key=f"topics/default/orders/1/{start:020}-{start + EACH:020}-1-aa.parquet",
            size=1000,
            crc32c=1,
            footer_size=100,
            footer_crc32c=1,
            min_publish_time=1,
            max_publish_time=2,
            created_ms=1,
            raw_bytes=1000,
        )
        operations.append(Put(keys.segment_key(topic, start), msgspec.json.encode(segment)))
    state = TopicState(
        topic_id=1,
        epoch=0,
        storage_id="elsewhere",
        end=end,
        sealed=False,
        is_clean=True,
        producers=tuple(ProducerState(number + 1, 10, number, number + 1) for number in range(PRODUCERS)),
        epochs=EpochTable(
            PRODUCERS,
            known=tuple((number + 1, number + 1) for number in range(PRODUCERS)),
            owners=(("user:alice", tuple(range(1, PRODUCERS + 1))),),
        ),
    )
    operations.append(Put(key, msgspec.json.encode(state)))
    await write(world, operations)


async def test_taking_up_and_letting_go_are_done_in_slices(tmp_path: Path) -> None:
    """Taken up, described, handed over, taken up again, deleted."""
    world = World(tmp_path)
    world.metadata = _Yielding()
    await large_topic(world)
    figures: dict[str, Turns] = {}

    @asynccontextmanager
    async def measured(what: str) -> AsyncIterator[None]:
        turns = figures[what] = Turns()
        async with turns.watched():
            yield

    async with world.topics(**GIVEN) as topics:
        async with measured("take up"):
            topic = await topics.get(ORDERS)
        assert len(topic.subscriptions) == SUBSCRIPTIONS
        assert topic.subscriptions["subscription-7"].cursor_offset == 7  # type: ignore[union-attr]
        async with measured("retention and segments"):
            assert topic.log is not None
            assert len(await topic.log.segments()) == SEGMENTS
        async with measured("maintain"):
            await topic.maintain()
        async with measured("describe"):
            assert len((await topic_description(topic, 1)).subscriptions) == SUBSCRIPTIONS
        async with measured("metrics"):
            page = await written(TopicsCollector(topics, topics._storage))
        backlog = [line for line in page.decode().splitlines() if "backlog_messages{" in line]
        lag = float(sum(each.backlog for each in topic.describe().subscriptions))
        assert backlog == [f'sava_subscription_backlog_messages{{subscription="*",topic="{ORDERS}"}} {lag}']
        await world.step("move", target=2, timeout_ms=30_000)
        async with measured("hand over"):
            assert await topics.hand_over(ORDERS, timeout=30) == SEGMENTS * EACH
        await world.step("seal", end=SEGMENTS * EACH)
        await world.step("assign", owner=1)
        async with measured("take up again"):
            await topics.get(ORDERS)
        async with measured("delete"):
            await topics.delete(ORDERS)
    for what, turns in figures.items():
        print(
            f"{what}: {turns.cpu_s:.2f} s, longest turn {1000 * turns.longest_s:.0f} ms, "
            f"collector {1000 * turns.collector_s:.0f} ms"
        )
    for what, turns in figures.items():
        assert turns.longest_s <= HELD_S, (what, turns.longest_s)
    assert figures["take up"].cpu_s <= TAKEN_UP_S
