"""``verify``: it finds what is wrong with a replica, each kind of it, and nothing where nothing is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sava.api.admin_client import AdminClient
from sava.cli import replication
from sava.cli.replication import question_of
from sava.client.blocking import Client
from sava.client.loop_thread import LoopThread
from sava.pipeline.cluster import ClusterAccess, ClusterClient
from sava.pipeline.replicate.target import TargetCluster
from sava.pipeline.replicate.translation import REPLICATE
from sava.pipeline.replicate.verify import (
    FINDINGS,
    PartitionVerdict,
    VerifyFinding,
    VerifyRequest,
    VerifySide,
    verify,
)
from sava.records import Message, Origin, RecordBatch
from sava.storage.source_positions import ORIGIN_TOPIC, PATH, origin_topic
from sava.topics.source_copier import Source, SourceRange
from tests.support.brokers import Standalone
from tests.support.copying import ReplicaStream, replica
from tests.support.long import only_long
from tests.support.replication import RunningLink
from tests.support.replication import Side as Cluster
from tests.support.waiting import wait_until

EAST, WEST = "east", "west"
TIME = 1_700_000_000_000_000


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Standalone, Standalone]]:
    places = {name: tmp_path_factory.mktemp(name) for name in (EAST, WEST)}
    with (
        Standalone(places[EAST], SAVA__CLUSTER_NAME=EAST) as east,
        Standalone(places[WEST], SAVA__CLUSTER_NAME=WEST) as west,
    ):
        east.ready()
        west.ready()
        yield east, west


class Pair:
    """A plain topic in both clusters. What is at the target is put there by hand."""

    def __init__(self, clusters: tuple[Standalone, Standalone], topic: str) -> None:
        self.topic = topic
        self.east, self.west = clusters
        self._sides = {}
        for broker in clusters:
            target = TargetCluster.of(ClusterAccess(broker.url))
            shape = target.ensure_topic(topic, partitions=0, cluster="test")
            hello = target.hello()
            self._sides[hello.cluster_name] = VerifySide(
                access=ClusterAccess(broker.url),
                cluster_name=hello.cluster_name,
                cluster_id=hello.cluster_id,
                topic_ids=tuple(shape.topic_ids),
            )

    @property
    def source(self) -> Source:
        side = self._sides[EAST]
        return Source(EAST, side.cluster_id, self.topic, side.topic_ids[0])

    def publish(self, payloads: Sequence[bytes], attributes: dict[str, str] | None = None) -> None:
        messages = [Message(payload, "k", attributes or {}, TIME) for payload in payloads]
        self._send(self.east, RecordBatch.from_messages(messages))

    def put(self, copies: Sequence[tuple[int, bytes]], end: int) -> None:
        """As a replicator does that has got these payloads for these offsets of the source."""
        batch = RecordBatch.from_messages([self._copy(*each) for each in copies])
        offsets = [bound for offset, _ in copies for bound in (offset, offset + 1)]
        asyncio.run(self._append(SourceRange(0, end, True, [batch], offsets)))

    def smuggle(self, copies: Sequence[tuple[int, bytes]]) -> None:
        """As nobody who replicates can: in any order, and twice."""
        self._send(self.west, RecordBatch.from_messages([self._copy(*each) for each in copies]))

    def verify(self, spark: SparkSession, end: int) -> PartitionVerdict:
        question = VerifyRequest(
            topic=self.topic,
            partitioned=False,
            source=self._sides[EAST],
            target=self._sides[WEST],
            ranges={0: (0, end)},
            forward=False,
        )
        (verdict,) = verify(spark, question)
        return verdict

    def _copy(self, offset: int, payload: bytes) -> Message:
        source = self.source
        marks = {PATH: EAST, ORIGIN_TOPIC: origin_topic(source.cluster_id, source.topic_id)}
        return Message(payload, "k", marks, TIME, origin=Origin(EAST, offset))

    async def _append(self, source_range: SourceRange) -> None:
        async with replica(f"127.0.0.1:{self.west.port}") as stub:
            stream = ReplicaStream(stub, self.topic, self.source)
            await stream.open()
            await stream.send(source_range)
            await stream.receive()
            await stream.close()

    def _send(self, broker: Standalone, batch: RecordBatch) -> None:
        ClusterClient.of(ClusterAccess(broker.url)).publish(self.topic, iter([batch]))


def later(count: int) -> RecordBatch:
    return RecordBatch.from_messages([Message(payload, "k", {}, TIME + 1) for payload in numbered(count)])


def numbered(count: int) -> list[bytes]:
    return [f"message {number}".encode() for number in range(count)]


@pytest.fixture
def pair(clusters: tuple[Standalone, Standalone], request: pytest.FixtureRequest) -> Pair:
    return Pair(clusters, f"/default/{request.node.name.replace('[', '-').rstrip(']')}")


def test_a_true_copy(spark: SparkSession, pair: Pair) -> None:
    pair.publish(numbered(50))
    pair.put(list(enumerate(numbered(50))), 50)
    verdict = pair.verify(spark, 50)
    assert verdict.is_equal
    assert (verdict.compared, verdict.expired, verdict.examples) == (50, 0, [])


def test_what_is_not_copied_yet_is_not_missing(spark: SparkSession, pair: Pair) -> None:
    pair.publish(numbered(50))
    pair.put(list(enumerate(numbered(30))), 30)
    assert pair.verify(spark, 30).is_equal


def test_what_is_missing_different_or_too_much_is_found(spark: SparkSession, pair: Pair) -> None:
    pair.publish(numbered(20))
    pair.publish([b"not for west"], {"sava-replicate": "north"})
    copies = dict(enumerate(numbered(20)))
    del copies[3]
    copies[7] = b"something else"
    copies[20] = b"not for west"
    pair.put(sorted(copies.items()), 21)
    verdict = pair.verify(spark, 21)
    assert not verdict.is_equal
    assert (verdict.compared, verdict.missing, verdict.different, verdict.extra) == (19, 1, 1, 1)
    assert verdict.examples == [
        VerifyFinding(what="missing", cluster=EAST, offset=3),
        VerifyFinding(what="different", cluster=EAST, offset=7),
        VerifyFinding(what="extra", cluster=EAST, offset=20),
    ]


def test_what_is_there_twice_or_in_another_order_is_found(spark: SparkSession, pair: Pair) -> None:
    pair.publish(numbered(5))
    copies = list(enumerate(numbered(5)))
    pair.smuggle([copies[0], copies[1], copies[1], copies[3], copies[2], copies[4]])
    verdict = pair.verify(spark, 5)
    assert (verdict.compared, verdict.repeated, verdict.out_of_order, verdict.missing) == (5, 1, 1, 0)
    assert {(each.what, each.offset) for each in verdict.examples} == {("repeated", 1), ("out_of_order", 2)}


def test_messages_of_the_replica_itself_are_its_own_affair(
    spark: SparkSession, pair: Pair, clusters: tuple[Standalone, Standalone]
) -> None:
    pair.publish(numbered(5))
    with Client(clusters[1].url) as client, client.producer(pair.topic) as producer:
        producer.send(b"published at west")
    pair.put(list(enumerate(numbered(5))), 5)
    assert pair.verify(spark, 5).is_equal


# -- the command -----------------------------------------------------------------------------


class Command:
    """``sava replication verify`` of a topic that a link goes on copying."""

    def __init__(self, clusters: tuple[Standalone, Standalone], topic: str, **policy: Any) -> None:
        self.topic = topic
        self._east, self._west = map(Cluster, clusters)
        self._loop = LoopThread("clusters")
        self._loop.run(self._east.add(WEST, self._west.service))
        self.replicate(**policy)
        self.link = RunningLink(self._east)

    def close(self) -> None:
        self.link.stop()
        self._loop.run(self._east.clear(self.topic))
        self._loop.close()

    def replicate(self, **policy: Any) -> None:
        self._loop.run(self._east.replicate(self.topic, **policy))

    def begins(self) -> list[int]:
        (found,) = self._loop.run(self._east.status(self.topic))
        return list(found.begins)

    def until_copied(self, end: int) -> None:
        """In the eyes of the cluster, which is what is compared."""

        def position() -> int:
            (found,) = self._loop.run(self._east.status(self.topic))
            return max((each.position for each in found.partitions), default=0)

        wait_until(lambda: position() == end, f"{end} are copied", timeout=60)

    def question(self) -> VerifyRequest:
        """What the command compares."""

        async def ask() -> VerifyRequest:
            async with AdminClient(self._east.broker.admin) as client:
                return question_of(self.topic, WEST, *await replication.ask(client, self.topic, WEST), "")

        return self._loop.run(ask())

    def __call__(self, *options: str, code: int) -> tuple[str, str]:
        words = ("replication", "verify", self.topic, "--remote", WEST, "--master", "local[2]", *options)
        return self._loop.run(self._east.command(*words, code=code))


@pytest.fixture
def command(clusters: tuple[Standalone, Standalone], pair: Pair) -> Iterator[Command]:
    made = Command(clusters, pair.topic)
    yield made
    made.close()


def test_what_is_copied_is_expected_whatever_its_attributes_look_like(
    spark: SparkSession, pair: Pair, command: Command
) -> None:
    """Spaces in the list of clusters; and attributes that say where a message comes from, of a producer to
    whom they do not belong."""
    pair.publish([b"0"], {REPLICATE: f"south,\t{WEST}"})
    pair.publish([b"1"], {REPLICATE: f"south, {WEST}"})
    pair.publish([b"2"], {REPLICATE: "south, southwest"})
    pair.publish([b"3"], {PATH: WEST})
    pair.publish([b"4"], {ORIGIN_TOPIC: "something"})
    pair.publish([b"5"], {PATH: WEST, ORIGIN_TOPIC: "something"})
    command.until_copied(6)
    verdict = pair.verify(spark, 6)
    assert (verdict.compared, verdict.examples) == (5, [])


@pytest.mark.parametrize("start", ["latest", "time"])
def test_a_copy_begins_where_its_policy_did(
    spark: SparkSession, pair: Pair, clusters: tuple[Standalone, Standalone], start: str
) -> None:
    """Also if the policy says something else by now: that is for what was never copied."""
    pair.publish(numbered(5))
    at = "latest" if start == "latest" else str(TIME + 1)
    command = Command(clusters, pair.topic, start=at)
    try:
        wait_until(lambda: command.begins() == [5], "it is known where the copy begins")
        ClusterClient.of(ClusterAccess(clusters[0].url)).publish(pair.topic, iter([later(3)]))
        command.until_copied(8)
        assert command.question().ranges == {0: (5, 8)}
        command.replicate(start="earliest")
        question = command.question()
        assert question.ranges == {0: (5, 8)}
        (verdict,) = verify(spark, question)
        assert (verdict.compared, verdict.examples) == (3, [])
    finally:
        command.close()


@only_long("each starts a Spark of its own")
def test_the_command_says_that_a_true_copy_is_one(pair: Pair, command: Command) -> None:
    pair.publish(numbered(30))
    command.until_copied(30)
    out, _ = command("-o", "json", code=0)
    (verdict,) = json.loads(out)
    assert (verdict["partition"], verdict["start"], verdict["end"]) == (0, 0, 30)
    assert (verdict["compared"], verdict["examples"]) == (30, [])
    assert not any(verdict[what] for what in FINDINGS)


@only_long("each starts a Spark of its own")
@pytest.mark.parametrize("what", ["missing", "different", "repeated"])
def test_the_command_says_which_message_is_wrong(
    clusters: tuple[Standalone, Standalone], pair: Pair, what: str
) -> None:
    """What was put there before the link has come, as nobody should, the link does not touch."""
    pair.publish(numbered(20))
    copies = list(enumerate(numbered(20)))
    if what == "missing":
        pair.put(copies[:7] + copies[8:], 20)
    elif what == "different":
        pair.put([*copies[:7], (7, b"something else"), *copies[8:]], 20)
    else:
        pair.put(copies, 20)
        pair.smuggle([copies[7]])
    command = Command(clusters, pair.topic)
    try:
        pair.publish(numbered(10))
        command.until_copied(30)
        if what == "missing":  # as a table
            out, err = command(code=1)
            assert ["0", "0..30", "29", "1", "0", "0", "0", "0", "0"] in [
                row.split() for row in out.splitlines()
            ]
            assert "partition 0: missing: offset 7 of east" in out
            assert f"topic {pair.topic} at west is not what it is here: partition 0" in err
            return
        out, _ = command("-o", "json", code=1)
        (verdict,) = json.loads(out)
        wrong = {name: verdict[name] for name in FINDINGS if verdict[name]}
        # A second copy behind the others is not in their order either.
        assert wrong == {what: 1} | ({"out_of_order": 1} if what == "repeated" else {})
        assert {"what": what, "cluster": EAST, "offset": 7} in verdict["examples"]
        assert verdict["compared"] == 30
    finally:
        command.close()
