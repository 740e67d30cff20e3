"""What other clusters are told of topics, where the records are not as they ought to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sava.api.replica import ReplicaService
from sava.metadata.commands import Delete
from sava.metadata.errors import NotInitialized
from sava.proto import replica_pb2 as pb
from sava.schemas.registry import SchemaRegistry
from sava.topics import specs
from sava.topics.errors import TopicBeingDeleted
from sava.topics.names import TopicName
from tests.support.topics import ORDERS, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def service(world: World, topics: Any, cluster_id: str = "c") -> ReplicaService:
    schemas = SchemaRegistry(world.metadata)
    return ReplicaService(topics, schemas=schemas, cluster_name="us", cluster_id=lambda: cluster_id)


async def test_a_partition_without_a_record_is_a_hole(world: World) -> None:
    """Nothing makes one, but an operator who mends records by hand may: its place must not be copied into."""
    async with world.topics() as topics:
        await topics.create(ORDERS, reliable=True, partitions=3)
        await world.metadata.txn((), (Delete(specs.spec_key(ORDERS.partition(1))),))
        request = pb.DescribeTopicsRequest(topics=[str(ORDERS)])
        (shape,) = (await service(world, topics).DescribeTopics(request, None)).topics
        assert (shape.partition_count, list(shape.missing)) == (3, [1])
        assert [bool(topic_id) for topic_id in shape.topic_ids] == [True, False, True]


async def test_a_topic_that_is_being_deleted_is_not_there_and_its_name_not_free(world: World) -> None:
    name = TopicName("default", "going")
    async with world.topics() as topics:
        await topics.create(name, reliable=True)
        await topics.registry.begin_delete(name)
        replica = service(world, topics)
        described = await replica.DescribeTopics(pb.DescribeTopicsRequest(topics=[str(name)]), None)
        assert not described.topics[0].exists
        with pytest.raises(TopicBeingDeleted):
            await replica.EnsureTopic(pb.EnsureTopicRequest(topic=str(name), reliable=True), None)


async def test_a_broker_without_a_cluster_has_nothing_to_say(world: World) -> None:
    async with world.topics() as topics:
        with pytest.raises(NotInitialized):
            await service(world, topics, cluster_id="").Hello(pb.HelloRequest(), None)
