"""Addresses, keys, positions and errors: what a client makes of what it is given."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from grpc import aio

from sava.client import Client, ConsumerReplaced, Refused, TopicUnknown, Unavailable
from sava.client.connection import Connection, parse_addresses
from sava.client.errors import (
    ClientError,
    NotReached,
    PermissionDenied,
    Unanswered,
    Unauthenticated,
    error_of,
    of_change,
)
from sava.client.messages import microseconds, position_of
from sava.client.producer import fnv1a, partition_of
from sava.errors import Outcome
from sava.proto import streams_pb2 as pb
from tests.support.waiting import PATIENCE_S
from tests.unit.client.server import MemoryBroker


def test_addresses_are_written_in_several_ways() -> None:
    assert parse_addresses("http://127.0.0.1:6650") == (["127.0.0.1:6650"], False)
    assert parse_addresses("a:1, b:2") == (["a:1", "b:2"], False)
    assert parse_addresses(["https://a:1/", "https://b:2"]) == (["a:1", "b:2"], True)


@pytest.mark.parametrize(
    "wrong", ["", "host", "host:port", "ftp://host:1", [], ["http://a:1", "https://a:1"]]
)
def test_addresses_that_cannot_be_one_are_refused(wrong: Any) -> None:
    with pytest.raises(Refused):
        parse_addresses(wrong)


def test_keys_go_where_danube_sends_them() -> None:
    assert fnv1a("") == 0xCBF29CE484222325
    assert fnv1a("a") == 0xAF63DC4C8601EC8C
    assert fnv1a("foobar") == 0x85944171F73967E8
    assert partition_of("foobar", 3) == 0x85944171F73967E8 % 3


def test_a_time_without_a_zone_is_no_position() -> None:
    assert microseconds(datetime(1970, 1, 1, 0, 0, 1, 5, tzinfo=UTC)) == 1_000_005
    with pytest.raises(Refused, match="time zone"):
        microseconds(datetime(2026, 1, 1))  # noqa: DTZ001
    for wrong in (-1, "first", True, 1.5):
        with pytest.raises(Refused):
            position_of(wrong)  # type: ignore[arg-type]  # what a caller may pass by mistake


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "topic_unknown", TopicUnknown),
        (grpc.StatusCode.FAILED_PRECONDITION, "consumer_replaced", ConsumerReplaced),
        (grpc.StatusCode.FAILED_PRECONDITION, "schema_refused", Refused),
        (grpc.StatusCode.FAILED_PRECONDITION, "sequence_gap", Unavailable),
        (grpc.StatusCode.UNAVAILABLE, "not_owner", Unavailable),
        (grpc.StatusCode.UNAVAILABLE, "", NotReached),
        (grpc.StatusCode.UNAUTHENTICATED, "", Unauthenticated),
        (grpc.StatusCode.UNAUTHENTICATED, "token_invalid", Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, "permission_denied", PermissionDenied),
        (grpc.StatusCode.INTERNAL, "", Unavailable),
    ],
)
def test_errors_by_code_and_status(status: grpc.StatusCode, code: str, kind: type[ClientError]) -> None:
    trailing = aio.Metadata(("sava-code", code)) if code else aio.Metadata()
    error = error_of(aio.AioRpcError(status, aio.Metadata(), trailing, "why", None), "b:1")
    assert type(error) is kind
    assert error.code == code
    assert "why" in str(error)
    copy = error.again()
    assert (type(copy), str(copy), copy.code) == (kind, str(error), code)
    assert copy is not error


def _failed(status: grpc.StatusCode, details: str, *trailing: tuple[str, str]) -> aio.AioRpcError:
    return aio.AioRpcError(status, aio.Metadata(), aio.Metadata(*trailing), details, None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (_failed(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; refused"), NotReached),
        (_failed(grpc.StatusCode.UNAVAILABLE, "Socket closed"), Unanswered),
        (_failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), Unanswered),
        (_failed(grpc.StatusCode.UNAVAILABLE, "no", ("sava-code", "not_owner")), Unavailable),
        (
            _failed(
                grpc.StatusCode.UNKNOWN, "no", ("sava-code", "outcome_unknown"), ("sava-outcome", "unknown")
            ),
            Unanswered,
        ),
        (_failed(grpc.StatusCode.NOT_FOUND, "no"), Refused),
    ],
)
def test_a_change_that_may_have_been_sent_is_not_called_undone(
    error: aio.AioRpcError, kind: type[ClientError]
) -> None:
    failure = of_change(error, "b:1")
    assert type(failure) is kind
    assert (failure.outcome is Outcome.UNKNOWN) == (kind is Unanswered)


async def test_an_attempt_that_may_have_happened_outweighs_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first broker takes the request and dies; the second one refuses connections until the time is up.
    The second failure alone would say that nothing has happened."""
    answers = iter([Unanswered("sent"), *(NotReached("refused") for _ in range(1000))])

    async def call(*_: object, **__: object) -> None:
        raise next(answers)

    connection = Connection("a:1,b:1", token=None, tls=None, timeout=0.5)
    monkeypatch.setattr(connection, "call", call)
    with pytest.raises(Unanswered, match="an earlier attempt may have happened"):
        await connection.look_up("/default/t", create=True)
    await connection.close()


