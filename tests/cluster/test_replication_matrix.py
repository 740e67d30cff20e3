"""What is created, copied, said and counted, for whatever there is of a topic here and at the remote: real
clusters of one broker each, and a link as a runner has it, but for Spark.

Four clusters send to west, one for each pair of settings: may replication create topics, and which policy
holds where partitions differ. Each has a namespace of its own, which west has too. The topics of ROWS are
made before the link starts, so that all of them are settled side by side; each test looks at one.

With SAVA_LONG=1 links are those of real runners, on Spark.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import pytest

from sava.client.blocking import Client
from sava.client.loop_thread import LoopThread
from sava.errors import SavaError
from sava.pipeline.replicate import background
from sava.proto import admin_pb2, topics_admin_pb2
from sava.proto import replication_pb2 as pb
from sava.topics.names import TopicName
from sava.topics.specs import spec_key
from tests.support.brokers import Standalone
from tests.support.long import IS_LONG
from tests.support.replication import Gate, RunningLink, Side, Told
from tests.support.waiting import PATIENCE_S, wait_until

T = TypeVar("T")

WAIT_S = 150.0 if IS_LONG else 30.0
COUNT = 5
CREATES = "SAVA__REPLICATION__CREATE_TOPIC_TO_REMOTE_CLUSTER"
MISMATCH = "SAVA__REPLICATION__PARTITION_MISMATCH_POLICY"
MODES = {
    "creates": {CREATES: "true", MISMATCH: "pip370"},
    "creates-strictly": {CREATES: "true", MISMATCH: "strict"},
    "waits": {CREATES: "false", MISMATCH: "pip370"},
    "waits-strictly": {CREATES: "false", MISMATCH: "strict"},
}


class Row(NamedTuple):
    name: str
    here: int
    """Partitions; 0: a plain topic."""
    there: int | None
    """None: no topic."""
    copied: tuple[int, ...]
    copied_strictly: tuple[int, ...]

    @property
    def width(self) -> int:
        return max(1, self.here)


ROWS = (
    Row("two-partitions-here-and-nothing-there", 2, None, (0, 1), (0, 1)),
    Row("two-partitions-here-and-one-there", 2, 1, (0,), ()),
    Row("two-partitions-here-and-two-there", 2, 2, (0, 1), (0, 1)),
    Row("two-partitions-here-and-three-there", 2, 3, (0, 1), ()),
    Row("two-partitions-here-and-a-plain-topic-there", 2, 0, (), ()),
    Row("plain-here-and-plain-there", 0, 0, (0,), (0,)),
    Row("plain-here-and-nothing-there", 0, None, (0,), (0,)),
    Row("plain-here-and-one-partition-there", 0, 1, (), ()),
    Row("plain-here-and-two-partitions-there", 0, 2, (), ()),
)


def parts(topic: str, partitions: int) -> list[str]:
    """What brokers call its partitions."""
    return [f"{topic}-part-{number}" for number in range(partitions)] or [topic]


def names(topic: str, partitions: int) -> list[str]:
    """All that is listed of it."""
    return [topic, *parts(topic, partitions)] if partitions else [topic]


def payloads(name: str, start: int = 0, count: int = COUNT) -> list[str]:
    return [f"{name} {number}" for number in range(start, start + count)]


class Stops(Protocol):
    def stop(self) -> object: ...


class Source:
    """A cluster that sends to west, through a gate."""

    def __init__(
        self, mode: str, broker: Standalone, west: Side, loop: LoopThread, start: Callable[[Side], Stops]
    ) -> None:
        """``start``: a link of the cluster."""
        self.mode = mode
        self.namespace = mode
        self.here, self.west = Side(broker), west
        self.is_strict, self.may_create = mode.endswith("strictly"), mode.startswith("creates")
        self._loop = loop
        self.gate = Gate(west.service)
        self._start = start
        self._link: Stops | None = None

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    def topic(self, name: str) -> str:
        return f"/{self.namespace}/{name}"

    def begin(self) -> None:
        self.do(self._begin())
        for row in ROWS:
            self.publish(self.topic(row.name), row.here)
        self.do(self.here.replicate(self.namespace))
        self._link = self._start(self.here)

    async def _begin(self) -> None:
        await asyncio.gather(self.here.ready(), self.west.ready(), self.gate.open())
        await asyncio.gather(self.here.namespace(self.namespace), self.west.namespace(self.namespace))
        await self.here.add("west", self.gate.service_address)
        for row in ROWS:
            await self.here.create(self.topic(row.name), row.here)
            if row.there is not None:
                await self.west.create(self.topic(row.name), row.there)

    def end(self) -> None:
        if self._link is not None:
            self._link.stop()
        self.do(self.gate.close())

    # -- what happens --------------------------------------------------------------------------

    def create(self, name: str, here: int, there: int | None = None) -> str:
        topic = self.topic(name)
        if there is not None:
            self.do(self.west.create(topic, there))
        self.do(self.here.create(topic, here))
        return topic

    def publish(self, topic: str, partitions: int, start: int = 0) -> None:
        for name in parts(topic, partitions):
            self.here.publish(name, payloads(name, start))

    # -- what comes of it ----------------------------------------------------------------------

    def status(self, topic: str) -> pb.LinkTopic:
        found = self.do(self.here.status(topic))
        return found[0] if found else pb.LinkTopic()

    def reached(self, condition: Callable[[], bool], what: Callable[[], object]) -> None:
        wait_until(condition, what, timeout=WAIT_S, poll_s=0.1)

    def settled(self, topic: str, *states: str) -> pb.LinkTopic:
        """Its status, as soon as its partitions are in these states; 'copied': active or idle."""

        def found() -> list[str]:
            shown = {"active": "copied", "idle": "copied"}
            return [shown.get(each.state, each.state) for each in self.status(topic).partitions]

        self.reached(lambda: found() == list(states), lambda: (topic, states, self.status(topic)))
        return self.status(topic)

    def arrived(self, name: str, expected: list[str]) -> None:
        self.reached(
            lambda: len(self.west.payloads(name)) >= len(expected), lambda: (name, self.west.payloads(name))
        )
        assert self.west.payloads(name) == expected

    def listed(self, topic: str) -> list[str]:
        """What west has of it."""
        found = self.do(self.west.topics(self.namespace))
        return sorted(each for each in found if each == topic or each.startswith(f"{topic}-part-"))

    def counted(self, topic: str) -> tuple[float, float]:
        """As not copied, by both names of the figure."""
        labels = (
            f'{{cluster="{self.mode}",namespace="{self.namespace}",remote_cluster="west",topic="{topic}"}}'
        )
        metrics = self.do(self.here.metrics())
        return (
            metrics[f"sava_replication_disconnected_count{labels}"],
            metrics[f"pulsar_replication_disconnected_count{labels}"],
        )


class World:
    """West, and the clusters that send to it, each started when it is first asked for."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._loop = LoopThread("clusters")
        self._stack.callback(self._loop.close)
        self.told = stack.enter_context(Told())
        self.west = Side(self._start("west", {}))
        self._sources: dict[str, Source] = {}

    def _start(self, name: str, environment: dict[str, str]) -> Standalone:
        directory = self._directory / name
        directory.mkdir()
        broker = Standalone(directory, SAVA__CLUSTER_NAME=name, **environment)
        return self._stack.enter_context(broker)

    def source(self, mode: str) -> Source:
        if mode not in self._sources:
            start = self._runner if IS_LONG else RunningLink
            source = Source(mode, self._start(mode, MODES[mode]), self.west, self._loop, start)
            self._sources[mode] = source
            self._stack.callback(source.end)
            source.begin()
        return self._sources[mode]

    def _runner(self, side: Side) -> Stops:
        from tests.spark.runner_process import RunnerProcess

        directory = self._directory / f"runner-{side.broker.port}"
        directory.mkdir()
        runner = RunnerProcess(directory, side.broker.admin, "runner")
        self._stack.callback(runner.sweep)
        self.told.files.append(runner.log)
        return runner


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        # Most of the time would be spent waiting for the next look at the remote.
        patch.setattr(background, "DESCRIBE_S", 0.3)
        yield World(tmp_path_factory.mktemp("clusters"), stack)


