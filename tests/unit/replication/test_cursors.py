"""Cursors of links, as the leader makes and removes them."""

from __future__ import annotations

import pytest

from sava.metadata.errors import Unavailable
from sava.replication import control
from sava.replication.links import Extent
from sava.replication.policies import Scope
from sava.replication.records import ReplicationBusy
from sava.storage.keys import replication_slot
from sava.topics.names import TopicName
from sava.topics.specs import EARLIEST, AtOffset, AtTime, subscription_key
from tests.unit.replication.world import NORTH, ORDERS, World, world

WEST = replication_slot("west")


def kept(made: World) -> list[tuple[str, str]]:
    return sorted((str(topic), cursor) for topic, cursor in made.pins.starts)


async def test_each_partition_is_kept_for_each_remote_once_the_policy_is_set() -> None:
    async with world() as made:
        await made.add_remote()
        await made.add_remote("north", NORTH)
        await made.create(partitions=2)
        await made.create(TopicName("default", "logs"), reliable=False)
        await made.replicate(remotes=("west", "north"))
        parts = ["/default/orders-part-0", "/default/orders-part-1"]
        assert kept(made) == [
            (part, replication_slot(remote)) for part in parts for remote in ("north", "west")
        ]
        assert set(made.pins.starts.values()) == {EARLIEST}


async def test_partitions_and_topics_that_come_later_are_kept_too() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create(partitions=1)
        await made.replicate()
        await made.grow(2)
        await made.create(TopicName("default", "later"))
        assert await made.links.settle()
        names = ["/default/later", "/default/orders-part-0", "/default/orders-part-1"]
        assert kept(made) == [(name, WEST) for name in names]


async def test_it_begins_where_the_policy_starts() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate(start="latest")
        assert not made.pins.starts, "where that is, is not known before the topic is served"
        made.ends[ORDERS] = Extent(3, 70)
        assert await made.links.settle()
        assert made.pins.starts == {(ORDERS, WEST): AtOffset(70)}
        at_a_time = TopicName("shop", "at-a-time")
        await made.create(at_a_time)
        await made.replicate(str(at_a_time), start="1700000000000000")
        assert made.pins.starts[at_a_time, WEST] == AtTime(1_700_000_000_000_000)


async def test_what_was_copied_before_goes_on_wherever_that_was() -> None:
    """Replication was off for a while and is on again, at the latest: the remote is further behind."""
    async with world() as made:
        await made.add_remote()
        await made.create()
        made.ends[ORDERS] = Extent(0, 70)
        await made.replicate()
        await made.report(remote_topic_ids=(9,))
        await made.control.clear(Scope.parse("default"))
        await made.replicate(start="latest")
        assert made.pins.starts == {(ORDERS, WEST): EARLIEST}


async def test_it_goes_with_the_policy() -> None:
    async with world() as made:
        await made.add_remote()
        await made.add_remote("north", NORTH)
        await made.create()
        await made.replicate(remotes=("west", "north"))
        await made.replicate(remotes=("west",))
        assert kept(made) == [("/default/orders", WEST)]
        await made.control.clear(Scope.parse("default"))
        assert not made.pins.starts
        await made.replicate()
        assert kept(made) == [("/default/orders", WEST)]


async def test_one_that_cannot_be_removed_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is cleared and the remote removed while the topic's owner is down: whoever forgot the link
    by then would leave its cursor behind, and messages would be kept for ever."""
    monkeypatch.setattr(control, "UNPINNED_S", 0.1)
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        made.pins.trouble = Unavailable("nobody serves it")
        await made.control.clear(Scope.parse("default"))
        with pytest.raises(ReplicationBusy, match="/default/orders and perhaps others still keep messages"):
            await made.control.remove_remote("west")
        assert not await made.links.settle()
        made.pins.trouble = None
        assert await made.links.settle()
        assert not made.pins.starts
        await made.control.remove_remote("west")
        assert made.record() is None


async def test_a_slot_that_cannot_be_made_is_tried_again_under_the_policy() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        made.pins.trouble = Unavailable("nobody serves it")
        await made.replicate()
        assert made.linked() == ["/default/orders to west"]
        assert not await made.links.settle()
        made.pins.trouble = None
        assert await made.links.settle()
        assert kept(made) == [("/default/orders", WEST)]


async def test_what_is_to_be_copied_again_is_kept_until_its_runner_knows() -> None:
    """A runner that has not may still say that the remote has it."""
    async with world() as made:
        await made.add_remote()
        await made.create()
        made.ends[ORDERS] = Extent(0, 70)
        await made.replicate(start="latest")
        await made.report(remote_topic_ids=(9,), is_tombstone=True)
        back = (ORDERS, WEST, AtOffset(70))
        made.pins.trouble = Unavailable("nobody serves it")
        await made.control.recreate(ORDERS, "west")
        assert made.pins.rewound == []
        made.pins.trouble = None
        await made.links.settle()
        assert made.pins.rewound == [back]
        await made.report(generation=0)
        await made.links.settle()
        assert made.pins.rewound == [back] * 2
        await made.report(generation=1)
        await made.links.settle()
        assert made.pins.rewound == [back] * 3
        await made.links.settle()
        assert made.pins.rewound == [back] * 3


async def test_one_that_is_gone_is_made_again() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        await made.store.delete(subscription_key(ORDERS, WEST))
        made.pins.starts.clear()
        assert await made.links.settle()
        assert kept(made) == [("/default/orders", WEST)]
