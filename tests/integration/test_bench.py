"""``sava bench`` against a real broker, also with a stream that somebody has doctored: it must notice."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest

from sava.client import Client
from tests.support.brokers import Standalone, sava
from tests.support.long import IS_LONG, only_long
from tests.support.processes import PIPE, Child, start_child, start_sava
from tests.support.waiting import until


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Standalone]:
    with Standalone(tmp_path) as running:
        async with Client(running.url, timeout=60) as client, client.producer("/default/ready"):
            pass
        yield running


async def bench(broker: Standalone, *arguments: str, check: bool = True) -> tuple[int, dict[str, Any], str]:
    code, out, err = await sava(
        *("bench", *arguments, "--service", broker.url, "--admin", broker.admin, "-o", "json"), check=check
    )
    return code, json.loads(out), err


async def produce(broker: Standalone, *arguments: str) -> dict[str, Any]:
    _, out, _ = await sava("bench", "produce", *arguments, "--service", broker.url, "-o", "json")
    made: dict[str, Any] = json.loads(out)
    return made


async def subscriptions(broker: Standalone, topic: str) -> list[Any]:
    _, out, _ = await sava("subscriptions", "list", topic, "-o", "json", admin=broker.admin)
    listed: list[Any] = json.loads(out)
    return listed


CLEAN = dict.fromkeys(
    ("lost", "unread", "duplicates", "reordered", "late", "foreign", "uncertain", "open_ended"), 0
)


@pytest.mark.parametrize(
    ("kind", "consumers"), [("exclusive", 1), ("shared", 2), ("failover", 2), ("key_shared", 2)]
)
async def test_what_was_produced_is_consumed_and_accounted_for(
    broker: Standalone, kind: str, consumers: int
) -> None:
    topic = f"/default/{kind.replace('_', '-')}"
    made = await produce(
        broker,
        *(topic, "--count", "3000", "--size", "50-200", "--keys", "7", "--partitions", "2"),
        *("--producers", "2"),
    )
    assert made["published"]["count"] == 3000
    assert made["published"]["failed"] == 0
    assert made["published"]["latency_ms"]["p99"] > 0
    _, used, _ = await bench(
        broker, "consume", topic, "--type", kind, "--consumers", str(consumers), "--idle", "1"
    )
    assert used["consumed"]["count"] == 3000
    assert used["messages"] == {"received": 3000, **CLEAN}
    assert await subscriptions(broker, topic) == []


async def test_what_a_run_was_not_told_to_read_is_not_lost(broker: Standalone) -> None:
    """One partition is read ahead of the others, so that much of what lies before it is missing."""
    topic = "/default/much"
    await produce(broker, topic, "--count", "9000", "--size", "100", "--partitions", "3", "--keys", "50")
    for limit in (("--count", "2000"), ("--count", "2000", "--type", "shared", "--consumers", "3")):
        _, used, _ = await bench(broker, "consume", topic, *limit)
        assert used["consumed"]["count"] >= 2000
        assert used["messages"]["unread"] > 0
        assert used["messages"]["lost"] == 0
    _, used, _ = await bench(broker, "consume", topic, "--count", "20000", "--idle", "1")
    assert used["messages"] == {"received": 9000, **CLEAN}


async def test_a_subscription_that_goes_on_where_it_was_stopped_has_lost_nothing(broker: Standalone) -> None:
    """Its partitions were left at different places; consumers that shared one had acked here and there."""
    topic = "/default/stopped"
    await produce(broker, topic, "--count", "9000", "--size", "100", "--partitions", "3", "--keys", "50")
    for kind, consumers in (("exclusive", 1), ("shared", 3)):
        arguments = ("consume", topic, "-s", kind, "--type", kind, "--consumers", str(consumers))
        _, first, _ = await bench(broker, *arguments, "--count", "2000")
        _, rest, _ = await bench(broker, *arguments, "--idle", "1")
        assert first["messages"]["lost"] == rest["messages"]["lost"] == 0
        assert first["consumed"]["count"] + rest["consumed"]["count"] == 9000
    assert len(await subscriptions(broker, topic)) == 2


async def test_a_message_that_is_lost_is_noticed_by_a_subscription_that_goes_on(broker: Standalone) -> None:
    await produce(broker, "/default/whole", "--count", "100", "--size", "64")
    async with Client(broker.url) as client:
        async with client.reader("/default/whole", end="latest") as reader:
            stream = [message.payload async for message in reader]
        async with client.producer("/default/holed") as producer:
            await producer.send_many(stream[:60] + stream[61:])
    await bench(broker, "consume", "/default/holed", "-s", "any", "--count", "30")
    code, rest, _ = await bench(broker, "consume", "/default/holed", "-s", "any", "--idle", "1", check=False)
    assert (code, rest["messages"]["lost"]) == (1, 1)


async def test_messages_that_come_slowly_are_waited_for(broker: Standalone) -> None:
    """Each comes later than an idle consumer was told to wait: there is more, so it is not the end."""
    topic = "/default/slow"
    await produce(broker, topic, "--count", "5", "--size", "64")
    await sava("topics", "set-policy", topic, "--max-subscription-dispatch-rate", "1", admin=broker.admin)
    _, used, _ = await bench(broker, "consume", topic, "--idle", "0.2")
    assert used["consumed"]["count"] == 5
    assert used["consumed"]["seconds"] > 2
    assert used["messages"] == {"received": 5, **CLEAN}


async def test_what_was_on_its_way_to_another_consumer_is_not_out_of_order(broker: Standalone) -> None:
    """Somebody shares the subscription, takes the first messages and leaves without an ack when the others
    have the rest: they get them now, behind later ones. A shared subscription promises nothing else."""
    topic = "/default/left-behind"
    await produce(broker, topic, "--count", "1000", "--size", "64")
    async with Client(broker.url) as client:
        leaver = client.consumer(topic, subscription="any", receive_queue=100)
        await leaver.open()
        assert await leaver.receive_batch(100) is not None
        consuming = asyncio.create_task(
            bench(
                *(broker, "consume", topic, "-s", "any", "--type", "shared", "--consumers", "2"),
                *("--idle", "0.5"),
            )
        )

        async def is_the_rest_acked() -> bool:
            (found,) = await subscriptions(broker, topic)
            return bool(found["backlog"] <= 200)  # what it took, and what fills its queue again

        await until(is_the_rest_acked, "the others have the rest")
        await leaver.close()
        _, used, _ = await consuming
    assert used["consumed"]["count"] == 1000
    assert used["messages"] == {"received": 1000, **CLEAN}


async def test_what_comes_in_one_moment_has_no_rate(broker: Standalone) -> None:
    await produce(broker, "/default/once", "--count", "10", "--size", "64")
    _, used, _ = await bench(broker, "consume", "/default/once", "--count", "5")
    assert (used["consumed"]["count"], used["consumed"]["seconds"]) == (5, 0)
    assert used["consumed"]["per_second"] is None


async def test_a_run_that_is_interrupted_shows_what_it_has_found(broker: Standalone) -> None:
    begun = {
        ("produce", "/default/long", "--rate", "100", "--duration", "100"): "published [1-9]",
        ("consume", "/default/ready", "--idle", "100"): "consumed 0",
        ("latency", "/default/both-ways", "--rate", "100", "--duration", "100"): "consumed [1-9]",
        ("metadata", "--operation", "get", "--rate", "100", "--duration", "100", "--keys", "5"): "get: [1-9]",
    }
    async with AsyncExitStack() as stack:
        runs = [await stack.enter_async_context(running(broker, *arguments)) for arguments in begun]
        told = await asyncio.gather(*map(interrupted, runs, begun.values()))
    assert [each["load"] for each in told] == ["produce", "consume", "latency", "metadata"]
    published, consumed, both, called = told
    assert published["published"]["count"] > 0
    assert consumed["consumed"]["count"] == 0
    assert both["consumed"]["latency_ms"]["p99"] > 0
    assert both["messages"]["lost"] == 0
    assert called["done"]["count"] > 0
    assert called["done"]["seconds"] > 0
    assert await subscriptions(broker, "/default/both-ways") == []


@asynccontextmanager
async def running(broker: Standalone, *arguments: str) -> AsyncIterator[Child]:
    process = await start_sava(
        *("bench", *arguments, "-o", "json"),
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, "SAVA_SERVICE": broker.url, "SAVA_ADMIN": broker.admin},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()


async def interrupted(process: Child, begun: str) -> dict[str, Any]:
    """When it has told that it has begun."""
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while not re.search(begun, (await process.stderr.readline()).decode()):
            assert process.returncode is None
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert process.returncode == 130, err.decode()
    shown: dict[str, Any] = json.loads(out)
    return shown


async def test_a_topic_that_does_not_exist_is_complained_of_once(broker: Standalone) -> None:
    code, out, err = await sava(
        *("bench", "consume", "/default/none", "--service", broker.url, "--admin", broker.admin), check=False
    )
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "does not exist" in err


async def test_a_doctored_stream_is_noticed(broker: Standalone) -> None:
    """Of a stream that a producer made, one message in the middle is left out, five come twice and one comes
    too late."""
    await produce(broker, "/default/made", "--count", "1000", "--size", "64")
    async with Client(broker.url) as client:
        async with client.reader("/default/made", end="latest") as reader:
            stream = [message.payload async for message in reader]
        assert len(stream) == 1001
        late = stream.pop(700)
        doctored = stream[:200] + stream[201:500] + stream[495:800] + [late] + stream[800:]
        async with client.producer("/default/doctored") as producer:
            await producer.send_many(doctored)
    code, used, err = await bench(broker, "consume", "/default/doctored", "--idle", "1", check=False)
    assert code == 1
    assert "1 lost, 5 duplicates, 1 reordered" in err
    assert used["messages"] == {"received": 1004, **CLEAN, "lost": 1, "duplicates": 5, "reordered": 1}


@only_long("more of the same")
async def test_latency_is_told_for_both_ways(broker: Standalone) -> None:
    _, told, _ = await bench(
        broker, "latency", "/default/both", "--rate", "500", "--duration", "1", "--partitions", "2"
    )
    assert told["published"]["count"] == told["consumed"]["count"] == 500
    assert (told["parameters"]["seconds"], told["parameters"]["start"]) == (1, "latest")
    for way in ("published", "consumed"):
        latency = told[way]["latency_ms"]
        assert 0 < latency["min"] <= latency["p50"] <= latency["p99"] <= latency["max"]
    assert told["messages"] == {"received": told["published"]["count"], **CLEAN}
    assert await subscriptions(broker, "/default/both") == []


async def test_a_rate_is_kept(broker: Standalone) -> None:
    made = await produce(broker, "/default/paced", "--rate", "300", "--duration", "2")
    assert made["published"]["count"] == 600


@pytest.mark.parametrize("operation", ["put", "get", "local-get", "txn"] if IS_LONG else ["get", "txn"])
async def test_the_metadata_store_is_called_and_left_clean(broker: Standalone, operation: str) -> None:
    _, out, _ = await sava(
        *("bench", "metadata", "--operation", operation, "--count", "200", "--callers", "4", "--keys", "10"),
        *("-o", "json"),
        admin=broker.admin,
    )
    done = json.loads(out)["done"]
    assert (done["count"], done["failed"]) == (200, 0)
    _, left, _ = await sava("meta", "range", "/bench/", "-o", "json", admin=broker.admin)
    assert json.loads(left) == []


@only_long("more of the same")
async def test_csv_is_a_header_and_a_row(broker: Standalone) -> None:
    _, out, _ = await sava(
        "bench", "produce", "/default/csv", "--count", "10", "-o", "csv", "--service", broker.url
    )
    [row] = csv.DictReader(io.StringIO(out))
    assert row["published.count"] == "10"
    assert float(row["published.latency_ms.p99.9"]) > 0


async def test_a_terminal_sees_how_far_it_is(broker: Standalone) -> None:
    near, far = pty.openpty()
    arguments = ("bench", "produce", "/default/shown", "--duration", "2", "--rate", "100")
    process = await start_child(
        *(sys.executable, "-m", "sava.cli", *arguments, "--service", broker.url),
        stdout=DEVNULL,
        stderr=far,
        env={**os.environ, "TERM": "xterm"},
    )
    assert await process.wait() == 0
    os.close(far)
    shown = os.read(near, 1 << 20).decode()
    os.close(near)
    assert "messages, " in shown
    assert "/s now" in shown


@only_long("half a minute, which is how long a message may wait for its receipt")
async def test_a_run_against_a_dead_broker_ends_and_reports_all_that_was_due(
    broker: Standalone,
) -> None:
    async with running(broker, "produce", "/default/gone", "--rate", "100", "--duration", "10") as process:
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while not re.search("published [1-9]", (await process.stderr.readline()).decode()):
                assert process.returncode is None
        broker.kill()
        async with asyncio.timeout(90):
            out, err = await process.communicate()
    assert process.returncode == 1
    published = json.loads(out)["published"]
    assert published["failed"] > 0
    assert published["count"] + published["failed"] == 1000
    assert "not published" in err.decode().splitlines()[-1]


async def test_a_topic_is_taken_as_it_is(broker: Standalone) -> None:
    await sava("topics", "create", "/default/loose", "--non-reliable", admin=broker.admin)
    made = await produce(broker, "/default/loose", "--count", "10")
    assert made["published"]["count"] == 10


async def test_messages_that_cannot_be_published_are_a_failure(broker: Standalone) -> None:
    await sava("topics", "create", "/default/small", admin=broker.admin)
    await sava("topics", "set-policy", "/default/small", "--max-message-size", "100", admin=broker.admin)
    code, _, err = await sava(
        *("bench", "produce", "/default/small", "--count", "10", "--size", "200", "--service", broker.url),
        check=False,
    )
    assert code == 1
    assert "100" in err
