"""Moves: to another broker, or back where the topic was, and the one who asked learns which."""

from __future__ import annotations

import asyncio
import time

import pytest

from sava.cluster import moves
from sava.cluster.moves import Move, outcome_of
from sava.cluster.records import (
    AlreadyMoving,
    Mode,
    MovePostponed,
    MoveRefused,
    NotController,
)
from sava.cluster.view import TopicEntry
from sava.metadata.errors import OutcomeUnknown
from sava.topics import specs
from sava.topics.errors import TopicUnknown
from sava.topics.ownership import WrongState
from sava.topics.specs import Ownership, TopicSpec
from tests.support.waiting import FAR_S, PATIENCE_S, until
from tests.unit.cluster.fake_brokers import S, World, topic, world


async def unload(w: World, name: int | str = 1, *, target: int = 0, timeout_ms: int = 5000) -> Move:
    return await w.controller.move(topic(name), target=target, reason="unload", timeout_ms=timeout_ms)


async def two_brokers(w: World, *, reliable: bool = False) -> None:
    """Topic 1 is at broker 1."""
    await w.add(1)
    await w.create([topic(1)], reliable=reliable)
    await w.served([topic(1)])
    await w.add(2)
    await w.sees(lambda: 2 in w.view.brokers)


def before(**fields: object) -> TopicEntry:
    record = Ownership(**{"epoch": 4, "owner": 1, "incarnation": 9, **fields})  # type: ignore[arg-type]
    return TopicEntry(topic(1), TopicSpec(topic_id=1, reliable=True), 3, record, 5)


@pytest.mark.parametrize(
    ("now", "to", "error"),
    [
        (before(), None, ""),
        (before(state=S.MOVING), None, ""),
        (before(state=S.SEALED, owner=0, incarnation=0), None, ""),
        (before(epoch=5, owner=2, incarnation=0), None, ""),
        (before(state=S.ORPHAN), None, ""),
        (before(epoch=6, owner=2), 2, ""),
        (before(epoch=6, owner=2, state=S.MOVING), 2, ""),
        (before(epoch=5, incarnation=0, error="the disk is full"), 1, "the disk is full"),
        (before(epoch=6), 1, "it is with broker 1 again"),
        (before(state=S.DELETING, epoch=5), 0, "the topic was deleted meanwhile"),
        (None, 0, "the topic was deleted meanwhile"),
        (before()._replace(spec=TopicSpec(topic_id=2, reliable=True)), 0, "the topic was deleted meanwhile"),
    ],
)
def test_what_has_become_of_a_move(now: TopicEntry | None, to: int | None, error: str) -> None:
    outcome = outcome_of(before(), now, is_deleting=False)
    if to is None:
        assert outcome is None
    else:
        assert outcome is not None
        assert (outcome.from_broker, outcome.to_broker, outcome.error) == (1, to, error)


async def test_a_topic_moves_to_another_broker_and_goes_on_where_it_ended() -> None:
    async with world() as w:
        await two_brokers(w, reliable=True)
        epoch = w.record(topic(1)).epoch
        began = time.monotonic()
        move = await unload(w)
        elapsed_ms = (time.monotonic() - began) * 1000
        assert (move.from_broker, move.to_broker, move.error, move.end) == (1, 2, "", 7)
        assert move.epoch == epoch + 2
        assert 0 <= move.downtime_ms <= elapsed_ms + 1
        record = w.record(topic(1))
        assert (record.reason, record.from_broker, record.target, record.timeout_ms) == ("unload", 1, 0, 0)
        assert w.controller.moves == 1
        await w.served([topic(1)])


async def test_it_goes_to_the_broker_that_was_asked_for() -> None:
    async with world() as w:
        await two_brokers(w)
        await w.add(3)
        await w.sees(lambda: 3 in w.view.brokers)
        assert (await unload(w, target=3)).to_broker == 3


async def test_an_owner_that_cannot_hand_over_keeps_the_topic_and_says_why() -> None:
    async with world() as w:
        await two_brokers(w)
        w.brokers[1].fails = lambda name: "the object store is down"
        move = await unload(w)
        assert (move.to_broker, move.error) == (1, "the object store is down")
        assert w.controller.move_failures == 1
        await w.served([topic(1)])


async def test_a_move_waits_while_the_owners_store_takes_no_writes() -> None:
    """The leader asks the owner before it writes *moving*: an owner that cannot upload is not asked to hold
    its publishers."""
    async with world() as w:
        await two_brokers(w, reliable=True)
        w.stores_down.add(1)
        seen: list[S] = []
        w.view.listen(lambda _: seen.append(w.record(topic(1)).state))
        before = w.record(topic(1))
        with pytest.raises(MovePostponed, match="object store") as postponed:
            await unload(w)
        assert (postponed.value.topic, postponed.value.broker) == (str(topic(1)), 1)
        assert w.record(topic(1)) == before
        assert S.MOVING not in seen
        w.stores_down.clear()
        assert (await unload(w)).to_broker == 2
        assert w.prepared == [topic(1)]


