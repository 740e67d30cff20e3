"""The client without ``async`` against a real broker."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from sava.client.blocking import Client
from tests.support.brokers import Standalone


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Standalone(tmp_path_factory.mktemp("broker")) as broker, Client(broker.url, timeout=60) as client:
        yield client


def test_a_round_trip(client: Client) -> None:
    with client.producer("/default/orders", name="p") as producer:
        assert producer.send(b"first", key="k", attributes={"a": "1"}) == 0
        sent = producer.send_many([b"%d" % n for n in range(2000)])
        assert sum(part.count for part in sent) == 2000
    with client.consumer("/default/orders", subscription="s") as consumer:
        seen = []
        for message in consumer:
            seen.append(message)
            consumer.ack(message)
            if len(seen) == 2001:
                break
        consumer.flush()
        assert (seen[0].payload, seen[0].key, seen[0].attributes) == (b"first", "k", {"a": "1"})
        assert [message.offset for message in seen] == list(range(2001))
    with client.consumer("/default/orders", subscription="s") as consumer:
        assert consumer.receive_batch(timeout=0.3) is None
    with client.reader("/default/orders", start=1, end="latest") as reader:
        assert [message.payload for message in reader] == [b"%d" % n for n in range(2000)]


def test_threads_share_a_client(client: Client) -> None:
    with client.producer("/default/shared", partitions=2) as producer:

        def send(name: str) -> None:
            for n in range(100):
                producer.send(b"%d" % n, key=name)

        threads = [threading.Thread(target=send, args=(f"thread-{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        with client.consumer("/default/shared", subscription="s") as consumer:
            by_key: dict[str | None, list[int]] = {}
            for count, message in enumerate(consumer, 1):
                by_key.setdefault(message.key, []).append(int(message.payload))
                consumer.ack(message)
                if count == 400:
                    break
        for thread in threads:
            thread.join()
    assert by_key == {f"thread-{n}": list(range(100)) for n in range(4)}
