"""A broker dies by SIGKILL at each step of a move: the one that gives the topic up, the one that gets it, or
the one that leads.

Each case goes: a topic at *source*, a trap at the step, an order to move it to *target*. When the victim is
dead nobody helps; only where the topic has messages that nobody else has, the victim is started again. Then
the topic is served by exactly one broker, each acknowledged message is at its offset, no offset was given out
twice, and the topic can be moved again.

``SAVA_LONG=1`` tries every step with every victim; otherwise a selection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sava.errors import SavaError
from sava.proto import topics_admin_pb2 as pb
from tests.cluster.broker_child import DELETION_STEPS, MOVE_STEPS
from tests.cluster.trapped import Roles, TrappedBrokers
from tests.cluster.workload import Workload
from tests.support.brokers import BrokerProcess
from tests.support.long import IS_LONG
from tests.support.waiting import PATIENCE_S, until

CASE_S = 300.0
TAIL_UNTIL = MOVE_STEPS.index("after storage sealed")
"""Up to here the source may be the only one that knows how the topic ends."""


class Case(NamedTuple):
    kind: str
    victim: str
    step: str

    @property
    def topic(self) -> str:
        return "/default/" + "-".join((self.kind, self.victim, *self.step.split()))

    @property
    def may_need_victim(self) -> bool:
        """Only an owner keeps anything to itself, and only of a topic that somebody publishes to."""
        if self.kind == "empty" or self.victim == "controller":
            return False
        return self.victim != "target" and MOVE_STEPS.index(self.step) < TAIL_UNTIL


KINDS = ("empty", "active", "back", "deleted")
VICTIMS = ("source", "target", "controller", "leading-source")
SELECTION = (
    Case("empty", "source", "held"),
    Case("active", "source", "before sealed"),
    Case("active", "target", "after claimed"),
    Case("active", "controller", "after sealed"),
    Case("back", "target", "after taken"),
    Case("deleted", "source", "after moving"),
)
CASES = [Case(*each) for each in itertools.product(KINDS, VICTIMS, MOVE_STEPS)] if IS_LONG else SELECTION


def groups() -> dict[str, list[Case]]:
    """Cases that share a cluster, one after another."""
    found = defaultdict(list)
    for index, case in enumerate(CASES):
        found[f"{case.kind}-{case.victim}" if IS_LONG else f"selection-{index % 2}"].append(case)
    return found


@pytest.mark.timeout(len(MOVE_STEPS) * CASE_S)
@pytest.mark.parametrize("cases", groups().values(), ids=groups().keys())
async def test_a_move_survives_the_death_of_a_broker(tmp_path: Path, cases: list[Case]) -> None:
    await run_all(cases, tmp_path, run)


async def run_all(
    cases: Sequence[Case], directory: Path, run: Callable[[Case, TrappedBrokers], Awaitable[None]]
) -> None:
    """One after another, with all brokers there at the beginning of each."""
    failed: dict[Case, Exception] = {}
    async with TrappedBrokers(3, directory) as cluster:
        for case in cases:
            began = time.monotonic()
            try:
                async with asyncio.timeout(CASE_S):
                    await cluster.all_running()
                    await run(case, cluster)
                print(f"{case} took {time.monotonic() - began:.1f} s")
            except (AssertionError, SavaError, TimeoutError, ExceptionGroup) as error:
                error.add_note(f"in the case {case}")
                print(f"{case} failed: {error}")
                failed[case] = error
                if not IS_LONG:
                    raise
        if failed:
            raise ExceptionGroup(f"{len(failed)} of {len(cases)} cases failed", list(failed.values()))


async def run(case: Case, cluster: TrappedBrokers) -> None:
    roles = await cluster.roles()
    if case.victim == "leading-source":
        roles = Roles(roles.controller, roles.target, roles.controller)
    victim = {"target": roles.target, "controller": roles.controller}.get(case.victim, roles.source)
    await cluster.create(case.topic)
    if case.kind == "back":
        await cluster.place(case.topic, roles.target)
    else:
        await cluster.place(case.topic, roles.source)
    async with traffic(case, cluster, roles) as load:
        order = await kill_during_move(case, cluster, roles, victim)
        if case.kind == "deleted":
            await cluster.delete(case.topic, through=cluster.running[0])
            await expect_answered(order)
            await expect_gone(case.topic, cluster, victim)
            return
        await cluster.settle(case.topic, victim, may_need_victim=case.may_need_victim)
        await expect_answered(order)
        if load is not None:
            await load.progressed(10)
        await cluster.all_running()
        moved = await cluster.unload(case.topic)
        assert not moved[0].error, moved
        if load is not None:
            await load.progressed(10)
            await load.finish()
        else:
            await expect_offsets(case.topic, cluster, 3)


@contextlib.asynccontextmanager
async def traffic(case: Case, cluster: TrappedBrokers, roles: Roles) -> AsyncIterator[Workload | None]:
    """Producers and a consumer, if the case has any. A topic that goes back has been with its next owner
    before, whose journal still holds what it had then."""
    if case.kind in ("empty", "deleted"):
        yield None
        return
    async with cluster.sava_client() as client, Workload(client, case.topic) as load:
        await load.progressed(20)
        if case.kind == "back":
            await cluster.place(case.topic, roles.source)
            await load.progressed(20)
        yield load


async def kill_during_move(
    case: Case, cluster: TrappedBrokers, roles: Roles, victim: BrokerProcess
) -> asyncio.Task[list[pb.TopicMove]]:
    """Returns the order, when the victim is dead."""
    if case.kind == "deleted":
        async with cluster.sava_client() as client, client.producer(case.topic) as producer:
            await producer.send_many([b"deleted"] * 100)
    survivor = next(broker for broker in cluster.running if broker is not victim)
    cluster.trap(case.step, case.topic, victim)
    order = asyncio.create_task(cluster.unload(case.topic, to=roles.target, through=survivor))
    await victim.ended(timeout=PATIENCE_S)
    return order


async def expect_answered(order: asyncio.Task[Any]) -> None:
    """With its outcome, or that it cannot be told: the one that was asked may be gone."""
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(SavaError):
            await order


async def expect_offsets(topic: str, cluster: TrappedBrokers, count: int) -> None:
    async with cluster.sava_client(cluster.running) as client:
        async with client.producer(topic, linger_ms=0) as producer:
            assert [await producer.send(b"%d" % number) for number in range(count)] == list(range(count))
        async with client.reader(topic, end="latest") as reader:
            assert [int(message.payload) async for message in reader] == list(range(count))


async def expect_gone(topic: str, cluster: TrappedBrokers, victim: BrokerProcess) -> None:
    """For good, also when the victim comes back: another topic of the name starts at offset 0, and is none of
    what the victim still has."""
    await cluster.nothing_left(topic)
    await cluster.create(topic)
    await expect_offsets(topic, cluster, 3)
    await cluster.all_running()
    await cluster.place(topic, victim)
    assert (await cluster.describe(topic)).next_offset == 3
    await cluster.delete(topic, through=victim)
    await cluster.nothing_left(topic)


# -- deletions ---------------------------------------------------------------------------------


DELETION_VICTIMS = ("deleter", "owner", "leader", "leading-deleter")
DELETION_SELECTION = (
    Case("delete", "owner", "before released"),
    Case("delete", "leading-deleter", "after storage removed"),
)
DELETIONS_OF_MOVING = itertools.product(
    ("delete-moving",),
    ("owner", "leader", "leading-deleter"),
    ("before deleting", "after deleting", "after storage removed", "after removed"),
)
"""Whether there is an owner that lets go depends on who is faster."""
DELETIONS = (
    [Case("delete", *each) for each in itertools.product(DELETION_VICTIMS, DELETION_STEPS)]
    + [Case(*each) for each in DELETIONS_OF_MOVING]
    if IS_LONG
    else DELETION_SELECTION
)
ABANDONED_S = 120.0
"""A deletion whose broker has died is finished by the leader, which waits a while before it believes that."""


@pytest.mark.timeout(len(DELETIONS) * CASE_S)
async def test_a_deletion_is_finished_whoever_dies(tmp_path: Path) -> None:
    """The victim stays dead, and nobody asks a second time."""
    await run_all(DELETIONS, tmp_path, run_deletion)


async def run_deletion(case: Case, cluster: TrappedBrokers) -> None:
    owner, deleter, leader = await cluster.roles()
    if case.victim == "leading-deleter":
        deleter, leader = leader, deleter
    victim = {"owner": owner, "leader": leader}.get(case.victim, deleter)
    await cluster.create(case.topic)
    await cluster.place(case.topic, owner)
    async with cluster.sava_client() as client, client.producer(case.topic) as producer:
        await producer.send_many([b"deleted"] * 100)
    cluster.trap(case.step, case.topic, victim)
    admin = deleter.client
    request = pb.DeleteTopicRequest(name=case.topic)
    orders: list[asyncio.Task[Any]] = []
    if case.kind == "delete-moving":
        orders.append(asyncio.create_task(cluster.unload(case.topic, through=deleter)))
    orders.append(asyncio.create_task(admin.call(admin.topics.DeleteTopic, request, timeout=ABANDONED_S)))
    await victim.ended(timeout=PATIENCE_S)

    async def is_gone() -> bool:
        return await cluster.keys(f"/topics{case.topic}/") == []

    await until(is_gone, f"{case.topic} is deleted", timeout=ABANDONED_S)
    for order in orders:
        await expect_answered(order)
    await expect_gone(case.topic, cluster, victim)