@pytest.fixture
def creates(world: World) -> Source:
    return world.source("creates")


@pytest.fixture
def creates_strictly(world: World) -> Source:
    return world.source("creates-strictly")


@pytest.fixture
def waits(world: World) -> Source:
    return world.source("waits")


@pytest.fixture
def waits_strictly(world: World) -> Source:
    return world.source("waits-strictly")


# -- what there is when copying starts ---------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_there_is_decides(world: World, mode: str, row: Row) -> None:
    source = world.source(mode)
    topic = source.topic(row.name)
    copied = row.copied_strictly if source.is_strict else row.copied
    is_awaited = row.there is None and not source.may_create
    if is_awaited:
        check_awaited(source, world.told, topic, row)
        copied = tuple(range(row.width))

    held = [number for number in range(row.width) if number not in copied]
    states = ["partition_mismatch" if number in held else "copied" for number in range(row.width)]
    status = source.settled(topic, *states)
    assert (status.connected_count, status.disconnected_count) == (len(copied), len(held))
    assert source.counted(topic) == (len(held), len(held))
    there = row.there if row.there is not None else row.here
    assert source.listed(topic) == names(topic, there)
    for number, name in enumerate(parts(topic, there)):
        here = parts(topic, row.here)[number] if number in copied else ""
        source.arrived(name, payloads(here) if here else [])
    source.reached(
        lambda: all(source.status(topic).partitions[number].position == COUNT for number in copied),
        lambda: source.status(topic),
    )
    status = source.status(topic)
    for number in copied:
        each = status.partitions[number]
        assert (each.position, each.backlog, each.messages, each.reason) == (COUNT, 0, COUNT, "")
    for number in held:
        each = status.partitions[number]
        assert (each.position, each.backlog, each.messages) == (0, COUNT, 0)
        assert "sava topics" in each.reason
        assert each.backlog_seconds > 0
    lines = world.told.of(topic)
    is_created = row.there is None and source.may_create
    created = [line for line in lines if " replication: created " in line]
    assert created == (
        [f"INFO replication: created topic={topic} remote=west partitions={row.here}"] if is_created else []
    )
    errors = {line for line in lines if line.startswith("ERROR") and "partition_mismatch" in line}
    assert len(errors) == (1 if held else 0)  # it is said again every minute
    for error in errors:
        assert f"partitions={','.join(map(str, held))} state=partition_mismatch" in error


