"""The controller: every topic ends with a broker that is there, whatever happens to brokers."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from sava.cluster.planning import Candidate, Placement, Scene, Sightings, plan, wait_after, write_decisions
from sava.cluster.records import Mode
from sava.cluster.view import TopicEntry
from sava.metadata.commands import Put
from sava.storage import keys
from sava.storage.types import TopicState
from sava.topics import specs
from sava.topics.names import TopicName
from sava.topics.specs import Ownership, OwnershipState, TopicSpec
from tests.support.waiting import PATIENCE_S, OwnTime, until
from tests.unit.cluster.fake_brokers import S, config, registration, storage_key, topic, world

# -- planning: a moment in, decisions out --------------------------------------------------------------------

SEALED = TopicState(topic_id=1, epoch=1, storage_id="x", end=7, sealed=True)
AT_REST = TopicState(topic_id=1, epoch=1, storage_id="x", end=7, sealed=False, is_clean=True)
WITH_TAIL = TopicState(topic_id=1, epoch=1, storage_id="x", end=7, sealed=False)


def entry(state: OwnershipState, *, reliable: bool = True, revision: int = 5, **fields: object) -> TopicEntry:
    record = Ownership(state=state, epoch=1, **fields)  # type: ignore[arg-type]
    return TopicEntry(topic(1), TopicSpec(topic_id=1, reliable=reliable), 3, record, revision)


def scene(
    *brokers: int,
    state: TopicState | None = None,
    now: float = 100.0,
    sightings: Sightings | None = None,
    is_deleting: bool = False,
    store_id: str = "shared",
) -> Scene:
    there = {broker: registration(broker, store_id=store_id) for broker in brokers}
    candidates = {broker: Candidate(each, ()) for broker, each in there.items()}
    return Scene(
        now=now,
        brokers=there,
        placement=Placement(candidates, {}, {}),
        sightings=sightings or Sightings(),
        state_of=lambda entry: state,
        is_deleting=lambda name: is_deleting,
    )


@pytest.mark.parametrize(
    ("seen", "moment", "step", "fields"),
    [
        (entry(S.UNASSIGNED), scene(1), "assign", {"owner": 1, "reason": "create", "store_id": "shared"}),
        (entry(S.UNASSIGNED), scene(1, is_deleting=True), None, {}),
        (entry(S.UNASSIGNED), scene(), None, {}),
        (entry(S.SEALED, from_broker=1), scene(1, 2, state=SEALED), "assign", {"owner": 2}),
        (entry(S.SEALED, from_broker=1), scene(1, state=SEALED), "assign", {"owner": 1}),
        (entry(S.SEALED, target=3), scene(1, 2, 3, state=SEALED), "assign", {"owner": 3, "target": 0}),
        (entry(S.SEALED, target=3), scene(1, state=SEALED), "assign", {"owner": 1}),
        (entry(S.SEALED, store_id="other"), scene(1, 2, state=SEALED), None, {}),
        (entry(S.SEALED, store_id="other"), scene(1, state=None), "assign", {"owner": 1}),
        (entry(S.SEALED, store_id="other", reliable=False), scene(1), "assign", {"owner": 1}),
        (entry(S.ASSIGNED, owner=1), scene(1), None, {}),
        (entry(S.ASSIGNED, owner=1), scene(2), "orphan", {"owner": 1}),
        (entry(S.MOVING, owner=1, target=2), scene(2), "orphan", {"owner": 1, "target": 0}),
        (entry(S.MOVING, owner=1, timeout_ms=1000), scene(1), None, {}),
        (entry(S.ORPHAN, owner=1, reliable=False), scene(2), "recover", {"owner": 0, "end": 0}),
        (entry(S.ORPHAN, owner=1), scene(2, state=None), "recover", {"owner": 0, "end": 0}),
        (entry(S.ORPHAN, owner=1), scene(2, state=SEALED), "recover", {"end": 7, "from_broker": 1}),
        (entry(S.ORPHAN, owner=1), scene(2, state=AT_REST), "recover", {"end": 7, "reason": "failover"}),
        (entry(S.ORPHAN, owner=1), scene(2, state=WITH_TAIL), None, {}),
        (entry(S.DELETING, owner=1), scene(2), None, {}),
    ],
)
def test_what_is_decided_of_a_topic(
    seen: TopicEntry, moment: Scene, step: str | None, fields: dict[str, object]
) -> None:
    decisions = plan([seen], moment).decisions
    assert [decision.step for decision in decisions] == ([step] if step else [])
    for name, value in fields.items():
        assert getattr(decisions[0].record, name) == value, name


def test_what_cannot_be_helped_is_named() -> None:
    assert plan([entry(S.UNASSIGNED)], scene()).unplaced
    assert plan([entry(S.ORPHAN, owner=1)], scene(2, state=WITH_TAIL)).orphans


def test_a_move_is_taken_back_ten_seconds_after_its_time() -> None:
    """By the controller's own clock."""
    sightings = Sightings()
    seen = entry(S.MOVING, owner=1, target=2, timeout_ms=5000)
    first = plan([seen], scene(1, 2, now=100.0, sightings=sightings))
    assert first.waits == {seen.name: 115.0}
    assert not plan([seen], scene(1, 2, now=114.9, sightings=sightings)).decisions
    assert not plan([seen._replace(revision=6)], scene(1, 2, now=116.0, sightings=sightings)).decisions
    (decision,) = plan([seen._replace(revision=6)], scene(1, 2, now=131.0, sightings=sightings)).decisions
    assert decision.step == "roll_back"
    assert decision.record.owner == 1
    assert "15 s" in decision.record.error


