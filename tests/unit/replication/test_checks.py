"""In what a remote differs from what a policy needs, and what keeps the policy from being accepted."""

from __future__ import annotations

from typing import Any

import pytest

from sava.replication.matrix import Mismatch
from sava.replication.policies import Scope
from sava.replication.records import PolicyRecord, RemoteDenied, RemoteUnreachable
from sava.replication.remotes import ClusterIdentity
from sava.schemas.types import TopicSchema
from sava.topics import specs
from sava.topics.names import TopicName
from sava.topics.rules import TopicSchemas
from tests.unit.replication.world import NORTH, ORDERS, World, world

TO_WEST = PolicyRecord(remotes=("west",))


async def differ(
    made: World, scope: str = "default", policy: PolicyRecord = TO_WEST, **more: Any
) -> list[tuple[str, str, bool]]:
    """What differs in which topic, and whether that keeps the policy from being set, which it does or not."""
    compared = await made.control.set(Scope.parse(scope), policy, **more)
    found = [each for differences in compared.differences.values() for each in differences]
    assert compared.is_set == (not any(each.blocks for each in found))
    held = await made.control.policies.get(Scope.parse(scope))
    assert (held is not None) == compared.is_set
    return [(each.topic, each.what, each.blocks) for each in found]


async def test_a_remote_that_has_the_same_has_no_differences() -> None:
    async with world() as made:
        remote = await made.add_remote()
        await made.create(partitions=2)
        remote.has(str(ORDERS), 2)
        assert await differ(made) == []


@pytest.mark.parametrize("may_create", [True, False])
async def test_a_missing_topic_is_told_and_does_not_keep_a_policy_from_being_set(may_create: bool) -> None:
    async with world(may_create=may_create) as made:
        await made.add_remote()
        await made.create(partitions=2)
        compared = await made.control.set(Scope.parse("default"), TO_WEST)
        (found,) = compared.differences["west"]
        assert (found.what, found.local, found.remote) == ("missing", "2 partitions", "none")
        assert compared.is_set
        assert ("will be created" in found.consequence) == may_create
        assert ("sava topics create" in found.consequence) != may_create


@pytest.mark.parametrize(
    ("partitions", "mismatch", "blocks"),
    [
        (1, Mismatch.PIP370, True),
        (4, Mismatch.PIP370, False),
        (0, Mismatch.PIP370, True),
        (1, Mismatch.STRICT, True),
        (4, Mismatch.STRICT, True),
    ],
)
async def test_other_partitions_block_if_messages_would_not_be_copied(
    partitions: int, mismatch: Mismatch, blocks: bool
) -> None:
    async with world(mismatch=mismatch) as made:
        remote = await made.add_remote()
        await made.create(partitions=2)
        remote.has(str(ORDERS), partitions)
        assert await differ(made) == [(str(ORDERS), "partitions", blocks)]


async def test_a_namespace_that_is_not_there_blocks_also_without_topics() -> None:
    async with world() as made:
        await made.add_remote()
        assert await differ(made, "shop") == [("shop", "namespace", True)]
        await made.create(TopicName("shop", "sales"))
        assert await differ(made, "/shop/sales") == [("shop", "namespace", True)]


async def test_a_topic_of_another_kind_blocks() -> None:
    async with world() as made:
        remote = await made.add_remote()
        await made.create()
        remote.has(str(ORDERS), 0, reliable=False)
        assert await differ(made) == [(str(ORDERS), "kind", True)]


@pytest.mark.parametrize(("here", "there", "blocks"), [("a", "b", True), ("a", "", False), ("", "b", False)])
async def test_other_schema_subjects_are_told(here: str, there: str, blocks: bool) -> None:
    async with world() as made:
        remote = await made.add_remote()
        await made.create()
        remote.has(str(ORDERS), 0)
        remote.subjects[str(ORDERS)] = there
        if here:
            await TopicSchemas(made.store).set(ORDERS, TopicSchema(subject=here))
        assert await differ(made) == [(str(ORDERS), "schema", blocks)]


@pytest.mark.parametrize(
    ("trouble", "what"), [(RemoteUnreachable("refused"), "unreachable"), (RemoteDenied("no"), "permission")]
)
async def test_a_remote_that_does_not_answer_blocks_unless_checks_are_skipped(
    trouble: Exception, what: str
) -> None:
    async with world() as made:
        remote = await made.add_remote()
        remote.trouble = trouble
        assert await differ(made) == [("", what, True)]
        assert await differ(made, skip_checks=True) == []