def check_awaited(source: Source, told: Told, topic: str, row: Row) -> None:
    """It is not created, neither by its creation here, nor by the policy, nor by copying; as soon as somebody
    creates it, what was published meanwhile comes, in order."""
    status = source.settled(topic, *["waiting_remote_topic"] * row.width)
    assert status.disconnected_count == row.width
    assert source.counted(topic) == (row.width, row.width)
    assert source.listed(topic) == []
    assert all("sava topics create" in each.reason and each.backlog == COUNT for each in status.partitions)
    (error,) = {line for line in told.of(topic) if line.startswith("ERROR")}
    assert "state=waiting_remote_topic" in error
    source.do(source.west.create(topic, row.here))


# -- what happens later ------------------------------------------------------------------------


def test_a_topic_created_under_the_policy_is_created_there_and_copied(creates: Source) -> None:
    topic = creates.create("later", 3)
    creates.publish(topic, 3)
    creates.settled(topic, "copied", "copied", "copied")
    for name in parts(topic, 3):
        creates.arrived(name, payloads(name))


def test_creation_by_producers_and_by_replication_are_independent(waits: Source) -> None:
    topic = waits.topic("by-a-producer")
    waits.here.publish(topic, payloads(topic))
    waits.settled(topic, "waiting_remote_topic")
    assert waits.listed(topic) == []


@pytest.mark.parametrize("mode", ["creates", "waits", "waits-strictly"])
def test_partitions_that_are_added_here_are_added_there(world: World, mode: str) -> None:
    source = world.source(mode)
    topic = source.create("grows", 2, 2)
    source.publish(topic, 2)
    source.settled(topic, "copied", "copied")
    source.do(source.here.grow(topic, 4))
    source.publish(topic, 4, COUNT)
    source.settled(topic, "copied", "copied", "copied", "copied")
    assert source.listed(topic) == names(topic, 4)
    for number, name in enumerate(parts(topic, 4)):
        source.arrived(name, payloads(name, 0, 2 * COUNT) if number < 2 else payloads(name, COUNT))
    assert f"INFO replication: grown topic={topic} remote=west partitions=4" in world.told.of(topic)


