"""Brokers that fall silent under the calls of pipelines and replication, with their connections open."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio

from sava.client.connection import Connection
from sava.client.errors import Unavailable
from sava.client.loop_thread import LoopThread
from sava.pipeline.calls import ClusterCalls, read_tails
from sava.pipeline.replicate.target import EncodedRange, Owners, TargetStream
from sava.proto import replica_pb2 as pb
from sava.proto import replica_pb2_grpc as rpc
from tests.support.network import LostAnswers
from tests.support.waiting import PATIENCE_S

TOPIC = "/default/t"


class Replica(rpc.ReplicaServicer):
    """Takes calls and ranges, and answers only the opening of a stream."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def ReadEach(self, request: Any, context: Any) -> AsyncIterator[pb.ReadEachResponse]:  # noqa: N802
        self.asked.set()
        await asyncio.Event().wait()
        yield pb.ReadEachResponse()

    async def Append(self, requests: Any, context: Any) -> AsyncIterator[pb.AppendResponse]:  # noqa: N802
        async for request in requests:
            if request.HasField("open"):
                yield pb.AppendResponse(opened=pb.SourceOpened())
            else:
                self.asked.set()


@pytest.fixture
async def replica() -> AsyncIterator[tuple[Replica, LostAnswers]]:
    servicer, server = Replica(), aio.server()
    rpc.add_ReplicaServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with LostAnswers(f"127.0.0.1:{port}") as proxy:
        yield servicer, proxy
    await server.stop(None)


def connection_to(proxy: LostAnswers) -> Connection:
    return Connection(proxy.address, token=None, tls=None, timeout=PATIENCE_S)


async def test_a_read_of_several_partitions_leaves_a_silent_broker(
    replica: tuple[Replica, LostAnswers], caplog: pytest.LogCaptureFixture
) -> None:
    """The broker has taken the call when its network is cut. The client's second connection gets no answer
    either, and the read ends with that, long before gRPC's keepalive or the deadline."""
    servicer, proxy = replica
    caplog.set_level(logging.INFO, "sava.pipeline.calls")
    connection = connection_to(proxy)
    calls = ClusterCalls(connection)
    calls.owner(TOPIC).answered(proxy.address)
    reading = asyncio.create_task(
        read_tails(calls, proxy.address, {TOPIC: (0, 1)}, timeout=PATIENCE_S, max_bytes=1000)
    )
    async with asyncio.timeout(PATIENCE_S):
        await servicer.asked.wait()
        proxy.forward_nothing()
        assert await reading == {}
    assert "has fallen silent" in caplog.text
    assert calls.owner(TOPIC).target == "", "the next call looks the partition up"
    await connection.close()


async def test_an_append_stream_leaves_a_silent_target(replica: tuple[Replica, LostAnswers]) -> None:
    """A range is on its way when the target's network is cut. The copier that waits for its receipt learns of
    the silence, and opens the stream at another broker."""
    servicer, proxy = replica
    loop, connection = LoopThread("copier"), connection_to(proxy)
    owners = Owners()
    until = time.monotonic() + PATIENCE_S

    async def learn() -> None:
        owners.learn(TOPIC, proxy.address)

    def copy() -> None:
        loop.run(learn())
        stream = TargetStream(loop, connection, owners, TOPIC, pb.Source())
        try:
            stream.open(until=until, end_by=until)
            stream.put(EncodedRange(0, 1, True, b"bytes", (0,), 0), until=until)
            stream.settle(until=until)
        finally:
            stream.close()

    copying = asyncio.create_task(asyncio.to_thread(copy))
    async with asyncio.timeout(PATIENCE_S):
        await servicer.asked.wait()
        proxy.forward_nothing()
        with pytest.raises(Unavailable, match="has fallen silent"):
            await copying
    await asyncio.to_thread(loop.run, connection.close())
    await asyncio.to_thread(loop.close)
