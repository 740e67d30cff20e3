"""``SchemaRegistry``: subjects, their versions, and what topics demand of their messages.

Served on the client port and on the admin port. Definitions are returned exactly as they were registered.
What a topic demands is answered by any broker, and is the same for all partitions of a topic.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from typing import Any, Final

import msgspec

from sava.api.danube.wire import required, topic_name
from sava.api.messages import to_message
from sava.peers.guard import may_see_subject
from sava.proto import danube_schema_pb2 as pb
from sava.proto import danube_schema_pb2_grpc as rpc
from sava.schemas.errors import VersionInUse
from sava.schemas.records import SchemaVersion
from sava.schemas.registry import SchemaRegistry
from sava.schemas.types import TopicSchema, parse_policy
from sava.topics.errors import SchemaRefused
from sava.topics.names import TopicName
from sava.topics.registry import Registry
from sava.topics.rules import TopicSchemas

DONE: Final = "done"


class SchemaService(rpc.SchemaRegistryServicer):
    def __init__(self, schemas: SchemaRegistry, registry: Registry, topic_schemas: TopicSchemas) -> None:
        self._schemas = schemas
        self._registry = registry
        self._topic_schemas = topic_schemas

    # -- subjects and versions -------------------------------------------------------------------
    async def RegisterSchema(
        self, request: pb.RegisterSchemaRequest, context: Any
    ) -> pb.RegisterSchemaResponse:
        registered = await self._schemas.register(
            required(request.subject, "subject"),
            required(request.schema_type, "schema_type"),
            request.schema_definition,
            description=request.description,
            created_by=request.created_by,
            tags=tuple(request.tags),
        )
        return to_message(pb.RegisterSchemaResponse, registered)

    async def GetSchema(self, request: pb.GetSchemaRequest, context: Any) -> pb.GetSchemaResponse:
        version = request.version if request.HasField("version") else None
        return _schema(await self._schemas.get(request.schema_id, version))

    async def GetLatestSchema(self, request: pb.GetLatestSchemaRequest, context: Any) -> pb.GetSchemaResponse:
        return _schema(await self._schemas.latest(required(request.subject, "subject")))

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Any) -> pb.ListVersionsResponse:
        versions = await self._schemas.versions(required(request.subject, "subject"))
        return pb.ListVersionsResponse(
            versions=[
                to_message(pb.SchemaVersionInfo, each, created_at=each.created_ms // 1000)
                for each in versions
            ]
        )

    async def ListSubjects(self, request: pb.ListSubjectsRequest, context: Any) -> pb.ListSubjectsResponse:
        return pb.ListSubjectsResponse(
            subjects=[
                to_message(
                    pb.SubjectSummary,
                    each,
                    schema_type=each.type,
                    latest_version=each.latest,
                    compatibility_mode=each.mode,
                )
                for each in await self._schemas.subjects()
                if may_see_subject(each.subject)
            ]
        )

    async def CheckCompatibility(
        self, request: pb.CheckCompatibilityRequest, context: Any
    ) -> pb.CheckCompatibilityResponse:
        problems = await self._schemas.check(
            required(request.subject, "subject"),
            request.new_schema_definition,
            required(request.schema_type, "schema_type"),
            request.compatibility_mode if request.HasField("compatibility_mode") else None,
        )
        return pb.CheckCompatibilityResponse(is_compatible=not problems, errors=problems)

    async def DeleteSchemaVersion(
        self, request: pb.DeleteSchemaVersionRequest, context: Any
    ) -> pb.DeleteSchemaVersionResponse:
        """Which version a message names is its producer's choice, so a topic that enforces a subject needs
        all of them. One that begins to enforce it at the same moment finds it without the version, as it
        would have a moment later."""
        subject = required(request.subject, "subject")
        if enforcing := await self._topic_schemas.enforcing(subject):
            raise VersionInUse(subject, request.version, [str(name) for name in enforcing])
        await self._schemas.delete_version(subject, request.version)
        return pb.DeleteSchemaVersionResponse(success=True, message=DONE)

    async def SetCompatibilityMode(
        self, request: pb.SetCompatibilityModeRequest, context: Any
    ) -> pb.SetCompatibilityModeResponse:
        mode = required(request.compatibility_mode, "compatibility_mode")
        info = await self._schemas.set_mode(required(request.subject, "subject"), mode)
        return pb.SetCompatibilityModeResponse(success=True, message=f"the mode is {info.mode}")

    # -- topics ----------------------------------------------------------------------------------
    async def ConfigureTopicSchema(
        self, request: pb.ConfigureTopicSchemaRequest, context: Any
    ) -> pb.ConfigureTopicSchemaResponse:
        name = topic_name(request.topic_name)
        schema = TopicSchema(
            subject=required(request.schema_subject, "schema_subject"),
            policy=parse_policy(request.validation_policy or "none"),
            validate_payload=request.enable_payload_validation,
        )
        await self._schemas.subject(schema.subject)
        await self._topic_schemas.set(name, schema)
        return pb.ConfigureTopicSchemaResponse(success=True, message=DONE)

    async def UpdateTopicValidationPolicy(
        self, request: pb.UpdateTopicValidationPolicyRequest, context: Any
    ) -> pb.UpdateTopicValidationPolicyResponse:
        name = topic_name(request.topic_name)
        policy = parse_policy(required(request.validation_policy, "validation_policy"))
        schema = await self._get(name)
        changed = msgspec.structs.replace(
            schema, policy=policy, validate_payload=request.enable_payload_validation
        )
        await self._topic_schemas.set(name, changed)
        return pb.UpdateTopicValidationPolicyResponse(success=True, message=DONE)

    async def GetTopicSchemaConfig(
        self, request: pb.GetTopicSchemaConfigRequest, context: Any
    ) -> pb.GetTopicSchemaConfigResponse:
        schema = await self._get(topic_name(request.topic_name))
        return pb.GetTopicSchemaConfigResponse(
            schema_subject=schema.subject,
            validation_policy=schema.policy,
            enable_payload_validation=schema.validate_payload,
            schema_id=(await self._schemas.subject(schema.subject)).schema_id,
        )

    async def _get(self, name: TopicName) -> TopicSchema:
        await self._registry.need(name)
        schema = await self._topic_schemas.get(name)
        if schema is None:
            raise SchemaRefused(f"topic {name} has no schema; configure one first")
        return schema


def _schema(schema: SchemaVersion) -> pb.GetSchemaResponse:
    return to_message(
        pb.GetSchemaResponse,
        schema,
        schema_type=schema.type,
        schema_definition=schema.definition,
        created_at=schema.created_ms // 1000,
        compatibility_mode=schema.mode,
    )
