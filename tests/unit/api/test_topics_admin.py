"""Namespaces, topics and subscriptions through the admin port: real topics, real gRPC, metadata in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sava.api.admin_client import AdminClient
from sava.config import Config, PolicySettings
from sava.errors import SavaError
from sava.proto import topics_admin_pb2 as pb
from sava.topics.names import TopicName
from sava.topics.served import ServedTopics
from sava.topics.specs import SubscriptionType
from tests.support.topics import (
    options,
    publish,
    ranges,
    received,
)
from tests.unit.api.site import Site

ORDERS = "/default/orders"
EARLIEST = pb.StartPosition(earliest=True)
LATEST = pb.StartPosition(latest=True)


@dataclass
class Admin:
    client: AdminClient
    topics: ServedTopics

    async def namespaces(self, method: str, request: Any) -> Any:
        return await self.client.call(getattr(self.client.namespaces, method), request)

    async def topic(self, method: str, request: Any) -> Any:
        return await self.client.call(getattr(self.client.topics, method), request)

    async def subscription(self, method: str, request: Any) -> Any:
        return await self.client.call(getattr(self.client.subscriptions, method), request)

    async def create(self, name: str = ORDERS, **more: Any) -> pb.TopicDescription:
        request = pb.CreateTopicRequest(name=name, **{"reliable": True, **more})
        created: pb.TopicDescription = await self.topic("CreateTopic", request)
        return created

    async def describe(self, name: str = ORDERS) -> pb.TopicDescription:
        described: pb.TopicDescription = await self.topic("DescribeTopic", pb.DescribeTopicRequest(name=name))
        return described

    async def subscribe(
        self, name: str = ORDERS, start: pb.StartPosition = EARLIEST
    ) -> pb.SubscriptionDescription:
        request = pb.CreateSubscriptionRequest(topic=name, subscription="s", type="shared", start=start)
        created: pb.SubscriptionDescription = await self.subscription("CreateSubscription", request)
        return created

    async def publish(self, name: str, *payloads: str) -> None:
        await publish(await self.topics.get(TopicName.parse(name)), *payloads)


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[Admin]:
    site = Site(tmp_path, Config(policies=PolicySettings(max_message_size=1000)))
    async with site.broker(1) as broker:
        assigning = asyncio.create_task(broker.director.assign_new())
        yield Admin(broker.client, broker.topics)
        assigning.cancel()


# -- namespaces ----------------------------------------------------------------------------------


async def test_a_namespace_comes_is_listed_and_goes(admin: Admin) -> None:
    created = await admin.namespaces("CreateNamespace", pb.CreateNamespaceRequest(namespace="shop"))
    assert not created.already_existed
    again = await admin.namespaces("CreateNamespace", pb.CreateNamespaceRequest(namespace="shop"))
    assert again.already_existed
    listed = await admin.namespaces("ListNamespaces", pb.ListNamespacesRequest())
    assert set(listed.namespaces) == {"default", "shop", "system"}

    await admin.create("/shop/orders", partitions=2)
    described = await admin.namespaces("DescribeNamespace", pb.DescribeNamespaceRequest(namespace="shop"))
    assert described.topics == 1
    with pytest.raises(SavaError, match="has topics"):
        await admin.namespaces("DeleteNamespace", pb.DeleteNamespaceRequest(namespace="shop"))
    await admin.topic("DeleteTopic", pb.DeleteTopicRequest(name="/shop/orders"))
    await admin.namespaces("DeleteNamespace", pb.DeleteNamespaceRequest(namespace="shop"))
    with pytest.raises(SavaError, match="sava namespaces create shop"):
        await admin.namespaces("DescribeNamespace", pb.DescribeNamespaceRequest(namespace="shop"))


async def test_limits_of_a_namespace_are_set_and_cleared_one_by_one(admin: Admin) -> None:
    async def change(*clear: str, **limits: int) -> pb.NamespaceDescription:
        request = pb.SetNamespacePolicyRequest(namespace="default", policy=pb.Policy(**limits), clear=clear)
        described: pb.NamespaceDescription = await admin.namespaces("SetNamespacePolicy", request)
        return described

    first = await change(max_message_size=0, max_publish_rate=5)
    assert first.policy.HasField("max_message_size")
    assert first.effective_policy.max_message_size == 0
    second = await change("max_message_size", max_producers_per_topic=3)
    assert not second.policy.HasField("max_message_size")
    assert second.policy.max_publish_rate == 5
    assert second.effective_policy.max_message_size == 1000  # as configured
    assert second.effective_policy.max_producers_per_topic == 3
    with pytest.raises(SavaError, match="max_message_size"):
        await change("max_mesage_size")


# -- topics --------------------------------------------------------------------------------------


async def test_a_topic_is_described_with_what_goes_on_in_it(admin: Admin) -> None:
    created = await admin.create()
    assert (created.delivery, created.state, created.broker_id) == ("Reliable", "open", 1)
    await admin.publish(ORDERS, "a", "b", "c")
    topic = await admin.topics.get(TopicName.parse(ORDERS))
    consumer = await topic.subscribe(options("s", "c", type=SubscriptionType.FAILOVER))
    await received(consumer, 3)
    consumer.ack([(0, 1)])

    described = await admin.describe()
    assert (described.start_offset, described.next_offset) == (0, 3)
    assert list(described.producers) == ["p"]
    (subscription,) = described.subscriptions
    assert (subscription.type, list(subscription.consumers)) == ("failover", ["c"])
    assert subscription.active_consumer == "c"
    assert (subscription.cursor, subscription.backlog, subscription.unacked) == (1, 2, 2)
    assert subscription.delivered == 3
    consumer.close()


async def test_creating_what_exists_is_an_error_unless_it_may_exist(admin: Admin) -> None:
    created = await admin.create()
    with pytest.raises(SavaError, match="exists already"):
        await admin.create()
    assert (await admin.create(if_absent=True)).topic_id == created.topic_id
    with pytest.raises(SavaError, match="is another: Reliable, no partitions"):
        await admin.create(if_absent=True, partitions=2)
    with pytest.raises(SavaError, match="is another"):
        await admin.create(if_absent=True, reliable=False)


async def test_topics_are_listed_with_their_partitions_behind_them(admin: Admin) -> None:
    await admin.create("/default/b", partitions=11)
    await admin.create("/default/a-part-time", reliable=False)
    listed = (await admin.topic("ListTopics", pb.ListTopicsRequest(namespace="default"))).topics
    names = [topic.name for topic in listed]
    assert names[:3] == ["/default/a-part-time", "/default/b", "/default/b-part-0"]
    assert names[-1] == "/default/b-part-10"
    assert (listed[0].delivery, listed[0].partition_of) == ("NonReliable", "")
    assert (listed[1].partitions, listed[2].partition_of) == (11, "/default/b")
    with pytest.raises(SavaError, match="namespace nowhere does not exist"):
        await admin.topic("ListTopics", pb.ListTopicsRequest(namespace="nowhere"))


async def test_a_partitioned_topic_grows_and_is_described_as_a_whole(admin: Admin) -> None:
    await admin.create(partitions=2)
    grown = await admin.topic("GrowTopic", pb.GrowTopicRequest(name=ORDERS, partitions=3))
    assert list(grown.partitions) == [f"{ORDERS}-part-{index}" for index in range(3)]
    with pytest.raises(SavaError, match="only get more"):
        await admin.topic("GrowTopic", pb.GrowTopicRequest(name=ORDERS, partitions=1))

    await admin.subscribe()
    await admin.publish(f"{ORDERS}-part-0", "a", "b")
    await admin.publish(f"{ORDERS}-part-2", "c")
    described = await admin.describe()
    assert list(described.producers) == ["p"]
    assert not described.HasField("next_offset")
    (subscription,) = described.subscriptions
    assert (subscription.topic, subscription.backlog) == (ORDERS, 3)
    assert not subscription.HasField("cursor")
    assert (await admin.describe(f"{ORDERS}-part-0")).next_offset == 2


async def test_limits_of_a_topic_go_before_those_of_its_namespace(admin: Admin) -> None:
    await admin.create()

    async def change(*clear: str, **limits: int) -> pb.TopicDescription:
        request = pb.SetTopicPolicyRequest(name=ORDERS, policy=pb.Policy(**limits), clear=clear)
        described: pb.TopicDescription = await admin.topic("SetTopicPolicy", request)
        return described

    described = await change(max_message_size=10)
    assert described.policy.max_message_size == described.effective_policy.max_message_size == 10
    with pytest.raises(SavaError, match="10"):
        await admin.publish(ORDERS, "x" * 11)
    described = await change("max_message_size")
    assert described.effective_policy.max_message_size == 1000
    await admin.publish(ORDERS, "x" * 11)


async def test_what_does_not_exist_is_said_to_be_missing(admin: Admin) -> None:
    for method, request in (
        ("DescribeTopic", pb.DescribeTopicRequest(name=ORDERS)),
        ("DeleteTopic", pb.DeleteTopicRequest(name=ORDERS)),
        ("GrowTopic", pb.GrowTopicRequest(name=ORDERS, partitions=2)),
        ("SetTopicPolicy", pb.SetTopicPolicyRequest(name=ORDERS)),
    ):
        with pytest.raises(SavaError, match="/default/orders does not exist"):
            await admin.topic(method, request)
    with pytest.raises(SavaError, match="/namespace/topic"):
        await admin.describe("orders")


# -- subscriptions -------------------------------------------------------------------------------


async def test_a_subscription_is_created_ahead_of_its_consumers(admin: Admin) -> None:
    await admin.create()
    await admin.publish(ORDERS, "a", "b")
    created = await admin.subscribe(start=LATEST)
    assert (created.cursor, created.backlog, list(created.consumers)) == (2, 0, [])
    with pytest.raises(SavaError, match="already"):
        await admin.subscribe()

    await admin.publish(ORDERS, "c")
    topic = await admin.topics.get(TopicName.parse(ORDERS))
    consumer = await topic.subscribe(options("s"))
    assert await received(consumer, 1) == [(2, "c")]
    consumer.close()
    delete = pb.DeleteSubscriptionRequest(topic=ORDERS, subscription="s")
    await admin.subscription("DeleteSubscription", delete)
    with pytest.raises(SavaError, match="no subscription s"):
        await admin.subscription("DeleteSubscription", delete)


async def test_a_subscription_is_moved(admin: Admin) -> None:
    await admin.create()
    await admin.publish(ORDERS, "a", "b", "c")
    await admin.subscribe()

    async def seek(**position: Any) -> int:
        request = pb.SeekSubscriptionRequest(
            topic=ORDERS, subscription="s", position=pb.StartPosition(**position)
        )
        return int((await admin.subscription("SeekSubscription", request)).cursor)

    assert await seek(latest=True) == 3
    assert await seek(offset=1) == 1
    assert await seek(earliest=True) == 0
    assert await seek(publish_time=4_000_000_000_000_000) == 3
    with pytest.raises(SavaError, match="99"):
        await seek(offset=99)
    with pytest.raises(SavaError, match="position is missing"):
        await seek()


async def test_an_offset_means_nothing_over_several_partitions(admin: Admin) -> None:
    await admin.create(partitions=2)
    with pytest.raises(SavaError, match="/default/orders-part-0"):
        await admin.subscribe(start=pb.StartPosition(offset=0))
    await admin.subscribe()
    seek = pb.SeekSubscriptionRequest(topic=ORDERS, subscription="s", position=pb.StartPosition(offset=0))
    with pytest.raises(SavaError, match="name one of them"):
        await admin.subscription("SeekSubscription", seek)
    seek.topic = f"{ORDERS}-part-1"
    assert (await admin.subscription("SeekSubscription", seek)).cursor == 0


async def test_only_what_is_given_of_a_failure_policy_changes(admin: Admin) -> None:
    await admin.create(partitions=2)
    await admin.subscribe()

    async def configure(policy: pb.FailurePolicy, **more: int) -> pb.SubscriptionDescription:
        request = pb.ConfigureSubscriptionRequest(
            topic=ORDERS, subscription="s", failure_policy=policy, **more
        )
        described: pb.SubscriptionDescription = await admin.subscription("ConfigureSubscription", request)
        return described

    before = (await admin.describe()).subscriptions[0].failure_policy
    described = await configure(
        pb.FailurePolicy(dead_letter="dead_letter", ack_timeout_ms=0), max_unacked_messages=7
    )
    after = described.failure_policy
    assert (after.dead_letter, after.ack_timeout_ms, described.max_unacked_messages) == ("dead_letter", 0, 7)
    assert after.max_redelivery_count == before.max_redelivery_count
    assert after.backoff == before.backoff
    with pytest.raises(SavaError, match="shrug"):
        await configure(pb.FailurePolicy(dead_letter="shrug"))
    with pytest.raises(SavaError, match="/namespace/topic"):
        await configure(pb.FailurePolicy(dead_letter_topic="letters"))


async def test_a_subscription_that_is_blocked_says_by_which_messages(admin: Admin) -> None:
    """The manual named them all along, and nobody could ask for them."""
    await admin.create()
    await admin.subscribe()
    await admin.subscription(
        "ConfigureSubscription",
        pb.ConfigureSubscriptionRequest(
            topic=ORDERS,
            subscription="s",
            failure_policy=pb.FailurePolicy(dead_letter="block", max_redelivery_count=0),
        ),
    )
    topic = await admin.topics.get(TopicName.parse(ORDERS))
    await publish(topic, "a", "b", "c")
    consumer = await topic.subscribe(options("s"))
    await received(consumer, 3)
    consumer.ack(ranges(0))
    consumer.nack(ranges(1))
    (described,) = (await admin.describe()).subscriptions
    assert described.blocked
    assert list(described.blocked_offsets) == [1, 2]
    assert (described.acked, described.nacked, described.unacked, described.in_flight) == (1, 1, 2, 1)
    assert (described.skipped_by_filter, described.skipped_by_retention) == (0, 0)


async def test_subscriptions_of_a_topic_that_keeps_nothing_cannot_be_made_ahead(admin: Admin) -> None:
    created = await admin.create(reliable=False)
    assert created.delivery == "NonReliable"
    assert not created.HasField("next_offset")
    with pytest.raises(SavaError, match="not reliable"):
        await admin.subscribe()
    topic = await admin.topics.get(TopicName.parse(ORDERS))
    consumer = await topic.subscribe(options("s"))
    (described,) = (await admin.describe()).subscriptions
    assert list(described.consumers) == ["c"]
    assert not described.HasField("cursor")
    configure = pb.ConfigureSubscriptionRequest(topic=ORDERS, subscription="s", max_unacked_messages=3)
    with pytest.raises(SavaError, match="not reliable"):
        await admin.subscription("ConfigureSubscription", configure)
    consumer.close()
