"""Much at once, and many times: moves, drains, topics that come and go while brokers do.

``SAVA_LONG=1`` makes the numbers larger.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sava.client import Client, Consumer
from sava.errors import SavaError
from sava.proto import topics_admin_pb2 as pb
from tests.cluster.trapped import TrappedBrokers
from tests.cluster.workload import Workload
from tests.compat.programs import Program
from tests.support.brokers import BrokerProcess, Brokers
from tests.support.long import IS_LONG, only_long
from tests.support.waiting import PATIENCE_S, until

MOVES = 200 if IS_LONG else 15
DRAINED = 200 if IS_LONG else 40
DRAIN_S = 20.0
FLEETING = 500 if IS_LONG else 60
LONG_S = 600.0
TOPIC = "/default/orders"


@pytest.fixture
def chance() -> random.Random:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


async def publish(client: Client, topic: str, numbers: range) -> None:
    """Each is at the offset that is its number."""
    async with client.producer(topic, linger_ms=0) as producer:
        for number in numbers:
            assert await producer.send(b"%d" % number) == number


async def take(consumer: Consumer, count: int) -> list[int]:
    """Receive and ack so many."""
    numbers: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        async for message in consumer:
            numbers.append(int(message.payload))
            assert message.offset == numbers[-1]
            await consumer.ack(message)
            if len(numbers) == count:
                await consumer.flush()
                return numbers
    raise AssertionError("the consumer ended")


async def read(client: Client, topic: str) -> list[int]:
    async with client.reader(topic, end="latest") as reader:
        return [int(message.payload) async for message in reader]


# -- offsets go on -----------------------------------------------------------------------------


async def test_a_consumer_reads_on_across_segments_and_the_next_journal(trio: Brokers) -> None:
    """0..21 are published and 0..6 acked, then the topic moves: 7..21 come from segments, and 22.. from the
    journal of the next owner, to the same subscription, in order."""
    await trio.create(TOPIC)
    async with trio.sava_client() as client:
        await publish(client, TOPIC, range(22))
        async with client.consumer(TOPIC, subscription="s", type="exclusive") as consumer:
            assert await take(consumer, 7) == list(range(7))
        (move,) = await trio.unload(TOPIC)
        assert (move.error, move.next_offset) == ("", 22)
        async with client.consumer(TOPIC, subscription="s", type="exclusive") as consumer:
            assert await take(consumer, 15) == list(range(7, 22))
            await publish(client, TOPIC, range(22, 30))
            assert await take(consumer, 8) == list(range(22, 30))


async def test_a_journal_of_long_ago_is_not_taken_for_the_end(trio: Brokers) -> None:
    """A→B→A, and on: each owner's journal still holds what it had when it was the owner before."""
    await trio.create(TOPIC)
    first, second = trio.brokers[0], trio.brokers[1]
    async with trio.sava_client() as client:
        for turn, owner in enumerate((first, second) * 3):
            if await trio.owner(TOPIC) is not owner:
                (move,) = await trio.unload(TOPIC, to=owner)
                assert (move.error, move.next_offset) == ("", 10 * turn)
            await publish(client, TOPIC, range(10 * turn, 10 * turn + 10))
        assert await read(client, TOPIC) == list(range(60))


@only_long("brokers, for a while")
async def test_several_moves_in_a_row_without_messages(trio: Brokers) -> None:
    await trio.create(TOPIC)
    async with trio.sava_client() as client:
        await publish(client, TOPIC, range(5))
        for owner in (*trio.brokers, *trio.brokers):
            if await trio.owner(TOPIC) is not owner:
                (move,) = await trio.unload(TOPIC, to=owner)
                assert (move.error, move.next_offset) == ("", 5)
        await publish(client, TOPIC, range(5, 10))
        assert await read(client, TOPIC) == list(range(10))


@only_long("brokers, for a while")
async def test_a_name_starts_anew_after_moves_and_a_deletion(tmp_path: Path) -> None:
    """Every broker had the deleted topic once, and some of it is in every journal; the topic of the same name
    begins at 0 wherever it goes, and the subscription of the old one is gone."""
    async with TrappedBrokers(3, tmp_path) as cluster, cluster.sava_client() as client:
        for _ in range(2):
            await cluster.create(TOPIC)
            assert (await cluster.describe(TOPIC)).subscriptions == []
            for turn, owner in enumerate(cluster.brokers):
                await cluster.place(TOPIC, owner)
                await publish(client, TOPIC, range(5 * turn, 5 * turn + 5))
            async with client.consumer(TOPIC, subscription="s") as consumer:
                assert await take(consumer, 15) == list(range(15))
            await cluster.delete(TOPIC, through=cluster.brokers[0])
            await cluster.nothing_left(TOPIC)