async def test_a_cluster_founded_anew_in_the_place_of_a_remote_is_noticed() -> None:
    async with world() as made:
        remote = await made.add_remote()
        remote.identity = ClusterIdentity("west", "founded-anew")
        assert await differ(made) == [("", "cluster", True)]
        tested = await made.control.test_remote("west")
        assert [each.what for each in tested.differences] == ["cluster"]


async def test_a_dry_run_sets_nothing_even_if_nothing_differs() -> None:
    async with world() as made:
        await made.add_remote()
        for skip_checks in (False, True):
            compared = await made.control.set(
                Scope.parse("default"), TO_WEST, dry_run=True, skip_checks=skip_checks
            )
            assert (compared.differences, compared.is_set) == ({"west": []}, False)
        assert await made.control.policies.get(Scope.parse("default")) is None
        assert made.pipeline_names() == []


async def test_a_namespace_is_compared_without_topics_that_have_their_own_policy() -> None:
    async with world() as made:
        remote = await made.add_remote()
        await made.create(partitions=2)
        await made.replicate("/default/orders", remotes=())
        remote.has(str(ORDERS), 0)
        assert await differ(made) == []


async def test_every_remote_of_a_policy_is_compared() -> None:
    async with world() as made:
        west, north = await made.add_remote(), await made.add_remote("north", NORTH)
        await made.create(partitions=2)
        west.has(str(ORDERS), 2)
        north.has(str(ORDERS), 0)
        compared = await made.control.set(Scope.parse("default"), PolicyRecord(remotes=("west", "north")))
        assert {remote: len(found) for remote, found in compared.differences.items()} == {
            "west": 0,
            "north": 1,
        }
        assert not compared.is_set


async def test_testing_a_remote_compares_what_policies_want_of_it() -> None:
    async with world() as made:
        remote = await made.add_remote()
        await made.create(partitions=2)
        await made.create(TopicName("default", "unrelated"))
        await made.replicate("/default/orders")
        remote.has(str(ORDERS), 1)
        tested = await made.control.test_remote("west")
        assert tested.identity == remote.identity
        assert [(each.topic, each.what) for each in tested.differences] == [(str(ORDERS), "partitions")]
        remote.trouble = RemoteUnreachable("refused")
        tested = await made.control.test_remote("west")
        assert (tested.identity, tested.error) == (None, "refused")


@pytest.mark.parametrize("other", [None, (8,)], ids=["gone", "another"])
async def test_a_topic_that_was_deleted_there_blocks_until_somebody_asks_for_it(
    other: tuple[int, ...] | None,
) -> None:
    """Also while no policy asks for it: the next one would not copy it."""
    async with world() as made:
        remote = await made.add_remote()
        await made.create()
        await made.replicate()
        remote.has(str(ORDERS), 0, topic_ids=(7,))
        await made.report(remote_topic_ids=(7,))
        assert (await made.control.test_remote("west")).differences == []
        del remote.topics[str(ORDERS)]
        if other is not None:
            remote.has(str(ORDERS), 0, topic_ids=other)
        for is_noticed in (False, True):
            await made.report(remote_topic_ids=(7,), is_tombstone=is_noticed)
            (found,) = (await made.control.test_remote("west")).differences
            assert (found.what, found.local, found.blocks) == ("deleted", "no partitions", True)
            assert found.remote == ("another topic" if other else "none")
            assert "sava replication recreate" in found.consequence
        await made.control.clear(Scope.parse("default"))
        assert await differ(made) == [(str(ORDERS), "deleted", True)]
        await made.control.recreate(ORDERS, "west")
        assert await differ(made) == ([] if other else [(str(ORDERS), "missing", False)])


async def test_partitions_that_were_added_here_are_added_there_and_block_nothing() -> None:
    async with world() as made:
        remote = await made.add_remote()
        await made.create(partitions=2)
        remote.has(str(ORDERS), 2, topic_ids=(7, 8))
        await made.replicate()
        await made.report(remote_topic_ids=(7, 8))
        await made.grow(4)
        assert await differ(made) == [(str(ORDERS), "partitions", False)]


async def test_neither_a_policy_nor_a_check_creates_anything_but_records() -> None:
    """The admin calls of phase 2: whatever is created at a remote is created by whoever copies."""
    async with world() as made:
        remote = await made.add_remote()
        await made.create(partitions=2)
        await made.replicate()
        await made.grow(4)
        await made.links.settle()
        assert remote.topics == {}
        assert specs.namespace_of_key("/namespaces/default/replication") is None
