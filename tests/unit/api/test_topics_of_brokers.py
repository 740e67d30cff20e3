"""Topics and subscriptions of several brokers, through the admin port of any: real topics, real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sava.api.admin import descriptions
from sava.cluster.records import MoveRefused
from sava.cluster.view import ClusterView
from sava.errors import SavaError
from sava.peers import channels
from sava.proto import topics_admin_pb2 as pb
from sava.topics.names import TopicName
from sava.topics.specs import OwnershipState
from tests.support.network import free_ports
from tests.support.topics import publish
from tests.support.waiting import PATIENCE_S, OwnTime, until
from tests.unit.api.site import BrokerAt, Site

ORDERS = TopicName("default", "orders")
PARTS = [ORDERS.partition(index) for index in range(4)]
EARLIEST = pb.StartPosition(earliest=True)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


Pair = tuple[BrokerAt, BrokerAt]


@pytest.fixture
async def pair(site: Site) -> AsyncIterator[Pair]:
    """Partitions go to 1, 2, 1, 2, …, and plain topics to 2."""

    def place(name: TopicName) -> int:
        part = name.partition_of
        return 2 if part is None else part[1] % 2 + 1

    async with site.broker(1) as one, site.broker(2) as two:
        await one.view.wait(lambda: set(one.view.brokers) == {1, 2}, timeout=PATIENCE_S)
        one.director.place = place
        assigning = asyncio.create_task(one.director.assign_new())
        yield one, two
        assigning.cancel()


async def create(broker: BrokerAt, name: TopicName = ORDERS, **more: Any) -> pb.TopicDescription:
    request = pb.CreateTopicRequest(name=str(name), **{"reliable": True, **more})
    created: pb.TopicDescription = await broker.topic("CreateTopic", request)
    return created


async def describe(broker: BrokerAt, name: TopicName = ORDERS) -> pb.TopicDescription:
    described: pb.TopicDescription = await broker.topic(
        "DescribeTopic", pb.DescribeTopicRequest(name=str(name))
    )
    return described


async def subscribe(broker: BrokerAt, name: TopicName = ORDERS) -> pb.SubscriptionDescription:
    request = pb.CreateSubscriptionRequest(
        topic=str(name), subscription="s", type="shared", start=pb.StartPosition(latest=True)
    )
    created: pb.SubscriptionDescription = await broker.subscription("CreateSubscription", request)
    return created


async def unload(broker: BrokerAt, name: TopicName = ORDERS, target: int = 0) -> dict[str, pb.TopicMove]:
    request = pb.UnloadTopicRequest(name=str(name), to_broker_id=target)
    return {move.topic: move async for move in broker.client.topics.UnloadTopic(request, timeout=PATIENCE_S)}


async def fill(pair: Pair) -> None:
    """Ten messages in each partition."""
    for index, name in enumerate(PARTS):
        await publish(await pair[index % 2].topics.get(name), *map(str, range(10)))


def _has_epoch(view: ClusterView, name: TopicName, epoch: int) -> bool:
    return view.held(name).record.epoch == epoch


# -- describing ----------------------------------------------------------------------------------


async def test_a_topic_is_described_by_the_broker_that_has_it(pair: Pair) -> None:
    one, two = pair
    created = await create(one)
    assert (created.broker_id, created.state) == (2, "open")
    await publish(await two.topics.get(ORDERS), "a", "b")
    for broker in pair:
        described = await describe(broker)
        assert (described.broker_id, described.next_offset) == (2, 2)
        assert list(described.producers) == ["p"]
    policy = pb.SetTopicPolicyRequest(name=str(ORDERS), policy=pb.Policy(max_message_size=7))
    changed = await one.topic("SetTopicPolicy", policy)
    assert (changed.next_offset, changed.effective_policy.max_message_size) == (2, 7)
    assert one.forwarder.forwards["admin"] == 3, "each call through broker 1 asked broker 2 once"


async def test_a_partitioned_topic_is_put_together_from_all_brokers(pair: Pair) -> None:
    one, two = pair
    created = await create(one, partitions=4)
    assert (created.broker_id, created.state) == (0, "open")
    await fill(pair)
    for broker in pair:
        described = await describe(broker)
        assert list(described.partitions) == list(map(str, PARTS))
        assert list(described.producers) == ["p"]
    ends = [(await describe(two, name)).next_offset for name in PARTS]
    assert ends == [10] * 4


async def test_topics_are_listed_with_who_has_them(pair: Pair) -> None:
    one, two = pair
    await create(one, partitions=2)
    await create(one, TopicName("default", "plain"))
    plain = TopicName("default", "plain")
    epoch = two.topics.loaded[plain].epoch
    for broker in pair:
        await broker.view.wait(partial(_has_epoch, broker.view, plain, epoch), timeout=PATIENCE_S)
        listed = (await broker.topic("ListTopics", pb.ListTopicsRequest())).topics
        found = {topic.name: (topic.broker_id, topic.state) for topic in listed}
        assert found == {
            "/default/orders": (0, "assigned"),
            "/default/orders-part-0": (1, "assigned"),
            "/default/orders-part-1": (2, "assigned"),
            "/default/plain": (2, "assigned"),
        }
        epochs = {topic.name: topic.epoch for topic in listed if topic.HasField("epoch")}
        assert epochs["/default/plain"] == epoch
        assert "/default/orders" not in epochs


# -- nobody serves it ----------------------------------------------------------------------------


async def test_a_topic_whose_owner_is_gone_is_described_by_what_is_known(pair: Pair, site: Site) -> None:
    """Broker 2 had two messages, of which no segment is written yet, and is gone. Whoever asks learns where
    it was, under which epoch, and how far the store knows it; not an end, which only broker 2 knows."""
    one, two = pair
    await create(one)
    await publish(await two.topics.get(ORDERS), "a", "b")
    await subscribe(one)
    await create(one, TopicName("default", "spread"), partitions=2)
    epoch = two.topics.loaded[ORDERS].epoch
    two.life.incarnation = 0
    await site.unregister(2)
    await site.world.step("orphan", ORDERS)
    await site.world.step("orphan", TopicName("default", "spread").partition(1))
    await one.view.wait(
        lambda: one.view.held(ORDERS).record.state is OwnershipState.ORPHAN, timeout=PATIENCE_S
    )

    own = OwnTime()
    described = await describe(one)
    assert (described.state, described.broker_id, described.epoch) == ("orphan", 2, epoch)
    assert "broker 2 is gone" in described.reason
    assert (described.start_offset, described.stored_offset) == (0, 0)
    assert not described.HasField("next_offset")
    (subscription,) = described.subscriptions
    assert (subscription.subscription, subscription.type, subscription.cursor) == ("s", "shared", 2)
    whole = await describe(one, TopicName("default", "spread"))
    assert whole.state == "open, orphan"
    assert own.seconds < 3.0, "it is not waited for"


async def test_a_topic_whose_owner_does_not_answer_is_described_by_what_is_known(
    pair: Pair, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broker 2 has just died: it is registered still, and nothing listens where it was."""
    monkeypatch.setattr(descriptions, "DESCRIBE_S", 0.3)
    monkeypatch.setattr(channels, "CONNECT_S", 0.3)
    one = pair[0]
    await create(one)
    await create(one, TopicName("default", "spread"), partitions=2)
    (port,) = free_ports(1)
    await site.register(2, admin=f"127.0.0.1:{port}", incarnation=77)
    await one.view.wait(lambda: one.view.brokers[2].incarnation == 77, timeout=PATIENCE_S)
    described = await describe(one)
    assert (described.state, described.broker_id) == ("assigned", 2)
    assert described.reason.startswith("broker 2 does not answer")
    whole = await describe(one, TopicName("default", "spread"))
    assert (whole.state, len(whole.partitions)) == ("assigned, open", 2)
    with pytest.raises(SavaError, match="cannot be reached"):
        await subscribe(one)


