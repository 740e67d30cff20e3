"""The client against a real broker: round trips, partitions, subscription types, readers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from sava.client import (
    Client,
    Consumer,
    ConsumerReplaced,
    Message,
    Producer,
    ProducerFenced,
    Refused,
    Sent,
    TopicUnknown,
)
from tests.support.brokers import Standalone
from tests.support.waiting import PATIENCE_S

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with Standalone(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture
async def client(broker: Standalone) -> AsyncIterator[Client]:
    async with Client(broker.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return f"/default/{request.node.name.replace('[', '-').replace(']', '')[:100]}"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_broker_does_without_pandas(broker: Standalone) -> None:
    """pyarrow would load it, where it is installed, and nothing would show but a slower start."""
    broker.ready()
    loaded = Path(f"/proc/{broker.pid}/maps").read_text()
    assert "pyarrow" in loaded
    assert "/pandas/" not in loaded


async def take(consumer: Consumer, count: int, *, ack: bool = True) -> list[Message]:
    messages: list[Message] = []
    async with asyncio.timeout(PATIENCE_S):
        async for message in consumer:
            messages.append(message)
            if ack:
                await consumer.ack(message)
            if len(messages) == count:
                break
    return messages


async def numbers(producer: Producer, count: int) -> None:
    await producer.send_many([b"%d" % n for n in range(count)])


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
async def test_a_message_comes_as_it_was_sent(client: Client, topic: str, compression: str | None) -> None:
    async with client.producer(topic, name="p", compression=compression) as producer:  # type: ignore[arg-type]
        offsets = await asyncio.gather(
            producer.send(b"full", key="k", attributes={"a": "1", "b": ""}, publish_time=LONG_AGO),
            producer.send(b""),
            producer.send("größer".encode() * 1000, key="ключ"),
        )
        assert list(offsets) == [0, 1, 2]
    async with client.consumer(topic, subscription="s") as consumer:
        full, empty, large = await take(consumer, 3)
    assert (full.payload, full.key, full.attributes) == (b"full", "k", {"a": "1", "b": ""})
    assert (full.offset, full.topic, full.producer) == (0, topic, "p")
    assert full.publish_time == 1_767_225_600_000_000
    assert (empty.payload, empty.key, empty.attributes) == (b"", None, {})
    assert (large.payload, large.key) == ("größer".encode() * 1000, "ключ")


async def test_large_messages_have_a_batch_of_their_own(client: Client, topic: str) -> None:
    sizes = [10, 5 << 20, 10, 7 << 20, 10]
    async with client.producer(topic) as producer:
        assert await asyncio.gather(*(producer.send(bytes(size)) for size in sizes)) == list(range(5))
        with pytest.raises(Refused):
            await producer.send(bytes(9 << 20))
        assert await producer.send(b"after") == 5
    async with client.consumer(topic, subscription="s") as consumer:
        assert [len(message.payload) for message in await take(consumer, 6)] == [*sizes, 5]


async def test_many_messages_with_one_await(client: Client, topic: str) -> None:
    async with client.producer(topic) as producer:
        sent = await producer.send_many([b"%d" % n for n in range(25_000)])
        assert sum(part.count for part in sent) == 25_000
        assert sent[0] == Sent(topic, 0, 10_000)
    async with client.consumer(topic, subscription="s", type="exclusive") as consumer:
        payloads: list[bytes] = []
        while len(payloads) < 25_000:
            batch = await consumer.receive_batch(timeout=PATIENCE_S)
            assert batch is not None
            payloads += batch.payloads()
            await consumer.ack(batch)
        assert payloads == [b"%d" % n for n in range(25_000)]
        await consumer.flush()
    async with client.consumer(topic, subscription="s", type="exclusive") as consumer:
        assert await consumer.receive_batch(timeout=0.3) is None


async def test_partitions_keep_the_order_of_each_key(client: Client, topic: str) -> None:
    async with client.producer(topic, partitions=3) as producer:
        keys = [f"k{n % 10}" for n in range(1000)]
        await asyncio.gather(*(producer.send(b"%d" % n, key=key) for n, key in enumerate(keys)))
    async with client.consumer(topic, subscription="s") as consumer:
        messages = await take(consumer, 1000)
        await consumer.flush()
    assert {message.topic for message in messages} == {f"{topic}-part-{n}" for n in range(3)}
    for key in set(keys):
        of_key = [message for message in messages if message.key == key]
        assert len({message.topic for message in of_key}) == 1
        assert [int(message.payload) for message in of_key] == [n for n, k in enumerate(keys) if k == key]
    async with client.reader(topic, end="latest") as reader:
        assert sorted([int(message.payload) async for message in reader]) == list(range(1000))


async def test_shared_consumers_divide_the_messages(client: Client, topic: str) -> None:
    async with client.producer(topic) as producer:
        await numbers(producer, 0)
        async with (
            client.consumer(topic, subscription="s", receive_queue=100) as first,
            client.consumer(topic, subscription="s", receive_queue=100) as second,
        ):
            seen: list[Counter[bytes]] = [Counter(), Counter()]
            done = asyncio.Event()

            async def read(consumer: Consumer, counter: Counter[bytes]) -> None:
                async for message in consumer:
                    counter[message.payload] += 1
                    await consumer.ack(message)
                    if sum(map(sum, (c.values() for c in seen))) == 2000:
                        done.set()

            tasks = [asyncio.create_task(read(c, s)) for c, s in zip((first, second), seen, strict=True)]
            await numbers(producer, 2000)
            async with asyncio.timeout(PATIENCE_S):
                await done.wait()
        await asyncio.gather(*tasks)
    assert all(seen)
    assert seen[0] + seen[1] == Counter(b"%d" % n for n in range(2000))


async def test_key_shared_consumers_have_their_keys(client: Client, topic: str) -> None:
    async with (
        client.producer(topic) as producer,
        client.consumer(topic, subscription="s", type="key_shared", key_filters=["a*"]) as first,
        client.consumer(topic, subscription="s", type="key_shared", key_filters=["b*"]) as second,
    ):
        keys = [f"{'ab'[n % 2]}{n % 10}" for n in range(200)]
        await producer.send_many([b"%d" % n for n in range(200)], keys=keys)
        for consumer, letter in ((first, "a"), (second, "b")):
            messages = await take(consumer, 100)
            assert {(message.key or "")[0] for message in messages} == {letter}
            assert all(int(message.payload) == message.offset for message in messages)
            for key in {message.key for message in messages}:
                offsets = [message.offset or 0 for message in messages if message.key == key]
                assert offsets == sorted(offsets)


async def test_a_failover_consumer_takes_over(client: Client, topic: str) -> None:
    async with client.producer(topic) as producer:
        await numbers(producer, 10)
        second = client.consumer(topic, subscription="s", type="failover", name="b")
        async with client.consumer(topic, subscription="s", type="failover", name="a") as first:
            await second.open()
            assert [message.payload for message in await take(first, 4)] == [b"%d" % n for n in range(4)]
        assert [message.payload for message in await take(second, 6)] == [b"%d" % n for n in range(4, 10)]
        await second.close()


async def test_an_exclusive_subscription_takes_one_consumer_of_a_name(client: Client, topic: str) -> None:
    """A consumer of the same name takes over."""
    async with client.producer(topic) as producer:
        await numbers(producer, 3)
        async with client.consumer(topic, subscription="s", type="exclusive", name="a") as first:
            with pytest.raises(Refused) as caught:
                await client.consumer(topic, subscription="s", type="exclusive", name="b").open()
            assert caught.value.code == "subscription_busy"
            async with client.consumer(topic, subscription="s", type="exclusive", name="a") as again:
                assert len(await take(again, 3)) == 3
                with pytest.raises(ConsumerReplaced):
                    _ = [message async for message in first]


async def test_a_nacked_message_comes_again(client: Client, topic: str) -> None:
    async with client.producer(topic) as producer:
        await numbers(producer, 3)
    async with client.consumer(topic, subscription="s") as consumer:
        first, second, third = await take(consumer, 3, ack=False)
        await consumer.nack(second, delay_ms=10, reason="not now")
        await consumer.ack_many([first, third])
        batch = await consumer.receive_batch(timeout=PATIENCE_S)
        assert batch is not None
        assert (batch.payloads(), batch.attempt) == ([b"1"], 2)
        await consumer.ack(batch)


async def test_what_is_not_acked_comes_to_the_next_consumer(client: Client, topic: str) -> None:
    async with client.producer(topic) as producer:
        await numbers(producer, 10)
    async with client.consumer(topic, subscription="s") as consumer:
        for message in await take(consumer, 10, ack=False):
            if message.offset != 7:
                await consumer.ack(message)
    async with client.consumer(topic, subscription="s") as consumer:
        assert [message.offset for message in await take(consumer, 1)] == [7]
        assert await consumer.receive_batch(timeout=0.3) is None


async def test_a_subscription_begins_where_it_is_told(client: Client, topic: str) -> None:
    async with client.producer(topic, linger_ms=0) as producer:
        for n in range(6):
            await producer.send(b"%d" % n, publish_time=LONG_AGO + timedelta(minutes=n))
        async with client.consumer(topic, subscription="new", start="latest") as consumer:
            await producer.send(b"6")
            assert [message.offset for message in await take(consumer, 1)] == [6]
    for subscription, start in (("offset", 4), ("time", LONG_AGO + timedelta(minutes=3, seconds=30))):
        async with client.consumer(topic, subscription=subscription, start=start) as consumer:
            assert [message.offset for message in await take(consumer, 3)] == [4, 5, 6]


async def test_reading_by_offset_and_by_time(client: Client, topic: str) -> None:
    async with client.producer(topic, linger_ms=0) as producer:
        for n in range(10):
            await producer.send(b"%d" % n, publish_time=LONG_AGO + timedelta(minutes=n))
    async with client.reader(topic, start=3, end=7) as reader:
        assert [message.offset async for message in reader] == [3, 4, 5, 6]
    begin, end = LONG_AGO + timedelta(minutes=5), LONG_AGO + timedelta(minutes=8)
    async with client.reader(topic, start=begin, end=end) as reader:
        assert [message.offset async for message in reader] == [5, 6, 7]
    async with client.reader(topic, end="latest") as reader:
        table = [batch.to_arrow(["payload", "offset"]) async for batch in reader.batches()]
        assert sum(rows.num_rows for rows in table) == 10


async def test_a_reader_follows_what_is_published(client: Client, topic: str) -> None:
    async with client.producer(topic) as producer:
        await numbers(producer, 5)
        async with client.reader(topic, start="latest") as reader:
            await numbers(producer, 3)
            assert [(await anext(reader)).offset for _ in range(3)] == [5, 6, 7]


async def test_a_topic_that_keeps_nothing(client: Client, topic: str) -> None:
    async with client.producer(topic, reliable=False) as producer:
        await numbers(producer, 3)
        async with client.consumer(topic, subscription="s", start="latest") as consumer:
            await producer.send(b"now")
            (message,) = await take(consumer, 1)
            assert message.payload == b"now"
            await consumer.flush()
    with pytest.raises(Refused):
        await client.producer(topic, reliable=True).open()


async def test_producers_of_one_name_and_exclusive_ones(client: Client, topic: str) -> None:
    async with client.producer(topic, name="p") as first:
        await first.send(b"a")
        async with client.producer(topic, name="p") as second:
            await second.send(b"b")
            with pytest.raises(ProducerFenced):
                await first.send(b"c")
            with pytest.raises(Refused) as caught:
                await client.producer(topic, name="q", exclusive=True).open()
            assert caught.value.code == "producer_busy"


async def test_what_does_not_exist(client: Client) -> None:
    with pytest.raises(TopicUnknown):
        await client.consumer("/default/nowhere", subscription="s").open()
    with pytest.raises(TopicUnknown):
        await client.reader("/default/nowhere").open()
    with pytest.raises(Refused) as caught:
        await client.producer("/nowhere/topic").open()
    assert caught.value.code == "namespace_unknown"
    with pytest.raises(Refused) as caught:
        await client.producer("no topic").open()
    assert caught.value.code == "invalid_name"


async def test_sending_waits_for_room(client: Client, topic: str) -> None:
    async with client.producer(topic, max_pending=100, max_batch_messages=10) as producer:
        highest = 0

        async def send(n: int) -> int:
            nonlocal highest
            offset = await producer.send(b"%d" % n)
            highest = max(highest, producer._pending.messages)
            return offset

        offsets = await asyncio.gather(*(send(n) for n in range(5000)))
    assert offsets == list(range(5000))
    assert highest <= 100
