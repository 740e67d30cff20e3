"""Brokers that forward: real gRPC on loopback, scripted services, and a view for each that tests change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from sava.cluster.records import Registration
from sava.cluster.view import NotServed, TopicRouter
from sava.config import Auth
from sava.peers import tls
from sava.peers.channels import PINGS_ALLOWED, PeerChannels, Port
from sava.peers.forwarding import EOF, Forwarder
from sava.proto import streams_pb2 as pb
from sava.proto import streams_pb2_grpc as rpc
from sava.topics.errors import TopicMoved
from sava.topics.names import TopicName
from tests.support.guards import guard_of
from tests.support.network import free_ports
from tests.support.waiting import PATIENCE_S

ORDERS = TopicName("default", "orders")
SIZES: tls.Options = (
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.so_reuseport", 0),
    *PINGS_ALLOWED,
)


class View(TopicRouter):
    """What one broker knows of who has what; as ``sava.cluster.view``, without a store behind it."""

    def __init__(self) -> None:
        self.owners: dict[TopicName, int] = {}
        self.brokers: dict[int, Registration] = {}
        self._changed = asyncio.Event()

    def set_owner(self, owner: int, topic: TopicName = ORDERS) -> None:
        self.owners[topic] = owner
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def registration(self, broker: int) -> Registration | None:
        return self.brokers.get(broker)

    async def owner(self, name: TopicName, *, timeout: float = PATIENCE_S, but_not: int = 0) -> int:
        try:
            async with asyncio.timeout(timeout):
                while self.owners.get(name, 0) in (0, but_not):
                    await self._changed.wait()
        except TimeoutError:
            if not self.owners.get(name, 0):
                raise NotServed(name, "nobody has it") from None
        return self.owners[name]


Script = Callable[[Any, Any], Awaitable[Any]]


class Scripted(rpc.StreamsServicer):
    """Serves the topics it has; what happens then is the test's. Counts the calls that it got, with their
    metadata."""

    def __init__(self, broker: int) -> None:
        self.broker = broker
        self.topics: set[TopicName] = set()
        self.metadata: list[dict[str, Any]] = []
        self.asked = asyncio.Event()
        self.offsets: Script = self._own_number
        self.stream: Script = self._echo
        self.read: Script = self._own_number

    def need(self, topic: str, context: Any) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        self.asked.set()
        name = TopicName.parse(topic)
        if name not in self.topics:
            raise TopicMoved(name)

    async def Offsets(self, request: pb.OffsetsRequest, context: Any) -> pb.OffsetsResponse:  # noqa: N802
        self.need(request.topic, context)
        return await self.offsets(request, context)

    async def Read(self, request: pb.ReadRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.need(request.topic, context)
        await self.read(request, context)

    async def Publish(self, requests: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        first = await context.read()
        self.need(first.open.topic, context)
        await context.write(pb.PublishResponse(opened=pb.ProducerOpened(producer_id=self.broker)))
        await self.stream(first, context)

    async def _own_number(self, request: Any, context: Any) -> pb.OffsetsResponse:
        return pb.OffsetsResponse(next_offset=self.broker)

    async def _echo(self, first: pb.PublishRequest, context: Any) -> None:
        """A receipt for each batch, with its size, until the client has no more."""
        while (request := await context.read()) is not EOF:
            receipt = pb.Receipt(base_offset=self.broker, count=len(request.batch))
            await context.write(pb.PublishResponse(receipts=[receipt]))
        context.set_trailing_metadata((("closed-by", str(self.broker)),))


@dataclass
class Hosted:
    broker: int
    client: str
    admin: str
    view: View = field(default_factory=View)
    leader: int = 0
    service: Scripted = field(init=False)
    peers: PeerChannels = field(init=False)
    forwarder: Forwarder = field(init=False)
    servers: list[aio.Server] = field(default_factory=list)
    stub: Any = None
    channel: aio.Channel = field(init=False)

    def __post_init__(self) -> None:
        self.service = Scripted(self.broker)
        self.peers = PeerChannels(self.view, Auth())
        self.forwarder = Forwarder(self.view, self.peers, lambda: self.leader, guard=guard_of(self.broker))

    def registration(self, incarnation: int = 1) -> Registration:
        return Registration(
            broker=self.broker,
            incarnation=incarnation,
            client=self.client,
            admin=self.admin,
            raft="",
            http="",
            store_id="",
        )

    async def start(self, register: Register) -> None:
        ports: tuple[tuple[Port, str], ...] = (("client", self.client), ("admin", self.admin))
        for port, address in ports:
            server = aio.server(options=SIZES)
            rpc.add_StreamsServicer_to_server(self.service, self.forwarder.serving(server, port))
            register(self, server)
            tls.listen(server, address, Auth())
            await server.start()
            self.servers.append(server)

    async def die(self) -> None:
        """Without a word to anybody, as far as a process can within itself."""
        servers, self.servers = self.servers, []
        await asyncio.gather(*(server.stop(None) for server in servers))


Register = Callable[[Hosted, aio.Server], None]


def nothing_more(hosted: Hosted, server: aio.Server) -> None:
    pass


@asynccontextmanager
async def brokers(count: int, register: Register = nothing_more) -> AsyncIterator[dict[int, Hosted]]:
    """So many, numbered from 1, all of which know one another; ``register`` adds services to their ports."""
    ports = free_ports(2 * count)
    hosted = {
        number: Hosted(number, f"127.0.0.1:{ports[2 * number - 2]}", f"127.0.0.1:{ports[2 * number - 1]}")
        for number in range(1, count + 1)
    }
    for each in hosted.values():
        each.view.brokers = {other.broker: other.registration() for other in hosted.values()}
        await each.start(register)
        each.channel = aio.insecure_channel(each.client, options=SIZES)
        each.stub = rpc.StreamsStub(each.channel)
    try:
        yield hosted
    finally:
        for each in hosted.values():
            await each.channel.close(None)
            await each.peers.close()
            await each.die()