async def test_a_token_goes_with_every_call_and_is_asked_for_each_time(broker: MemoryBroker) -> None:
    broker.topic("/default/t")
    tokens = iter(["one", "two", "three"])
    async with (
        Client(broker.address, token=lambda: next(tokens)) as client,
        client.producer("/default/t"),
    ):
        assert ("authorization", "Bearer one") in broker.metadata
    assert next(tokens) == "three"

    async def token() -> str:
        return "from-afar"

    async with Client(broker.address, token=token) as client, client.producer("/default/t"):
        assert ("authorization", "Bearer from-afar") in broker.metadata


async def test_a_token_that_cannot_be_had_ends_the_producer(broker: MemoryBroker) -> None:
    tokens = iter(["one", "two"])
    async with (
        Client(broker.address, token=lambda: next(tokens)) as client,
        client.producer("/default/t", timeout=PATIENCE_S) as producer,
    ):
        await producer.send(b"x")
        await broker.break_streams()
        with pytest.raises(ClientError, match="StopIteration"):
            await asyncio.gather(*(producer.send(b"x") for _ in range(3)))


async def test_one_address_that_answers_is_enough(broker: MemoryBroker) -> None:
    dead = MemoryBroker()
    await dead.start()
    await dead.stop()
    async with Client([dead.address, broker.address]) as client, client.producer("/default/t") as producer:
        assert await producer.send(b"x") == 0


class Silenced(Connection):
    """Whose first address says nothing to two who ask it, whose time for it is over at the same moment."""

    def __init__(self) -> None:
        super().__init__("silent:1, good:2", token=None, tls=None, timeout=1.0)
        self.asked: list[str] = []
        self._moment = asyncio.Event()

    async def call(self, method: str, request: Any, *, target: str, **rest: Any) -> pb.LookUpResponse:
        self.asked.append(target)
        if target != "silent:1":
            return pb.LookUpResponse()
        if len(self.asked) == 2:
            self._moment.set()
        await self._moment.wait()
        raise Unavailable("it said nothing")


async def test_two_calls_that_fail_with_one_address_try_the_next_one() -> None:
    """Both fail at once, and neither goes past the next address.

    Each moved the turn on by one, which for two addresses is back to the first."""
    connection = Silenced()
    await asyncio.gather(*(connection.look_up("/default/t") for _ in range(2)))
    assert connection.asked == ["silent:1", "silent:1", "good:2", "good:2"]


async def test_no_broker_is_unavailable_within_the_timeout() -> None:
    dead = MemoryBroker()
    await dead.start()
    await dead.stop()
    async with Client(dead.address, timeout=0.3) as client:
        with pytest.raises(Unavailable):
            await client.producer("/default/t").open()
        with pytest.raises(Unavailable):
            await client.consumer("/default/t", subscription="s").open()
        with pytest.raises(Unavailable):
            await client.reader("/default/t").open()


async def test_a_broker_from_a_look_up_answers_when_the_given_one_is_gone(
    broker: MemoryBroker,
) -> None:
    async with MemoryBroker() as other, Client(broker.address, timeout=PATIENCE_S) as client:
        for each in (broker, other):
            each.topic("/default/orders")
        broker.elsewhere = other.address
        await client._connection.look_up("/default/orders")
        await broker.stop()
        found = await client._connection.look_up("/default/orders")
        assert [each.address for each in found.partitions] == [other.address]


async def test_a_process_that_was_forked_from_a_user_of_grpc_is_told(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Client(broker.address) as client:
        with pytest.raises(TopicUnknown):
            await client._connection.look_up("/default/orders")
        monkeypatch.setattr("os.getpid", lambda: 1)
        with pytest.raises(Refused, match="forked"):
            await client._connection.look_up("/default/orders")
        monkeypatch.undo()
