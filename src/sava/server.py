"""One broker process, assembled: configuration → data directory → Raft node → ports → signals → exit code.

Order matters twice. At start the Raft port opens before the admin port, so that whoever can ask this broker
for something can also reach its peers through it. At the end it is the other way round: leadership is
handed over while everything still works, then callers are turned away, then the node closes its log. The
whole end is bounded; a broker that hangs while stopping is killed by whatever runs it, and that must not be
the normal case.

Exit codes: 0 stopped on request, 1 could not start, 3 stopped because going on could do harm (the log says
why).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, cast

import uvloop
from grpc import aio

from sava.broker import ownership
from sava.broker.names import TopicName
from sava.broker.topic_schemas import TopicSchemas
from sava.broker.topics import Topics
from sava.config import Config
from sava.errors import HostError, SavaError
from sava.metadata.machine.state_machine import Limits
from sava.metadata.node import NodeOptions, RaftNode, open_node
from sava.metadata.operations import ClusterOperations
from sava.metadata.raft_store import RaftStore
from sava.metadata.replica.replica import ReplicaConfig
from sava.proto import admin_pb2_grpc, topics_admin_pb2_grpc
from sava.raft.config import CoreConfig
from sava.raft.types import NO_NODE
from sava.records import MAX_BATCH_BYTES
from sava.schemas.registry import SchemaRegistry
from sava.services import danube, security
from sava.services.cluster_admin import ClusterService
from sava.services.http import HttpServer
from sava.services.meta_admin import MetaService
from sava.services.metrics import Metrics
from sava.services.raft_listener import RaftListener
from sava.services.raft_transport import TcpTransport
from sava.services.streams import StreamsService
from sava.services.topics_admin import NamespacesService, SubscriptionsService, TopicsService
from sava.storage.broker_storage import BrokerStorage, StorageOptions
from sava.storage.objectstore import ObjectStore
from sava.storage.uploader import UploadOptions
from sava.wal import LocalDisk

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_START = 1
EXIT_FAILED = 3

GRACE_S = 1.0
"""For calls under way when the ports close."""
HANDOVER_S = 3.0
ENTRY_BYTES = 4 << 10
MESSAGE_OVERHEAD = 1 << 20
"""What a request has besides its batch."""
ADMIN_OPTIONS: security.Options = (
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.so_reuseport", 0),
)
CLIENT_OPTIONS: security.Options = (
    ("grpc.max_send_message_length", MAX_BATCH_BYTES + MESSAGE_OVERHEAD),
    ("grpc.max_receive_message_length", MAX_BATCH_BYTES + MESSAGE_OVERHEAD),
    ("grpc.so_reuseport", 0),
    *danube.CLIENT_PORT_OPTIONS,
)


def replica_config(config: Config) -> ReplicaConfig:
    meta = config.meta_store
    return ReplicaConfig(
        core=CoreConfig(
            election_ticks=round(meta.election_timeout_ms / meta.heartbeat_interval_ms),
            max_append_bytes=meta.max_payload_entries * ENTRY_BYTES,
        ),
        limits=Limits(),
        tick_ms=meta.heartbeat_interval_ms,
        snapshot_entries=meta.snapshot_threshold,
    )


def raft_address(config: Config) -> str:
    return f"{config.broker.reachable_host}:{config.broker.ports.raft}"


def client_address(config: Config) -> str:
    return f"{config.broker.reachable_host}:{config.broker.ports.client}"


def broker_url(config: Config) -> str:
    """As Danube's clients are told it."""
    return f"{'https' if config.auth.mode == 'tls' else 'http'}://{client_address(config)}"


def addresses(config: Config) -> danube.Addresses:
    scheme = "https" if config.auth.mode == "tls" else "http"
    host, ports = config.broker.reachable_host, config.broker.ports
    return danube.Addresses(
        client=broker_url(config),
        admin=f"{scheme}://{host}:{ports.admin}",
        metrics=f"http://{host}:{ports.prometheus}",
    )


class GenericHandlers:
    """A server to the generated code that registers services, which tells it of handlers in two ways. Of
    those, methods that are registered one by one make grpc.aio wait for each of them anew at every call: with
    a hundred methods that is a tenth of what a small call costs."""

    def __init__(self, server: aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object]) -> None:
        pass