@pytest.mark.timeout(LONG_S)
async def test_a_topic_that_is_deleted_while_it_moves_is_gone(tmp_path: Path, chance: random.Random) -> None:
    """At any point of the move, through a broker that has nothing to do with it, or has."""
    async with TrappedBrokers(3, tmp_path) as cluster, cluster.sava_client() as client:
        for _ in range(MOVES):
            await cluster.create(TOPIC)
            await publish(client, TOPIC, range(3))
            move = asyncio.create_task(cluster.unload(TOPIC))
            await asyncio.sleep(chance.uniform(0, 0.04))
            await cluster.delete(TOPIC, through=chance.choice(cluster.brokers))
            with contextlib.suppress(SavaError):
                await move
            await cluster.nothing_left(TOPIC)


# -- moves -------------------------------------------------------------------------------------


@only_long("brokers, for a while")
@pytest.mark.timeout(LONG_S)
async def test_many_moves_under_load(trio: Brokers) -> None:
    await trio.create(TOPIC)
    async with trio.sava_client() as client, Workload(client, TOPIC) as load:
        for _ in range(MOVES):
            await load.progressed(5)
            (move,) = await trio.unload(TOPIC)
            assert not move.error
        await load.progressed(5)
        await load.finish()
        print(f"{MOVES} moves, longest wait {load.longest_wait_s:.2f} s, {len(load.acked)} messages")


