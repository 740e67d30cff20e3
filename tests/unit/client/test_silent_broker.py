"""Brokers that fall silent with their connections open, and lines that are only slow."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from sava.client import Client, liveness
from sava.client.connection import Connection, open_stream
from sava.client.errors import Unavailable
from sava.proto import streams_pb2 as pb
from tests.support.waiting import PATIENCE_S, until
from tests.unit.client.server import MemoryBroker

TOPIC = "/default/t"

_BROKER = """
import asyncio
from tests.unit.client.server import MemoryBroker

async def main():
    async with MemoryBroker() as broker:
        broker.topic("/default/t")
        print(broker.address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Stoppable:
    """A broker in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _BROKER], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def one_stoppable() -> Iterator[Stoppable]:
    broker = Stoppable()
    yield broker
    broker.close()


@pytest.fixture
def stoppable(one_stoppable: Stoppable) -> Iterator[Stoppable]:
    """It runs when a test begins."""
    yield one_stoppable
    one_stoppable.resume()


@asynccontextmanager
async def slow_line(broker: MemoryBroker, bytes_per_s: int) -> AsyncIterator[str]:
    """An address that leads to the broker; what goes there goes slowly."""

    async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_slow: bool) -> None:
        try:
            while data := await source.read(16 << 10):
                sink.write(data)
                await sink.drain()
                if is_slow:
                    await asyncio.sleep(len(data) / bytes_per_s)
        except ConnectionError:
            pass
        finally:
            sink.close()

    async def accept(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        far_source, far_sink = await asyncio.open_connection("127.0.0.1", broker.port)
        await asyncio.gather(carry(source, far_sink, is_slow=True), carry(far_source, sink, is_slow=False))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=16 << 10)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_a_producer_leaves_a_stopped_broker_within_seconds(
    broker: MemoryBroker, stoppable: Stoppable
) -> None:
    """Schedule: a producer is open; its broker is stopped; a message is sent there. The producer finds out,
    and sends the message to the other broker."""
    broker.topic(TOPIC)
    async with (
        Client([stoppable.address, broker.address], timeout=PATIENCE_S) as client,
        client.producer(TOPIC, linger_ms=0, timeout=PATIENCE_S) as producer,
    ):
        stoppable.stop()
        began = time.monotonic()
        await asyncio.wait_for(producer.send(b"0"), PATIENCE_S)
        assert time.monotonic() - began < 5.0
    assert broker.topics[TOPIC].payloads() == [b"0"]


async def test_a_question_leaves_a_stopped_broker_within_seconds(
    broker: MemoryBroker, stoppable: Stoppable
) -> None:
    """A broker that never answered has a little longer, for nothing is known of the way to it. The next
    question does not go there at all."""
    broker.topic(TOPIC)
    stoppable.stop()
    async with Client([stoppable.address, broker.address], timeout=PATIENCE_S) as client:
        began = time.monotonic()
        await asyncio.wait_for(client._connection.look_up(TOPIC), PATIENCE_S)
        first = time.monotonic() - began
        assert first < 6.0
        client._connection._turn = 0
        began = time.monotonic()
        await asyncio.wait_for(client._connection.look_up(TOPIC), PATIENCE_S)
        assert time.monotonic() - began < 1.0


async def test_a_stream_that_waits_for_its_connection_ends_with_the_broker() -> None:
    """A topic moves to a broker that has just stopped.

        client ── where is it? ──▶ there ── TCP connects (the kernel does it) ── HTTP/2 never begins
                                              the opening waits for the connection
        the broker is found silent ──▶ the call is cancelled ──▶ the opening must end, not at its time limit

    gRPC does not wake the writer of a call that is cancelled before it has a connection: clients waited ten
    seconds for a topic that another broker served after two."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        target = f"127.0.0.1:{mute.getsockname()[1]}"
        connection = Connection(target, token=None, tls=None, timeout=PATIENCE_S)
        async with open_stream(connection, "Publish", target) as stream:
            opening = asyncio.create_task(stream.open(pb.PublishRequest()))
            accepted, _ = await asyncio.to_thread(mute.accept)
            connection.liveness(target)._give_up()
            with accepted, pytest.raises(Unavailable, match="has fallen silent"):
                await opening
        await connection.close()


async def test_a_waiting_consumer_leaves_a_stopped_broker_within_seconds(
    broker: MemoryBroker, stoppable: Stoppable
) -> None:
    """Nothing is to be delivered when the broker is stopped, so nothing but the pings shows it."""
    broker.topic(TOPIC)
    async with (
        Client([stoppable.address, broker.address], timeout=PATIENCE_S) as client,
        client.consumer(TOPIC, subscription="s"),
    ):
        watched = client._connection.liveness(stoppable.address)
        await until(lambda: watched._probe is not None, "the second connection is there")
        stoppable.stop()
        began = time.monotonic()
        await until(lambda: bool(broker.openings), "the consumer is at the other broker")
        assert time.monotonic() - began < 6.0


async def test_a_broker_that_takes_its_time_is_not_left(broker: MemoryBroker) -> None:
    """No receipt comes for much longer than it takes to suspect a broker; it is there, and is waited for on
    the same stream."""
    broker.topic(TOPIC)
    async with (
        Client(broker.address, timeout=PATIENCE_S) as client,
        client.producer(TOPIC, linger_ms=0, timeout=PATIENCE_S) as producer,
    ):
        await producer.send(b"0")
        broker.receipts.clear()
        sending = asyncio.ensure_future(producer.send(b"1"))
        await asyncio.sleep(3 * liveness.QUIET_S + liveness.CONFIRM_S)  # the time itself is what is tested
        assert not sending.done()
        broker.receipts.set()
        await sending
    assert len(broker.openings) == 1


async def test_a_slow_line_is_not_taken_for_a_silent_broker(broker: MemoryBroker) -> None:
    """A batch takes several seconds to go over the line; pings on the same connection would wait behind
    it."""
    broker.topic(TOPIC)
    async with slow_line(broker, 500_000) as address:
        broker.elsewhere = address
        async with (
            Client(address, timeout=PATIENCE_S) as client,
            client.producer(TOPIC, linger_ms=0, max_batch_bytes=4 << 20, timeout=PATIENCE_S) as producer,
        ):
            await producer.send(b"0")
            began = time.monotonic()
            await asyncio.wait_for(producer.send(b"x" * (2 << 20)), PATIENCE_S)
            assert time.monotonic() - began > liveness.QUIET_S + liveness.CONFIRM_S, "the line is slow"
    assert [count for _, count in broker.received] == [1, 1], "nothing was sent twice"


async def test_a_client_that_was_stopped_leaves_no_broker(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client slept through is not silence of the broker: the quiet begins again when it wakes."""
    broker.topic(TOPIC)
    asked: list[float] = []

    async def is_there(watched: liveness.Liveness) -> bool:
        asked.append(time.monotonic())
        return False

    monkeypatch.setattr(liveness.Liveness, "_is_there", is_there)
    async with (
        Client(broker.address, timeout=PATIENCE_S) as client,
        client.consumer(TOPIC, subscription="s"),
    ):
        await asyncio.sleep(liveness.QUIET_S / 2)
        time.sleep(2 * liveness.QUIET_S)  # noqa: ASYNC251 (the loop stands still)
        await asyncio.sleep(liveness.QUIET_S / 2)
        assert not asked
