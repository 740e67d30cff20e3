"""Drains: a broker gives its topics away, some at a time, and gets none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sava.cluster import drains
from sava.cluster.drains import DrainStatus
from sava.cluster.records import BrokerMode, BrokerUnknown, Mode, MoveRefused, NotController, mode_key
from sava.metadata.errors import OutcomeUnknown
from sava.topics.names import TopicName
from tests.support.waiting import PATIENCE_S, until
from tests.unit.cluster.fake_brokers import S, World, topic, world

NAMES = [topic(index) for index in range(20)]


async def all_at_broker_1(w: World, names: list[TopicName] = NAMES) -> None:
    await w.add(1)
    await w.create(names)
    await w.served(names)
    await w.add(2, 3)
    await w.sees(lambda: len(w.view.brokers) == 3)


async def drain(w: World, broker: int = 1, **fields: object) -> list[DrainStatus]:
    mode = BrokerMode(mode=Mode.DRAINING, reason="drain", **fields)  # type: ignore[arg-type]
    async with asyncio.timeout(PATIENCE_S):
        return [status async for status in w.controller.drain(broker, mode)]


async def test_all_topics_go_to_the_others_and_the_broker_is_drained() -> None:
    async with world() as w:
        await all_at_broker_1(w)
        statuses = await drain(w)
        last = statuses[-1]
        assert (last.total, last.succeeded, last.failed, last.pending) == (20, 20, 0, 0)
        assert (last.mode, last.is_done) == (Mode.DRAINED, True)
        assert not any(status.is_done for status in statuses[:-1])
        assert w.view.counts() == {1: 0, 2: 10, 3: 10}
        await w.create([topic("new")])
        await w.served([topic("new")])
        assert w.record(topic("new")).owner != 1
        assert {w.record(name).reason for name in NAMES} == {"drain"}


async def test_no_more_than_so_many_move_at_a_time() -> None:
    async with world() as w:
        await all_at_broker_1(w)
        w.brokers[1].hangs = True
        most = 0

        def count(topics: frozenset[TopicName] | None) -> None:
            nonlocal most
            most = max(most, sum(1 for state in w.states().values() if state is S.MOVING))

        w.view.listen(count)
        draining = asyncio.create_task(drain(w, parallel=3))
        await until(lambda: most == 3)
        w.brokers[1].hangs = False
        w.brokers[1].wake()
        assert (await draining)[-1].succeeded == 20
        assert most == 3


async def test_a_move_that_fails_unexpectedly_is_given_up_and_the_drain_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Schedule: every attempt to move one topic fails with an error that no rule names. The attempts are
    counted like others; the drain ends with the rest moved, and names the topic."""
    monkeypatch.setattr(drains, "RETRY_PAUSE_S", 0.01)
    async with world() as w:
        await all_at_broker_1(w)
        real, attempts = w.controller.move, 0

        async def move(name: TopicName, **how: Any) -> Any:
            nonlocal attempts
            if name == NAMES[0]:
                attempts += 1
                raise KeyError("an error that no rule names")
            return await real(name, **how)

        monkeypatch.setattr(w.controller, "move", move)
        last = (await drain(w))[-1]
        assert (last.succeeded, last.failed, attempts) == (19, 1, 1 + drains.RETRIES)


async def test_a_dry_run_says_what_would_move() -> None:
    async with world() as w:
        await all_at_broker_1(w, [*NAMES, TopicName("system", "audit")])
        planned = w.controller.plan_drain(1, BrokerMode(exclude=("system",)))
        assert planned.topics == tuple(sorted(NAMES))
        assert (planned.total, planned.pending, planned.is_done, planned.mode) == (20, 20, True, Mode.ACTIVE)
        assert w.view.mode(1).mode is Mode.ACTIVE


async def test_a_broker_with_namespaces_left_out_is_not_drained() -> None:
    audit = TopicName("system", "audit")
    async with world() as w:
        await all_at_broker_1(w, [*NAMES, audit])
        last = (await drain(w, exclude=("system",)))[-1]
        assert (last.total, last.succeeded, last.mode, last.is_done) == (20, 20, Mode.DRAINING, True)
        assert w.record(audit).owner == 1
        last = (await drain(w, include=("system",)))[-1]
        assert (last.total, last.succeeded, last.mode) == (1, 1, Mode.DRAINED)