@only_long("stops and starts brokers for a while")
@pytest.mark.timeout(LONG_S)
async def test_a_broker_that_stood_still_continues_with_its_producers(
    tmp_path: Path,
) -> None:
    """SIGSTOP in the midst of traffic, until the others take it for gone. Nobody else can have the topic; the
    broker wakes up, finds that its right is over, and takes the topic up again. Whoever repeats what was on
    its way then is recognised: nothing is there twice, and nobody is told that it cannot be known."""
    async with TrappedBrokers(3, tmp_path) as cluster:
        await cluster.create(TOPIC)
        async with cluster.sava_client() as client, Workload(client, TOPIC, interval_s=0.001) as load:
            for _ in range(MOVES // 5):
                await load.progressed(50)
                owner = await cluster.owner(TOPIC)
                owner.pause()
                await asyncio.sleep(2.5)  # longer than it is registered for
                owner.resume()
                await cluster.served(TOPIC)
            await load.progressed(50)
            await load.finish()


@pytest.mark.timeout(LONG_S)
async def test_the_published_client_survives_moves_and_deaths_of_owners(
    tmp_path: Path, chance: random.Random
) -> None:
    """Producer and consumer know one broker. The topic moves between the other two, and in every round its
    owner is killed in the midst of it, with messages that only it has, and started again."""
    async with TrappedBrokers(3, tmp_path) as cluster:
        near, *others = cluster.brokers
        await cluster.create(TOPIC)
        async with contextlib.AsyncExitStack() as stack:
            programs = [
                Program("reconnect", what, near.client_url, topic=TOPIC) for what in ("consume", "produce")
            ]
            consumer = await stack.enter_async_context(programs[0])
            assert await consumer.line() == "subscribed"
            producer = await stack.enter_async_context(programs[1])
            received: list[str] = []
            receiving = asyncio.create_task(_note_lines(consumer, received))
            assert await producer.line() == "under way"
            for turn in range(max(MOVES // 10, 2)):
                owner = others[turn % 2]
                await _unload_to(cluster, owner)
                await _received_more(received, 20)
                await asyncio.sleep(chance.uniform(0, 0.3))
                owner.kill()
                await owner.ended()
                await owner.start()
                await cluster.registered()
                await cluster.served(TOPIC)
                await _received_more(received, 20)
            producer.tell("stop")
            answered = {str(number) for number in await producer.result()}

            async def has_all() -> bool:
                return answered <= set(received)

            await until(has_all, "everything that was answered has arrived", timeout=PATIENCE_S)
            receiving.cancel()
        async with cluster.sava_client() as client:
            assert answered <= {str(number) for number in await read(client, TOPIC)}


async def _note_lines(program: Program, lines: list[str]) -> None:
    while True:
        lines.append(str(await program.line(timeout=120)))


async def _received_more(lines: list[str], count: int) -> None:
    goal = len(lines) + count

    async def has_more() -> bool:
        return len(lines) >= goal

    await until(has_more, f"{count} more messages", timeout=PATIENCE_S)


async def _unload_to(cluster: Brokers, target: BrokerProcess) -> None:
    if await cluster.owner(TOPIC) is not target:
        (move,) = await cluster.unload(TOPIC, to=target, through=cluster.brokers[0])
        assert not move.error, move.error


# -- drains ------------------------------------------------------------------------------------


@only_long("brokers, for a while")
@pytest.mark.timeout(LONG_S)
async def test_a_broker_with_many_topics_is_drained_under_load(trio: Brokers) -> None:
    full, *others = trio.brokers
    for broker in others:
        await trio.command("brokers", "drain", str(await trio.id_of(broker)))
    topics = [f"/default/topic-{number}" for number in range(DRAINED)]
    for topic in topics:
        await trio.create(topic)
    assert {each.broker_id for each in (await trio.list_topics()).values()} == {await trio.id_of(full)}
    for broker in others:
        await trio.command("brokers", "activate", str(await trio.id_of(broker)))
    async with trio.sava_client() as client, contextlib.AsyncExitStack() as stack:
        await _publish_to_all(client, topics)
        loads = [await stack.enter_async_context(Workload(client, topic)) for topic in topics[:4]]
        await asyncio.gather(*(load.progressed(10) for load in loads))
        began = time.monotonic()
        await trio.command("brokers", "drain", str(await trio.id_of(full)))
        took = time.monotonic() - began
        owners = [each.broker_id for each in (await trio.list_topics()).values()]
        assert await trio.id_of(full) not in owners
        assert took < DRAIN_S
        await asyncio.gather(*(load.progressed(10) for load in loads))
        await asyncio.gather(*(load.finish() for load in loads))
        print(f"{DRAINED} topics in {took:.1f} s, longest wait {max(x.longest_wait_s for x in loads):.2f} s")
        for topic in topics[4::10]:
            assert await read(client, topic) == list(range(10))


async def _publish_to_all(client: Client, topics: Sequence[str]) -> None:
    """To those without a load, ten messages each."""
    for topic in topics[4:]:
        async with client.producer(topic) as producer:
            await producer.send_many([b"%d" % number for number in range(10)])


# -- topics and brokers come and go ---------------------------------------------------------------


@only_long("stops and starts brokers for a while")
@pytest.mark.timeout(LONG_S)
async def test_nothing_is_left_of_topics_that_came_and_went_with_brokers(
    tmp_path: Path, chance: random.Random
) -> None:
    async with TrappedBrokers(3, tmp_path) as cluster:
        numbers = iter(range(FLEETING))
        kept: list[str] = []
        is_over = asyncio.Event()
        leaving = asyncio.create_task(_come_and_go(cluster, is_over, chance))
        workers = [_create_and_delete(cluster, numbers, kept) for _ in range(4)]
        try:
            await asyncio.gather(*workers)
        finally:
            is_over.set()
            await leaving
        await cluster.all_running()
        assert len(kept) == FLEETING // 10
        async with cluster.sava_client() as client:
            for topic in kept:
                await cluster.served(topic)
                assert await read(client, topic) == list(range(5))
        await until(lambda: _only_left(cluster, set(kept)), "nothing else is left", timeout=60)


async def _come_and_go(cluster: TrappedBrokers, is_over: asyncio.Event, chance: random.Random) -> None:
    """One broker after another stops and starts again, the leader too."""
    for broker in itertools.cycle(cluster.brokers):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.uniform(0.2, 1.0)):
                await is_over.wait()
        if is_over.is_set():
            return
        assert await broker.stop() == 0
        await broker.start()
        await cluster.registered()


async def _create_and_delete(cluster: TrappedBrokers, numbers: Iterator[int], kept: list[str]) -> None:
    """Through whoever is there; what a broker could not answer is asked of the next."""
    async with cluster.sava_client() as client:
        for number in numbers:
            topic = f"/default/topic-{number}"
            await _ask(cluster, "CreateTopic", pb.CreateTopicRequest(name=topic, reliable=True), "exists")
            async with client.producer(topic, name="p", linger_ms=0, timeout=60) as producer:
                for payload in range(5):
                    await producer.send(b"%d" % payload)
            if number % 10 == 0:
                kept.append(topic)
            else:
                await _ask(cluster, "DeleteTopic", pb.DeleteTopicRequest(name=topic), "does not exist")


async def _ask(cluster: Brokers, method: str, request: object, is_done: str) -> None:
    """``is_done``: what the answer says if an earlier attempt, whose answer was lost, has done it."""

    async def has_answered() -> bool:
        client = random.choice(cluster.running).client
        try:
            await client.call(getattr(client.topics, method), request, timeout=PATIENCE_S)
        except SavaError as error:
            if is_done not in str(error):
                raise
        return True

    await until(has_answered, f"{method} {request}", timeout=60)


async def _only_left(cluster: TrappedBrokers, topics: set[str]) -> bool:
    for prefix, depth in (("/topics/", 2), ("/storage/topics/", 3)):
        found = {"/" + "/".join(key.split("/")[depth : depth + 2]) for key in await cluster.keys(prefix)}
        if found != topics:
            print(prefix, sorted(found - topics), sorted(topics - found))
            return False
    root = cluster.segments / "topics"
    objects = {f"/{'/'.join(path.relative_to(root).parts[:2])}" for path in root.rglob("*.parquet")}
    if not objects <= topics:
        print("objects", sorted(objects - topics))
    return objects <= topics