async def test_a_topic_that_no_broker_takes_is_unassigned(pair: Pair) -> None:
    one, _ = pair
    one.director.place = lambda name: 0
    creating = asyncio.create_task(create(one))
    await until(lambda: one.view.entry(ORDERS) is not None)
    described = await describe(one)
    assert (described.state, described.broker_id) == ("unassigned", 0)
    assert described.reason == "no broker has taken it yet"
    one.director.place = lambda name: 1
    assert (await creating).state == "open", "creating waits for an owner"


# -- changing ------------------------------------------------------------------------------------


async def test_a_subscription_is_changed_in_all_partitions(pair: Pair) -> None:
    one, two = pair
    await create(one, partitions=4)
    await fill(pair)
    created = await subscribe(two)
    assert (created.topic, created.backlog, list(created.consumers)) == (str(ORDERS), 0, [])
    assert not created.HasField("cursor")
    with pytest.raises(SavaError, match="already"):
        await subscribe(one)

    names: dict[str, Any] = {"topic": str(ORDERS), "subscription": "s"}
    seek = pb.SeekSubscriptionRequest(**names, position=EARLIEST)
    assert (await one.subscription("SeekSubscription", seek)).backlog == 40
    to_offset = pb.SeekSubscriptionRequest(**names, position=pb.StartPosition(offset=3))
    with pytest.raises(SavaError, match="offsets of its own"):
        await one.subscription("SeekSubscription", to_offset)
    configure = pb.ConfigureSubscriptionRequest(**names, max_unacked_messages=7)
    assert (await two.subscription("ConfigureSubscription", configure)).max_unacked_messages == 7
    for index, name in enumerate(PARTS):
        topic = await pair[index % 2].topics.get(name)
        assert topic.subscriptions["s"].backlog == 10  # type: ignore[union-attr]
    found = await two.subscription("DescribeSubscription", pb.DescribeSubscriptionRequest(**names))
    assert (found.backlog, found.max_unacked_messages) == (40, 7)

    delete = pb.DeleteSubscriptionRequest(**names)
    await one.subscription("DeleteSubscription", delete)
    with pytest.raises(SavaError, match="no subscription s"):
        await two.subscription("DeleteSubscription", delete)