def test_a_topic_that_cannot_be_served_is_assigned_later_and_later() -> None:
    assert [wait_after(failures) for failures in (0, 1, 2, 3)] == [0.0, 0.2, 0.4, 0.8]
    assert wait_after(50) == 30.0
    sightings = Sightings()
    seen = entry(S.SEALED, failures=2)
    assert plan([seen], scene(1, now=100.0, sightings=sightings)).waits == {seen.name: 100.4}
    assert plan([seen], scene(1, now=100.5, sightings=sightings)).decisions


# -- with brokers --------------------------------------------------------------------------------------------


async def test_topics_are_spread_over_the_brokers_and_served() -> None:
    names = [topic(index) for index in range(30)]
    async with world() as w:
        await w.create(names)
        await w.add(1, 2, 3)
        await w.served(names)
        assert w.view.counts() == {1: 10, 2: 10, 3: 10}
        assert w.controller.assignments == 30
        assert {w.record(name).reason for name in names} == {"create"}


async def test_topics_that_come_before_any_broker_wait_for_one() -> None:
    async with world() as w:
        await w.create([topic(1)])
        await until(lambda: w.controller.unplaced == 1)
        await w.add(1)
        await w.served([topic(1)])
        assert w.controller.unplaced == 0


async def test_topics_of_a_broker_that_dies_go_to_the_others() -> None:
    names = [topic(index) for index in range(20)]
    async with world() as w:
        await w.add(1, 2, 3)
        await w.create(names)
        await w.served(names)
        await w.brokers[1].die()
        await w.sees(lambda: all(w.record(name).owner in (2, 3) for name in names))
        await w.served(names)
        moved = [name for name in names if w.record(name).from_broker == 1]
        assert len(moved) in (6, 7)
        assert {w.record(name).reason for name in moved} == {"failover"}


