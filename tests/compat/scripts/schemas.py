"""The schema registry through danube-client."""

from __future__ import annotations

import json
from typing import Any

from common import main, producer, receiver
from danube import CompatibilityMode, DanubeClient, DispatchStrategy, SchemaType
from grpc.aio import AioRpcError

V1 = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
V2 = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
BREAKING = {"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]}


async def _register(client: DanubeClient, subject: str, definition: Any, kind: SchemaType) -> int:
    data = definition if isinstance(definition, bytes) else json.dumps(definition).encode()
    return await client.schema().register_schema(subject).with_type(kind).with_schema_data(data).execute()


async def registry(client: DanubeClient, subject: str) -> Any:
    schemas = client.schema()
    first = await (
        schemas.register_schema(subject)
        .with_type(SchemaType.JSON_SCHEMA)
        .with_schema_data(json.dumps(V1).encode())
        .with_description("people")
        .with_created_by("test")
        .with_tags(["a", "b"])
        .execute()
    )
    same = await _register(client, subject, V1, SchemaType.JSON_SCHEMA)
    second = await _register(client, subject, V2, SchemaType.JSON_SCHEMA)
    latest = await schemas.get_latest_schema(subject)
    older = await schemas.get_schema_version(first, 1)
    return {
        "ids": [first, same, second, latest.schema_id, older.schema_id],
        "versions": await schemas.list_versions(subject),
        "latest": [latest.version, json.loads(latest.schema_definition), latest.schema_type],
        "older": [older.version, json.loads(older.schema_definition)],
        "fingerprint": latest.fingerprint,
    }


async def evolution(client: DanubeClient, subject: str) -> Any:
    schemas = client.schema()
    await _register(client, subject, V1, SchemaType.JSON_SCHEMA)
    compatible = await schemas.check_compatibility(subject, json.dumps(V2).encode(), SchemaType.JSON_SCHEMA)
    breaking, reasons = await schemas.check_compatibility(
        subject, json.dumps(BREAKING).encode(), SchemaType.JSON_SCHEMA
    )
    try:
        await _register(client, subject, BREAKING, SchemaType.JSON_SCHEMA)
        refused = False
    except AioRpcError:
        refused = True
    relaxed = await schemas.set_compatibility_mode(subject, CompatibilityMode.NONE)
    await _register(client, subject, BREAKING, SchemaType.JSON_SCHEMA)
    versions = await schemas.list_versions(subject)
    deleted = await schemas.delete_schema_version(subject, versions[-1])
    return {
        "compatible": compatible[0],
        "breaking": breaking,
        "reasons": len(reasons),
        "refused": refused,
        "relaxed": relaxed[0],
        "deleted": deleted[0],
        "versions": versions,
        "left": await schemas.list_versions(subject),
        "latest": (await schemas.get_latest_schema(subject)).version,
    }


async def every_type(client: DanubeClient, prefix: str) -> Any:
    avro = {"type": "record", "name": "r", "fields": [{"name": "a", "type": "long"}]}
    definitions = {
        SchemaType.BYTES: b"bytes",
        SchemaType.STRING: b"string",
        SchemaType.NUMBER: b"number",
        SchemaType.AVRO: json.dumps(avro).encode(),
        SchemaType.JSON_SCHEMA: json.dumps(V1).encode(),
        SchemaType.PROTOBUF: b'syntax = "proto3"; message M { string a = 1; }',
    }
    ids = []
    for kind, definition in definitions.items():
        ids.append(await _register(client, f"{prefix}-{kind.value}", definition, kind))
    kinds = [(await client.schema().get_schema_by_id(number)).schema_type for number in ids]
    return {"distinct": len(set(ids)), "kinds": kinds, "expected": [kind.value for kind in definitions]}


async def version_selection(client: DanubeClient, topic: str, subject: str) -> Any:
    """Producers with the latest, a pinned and a minimum version; what they send says which."""
    await _register(client, subject, V1, SchemaType.JSON_SCHEMA)
    await _register(client, subject, V2, SchemaType.JSON_SCHEMA)
    first = client.new_producer().with_dispatch_strategy(DispatchStrategy.RELIABLE)
    latest = first.with_topic(topic).with_name("latest").with_schema_subject(subject).build()
    await latest.create()
    taker = await receiver(client, topic)
    pinned = _builder(client, topic, "pinned").with_schema_version(subject, 1).build()
    minimum = _builder(client, topic, "minimum").with_schema_min_version(subject, 2).build()
    payload = json.dumps({"name": "x"}).encode()
    for each in (latest, pinned, minimum):
        if each is not latest:
            await each.create()
        await each.send(payload)
    versions = [(await taker.next()).schema_version for _ in range(3)]
    refused = []
    for builder in (
        _builder(client, topic, "p9").with_schema_version(subject, 9),
        _builder(client, topic, "m9").with_schema_min_version(subject, 9),
        _builder(client, topic, "other").with_schema_subject("subject-that-nobody-registered"),
    ):
        try:
            await builder.build().create()
            refused.append(False)
        except (AioRpcError, ValueError):
            refused.append(True)
    plain = await producer(client, topic, "without schema")
    await plain.send(payload)
    message = await taker.next()
    return {"versions": versions, "refused": refused, "without": message.HasField("schema_id")}


def _builder(client: DanubeClient, topic: str, name: str) -> Any:
    builder = client.new_producer().with_topic(topic).with_name(name)
    return builder.with_dispatch_strategy(DispatchStrategy.RELIABLE)


async def topic_config(client: DanubeClient, topic: str, subject: str) -> Any:
    """A topic that enforces its schema refuses what does not follow it."""
    schemas = client.schema()
    schema_id = await _register(client, subject, V1, SchemaType.JSON_SCHEMA)
    sender = _builder(client, topic, "p").with_schema_subject(subject).build()
    await sender.create()
    await schemas.configure_topic_schema(topic, subject, "enforce", True)
    await sender.send(json.dumps({"name": "x"}).encode())
    try:
        await sender.send(b'{"name": 1}')
        refused = "accepted"
    except AioRpcError as error:
        refused = error.code().name
    config = await schemas.get_topic_schema_config(topic)
    await schemas.update_topic_validation_policy(topic, "none")
    await sender.send(b'{"name": 1}')
    changed = await schemas.get_topic_schema_config(topic)
    return {
        "refused": refused,
        "subject": config.schema_subject,
        "policy": [config.validation_policy, config.enable_payload_validation],
        "same_id": config.schema_id == schema_id,
        "changed": [changed.validation_policy, changed.enable_payload_validation],
    }


if __name__ == "__main__":
    main(registry, evolution, every_type, version_selection, topic_config)
