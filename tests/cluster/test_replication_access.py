"""Remotes that let nobody in without a token. Sava's brokers ask for none; what stands before this one
does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sava.proto import replication_pb2 as pb
from tests.support.brokers import Standalone
from tests.support.replication import Gate, RunningLink, Side
from tests.support.waiting import until

ORDERS = "/default/orders"
SCHEMA = '{"type": "object", "properties": {"number": {"type": "integer"}}}'


@asynccontextmanager
async def clusters(tmp_path: Path) -> AsyncIterator[tuple[Side, Side, Gate]]:
    for name in ("east", "west"):
        (tmp_path / name).mkdir()
    with (
        Standalone(
            tmp_path / "east", SAVA__CLUSTER_NAME="east", SAVA__REPLICATION__SECRETS_DIR=str(tmp_path)
        ) as sender,
        Standalone(tmp_path / "west", SAVA__CLUSTER_NAME="west") as receiver,
    ):
        east, west = Side(sender), Side(receiver)
        gate = Gate(west.service)
        await asyncio.gather(east.ready(), west.ready(), gate.open())
        try:
            yield east, west, gate
        finally:
            await gate.close()


def write_token(tmp_path: Path, name: str, token: str) -> None:
    """As rotation does it: whole or not at all."""
    draft = tmp_path / "draft"
    draft.write_text(f"{token}\n")
    draft.chmod(0o600)
    draft.rename(tmp_path / name)


def publish(side: Side, start: int, end: int) -> None:
    with side.client() as client:
        codec = client.schema("orders")
        with client.producer(ORDERS, schema="orders", codec=codec) as producer:
            producer.send_many([{"number": number} for number in range(start, end)])


def numbers(side: Side) -> list[int]:
    return [json.loads(payload)["number"] for payload in side.payloads(ORDERS)]


async def partition(side: Side) -> pb.LinkPartition:
    (topic,) = await side.status(ORDERS)
    (found,) = topic.partitions
    return found


async def test_a_token_goes_with_every_call_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    async with clusters(tmp_path) as (east, west, gate):
        gate.token = "first"
        address = ("--service", gate.service_address)
        write_token(tmp_path, "wrong.token", "wrong")
        write_token(tmp_path, "west.token", "first")
        for token in ((), ("--token-file", "wrong.token")):
            _, err = await east.command("remotes", "add", "west", *address, *token, code=1)
            assert "remote west was not added" in err
            assert "the token is not one of this cluster" in err
        assert {token for _, token in gate.shown} == {"", "wrong"}
        gate.shown.clear()

        await east.command("remotes", "add", "west", *address, "--token-file", "west.token")
        await east.command("remotes", "test", "west")
        listed, _ = await east.command("remotes", "list", "-o", "json")
        assert "first" not in listed
        stored, _ = await east.command("meta", "range", "/cluster/remotes/")
        assert "west.token" in stored
        assert "first" not in stored
        await east.create(ORDERS)
        schema = tmp_path / "orders.json"
        schema.write_text(SCHEMA)
        await east.command("schemas", "register", "orders", "--type", "json_schema", "--file", str(schema))
        await asyncio.to_thread(publish, east, 0, 10)
        await east.command("subscriptions", "create", ORDERS, "billing", "--start", "earliest")
        await east.replicate("default", subscriptions=["billing"])
        link = RunningLink(east, secrets=tmp_path)
        try:

            async def has(count: int) -> bool:
                return len(await asyncio.to_thread(numbers, west)) >= count

            await until(lambda: has(10), "the first are copied")

            async def is_acked_there() -> bool:
                return ("ApplyAcks", "first") in gate.shown

            await until(is_acked_there, "the subscription is told")
            called = {
                "Hello",
                "DescribeTopics",
                "EnsureTopic",
                "EnsureSchema",
                "LookUp",
                "Append",
                "ApplyAcks",
            }
            assert set(gate.shown) == {(method, "first") for method in called}

            gate.token = "second"
            await asyncio.to_thread(publish, east, 10, 20)

            async def is_denied() -> bool:
                found = await partition(east)
                will_try = found.next_retry_ms > time.time() * 1000
                return found.state == "denied" and will_try and found.backlog == 10

            await until(is_denied, "the status says so, when it is tried again, and what waits")
            out, _ = await east.command("replication", "status", ORDERS, "-o", "json")
            ((shown,),) = [topic["partitions"] for topic in json.loads(out)]
            assert shown["state"] == "denied"
            assert "the token is not one of this cluster" in shown["reason"]
            assert abs(int(shown["next_retry_ms"]) - time.time() * 1000) < 60_000
            assert int(shown["backlog"]) == 10
            _, err = await east.command("remotes", "test", "west", code=1)
            assert "the token is not one of this cluster" in err
            assert len(numbers(west)) == 10

            write_token(tmp_path, "west.token", "second")
            await east.command("remotes", "test", "west")
            await until(lambda: has(20), "the new token is used", timeout=70)
            assert numbers(west) == list(range(20))

            async def is_well() -> bool:
                return (await partition(east)).state in ("active", "idle")

            await until(is_well, "the status says so")
        finally:
            link.stop()