def test_partitions_that_are_added_there_get_nothing(creates: Source) -> None:
    topic = creates.create("grows-there", 2, 2)
    creates.settled(topic, "copied", "copied")
    creates.do(creates.west.grow(topic, 3))
    creates.publish(topic, 2)
    for name in parts(topic, 2):
        creates.arrived(name, payloads(name))
    assert creates.settled(topic, "copied", "copied").disconnected_count == 0
    assert creates.west.payloads(f"{topic}-part-2") == []


def test_partitions_that_are_added_there_stop_a_strict_link(creates_strictly: Source) -> None:
    source = creates_strictly
    topic = source.create("grows-there", 2, 2)
    source.settled(topic, "copied", "copied")
    source.do(source.west.grow(topic, 3))
    status = source.settled(topic, "partition_mismatch", "partition_mismatch")
    assert [each.disconnects for each in status.partitions] == [1, 1]
    assert source.counted(topic) == (2, 2)
    source.publish(topic, 2)
    source.do(source.here.grow(topic, 3))
    source.settled(topic, "copied", "copied", "copied")
    for name in parts(topic, 2):
        source.arrived(name, payloads(name))


def test_partitions_that_are_missing_there_wait_and_the_others_are_copied(creates: Source) -> None:
    topic = creates.topic("holes")
    remove_partition(creates, topic)
    creates.do(creates.here.create(topic, 3))
    creates.publish(topic, 3)
    status = creates.settled(topic, "copied", "partition_mismatch", "copied")
    assert "no partition 1" in status.partitions[1].reason
    assert creates.counted(topic) == (1, 1)
    for number in (0, 2):
        name = f"{topic}-part-{number}"
        creates.arrived(name, payloads(name))


def test_partitions_that_are_missing_there_stop_a_strict_link(waits_strictly: Source) -> None:
    topic = waits_strictly.topic("holes")
    remove_partition(waits_strictly, topic)
    waits_strictly.do(waits_strictly.here.create(topic, 3))
    waits_strictly.settled(topic, *["partition_mismatch"] * 3)
    assert waits_strictly.counted(topic) == (3, 3)


def remove_partition(source: Source, topic: str) -> None:
    """West has partitions 0 and 2 of the topic, as after a creation that was not finished."""
    source.do(source.west.create(topic, 3))
    key = spec_key(TopicName.parse(f"{topic}-part-1"))
    source.do(source.west.call("meta", "Delete", admin_pb2.DeleteRequest(key=key)))


@pytest.mark.parametrize("mode", ["creates", "waits"])
def test_a_topic_that_is_deleted_there_stays_deleted_until_somebody_asks(world: World, mode: str) -> None:
    source = world.source(mode)
    topic = source.create("deleted", 0, 0)
    source.publish(topic, 0)
    source.arrived(topic, payloads(topic))
    source.settled(topic, "copied")
    source.do(source.west.delete(topic))
    status = source.settled(topic, "remote_deleted")
    assert (status.is_tombstone, status.disconnected_count) == (True, 1)
    assert "sava replication recreate" in status.partitions[0].reason
    source.publish(topic, 0, COUNT)
    assert source.listed(topic) == []

    # Another one of the same name is somebody else's.
    source.do(source.west.create(topic))
    source.reached(lambda: source.status(topic).partitions[0].backlog == COUNT, lambda: source.status(topic))
    assert source.west.payloads(topic) == []
    assert source.status(topic).partitions[0].state == "remote_deleted"

    source.do(source.here.recreate(topic))
    source.arrived(topic, payloads(topic, 0, 2 * COUNT))
    assert source.settled(topic, "copied").is_tombstone is False


def test_a_topic_that_is_deleted_there_is_created_again_when_somebody_asks(creates: Source) -> None:
    topic = creates.create("deleted-and-created", 2)
    creates.publish(topic, 2)
    creates.settled(topic, "copied", "copied")
    for name in parts(topic, 2):
        creates.arrived(name, payloads(name))
    creates.do(creates.west.delete(topic))
    creates.settled(topic, "remote_deleted", "remote_deleted")
    creates.do(creates.here.recreate(topic))
    creates.settled(topic, "copied", "copied")
    for name in parts(topic, 2):
        creates.arrived(name, payloads(name))


