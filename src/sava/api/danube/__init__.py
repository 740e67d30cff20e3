"""Danube's protocol, so that its clients and tools work with a Sava broker unchanged.

================  ==================================================================================
``producers``     creating producers, sending messages
``consumers``     subscribing, receiving, acks
``reception``     one client's stream, wherever its topic is
``seats``         who a consumer id stands for, and which stream it has
``window``        how far a stream is ahead of its client's acks
``messages``      messages on the wire and in store
``health``        whether a producer or consumer may go on
``discovery``     where a topic is served
``storage``       the segments of a topic
``schemas``       the schema registry; on both ports
``admin_*``       brokers, cluster, namespaces, topics, security; on the admin port
``codes``         which error is which status
``figures``       what Danube's tools ask Prometheus for
================  ==================================================================================

Translations and nothing else, but for one thing: Danube's clients rely on habits of its broker that no
message of the protocol names, and these are kept here. Authorization headers are accepted and not looked at.
"""

from __future__ import annotations

from typing import Final

from grpc import aio

from sava.api.brokers_admin import Brokers
from sava.api.danube import codes
from sava.api.danube.admin_brokers import BrokerAdmin
from sava.api.danube.admin_cluster import ClusterAdmin
from sava.api.danube.admin_namespaces import NamespaceAdmin
from sava.api.danube.admin_security import SecurityAdmin
from sava.api.danube.admin_topics import TopicAdmin
from sava.api.danube.consumers import ConsumerService
from sava.api.danube.discovery import DiscoveryService
from sava.api.danube.figures import Sends
from sava.api.danube.health import HealthService
from sava.api.danube.producers import Producers, ProducerService
from sava.api.danube.schemas import SchemaService
from sava.api.danube.seats import Seats
from sava.api.danube.storage import StorageService
from sava.api.topic_parts import TopicParts
from sava.api.unloading import Unloading
from sava.cluster.controller import Controller
from sava.metadata.node import RaftNode
from sava.peers.brokers import PINGS_ALLOWED
from sava.peers.forwarding import Forwarder
from sava.peers.tls import Options
from sava.proto import danube_admin_pb2_grpc, danube_api_pb2_grpc, danube_schema_pb2_grpc
from sava.schemas.registry import SchemaRegistry
from sava.topics.topic_schemas import TopicSchemas
from sava.topics.topics import ServedTopics

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
    sends: Sends,
    broker_url: str,
) -> None:
    """``broker_url`` is where clients reach this broker, with its scheme: ``http://host:6650``."""
    server = forwarder.serving(server, "client", codes.answer)
    producers, seats = Producers(topics), Seats(topics)
    danube_api_pb2_grpc.add_ProducerServiceServicer_to_server(
        ProducerService(producers, schemas, sends), server
    )
    danube_api_pb2_grpc.add_ConsumerServiceServicer_to_server(
        ConsumerService(topics, seats, forwarder, broker_url), server
    )
    danube_api_pb2_grpc.add_DiscoveryServicer_to_server(DiscoveryService(topics.registry, broker_url), server)
    danube_api_pb2_grpc.add_HealthCheckServicer_to_server(HealthService(producers, seats, forwarder), server)
    danube_api_pb2_grpc.add_StorageServiceServicer_to_server(StorageService(topics), server)
    _register_schemas(server, topics, schemas, topic_schemas)


def register_admin_services(
    server: aio.Server,
    *,
    node: RaftNode,
    brokers: Brokers,
    controller: Controller,
    parts: TopicParts,
    unloading: Unloading,
    schemas: SchemaRegistry,
    topic_schemas: TopicSchemas,
    forwarder: Forwarder,
) -> None:
    server, topics = forwarder.serving(server, "admin", codes.answer), parts.topics
    danube_admin_pb2_grpc.add_BrokerAdminServicer_to_server(
        BrokerAdmin(brokers, controller, topics.namespaces), server
    )
    danube_admin_pb2_grpc.add_ClusterAdminServicer_to_server(ClusterAdmin(node, parts.view), server)
    danube_admin_pb2_grpc.add_NamespaceAdminServicer_to_server(NamespaceAdmin(topics), server)
    danube_admin_pb2_grpc.add_TopicAdminServicer_to_server(
        TopicAdmin(parts, unloading, schemas, topic_schemas), server
    )
    danube_admin_pb2_grpc.add_SecurityAdminServicer_to_server(SecurityAdmin(), server)
    _register_schemas(server, topics, schemas, topic_schemas)


def _register_schemas(
    server: aio.Server, topics: ServedTopics, schemas: SchemaRegistry, topic_schemas: TopicSchemas
) -> None:
    danube_schema_pb2_grpc.add_SchemaRegistryServicer_to_server(
        SchemaService(schemas, topics.registry, topic_schemas), server
    )