class Broker:
    """The parts of one broker, started in order and stopped in reverse."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self.leaves_clients = False
        """The process ends right after ``close``: the client port stays as it is. A gRPC server that stops
        cancels calls which have just arrived, and to a client of Danube a cancelled call is an error that it
        hands to its application; a connection that breaks is one that it heals from."""
        self._client_port: aio.Server | None = None
        """Held until the end: a gRPC server that nobody holds stops, and cancels its calls."""
        self.node: RaftNode
        self.topics: Topics
        self._store: RaftStore
        self._schemas: SchemaRegistry
        self._topic_schemas: TopicSchemas

    async def start(self) -> None:
        """Raises HostError; whatever had been started is stopped then."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        config, host, wanted = self._config, self._config.broker.host, self._config.broker.ports
        metrics = Metrics()
        options = NodeOptions(address=raft_address(config), replica=replica_config(config))
        self.node = node = open_node(config.meta_store.data_dir, options, TcpTransport(config.auth), metrics)
        self._stack.push_async_callback(node.close)
        metrics.observe(node)
        raft = RaftListener(node, f"{host}:{wanted.raft}", config.auth)
        await raft.start()
        self._stack.push_async_callback(raft.stop, GRACE_S)
        self._store = RaftStore(node)
        self._schemas, self._topic_schemas = SchemaRegistry(self._store), TopicSchemas(self._store)
        self.topics = await self._open_topics(metrics)
        self._client_port = await self._listen(wanted.client, CLIENT_OPTIONS, self._add_client_services)
        self._stack.push_async_callback(self._stop_client_port)
        admin = await self._listen(wanted.admin, ADMIN_OPTIONS, self._add_admin_services)
        self._stack.push_async_callback(admin.stop, GRACE_S)
        http = HttpServer(node, metrics)
        self._stack.push_async_callback(http.close)
        try:
            await http.start(host, wanted.prometheus)
        except OSError as error:
            raise HostError(f"cannot listen on {host}:{wanted.prometheus}: {error.strerror}") from error
        await self.topics.start()

    async def _open_topics(self, metrics: Metrics) -> Topics:
        config, node = self._config, self.node.info().node
        upload = UploadOptions(segment_age_s=config.storage.upload_interval_seconds)
        storage = await BrokerStorage.open(
            LocalDisk(config.storage.journal_dir),
            broker=str(node),
            store=ObjectStore.open(config.storage.url),
            metadata=self._store,
            options=StorageOptions(upload=upload),
            fail=self.node.fail,
        )
        self._stack.push_async_callback(storage.close)
        topics = Topics(self._store, storage, config, broker=node)
        metrics.observe_topics(topics, storage)
        return topics

    def _add_client_services(self, server: aio.Server) -> None:
        config = self._config
        streams = StreamsService(
            self.topics, schemas=self._schemas, locate=self._locate, store_url=config.storage.url
        )
        streams.register(server)
        danube.register_client_services(
            server,
            topics=self.topics,
            schemas=self._schemas,
            topic_schemas=self._topic_schemas,
            broker_url=broker_url(config),
        )

    def _add_admin_services(self, server: aio.Server) -> None:
        cluster = ClusterService(self.node, self._config.cluster_name)
        admin_pb2_grpc.add_ClusterServicer_to_server(cluster, server)
        admin_pb2_grpc.add_MetaServicer_to_server(MetaService(self._store), server)
        namespaces = NamespacesService(self.topics, self._config.policies)
        topics_admin_pb2_grpc.add_NamespacesServicer_to_server(namespaces, server)
        topics_admin_pb2_grpc.add_TopicsServicer_to_server(TopicsService(self.topics, self._store), server)
        topics_admin_pb2_grpc.add_SubscriptionsServicer_to_server(SubscriptionsService(self.topics), server)
        danube.register_admin_services(
            server,
            node=self.node,
            topics=self.topics,
            schemas=self._schemas,
            topic_schemas=self._topic_schemas,
            addresses=addresses(self._config),
        )

    async def _locate(self, topic: TopicName) -> tuple[int, str]:
        """A topic that nobody serves yet will be served by whoever is asked first."""
        own = self.node.info().node
        owner = ownership.owner_of(self._store, topic) or own
        return owner, client_address(self._config) if owner == own else ""

    async def _listen(
        self, port: int, options: security.Options, add_services: Callable[[aio.Server], None]
    ) -> aio.Server:
        server = aio.server(options=options)
        add_services(cast(aio.Server, GenericHandlers(server)))
        security.listen(server, f"{self._config.broker.host}:{port}", self._config.auth)
        await server.start()
        return server

    async def _stop_client_port(self) -> None:
        if self._client_port is not None and not self.leaves_clients:
            await self._client_port.stop(GRACE_S)

    async def close(self) -> None:
        """Clients are turned away and positions written down while the metadata store still works."""
        await self.topics.close()
        await self._hand_over()
        await self._stack.aclose()

    async def _hand_over(self) -> None:
        """Leave no gap: without this, the others notice a stopped leader only by its silence."""
        core = self.node.core_status
        if core is None or core.leader != core.node or len(core.membership.voters) < 2:
            return
        if self.node.failed.done():
            return
        try:
            leader = await ClusterOperations(self.node).transfer(NO_NODE, "", timeout=HANDOVER_S)
            log.info("raft: leadership handed over to=%d", leader)
        except SavaError as error:
            log.warning("raft: leadership not handed over error=%s", error)


async def serve(config: Config, *, standalone: bool = False) -> int:
    """Run one broker until a signal or a failure, and end the process; returns only if it could not start."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    broker = Broker(config)
    try:
        await broker.start()
    except SavaError as error:
        log.critical("broker: cannot start error=%s: %s", type(error).__name__, error)
        return EXIT_START
    broker.leaves_clients = True
    try:
        await _announce(broker, config, standalone=standalone)
        broker.node.failed.add_done_callback(lambda _: stop.set())
        await stop.wait()
    finally:
        log.info("broker: stopping")
        await broker.close()
    logging.shutdown()
    # Everything durable is closed. What is left are connections, which the kernel closes.
    os._exit(EXIT_FAILED if broker.node.failed.done() else EXIT_OK)


async def _announce(broker: Broker, config: Config, *, standalone: bool) -> None:
    info, ports = broker.node.info(), config.broker.ports
    log.info(
        "broker: started node=%d cluster=%s host=%s client=%d admin=%d raft=%d http=%d data_dir=%s",
        info.node,
        info.cluster or "-",
        config.broker.host,
        ports.client,
        ports.admin,
        ports.raft,
        ports.prometheus,
        config.meta_store.data_dir,
    )
    if info.cluster:
        return
    if standalone:
        founded = await ClusterOperations(broker.node).init((raft_address(config),))
        log.info("raft: standalone cluster founded cluster=%s", founded.cluster)
    else:
        log.info(
            "raft: waiting for cluster initialization, run `sava cluster init --nodes …` node=%d", info.node
        )


def run(config: Config, *, standalone: bool = False) -> int:
    return uvloop.run(serve(config, standalone=standalone))
