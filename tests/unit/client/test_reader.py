"""The reader against a broker in memory: ranges, and streams that break."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from sava.client import (
    Client,
    Closed,
    Refused,
    Unavailable,
    connection,
)
from tests.unit.client.server import MemoryBroker

TOPIC = "/default/orders"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


async def publish(client: Client, first: int, end: int, topic: str = TOPIC) -> None:
    """Messages that were published a minute apart, each in its batch."""
    async with client.producer(topic, linger_ms=0) as producer:
        for n in range(first, end):
            await producer.send(b"%d" % n, publish_time=BEGIN + timedelta(minutes=n))


async def test_reading_to_the_end_that_is_there_now(client: Client) -> None:
    await publish(client, 0, 10)
    async with client.reader(TOPIC, end="latest") as reader:
        assert [message.payload async for message in reader] == [b"%d" % n for n in range(10)]
    async with client.reader(TOPIC, start=3, end=7) as reader:
        assert [batch.ranges[0] async for batch in reader.batches()] == [(n, n + 1) for n in range(3, 7)]


async def test_whole_answers_are_given_to_those_who_pay_for_each_call(client: Client) -> None:
    await publish(client, 0, 10)
    async with client.reader(TOPIC, start=3, end=7) as reader:
        found = []
        while (batches := await reader.next_batches()) is not None:
            assert batches
            found += [batch.ranges[0] for batch in batches]
        assert found == [(n, n + 1) for n in range(3, 7)]
        assert await reader.next_batches() is None


async def test_reading_by_time(client: Client) -> None:
    await publish(client, 0, 10)
    start, end = BEGIN + timedelta(minutes=4), BEGIN + timedelta(minutes=6)
    async with client.reader(TOPIC, start=start, end=end) as reader:
        assert [message.offset async for message in reader] == [4, 5]


async def test_an_empty_range_ends_at_once(client: Client) -> None:
    await publish(client, 0, 3)
    for reader in (
        client.reader(TOPIC, start="latest", end="latest"),
        client.reader(TOPIC, start=2, end=2),
        client.reader(TOPIC, start=3, end="latest"),
    ):
        async with reader:
            assert [message async for message in reader] == []


async def test_without_an_end_it_waits_for_more(client: Client) -> None:
    await publish(client, 0, 3)
    async with client.reader(TOPIC, start="latest") as reader:
        waiting = asyncio.ensure_future(anext(reader))
        await publish(client, 3, 5)
        assert (await waiting).offset == 3
        assert (await anext(reader)).offset == 4


async def test_a_broken_stream_goes_on_where_it_was(client: Client, broker: MemoryBroker) -> None:
    await publish(client, 0, 5)
    async with client.reader(TOPIC) as reader:
        offsets = [(await anext(reader)).offset for _ in range(5)]
        await broker.restart()
        await publish(client, 5, 8)
        offsets += [(await anext(reader)).offset for _ in range(3)]
    assert offsets == list(range(8))


async def test_latest_means_the_moment_of_opening(client: Client, broker: MemoryBroker) -> None:
    await publish(client, 0, 2)
    async with client.reader(TOPIC, start="latest") as reader:
        await broker.restart()
        await publish(client, 2, 4)
        assert (await anext(reader)).offset == 2


async def test_all_partitions_are_read(client: Client, broker: MemoryBroker) -> None:
    broker.partitioned(TOPIC, 2)
    await publish(client, 0, 2, f"{TOPIC}-part-0")
    await publish(client, 0, 3, f"{TOPIC}-part-1")
    async with client.reader(TOPIC, end="latest") as reader:
        found = sorted([(message.topic, message.offset) async for message in reader])
    assert found == [
        *((f"{TOPIC}-part-0", n) for n in range(2)),
        *((f"{TOPIC}-part-1", n) for n in range(3)),
    ]


async def test_a_broker_that_stays_away_is_an_error(
    client: Client, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "OPEN_TIMEOUT_S", 2.0)
    await publish(client, 0, 1)
    async with client.reader(TOPIC, timeout=2) as reader:
        await anext(reader)
        await broker.stop()
        with pytest.raises(Unavailable):
            await anext(reader)


async def test_closing_ends_the_iteration(client: Client) -> None:
    await publish(client, 0, 1)
    reader = client.reader(TOPIC)
    with pytest.raises(Closed):
        await anext(reader)
    await reader.open()
    await anext(reader)
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    await reader.close()
    with pytest.raises(StopAsyncIteration):
        await waiting


def test_what_cannot_be_is_refused() -> None:
    client = Client("127.0.0.1:1")
    for wrong in ({"start": "first"}, {"end": "earliest"}, {"end": True}):
        with pytest.raises(Refused):
            client.reader(TOPIC, **wrong)
