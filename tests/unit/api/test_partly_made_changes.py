"""A change of a partitioned topic that its partitions do not make alike: its caller learns which have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sava.errors import Outcome, SavaError
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.peers import partition_calls
from sava.peers.partition_calls import PartitionsDiffer, numbers
from sava.proto import topics_admin_pb2 as pb
from sava.topics.errors import SubscriptionMismatch
from sava.topics.names import TopicName
from sava.topics.topic import SubscribeOptions, Topic
from tests.support.waiting import PATIENCE_S
from tests.unit.api.site import BrokerAt, Site

ORDERS = TopicName("default", "orders")
PARTS = 6
CREATE = pb.CreateSubscriptionRequest(
    topic=str(ORDERS), subscription="billing", type="shared", start=pb.StartPosition(earliest=True)
)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[BrokerAt, BrokerAt]]:
    """The first broker has partitions 0, 2, 4 and the second 1, 3, 5."""
    site = Site(tmp_path)
    async with site.broker(1) as one, site.broker(2) as two:
        await one.view.wait(lambda: set(one.view.brokers) == {1, 2}, timeout=PATIENCE_S)
        one.director.place = lambda name: name.partition_of[1] % 2 + 1 if name.partition_of else 1
        assigning = asyncio.create_task(one.director.assign_new())
        await one.topic(
            "CreateTopic", pb.CreateTopicRequest(name=str(ORDERS), reliable=True, partitions=PARTS)
        )
        yield one, two
        assigning.cancel()


def fail(monkeypatch: pytest.MonkeyPatch, failures: dict[int, BaseException]) -> None:
    """Creating a subscription fails in these partitions, before anything is written."""
    create = Topic.create_subscription

    async def created(self: Topic, options: SubscribeOptions) -> None:
        part = self.name.partition_of
        if part is not None and part[1] in failures:
            raise failures[part[1]]
        await create(self, options)

    monkeypatch.setattr(Topic, "create_subscription", created)


async def refused(broker: BrokerAt) -> SavaError:
    with pytest.raises(SavaError) as failed:
        await broker.client.call(broker.client.subscriptions.CreateSubscription, CREATE)
    return failed.value


async def test_a_change_that_some_partitions_have_made_says_which(
    pair: tuple[BrokerAt, BrokerAt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partition 2 (of the asked broker) and 3 (of the other one) cannot write; the rest do, also those that
    come after the first failure. Repeated, the change is made in the two that are left."""
    one, _ = pair
    with monkeypatch.context() as broken:
        fail(broken, {2: Unavailable("no majority"), 3: Unavailable("no majority")})
        failure = await refused(one)
    assert failure.outcome is Outcome.PARTLY
    assert "partitions 0-1, 4-5" in str(failure)
    assert "not in 2-3" in str(failure)
    assert "no majority" in str(failure)
    for broker in pair:
        assert [len(topic.subscriptions) for _, topic in sorted(broker.topics.loaded.items())].count(1) == 2
    await one.client.call(one.client.subscriptions.CreateSubscription, CREATE)
    for broker in pair:
        assert [len(topic.subscriptions) for _, topic in sorted(broker.topics.loaded.items())].count(1) == 3


async def test_a_change_that_one_partition_may_have_made_is_unknown(
    pair: tuple[BrokerAt, BrokerAt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partition 1 loses the answer of the metadata store, 3 and 4 fail with an error that no rule names, 5
    cannot write."""
    one, _ = pair
    fail(
        monkeypatch,
        {
            1: OutcomeUnknown("the answer was lost"),
            3: ValueError("not foreseen"),
            4: ValueError("not foreseen"),
            5: Unavailable("no majority"),
        },
    )
    failure = await refused(one)
    assert isinstance(failure, OutcomeUnknown)
    assert "done in partitions 0, 2" in str(failure)
    assert "not in 5" in str(failure)
    assert "unknown in 1, 3-4" in str(failure)
    assert "`sava subscriptions describe /default/orders billing` shows which" in str(failure)


async def test_a_change_that_all_partitions_refuse_alike_is_refused(
    pair: tuple[BrokerAt, BrokerAt], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, {index: SubscriptionMismatch("of another type") for index in range(PARTS)})
    failure = await refused(pair[0])
    assert failure.outcome is Outcome.NOT_DONE
    assert str(failure) == "of another type"


async def test_a_partition_that_hangs_does_not_hold_the_answer_back(
    pair: tuple[BrokerAt, BrokerAt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partition 4 of the asked broker never ends its part. The change is given up with the time of all parts,
    and what became of that part is unknown."""
    one, _ = pair
    monkeypatch.setattr(partition_calls, "TIMEOUT_S", 1.0)
    create = Topic.create_subscription

    async def hang(self: Topic, options: SubscribeOptions) -> None:
        await create(self, options)
        if self.name == ORDERS.partition(4):
            await asyncio.Event().wait()

    monkeypatch.setattr(Topic, "create_subscription", hang)
    failure = await refused(one)
    assert failure.outcome is Outcome.UNKNOWN
    assert "unknown in 4" in str(failure)


def test_numbers_of_partitions_are_written_as_ranges() -> None:
    assert numbers([5, 1, 2, 3, 7, 8]) == "1-3, 5, 7-8"
    assert numbers([0]) == "0"
    error = PartitionsDiffer(ORDERS, done=[0], failed={1: Unavailable("why")}, unknown={})
    assert (error.outcome, error.done, list(error.failed)) == (Outcome.PARTLY, (0,), [1])
