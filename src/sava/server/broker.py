"""Broker: the parts of one broker, started in order and stopped in reverse.

Order matters twice. At start the Raft port opens before the others, so that a caller who can ask this broker
for something can also reach its peers through it; and it registers last, when everything that others may
send it is open. A broker that is asked to stop hands its topics and its leadership over first
(``BrokerParts.leave``). At the end topics are closed and the registration is given up while everything still
works, then leadership is handed over, then callers are turned away, then the node closes its log. The whole
end is bounded; a broker that hangs while stopping is killed by whatever runs it, and that must not be the
normal case.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Final

from grpc import aio

from sava import logs
from sava.api.http import HttpServer
from sava.api.metrics.broker import BrokerMetrics, NodeCollector, TasksCollector
from sava.config import Config, ConfigInvalid
from sava.errors import HostError
from sava.metadata.bootstrap import SeedBootstrap
from sava.metadata.machine.state_machine import Limits
from sava.metadata.node import NodeOptions, RaftNode, open_node
from sava.metadata.replica.replica import ReplicaConfig
from sava.peer_connection import Dialer
from sava.peers import tls
from sava.peers.raft_listener import RaftListener
from sava.peers.raft_transport import TcpTransport
from sava.raft.types import CoreConfig
from sava.security import is_loopback
from sava.security.cluster_secret import FILE, ClusterSecret, SecretUnusable
from sava.security.handshake import BrokerCredentials
from sava.server.assembly import HANDOVER_S, BrokerParts, raft_address
from sava.server.ports import open_admin_port, open_client_port
from sava.supervisor import Supervisor
from sava.tasks import Stops, stopped_within
from sava.topics.served import ServedTopics

log = logging.getLogger(__name__)

GRACE_S: Final = 1.0
"""For calls under way when the ports close."""
ENTRY_BYTES: Final = 4 << 10


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


def make_private(directory: Path) -> None:
    """Shut others out of a directory that an earlier version, or an installer, has left open to them."""
    try:
        found = directory.stat()
        if found.st_mode & 0o077 and found.st_uid == os.geteuid():
            directory.chmod(0o700)
            log.info("broker: made private directory=%s", directory)
    except FileNotFoundError:
        return  # it is made with the right mode
    except OSError as error:
        log.warning("broker: others may read what is in directory=%s error=%s", directory, error.strerror)


def raft_credentials(config: Config) -> BrokerCredentials:
    """Raises SecretUnusable."""
    auth = config.auth
    given = auth.cluster_secret_file
    secret = ClusterSecret(given or config.meta_store.data_dir / FILE)
    if given is not None or secret.path.exists():
        secret.load()
    return BrokerCredentials(
        secret, is_given=given is not None, rule=tls.broker_rule(auth, config.cluster_name)
    )


def require_secret(config: Config, credentials: BrokerCredentials) -> None:
    """A broker of a cluster knows the cluster's secret. Raises SecretUnusable."""
    if credentials.own.cluster and not credentials.secret.is_known:
        raise SecretUnusable(
            f"this broker belongs to cluster {credentials.own.cluster}, and its secret is not there: copy "
            f"{credentials.secret.path.name} from another broker's data directory to "
            f"{credentials.secret.path} (mode 0600), or give all brokers the same auth.cluster_secret_file "
            "(`openssl rand -hex 32` makes one)"
        )