async def test_a_topic_that_cannot_be_moved_is_tried_again_and_then_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drains, "RETRY_PAUSE_S", 0.01)

    def fails(name: TopicName) -> str:
        return "the disk is full" if name == NAMES[3] else ""

    async with world() as w:
        await all_at_broker_1(w)
        w.brokers[1].fails = fails
        last = (await drain(w))[-1]
        assert (last.succeeded, last.failed, last.pending) == (19, 1, 0)
        assert last.failed_topics == (NAMES[3],)
        assert last.mode is Mode.DRAINING
        assert w.controller.move_failures == 1 + drains.RETRIES
        w.brokers[1].fails = lambda name: ""
        last = (await drain(w))[-1]
        assert (last.total, last.succeeded, last.mode) == (1, 1, Mode.DRAINED)


async def test_a_drain_waits_for_a_store_that_takes_no_writes_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Broker 1 cannot upload ─▶ its topics stay assigned, none counts as failed however often it is asked,
    and the status says why. The store is back ─▶ the same drain goes through."""
    monkeypatch.setattr(drains, "POSTPONED_S", 0.01)
    monkeypatch.setattr(drains, "RETRY_PAUSE_S", 0.01)
    async with world() as w:
        await w.add(1)
        await w.create(NAMES, reliable=True)
        await w.served(NAMES)
        await w.add(2, 3)
        await w.sees(lambda: len(w.view.brokers) == 3)
        w.stores_down.add(1)
        statuses: list[DrainStatus] = []

        async def watch() -> None:
            async for status in w.controller.drain(1, BrokerMode(mode=Mode.DRAINING, reason="drain")):
                statuses.append(status)  # noqa: PERF401 (others look at it meanwhile)

        watching = asyncio.create_task(watch())
        await until(lambda: any(status.waiting for status in statuses))
        await asyncio.sleep(1)  # many times as long as the pauses of all retries together
        assert set(w.states().values()) == {S.ASSIGNED}
        assert "object store" in statuses[-1].waiting
        assert (statuses[-1].failed, statuses[-1].pending) == (0, 20)
        w.stores_down.clear()
        async with asyncio.timeout(PATIENCE_S):
            await watching
        last = statuses[-1]
        assert (last.succeeded, last.failed, last.waiting, last.mode) == (20, 0, "", Mode.DRAINED)


async def test_after_its_time_no_more_moves_are_begun() -> None:
    async with world() as w:
        await all_at_broker_1(w)
        w.brokers[1].hangs = True
        draining = asyncio.create_task(drain(w, parallel=2, timeout_ms=300))
        await until(lambda: [w.record(name).state for name in NAMES].count(S.MOVING) == 2)
        await asyncio.sleep(0.4)  # its time passes
        w.brokers[1].hangs = False
        w.brokers[1].wake()
        last = (await draining)[-1]
        assert (last.succeeded, last.pending, last.mode, last.is_done) == (2, 18, Mode.DRAINING, True)


async def test_a_drain_goes_on_under_the_next_leader() -> None:
    async with world() as w:
        await all_at_broker_1(w)
        w.brokers[1].hangs = True
        draining = asyncio.create_task(drain(w, parallel=4))
        await w.sees(lambda: S.MOVING in w.states().values())
        w.leadership.now = 0
        with pytest.raises(NotController):
            await draining
        w.store.term = w.leadership.now = 2
        w.brokers[1].hangs = False
        w.brokers[1].wake()
        await w.sees(lambda: w.view.mode(1).mode is Mode.DRAINED)
        await w.served(NAMES)
        assert w.view.counts()[1] == 0


async def test_a_topic_that_a_drained_broker_turns_out_to_have_is_moved_too() -> None:
    """The assignment was decided before the drain, and is seen after it."""
    async with world() as w:
        await all_at_broker_1(w, [topic(1)])
        await w.set_mode(1, Mode.DRAINED)
        await w.sees(lambda: w.record(topic(1)).owner in (2, 3))
        assert w.view.mode(1).mode is Mode.DRAINED


async def test_a_broker_that_is_activated_while_it_is_drained_keeps_the_rest() -> None:
    async with world() as w:
        await all_at_broker_1(w)
        w.brokers[1].hangs = True
        draining = asyncio.create_task(drain(w, parallel=2))
        await w.sees(lambda: S.MOVING in w.states().values())
        assert not await w.controller.activate(1, "a mistake")
        last = (await draining)[-1]
        assert (last.mode, last.is_done) == (Mode.ACTIVE, True)
        w.brokers[1].hangs = False
        w.brokers[1].wake()
        await w.served(NAMES)
        assert w.view.counts()[1] >= 18
        assert await w.controller.activate(1, "again")
        assert w.view.mode(1).reason == "a mistake"


async def test_refusals() -> None:
    async with world() as w:
        await w.add(1)
        await w.sees(lambda: 1 in w.view.brokers)
        with pytest.raises(BrokerUnknown):
            await drain(w, 9)
        with pytest.raises(BrokerUnknown):
            w.controller.plan_drain(9, BrokerMode())
        with pytest.raises(BrokerUnknown):
            await w.controller.activate(9, "")
        with pytest.raises(MoveRefused, match="no other broker is active"):
            await drain(w, 1)
        await w.add(2)
        await w.sees(lambda: 2 in w.view.brokers)
        assert (await drain(w, 1))[-1].mode is Mode.DRAINED
        with pytest.raises(MoveRefused, match="no other broker is active"):
            await drain(w, 2)
        w.leadership.now = 0
        with pytest.raises(NotController):
            await drain(w, 2)


async def test_of_two_brokers_that_are_drained_at_once_one_stays() -> None:
    async with world() as w:
        await w.add(1, 2)
        await w.sees(lambda: len(w.view.brokers) == 2)
        results = await asyncio.gather(drain(w, 1), drain(w, 2), return_exceptions=True)
        assert sorted(isinstance(result, MoveRefused) for result in results) == [False, True]


async def test_the_topics_of_a_leaving_broker_go_to_others() -> None:
    """None come to it.

    SIGTERM ─▶ its registration says that it leaves ─▶ the leader moves its topics. No mode is written: the
    next life of the broker is an active one."""
    async with world() as w:
        await all_at_broker_1(w)
        await w.brokers[1].leave()
        await until(lambda: not w.view.counts()[1])
        await w.served(NAMES)
        assert w.view.counts() == {1: 0, 2: 10, 3: 10}
        await w.create([topic("new")])
        await w.served([topic("new")])
        assert w.record(topic("new")).owner != 1
        assert w.view.mode(1).mode is Mode.ACTIVE
        await w.brokers[1].die()
        await w.brokers[1].start()
        await w.sees(lambda: len(w.view.active) == 3)
        names = [topic(f"later-{index}") for index in range(6)]
        await w.create(names)
        await w.served(names)
        assert 1 in {w.record(name).owner for name in names}


async def test_a_broker_that_leaves_last_keeps_its_topics() -> None:
    """The others leave too: there is no broker to move them to, and none is asked to hold its publishers."""
    async with world() as w:
        await all_at_broker_1(w)
        for broker in (2, 3, 1):
            await w.brokers[broker].leave()
        await w.sees(lambda: not w.view.active)
        await asyncio.sleep(0.5)  # time in which nothing may happen
        assert w.view.counts()[1] == 20
        assert S.MOVING not in set(w.states().values())


async def test_a_drain_whose_answer_is_lost_is_found_and_goes_on() -> None:
    """Schedule: the leader writes that broker 1 drains; the write takes effect and its answer is lost."""
    async with world() as w:
        await all_at_broker_1(w, NAMES[:2])
        txn = w.store.txn
        lost: list[str] = []

        async def losing_txn(compare, then, otherwise=(), **options):
            result = await txn(compare, then, otherwise, **options)
            if not lost and then[0].key == mode_key(1):
                lost.append(then[0].key)
                raise OutcomeUnknown("the answer was lost")
            return result

        w.store.txn = losing_txn  # type: ignore[method-assign]
        assert (await drain(w))[-1].mode is Mode.DRAINED
        assert lost
