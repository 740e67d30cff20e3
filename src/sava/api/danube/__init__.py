"""Danube's protocol, so that its clients and tools work with a Sava broker unchanged.

* ``producers``: creating producers, sending messages; ``consumers``: subscribing, receiving, acks;
* ``lookup``: where a topic is served, whether a client may continue, the segments of a topic;
* ``schemas``: the schema registry, on both ports;
* ``admin``: brokers, cluster, namespaces and topics, and ``security``: roles; on the admin port;
* ``wire``: which error is which status, and messages on the wire and in store;
* ``metrics``: what Danube's tools ask Prometheus for.

Translations and nothing else, but for one thing: Danube's clients rely on habits of its broker that no
message of the protocol names, and these are kept here.
"""

from __future__ import annotations

from typing import Final

from grpc import aio

from sava.api.admin.brokers import Brokers
from sava.api.admin.descriptions import Partitions
from sava.api.admin.topics import Unloading
from sava.api.danube import wire
from sava.api.danube.admin import BrokerAdmin, ClusterAdmin, NamespaceAdmin, TopicAdmin
from sava.api.danube.consumers import ConsumerService, ConsumerSessions
from sava.api.danube.lookup import DiscoveryService, HealthService, StorageService
from sava.api.danube.metrics import SendStats
from sava.api.danube.producers import DanubeProducers, ProducerService
from sava.api.danube.schemas import SchemaService
from sava.api.danube.security import SecurityAdmin
from sava.cluster.controller import Controller
from sava.metadata.node import RaftNode
from sava.peers.channels import PINGS_ALLOWED
from sava.peers.forwarding import Forwarder
from sava.peers.tls import Options
from sava.proto import danube_admin_pb2_grpc, danube_api_pb2_grpc, danube_schema_pb2_grpc
from sava.schemas.registry import SchemaRegistry
from sava.security.quotas import Quotas
from sava.security.store import SecurityPolicies
from sava.topics.rules import TopicSchemas
from sava.topics.served import ServedTopics

__all__ = ["CLIENT_PORT_OPTIONS", "register_admin_services", "register_client_services"]

CLIENT_PORT_OPTIONS: Final[Options] = (
    # A client that is gone without a word is noticed after the time and the timeout together. The timeout
    # needs both names: by the first alone, gRPC waits a minute for the answer to a ping.
    ("grpc.keepalive_time_ms", 1500),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Clients may do the same to this broker.
    *PINGS_ALLOWED,
)


def register_client_services(
    server: aio.Server,
    *,
    topics: ServedTopics,
    schemas: SchemaRegistry,
    topic_schemas: TopicSchemas,
    forwarder: Forwarder,
    sends: SendStats,
    broker_url: str,
    quotas: Quotas,
) -> None:
    """``broker_url`` is where clients reach this broker, with its scheme: ``http://host:6650``."""
    server = forwarder.serving(server, "client", wire.answer)
    producers, sessions = DanubeProducers(topics), ConsumerSessions(topics)
    danube_api_pb2_grpc.add_ProducerServiceServicer_to_server(
        ProducerService(producers, schemas, sends, quotas), server
    )
    danube_api_pb2_grpc.add_ConsumerServiceServicer_to_server(
        ConsumerService(topics, sessions, forwarder, broker_url, quotas), server
    )
    danube_api_pb2_grpc.add_DiscoveryServicer_to_server(DiscoveryService(topics.registry, broker_url), server)
    danube_api_pb2_grpc.add_HealthCheckServicer_to_server(
        HealthService(producers, sessions, forwarder), server
    )
    danube_api_pb2_grpc.add_StorageServiceServicer_to_server(StorageService(topics), server)
    _register_schemas(server, topics, schemas, topic_schemas)


def register_admin_services(
    server: aio.Server,
    *,
    node: RaftNode,
    brokers: Brokers,
    controller: Controller,
    parts: Partitions,
    unloading: Unloading,
    schemas: SchemaRegistry,
    topic_schemas: TopicSchemas,
    forwarder: Forwarder,
    security: SecurityPolicies,
) -> None:
    server, topics = forwarder.serving(server, "admin", wire.answer), parts.topics
    danube_admin_pb2_grpc.add_BrokerAdminServicer_to_server(
        BrokerAdmin(brokers, controller, topics.namespaces), server
    )
    danube_admin_pb2_grpc.add_ClusterAdminServicer_to_server(ClusterAdmin(node, parts.view), server)
    danube_admin_pb2_grpc.add_NamespaceAdminServicer_to_server(NamespaceAdmin(topics), server)
    danube_admin_pb2_grpc.add_TopicAdminServicer_to_server(
        TopicAdmin(parts, unloading, schemas, topic_schemas), server
    )
    danube_admin_pb2_grpc.add_SecurityAdminServicer_to_server(SecurityAdmin(security), server)
    _register_schemas(server, topics, schemas, topic_schemas)


def _register_schemas(
    server: aio.Server, topics: ServedTopics, schemas: SchemaRegistry, topic_schemas: TopicSchemas
) -> None:
    danube_schema_pb2_grpc.add_SchemaRegistryServicer_to_server(
        SchemaService(schemas, topics.registry, topic_schemas), server
    )