async def test_a_reliable_topic_whose_owner_kept_its_end_to_itself_waits_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Broker 1 acknowledges messages that are in no segment yet, and dies. Nobody else may begin."""
    async with world() as w:
        await w.add(1)
        w.brokers[1].is_clean = False
        await w.create([topic(1)], reliable=True)
        await w.served([topic(1)])
        await w.add(2)
        with caplog.at_level(logging.WARNING):
            await w.brokers[1].die()
            await w.sees(lambda: w.record(topic(1)).state is S.ORPHAN)
            await until(lambda: w.controller.orphans == 1)
            await w.store.put("/topics/default/t1/policy", b"{}")  # wakes nobody up
            await w.create([topic(2)])
            await w.served([topic(2)])
        waits = [line for line in caplog.messages if "waits for the journal of its owner" in line]
        assert len(waits) == 1
        assert "topic=/default/t1 owner=1" in waits[0]
        assert w.record(topic(1)).state is S.ORPHAN
        await w.brokers[1].start()
        await w.served([topic(1)])
        assert w.record(topic(1)).owner == 1


async def test_a_reliable_topic_at_rest_goes_on_elsewhere_where_it_ended() -> None:
    async with world() as w:
        await w.add(1)
        await w.create([topic(1)], reliable=True)
        await w.served([topic(1)])
        await w.add(2)
        await w.brokers[1].die()
        await w.sees(lambda: w.record(topic(1)).owner == 2)
        assert w.record(topic(1)).end == 7


async def test_a_reliable_topic_goes_only_where_its_segments_can_be_read() -> None:
    """Broker 1 is gone and cannot say which object store it had; the record of the topic does."""
    async with world() as w:
        await w.add(1, store_id="a")
        await w.create([topic(1)], reliable=True)
        await w.served([topic(1)])
        await w.add(2, store_id="b")
        await w.brokers[1].die()
        await w.sees(lambda: w.record(topic(1)).state is S.SEALED)
        await w.create([topic(2)])
        await w.served([topic(2)])
        assert w.record(topic(1)).state is S.SEALED
        await w.add(3, store_id="a")
        await w.served([topic(1)])
        assert w.record(topic(1)).owner == 3


async def test_a_storage_state_that_cannot_be_read_is_not_taken_for_an_empty_one() -> None:
    async with world() as w:
        await w.add(1)
        await w.create([topic(1), topic(2)], reliable=True)
        await w.served([topic(1), topic(2)])
        await w.add(2)
        await w.store.put(keys.state_key(storage_key(topic(1), 1)), b"\xff")
        await w.brokers[1].die()
        await w.served([topic(2)])
        assert w.record(topic(1)).state is S.ORPHAN


async def test_a_topic_that_a_broker_cannot_load_is_tried_elsewhere() -> None:
    async with world() as w:
        await w.add(1)
        w.brokers[1].refuses_to_load = True
        await w.create([topic(1)])
        await w.sees(lambda: w.record(topic(1)).failures > 0)
        await w.add(2)
        await w.served([topic(1)])
        assert w.record(topic(1)).owner == 2
        assert w.record(topic(1)).failures == 0


async def test_nothing_is_assigned_to_a_broker_that_is_not_active() -> None:
    names = [topic(index) for index in range(10)]
    async with world() as w:
        await w.set_mode(1, Mode.DRAINED)
        await w.add(1, 2)
        await w.create(names)
        await w.served(names)
        assert {w.record(name).owner for name in names} == {2}


async def test_only_the_leader_decides_and_a_deposed_one_decides_nothing() -> None:
    async with world(leads=False) as w:
        await w.add(1)
        await w.create([topic(1)])
        await w.sees(lambda: w.view.entry(topic(1)) is not None)
        w.store.term = 2
        w.leadership.now = 1  # believes to lead, and does not
        await until(lambda: w.deletions > 1)  # it has tried more than once
        assert w.record(topic(1)).state is S.UNASSIGNED
        w.leadership.now = 2
        await w.served([topic(1)])


async def test_a_new_term_looks_at_everything_and_finishes_deletions() -> None:
    async with world() as w:
        await w.add(1)
        await w.create([topic(1)])
        await w.served([topic(1)])
        assert w.deletions == 1
        w.leadership.now = 0
        await asyncio.sleep(0.3)
        await w.create([topic(2)])
        w.store.term = w.leadership.now = 5
        await w.served([topic(2)])
        assert w.deletions == 2


async def test_a_topic_that_is_deleted_and_created_again_is_assigned_again() -> None:
    async with world() as w:
        await w.add(1)
        await w.create([topic(1)])
        await w.served([topic(1)])
        await w.delete(topic(1))
        await w.create([topic(1)])
        await w.served([topic(1)])


# -- many ----------------------------------------------------------------------------------------------------


async def test_a_pass_over_ten_thousand_topics_is_short_and_so_is_a_burst() -> None:
    async with world() as w:
        for broker in (1, 2, 3):
            lease = await w.store.grant_lease(600_000)
            value = specs.encode(registration(broker, lease))
            await w.store.put(f"/cluster/register/{broker}", value, lease=lease)
        names = [topic(index) for index in range(10_000)]
        await w.create(names)
        await w.sees(lambda: sum(w.view.counts().values()) == 10_000, timeout=PATIENCE_S)
        assert set(w.view.counts().values()) == {3333, 3334}
        own = OwnTime()
        await w.controller._pass(1, is_full=True)
        full = own.seconds
        own = OwnTime()
        for index in range(1000):
            await w.create([topic(f"new-{index}")])
            if index % 10 == 0:
                await asyncio.sleep(0)
        await w.sees(lambda: sum(w.view.counts().values()) == 11_000, timeout=PATIENCE_S)
        burst = own.seconds
        print(f"a look at 10,000 topics {full * 1000:.0f} ms; 1,000 created {burst * 1000:.0f} ms")
        assert full < 1.0
        assert burst < 5.0


async def test_a_thousand_topics_of_a_dead_broker_are_served_elsewhere() -> None:
    names = [topic(index) for index in range(1000)]
    async with world() as w:
        await w.add(1)
        await w.create(names)
        await w.served(names, timeout=PATIENCE_S)
        await w.add(2, 3)
        await w.brokers[1].die()
        await w.sees(lambda: all(w.record(name).owner in (2, 3) for name in names), timeout=PATIENCE_S)
        await w.served(names, timeout=PATIENCE_S)
        assert {w.view.counts()[2], w.view.counts()[3]} == {500}


# -- anything at any time ------------------------------------------------------------------------------------


WHAT_MAY_HAPPEN = (
    *("die", "return", "return", "drain", "activate", "term"),
    *("move", "move", "delete", "tail", "rest", "fail"),
    *("leave", "store down", "store up"),
)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_every_topic_is_served_in_the_end(seed: int) -> None:
    """Brokers die, leave and return, their object stores too, topics move, are deleted and created again, the
    leader changes. One owner in an epoch, epochs that grow, and in the end everything is served, unless its
    owner is gone with its tail."""
    chance = random.Random(seed)
    names = [topic(index) for index in range(12)]
    async with world(config()) as w:
        w.watch_invariants()
        await w.add(1, 2, 3)
        await w.create(names[:6])
        await w.create(names[6:], reliable=True)
        moves: list[asyncio.Task[object]] = []
        for _ in range(40):
            await asyncio.sleep(chance.random() * 0.02)
            broker = w.brokers[chance.choice((1, 2, 3))]
            match chance.choice(WHAT_MAY_HAPPEN):
                case "die":
                    await broker.die()
                case "return" if not broker.is_alive:
                    await broker.start()
                case "move":
                    move = w.controller.move(chance.choice(names), reason="unload", timeout_ms=500)
                    moves.append(asyncio.create_task(move))
                case "delete":
                    name = chance.choice(names)
                    await w.delete(name)
                    await w.create([name], reliable=name in names[6:])
                case "drain":
                    await w.set_mode(broker.broker, Mode.DRAINING)
                case "activate":
                    await w.set_mode(broker.broker, Mode.ACTIVE)
                case "term":
                    w.leadership.now += 1
                    w.store.term = w.leadership.now
                case "leave" if broker.is_alive:
                    await broker.leave()
                case "store down":
                    w.stores_down.add(broker.broker)
                case "store up":
                    w.stores_down.discard(broker.broker)
                case "tail":
                    broker.is_clean = False
                case "rest":
                    broker.is_clean = True
                case "fail":
                    broken = chance.random() < 0.5
                    broker.fails = lambda name, broken=broken: "no" if broken else ""  # type: ignore[misc]
        await w.set_mode(1, Mode.ACTIVE)
        w.stores_down.clear()
        await w.brokers[1].die()  # it may have said that it leaves
        await w.brokers[1].start()

        def is_excused(name: TopicName) -> bool:
            record, state = w.record(name), w.storage_state(name)
            is_waiting = record.state is S.ORPHAN and not w.brokers[record.owner].is_alive
            return is_waiting and state is not None and not state.is_settled

        await until(lambda: all(w.is_served(name) or is_excused(name) for name in names), timeout=PATIENCE_S)
        for task in moves:
            task.cancel()
        await asyncio.gather(*moves, return_exceptions=True)
        assert not w.follower.done(), w.follower.exception()
        w.follower.cancel()


async def test_a_topic_that_changed_does_not_hold_up_the_others() -> None:
    """A hundred topics are assigned at once; one changes between the look and the write."""
    async with world(leads=False) as w:
        names = [topic(index) for index in range(100)]
        await w.add(1)
        await w.create(names)
        await w.sees(lambda: w.view.entry(names[-1]) is not None and 1 in w.view.brokers)
        planned = plan(list(w.view.entries()), w.controller._scene(w.view.brokers))
        await w.store.txn((), (Put(specs.ownership_key(names[50]), specs.encode(Ownership(epoch=9))),))
        done = await write_decisions(w.view, w.store, planned.decisions, term=1)
        assert len(planned.decisions) == 100
        assert {decision.name for decision in done} == set(names) - {names[50]}
        assert w.record(names[50]).epoch == 9


async def test_an_owner_that_came_back_before_the_write_is_not_gone() -> None:
    async with world(leads=False) as w:
        key = specs.ownership_key(topic(1))
        await w.create([topic(1)])
        await w.store.put(key, specs.encode(Ownership(epoch=3, owner=1, incarnation=8)))
        await w.sees(lambda: w.view.held(topic(1)).record.epoch == 3)
        planned = plan(list(w.view.entries()), w.controller._scene(dict(w.view.brokers)))
        assert [decision.step for decision in planned.decisions] == ["orphan"]
        await w.store.put("/cluster/register/1", specs.encode(registration(1)))
        assert await write_decisions(w.view, w.store, planned.decisions, term=1) == []
        assert w.record(topic(1)).state is S.ASSIGNED


async def test_most_owners_gone_at_once_is_said_loudly_and_acted_upon(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = [topic(index) for index in range(9)]
    async with world() as w:
        await w.add(1, 2, 3)
        await w.create(names)
        await w.served(names)
        with caplog.at_level(logging.ERROR):
            w.leadership.now = 0
            await asyncio.gather(w.brokers[1].die(), w.brokers[2].die())
            await w.sees(lambda: len(w.view.brokers) == 1)
            w.store.term = w.leadership.now = 2
            await w.sees(lambda: all(w.record(name).owner == 3 for name in names))
        assert "most owners are gone at once gone=[1, 2]" in caplog.text


async def test_a_deletion_that_nobody_finishes_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sava.cluster.controller.ABANDONED_S", 0.2)
    monkeypatch.setattr("sava.cluster.controller.FULL_PASS_S", 0.1)
    async with world() as w:
        await until(lambda: w.deletions == 1)
        spec = TopicSpec(topic_id=1, reliable=False, deleting=True)
        await w.store.put(specs.spec_key(topic(1)), specs.encode(spec))
        await w.add(1)
        await until(lambda: w.deletions > 1)
        assert w.record(topic(1)).state is S.UNASSIGNED


async def test_writers_are_tended_by_the_leader_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sava.cluster.controller.FULL_PASS_S", 0.05)
    async with world(leads=False) as w:
        await asyncio.sleep(0.3)
        assert w.tended == 0
        w.store.term = w.leadership.now = 1
        await until(lambda: w.tended > 2)
