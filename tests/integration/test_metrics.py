"""What a real broker tells Prometheus, beside what was really done."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sava.client import Client
from sava.doctor.observation import Samples, fetch, parsed
from tests.support.brokers import Standalone
from tests.support.waiting import until


async def test_disks_and_the_journal_are_told_of(tmp_path: Path) -> None:
    with Standalone(tmp_path) as broker:
        async with Client(broker.url, timeout=60) as client, client.producer("/default/orders") as producer:
            await producer.send_many([b"x" * 1000] * 100)
        told = parsed(await fetch(f"127.0.0.1:{broker.http_port}", "/metrics"))
    free = {labels["use"]: value for labels, value in told["sava_disk_free_bytes"]}
    size = {labels["use"]: value for labels, value in told["sava_disk_size_bytes"]}
    assert free.keys() == size.keys() == {"metadata", "journal", "segments"}
    assert all(0 < free[use] < size[use] for use in free)
    [(_, syncs)] = told["sava_journal_sync_seconds_count"]
    [(_, written)] = told["sava_journal_sync_bytes_sum"]
    assert syncs >= 1
    assert written >= 100_000


async def told_by(broker: Standalone) -> Samples:
    return parsed(await fetch(f"127.0.0.1:{broker.http_port}", "/metrics"))


def of(told: Samples, name: str, **labels: str) -> float:
    [value] = [value for found, value in told[name] if labels.items() <= found.items()]
    return value


async def test_what_became_of_the_messages_of_a_subscription(tmp_path: Path) -> None:
    with Standalone(tmp_path) as broker:
        async with Client(broker.url, timeout=60) as client:
            async with client.producer("/default/orders") as producer:
                await producer.send_many([b"x"] * 100)
            async with client.consumer("/default/orders", subscription="s", start="earliest") as consumer:
                messages = [await anext(aiter(consumer)) for _ in range(100)]
                for message in messages[:3]:
                    await consumer.nack(message, delay_ms=0)
                again = [await anext(aiter(consumer)) for _ in range(3)]
                await consumer.ack_many([*messages[3:60], *again])

                async def is_acked() -> bool:
                    return of(await told_by(broker), "sava_subscription_acked_messages_total") == 60

                await until(is_acked, "the broker has the acks")
                told = await told_by(broker)
            figures = {
                name.removeprefix("sava_subscription_"): of(
                    told, name, topic="/default/orders", subscription="s"
                )
                for name in told
                if name.startswith("sava_subscription_")
            }
            assert figures == {
                "delivered_messages_total": 103,
                "redelivered_messages_total": 3,
                "nacked_messages_total": 3,
                "acked_messages_total": 60,
                "backlog_messages": 40,
                "unacked_messages": 40,
                "consumers": 1,
                **{f"{name}_messages_total": 0 for name in ("timed_out", "dropped", "dead_lettered")},
                **{f"skipped_by_{cause}_messages_total": 0 for cause in ("filter", "retention")},
                "blocked": 0,
                "failing": 0,
            }
            assert of(told, "sava_topic_messages_total", topic="/default/orders") == 100


async def test_what_a_non_reliable_topic_drops_is_counted_where_somebody_sees_it(tmp_path: Path) -> None:
    """A subscription whose consumer has gone gets nothing for a minute, and then ends. What was published
    meanwhile was in no figure at all, and neither were the messages of the topic."""
    with Standalone(tmp_path) as broker:
        async with Client(broker.url, timeout=60) as client:
            async with client.producer("/default/ticks", reliable=False) as producer:
                async with client.consumer("/default/ticks", subscription="s") as consumer:
                    await producer.send_many([b"x"] * 5)
                    for _ in range(5):
                        await anext(aiter(consumer))

                async def is_alone() -> bool:
                    return of(await told_by(broker), "sava_subscription_consumers") == 0

                await until(is_alone, "the broker knows that the consumer has gone")
                await producer.send_many([b"x"] * 7)
            told = await told_by(broker)
    assert of(told, "sava_topic_messages_total", topic="/default/ticks") == 12
    assert of(told, "sava_subscription_delivered_messages_total", subscription="s") == 5
    assert of(told, "sava_subscription_dropped_messages_total", subscription="s") == 7
    assert "sava_subscription_backlog_messages" not in told


async def test_after_a_restart_the_own_disk_has_what_is_committed(tmp_path: Path) -> None:
    """The position of the own disk was 0 until the next message, as if it lacked the whole journal."""
    broker = Standalone(tmp_path)
    with broker:
        async with Client(broker.url, timeout=60) as client, client.producer("/default/orders") as producer:
            await producer.send(b"x" * 1000)
        broker.stop()
    with broker:

        async def is_open() -> bool:
            return of(await told_by(broker), "sava_journal_open") == 1

        await asyncio.to_thread(broker.ready)
        await until(is_open, "the broker has a journal")
        told = {labels["position"]: end for labels, end in (await told_by(broker))["sava_journal_position"]}
    assert told["end"] > 1000
    assert told["durable"] == told["committed"] == told["end"]
