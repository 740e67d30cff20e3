"""How a broker process ends for those who are connected to it."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc import aio

from sava import config
from sava.metadata.store import ClusterOperations
from sava.peers.error_mapping import CODE_KEY, Trailing
from sava.proto import danube_api_pb2 as pb
from sava.proto import danube_api_pb2_grpc as rpc
from sava.raft.types import InvariantError
from sava.server import Broker, client_address, process, raft_address
from sava.tasks import cancelled
from sava.topics.names import TopicName
from sava.wal.disk import LocalFile
from tests.support.brokers import FAST, storage_in
from tests.support.network import free_ports
from tests.support.topics import publish
from tests.support.waiting import PATIENCE_S, until

ORDERS = TopicName("default", "orders")


LIMIT_S = 20.0
"""What has to hang here, hangs for ever. Far from the limit of a part (5 s), below that of the process."""


def settings_in(directory: Path) -> config.Config:
    names = ("client", "admin", "raft", "prometheus")
    overlay = {
        "broker": {"host": "127.0.0.1", "ports": dict(zip(names, free_ports(4), strict=True))},
        "meta_store": {**FAST, "data_dir": str(directory)},
        "storage": storage_in(directory),
    }
    return config.load(None, {}, overlay)


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[tuple[Broker, config.Config]]:
    """A broker that has a topic. The test closes it."""
    settings = settings_in(directory)
    broker = Broker(settings)
    await broker.start()
    await ClusterOperations(broker.node).init([raft_address(settings)])
    await broker.topics.ready()
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: broker.parts.readiness()[0])
        await broker.topics.create(ORDERS, reliable=True)
        await until(lambda: ORDERS in broker.topics.loaded)
    yield broker, settings


async def test_a_broker_whose_pump_has_died_stops_at_once(tmp_path: Path) -> None:
    """An impossible state ended the node. What is left asks it for positions, leases and leadership: each is
    refused at once, and nothing waits for an answer that cannot come."""
    async with serving(tmp_path) as (broker, _):
        broker.node.fail(InvariantError("a state that cannot be"))
        async with asyncio.timeout(LIMIT_S):
            await broker.close()
        assert "a state that cannot be" in broker.supervisor.reason


async def test_a_broker_whose_disk_hangs_stops_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """fsync      of the journal and of the consensus log does not return, on the threads that write them
    broker     is asked to stop: it leaves behind what waits for the disk, and closes the rest

    What is synced on the loop itself (the end of a journal's life) blocks it, with every limit that is a
    timer of the loop; for that there is a thread, which the last test of a process here is about.
    """
    back, hung = threading.Event(), threading.Event()
    sync = LocalFile.sync

    def hang(self: LocalFile) -> None:
        if threading.current_thread() is not threading.main_thread():
            hung.set()
            back.wait()
        sync(self)

    async with serving(tmp_path) as (broker, settings):
        topic = broker.topics.loaded[ORDERS]
        monkeypatch.setattr(LocalFile, "sync", hang)
        publishing = asyncio.create_task(publish(topic, "x"))
        await asyncio.to_thread(hung.wait)
        try:
            async with asyncio.timeout(2 * LIMIT_S):
                assert not await broker.close()
            assert "left behind part=consensus node" in caplog.text
            with pytest.raises(ConnectionError):
                await asyncio.open_connection("127.0.0.1", settings.broker.ports.prometheus)
        finally:
            back.set()
            await cancelled(publishing)


async def test_callers_that_do_not_end_do_not_keep_a_broker(tmp_path: Path) -> None:
    """One has sent half a request, one does not read the page that it asked for, one holds a call open that
    nothing will answer: they had their time first, up to 30 s."""
    async with serving(tmp_path) as (broker, settings):
        ports = settings.broker.ports
        _, half = await asyncio.open_connection("127.0.0.1", ports.prometheus)
        half.write(b"GET /metrics HTTP/1.1\r\n")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            deaf.connect(("127.0.0.1", ports.prometheus))
            deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            async with aio.insecure_channel(f"127.0.0.1:{ports.admin}") as channel:
                call = channel.unary_stream("/sava.admin.Meta/Watch", None, None)(b"")
                await asyncio.sleep(0.2)  # so that all of them are there
                async with asyncio.timeout(LIMIT_S / 2):
                    await broker.close()
                call.cancel()
        half.close()


async def test_a_process_that_is_asked_to_stop_before_it_has_started_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start waits for something. SIGTERM was noted, and looked at when the start was over."""
    monkeypatch.setattr(process, "end_at_last", lambda _: None)
    waiting = asyncio.Event()

    class Slow(Broker):
        async def start(self) -> None:
            waiting.set()
            await asyncio.Event().wait()

    stop = asyncio.Event()
    starting = asyncio.create_task(process._started(Slow(settings_in(tmp_path)), stop))
    await waiting.wait()
    stop.set()
    assert await asyncio.wait_for(starting, PATIENCE_S) is False


async def test_a_process_ends_although_its_loop_is_blocked(tmp_path: Path) -> None:
    """A limit that is a timer of the loop is none when the loop itself waits."""
    program = (
        "import asyncio, time\n"
        "from sava.server import process\n"
        "process.END_S, process.LAST_RESORT_S = 0.2, 0.1\n"
        "class Broker:\n"
        "    async def close(self):\n"
        "        time.sleep(600)\n"
        "asyncio.run(process._close(Broker()))\n"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await asyncio.wait_for(child.wait(), PATIENCE_S) == process.EXIT_FAILED


async def test_the_client_port_answers_until_the_process_is_gone(tmp_path: Path) -> None:
    """A gRPC server that nobody holds stops by itself, and cancels its calls:

    SIGTERM ─▶ topics are closed ─▶ the exit stack lets go of the client port ─▶ the node closes its log …
               a producer of Danube sends meanwhile: CANCELLED, which it raises to its application
    """
    names = ("client", "admin", "raft", "prometheus")
    overlay = {
        "broker": {"host": "127.0.0.1", "ports": dict(zip(names, free_ports(4), strict=True))},
        "meta_store": {**FAST, "data_dir": str(tmp_path)},
        "storage": storage_in(tmp_path),
    }
    settings = config.load(None, {}, overlay)
    broker = Broker(settings)
    await broker.start()
    broker.leaves_clients = True
    try:
        await ClusterOperations(broker.node).init([raft_address(settings)])
        await broker.topics.ready()
        async with aio.insecure_channel(client_address(settings)) as channel:
            stub: Any = rpc.ProducerServiceStub(channel)
            opening = pb.ProducerRequest(
                topic_name="/default/orders", producer_name="p", dispatch_strategy=pb.Reliable
            )
            opened = await stub.CreateProducer(opening)
            sending = pb.StreamMessage(
                payload=b"x",
                producer_name="p",
                msg_id=pb.MsgID(producer_id=opened.producer_id, topic_name="/default/orders"),
            )
            await stub.SendMessage(sending)
            await broker.close()
            gc.collect()
            await asyncio.sleep(0.1)  # a server that stops by itself does it in a task
            with pytest.raises(aio.AioRpcError) as refused:
                await stub.SendMessage(sending, timeout=5)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            keys = [item[0] for item in cast(Trailing, refused.value.trailing_metadata() or ())]
            assert CODE_KEY in keys, "the broker itself has answered"
    finally:
        broker.leaves_clients = False
        await broker._stop_client_port()
