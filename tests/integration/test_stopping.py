"""How a broker process ends for those who are connected to it."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc import aio

from sava import config
from sava.metadata.operations import ClusterOperations
from sava.proto import danube_api_pb2 as pb
from sava.proto import danube_api_pb2_grpc as rpc
from sava.server import Broker, client_address, raft_address
from sava.services.faults import CODE_KEY, Trailing
from tests.integration.harness import FAST, storage_in
from tests.ports import free_ports


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
