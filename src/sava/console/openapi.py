"""The description of the HTTP API (OpenAPI 3.1), made from the routes and the protocol's descriptors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

import sava
from sava.console.routes import ROUTES, ApiRoute

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
