"""Which clusters can be remotes, and which policy holds for a topic."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sava.metadata.commands import TxnResult
from sava.metadata.errors import OutcomeUnknown
from sava.metadata.records import encode
from sava.replication import records
from sava.replication.links import LinkName
from sava.replication.policies import Scope
from sava.replication.records import (
    PolicyInvalid,
    PolicyRecord,
    RemoteDenied,
    RemoteInUse,
    RemoteRefused,
    RemoteUnknown,
    RemoteUnreachable,
)
from sava.replication.remotes import ClusterIdentity
from sava.topics.errors import NamespaceUnknown, TopicUnknown
from sava.topics.names import InvalidName, TopicName
from tests.unit.replication.world import EAST, NORTH, ORDERS, WEST, FakeRemote, World, given, world


async def hold(made: World, scope: str) -> tuple[tuple[str, ...], str] | None:
    held = await made.control.policies.get(Scope.parse(scope))
    return None if held is None else (held.policy.remotes, str(held.scope))


# -- remotes ---------------------------------------------------------------------------------------


async def test_a_remote_is_remembered_as_it_says_itself_who_it_is() -> None:
    async with world() as made:
        await made.add_remote()
        record = (await made.control.remotes.list())["west"]
        assert (record.service, record.cluster_name, record.cluster_id) == ("west:6650", "west", "id-west")


@pytest.mark.parametrize(
    ("identity", "why"),
    [
        (EAST, "this cluster itself"),
        (ClusterIdentity("east", "another"), "set another cluster_name"),
        (ClusterIdentity("we,st", "id"), "cannot travel with messages"),
        (ClusterIdentity("", "id"), "cannot travel with messages"),
    ],
)
async def test_clusters_that_cannot_be_told_apart_are_refused(identity: ClusterIdentity, why: str) -> None:
    async with world() as made:
        with pytest.raises(RemoteRefused, match=why):
            await made.add_remote("west", identity)
        assert not await made.control.remotes.list()


async def test_two_remotes_cannot_have_one_name_or_be_one_cluster() -> None:
    async with world() as made:
        await made.add_remote()
        with pytest.raises(RemoteRefused, match="known already, as remote west"):
            await made.add_remote("again", WEST)
        with pytest.raises(RemoteRefused, match="also that of remote west"):
            await made.add_remote("other", ClusterIdentity("west", "id-other"))


@pytest.mark.parametrize("name", ["", "a/b", "a,b", ".west", "w" * 101])
async def test_names_that_cannot_be_a_remote_s(name: str) -> None:
    async with world() as made:
        with pytest.raises(InvalidName, match="remote name"):
            await made.add_remote(name)


@pytest.mark.parametrize("trouble", [RemoteUnreachable("refused"), RemoteDenied("no token")])
async def test_a_remote_that_does_not_answer_is_not_added(trouble: Exception) -> None:
    async with world() as made:
        remote = made.calls.remotes["west:6650"] = FakeRemote(WEST)
        remote.trouble = trouble
        with pytest.raises(type(trouble), match=f"remote west was not added: {trouble}"):
            await made.control.remotes.add("west", given("west:6650"))
        assert not await made.control.remotes.list()


async def test_adding_a_remote_again_changes_its_address_not_its_cluster() -> None:
    async with world() as made:
        await made.add_remote()
        made.calls.remotes["west-2:6650"] = FakeRemote(WEST)
        await made.control.remotes.add("west", given("west-2:6650", token_file="west.token"))
        record = await made.control.remotes.get("west")
        assert (record.service, record.token_file) == ("west-2:6650", "west.token")

        made.calls.remotes["new:6650"] = FakeRemote(ClusterIdentity("west", "founded-anew"))
        with pytest.raises(RemoteRefused, match="sava remotes remove west"):
            await made.control.remotes.add("west", given("new:6650"))
        assert (await made.control.remotes.get("west")).cluster_id == "id-west"


async def test_a_remote_that_a_policy_names_is_not_removed() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate("/default/orders")
        await made.replicate("shop")
        with pytest.raises(RemoteInUse, match="shop, /default/orders"):
            await made.control.remove_remote("west")
        await made.control.clear(Scope.parse("shop"))
        await made.control.clear(Scope.parse("/default/orders"))
        assert made.record() is not None  # what is remembered outlives the policy, not the remote
        await made.control.remove_remote("west")
        assert made.record() is None
        with pytest.raises(RemoteUnknown):
            await made.control.remove_remote("west")


async def test_a_policy_set_while_its_remote_is_removed_keeps_the_remote() -> None:
    """The removal looks at the policies, finds none, and deletes the remote; a policy was committed between
    the two. The second look finds it."""
    async with world() as made:
        await made.add_remote()
        looks = 0

        def in_use() -> list[str]:
            nonlocal looks
            looks += 1
            return [] if looks == 1 else ["shop"]

        with pytest.raises(RemoteInUse, match="shop"):
            await made.control.remotes.remove("west", in_use)
        assert (await made.control.remotes.get("west")).cluster_id == "id-west"


# -- policies --------------------------------------------------------------------------------------


async def test_the_most_specific_policy_holds_as_a_whole() -> None:
    async with world() as made:
        await made.add_remote()
        await made.add_remote("north", NORTH)
        await made.create()
        assert await hold(made, "/default/orders") is None
        await made.replicate("default", remotes=("west", "north"))
        assert await hold(made, "/default/orders") == (("west", "north"), "default")
        await made.replicate("/default/orders", remotes=("north",))
        assert await hold(made, "/default/orders") == (("north",), "/default/orders")
        assert await hold(made, "default") == (("west", "north"), "default")
        await made.control.clear(Scope.parse("/default/orders"))
        assert await hold(made, "/default/orders") == (("west", "north"), "default")


async def test_a_policy_without_remotes_switches_replication_off() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        assert made.linked() == ["/default/orders to west"]
        await made.replicate("/default/orders", remotes=())
        assert made.linked() == []
        assert await hold(made, "/default/orders") == ((), "/default/orders")


@pytest.mark.parametrize(
    ("scope", "error"),
    [
        ("nowhere", NamespaceUnknown),
        ("/default/nothing", TopicUnknown),
        ("/default/orders-part-0", PolicyInvalid),
        ("default/orders", InvalidName),
        ("/default", InvalidName),
        ("/default/fleeting", PolicyInvalid),
    ],
)
async def test_scopes_that_cannot_have_a_policy(scope: str, error: type[Exception]) -> None:
    async with world() as made:
        await made.add_remote()
        await made.create(partitions=2)
        await made.create(TopicName("default", "fleeting"), reliable=False)
        with pytest.raises(error):
            await made.replicate(scope)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"remotes": ("west", "west")}, "named twice"),
        ({"start": "yesterday"}, "microseconds since 1970"),
        ({"start": "-5"}, "microseconds since 1970"),
        ({"subscriptions": ("a/b",)}, "subscription name"),
    ],
)
async def test_policies_that_cannot_be(policy: dict[str, Any], why: str) -> None:
    async with world() as made:
        await made.add_remote()
        with pytest.raises((PolicyInvalid, InvalidName), match=why):
            await made.replicate(**policy)
        assert await hold(made, "default") is None


async def test_a_policy_cannot_name_a_remote_that_is_not_known() -> None:
    async with world() as made:
        with pytest.raises(RemoteUnknown, match="there is no remote west"):
            await made.replicate()
        with pytest.raises(RemoteUnknown):
            await made.control.set(Scope.parse("default"), PolicyRecord(remotes=("west",)))


async def test_a_policy_goes_with_its_topic_and_with_its_namespace() -> None:
    """A namespace or topic that is created again begins without a policy, and a policy does not make its
    namespace appear twice."""
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate("/default/orders")
        await made.replicate("shop")
        assert await made.namespaces.list() == ["default", "shop"]
        await made.delete()
        await made.namespaces.delete("shop")
        await made.create()
        await made.namespaces.create("shop")
        assert await hold(made, "/default/orders") is None
        assert await hold(made, "shop") is None
        assert made.store.local.get(records.namespace_policy_key("shop")) is None


async def test_a_topic_is_not_taken_for_one_whose_name_it_begins_with() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create(TopicName("default", "order"))
        await made.create(ORDERS)
        await made.replicate("/default/order")
        assert made.linked() == ["/default/order to west"]


# -- lost answers ----------------------------------------------------------------------------------


def lose_next_answer(made: World) -> None:
    """The next transaction with a condition takes effect, and its answer is lost."""
    txn = made.store.txn
    lost: list[bool] = []

    async def losing(compare: Any, then: Any, *args: Any, **options: Any) -> TxnResult:
        result = await txn(compare, then, *args, **options)
        if compare and not lost:
            lost.append(True)
            raise OutcomeUnknown("the answer was lost")
        return result

    made.store.txn = losing  # type: ignore[method-assign]


async def test_a_remote_whose_answer_is_lost_is_added_and_changed() -> None:
    """Schedule: the record is written, and the answer lost."""
    async with world() as made:
        lose_next_answer(made)
        await made.add_remote()
        assert (await made.control.remotes.get("west")).cluster_id == "id-west"


async def test_a_removal_whose_answer_is_lost_is_finished() -> None:
    """Schedule: the remote is removed and the answer lost. Asked for again, it would be unknown, and neither
    would what is remembered of its topics go nor a policy set meanwhile be found."""
    async with world() as made:
        await made.add_remote()
        lose_next_answer(made)
        looks = 0

        def in_use() -> list[str]:
            nonlocal looks
            looks += 1
            return [] if looks == 1 else ["shop"]

        with pytest.raises(RemoteInUse):
            await made.control.remotes.remove("west", in_use)
        assert (await made.control.remotes.get("west")).cluster_id == "id-west"
        lose_next_answer(made)
        await made.control.remotes.remove("west", list)
        assert not await made.control.remotes.list()


async def test_a_policy_whose_answer_is_lost_is_set_and_cleared() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        scope = Scope.parse("/default/orders")
        lose_next_answer(made)
        await made.control.policies.set(scope, PolicyRecord(remotes=("west",)))
        assert await made.control.policies.get(scope) is not None
        lose_next_answer(made)
        await made.control.policies.clear(scope)
        assert await made.control.policies.get(scope) is None


async def test_a_topic_whose_recreation_has_no_answer_is_recreated_once() -> None:
    """Schedule: the new generation is written and the answer lost, and a runner says at once what it found
    at the remote. A second generation would forget that."""
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate("/default/orders")
        name = LinkName("west", ORDERS)
        before = made.record()
        assert before is not None
        txn = made.store.txn
        lost: list[bool] = []

        async def losing(compare: Any, then: Any, *args: Any, **options: Any) -> TxnResult:
            result = await txn(compare, then, *args, **options)
            if compare and not lost:
                lost.append(True)
                record = made.record()
                assert record is not None
                said = msgspec.structs.replace(record, remote_topic_ids=(7,))
                await made.store.put(records.link_key(*name), encode(said))
                raise OutcomeUnknown("the answer was lost")
            return result

        made.store.txn = losing  # type: ignore[method-assign]
        await made.reports.recreate(name)
        after = made.record()
        assert after is not None
        assert (after.generation, after.remote_topic_ids) == (before.generation + 1, (7,))
