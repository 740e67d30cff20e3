"""What a client shows to brokers: tokens that end, come from files and callables, and stay out of texts."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import grpc
import pytest

from sava.client import (
    Client,
    OutcomeUnknown,
    PermissionDenied,
    Producer,
    Refused,
    Tls,
    Unauthenticated,
    blocking,
)
from sava.security.credentials import Credentials, CredentialsInvalid
from tests.support.waiting import PATIENCE_S
from tests.unit.client.server import UNKNOWN_TOKEN, Fault, MemoryBroker

TOPIC = "/default/t"


@pytest.fixture
def guarded(broker: MemoryBroker) -> MemoryBroker:
    """A broker that accepts one token."""
    broker.topic(TOPIC)
    broker.tokens = {"first"}
    return broker


async def expire(broker: MemoryBroker, *accepted: str) -> None:
    """The broker ends all streams, and accepts these tokens from now on."""
    broker.break_with = UNKNOWN_TOKEN
    broker.tokens = {*accepted}
    await broker.break_streams()


# -- where a token comes from ----------------------------------------------------------------------


async def test_a_file_is_read_with_every_call(guarded: MemoryBroker, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    async with Client(guarded.address, token=file, timeout=PATIENCE_S) as client:
        async with client.producer(TOPIC) as producer:
            assert await producer.send(b"x") == 0
        guarded.tokens = {"second"}
        file.write_text("second")
        async with client.producer(TOPIC) as producer:
            assert await producer.send(b"y") == 1
    assert guarded.shown == ["first", "first", "second", "second"]


def test_the_client_without_async_takes_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("two\nlines")
    with (
        blocking.Client("127.0.0.1:1", token=tmp_path / "token", timeout=PATIENCE_S) as client,
        pytest.raises(Refused, match="holds no token"),
    ):
        client.producer(TOPIC).open()


@pytest.mark.parametrize("token", ["two words", "two\nlines", "x" * (17 << 10), "n\u00e4", "\x00"])
def test_a_text_that_is_no_token_is_refused_and_not_shown(token: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        Client("127.0.0.1:1", token=token)
    (tmp_path / "token").write_text(token)
    with pytest.raises(CredentialsInvalid, match="token") as in_file:
        asyncio.run(Credentials(token=tmp_path / "token").metadata())
    with pytest.raises(CredentialsInvalid) as given:
        asyncio.run(Credentials(token=lambda: token).metadata())
    for error in (caught, in_file, given):
        assert token[:20] not in str(error.value)


def test_no_text_of_credentials_holds_the_token(tmp_path: Path) -> None:
    assert "marker" not in repr(Credentials(token="marker"))
    assert "marker" not in repr(Credentials(token=lambda: "marker"))
    assert str(tmp_path) in repr(Credentials(token=tmp_path))


# -- tokens that end -------------------------------------------------------------------------------


async def test_a_callable_is_asked_again_when_its_token_has_ended(guarded: MemoryBroker) -> None:
    tokens = iter(["stale", "first", "first"])
    async with (
        Client(guarded.address, token=lambda: next(tokens), timeout=PATIENCE_S) as client,
        client.producer(TOPIC) as producer,
    ):
        assert await producer.send(b"x") == 0
    assert guarded.shown == ["stale", "first", "first"]


async def test_a_producer_survives_the_end_of_its_token(guarded: MemoryBroker) -> None:
    current = ["first"]
    async with (
        Client(guarded.address, token=lambda: current[0], timeout=PATIENCE_S) as client,
        client.producer(TOPIC) as producer,
    ):
        assert await producer.send(b"x") == 0
        current[0] = "second"
        await expire(guarded, "second")
        assert await producer.send(b"y") == 1


async def test_a_consumer_survives_the_end_of_its_token(guarded: MemoryBroker, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    async with (
        Client(guarded.address, token=file, timeout=PATIENCE_S) as client,
        client.producer(TOPIC) as producer,
        client.consumer(TOPIC, subscription="s") as consumer,
    ):
        file.write_text("second")
        await expire(guarded, "second")
        await producer.send(b"x")
        batch = await consumer.receive_batch(timeout=PATIENCE_S)
        assert [message.payload for message in batch or ()] == [b"x"]


async def test_partitions_whose_streams_end_together_all_come_back(guarded: MemoryBroker) -> None:
    guarded.partitioned("/default/p", 4)
    current = ["first"]
    async with (
        Client(guarded.address, token=lambda: current[0], timeout=PATIENCE_S) as client,
        client.producer("/default/p") as producer,
    ):
        for turn, token in enumerate(("second", "third")):
            current[0] = token
            await expire(guarded, token)
            await asyncio.gather(*(producer.send(b"x", key=str(turn + key)) for key in range(16)))


async def refused(producer: Producer) -> None:
    """Send until the producer has ended: what was on its way then is in doubt, and the rest refused."""
    outcomes = await asyncio.gather(*(producer.send(b"y") for _ in range(3)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {Unauthenticated, OutcomeUnknown}


async def test_a_source_that_gives_the_same_again_ends_the_producer(guarded: MemoryBroker) -> None:
    async with (
        Client(guarded.address, token=lambda: "first", timeout=PATIENCE_S) as client,
        client.producer(TOPIC, timeout=PATIENCE_S) as producer,
    ):
        await producer.send(b"x")
        await expire(guarded)
        await refused(producer)
        with pytest.raises(Unauthenticated):
            await producer.send(b"z")
    # By the look-up and the stream; and once more if gRPC lost the status to a write at the same moment.
    assert set(guarded.shown) == {"first"}
    assert 2 <= len(guarded.shown) <= 3


async def test_a_source_of_ever_new_tokens_gets_one_more_attempt(guarded: MemoryBroker) -> None:
    """A revoked user, whose callable makes a fresh token each time."""
    numbers = count()
    tokens: Iterator[str] = (f"{number}" for number in numbers)
    guarded.tokens = {"0", "1"}
    async with (
        Client(guarded.address, token=lambda: next(tokens), timeout=PATIENCE_S) as client,
        client.producer(TOPIC, timeout=PATIENCE_S) as producer,
    ):
        await producer.send(b"x")
        await expire(guarded)
        await refused(producer)
        with pytest.raises(Unauthenticated, match="expired"):
            await producer.send(b"z")
        assert guarded.shown == ["0", "1", "2", "3"]
        with pytest.raises(Unauthenticated, match="expired"):
            await client.producer(TOPIC).open()
    assert guarded.shown == ["0", "1", "2", "3", "4", "5"]


async def test_a_token_that_was_given_as_text_is_not_sent_twice(guarded: MemoryBroker) -> None:
    async with Client(guarded.address, token="stale", timeout=PATIENCE_S) as client:
        with pytest.raises(Unauthenticated, match="expired"):
            await client.producer(TOPIC).open()
    assert guarded.shown == ["stale"]


async def test_a_missing_permission_is_not_tried_again(guarded: MemoryBroker) -> None:
    guarded.refuse_opening = Fault(grpc.StatusCode.PERMISSION_DENIED, "permission_denied", "needs produce")
    async with Client(guarded.address, token=lambda: "first", timeout=PATIENCE_S) as client:
        with pytest.raises(PermissionDenied, match="needs produce"):
            await client.producer(TOPIC).open()
    assert len(guarded.openings) == 1


# -- the way there ---------------------------------------------------------------------------------


async def test_a_token_without_tls_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    credentials = Credentials(token="marker")
    with caplog.at_level(logging.WARNING):
        for target in ("127.0.0.1:1", "localhost:1", "[::1]:1", "127.3.4.5:1"):
            await credentials.open_channel(target).close(None)
        assert caplog.text == ""
        for target in ("broker.example:1", "10.0.0.1:1", "127.0.0.1.example:1"):
            await credentials.open_channel(target).close(None)
    assert caplog.text.count("without TLS") == 1
    assert "marker" not in caplog.text


async def test_with_tls_nothing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await Credentials(tls=Tls(), token="marker").open_channel("broker.example:1").close(None)
    assert caplog.text == ""


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    for half in ({"cert": "c"}, {"key": "k"}):
        with pytest.raises(CredentialsInvalid, match="needs its"):
            Tls(**half)
    assert Tls().context().verify_mode is ssl.CERT_REQUIRED
    with pytest.raises(CredentialsInvalid, match="cannot be used"):
        Tls(ca=tmp_path / "missing").context()
