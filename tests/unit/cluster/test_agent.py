"""What a broker does about its own topics, whatever it missed and wherever it was interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from sava.cluster import agent as agent_module
from sava.cluster import records
from sava.cluster.agent import NOT_SERVING, Agent, Job, decide
from sava.cluster.view import ClusterView, TopicEntry
from sava.errors import HostError
from sava.metadata.errors import Unavailable
from sava.metadata.watch import HubLimits
from sava.storage.catalog import Catalog
from sava.storage.types import TopicKey
from sava.supervisor import Supervisor
from sava.topics import specs
from sava.topics.errors import NotHandedOver
from sava.topics.names import TopicName
from sava.topics.registry import Registry
from sava.topics.served import ServedTopics
from sava.topics.specs import Ownership, OwnershipState, TopicSpec
from tests.support.waiting import PATIENCE_S, until
from tests.unit.cluster.fakes import (
    ORDERS,
    FakeTopic,
    FakeTopics,
    FaultyStore,
    Life,
    failing,
    held,
    never,
    new_store,
    register,
    step,
    write,
)

S = OwnershipState
ME, OTHER = 1, 2
LIFE = 7


# -- the table ---------------------------------------------------------------------------------


def entry(
    state: OwnershipState, owner: int, incarnation: int = LIFE, *, deleting: bool = False
) -> TopicEntry:
    record = Ownership(state=state, epoch=5, owner=owner, incarnation=incarnation)
    return TopicEntry(ORDERS, TopicSpec(topic_id=1, reliable=True, deleting=deleting), 1, record, 1)


@pytest.mark.parametrize(
    ("entry", "epoch", "job"),
    [
        (entry(S.UNASSIGNED, 0), 0, None),
        (entry(S.UNASSIGNED, 0), 4, Job.DROP),
        (entry(S.SEALED, 0), 0, None),
        (entry(S.SEALED, 0), 5, Job.DROP),
        (entry(S.ASSIGNED, OTHER), 0, None),
        (entry(S.ASSIGNED, OTHER), 4, Job.DROP),
        (entry(S.ASSIGNED, OTHER), NOT_SERVING, Job.DROP),
        (entry(S.MOVING, OTHER), 0, None),
        (entry(S.ORPHAN, OTHER), 0, None),
        (entry(S.DELETING, OTHER), 0, None),
        (entry(S.DELETING, OTHER), 4, Job.DROP),
        (entry(S.ASSIGNED, ME, 0), 0, Job.TAKE_UP),
        (entry(S.ASSIGNED, ME, 6), 0, Job.TAKE_UP),
        (entry(S.ASSIGNED, ME), 0, Job.TAKE_UP),
        (entry(S.ASSIGNED, ME), 5, None),
        (entry(S.ASSIGNED, ME), 4, Job.DROP),
        (entry(S.ASSIGNED, ME), NOT_SERVING, Job.DROP),
        (entry(S.ASSIGNED, ME, 6), 5, Job.DROP),
        (entry(S.ASSIGNED, ME, 0), 5, Job.DROP),
        (entry(S.ASSIGNED, ME, deleting=True), 0, None),
        (entry(S.ASSIGNED, ME, deleting=True), 5, None),
        (entry(S.MOVING, ME), 5, Job.HAND_OVER),
        (entry(S.MOVING, ME), 0, Job.HAND_OVER),
        (entry(S.MOVING, ME), 4, Job.DROP),
        (entry(S.MOVING, ME), NOT_SERVING, Job.DROP),
        (entry(S.MOVING, ME, 6), 0, Job.ROLL_BACK),
        (entry(S.MOVING, ME, 6), 5, Job.ROLL_BACK),
        (entry(S.MOVING, ME, 0), 0, Job.ROLL_BACK),
        (entry(S.ORPHAN, ME, 6), 0, Job.TAKE_UP),
        (entry(S.ORPHAN, ME, 6), 5, Job.DROP),
        (entry(S.ORPHAN, ME), 5, Job.DROP),
        (entry(S.ORPHAN, ME, deleting=True), 0, None),
        (entry(S.DELETING, ME), 0, Job.RELEASE),
        (entry(S.DELETING, ME), 4, Job.RELEASE),
    ],
)
def test_what_follows_from_a_record(entry: TopicEntry, epoch: int, job: Job | None) -> None:
    assert decide(entry, broker=ME, incarnation=LIFE, epoch=epoch) is job


# -- one broker --------------------------------------------------------------------------------


class AgentAlone:
    """An agent with fake topics on a store that it may share."""

    def __init__(
        self,
        store: FaultyStore,
        broker: int = ME,
        incarnation: int = LIFE,
        ends: dict[TopicName, int] | None = None,
    ) -> None:
        self.store = store
        self.life = Life(incarnation)
        self.topics = FakeTopics(store, broker, self.life, ends)
        self.view = ClusterView(store)
        registrar: Any = self.life
        topics = cast(ServedTopics, self.topics)
        self.agent = Agent(self.view, store, topics, broker=broker, registrar=registrar)

    async def __aenter__(self) -> AgentAlone:
        self.view.start(Supervisor())
        self.agent.start(Supervisor())
        await until(lambda: self.view.is_ready)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.agent.close()
        await self.view.close()

    async def serves(self, name: TopicName = ORDERS) -> None:
        await until(lambda: self.is_serving(name))

    def is_serving(self, name: TopicName = ORDERS) -> bool:
        topic = self.topics.loaded.get(name)
        return topic is not None and topic.epoch == held(self.store, name).record.epoch

    async def idle(self) -> None:
        await until(lambda: not self.agent._cases)


@pytest.fixture
async def store() -> AsyncIterator[FaultyStore]:
    store = await new_store(ORDERS)
    yield store
    store.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "FIRST_RETRY_S", 0.002)
    monkeypatch.setattr(agent_module, "LONGEST_RETRY_S", 0.05)


async def test_what_is_assigned_is_taken_up_once(store: FaultyStore) -> None:
    async with AgentAlone(store) as broker:
        await step(store, "assign", owner=ME)
        await broker.serves()
        await broker.idle()
        assert broker.topics.calls == [("get", str(ORDERS))]
        record = held(store).record
        assert (record.epoch, record.incarnation) == (2, LIFE)


async def test_what_was_its_own_before_it_started_is_taken_up(store: FaultyStore) -> None:
    await write(store, ORDERS, Ownership(epoch=4, owner=ME, incarnation=LIFE - 1))
    async with AgentAlone(store) as broker:
        await broker.serves()


async def test_an_orphan_of_its_own_is_taken_up_again(store: FaultyStore) -> None:
    await write(store, ORDERS, Ownership(state=S.ORPHAN, epoch=4, owner=ME, incarnation=LIFE - 1))
    async with AgentAlone(store) as broker:
        await broker.serves()
        assert held(store).record.epoch == 5


async def test_nothing_is_done_while_it_is_not_registered(store: FaultyStore) -> None:
    async with AgentAlone(store, incarnation=0) as broker:
        await step(store, "assign", owner=ME)
        await broker.view.wait(lambda: broker.view.held(ORDERS).record.owner == ME, timeout=PATIENCE_S)
        await asyncio.sleep(0.01)
        assert not broker.topics.calls
        broker.life.begin(LIFE)
        await broker.serves()
        assert held(store).record.incarnation == LIFE


async def test_after_a_lost_registration_topics_are_taken_up_under_the_new_one(store: FaultyStore) -> None:
    """What dropping has missed is found by its incarnation, and dropped then."""
    missed = TopicName("default", "missed")
    await Registry(store).create(missed, reliable=True)
    async with AgentAlone(store) as broker:
        for name in (ORDERS, missed):
            await step(store, "assign", name, owner=ME)
            await broker.serves(name)
        broker.life.incarnation = 0
        await broker.topics.drop(ORDERS, "fenced")
        broker.life.begin(LIFE + 1)
        both = (ORDERS, missed)
        await until(lambda: {held(store, name).record.incarnation for name in both} == {LIFE + 1})
        for name in both:
            await broker.serves(name)
        assert ("drop", str(missed)) in broker.topics.calls


async def test_what_another_has_by_now_is_dropped(store: FaultyStore) -> None:
    await write(store, ORDERS, Ownership(epoch=9, owner=OTHER))
    async with AgentAlone(store) as broker:
        broker.topics.topics[ORDERS] = FakeTopic(epoch=4)
        broker.life.begin(LIFE)
        await until(lambda: ORDERS not in broker.topics.loaded)
        assert broker.topics.calls == [("drop", str(ORDERS))]


async def test_a_topic_that_does_not_exist_any_more_is_dropped(store: FaultyStore) -> None:
    async with AgentAlone(store) as broker:
        await step(store, "assign", owner=ME)
        await broker.serves()
        await store.delete_prefix(specs.topic_prefix(ORDERS))
        await until(lambda: ORDERS not in broker.topics.loaded)


async def test_a_topic_that_stopped_by_itself_is_taken_up_again_at_the_next_pass(store: FaultyStore) -> None:
    async with AgentAlone(store) as broker:
        await step(store, "assign", owner=ME)
        await broker.serves()
        await broker.idle()
        broker.topics.topics[ORDERS].is_serving = False
        broker.agent._passes.wake()
        await until(lambda: held(store).record.epoch == 3)
        await broker.serves()


async def test_a_view_behind_does_not_drop_what_was_just_taken_up(store: FaultyStore) -> None:
    """The view shows another broker as the owner; the record, read anew, names this one."""
    async with AgentAlone(store) as broker:
        await step(store, "assign", owner=ME)
        await broker.serves()
        await broker.idle()
        record, revision = held(store)
        behind = TopicEntry(
            ORDERS, TopicSpec(topic_id=1, reliable=True), 1, Ownership(epoch=1, owner=OTHER), 1
        )
        assert broker.agent._decide(ORDERS, behind) is Job.DROP
        await broker.agent._attempt(Job.DROP, ORDERS, agent_module._Case())
        assert broker.is_serving()
        assert (record, revision) == held(store)


async def test_a_failed_start_is_tried_again(store: FaultyStore) -> None:
    async with AgentAlone(store) as broker:
        broker.topics.before["get"] = failing(HostError("disk"), 3)
        await step(store, "assign", owner=ME)
        await broker.serves()
        assert broker.topics.count("get") == 4
        assert held(store).record.epoch == 5


async def test_after_five_failures_another_broker_may_try(store: FaultyStore) -> None:
    """The failures of those who tried before are counted on, although taking up erases them."""
    await write(store, ORDERS, Ownership(epoch=1, owner=ME, failures=2))
    broker = AgentAlone(store)
    broker.topics.before["get"] = failing(HostError("the disk\nis full"), 100)
    async with broker:
        await until(lambda: held(store).record.state is S.SEALED)
        await broker.idle()
        record = held(store).record
        assert broker.topics.count("get") == 5
        assert (record.owner, record.failures, record.from_broker) == (0, 3, ME)
        assert record.error == "HostError: the disk is full"


async def claimed(store: FaultyStore) -> Catalog:
    spec = await Registry(store).need(ORDERS)
    catalog = Catalog(store, TopicKey("default", "orders", spec.topic_id))
    await catalog.claim(epoch=1, storage_id="disk", has_tail=False)
    return catalog


async def test_a_topic_at_rest_is_given_back_too(store: FaultyStore) -> None:
    await (await claimed(store)).mark_clean(epoch=1)
    broker = AgentAlone(store)
    broker.topics.before["get"] = failing(HostError("disk"), 100)
    async with broker:
        await step(store, "assign", owner=ME)
        await until(lambda: held(store).record.state is S.SEALED)


async def test_a_topic_whose_end_only_this_broker_may_know_is_not_given_back(store: FaultyStore) -> None:
    await (await claimed(store)).mark_dirty(epoch=1)
    async with AgentAlone(store) as broker:
        broker.topics.before["get"] = failing(HostError("disk"), 12)
        await step(store, "assign", owner=ME)
        await broker.serves()
        assert broker.topics.count("get") == 13


async def test_something_else_to_do_ends_the_pause_after_a_failure(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "FIRST_RETRY_S", 60.0)
    monkeypatch.setattr(agent_module, "LONGEST_RETRY_S", 60.0)
    async with AgentAlone(store) as broker:
        broker.topics.before["get"] = failing(HostError("disk"), 1)
        await step(store, "assign", owner=ME)
        await until(lambda: any(case.failed for case in broker.agent._cases.values()))
        await step(store, "delete")
        await until(lambda: held(store).record.owner == 0)
        await broker.idle()


async def test_a_record_that_cannot_be_read_is_left_alone(
    store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with AgentAlone(store) as broker:
        await step(store, "assign", owner=ME)
        await broker.serves()
        await broker.idle()
        await store.put(specs.ownership_key(ORDERS), b"?")
        await until(lambda: "nothing can be done" in caplog.text)
        await broker.idle()
        assert ORDERS in broker.topics.loaded
        assert broker.topics.count("drop") == 0


async def test_many_are_taken_up_a_few_at_a_time() -> None:
    names = [TopicName("default", f"t{index}") for index in range(100)]
    store = await new_store(*names)
    at_once, most = 0, 0

    async def busy() -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.001)
        at_once -= 1

    for name in names:
        await step(store, "assign", name, owner=ME)
    broker = AgentAlone(store)
    broker.topics.before["get"] = busy
    async with broker:
        await until(lambda: len(broker.topics.loaded) == 100)
        assert most == 64
    store.close()


# -- moves -------------------------------------------------------------------------------------


async def test_a_move_is_handed_over_and_sealed(store: FaultyStore) -> None:
    async with AgentAlone(store) as broker:
        await step(store, "assign", owner=ME)
        await broker.serves()
        await step(store, "move", target=OTHER, timeout_ms=5000)
        await until(lambda: held(store).record.state is S.SEALED)
        record = held(store).record
        assert (record.owner, record.end, record.from_broker, record.target) == (0, 10, ME, OTHER)
        await broker.idle()
        assert broker.topics.count("hand_over") == 1


async def test_a_move_that_fails_is_taken_back_with_the_reason(store: FaultyStore) -> None:
    async with AgentAlone(store) as broker:
        await step(store, "assign", owner=ME)
        await broker.serves()
        broker.topics.before["hand_over"] = failing(NotHandedOver("the object store\nis down"), 1)
        await step(store, "move", target=OTHER, timeout_ms=5000)
        await until(lambda: held(store).record.epoch == 4)
        await broker.serves()
        record = held(store).record
        assert (record.state, record.error) == (S.ASSIGNED, "NotHandedOver: the object store is down")


async def test_a_hand_over_that_does_not_return_is_taken_back(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "HAND_OVER_GRACE_S", 0.02)
    async with AgentAlone(store) as broker:
        await step(store, "assign", owner=ME)
        await broker.serves()
        broker.topics.before["hand_over"] = never
        await step(store, "move", timeout_ms=50)
        await until(lambda: held(store).record.epoch == 4)
        assert held(store).record.error == "TimeoutError: no answer in time"
        await broker.serves()


async def test_hand_overs_that_hang_do_not_hold_up_what_is_to_be_taken_up() -> None:
    names = [TopicName("default", f"t{index}") for index in range(21)]
    store = await new_store(*names)
    async with AgentAlone(store) as broker:
        for name in names[:20]:
            await step(store, "assign", name, owner=ME)
            await broker.serves(name)
        broker.topics.before["hand_over"] = never
        for name in names[:20]:
            await step(store, "move", name, timeout_ms=60_000)
        await until(lambda: broker.topics.count("hand_over") == 16)
        await step(store, "assign", names[20], owner=ME)
        await broker.serves(names[20])
    store.close()


async def test_the_time_of_a_move_counts_while_it_waits_for_its_turn() -> None:
    names = [TopicName("default", f"t{index}") for index in range(17)]
    store = await new_store(*names)
    async with AgentAlone(store) as broker:
        for name in names:
            await step(store, "assign", name, owner=ME)
            await broker.serves(name)
        let_on = asyncio.Event()

        async def wait() -> None:
            await let_on.wait()

        broker.topics.before["hand_over"] = wait
        for name in names[:16]:
            await step(store, "move", name, timeout_ms=60_000)
        await until(lambda: broker.topics.count("hand_over") == 16)
        await step(store, "move", names[16], timeout_ms=20)
        await asyncio.sleep(0.05)  # its time passes
        let_on.set()
        await until(lambda: held(store, names[16]).record.epoch == 4)
        assert held(store, names[16]).record.error == "TimeoutError: it was not handed over within 20 ms"
        assert broker.topics.count("hand_over") == 16
    store.close()


@pytest.mark.parametrize("took_effect", [True, False])
async def test_a_seal_whose_outcome_is_unknown_is_decided_by_the_record(
    store: FaultyStore, took_effect: bool
) -> None:
    """The topic was handed over once, and is not handed over again: what it ends with is known."""
    async with AgentAlone(store) as broker:
        await step(store, "assign", owner=ME)
        await broker.serves()
        await broker.idle()
        await step(store, "move", timeout_ms=5000)
        if took_effect:
            store.lost["txn"] = 1
        else:
            store.before["txn"] = failing(Unavailable("no leader"), 2)
        await until(lambda: held(store).record.state is S.SEALED)
        await broker.idle()
        assert held(store).record.end == 10
        assert broker.topics.count("hand_over") == 1


async def test_a_move_that_the_controller_took_back_before_the_seal_was_written(store: FaultyStore) -> None:
    """Handed over → the controller rolls back, its patience being over → the seal comes too late and is
    refused → the topic is taken up under the next epoch."""
    async with AgentAlone(store) as broker:
        await step(store, "assign", owner=ME)
        await broker.serves()
        await broker.idle()

        async def roll_back() -> None:
            if held(store).record.state is S.MOVING and broker.topics.count("hand_over"):
                del store.before["txn"]
                await step(store, "roll_back", error="too late")

        await step(store, "move", timeout_ms=5000)
        store.before["txn"] = roll_back
        await until(lambda: held(store).record.epoch == 4)
        await broker.serves()
        assert held(store).record.error == "too late"


async def test_a_broker_that_died_between_handing_over_and_sealing_serves_again(store: FaultyStore) -> None:
    """Moving under epoch 2 → handed over → the process dies before it could write → back with another
    incarnation: the move is taken back (epoch 3), and the topic taken up (epoch 4)."""
    async with AgentAlone(store) as broker:
        await step(store, "assign", owner=ME)
        await broker.serves()
        await step(store, "move", target=OTHER, timeout_ms=5000)
        store.before["txn"] = never
        await until(lambda: broker.topics.count("hand_over") == 1)
    assert held(store).record.state is S.MOVING
    store.before.clear()
    async with AgentAlone(store, incarnation=LIFE + 1) as broker:
        await broker.serves()
        record = held(store).record
        assert (record.epoch, record.incarnation) == (4, LIFE + 1)
        assert record.error == "broker 1 was restarted"
        assert broker.topics.count("hand_over") == 0


async def test_a_topic_that_is_deleted_while_it_moves_is_let_go(store: FaultyStore) -> None:
    """Moving → being handed over → deleted → the seal is refused, and nothing is taken up again."""
    async with AgentAlone(store) as broker:
        await step(store, "assign", owner=ME)
        await broker.serves()

        async def delete() -> None:
            await Registry(store).begin_delete(ORDERS)
            await step(store, "delete")

        broker.topics.before["hand_over"] = delete
        await step(store, "move", timeout_ms=5000)
        await until(lambda: held(store).record.state is S.DELETING and held(store).record.owner == 0)
        await broker.idle()
        assert [call for call, _ in broker.topics.calls] == ["get", "hand_over", "release"]
        assert not broker.topics.loaded


async def test_a_topic_goes_to_another_broker_and_back_a_hundred_times(store: FaultyStore) -> None:
    """Two agents, and a controller that assigns what is sealed and moves what is served. Its end grows with
    each hand-over; the epoch with each beginning; and never do two brokers serve one epoch."""
    ends: dict[TopicName, int] = {}
    async with AgentAlone(store, 1, 11, ends) as one, AgentAlone(store, 2, 22, ends) as two:
        both = {1: one, 2: two}
        await step(store, "assign", owner=1)
        for turn in range(100):
            here, there = 1 + turn % 2, 2 - turn % 2
            await both[here].serves()
            assert not both[there].is_serving()
            await step(store, "move", target=there, timeout_ms=5000)
            await until(lambda: held(store).record.state is S.SEALED)
            record = held(store).record
            assert (record.end, record.from_broker) == (10 * (turn + 1), here)
            await step(store, "assign", owner=record.target)
        await one.serves()
        assert held(store).record.epoch == 2 * 101
        await one.idle()
        await two.idle()
        for broker in (one, two):
            assert broker.topics.count("hand_over") == 50


async def test_an_agent_goes_on_after_its_view_fell_behind() -> None:
    """The events of a move are lost in a gap: the records say enough."""
    store = await new_store(ORDERS, hub_limits=HubLimits(queue_batches=4, history_revisions=4))
    async with AgentAlone(store) as broker:
        await step(store, "assign", owner=ME)
        await broker.serves()
        await broker.idle()
        gaps = store.hub.gaps
        await step(store, "move", timeout_ms=5000)
        for index in range(10):  # without a turn for anybody else
            await store.put(specs.spec_key(TopicName("default", f"t{index}")), b"{}")
        assert store.hub.gaps > gaps
        await until(lambda: held(store).record.state is S.SEALED)
        await step(store, "assign", owner=ME)
        await broker.serves()
    store.close()


# -- deleting ----------------------------------------------------------------------------------


async def test_released_waits_until_owners_let_go_or_are_gone(store: FaultyStore) -> None:
    gone, nobodys = TopicName("default", "gone"), TopicName("default", "nobodys")
    await register(store, OTHER)
    async with AgentAlone(store) as broker:
        await write(store, ORDERS, Ownership(state=S.DELETING, epoch=3, owner=OTHER))
        await write(store, gone, Ownership(state=S.DELETING, epoch=3, owner=9))
        waiting = asyncio.create_task(broker.agent.released([ORDERS, gone, nobodys]))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await step(store, "release")
        async with asyncio.timeout(PATIENCE_S):
            await waiting
        await write(store, ORDERS, Ownership(state=S.DELETING, epoch=4, owner=OTHER))
        waiting = asyncio.create_task(broker.agent.released([ORDERS]))
        await asyncio.sleep(0)
        await store.delete(records.registration_key(OTHER))
        async with asyncio.timeout(PATIENCE_S):
            await waiting
        await broker.agent.released([])


async def test_released_names_who_still_has_what(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "RELEASE_S", 0.02)
    await register(store, OTHER)
    await write(store, ORDERS, Ownership(state=S.DELETING, epoch=3, owner=OTHER))
    async with AgentAlone(store) as broker:
        with pytest.raises(Unavailable, match="/default/orders by broker 2"):
            await broker.agent.released([ORDERS])


async def test_what_nobody_foresaw_is_told_and_tried_again(
    store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with AgentAlone(store) as broker:
        broker.topics.before["get"] = failing(ZeroDivisionError(), 1)
        await step(store, "assign", owner=ME)
        await until(lambda: "ZeroDivisionError" in caplog.text)
        await broker.idle()
        broker.agent._passes.wake()
        await broker.serves()
