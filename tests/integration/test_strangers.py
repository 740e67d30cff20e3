"""Whoever comes to a port of a broker with something else than its protocol, many times over: those who speak
it do not notice, the log says it in a few lines, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path

from sava.client import Client
from tests.support.brokers import BrokerProcess, Brokers
from tests.support.waiting import until

TIMES = 30
"""On each port, of each kind."""
MOST_LOG_BYTES = 20_000
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, stream: int, payload: bytes) -> bytes:
    """Of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes((kind, 0)) + stream.to_bytes(4, "big") + payload


SETTINGS = frame(4, 0, b"")
NOISE = random.Random(1).randbytes(3000)
STRANGERS = {
    "nothing": b"",
    "noise": NOISE,
    "half a preface": PREFACE[:12],
    "noise behind the preface": PREFACE + SETTINGS + NOISE,
    "headers without an end": PREFACE
    + SETTINGS
    + frame(1, 1, b"\x00\x7f\x80\x80\x01" + b"a" * 16_000)
    + frame(9, 1, b"a" * 16_384) * 100,
    "pings without an end": PREFACE + SETTINGS + frame(6, 0, b"12345678") * 10_000,
    "a request without an end": b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 1_000_000,
    "a hello of TLS": bytes.fromhex("16030100c8010000c40303") + NOISE[:190],
}


async def come(port: int, says: bytes) -> None:
    """Say it, take what is answered within a moment, and break the connection."""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(says)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await reader.read()
        finally:
            writer.transport.abort()


def open_files(broker: BrokerProcess) -> int:
    return len(list(Path(f"/proc/{broker.pid}/fd").iterdir()))


async def test_strangers_on_every_port_disturb_nobody(tmp_path: Path) -> None:
    async with Brokers(1, tmp_path) as cluster, Client(cluster.brokers[0].client_url) as client:
        (broker,) = cluster.brokers
        topic = str((await cluster.create("/default/orders")).name)
        ports = [
            int(broker.client_url.rpartition(":")[2]),
            int(broker.admin.rpartition(":")[2]),
            broker.raft_port,
            broker.http_port,
        ]
        async with client.producer(topic) as producer:
            await producer.send(b"before")
            files, lines = open_files(broker), len(broker.lines)
            sent = 1
            for says in STRANGERS.values():
                for port in ports:
                    await asyncio.gather(
                        *(come(port, says) for _ in range(TIMES)), producer.send(b"meanwhile")
                    )
                    sent += 1
            assert await producer.send(b"after") == sent

            async def nothing_stays() -> bool:
                return open_files(broker) < files + TIMES // 2  # some are the broker's own

            await until(nothing_stays, "their connections are closed")
        assert (await broker.http("/readyz"))[0] == 200
        assert sum(map(len, broker.lines[lines:])) < MOST_LOG_BYTES
