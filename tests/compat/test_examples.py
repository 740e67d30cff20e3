"""The published danube-client, unmodified: its documentation's examples and each of its features, against a
broker as users start it. Every scenario runs in a process of its own (``scripts``)."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from typing import Any

import pytest

from sava.proto import danube_admin_pb2 as admin
from tests.compat import raw
from tests.compat.programs import run
from tests.compat.raw import Producer, set_policy, subscribe
from tests.compat.stubs import Stubs
from tests.support.brokers import REPOSITORY, Standalone
from tests.support.processes import PIPE, start_child
from tests.support.waiting import PATIENCE_S

BOTH = pytest.mark.parametrize("reliable", [True, False], ids=["reliable", "non-reliable"])


# -- the documentation's examples ----------------------------------------------------------------


async def test_readme_simple(broker: Standalone, topic: str) -> None:
    result = await run("readme", "simple", broker.url, topic=topic)
    assert result == {
        "message_id": 2,  # the client counts its requests, and the first created the producer
        "payload": "Hello Danube",
        "topic": topic,
        "producer": "test_producer",
    }


async def test_readme_reliable(broker: Standalone, topic: str) -> None:
    received = await run("readme", "reliable", broker.url, topic=topic)
    assert received == [[f"message {number}", str(number), number] for number in range(20)]


async def test_readme_partitions(broker: Standalone, topic: str) -> None:
    received = await run("readme", "partitions", broker.url, topic=topic)
    expected = {(str(number), f"{topic}-part-{number % 3}") for number in range(9)}
    assert {tuple(each) for each in received} == expected


async def test_readme_key_shared_with_filters(broker: Standalone, topic: str) -> None:
    received = await run("readme", "key_shared", broker.url, topic=topic)
    assert sorted(received) == [["0", "payment"], ["2", "invoice"], ["3", "payment"]]


async def test_readme_schema(broker: Standalone, topic: str) -> None:
    result = await run("readme", "schema", broker.url, topic=topic)
    assert result["registered"] == result["received"]
    assert (result["version"], result["definition_is_raw"]) == (1, True)


# -- subscription types --------------------------------------------------------------------------


@BOTH
async def test_exclusive_subscriptions_each_get_everything(
    broker: Standalone, topic: str, reliable: bool
) -> None:
    received = await run("subscriptions", "fan_out", broker.url, topic=topic, reliable=reliable)
    assert received == [[str(number) for number in range(10)]] * 3 + [["late"]]


@BOTH
@pytest.mark.parametrize("partitions", [0, 3])
async def test_shared_consumers_split_the_messages(
    broker: Standalone, topic: str, reliable: bool, partitions: int
) -> None:
    received = await run(
        "subscriptions", "shared", broker.url, topic=topic, reliable=reliable, partitions=partitions
    )
    assert sorted(int(text) for part in received for text in part) == list(range(300))
    assert all(received), "everybody gets some"


@BOTH
async def test_failover_promotes(broker: Standalone, topic: str, reliable: bool) -> None:
    result = await run("subscriptions", "failover", broker.url, topic=topic, reliable=reliable)
    assert result == {
        "received": [["for the first"], ["still for the first"], ["for the second"]],
        "second_was_silent": True,
    }


@BOTH
@pytest.mark.parametrize("partitions", [0, 2])
async def test_key_shared_consumers_have_their_keys(
    broker: Standalone, topic: str, reliable: bool, partitions: int
) -> None:
    received = await run(
        "subscriptions", "key_shared", broker.url, topic=topic, reliable=reliable, partitions=partitions
    )
    assert sorted(number for part in received for _, number in part) == list(range(200))
    for part in received:
        by_key: dict[str, list[int]] = {}
        for key, number in part:
            by_key.setdefault(key, []).append(number)
        assert all(numbers == sorted(numbers) for numbers in by_key.values())
        if not partitions:
            assert all(len(numbers) == 10 for numbers in by_key.values()), "a key has one consumer"


@BOTH
async def test_key_filters(broker: Standalone, topic: str, reliable: bool) -> None:
    result = await run("subscriptions", "key_filters", broker.url, topic=topic, reliable=reliable)
    assert Counter(result["eu"]) == Counter(["eu-west", "uk-1", "eu-"])
    assert Counter(result["us"]) == Counter(["us-east", "us-1"])


async def test_exclusive_lets_the_next_one_in(broker: Standalone, topic: str) -> None:
    result = await run("subscriptions", "exclusive_is_exclusive", broker.url, topic=topic)
    assert result == {"refused": "PERMISSION_DENIED", "received": ["hello"]}


# -- redelivery ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [raw.EXCLUSIVE, raw.SHARED, raw.FAILOVER, raw.KEY_SHARED])
async def test_a_nacked_message_comes_again(broker: Standalone, topic: str, kind: int) -> None:
    result = await run("redelivery", "nack", broker.url, topic=topic, kind=kind)
    assert result["same"]
    assert result["silent"]
    assert 1.1 < result["waited"] < 3.0


async def test_a_message_that_is_not_acked_in_time_comes_again(
    broker: Standalone, stubs: Stubs, topic: str
) -> None:
    await Producer.create(stubs, topic)
    await subscribe(stubs, topic)
    await set_policy(stubs, topic, ack_timeout_ms=500)
    result = await run("redelivery", "ack_timeout", broker.url, topic=topic)
    assert result == {"same": True, "silent": True}


async def test_a_consumer_that_returns_gets_what_it_left(broker: Standalone, topic: str) -> None:
    assert await run("redelivery", "reconnect", broker.url, topic=topic) == ["4", "5", "6", "7", "8", "9"]


async def test_a_shared_consumer_takes_over_what_another_left(broker: Standalone, topic: str) -> None:
    result = await run("redelivery", "shared_takes_over", broker.url, topic=topic)
    assert result["texts"] == ["0", "1", "2", "3", "4"]
    assert result["seconds"] < 2.0


async def test_poison_is_dropped(broker: Standalone, stubs: Stubs, topic: str) -> None:
    await Producer.create(stubs, topic)
    await subscribe(stubs, topic)
    await set_policy(stubs, topic, max_redelivery_count=1, poison_policy=admin.Drop)
    result = await run("redelivery", "poison", broker.url, topic=topic)
    assert sorted(result["received"]) == ["good", "poison", "poison"]
    assert result["silent"]


async def test_poison_goes_to_the_dead_letters(broker: Standalone, stubs: Stubs, topic: str) -> None:
    await Producer.create(stubs, topic)
    await subscribe(stubs, topic)
    dead = f"{topic}-dead"
    await set_policy(
        stubs, topic, max_redelivery_count=1, poison_policy=admin.DeadLetter, dead_letter_topic=dead
    )
    result = await run("redelivery", "dead_letters", broker.url, topic=topic, dead=dead)
    assert (result["payload"], result["key"]) == ("poison", "key")
    attributes = result["attributes"]
    assert attributes["a"] == "1"
    assert attributes["x-original-topic"] == topic
    assert attributes["x-original-subscription"] == "subscription"
    assert attributes["x-original-topic-offset"] == "0"


# -- schemas -------------------------------------------------------------------------------------


async def test_the_schema_registry(broker: Standalone, topic: str) -> None:
    result = await run("schemas", "registry", broker.url, subject=f"{topic}-subject")
    assert len(set(result["ids"])) == 1, "a subject has one id"
    assert result["versions"] == [1, 2]
    assert result["latest"][0] == 2
    assert result["latest"][2] == "json_schema"
    assert "age" in json.dumps(result["latest"][1])
    assert result["older"][0] == 1
    assert result["fingerprint"].startswith("sha256:")


async def test_schemas_evolve_by_their_rules(broker: Standalone, topic: str) -> None:
    result = await run("schemas", "evolution", broker.url, subject=f"{topic}-subject")
    expected: dict[str, Any] = {
        "compatible": True,
        "breaking": False,
        "refused": True,
        "relaxed": True,
        "deleted": True,
        "versions": [1, 2],
        "left": [1],
        "latest": 1,
    }
    assert {key: result[key] for key in expected} == expected
    assert result["reasons"]


async def test_schemas_of_every_type(broker: Standalone, topic: str) -> None:
    result = await run("schemas", "every_type", broker.url, prefix=f"{topic}-subject")
    assert result["distinct"] == 6
    assert result["kinds"] == result["expected"]


async def test_producers_choose_a_version(broker: Standalone, topic: str) -> None:
    result = await run("schemas", "version_selection", broker.url, topic=topic, subject=f"{topic}-subject")
    assert result == {"versions": [2, 1, 2], "refused": [True, True, True], "without": False}


async def test_a_topic_enforces_its_schema(broker: Standalone, topic: str) -> None:
    subject = f"{topic}-subject"
    result = await run("schemas", "topic_config", broker.url, topic=topic, subject=subject)
    assert result == {
        "refused": "FAILED_PRECONDITION",
        "subject": subject,
        "policy": ["enforce", True],
        "same_id": True,
        "changed": ["none", False],
    }


# -- our own page --------------------------------------------------------------------------------


async def test_the_example_of_the_protocols_page(broker: Standalone, topic: str) -> None:
    page = (REPOSITORY / "docs" / "danube.md").read_text()
    (program,) = re.findall(r"^## A program\n\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    program = program.replace("http://127.0.0.1:6650", broker.url).replace("/default/orders", topic)
    process = await start_child(sys.executable, "-c", program, stdout=PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert output.decode() == "an order at offset 0\n"
