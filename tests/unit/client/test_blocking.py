"""The client without ``async``, against a broker in memory that runs in a thread."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

from sava.client import Closed, Message, Refused, Sent
from sava.client.blocking import Client
from tests.support.waiting import PATIENCE_S
from tests.unit.client.server import MemoryBroker

TOPIC = "/default/orders"


@pytest.fixture
def address() -> Iterator[str]:
    ready = threading.Event()
    found: list[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        async with MemoryBroker() as broker:
            stop = asyncio.Event()
            found.append((broker.address, asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    broker_address, loop, stop = found[0]
    yield broker_address
    loop.call_soon_threadsafe(stop.set)
    thread.join()


def test_producing_consuming_and_reading(address: str) -> None:
    with Client(f"http://{address}") as client:
        with client.producer(TOPIC) as producer:
            assert producer.send(b"a", key="k", attributes={"x": "1"}) == 0
            assert producer.send_many([b"b", b"c"]) == [Sent(TOPIC, 1, 2)]
            producer.flush()
        with client.consumer(TOPIC, subscription="s") as consumer:
            seen = []
            for message in consumer:
                seen.append(message)
                consumer.ack(message)
                if len(seen) == 3:
                    break
            consumer.flush()
            assert [message.payload for message in seen] == [b"a", b"b", b"c"]
            assert consumer.receive_batch(timeout=0.01) is None
            with pytest.raises(Refused):
                consumer.ack(Message(b"x", topic="/default/other", offset=0))
        with client.reader(TOPIC, end="latest") as reader:
            assert [message.payload for message in reader] == [b"a", b"b", b"c"]


def test_many_threads_share_a_producer(address: str) -> None:
    offsets: list[int] = []
    with Client(address) as client, client.producer(TOPIC) as producer:
        threads = [
            threading.Thread(target=lambda: offsets.extend(producer.send(b"x") for _ in range(20)))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(offsets) == list(range(160))


def test_closing_from_another_thread_ends_the_iteration(address: str) -> None:
    with Client(address) as client:
        with client.producer(TOPIC) as producer:
            producer.send(b"a")
        consumer = client.consumer(TOPIC, subscription="s")
        consumer.open()
        seen: list[Message] = []
        thread = threading.Thread(target=lambda: seen.extend(consumer))
        thread.start()
        while not seen and thread.is_alive():
            thread.join(0.01)
        consumer.close()
        thread.join(5)
        assert not thread.is_alive()
        assert len(seen) == 1


def test_ctrl_c_interrupts_what_waits_and_leaves_the_rest_usable(address: str) -> None:
    with Client(address) as client, client.producer(TOPIC) as producer:
        producer.send(b"a")
        with client.consumer(TOPIC, subscription="s") as consumer:
            assert consumer.receive_batch(timeout=PATIENCE_S) is not None
            main = threading.main_thread().ident
            assert main is not None
            timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                consumer.receive_batch()
            timer.join()
            producer.send(b"b")
            batch = consumer.receive_batch(timeout=PATIENCE_S)
            assert batch is not None
            assert batch.payloads() == [b"b"]


def test_a_closed_client_says_so(address: str) -> None:
    client = Client(address)
    producer = client.producer(TOPIC)
    client.close()
    with pytest.raises(Closed):
        producer.open()


def test_an_ack_after_the_client_was_closed_says_so(address: str) -> None:
    """It is passed on by the client's thread, which is gone: that was an error of asyncio's own."""
    with Client(f"http://{address}") as client:
        with client.producer(TOPIC) as producer:
            producer.send(b"x")
        consumer = client.consumer(TOPIC, subscription="s")
        consumer.open()
        batch = consumer.receive_batch()
        assert batch is not None
    with pytest.raises(Closed):
        consumer.ack(batch)