async def test_a_subscription_that_some_partitions_lack_is_created_there(pair: Pair) -> None:
    one, two = pair
    await create(one, partitions=2)
    await subscribe(one)
    await one.topic("GrowTopic", pb.GrowTopicRequest(name=str(ORDERS), partitions=4))
    await fill(pair)
    created = await subscribe(one)
    assert created.backlog == 20, "those that had it stay where they were"
    assert "s" in (await two.topics.get(PARTS[3])).subscriptions


async def test_a_subscription_of_another_brokers_topic(pair: Pair) -> None:
    one, two = pair
    await create(one)
    await publish(await two.topics.get(ORDERS), "a", "b")
    assert (await subscribe(one)).cursor == 2
    seek = pb.SeekSubscriptionRequest(
        topic=str(ORDERS), subscription="s", position=pb.StartPosition(offset=1)
    )
    assert (await one.subscription("SeekSubscription", seek)).cursor == 1
    unknown = pb.DeleteSubscriptionRequest(topic=str(ORDERS), subscription="t")
    with pytest.raises(SavaError, match="no subscription t"):
        await one.subscription("DeleteSubscription", unknown)


async def test_topics_are_deleted_from_any_broker(pair: Pair) -> None:
    one, two = pair
    await create(one)
    await publish(await two.topics.get(ORDERS), "a")
    await one.topic("DeleteTopic", pb.DeleteTopicRequest(name=str(ORDERS)))
    assert ORDERS not in two.topics.loaded
    with pytest.raises(SavaError, match="does not exist"):
        await describe(two)
    again = await create(two, partitions=2)
    await two.topic("DeleteTopic", pb.DeleteTopicRequest(name=str(ORDERS)))
    assert again.topic_id > 1
    assert not one.topics.loaded


# -- moving --------------------------------------------------------------------------------------


async def test_a_topic_is_unloaded_through_any_broker(pair: Pair) -> None:
    """The move is the leader's (broker 1); the answer has what the new owner says."""
    one, two = pair
    await create(one)
    await publish(await two.topics.get(ORDERS), "a", "b")
    moves = await unload(two)
    move = moves[str(ORDERS)]
    assert (move.from_broker_id, move.to_broker_id, move.next_offset, move.error) == (2, 1, 2, "")
    assert move.epoch == one.topics.loaded[ORDERS].epoch
    assert two.forwarder.forwards["leader"] == 1
    assert (await describe(two)).broker_id == 1
    await publish(await one.topics.get(ORDERS), "c")
    assert (await describe(two)).next_offset == 3


async def test_all_partitions_are_unloaded_and_each_says_how_it_went(pair: Pair) -> None:
    one, two = pair
    await create(one, partitions=4)
    await fill(pair)
    one.director.refusals[PARTS[1]] = MoveRefused("it is nailed down")
    one.director.taken_back[PARTS[3]] = "the object store is full"
    moves = await unload(two)
    assert set(moves) == set(map(str, PARTS))
    assert [moves[str(name)].error for name in PARTS] == [
        "",
        "it is nailed down",
        "",
        "the object store is full",
    ]
    assert [moves[str(name)].to_broker_id for name in PARTS] == [2, 2, 2, 2]
    assert moves[str(PARTS[0])].next_offset == 10
    assert set(two.topics.loaded) == set(PARTS)


async def test_a_move_that_is_refused_is_an_error(pair: Pair) -> None:
    one, two = pair
    await create(one, partitions=2)
    for name in PARTS[:2]:
        one.director.refusals[name] = MoveRefused("single broker")
    with pytest.raises(Exception, match="single broker"):
        await unload(two)
    with pytest.raises(Exception, match="does not exist"):
        await unload(two, TopicName("default", "nothing"))
    assert one.director.moved == []
