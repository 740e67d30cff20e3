"""Batches of a writer while brokers die by SIGKILL and topics move: each message once, in order, and all of a
batch or nothing.

Each round stages a batch of several frames for topics of different brokers, and something happens on the way.
``SAVA_LONG=1`` has twenty rounds of each kind, otherwise there is one of some.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode, aio

from sava.errors import SavaError
from sava.proto import writers_pb2 as pb
from tests.cluster.trapped import TrappedBrokers
from tests.support.brokers import BrokerProcess
from tests.support.clients import Writing
from tests.support.long import IS_LONG
from tests.support.objects import batch
from tests.support.waiting import PATIENCE_S, until

ROUNDS = 20 if IS_LONG else 1
ROUND_S = 60.0
FRAMES = 4
"""Of each topic's part of a batch: a batch of 40 messages fills one."""
PER_FRAME = 40


class WriterBrokers(TrappedBrokers):
    async def prepare(self) -> BrokerProcess:
        broker = await super().prepare()
        broker.run_as("tests.cluster.writers_child", **broker._environment)
        return broker

    async def disarm(self, victim: BrokerProcess, pid: int) -> None:
        """Afterwards nobody is about to die: if the trap was met, the victim is dead."""
        try:
            self._trap.unlink()
        except FileNotFoundError:
            if victim.pid == pid:
                await victim.ended()

    async def listed(self, writer: str) -> pb.WriterInfo | None:
        client = self.running[0].client
        response = await client.call(client.writers.ListWriters, pb.ListWritersRequest(), timeout=PATIENCE_S)
        return next((each for each in response.writers if each.writer == writer), None)

    async def published(self, writer: str, number: int) -> None:
        async def is_published() -> bool:
            found = await self.listed(writer)
            return found is not None and found.batch == number and found.is_published

        await until(is_published, f"batch {number} of {writer} is published")


Case = Callable[[WriterBrokers], Awaitable[None]]


class Query:
    """What is written, and what must be in the topics in the end."""

    def __init__(self, cluster: WriterBrokers, *topics: str) -> None:
        self.cluster = cluster
        self.topics = topics
        self.writer = f"w-{topics[0]}"
        self.batch = -1
        self.expected: list[bytes] = []

    async def through(self, broker: BrokerProcess, *, run: str = "run-1") -> Writing:
        return await Writing(broker.client_url, self.writer, run=run).__aenter__()

    async def stage(self, writing: Writing, number: int, label: str = "") -> list[pb.Section]:
        """The next batch, by two tasks."""
        sections: list[pb.Section] = []
        for task in range(2):
            batches = [
                batch([self.payload(number, index, label) for index in range(first, first + PER_FRAME)])
                for first in range(
                    task * FRAMES // 2 * PER_FRAME, (task + 1) * FRAMES // 2 * PER_FRAME, PER_FRAME
                )
            ]
            sections += await writing.stage(**dict.fromkeys(self.topics, batches))
        return sections

    def payload(self, number: int, index: int, label: str = "") -> bytes:
        return b"%d/%d%s" % (number, index, label.encode()) + bytes(80)

    def expects(self, number: int, label: str = "") -> None:
        self.expected += [self.payload(number, index, label) for index in range(FRAMES * PER_FRAME)]

    async def check(self) -> None:
        """Everything is there, once and in order, in each topic."""
        async with self.cluster.sava_client(self.cluster.running) as client:
            for topic in self.topics:
                async with client.reader(f"/default/{topic}", end="latest") as reader:
                    found = [message.payload async for message in reader]
                assert found == self.expected, (topic, len(found), len(self.expected))

    async def check_whole(self, count: int) -> None:
        """So many batches, each as one attempt has staged it, the same in all topics."""
        found: list[list[bytes]] = []
        async with self.cluster.sava_client(self.cluster.running) as client:
            for topic in self.topics:
                async with client.reader(f"/default/{topic}", end="latest") as reader:
                    found.append([message.payload async for message in reader])
        assert found[0] == found[1]
        labels = [payload.rstrip(bytes(1)).decode().partition("a")[2] for payload in found[0]]
        size = FRAMES * PER_FRAME
        assert len(labels) == count * size
        for number in range(count):
            label = "a" + labels[number * size]
            expected = [self.payload(number, index, label) for index in range(size)]
            assert found[0][number * size : (number + 1) * size] == expected