async def test_a_move_whose_owner_never_finishes_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sava.cluster.planning.ROLL_BACK_GRACE_S", 0.2)
    async with world() as w:
        await two_brokers(w)
        w.brokers[1].hangs = True
        move = await unload(w, timeout_ms=100)
        assert move.to_broker == 1
        assert move.error == "broker 1 did not hand it over within 0.3 s"


async def test_an_owner_that_dies_on_the_way_is_followed_by_another() -> None:
    async with world() as w:
        await two_brokers(w)
        w.brokers[1].hangs = True
        moving = asyncio.create_task(unload(w))
        await w.sees(lambda: w.record(topic(1)).state is S.MOVING)
        await w.brokers[1].die()
        assert (await moving).to_broker == 2


async def test_an_owner_that_dies_with_messages_of_its_own_ends_the_move() -> None:
    """The owner is killed before it has uploaded everything ─▶ the topic is an orphan, and only its owner can
    take it up again. Whoever asked for the move is told at once, and not when its time is over."""
    async with world() as w:
        await w.add(1)
        w.brokers[1].is_clean = False
        await w.create([topic(1)], reliable=True)
        await w.served([topic(1)])
        await w.add(2)
        await w.sees(lambda: 2 in w.view.brokers)
        w.brokers[1].hangs = True
        moving = asyncio.create_task(unload(w, timeout_ms=int(FAR_S * 1000)))
        await w.sees(lambda: w.record(topic(1)).state is S.MOVING)
        await w.brokers[1].die()
        async with asyncio.timeout(PATIENCE_S):
            move = await moving
        assert (move.from_broker, move.to_broker) == (1, 1)
        assert "its journal is not recovered yet" in move.error
        assert w.record(topic(1)).state is S.ORPHAN


async def test_a_target_that_dies_on_the_way_is_replaced() -> None:
    async with world() as w:
        await two_brokers(w)
        await w.add(3)
        w.brokers[1].hangs = True
        await w.sees(lambda: 3 in w.view.brokers)
        moving = asyncio.create_task(unload(w, target=2))
        await w.sees(lambda: w.record(topic(1)).state is S.MOVING)
        await w.brokers[2].die()
        w.brokers[1].hangs = False
        w.brokers[1].wake()
        assert (await moving).to_broker == 3


async def test_a_topic_that_is_deleted_on_the_way() -> None:
    async with world() as w:
        await two_brokers(w)
        w.brokers[1].hangs = True
        moving = asyncio.create_task(unload(w))
        await w.sees(lambda: w.record(topic(1)).state is S.MOVING)
        await w.delete(topic(1))
        assert (await moving).error == "the topic was deleted meanwhile"


async def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "OUTCOME_GRACE_S", 0.2)
    async with world() as w:
        await two_brokers(w)
        w.brokers[1].hangs = True
        move = await unload(w, timeout_ms=100)
        assert move.error.startswith("not over within 0.3 s: the topic is moving")


# -- refused -------------------------------------------------------------------------------------------------


async def test_a_single_broker_has_nowhere_to_move_to() -> None:
    async with world() as w:
        await w.add(1)
        await w.create([topic(1)])
        await w.served([topic(1)])
        with pytest.raises(MoveRefused, match="Cannot unload topic: single broker cluster detected"):
            await unload(w)


async def test_refusals_name_the_reason_and_change_nothing() -> None:
    async with world() as w:
        await two_brokers(w, reliable=True)
        await w.add(3, store_id="other")
        await w.sees(lambda: 3 in w.view.brokers)
        record = w.record(topic(1))
        with pytest.raises(TopicUnknown):
            await unload(w, "unknown")
        with pytest.raises(MoveRefused, match="is served by broker 1 already"):
            await unload(w, target=1)
        with pytest.raises(MoveRefused, match="broker 9: it is not registered"):
            await unload(w, target=9)
        with pytest.raises(MoveRefused, match="another object store"):
            await unload(w, target=3)
        await w.brokers[3].leave()
        await w.sees(lambda: w.view.brokers[3].is_leaving)
        with pytest.raises(MoveRefused, match="broker 3: it is about to stop"):
            await unload(w, target=3)
        await w.set_mode(2, Mode.DRAINED)
        await w.sees(lambda: w.view.mode(2).mode is Mode.DRAINED)
        with pytest.raises(MoveRefused, match="it is drained, not active"):
            await unload(w, target=2)
        await w.brokers[3].die()
        await w.brokers[3].start()
        await w.sees(lambda: 3 in w.view.brokers and not w.view.brokers[3].is_leaving)
        with pytest.raises(MoveRefused, match="no other active broker has the object store"):
            await unload(w)
        await w.brokers[3].die()
        await w.sees(lambda: 3 not in w.view.brokers)
        with pytest.raises(MoveRefused, match="no other broker is active"):
            await unload(w)
        assert w.record(topic(1)) == record


