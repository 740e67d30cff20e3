"""Ports: which services are on which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from grpc import aio

from sava.api import danube
from sava.api.admin.brokers import BrokersService
from sava.api.admin.cluster import ClusterService, DoctorService, MetaService
from sava.api.admin.ledgers import LedgersService
from sava.api.admin.replication import PipelinesService, ReplicationService
from sava.api.admin.security import SecurityService
from sava.api.admin.topics import NamespacesService, SubscriptionsService, TopicsService
from sava.api.replica import ReplicaService
from sava.api.streams import StreamsService
from sava.api.writers import WritersService
from sava.config import Config
from sava.peers import tls
from sava.peers.channels import PINGS_ALLOWED
from sava.proto import (
    admin_pb2_grpc,
    brokers_pb2_grpc,
    doctor_pb2_grpc,
    ledgers_pb2_grpc,
    pipelines_pb2_grpc,
    replica_pb2_grpc,
    replication_pb2_grpc,
    security_pb2_grpc,
    topics_admin_pb2_grpc,
    writers_pb2_grpc,
)
from sava.records import MAX_BATCH_BYTES
from sava.server.assembly import BrokerParts, broker_url

MESSAGE_OVERHEAD: Final = 1 << 20
"""What a request has besides its batch."""
MAX_STREAMS: Final = 10_000
"""Calls of one connection at a time, each about 50 kB. More than a program with thousands of producers has,
and than one broker passes on to another: what is beyond waits in its client without an error."""
STRANGERS: Final[tls.Options] = (
    # A connection that does not begin as HTTP/2 (or TLS) says is dropped after this time.
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.http2.settings_timeout", 5_000),
    # One without a call for half an hour is closed; its client opens it again when it has one.
    ("grpc.max_connection_idle_ms", 1_800_000),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # Calls and answers are not compressed (batches are, by their own codecs, against a budget): 20 kB of gzip
    # become a request of 20 MB before any handler has seen whose it is.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.so_reuseport", 0),
)
"""What callers may do before it is known who they are."""
ADMIN_OPTIONS: Final[tls.Options] = (
    ("grpc.max_send_message_length", 64 << 20),
    # The largest requests are lists of staged sections, of some megabytes.
    ("grpc.max_receive_message_length", 16 << 20),
    # Otherwise the connection of a caller that vanished would never end. Later than on the client port: no
    # caller waits for its place, and a command that a user suspends for a moment should continue.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    *PINGS_ALLOWED,
    *STRANGERS,
)
MAX_PENDING: Final = 20_000
"""Calls that have arrived and that no handler has begun with yet. From a thousand on gRPC would cancel some
of them by lot, and published clients take CANCELLED for final: as many may come at once when a topic that was
on the move is served again, each from a client that waited for it."""
CLIENT_OPTIONS: Final[tls.Options] = (
    ("grpc.max_send_message_length", MAX_BATCH_BYTES + MESSAGE_OVERHEAD),
    ("grpc.max_receive_message_length", MAX_BATCH_BYTES + MESSAGE_OVERHEAD),
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
    *danube.CLIENT_PORT_OPTIONS,
    *STRANGERS,
)


async def open_client_port(config: Config, parts: BrokerParts) -> aio.Server:
    return await _listen(
        config, config.broker.ports.client, CLIENT_OPTIONS, lambda server: _add_client_services(server, parts)
    )


async def open_admin_port(config: Config, parts: BrokerParts) -> aio.Server:
    return await _listen(
        config, config.broker.ports.admin, ADMIN_OPTIONS, lambda server: _add_admin_services(server, parts)
    )


async def _listen(
    config: Config, port: int, options: tls.Options, add_services: Callable[[aio.Server], None]
) -> aio.Server:
    connections = ("grpc.max_allowed_incoming_connections", config.limits.connections)
    server = aio.server(options=(*options, connections))
    add_services(server)
    tls.listen(server, f"{config.broker.host}:{port}", config.auth)
    await server.start()
    return server


def _add_client_services(server: aio.Server, parts: BrokerParts) -> None:
    streams = StreamsService(
        parts.topics,
        schemas=parts.schemas,
        locate=parts.locate,
        store_url=parts.config.storage.url,
        quotas=parts.quotas,
    )
    serving = parts.forwarder.serving(server, "client")
    streams.register(serving)
    writers_pb2_grpc.add_WritersServicer_to_server(_writers(parts), serving)
    replica = ReplicaService(
        parts.topics,
        schemas=parts.schemas,
        cluster_name=parts.config.cluster_name,
        cluster_id=lambda: parts.node.status.cluster,
    )
    replica_pb2_grpc.add_ReplicaServicer_to_server(replica, serving)
    danube.register_client_services(
        server,
        topics=parts.topics,
        schemas=parts.schemas,
        topic_schemas=parts.topic_schemas,
        forwarder=parts.forwarder,
        sends=parts.danube_sends,
        broker_url=broker_url(parts.config),
        quotas=parts.quotas,
    )


def _writers(parts: BrokerParts) -> WritersService:
    return WritersService(parts.writers, parts.staged, store_url=parts.config.storage.url)


def _doctor(parts: BrokerParts) -> DoctorService:
    return DoctorService(
        parts.config, parts.disks, parts.storage, parts.readiness, broker=parts.topics.broker
    )


def _add_admin_services(plain: aio.Server, parts: BrokerParts) -> None:
    server = parts.forwarder.serving(plain, "admin")
    cluster = ClusterService(parts.node, parts.view, parts.config.cluster_name)
    admin_pb2_grpc.add_ClusterServicer_to_server(cluster, server)
    admin_pb2_grpc.add_MetaServicer_to_server(MetaService(parts.store), server)
    brokers_pb2_grpc.add_BrokersServicer_to_server(
        BrokersService(parts.brokers, parts.controller, parts.topics), server
    )
    namespaces = NamespacesService(parts.topics, parts.config.policies)
    topics_admin_pb2_grpc.add_NamespacesServicer_to_server(namespaces, server)
    topics = TopicsService(parts.topic_parts, parts.unloading, parts.store)
    topics_admin_pb2_grpc.add_TopicsServicer_to_server(topics, server)
    topics_admin_pb2_grpc.add_SubscriptionsServicer_to_server(SubscriptionsService(parts.topic_parts), server)
    writers_pb2_grpc.add_WritersServicer_to_server(_writers(parts), server)
    ledgers = LedgersService(
        parts.journals,
        parts.failover,
        parts.losses,
        parts.live_brokers,
        parts.forwarder,
        lambda: parts.mirrored.owned,
    )
    ledgers_pb2_grpc.add_LedgersServicer_to_server(ledgers, server)
    doctor_pb2_grpc.add_DoctorServicer_to_server(_doctor(parts), server)
    pipelines_pb2_grpc.add_PipelinesServicer_to_server(PipelinesService(parts.pipelines), server)
    replication_pb2_grpc.add_ReplicationServicer_to_server(ReplicationService(parts.replication), server)
    security_pb2_grpc.add_SecurityServicer_to_server(
        SecurityService(parts.security, parts.guard, broker_url(parts.config)), server
    )
    danube.register_admin_services(
        plain,
        node=parts.node,
        brokers=parts.brokers,
        controller=parts.controller,
        parts=parts.topic_parts,
        unloading=parts.unloading,
        schemas=parts.schemas,
        topic_schemas=parts.topic_schemas,
        forwarder=parts.forwarder,
        security=parts.security,
    )
