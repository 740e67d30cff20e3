"""Asking other clusters, over real connections: who answers, and what becomes of those who do not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from sava.api.remotes import RemoteClusters, parse_service
from sava.proto import replica_pb2 as pb
from sava.proto import replica_pb2_grpc as rpc
from sava.replication.records import RemoteDenied, RemoteRecord, RemoteRefused, RemoteUnreachable
from tests.support.network import free_ports


class Replica(rpc.ReplicaServicer):
    def __init__(self, token: str = "") -> None:
        self._token = token
        self.topics: list[pb.TopicShape] = []

    async def _admit(self, context: Any) -> None:
        given = dict(context.invocation_metadata()).get("authorization", "")
        if self._token and given != f"Bearer {self._token}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not known")

    async def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloResponse:  # noqa: N802
        await self._admit(context)
        return pb.HelloResponse(cluster_name="west", cluster_id="id-west", version="1")

    async def DescribeTopics(  # noqa: N802
        self, request: pb.DescribeTopicsRequest, context: Any
    ) -> pb.DescribeTopicsResponse:
        await self._admit(context)
        return pb.DescribeTopicsResponse(topics=self.topics)


@asynccontextmanager
async def serving(*services: Replica) -> AsyncIterator[str]:
    server = aio.server()
    for service in services:
        rpc.add_ReplicaServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


def remote(service: str, **more: Any) -> RemoteRecord:
    return RemoteRecord(service=service, cluster_name="", cluster_id="", **more)


async def test_the_first_address_that_answers_is_enough() -> None:
    (dead,) = free_ports(1)
    async with serving(Replica()) as address:
        identity = await RemoteClusters().hello(remote(f"127.0.0.1:{dead}, http://{address}/"))
        assert (identity.cluster_name, identity.cluster_id, identity.version) == ("west", "id-west", "1")


async def test_an_empty_remote_is_unreachable_and_every_address_is_named() -> None:
    one, other = free_ports(2)
    with pytest.raises(RemoteUnreachable) as caught:
        await RemoteClusters().hello(remote(f"127.0.0.1:{one},127.0.0.1:{other}"))
    assert f"127.0.0.1:{one} cannot be reached" in str(caught.value)
    assert f"127.0.0.1:{other} cannot be reached" in str(caught.value)


async def test_a_token_goes_with_every_question() -> None:
    async with serving(Replica("secret")) as address:
        assert (await RemoteClusters().hello(remote(address, token="secret"))).cluster_name == "west"
        for token in ("", "wrong"):
            with pytest.raises(RemoteDenied, match="the token is not known"):
                await RemoteClusters().hello(remote(address, token=token))


async def test_something_else_that_speaks_grpc_is_refused() -> None:
    async with serving() as address:
        with pytest.raises(RemoteRefused, match="takes no replicas"):
            await RemoteClusters().hello(remote(address))


async def test_shapes_come_in_the_order_of_the_question() -> None:
    replica = Replica()
    replica.topics = [
        pb.TopicShape(topic="/default/b", namespace_exists=True),
        pb.TopicShape(
            topic="/default/a", namespace_exists=True, exists=True, partition_count=3, reliable=True,
            missing=[1], topic_ids=[5, 0, 6], schema_subject="orders",
        ),
    ]  # fmt: skip
    async with serving(replica) as address:
        a, b = await RemoteClusters().describe("west", remote(address), ["/default/a", "/default/b"])
        assert (a.topic, b.topic, b.there.exists) == ("/default/a", "/default/b", False)
        assert (a.there.remote, a.there.partitions, a.there.missing) == ("west", 3, (1,))
        assert (a.there.topic_ids, a.schema_subject) == ((5, 0, 6), "orders")
        with pytest.raises(RemoteRefused, match="/default/c"):
            await RemoteClusters().describe("west", remote(address), ["/default/c"])


@pytest.mark.parametrize(
    "service", ["", "west", "west:", ":6650", "ftp://west:6650", "west:6650,", "https://a:1,http://b:1"]
)
def test_addresses_that_are_none(service: str) -> None:
    with pytest.raises(RemoteRefused):
        parse_service(service)


async def test_certificates_that_are_not_on_this_machine_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "ca.pem"
    with pytest.raises(RemoteRefused, match=r"ca\.pem cannot be read by this broker"):
        await RemoteClusters().hello(remote("west:6650", tls_ca=str(missing)))
    with pytest.raises(RemoteRefused, match="a certificate needs its key"):
        await RemoteClusters().hello(remote("west:6650", tls_cert=str(missing)))