async def answered(commit: asyncio.Task[pb.CommitResponse]) -> bool:
    """Whether it was answered with success; whoever was asked may be dead."""
    try:
        await commit
    except aio.AioRpcError:
        return False
    return True


async def spread_topics(cluster: WriterBrokers, first: str, second: str) -> Query:
    """The first at a broker that does not lead, the second at the leader."""
    roles = await cluster.roles()
    for topic, broker in ((first, roles.source), (second, roles.controller)):
        await cluster.create(f"/default/{topic}")
        await cluster.place(f"/default/{topic}", broker)
    return Query(cluster, first, second)


async def the_owner_of_a_topic_dies_in_the_middle_of_its_part(cluster: WriterBrokers) -> None:
    """The first frames are in its journal. It comes back, and whoever waited for it goes on behind them."""
    query = await spread_topics(cluster, "a", "b")
    for number in range(ROUNDS):
        await cluster.all_running()
        owner = await cluster.owner("/default/a")
        other = (await cluster.others("/default/a"))[number % 2]
        writing = await query.through(other)
        sections = await query.stage(writing, number)
        cluster.trap("later frame" if number % 3 < 2 else "first frame", "/default/a", owner)
        commit = asyncio.create_task(writing.commit(number, sections))
        await owner.ended()
        await owner.start()
        query.expects(number)
        if not await answered(commit):
            await writing.commit(number, sections)
        await query.check()
        await writing.__aexit__(None, None, None)


async def the_broker_that_decided_dies_and_nobody_asks_again(cluster: WriterBrokers) -> None:
    """The leader publishes it, or the next leader if it was the leader that died. Topics are at other
    brokers."""
    roles = await cluster.roles()
    for topic, broker in (("c", roles.source), ("d", roles.target)):
        await cluster.create(f"/default/{topic}")
        await cluster.place(f"/default/{topic}", broker)
    query = Query(cluster, "c", "d")
    for number in range(ROUNDS + 1):
        await cluster.all_running()
        leader = await cluster.leader()
        decider = leader if number % 2 else next(each for each in cluster.brokers if each is not leader)
        writing = await query.through(decider)
        sections = await query.stage(writing, number)
        cluster.trap("after decided", f"/writers/{query.writer}", decider)
        commit = asyncio.create_task(writing.commit(number, sections))
        await decider.ended()
        assert not await answered(commit)
        for topic in query.topics:  # those that were at the one that died, or wait for it
            if (await cluster.ownership(f"/default/{topic}")).owner == await cluster.id_of(decider):
                await decider.start()
                break
        await cluster.published(query.writer, number)
        query.expects(number)
        await query.check()
        await writing.__aexit__(None, None, None)


async def a_broker_dies_before_it_decides_and_the_driver_begins_the_batch_anew(
    cluster: WriterBrokers,
) -> None:
    """Nothing of the first attempt is ever seen: the restarted driver has other parts, and they count."""
    query = await spread_topics(cluster, "e", "f")
    for number in range(ROUNDS):
        await cluster.all_running()
        roles = await cluster.roles()
        writing = await query.through(roles.target, run=f"run-{number}-0")
        sections = await query.stage(writing, number, "first")
        cluster.trap("before decided", f"/writers/{query.writer}", roles.target)
        commit = asyncio.create_task(writing.commit(number, sections))
        await roles.target.ended()
        assert not await answered(commit)
        again = await query.through(roles.controller, run=f"run-{number}-1")
        done = await again.commit(number, await query.stage(again, number, "second"))
        assert done.decided_now
        query.expects(number, "second")
        await query.check()
        for each in (writing, again):
            await each.__aexit__(None, None, None)


async def topics_move_while_batches_are_published(cluster: WriterBrokers) -> None:
    query = await spread_topics(cluster, "g", "h")
    writing = await query.through(cluster.brokers[0])
    moving = asyncio.create_task(keep_moving(cluster, "/default/g"))
    try:
        for number in range(10 * ROUNDS):
            await writing.commit(number, await query.stage(writing, number))
            query.expects(number)
    finally:
        moving.cancel()
        moves = await asyncio.gather(moving, return_exceptions=True)
    assert isinstance(moves[0], asyncio.CancelledError), moves
    await query.check()
    assert (await cluster.ownership("/default/g")).epoch > 4  # it has moved
    await writing.__aexit__(None, None, None)


