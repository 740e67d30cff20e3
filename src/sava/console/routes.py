"""The administration part of the HTTP API: which path is which call of a broker.

A route names a gRPC method of the admin or client port. Its path parameters, query and JSON body become the
fields of the request, and the answer's fields become JSON, under the names that the protocol gives them. So
the API has no logic of its own: what a caller may do, and what a call means, the broker decides as for every
other caller, and ``openapi`` describes the routes from the protocol.

``{topic}`` stands for two parts of a path, ``namespace/name``, as in ``/v1/topics/default/orders``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

# Loaded for what they register in the pool of descriptors.
from sava.proto import (  # noqa: F401
    admin_pb2,
    brokers_pb2,
    danube_schema_pb2,
    doctor_pb2,
    ledgers_pb2,
    pipelines_pb2,
    replication_pb2,
    security_pb2,
    streams_pb2,
    topics_admin_pb2,
    writers_pb2,
)

TOPIC: Final = "{namespace}/{name}"
"""What ``{topic}`` in a path means to the router."""
CLIENT_SERVICES: Final = frozenset({"sava.streams.Streams", "danube_schema.SchemaRegistry"})
"""Services of the client port; the others are on the admin port."""


class ApiRoute(NamedTuple):
    verb: str
    path: str
    method: str
    """``sava.admin.Topics/DescribeTopic``."""
    topic_field: str = "topic"
    """The field of the request that ``{topic}`` gives."""
    timeout_s: float = 15.0

    @property
    def service(self) -> str:
        return self.method.partition("/")[0]

    @property
    def descriptor(self) -> MethodDescriptor:
        service, _, method = self.method.partition("/")
        return _methods(service)[method]

    @property
    def request_type(self) -> type[Message]:
        return message_factory.GetMessageClass(self.descriptor.input_type)

    @property
    def response_type(self) -> type[Message]:
        return message_factory.GetMessageClass(self.descriptor.output_type)

    @property
    def pattern(self) -> str:
        return self.path.replace("{topic}", TOPIC)

    def fields(self, parameters: Mapping[str, str]) -> dict[str, str]:
        """The fields of the request that the path gives."""
        given = dict(parameters)
        if "{topic}" in self.path:
            given[self.topic_field] = f"/{given.pop('namespace')}/{given.pop('name')}"
        return given

    def query_fields(self) -> Iterator[FieldDescriptor]:
        """Fields that a query may give: plain ones that the path does not."""
        in_path = set(self.fields(_Anything()) if "{topic}" in self.path else ())
        for field in self.descriptor.input_type.fields:
            named = field.name in in_path or f"{{{field.name}}}" in self.path
            if not named and field.message_type is None and not field.is_repeated:
                yield field


class _Anything(dict[str, str]):
    """Path parameters of which only the names matter."""

    def __init__(self) -> None:
        super().__init__(namespace="", name="")


@cache
def _methods(service: str) -> Mapping[str, MethodDescriptor]:
    found: Any = descriptor_pool.Default().FindServiceByName(service)
    return dict(found.methods_by_name)


LONG_S: Final = 600.0
"""For calls that are answered while topics move."""

_CLUSTER = "sava.admin.Cluster"
_BROKERS = "sava.admin.Brokers"
_NAMESPACES = "sava.admin.Namespaces"
_TOPICS = "sava.admin.Topics"
_SUBSCRIPTIONS = "sava.admin.Subscriptions"
_SCHEMAS = "danube_schema.SchemaRegistry"
_REPLICATION = "sava.admin.Replication"
_PIPELINES = "sava.admin.Pipelines"
_SECURITY = "sava.admin.Security"
_META = "sava.admin.Meta"
_STREAMS = "sava.streams.Streams"

ROUTES: Final[tuple[ApiRoute, ...]] = (
    ApiRoute("GET", "/v1/cluster", f"{_CLUSTER}/Status"),
    ApiRoute("POST", "/v1/cluster/nodes", f"{_CLUSTER}/AddNode", timeout_s=60.0),
    ApiRoute("POST", "/v1/cluster/nodes/{node_id}/promote", f"{_CLUSTER}/PromoteNode", timeout_s=60.0),
    ApiRoute("DELETE", "/v1/cluster/nodes/{node_id}", f"{_CLUSTER}/RemoveNode", timeout_s=60.0),
    ApiRoute("POST", "/v1/cluster/transfer-leader", f"{_CLUSTER}/TransferLeader", timeout_s=30.0),
    ApiRoute("POST", "/v1/cluster/snapshot", f"{_CLUSTER}/Snapshot", timeout_s=60.0),
    ApiRoute("GET", "/v1/history", f"{_BROKERS}/GetHistory"),
    ApiRoute("GET", "/v1/doctor", "sava.admin.Doctor/Examine"),
    ApiRoute("GET", "/v1/brokers", f"{_BROKERS}/ListBrokers"),
    ApiRoute("GET", "/v1/brokers/balance", f"{_BROKERS}/GetBalance"),
    ApiRoute("POST", "/v1/brokers/rebalance", f"{_BROKERS}/Rebalance", timeout_s=LONG_S),
    ApiRoute("POST", "/v1/brokers/{broker_id}/drain", f"{_BROKERS}/DrainBroker", timeout_s=LONG_S),
    ApiRoute("POST", "/v1/brokers/{broker_id}/activate", f"{_BROKERS}/ActivateBroker"),
    ApiRoute("GET", "/v1/namespaces", f"{_NAMESPACES}/ListNamespaces"),
    ApiRoute("POST", "/v1/namespaces", f"{_NAMESPACES}/CreateNamespace"),
    ApiRoute("GET", "/v1/namespaces/{namespace}", f"{_NAMESPACES}/DescribeNamespace"),
    ApiRoute("PATCH", "/v1/namespaces/{namespace}/policy", f"{_NAMESPACES}/SetNamespacePolicy"),
    ApiRoute("DELETE", "/v1/namespaces/{namespace}", f"{_NAMESPACES}/DeleteNamespace"),
    ApiRoute("POST", "/v1/topics", f"{_TOPICS}/CreateTopic"),
    ApiRoute("GET", "/v1/topics/{topic}", f"{_TOPICS}/DescribeTopic", "name"),
    ApiRoute("DELETE", "/v1/topics/{topic}", f"{_TOPICS}/DeleteTopic", "name", 60.0),
    ApiRoute("PATCH", "/v1/topics/{topic}/policy", f"{_TOPICS}/SetTopicPolicy", "name"),
    ApiRoute("POST", "/v1/topics/{topic}/partitions", f"{_TOPICS}/GrowTopic", "name", 60.0),
    ApiRoute("POST", "/v1/topics/{topic}/unload", f"{_TOPICS}/UnloadTopic", "name", LONG_S),
    ApiRoute("GET", "/v1/topics/{topic}/offsets", f"{_STREAMS}/Offsets"),
    ApiRoute("GET", "/v1/topics/{topic}/segments", f"{_STREAMS}/Segments"),
    ApiRoute("GET", "/v1/topics/{topic}/schema", f"{_SCHEMAS}/GetTopicSchemaConfig", "topic_name"),
    ApiRoute("PUT", "/v1/topics/{topic}/schema", f"{_SCHEMAS}/ConfigureTopicSchema", "topic_name"),
    ApiRoute("POST", "/v1/topics/{topic}/subscriptions", f"{_SUBSCRIPTIONS}/CreateSubscription"),
    ApiRoute(
        "GET", "/v1/topics/{topic}/subscriptions/{subscription}", f"{_SUBSCRIPTIONS}/DescribeSubscription"
    ),
    ApiRoute(
        "PATCH", "/v1/topics/{topic}/subscriptions/{subscription}", f"{_SUBSCRIPTIONS}/ConfigureSubscription"
    ),
    ApiRoute(
        "POST", "/v1/topics/{topic}/subscriptions/{subscription}/seek", f"{_SUBSCRIPTIONS}/SeekSubscription"
    ),
    ApiRoute(
        "DELETE", "/v1/topics/{topic}/subscriptions/{subscription}", f"{_SUBSCRIPTIONS}/DeleteSubscription"
    ),
    ApiRoute("GET", "/v1/schemas", f"{_SCHEMAS}/ListSubjects"),
    ApiRoute("POST", "/v1/schemas", f"{_SCHEMAS}/RegisterSchema"),
    ApiRoute("GET", "/v1/schemas/{subject}", f"{_SCHEMAS}/GetLatestSchema"),
    ApiRoute("GET", "/v1/schemas/{subject}/versions", f"{_SCHEMAS}/ListVersions"),
    ApiRoute("GET", "/v1/schemas/{subject}/versions/{version}", f"{_STREAMS}/Schema"),
    ApiRoute("POST", "/v1/schemas/{subject}/compatibility", f"{_SCHEMAS}/CheckCompatibility"),
    ApiRoute("DELETE", "/v1/schemas/{subject}/versions/{version}", f"{_SCHEMAS}/DeleteSchemaVersion"),
    ApiRoute("GET", "/v1/ledgers", "sava.admin.Ledgers/ListLedgers"),
    ApiRoute("GET", "/v1/writers", "sava.writers.Writers/ListWriters"),
    ApiRoute("GET", "/v1/remotes", f"{_REPLICATION}/ListRemotes"),
    ApiRoute("POST", "/v1/remotes", f"{_REPLICATION}/AddRemote"),
    ApiRoute("DELETE", "/v1/remotes/{name}", f"{_REPLICATION}/RemoveRemote"),
    ApiRoute("GET", "/v1/replication", f"{_REPLICATION}/GetReplicationStatus"),
    ApiRoute("GET", "/v1/pipelines", f"{_PIPELINES}/ListPipelines"),
    ApiRoute("GET", "/v1/pipelines/runners", f"{_PIPELINES}/ListRunners"),
    ApiRoute("POST", "/v1/pipelines/{name}/pause", f"{_PIPELINES}/PausePipeline"),
    ApiRoute("POST", "/v1/pipelines/{name}/resume", f"{_PIPELINES}/ResumePipeline"),
    ApiRoute("DELETE", "/v1/pipelines/{name}", f"{_PIPELINES}/DeletePipeline"),
    ApiRoute("GET", "/v1/meta", f"{_META}/Range"),
    ApiRoute("GET", "/v1/auth/whoami", f"{_SECURITY}/WhoAmI"),
    ApiRoute("POST", "/v1/auth/can-i", f"{_SECURITY}/CanI"),
    ApiRoute("GET", "/v1/auth/roles", f"{_SECURITY}/ListRoles"),
    ApiRoute("PUT", "/v1/auth/roles/{name}", f"{_SECURITY}/SetRole"),
    ApiRoute("DELETE", "/v1/auth/roles/{name}", f"{_SECURITY}/DeleteRole"),
    ApiRoute("GET", "/v1/auth/bindings", f"{_SECURITY}/ListBindings"),
    ApiRoute("POST", "/v1/auth/bindings", f"{_SECURITY}/CreateBinding"),
    ApiRoute("DELETE", "/v1/auth/bindings/{id}", f"{_SECURITY}/DeleteBinding"),
    ApiRoute("GET", "/v1/auth/revocations", f"{_SECURITY}/ListRevocations"),
    ApiRoute("POST", "/v1/auth/revocations", f"{_SECURITY}/Revoke"),
    ApiRoute("GET", "/v1/auth/quotas", f"{_SECURITY}/ListQuotas"),
    ApiRoute("PUT", "/v1/auth/quotas/{principal}", f"{_SECURITY}/SetQuota"),
)
