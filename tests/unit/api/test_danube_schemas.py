"""Schema versions that topics rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from sava.proto import danube_schema_pb2 as pb
from sava.proto import danube_schema_pb2_grpc as rpc
from sava.topics.names import TopicName
from tests.compat.raw import refused
from tests.unit.api.site import Site

ORDERS = TopicName("default", "orders")


@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_version_of_a_subject_that_a_topic_enforces_cannot_be_deleted(
    tmp_path: Path, partitions: int
) -> None:
    """Its producers may name any version: without one of them, what was accepted a moment ago is refused."""
    async with Site(tmp_path).broker(1) as broker:
        schemas: Any = rpc.SchemaRegistryStub(broker.channel)
        for definition in (b'{"type": "object"}', b'{"type": "object", "title": "t"}'):
            await schemas.RegisterSchema(
                pb.RegisterSchemaRequest(subject="s", schema_type="json_schema", schema_definition=definition)
            )
        await broker.topics.create(ORDERS, reliable=True, partitions=partitions)
        configure = pb.ConfigureTopicSchemaRequest(
            topic_name=str(ORDERS), schema_subject="s", validation_policy="enforce"
        )
        await schemas.ConfigureTopicSchema(configure)

        delete = pb.DeleteSchemaVersionRequest(subject="s", version=1)
        code, text = await refused(schemas.DeleteSchemaVersion(delete))
        assert code is StatusCode.FAILED_PRECONDITION
        assert "version 1 of subject 's'" in text
        assert "topic /default/orders " in text
        assert len((await schemas.ListVersions(pb.ListVersionsRequest(subject="s"))).versions) == 2

        policy = pb.UpdateTopicValidationPolicyRequest(topic_name=str(ORDERS), validation_policy="warn")
        await schemas.UpdateTopicValidationPolicy(policy)
        await schemas.DeleteSchemaVersion(delete)
        (left,) = (await schemas.ListVersions(pb.ListVersionsRequest(subject="s"))).versions
        assert left.version == 2


async def test_a_topic_that_is_deleted_enforces_nothing(tmp_path: Path) -> None:
    async with Site(tmp_path).broker(1) as broker:
        schemas: Any = rpc.SchemaRegistryStub(broker.channel)
        await schemas.RegisterSchema(
            pb.RegisterSchemaRequest(subject="s", schema_type="string", schema_definition=b"")
        )
        await broker.topics.create(ORDERS, reliable=True)
        await schemas.ConfigureTopicSchema(
            pb.ConfigureTopicSchemaRequest(
                topic_name=str(ORDERS), schema_subject="s", validation_policy="enforce"
            )
        )
        await broker.topics.delete(ORDERS)
        await schemas.DeleteSchemaVersion(pb.DeleteSchemaVersionRequest(subject="s", version=1))