async def keep_moving(cluster: WriterBrokers, topic: str) -> None:
    while True:
        (move,) = await cluster.unload(topic)
        assert not move.error, move


async def a_finisher_dies_before_it_has_said_so(cluster: WriterBrokers) -> None:
    """Everything is published and the record does not say it: the leader finds nothing left to publish."""
    query = await spread_topics(cluster, "i", "j")
    for number in range(ROUNDS):
        await cluster.all_running()
        roles = await cluster.roles()
        writing = await query.through(roles.target)
        sections = await query.stage(writing, number)
        cluster.trap("before published", f"/writers/{query.writer}", roles.target)
        commit: asyncio.Task[Any] = asyncio.create_task(writing.commit(number, sections))
        await roles.target.ended()
        assert not await answered(commit)
        await cluster.published(query.writer, number)
        query.expects(number)
        await query.check()
        await writing.__aexit__(None, None, None)


PASSING = (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED, StatusCode.CANCELLED)
STEPS = (
    "first frame",
    "later frame",
    "before decided",
    "after decided",
    "before published",
    "after published",
)


async def whoever_dies_at_whatever_step(cluster: WriterBrokers) -> None:
    """By lot. The driver is restarted until its commit is answered, each time with a new run and other parts;
    some topic may be on the move."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    lots = random.Random(seed)
    query = await spread_topics(cluster, "k", "l")
    for number in range(2 * ROUNDS):
        await cluster.all_running()
        step, victim = lots.choice(STEPS), lots.choice(cluster.brokers)
        topic = f"/default/{lots.choice(query.topics)}"
        pid = victim.pid
        cluster.trap(step, topic if "frame" in step else f"/writers/{query.writer}", victim)
        moving = asyncio.create_task(unload_once(cluster, topic)) if lots.random() < 0.3 else None
        await commit_until_answered(query, number, lots)
        await cluster.disarm(victim, pid)
        if moving is not None:
            await moving
        await cluster.all_running()
        await query.check_whole(number + 1)


async def commit_until_answered(query: Query, number: int, lots: random.Random) -> None:
    for attempt in itertools.count():
        for broker in query.cluster.brokers:
            if not broker.is_running:
                await broker.start()
        url, run = lots.choice(query.cluster.running).client_url, f"{number}-{attempt}"
        try:
            async with Writing(url, query.writer, run=run) as writing:
                sections = await query.stage(writing, number, f"attempt {attempt}")
                await writing.commit(number, sections, timeout=PATIENCE_S)
                return
        except aio.AioRpcError as error:
            if error.code() not in PASSING:
                raise


async def unload_once(cluster: WriterBrokers, topic: str) -> None:
    """It may fail: brokers die."""
    with contextlib.suppress(SavaError, StopIteration, TimeoutError):
        await cluster.unload(topic)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        the_owner_of_a_topic_dies_in_the_middle_of_its_part,
        the_broker_that_decided_dies_and_nobody_asks_again,
        a_broker_dies_before_it_decides_and_the_driver_begins_the_batch_anew,
        topics_move_while_batches_are_published,
        a_finisher_dies_before_it_has_said_so,
        whoever_dies_at_whatever_step,
    )
}
SELECTION = [
    the_owner_of_a_topic_dies_in_the_middle_of_its_part,
    the_broker_that_decided_dies_and_nobody_asks_again,
    topics_move_while_batches_are_published,
]
GROUPS = {name: [case] for name, case in CASES.items()} if IS_LONG else {"selection": SELECTION}


@pytest.mark.timeout(60 + 5 * ROUNDS * ROUND_S)
@pytest.mark.parametrize("cases", GROUPS.values(), ids=GROUPS.keys())
async def test_each_message_is_there_once(tmp_path: Path, cases: list[Case]) -> None:
    async with WriterBrokers(3, tmp_path) as cluster:
        for case in cases:
            await cluster.all_running()
            await case(cluster)