class Broker:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._stops = Stops()
        self.leaves_clients = False
        """The process ends right after ``close``: the client port stays as it is. A gRPC server that stops
        cancels calls which have just arrived, and to a client of Danube a cancelled call is an error that it
        hands to its application; a connection that breaks is one that it heals from."""
        self._client_port: aio.Server | None = None
        """Held until the end: a gRPC server without a reference stops, and cancels its calls."""
        self.metrics = BrokerMetrics()
        self.supervisor = Supervisor()
        self.node: RaftNode
        self.parts: BrokerParts

    @property
    def topics(self) -> ServedTopics:
        return self.parts.topics

    async def start(self) -> None:
        """Raises HostError; whatever had been started is stopped then."""
        try:
            await self._start()
        except BaseException:
            await self._stops.run()
            raise

    async def _start(self) -> None:
        config, host, wanted = self._config, self._config.broker.host, self._config.broker.ports
        metrics = self.metrics
        for directory in (config.meta_store.data_dir, config.storage.journal_dir):
            make_private(directory)
        dialer = Dialer(raft_credentials(config), tls.client_contexts(config.auth))
        options = NodeOptions(
            address=raft_address(config),
            seeds=config.meta_store.seed_nodes,
            cluster_name=config.cluster_name,
            node=tls.node_of_certificate(config.auth, config.cluster_name),
            replica=replica_config(config),
        )
        transport = TcpTransport(dialer)
        self.node = node = await open_node(config.meta_store.data_dir, options, transport, metrics.node)
        self._stops.add("consensus node", node.close)
        logs.set_broker(node.info().node)
        node.failed.add_done_callback(self._node_failed)
        metrics.add(NodeCollector(node), TasksCollector(self.supervisor))
        require_secret(config, dialer.credentials)
        contexts = tls.server_contexts(config.auth)
        raft = RaftListener(node, f"{host}:{wanted.raft}", dialer.credentials, contexts)
        await raft.start()
        self._stops.add("raft port", raft.stop)
        self.parts = parts = BrokerParts(config, node, dialer, metrics, self.supervisor, self._stops)
        await parts.open()
        self._check_access()
        raft.ledgers = parts.mirrored.session
        logs.set_epochs(parts.epoch_of)
        self._client_port = await open_client_port(config, parts)
        self._stops.add("client port", self._stop_client_port)
        admin = await open_admin_port(config, parts)
        self._stops.add("admin port", lambda: admin.stop(GRACE_S))
        metrics_guard = parts.guard if config.auth.metrics == "token" else None
        http = HttpServer(metrics.registry, parts.disks, parts.readiness, metrics_guard)
        self._stops.add("http port", http.close)
        try:
            await http.start(host, wanted.prometheus)
        except OSError as error:
            raise HostError(f"cannot listen on {host}:{wanted.prometheus}: {error.strerror}") from error
        await parts.start()
        seeds = SeedBootstrap(node.transport, node.info)
        self._stops.add("bootstrap", seeds.close)
        seeds.start()

    def _check_access(self) -> None:
        """Raises ConfigInvalid where no caller could ever be let in."""
        auth, host = self._config.auth, self._config.broker.host
        if not auth.is_enforced and not is_loopback(host):
            log.warning(
                "security: EVERY CALLER MAY DO EVERYTHING: this broker listens to the network without "
                "authentication host=%s; set auth.tokens or auth.tls, or broker.host=127.0.0.1",
                host,
            )
        advertised = self._config.broker.reachable_host
        if is_loopback(host) and not is_loopback(advertised):
            log.warning(
                "broker: others are sent to %s, and this broker listens to its own machine alone; set "
                "broker.host, for example to 0.0.0.0 host=%s",
                *(advertised, host),
            )
        if auth.is_enforced and not auth.super_admins and not self.parts.security.has_administrator:
            raise ConfigInvalid(
                "auth: calls need permissions, and no principal can grant them: set auth.super_admins, for "
                "example to [user:admin] (`sava auth bootstrap` makes keys and the first token)"
            )

    async def _stop_client_port(self) -> None:
        if self._client_port is not None and not self.leaves_clients:
            await self._client_port.stop(GRACE_S)

    def _node_failed(self, failed: asyncio.Future[BaseException]) -> None:
        if not failed.cancelled():
            error = failed.result()
            self.supervisor.end(f"{type(error).__name__}: {error}")

    async def close(self) -> bool:
        """Whether everything stopped in order. A part that cannot be stopped, since what it died of has left
        it so, or that waits for a disk or a peer that does not answer, does not keep the others: each has a
        limit of its own, and the log names the one that has passed it."""
        is_in_order = await self.parts.stop()
        is_in_order &= await stopped_within(
            HANDOVER_S + GRACE_S, self.parts.leading.hand_over, what="leadership"
        )
        return await self._stops.run() and is_in_order