async def test_a_topic_that_is_moving_or_not_served_cannot_be_moved() -> None:
    async with world() as w:
        await two_brokers(w)
        w.brokers[1].hangs = True
        moving = asyncio.create_task(unload(w))
        await w.sees(lambda: w.record(topic(1)).state is S.MOVING)
        with pytest.raises(AlreadyMoving, match=r"moving already, from broker 1 to broker 2 \(unload\)"):
            await unload(w)
        await w.store.put(
            specs.ownership_key(topic(1)), specs.encode(Ownership(state=S.ORPHAN, epoch=9, owner=8))
        )
        await until(lambda: w.view.held(topic(1)).record.epoch >= 9)
        moving.cancel()
        for broker in w.brokers.values():
            await broker.die()
        await w.sees(lambda: not w.view.brokers)
        await w.create([topic(2)])
        with pytest.raises((WrongState, MoveRefused)):
            await unload(w, 2)


async def test_only_the_leader_moves_topics_and_a_deposed_one_does_not() -> None:
    async with world() as w:
        await two_brokers(w)
        await until(lambda: w.controller.assignments == 1)
        w.store.term = 7  # somebody else leads, and this one does not know it yet
        with pytest.raises(NotController):
            await unload(w)
        w.leadership.now = 0
        with pytest.raises(NotController):
            await unload(w)
        assert w.record(topic(1)).state is S.ASSIGNED


async def test_a_drain_of_the_target_that_comes_between_is_noticed() -> None:
    """The target is active when it is chosen, and drained when the move is written: another is chosen."""
    async with world() as w:
        await two_brokers(w)
        await w.add(3)
        await w.sees(lambda: 3 in w.view.brokers)
        txn = w.store.txn
        drained: list[int] = []

        async def slow_txn(compare, then, otherwise=(), **options):
            if options.get("fence_term") and not drained:
                drained.append(2)
                await w.set_mode(2, Mode.DRAINING)
            return await txn(compare, then, otherwise, **options)

        w.store.txn = slow_txn  # type: ignore[method-assign]
        assert (await unload(w)).to_broker == 3
        assert drained


@pytest.mark.parametrize("took_effect", [True, False])
async def test_an_unknown_outcome_is_looked_up(took_effect: bool) -> None:
    async with world() as w:
        await two_brokers(w)
        txn = w.store.txn
        lost: list[int] = []

        async def losing_txn(compare, then, otherwise=(), **options):
            if options.get("fence_term") and not lost:
                lost.append(1)
                if took_effect:
                    await txn(compare, then, otherwise, **options)
                raise OutcomeUnknown("the answer was lost")
            return await txn(compare, then, otherwise, **options)

        w.store.txn = losing_txn  # type: ignore[method-assign]
        move = await unload(w)
        assert (move.to_broker, move.error) == (2, "")


async def test_a_finished_move_whose_answer_was_lost_is_not_made_again() -> None:
    """Schedule: the move is written and its answer lost; by the time the record is read again broker 2 has
    the topic. Moved once more it would be back at broker 1."""
    async with world() as w:
        await two_brokers(w)
        txn = w.store.txn
        moves: list[int] = []

        async def losing_txn(compare, then, otherwise=(), **options):
            result = await txn(compare, then, otherwise, **options)
            if options.get("fence_term") and w.record(topic(1)).state is S.MOVING and not moves:
                moves.append(1)
                await until(lambda: w.record(topic(1)).owner == 2 and w.record(topic(1)).incarnation > 0)
                raise OutcomeUnknown("the answer was lost")
            return result

        w.store.txn = losing_txn  # type: ignore[method-assign]
        move = await unload(w)
        assert (move.to_broker, move.error, w.record(topic(1)).owner) == (2, "", 2)


async def test_many_at_once_are_spread_over_the_others() -> None:
    names = [topic(index) for index in range(60)]
    async with world() as w:
        await w.add(1)
        await w.create(names)
        await w.served(names)
        await w.add(2, 3)
        await w.sees(lambda: len(w.view.brokers) == 3)
        moved = await asyncio.gather(
            *(w.controller.move(name, reason="unload", timeout_ms=5000) for name in names)
        )
        assert not any(move.error for move in moved)
        assert w.view.counts() == {1: 0, 2: 30, 3: 30}
        assert not +w.controller._moves.bound
