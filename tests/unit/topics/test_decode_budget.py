"""Memory for compressed batches: who waits for it, and that none of it is lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from sava.config import PolicySettings
from sava.records import MAX_BATCH_BYTES, BatchCorrupt, Compression, RecordBatch
from sava.topics import publishing
from sava.topics.publishing import DecodeBudget, DecodeBusy, Publisher
from sava.topics.rules import TopicLimits
from tests.support.memory_store import MemoryStore
from tests.unit.topics.test_publishing import NAME, unchecked

HALF = MAX_BATCH_BYTES // 2


async def test_those_who_ask_wait_in_order_until_there_is_room() -> None:
    budget, order = DecodeBudget(MAX_BATCH_BYTES), list[str]()
    leave = asyncio.Event()

    async def hold(name: str, size: int) -> None:
        async with budget.hold(size):
            order.append(name)
            await leave.wait()

    tasks = []
    for name, size in (("a", HALF), ("large", MAX_BATCH_BYTES), ("c", HALF)):
        tasks.append(asyncio.create_task(hold(name, size)))
        await asyncio.sleep(0)
    assert order == ["a"]  # the third would fit, and would keep the second out for ever
    assert budget.waited == 2
    leave.set()
    await asyncio.gather(*tasks)
    assert order == ["a", "large", "c"]
    assert budget.left == MAX_BATCH_BYTES


async def test_who_goes_while_waiting_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = DecodeBudget(MAX_BATCH_BYTES)
    async with AsyncExitStack() as held:
        await held.enter_async_context(budget.hold(HALF))
        gone = asyncio.create_task(_hold(budget, MAX_BATCH_BYTES))
        behind = asyncio.create_task(_hold(budget, HALF))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait((gone, behind))
        assert not behind.cancelled()
        monkeypatch.setattr(publishing, "DECODE_WAIT_S", 0.01)
        with pytest.raises(DecodeBusy, match=r"limits\.decompressing_mb"):
            await _hold(budget, MAX_BATCH_BYTES)
        monkeypatch.setattr(publishing, "MAX_DECODE_WAITING", 0)
        with pytest.raises(DecodeBusy, match="wait to be checked"):
            await _hold(budget, MAX_BATCH_BYTES)
    assert budget.refused == 2
    assert budget.left == MAX_BATCH_BYTES


async def test_one_that_was_cancelled_with_its_turn_gives_it_back() -> None:
    budget = DecodeBudget(MAX_BATCH_BYTES)
    async with budget.hold(MAX_BATCH_BYTES):
        waiting = asyncio.create_task(_hold(budget, HALF))
        await asyncio.sleep(0)
    waiting.cancel()  # it has been granted, and has not run yet
    await asyncio.wait((waiting,))
    assert budget.left == MAX_BATCH_BYTES


async def test_a_large_compressed_batch_is_charged_while_it_is_checked() -> None:
    store, budget = MemoryStore(), DecodeBudget()
    limits = TopicLimits(store, PolicySettings())
    publisher = Publisher(NAME, None, limits, unchecked(store), budget)  # type: ignore[arg-type]
    full, seen = budget.left, list[int]()
    for codec, size, charged in (
        (Compression.ZSTD, 2 << 20, True),
        (Compression.LZ4, 2 << 20, True),
        (Compression.NONE, 2 << 20, False),
        (Compression.ZSTD, 1000, False),
    ):
        batch = RecordBatch.encode([b"\0" * size], publish_time=1, codec=codec)
        seen.clear()
        await publisher.verify(batch, lambda _: seen.append(full - budget.left))
        assert (seen[0] >= size) is charged
        assert budget.left == full
        assert batch.payloads() == [b"\0" * size]
    broken = bytearray(RecordBatch.encode([b"\0" * (2 << 20)], publish_time=1, codec=codec).to_bytes())
    broken[-1] ^= 1
    with pytest.raises(BatchCorrupt):
        await publisher.verify(RecordBatch.parse(bytes(broken)), lambda _: None)
    assert budget.left == full


async def _hold(budget: DecodeBudget, size: int) -> None:
    async with budget.hold(size):
        await asyncio.sleep(0)


async def test_who_asks_for_more_than_there_is_gets_all_of_it() -> None:
    budget = DecodeBudget(MAX_BATCH_BYTES)
    async with budget.hold(3 * MAX_BATCH_BYTES):
        assert budget.left == 0
    assert budget.left == MAX_BATCH_BYTES
