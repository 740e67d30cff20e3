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
import signal
from contextlib import AsyncExitStack

import uvloop
from grpc import aio

from sava.config import Config
from sava.errors import HostError, SavaError
from sava.metadata.machine.state_machine import Limits
from sava.metadata.node import NodeOptions, RaftNode, open_node
from sava.metadata.operations import ClusterOperations
from sava.metadata.raft_store import RaftStore
from sava.metadata.replica.replica import ReplicaConfig
from sava.proto import admin_pb2_grpc
from sava.raft.config import CoreConfig
from sava.raft.types import NO_NODE
from sava.services import security
from sava.services.cluster_admin import ClusterService
from sava.services.http import HttpServer
from sava.services.meta_admin import MetaService
from sava.services.metrics import Metrics
from sava.services.raft_listener import RaftListener
from sava.services.raft_transport import TcpTransport

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_START = 1
EXIT_FAILED = 3

GRACE_S = 1.0
"""For calls under way when the ports close."""
HANDOVER_S = 3.0
ENTRY_BYTES = 4 << 10
ADMIN_OPTIONS: security.Options = (
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.so_reuseport", 0),
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


class Broker:
    """The parts of one broker, started in order and stopped in reverse."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self.node: RaftNode

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
        await self._serve(RaftListener(node, f"{host}:{wanted.raft}", config.auth))
        admin = aio.server(options=ADMIN_OPTIONS)
        admin_pb2_grpc.add_ClusterServicer_to_server(ClusterService(node, config.cluster_name), admin)
        admin_pb2_grpc.add_MetaServicer_to_server(MetaService(RaftStore(node)), admin)
        security.listen(admin, f"{host}:{wanted.admin}", config.auth)
        await self._serve(admin)
        http = HttpServer(node, metrics)
        self._stack.push_async_callback(http.close)
        try:
            await http.start(host, wanted.prometheus)
        except OSError as error:
            raise HostError(f"cannot listen on {host}:{wanted.prometheus}: {error.strerror}") from error

    async def _serve(self, server: aio.Server | RaftListener) -> None:
        await server.start()
        self._stack.push_async_callback(server.stop, GRACE_S)

    async def close(self) -> None:
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
    """Run one broker until a signal or a failure; returns the exit code."""
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
    try:
        await _announce(broker, config, standalone=standalone)
        broker.node.failed.add_done_callback(lambda _: stop.set())
        await stop.wait()
    finally:
        log.info("broker: stopping")
        await broker.close()
    return EXIT_FAILED if broker.node.failed.done() else EXIT_OK


async def _announce(broker: Broker, config: Config, *, standalone: bool) -> None:
    info, ports = broker.node.info(), config.broker.ports
    log.info(
        "broker: started node=%d cluster=%s host=%s admin=%d raft=%d http=%d data_dir=%s",
        info.node,
        info.cluster or "-",
        config.broker.host,
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