def test_a_deleted_topic_leaves_its_copy_and_a_new_one_comes_behind(
    creates: Source,
) -> None:
    topic = creates.create("deleted-here", 0)
    creates.publish(topic, 0)
    creates.settled(topic, "copied")
    creates.arrived(topic, payloads(topic))
    creates.do(creates.here.delete(topic))
    creates.reached(lambda: not creates.status(topic).topic, lambda: "it is not replicated any more")
    creates.do(creates.here.create(topic))
    creates.here.publish(topic, ["anew"])
    creates.arrived(topic, [*payloads(topic), "anew"])


def test_a_topic_that_is_deleted_here_with_a_backlog_is_forgotten(waits: Source, world: World) -> None:
    topic = waits.create("backlog", 0)
    waits.publish(topic, 0)
    waits.settled(topic, "waiting_remote_topic")
    waits.do(waits.here.delete(topic))
    waits.reached(lambda: not waits.status(topic).topic, lambda: "it is not replicated any more")
    waits.do(waits.west.create(topic))
    other = waits.create("after-the-backlog", 0, 0)
    waits.publish(other, 0)
    waits.arrived(other, payloads(other))
    assert waits.west.payloads(topic) == []


@pytest.mark.parametrize("there", [2, 3])
def test_who_creates_it_at_the_same_moment_is_compared_with(creates: Source, there: int) -> None:
    """Between the look at the remote and the creation somebody there creates it, also with another number of
    partitions."""
    topic = creates.topic(f"at-once-{there}")

    async def create() -> None:
        await creates.west.create(topic, there)

    creates.gate.before["EnsureTopic"] = create
    creates.do(creates.here.create(topic, 2))
    creates.publish(topic, 2)
    creates.settled(topic, "copied", "copied")
    assert creates.listed(topic) == names(topic, there)
    for name in parts(topic, 2):
        creates.arrived(name, payloads(name))


def test_who_creates_it_otherwise_at_the_same_moment_stops_a_strict_link(creates_strictly: Source) -> None:
    source = creates_strictly
    topic = source.topic("at-once")

    async def create() -> None:
        await source.west.create(topic, 3)

    source.gate.before["EnsureTopic"] = create
    source.do(source.here.create(topic, 2))
    source.settled(topic, "partition_mismatch", "partition_mismatch")
    assert source.listed(topic) == names(topic, 3)


def test_a_namespace_that_is_missing_there_is_waited_for(creates: Source) -> None:
    namespace, topic = "lonely", "/lonely/orders"
    creates.do(creates.here.namespace(namespace))
    creates.do(creates.here.create(topic))
    creates.here.publish(topic, payloads(topic))
    creates.do(creates.here.replicate(namespace))
    status = creates.settled(topic, "waiting_remote_topic")
    assert "sava namespaces create lonely" in status.partitions[0].reason
    creates.do(creates.west.namespace(namespace))
    creates.settled(topic, "copied")
    creates.arrived(topic, payloads(topic))


