"""Asking other clusters, over real connections: who answers, and what becomes of those who do not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from sava.api.remotes import AllowedAddresses, RemoteClusters, parse_service
from sava.proto import replica_pb2 as pb
from sava.proto import replica_pb2_grpc as rpc
from sava.replication.records import RemoteDenied, RemoteRecord, RemoteRefused, RemoteUnreachable
from sava.security.secret_files import SecretFiles
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


HERE = Path("/nonexistent")


def asking(
    directory: Path = HERE, allowed: Sequence[str] | None = None, *, is_loopback_allowed: bool = True
) -> RemoteClusters:
    addresses = AllowedAddresses(allowed, is_loopback_allowed=is_loopback_allowed)
    return RemoteClusters(SecretFiles(directory, "replication.secrets_dir"), addresses, timeout=3.0)


async def test_the_first_address_that_answers_is_enough() -> None:
    (dead,) = free_ports(1)
    async with serving(Replica()) as address:
        identity = await asking().hello(remote(f"127.0.0.1:{dead}, http://{address}/"))
        assert (identity.cluster_name, identity.cluster_id, identity.version) == ("west", "id-west", "1")


async def test_every_address_without_an_answer_is_named() -> None:
    one, other = free_ports(2)
    with pytest.raises(RemoteUnreachable) as caught:
        await asking().hello(remote(f"127.0.0.1:{one},127.0.0.1:{other}"))
    assert str(caught.value).startswith(f"could not connect to 127.0.0.1:{one}, 127.0.0.1:{other} (")


async def test_a_token_goes_with_every_question(tmp_path: Path) -> None:
    for name in ("secret", "wrong"):
        (tmp_path / name).write_text(f"{name}\n")
        (tmp_path / name).chmod(0o600)
    async with serving(Replica("secret")) as address:
        named = remote(address, token_file="secret")
        assert (await asking(tmp_path).hello(named)).cluster_name == "west"
        for name in ("", "wrong"):
            with pytest.raises(RemoteDenied, match="the token is not known"):
                await asking(tmp_path).hello(remote(address, token_file=name))


async def silent_port() -> tuple[asyncio.Server, int]:
    """Takes connections, and says something that is not gRPC."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ESMTP ready\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def test_closed_other_and_silent_ports_get_the_same_answer() -> None:
    """The text told a closed port from one of another service, which made brokers scan their network."""
    (closed,) = free_ports(1)
    mail, mail_port = await silent_port()
    texts = set()
    async with serving() as other_grpc:
        for address in (f"127.0.0.1:{closed}", f"127.0.0.1:{mail_port}", other_grpc):
            with pytest.raises(RemoteUnreachable) as caught:
                await asking().hello(remote(address))
            texts.add(str(caught.value).replace(address, "ADDRESS"))
    mail.close()
    assert len(texts) == 1, texts


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254:80", "[fe80::1]:80", "0.0.0.0:6650", "100.100.100.200:80", "224.0.0.1:80"),
        *("[::ffff:169.254.169.254]:80", "[fd00:ec2::254]:80", "2852039166:80"),
    ],
)
async def test_metadata_services_are_no_remotes(address: str) -> None:
    with pytest.raises(RemoteRefused, match="allowed_remotes"):
        await asking().hello(remote(address))


async def test_loopback_is_a_remote_only_for_brokers_on_loopback() -> None:
    async with serving(Replica()) as address:
        port = address.rpartition(":")[2]
        for each in (address, f"localhost:{port}", f"[::ffff:127.0.0.1]:{port}", f"2130706433:{port}"):
            with pytest.raises(RemoteRefused, match="allowed_remotes"):
                await asking(is_loopback_allowed=False).hello(remote(each))
        allowed = asking(allowed=["127.0.0.0/8"], is_loopback_allowed=False)
        assert (await allowed.hello(remote(address))).cluster_name == "west"


async def test_a_list_lets_its_names_and_networks_through_and_nothing_else() -> None:
    async with serving(Replica()) as address:
        port = address.rpartition(":")[2]
        assert (await asking(allowed=["localhost"]).hello(remote(f"LOCALHOST:{port}"))).cluster_name == "west"
        for allowed in ([], ["10.0.0.0/8"], ["*.example.org"], ["ocalhost"]):
            with pytest.raises(RemoteRefused, match="allowed_remotes"):
                await asking(allowed=allowed).hello(remote(f"localhost:{port}"))


async def test_a_name_that_changes_its_address_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """First an address that is allowed, and then that of a metadata service."""
    async with serving(Replica()) as address:
        port = int(address.rpartition(":")[2])
        answers = iter(["127.0.0.1", "169.254.169.254"])

        async def look_up(*_: Any, **__: Any) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        found = await asking().hello(remote(f"rebinding.example.org:{port}"))
        assert found.cluster_name == "west"
        assert next(answers) == "169.254.169.254", "it was not asked for again"


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
        a, b = await asking().describe("west", remote(address), ["/default/a", "/default/b"])
        assert (a.topic, b.topic, b.there.exists) == ("/default/a", "/default/b", False)
        assert (a.there.remote, a.there.partitions, a.there.missing) == ("west", 3, (1,))
        assert (a.there.topic_ids, a.schema_subject) == ((5, 0, 6), "orders")
        with pytest.raises(RemoteRefused, match="/default/c"):
            await asking().describe("west", remote(address), ["/default/c"])


@pytest.mark.parametrize(
    "service",
    [
        *("", "west", "west:", ":6650", "ftp://west:6650", "west:6650,", "https://a:1,http://b:1"),
        *(
            "unix:/run/docker.sock:1",
            "dns:///west:1",
            "[::1:1",
            "we st:1",
            "west:99999999",
            "a:1," * 20 + "a:1",
        ),
    ],
)
def test_addresses_that_are_none(service: str) -> None:
    with pytest.raises(RemoteRefused) as caught:
        parse_service(service)
    assert len(str(caught.value)) < 300


async def test_files_outside_the_directory_missing_and_unreadable_are_one_answer(tmp_path: Path) -> None:
    """The text told a missing file from one that is there, anywhere on the broker's machine."""
    inside = tmp_path / "secrets"
    inside.mkdir()
    (tmp_path / "outside.pem").write_text("x")
    (inside / "link.pem").symlink_to("/etc/passwd")
    (inside / "empty.pem").write_text("")
    names = [
        "missing.pem",
        "/etc/passwd",
        "/no/such/file",
        "../outside.pem",
        "link.pem",
        "empty.pem",
        "a/../../x",
    ]
    texts = set()
    for name in names:
        with pytest.raises(RemoteRefused) as caught:
            await asking(inside).hello(remote("127.0.0.1:6650", tls_ca=name))
        texts.add(str(caught.value).replace(repr(name), "NAME"))
    assert len(texts) == 1, texts
    with pytest.raises(RemoteRefused, match="a certificate needs its key"):
        await asking(inside).hello(remote("127.0.0.1:6650", tls_cert="cert.pem"))


async def test_a_token_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "west.token").write_text("secret")
    (tmp_path / "west.token").chmod(0o644)
    with pytest.raises(RemoteRefused, match=r"west\.token"):
        await asking(tmp_path).hello(remote("127.0.0.1:6650", token_file="west.token"))
