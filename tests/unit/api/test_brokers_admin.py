"""Brokers through the admin port, in Sava's words and in Danube's; what the controller decides is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from grpc import StatusCode

from sava.cluster import records
from sava.cluster.drains import DrainStatus
from sava.cluster.rebalancer import (
    Balance,
    BrokerLoad,
    PlannedMove,
    Rebalanced,
)
from sava.cluster.records import BrokerMode, BrokerUnknown, Mode, MoveRefused
from sava.cluster.view import ClusterView
from sava.proto import brokers_pb2 as pb
from sava.proto import danube_admin_pb2 as admin
from sava.proto import danube_admin_pb2_grpc as admin_rpc
from sava.proto import topics_admin_pb2 as own
from sava.topics import specs
from sava.topics.names import TopicName
from sava.topics.ownership import WrongState
from sava.topics.specs import OwnershipState
from tests.compat.raw import refused
from tests.support.waiting import PATIENCE_S, until
from tests.unit.api.site import BrokerAt, Site, members

ORDERS = TopicName("default", "orders")
SINGLE_BROKER = (
    "Cannot unload topic: single broker cluster detected. Unload requires at least 2 brokers. "
    "Use delete if you want to remove the topic."
)
EMPTY = admin.Empty()

BALANCE = Balance(
    strategy="fair",
    coefficient_of_variation=0.5,
    threshold=0.3,
    mean_load=2.0,
    max_load=3.0,
    min_load=1.0,
    std_deviation=1.0,
    brokers=(
        BrokerLoad(broker=1, load=3.0, topics=3, is_overloaded=True, cpu_percent=12.0),
        BrokerLoad(broker=2, load=1.0, topics=1, is_underloaded=True),
    ),
    is_enabled=True,
    moves_last_hour=4,
)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


Pair = tuple[BrokerAt, BrokerAt]


@pytest.fixture
async def pair(site: Site) -> AsyncIterator[Pair]:
    """The first one leads. New topics go to the second."""
    async with site.broker(1) as one, site.broker(2) as two:
        await one.view.wait(lambda: set(one.view.brokers) == {1, 2}, timeout=PATIENCE_S)
        await two.view.wait(lambda: set(two.view.brokers) == {1, 2}, timeout=PATIENCE_S)
        one.director.place = lambda name: 2
        assigning = asyncio.create_task(one.director.assign_new())
        yield one, two
        assigning.cancel()


def danube_brokers(broker: BrokerAt) -> Any:
    return admin_rpc.BrokerAdminStub(broker.channel)


def danube_topics(broker: BrokerAt) -> Any:
    return admin_rpc.TopicAdminStub(broker.channel)


async def create(broker: BrokerAt, name: TopicName = ORDERS, partitions: int = 0) -> None:
    await broker.topics.create(name, reliable=True, partitions=partitions)
    names = [name.partition(index) for index in range(partitions)] or [name]
    await until(lambda: all(broker.view.held(each).record.incarnation for each in names))


def _has_topics(view: ClusterView, broker: int, count: int) -> bool:
    return view.counts().get(broker) == count


# -- who is there --------------------------------------------------------------------------------


async def test_all_brokers_are_listed_also_those_that_are_gone(pair: Pair, site: Site) -> None:
    """Broker 2 is being drained. Broker 3 is a member that never came, broker 4 owns a topic and is gone."""
    one = pair[0]
    mode = BrokerMode(mode=Mode.DRAINING, reason="new disk")
    await site.world.metadata.put(records.mode_key(2), specs.encode(mode))
    await create(one)
    await create(one, TopicName("default", "lost"))
    one.director.place = lambda name: 0
    await site.world.metadata.delete(specs.ownership_key(TopicName("default", "lost")))
    await site.world.step("assign", TopicName("default", "lost"), owner=4)
    for broker in pair:
        assert broker.node.core_status is not None
        broker.node.core_status.membership = members(1, 2, 3)
        await broker.view.wait(partial(_has_topics, broker.view, 4, 1), timeout=PATIENCE_S)
        listed = (await broker.brokers("ListBrokers", pb.ListBrokersRequest())).brokers
        assert [(each.broker_id, each.status, each.is_leader, each.topics) for each in listed] == [
            (1, "active", True, 0),
            (2, "draining", False, 1),
            (3, "unreachable", False, 0),
            (4, "gone", False, 1),
        ]
        assert (listed[1].mode_reason, listed[1].client_addr, listed[1].version) == (
            "new disk",
            "b2:6650",
            "1",
        )
        assert (listed[2].raft_addr, listed[2].client_addr) == ("b3:7650", "")
        infos = (await danube_brokers(broker).ListBrokers(EMPTY)).brokers
        assert [(each.broker_id, each.broker_role, each.broker_status) for each in infos] == [
            ("1", "Cluster_Leader", "active"),
            ("2", "Cluster_Follower", "draining"),
            ("3", "Cluster_Follower", "unreachable"),
            ("4", "Cluster_Follower", "gone"),
        ]
        assert (infos[1].broker_addr, infos[1].metrics_addr) == ("http://b2:6650", "http://b2:9040")
        assert (await danube_brokers(broker).GetLeaderBroker(EMPTY)).leader == "1"


async def test_what_no_majority_confirms_is_unknown(pair: Pair) -> None:
    """The view still has both brokers as active and the first one as leader. No majority confirms it."""
    for broker in pair:
        assert broker.node.core_status is not None
        broker.node.core_status.membership = members(1, 2)
        broker.node.barrier.failure = "no majority confirmed the read within 1.5 s"
        answer = await broker.brokers("ListBrokers", pb.ListBrokersRequest())
        assert answer.unconfirmed == broker.node.barrier.failure
        assert [(each.status, each.is_leader) for each in answer.brokers] == [("unknown", False)] * 2
        infos = (await danube_brokers(broker).ListBrokers(EMPTY)).brokers
        assert {(each.broker_role, each.broker_status) for each in infos} == {("None", "unknown")}
        local = await broker.brokers("ListBrokers", pb.ListBrokersRequest(local=True))
        assert [each.status for each in local.brokers] == ["active", "active"]


async def test_a_broker_that_was_given_up_does_not_stand_beside_its_successor(pair: Pair) -> None:
    """Broker 2 is still registered, and no member any more: its registration is older than the decision."""
    one = pair[0]
    assert one.node.core_status is not None
    one.node.core_status.membership = members(1)
    listed = (await one.brokers("ListBrokers", pb.ListBrokersRequest())).brokers
    assert [(each.broker_id, each.status) for each in listed] == [(1, "active")]
    await create(one)
    await one.view.wait(partial(_has_topics, one.view, 2, 1), timeout=PATIENCE_S)
    listed = (await one.brokers("ListBrokers", pb.ListBrokersRequest())).brokers
    assert [(each.broker_id, each.status) for each in listed] == [(1, "active"), (2, "gone")]


async def test_a_broker_that_was_asked_to_stop_is_leaving_whatever_its_mode(pair: Pair, site: Site) -> None:
    """Broker 2 is drained, and then asked to stop, which it says in its registration. That is true only while
    a majority confirms it, and while the broker is a member."""
    one, two = pair
    mode = BrokerMode(mode=Mode.DRAINED)
    await site.world.metadata.put(records.mode_key(2), specs.encode(mode))
    leaving = msgspec.structs.replace(two.view.brokers[2], is_leaving=True)
    await site.world.metadata.put(records.registration_key(2), specs.encode(leaving))
    await one.view.wait(lambda: one.view.brokers[2].is_leaving, timeout=PATIENCE_S)
    assert one.node.core_status is not None
    one.node.core_status.membership = members(1, 2)

    async def status() -> list[str]:
        answer = await one.brokers("ListBrokers", pb.ListBrokersRequest())
        return [each.status for each in answer.brokers]

    assert await status() == ["active", "leaving"]
    one.node.barrier.failure = "no majority confirmed the read within 1.5 s"
    assert await status() == ["unknown", "unknown"]
    one.node.barrier.failure = ""
    await create(one)
    await one.view.wait(partial(_has_topics, one.view, 2, 1), timeout=PATIENCE_S)
    one.node.core_status.membership = members(1)
    assert await status() == ["active", "gone"]


async def test_topics_of_a_broker_as_danube_lists_them(pair: Pair) -> None:
    one = pair[0]
    await create(one)
    await create(one, TopicName("default", "spread"), partitions=2)
    names = ["/default/orders", "/default/spread-part-0", "/default/spread-part-1"]
    for broker in pair:
        await broker.view.wait(partial(_has_topics, broker.view, 2, 3), timeout=PATIENCE_S)
        topics = danube_topics(broker)
        found = (await topics.ListBrokerTopics(admin.BrokerRequest(broker_id="2"))).topics
        assert [each.name for each in found] == names
        assert {each.broker_id for each in found} == {"2"}
        assert not (await topics.ListBrokerTopics(admin.BrokerRequest(broker_id="1"))).topics
        listed = (await topics.ListNamespaceTopics(admin.NamespaceRequest(name="default"))).topics
        assert {each.name: each.broker_id for each in listed} == dict.fromkeys(names, "2")
        described = await topics.DescribeTopic(admin.DescribeTopicRequest(name="/default/spread"))
        assert (described.broker_id, described.delivery) == ("2", "Reliable")
    bad = danube_topics(one).ListBrokerTopics(admin.BrokerRequest(broker_id="two"))
    assert (await refused(bad))[0] is StatusCode.INVALID_ARGUMENT


async def test_subscription_settings_of_a_partitioned_topic_as_danube_has_them(pair: Pair) -> None:
    one, two = pair
    await create(one, partitions=2)
    await one.director.move(ORDERS.partition(0), target=1, reason="test", timeout_ms=5000)
    names = {"topic": str(ORDERS), "subscription": "s"}
    topics = danube_topics(two)
    dispatch = admin.SetSubscriptionDispatchConfigRequest(
        **names, dispatch_config=admin.SubscriptionDispatchConfig(max_unacked_messages=17)
    )
    asked = topics.GetSubscriptionDispatchConfig(admin.GetSubscriptionDispatchConfigRequest(**names))
    assert (await refused(asked))[0] is StatusCode.NOT_FOUND
    await one.subscription(
        "CreateSubscription",
        own.CreateSubscriptionRequest(
            topic=str(ORDERS), subscription="s", type="shared", start=own.StartPosition(earliest=True)
        ),
    )
    await topics.SetSubscriptionDispatchConfig(dispatch)
    for broker, index in ((one, 0), (two, 1)):
        topic = await broker.topics.get(ORDERS.partition(index))
        assert topic.subscriptions["s"].spec.max_unacked_messages == 17  # type: ignore[union-attr]
    got = await topics.GetSubscriptionDispatchConfig(admin.GetSubscriptionDispatchConfigRequest(**names))
    assert got.dispatch_config.max_unacked_messages == 17
    assert list((await topics.ListSubscriptions(admin.TopicRequest(name=str(ORDERS)))).subscriptions) == ["s"]
    await topics.Unsubscribe(admin.SubscriptionRequest(**names))
    assert not (await topics.ListSubscriptions(admin.TopicRequest(name=str(ORDERS)))).subscriptions


# -- draining ------------------------------------------------------------------------------------

STEPS = [
    DrainStatus(total=3, succeeded=0, failed=0, pending=3),
    DrainStatus(total=3, succeeded=2, failed=0, pending=1),
    DrainStatus(
        total=3, succeeded=2, failed=1, pending=0, failed_topics=(ORDERS,), mode=Mode.DRAINING, is_done=True
    ),
]


async def test_a_drain_tells_how_it_goes_on(pair: Pair) -> None:
    one, two = pair
    one.director.statuses = STEPS
    request = pb.DrainBrokerRequest(
        broker_id=2, parallel=3, timeout_seconds=60, namespaces_exclude=["system"]
    )
    told = [progress async for progress in two.client.brokers.DrainBroker(request, timeout=PATIENCE_S)]
    assert [(each.succeeded, each.pending, each.done) for each in told] == [
        (0, 3, False),
        (2, 1, False),
        (2, 0, True),
    ]
    assert (list(told[-1].failed_topics), told[-1].status) == (["/default/orders"], "draining")
    ((broker, mode),) = one.director.drained
    assert (broker, mode.mode, mode.parallel, mode.timeout_ms) == (2, Mode.DRAINING, 3, 60_000)
    assert (mode.include, mode.exclude) == ((), ("system",))


async def test_danubes_unload_broker_has_real_counts(pair: Pair) -> None:
    one, two = pair
    one.director.statuses = STEPS
    unload = danube_brokers(two).UnloadBroker
    done = await unload(admin.UnloadBrokerRequest(broker_id="2", max_parallel=2, timeout_seconds=30))
    assert (done.started, done.total, done.succeeded, done.failed, done.pending) == (True, 3, 2, 1, 0)
    assert list(done.failed_topics) == ["/default/orders"]
    ((_, mode),) = one.director.drained
    assert (mode.parallel, mode.timeout_ms) == (2, 30_000)

    await create(one)
    planned = await unload(admin.UnloadBrokerRequest(broker_id="2", dry_run=True))
    assert (planned.started, planned.total, planned.pending) == (False, 1, 1)
    assert len(one.director.drained) == 1, "a dry run begins nothing"
    bad = unload(admin.UnloadBrokerRequest(broker_id="2", namespaces_include=["a/b"]))
    assert (await refused(bad))[0] is StatusCode.INVALID_ARGUMENT


async def test_a_caller_with_little_time_learns_how_far_the_drain_is(pair: Pair) -> None:
    one = pair[0]

    async def slow(broker: int, mode: BrokerMode) -> AsyncIterator[DrainStatus]:
        yield STEPS[1]
        await asyncio.Event().wait()

    one.director.drain = slow  # type: ignore[method-assign]
    done = await danube_brokers(one).UnloadBroker(admin.UnloadBrokerRequest(broker_id="2"), timeout=0.5)
    assert (done.started, done.succeeded, done.pending) == (True, 2, 1)


async def test_a_broker_is_activated(pair: Pair) -> None:
    one, two = pair
    response = await two.brokers("ActivateBroker", pb.ActivateBrokerRequest(broker_id=2, reason="disk is in"))
    assert not response.was_active
    assert (await danube_brokers(two).ActivateBroker(admin.ActivateBrokerRequest(broker_id="1"))).success
    assert one.director.activated == [(2, "disk is in"), (1, "")]

    async def unknown(broker: int, reason: str) -> bool:
        raise BrokerUnknown(broker)

    one.director.activate = unknown  # type: ignore[method-assign]
    call = danube_brokers(two).ActivateBroker(admin.ActivateBrokerRequest(broker_id="9"))
    code, text = await refused(call)
    assert (code, "broker 9" in text) == (StatusCode.NOT_FOUND, True)


# -- balance -------------------------------------------------------------------------------------


async def test_the_leader_tells_how_loads_are_spread(pair: Pair) -> None:
    one, two = pair
    one.director.balanced = BALANCE
    balance = await two.brokers("GetBalance", pb.GetBalanceRequest())
    assert (balance.strategy, balance.coefficient_of_variation, balance.threshold) == ("fair", 0.5, 0.3)
    assert (balance.moves_last_hour, balance.rebalancing_enabled) == (4, True)
    assert [(each.broker_id, each.load, each.overloaded) for each in balance.brokers] == [
        (1, 3.0, True),
        (2, 1.0, False),
    ]
    theirs = await danube_brokers(two).GetClusterBalance(admin.ClusterBalanceRequest())
    assert (theirs.broker_count, theirs.mean_load, theirs.assignment_strategy) == (2, 2.0, "fair")
    assert [(each.broker_id, each.is_underloaded) for each in theirs.brokers] == [(1, False), (2, True)]


async def test_a_round_of_rebalancing_is_asked_for(pair: Pair) -> None:
    one, two = pair
    moved = PlannedMove(ORDERS, 1, 2, 1.0)
    failed = PlannedMove(TopicName("default", "b"), 1, 2, 0.5, error="its owner is stuck")
    one.director.rebalanced = Rebalanced((moved,), BALANCE, BALANCE)
    response = await two.brokers("Rebalance", pb.RebalanceRequest(max_moves=3))
    assert [(each.topic, each.from_broker_id, each.to_broker_id) for each in response.moves] == [
        ("/default/orders", 1, 2)
    ]
    assert response.after.max_load == 3.0
    planned = await danube_brokers(two).TriggerRebalance(admin.RebalanceRequest(dry_run=True))
    assert (planned.success, planned.moves_executed, len(planned.proposed_moves)) == (True, 0, 1)
    assert planned.error_message == "1 topics would move"
    one.director.rebalanced = Rebalanced((), BALANCE, BALANCE)
    nothing = await danube_brokers(two).TriggerRebalance(admin.RebalanceRequest(dry_run=True))
    assert "no topic may move" in nothing.error_message
    one.director.rebalanced = Rebalanced((moved, failed), BALANCE, BALANCE)
    done = await danube_brokers(two).TriggerRebalance(admin.RebalanceRequest(max_moves=2))
    assert (done.success, done.moves_executed) == (False, 1)
    assert "its owner is stuck" in done.error_message
    assert one.director.asked == [(False, 3), (True, 0), (True, 0), (True, 2), (False, 2)]


# -- unloading in Danube's words -------------------------------------------------------------------


async def test_danubes_unload_topic(pair: Pair) -> None:
    one, two = pair
    await create(one)
    assert (await danube_topics(two).UnloadTopic(admin.TopicRequest(name=str(ORDERS)))).success
    assert one.view.held(ORDERS).record.owner == 1
    assert one.view.held(ORDERS).record.state is OwnershipState.ASSIGNED


async def test_why_danubes_unload_topic_fails(pair: Pair) -> None:
    one, two = pair
    await create(one)
    unload = danube_topics(two).UnloadTopic
    missing = await refused(unload(admin.TopicRequest(name="/default/nothing")))
    assert missing[0] is StatusCode.NOT_FOUND
    one.director.refusals[ORDERS] = MoveRefused(SINGLE_BROKER)
    assert await refused(unload(admin.TopicRequest(name=str(ORDERS)))) == (
        StatusCode.FAILED_PRECONDITION,
        SINGLE_BROKER,
    )
    one.director.refusals[ORDERS] = WrongState(ORDERS, "move", OwnershipState.MOVING)
    assert (await refused(unload(admin.TopicRequest(name=str(ORDERS)))))[0] is StatusCode.UNAVAILABLE
    one.director.refusals.clear()
    one.director.taken_back[ORDERS] = "uploading failed: the object store is full"
    code, text = await refused(unload(admin.TopicRequest(name=str(ORDERS))))
    assert (code, "the object store is full" in text) == (StatusCode.INTERNAL, True)