@pytest.mark.parametrize("start", ["latest", "a-time"])
def test_a_copy_begins_where_its_policy_says(creates: Source, start: str) -> None:
    namespace = f"since-{start}"
    topic = f"/{namespace}/orders"
    for side in (creates.here, creates.west):
        creates.do(side.namespace(namespace))
    creates.do(creates.here.create(topic))
    creates.publish(topic, 0)
    since = str(time.time_ns() // 1000)
    if start == "a-time":
        creates.publish(topic, 0, COUNT)
    creates.do(creates.here.replicate(topic, start=since if start == "a-time" else start))
    creates.settled(topic, "copied")
    creates.publish(topic, 0, 2 * COUNT)
    kept = COUNT if start == "a-time" else 0
    creates.arrived(topic, [*payloads(topic, COUNT, kept), *payloads(topic, 2 * COUNT)])


def test_a_schema_that_the_remote_does_not_take_is_told_until_it_does(
    creates: Source, tmp_path: Path
) -> None:
    """Messages before the first that names it are copied."""
    topic, subject = creates.create("conflicting", 0), "conflicting"
    for side, kind in ((creates.here, "int"), (creates.west, "string")):
        file = tmp_path / kind
        field = {"name": "x", "type": kind}
        file.write_text(json.dumps({"type": "record", "name": "Order", "fields": [field]}))
        creates.do(side.command("schemas", "register", subject, "--type", "avro", "--file", str(file)))
    creates.publish(topic, 0)
    with creates.here.client() as client:
        codec = client.schema(subject)
        with client.producer(topic, codec=codec) as producer:
            producer.send({"x": 7})
    status = creates.settled(topic, "schema_refused").partitions[0]
    assert subject in status.reason
    assert (status.position, status.backlog) == (COUNT, 1)
    assert status.next_retry_ms > 0
    creates.do(creates.west.command("schemas", "mode", subject, "none"))
    creates.settled(topic, "copied")
    creates.reached(lambda: len(creates.west.read(topic)) == COUNT + 1, lambda: creates.status(topic))


def test_subscriptions_are_created_there_also_where_topics_are_not(waits: Source) -> None:
    topic = waits.create("subscribed", 0, 0)
    waits.do(waits.here.replicate(topic, subscriptions=["readers"]))
    waits.publish(topic, 0)

    with (
        Client(waits.here.broker.url, timeout=PATIENCE_S) as client,
        client.consumer(topic, subscription="readers") as consumer,
    ):
        for _, message in zip(range(3), consumer, strict=False):
            consumer.ack(message)
        consumer.flush()
    waits.arrived(topic, payloads(topic))

    async def cursor() -> int:
        request = topics_admin_pb2.DescribeSubscriptionRequest(topic=topic, subscription="readers")
        try:
            found = await waits.west.call("subscriptions", "DescribeSubscription", request)
        except SavaError:
            return -1  # there is none yet
        return int(found.cursor)

    waits.reached(lambda: waits.do(cursor()) == 3, lambda: waits.do(cursor()))


def test_a_remote_that_denies_it_is_asked_again_until_it_does_not(creates: Source, world: World) -> None:
    topic = creates.create("denied", 0)
    creates.publish(topic, 0)
    creates.settled(topic, "copied")
    creates.gate.is_denying = True
    status = creates.settled(topic, "denied")
    assert "may not replicate here" in status.partitions[0].reason
    assert status.partitions[0].next_retry_ms > 0
    assert status.partitions[0].disconnects == 1
    creates.publish(topic, 0, COUNT)
    creates.reached(
        lambda: creates.status(topic).partitions[0].backlog == COUNT, lambda: creates.status(topic)
    )
    assert creates.counted(topic) == (1, 1)
    creates.gate.is_denying = False
    creates.settled(topic, "copied")
    creates.arrived(topic, payloads(topic, 0, 2 * COUNT))
    assert world.told.has_error(topic, "denied")


def test_a_remote_that_cannot_be_reached_is_tried_again_until_it_can(creates: Source, world: World) -> None:
    topic = creates.create("unreachable", 2)
    creates.publish(topic, 2)
    creates.settled(topic, "copied", "copied")
    for name in parts(topic, 2):
        creates.arrived(name, payloads(name))
    creates.west.broker.kill()
    creates.publish(topic, 2, COUNT)
    status = creates.settled(topic, "unreachable", "unreachable")
    assert status.disconnected_count == 2
    creates.reached(
        lambda: all(
            each.backlog == COUNT and each.backlog_seconds > 0.5 for each in creates.status(topic).partitions
        ),
        lambda: creates.status(topic),
    )
    creates.west.broker.start()
    creates.settled(topic, "copied", "copied")
    for name in parts(topic, 2):
        creates.arrived(name, payloads(name, 0, 2 * COUNT))
    assert world.told.has_error(topic, "unreachable")
    assert f"INFO replication: copied again topic={topic} remote=west" in world.told.of(topic)


def test_the_setting_holds_from_the_next_start_of_the_brokers_on(waits_strictly: Source) -> None:
    """The link goes on meanwhile."""
    source = waits_strictly
    topic = source.create("restarted", 2)
    source.publish(topic, 2)
    source.settled(topic, "waiting_remote_topic", "waiting_remote_topic")
    source.here.broker.stop()
    source.here.broker.environment[CREATES] = "true"
    source.here.broker.start()
    source.do(source.here.ready())
    source.settled(topic, "copied", "copied")
    for name in parts(topic, 2):
        source.arrived(name, payloads(name))
