"""Brokers that show each other their certificates also when they forward."""

from __future__ import annotations

from pathlib import Path

from sava.client import Client, Tls
from tests.support.brokers import Brokers
from tests.support.certificates import make_certificates
from tests.support.waiting import PATIENCE_S

TOPIC = "/default/orders"


async def test_calls_are_forwarded_over_tls(tmp_path: Path) -> None:
    auth = make_certificates(tmp_path / "certificates")
    assert auth.tls is not None
    async with Brokers(2, tmp_path, auth=auth) as cluster:
        await cluster.create(TOPIC)
        (other,) = await cluster.others(TOPIC)
        assert (await cluster.describe(TOPIC, through=other)).next_offset == 0
        (move,) = await cluster.unload(TOPIC)
        assert not move.error
        (other,) = await cluster.others(TOPIC)
        tls = Tls(ca=auth.tls.ca_file, cert=auth.tls.cert_file, key=auth.tls.key_file)
        async with Client(other.client_url, tls=tls, timeout=PATIENCE_S) as client:
            async with client.producer(TOPIC) as producer:
                assert await producer.send(b"x") == 0
            async with client.reader(TOPIC, end="latest") as reader:
                assert [message.payload async for message in reader] == [b"x"]
