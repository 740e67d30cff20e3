"""The administration part of the HTTP API: which path is which call of a broker.

A route names a gRPC method of the admin or client port. Its path parameters, query and JSON body become the
fields of the request, and the answer's fields become JSON, under the names that the protocol gives them. So
the API has no logic of its own: what a caller may do, and what a call means, the broker decides as for every
other caller, and ``description`` describes the routes from the protocol's descriptors.

``{topic}`` stands for two parts of a path, ``namespace/name``, as in ``/v1/topics/default/orders``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

import sava

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


# -- as OpenAPI 3.1 --------------------------------------------------------------------------------


_INTEGERS: Final = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
}
_PARAMETER: Final = re.compile(r"{(\w+)}")
_ERROR: Final = {"$ref": "#/components/responses/Error"}
_TOPIC: Final = "/v1/topics/{namespace}/{name}"
_START: Final = "earliest, latest, an offset, -5m, or a time such as 2026-01-31T12:00:00Z"
_FILTERS: Final = {
    "start": _START,
    "key": "only messages with this key",
    "attribute": "only messages with this attribute: name=value",
    "contains": "only messages whose payload contains this text",
    "max_payload": "bytes of each payload that are shown",
}
_MESSAGES: Final[dict[str, dict[str, Any]]] = {
    f"{_TOPIC}/messages": {
        "post": ("Publish messages; answers when they are durable.", {}),
        "get": ("Read messages from a position on.", {**_FILTERS, "limit": "at most this many"}),
    },
    f"{_TOPIC}/messages/follow": {"get": ("Follow a topic as server-sent events.", _FILTERS)},
    f"{_TOPIC}/subscriptions/{{subscription}}/receive": {
        "post": ("Receive messages of a subscription; opens a consumer, or continues with one.", {})
    },
    f"{_TOPIC}/subscriptions/{{subscription}}/ack": {"post": ("Acknowledge messages.", {})},
    f"{_TOPIC}/subscriptions/{{subscription}}/nack": {"post": ("Ask for messages again.", {})},
}


@cache
def description() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.pattern, {})[route.verb.lower()] = _operation(route, schemas)
    for path, verbs in _MESSAGES.items():
        for verb, (summary, query) in verbs.items():
            paths.setdefault(path, {})[verb] = {
                "summary": summary,
                "tags": ["Messages"],
                "parameters": [*_in_path(path), *(_in_query(name, text) for name, text in query.items())],
                "responses": {"200": {"description": "OK"}, "default": _ERROR},
            }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sava", "version": sava.__version__},
        "paths": paths,
        "security": [{"token": []}, {}],
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}},
            "schemas": schemas,
            "responses": {"Error": {"description": "What went wrong, and whether the request took effect."}},
        },
    }


def _operation(route: ApiRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    service, _, method = route.method.rpartition(".")[2].partition("/")
    answer = {"schema": _reference(route.descriptor.output_type, schemas)}
    kind = "application/x-ndjson" if route.descriptor.server_streaming else "application/json"
    operation: dict[str, Any] = {
        "summary": f"{service}.{method}",
        "operationId": f"{service}_{method}_{route.verb.lower()}",
        "tags": [service],
        "parameters": list(_in_path(route.pattern)),
        "responses": {"200": {"description": "OK", "content": {kind: answer}}, "default": _ERROR},
    }
    if route.verb in ("GET", "DELETE"):
        operation["parameters"] += [_in_query(field.name, "") for field in route.query_fields()]
    else:
        body = {"schema": _reference(route.descriptor.input_type, schemas)}
        operation["requestBody"] = {"content": {"application/json": body}}
    return operation


def _in_path(path: str) -> Iterator[dict[str, Any]]:
    for name in _PARAMETER.findall(path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _in_query(name: str, text: str) -> dict[str, Any]:
    parameter = {"name": name, "in": "query", "schema": {"type": "string"}}
    return parameter | {"description": text} if text else parameter


def _reference(message: Descriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    name = message.full_name
    if name not in schemas:
        schemas[name] = {}  # messages may hold themselves
        schemas[name] = {
            "type": "object",
            "properties": {field.name: _schema(field, schemas) for field in message.fields},
        }
    return {"$ref": f"#/components/schemas/{name}"}


def _schema(field: FieldDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    if field.message_type is not None:
        schema = _reference(field.message_type, schemas)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        schema = {"type": "boolean"}
    elif field.name.endswith("_id"):
        schema = {"type": "string"}
    elif field.cpp_type in _INTEGERS:
        schema = {"type": "integer"}
    elif field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        schema = {"type": "number"}
    else:
        schema = {"type": "string"}
    return {"type": "array", "items": schema} if field.is_repeated else schema
