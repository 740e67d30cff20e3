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


class Route(NamedTuple):
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

ROUTES: Final[tuple[Route, ...]] = (
    Route("GET", "/v1/cluster", f"{_CLUSTER}/Status"),
    Route("POST", "/v1/cluster/nodes", f"{_CLUSTER}/AddNode", timeout_s=60.0),
    Route("POST", "/v1/cluster/nodes/{node_id}/promote", f"{_CLUSTER}/PromoteNode", timeout_s=60.0),
    Route("DELETE", "/v1/cluster/nodes/{node_id}", f"{_CLUSTER}/RemoveNode", timeout_s=60.0),
    Route("POST", "/v1/cluster/transfer-leader", f"{_CLUSTER}/TransferLeader", timeout_s=30.0),
    Route("POST", "/v1/cluster/snapshot", f"{_CLUSTER}/Snapshot", timeout_s=60.0),
    Route("GET", "/v1/doctor", "sava.admin.Doctor/Examine"),
    Route("GET", "/v1/brokers", f"{_BROKERS}/ListBrokers"),
    Route("GET", "/v1/brokers/balance", f"{_BROKERS}/GetBalance"),
    Route("POST", "/v1/brokers/rebalance", f"{_BROKERS}/Rebalance", timeout_s=LONG_S),
    Route("POST", "/v1/brokers/{broker_id}/drain", f"{_BROKERS}/DrainBroker", timeout_s=LONG_S),
    Route("POST", "/v1/brokers/{broker_id}/activate", f"{_BROKERS}/ActivateBroker"),
    Route("GET", "/v1/namespaces", f"{_NAMESPACES}/ListNamespaces"),
    Route("POST", "/v1/namespaces", f"{_NAMESPACES}/CreateNamespace"),
    Route("GET", "/v1/namespaces/{namespace}", f"{_NAMESPACES}/DescribeNamespace"),
    Route("PATCH", "/v1/namespaces/{namespace}/policy", f"{_NAMESPACES}/SetNamespacePolicy"),
    Route("DELETE", "/v1/namespaces/{namespace}", f"{_NAMESPACES}/DeleteNamespace"),
    Route("POST", "/v1/topics", f"{_TOPICS}/CreateTopic"),
    Route("GET", "/v1/topics/{topic}", f"{_TOPICS}/DescribeTopic", "name"),
    Route("DELETE", "/v1/topics/{topic}", f"{_TOPICS}/DeleteTopic", "name", 60.0),
    Route("PATCH", "/v1/topics/{topic}/policy", f"{_TOPICS}/SetTopicPolicy", "name"),
    Route("POST", "/v1/topics/{topic}/partitions", f"{_TOPICS}/GrowTopic", "name", 60.0),
    Route("POST", "/v1/topics/{topic}/unload", f"{_TOPICS}/UnloadTopic", "name", LONG_S),
    Route("GET", "/v1/topics/{topic}/offsets", f"{_STREAMS}/Offsets"),
    Route("GET", "/v1/topics/{topic}/segments", f"{_STREAMS}/Segments"),
    Route("GET", "/v1/topics/{topic}/schema", f"{_SCHEMAS}/GetTopicSchemaConfig", "topic_name"),
    Route("PUT", "/v1/topics/{topic}/schema", f"{_SCHEMAS}/ConfigureTopicSchema", "topic_name"),
    Route("POST", "/v1/topics/{topic}/subscriptions", f"{_SUBSCRIPTIONS}/CreateSubscription"),
    Route("GET", "/v1/topics/{topic}/subscriptions/{subscription}", f"{_SUBSCRIPTIONS}/DescribeSubscription"),
    Route(
        "PATCH", "/v1/topics/{topic}/subscriptions/{subscription}", f"{_SUBSCRIPTIONS}/ConfigureSubscription"
    ),
    Route(
        "POST", "/v1/topics/{topic}/subscriptions/{subscription}/seek", f"{_SUBSCRIPTIONS}/SeekSubscription"
    ),
    Route(
        "DELETE", "/v1/topics/{topic}/subscriptions/{subscription}", f"{_SUBSCRIPTIONS}/DeleteSubscription"
    ),
    Route("GET", "/v1/schemas", f"{_SCHEMAS}/ListSubjects"),
    Route("POST", "/v1/schemas", f"{_SCHEMAS}/RegisterSchema"),
    Route("GET", "/v1/schemas/{subject}", f"{_SCHEMAS}/GetLatestSchema"),
    Route("GET", "/v1/schemas/{subject}/versions", f"{_SCHEMAS}/ListVersions"),
    Route("GET", "/v1/schemas/{subject}/versions/{version}", f"{_STREAMS}/Schema"),
    Route("POST", "/v1/schemas/{subject}/compatibility", f"{_SCHEMAS}/CheckCompatibility"),
    Route("DELETE", "/v1/schemas/{subject}/versions/{version}", f"{_SCHEMAS}/DeleteSchemaVersion"),
    Route("GET", "/v1/ledgers", "sava.admin.Ledgers/ListLedgers"),
    Route("GET", "/v1/writers", "sava.writers.Writers/ListWriters"),
    Route("GET", "/v1/remotes", f"{_REPLICATION}/ListRemotes"),
    Route("POST", "/v1/remotes", f"{_REPLICATION}/AddRemote"),
    Route("DELETE", "/v1/remotes/{name}", f"{_REPLICATION}/RemoveRemote"),
    Route("GET", "/v1/replication", f"{_REPLICATION}/GetReplicationStatus"),
    Route("GET", "/v1/pipelines", f"{_PIPELINES}/ListPipelines"),
    Route("GET", "/v1/pipelines/runners", f"{_PIPELINES}/ListRunners"),
    Route("POST", "/v1/pipelines/{name}/pause", f"{_PIPELINES}/PausePipeline"),
    Route("POST", "/v1/pipelines/{name}/resume", f"{_PIPELINES}/ResumePipeline"),
    Route("DELETE", "/v1/pipelines/{name}", f"{_PIPELINES}/DeletePipeline"),
    Route("GET", "/v1/meta", f"{_META}/Range"),
    Route("GET", "/v1/auth/whoami", f"{_SECURITY}/WhoAmI"),
    Route("POST", "/v1/auth/can-i", f"{_SECURITY}/CanI"),
    Route("GET", "/v1/auth/roles", f"{_SECURITY}/ListRoles"),
    Route("PUT", "/v1/auth/roles/{name}", f"{_SECURITY}/SetRole"),
    Route("DELETE", "/v1/auth/roles/{name}", f"{_SECURITY}/DeleteRole"),
    Route("GET", "/v1/auth/bindings", f"{_SECURITY}/ListBindings"),
    Route("POST", "/v1/auth/bindings", f"{_SECURITY}/CreateBinding"),
    Route("DELETE", "/v1/auth/bindings/{id}", f"{_SECURITY}/DeleteBinding"),
    Route("GET", "/v1/auth/revocations", f"{_SECURITY}/ListRevocations"),
    Route("POST", "/v1/auth/revocations", f"{_SECURITY}/Revoke"),
    Route("GET", "/v1/auth/quotas", f"{_SECURITY}/ListQuotas"),
    Route("PUT", "/v1/auth/quotas/{principal}", f"{_SECURITY}/SetQuota"),
)
