"""The link of a Spark process, against a broker in memory that runs in a thread."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc import aio

from sava.client import ClientError, Closed, OutcomeUnknown, Refused, TopicUnknown, Unavailable
from sava.client.loop_thread import LoopThread
from sava.pipeline import calls as tails
from sava.pipeline.cluster import ClusterAccess, ClusterClient, OffsetGone, PartitionExtent
from sava.proto import writers_pb2, writers_pb2_grpc
from sava.records import RecordBatch
from tests.support.waiting import PATIENCE_S, OwnTime, wait_until
from tests.unit.client.server import AWAY, Fault, MemoryBroker, refused

A, B = "/default/orders-part-0", "/default/orders-part-1"


class Writers(writers_pb2_grpc.WritersServicer):
    """Commits that fail as ordered, one after the other, and then succeed."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.takes_s = 0.0
        self.commits: list[writers_pb2.CommitRequest] = []

    async def Staging(self, request: Any, context: Any) -> writers_pb2.StagingResponse:  # noqa: N802
        return writers_pb2.StagingResponse(prefix=f"staging/{request.writer}")

    async def Commit(self, request: Any, context: Any) -> writers_pb2.CommitResponse:  # noqa: N802
        self.commits.append(request)
        if self.faults:
            await self.faults.pop(0).tell(context)
        await asyncio.sleep(self.takes_s)
        return writers_pb2.CommitResponse(decided_now=True)


class WritersBroker(MemoryBroker):
    def __init__(self) -> None:
        super().__init__()
        self.writers = Writers()

    def register(self, server: aio.Server) -> None:
        super().register(server)
        writers_pb2_grpc.add_WritersServicer_to_server(self.writers, server)


class Hosted:
    """The broker, from another thread."""

    def __init__(self) -> None:
        self._loop = LoopThread("broker")
        self.broker = WritersBroker()
        self._loop.run(self.broker.start())
        self.access = ClusterAccess(self.broker.address, token="secret", timeout_s=10)
        self._loop.run(self._create())

    async def _create(self) -> None:
        self.broker.partitioned("/default/orders", 2)

    def append(self, name: str, *payloads: bytes) -> None:
        async def append() -> None:
            topic = self.broker.topics[name]
            topic.append("p", batch(*payloads, sequence=topic.next_sequence("p")))

        self._loop.run(append())

    def restart(self) -> None:
        self._loop.run(self.broker.restart())

    def stop(self) -> None:
        self._loop.run(self.broker.stop())

    def break_streams(self) -> None:
        wait_until(lambda: self.broker.calls)
        self._loop.run(self.broker.break_streams())

    def close(self) -> None:
        self.stop()
        self._loop.close()


def batch(*payloads: bytes, sequence: int = 0) -> RecordBatch:
    return RecordBatch.encode(payloads, publish_time=1, base_sequence=sequence)


@pytest.fixture
def hosted() -> Iterator[Hosted]:
    hosted = Hosted()
    yield hosted
    hosted.close()


@pytest.fixture
def link(hosted: Hosted) -> Iterator[ClusterClient]:
    link = ClusterClient.of(hosted.access)
    yield link
    link.close()


def payloads(batches: Iterator[RecordBatch]) -> list[bytes]:
    return [payload for each in batches for payload in each.payloads()]


# -- one per process -------------------------------------------------------------------------------


def test_a_process_has_one_link_per_cluster(hosted: Hosted, link: ClusterClient) -> None:
    found: list[ClusterClient] = []
    threads = [
        threading.Thread(target=lambda: found.append(ClusterClient.of(hosted.access))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {link}


def test_a_link_that_was_closed_is_replaced(hosted: Hosted) -> None:
    first = ClusterClient.of(hosted.access)
    first.close()
    second = ClusterClient.of(hosted.access)
    assert second is not first
    assert second.partitions("/default/orders").names == (A, B)
    second.close()


FORK = """
import multiprocessing, sys, time
from sava.client import Refused
from sava.pipeline.cluster import ClusterAccess, ClusterClient

access = ClusterAccess(sys.argv[1], timeout_s=20)
fork = multiprocessing.get_context("fork")

def ask(link):
    return len(link.partitions("/default/orders").names)

def child(say):
    began = time.monotonic()
    try:
        say.put(ask(ClusterClient.of(access)))
    except Refused as error:
        say.put((str(error), time.monotonic() - began < 5))

def from_child():
    say = fork.SimpleQueue()
    process = fork.Process(target=child, args=(say,))
    process.start()
    answer = say.get()
    process.join(20)
    assert process.exitcode == 0
    return answer

assert from_child() == 2, "forked before its parent used a link"
link = ClusterClient.of(access)
assert ask(link) == 2
text, was_quick = from_child()
assert "forked" in text and was_quick, text
assert ask(link) == 2, "a fork does the parent no harm"
print("done")
"""


def test_a_forked_process_makes_its_own_or_says_why_it_cannot(hosted: Hosted) -> None:
    """In a process of its own: this one has used gRPC."""
    command = [sys.executable, "-c", FORK, hosted.broker.address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.returncode) == ("done\n", 0), ended.stderr


def test_access_travels(hosted: Hosted, link: ClusterClient) -> None:
    assert ClusterClient.of(pickle.loads(pickle.dumps(hosted.access))) is link


def test_the_token_goes_with_every_call(hosted: Hosted, link: ClusterClient) -> None:
    link.partitions("/default/orders")
    assert ("authorization", "Bearer secret") in hosted.broker.metadata


# -- asking ----------------------------------------------------------------------------------------


def test_what_is_refused_is_raised_at_once(link: ClusterClient) -> None:
    with pytest.raises(TopicUnknown):
        link.partitions("/default/unknown")
    with pytest.raises(TopicUnknown):
        link.extents(["/default/unknown"])


def test_a_broker_that_is_away_is_waited_for(hosted: Hosted, link: ClusterClient) -> None:
    hosted.append(A, b"1")
    assert link.extents([A, B]) == {A: PartitionExtent(0, 0, 1), B: PartitionExtent(0, 0, 0)}
    hosted.stop()
    timer = threading.Timer(0.3, hosted.restart)
    timer.start()
    assert link.extents([A])[A].end == 1
    timer.join()


def test_a_broker_that_does_not_come_back_is_named(hosted: Hosted) -> None:
    hosted.stop()
    link = ClusterClient.of(ClusterAccess(hosted.broker.address, timeout_s=0.3))
    own = OwnTime()
    with pytest.raises(Unavailable, match=rf"Offsets of {A} within 0\.3 s: broker"):
        link.extents([A])
    with pytest.raises(Unavailable, match=r"LookUp of /default/orders within 0\.3 s: broker"):
        link.partitions("/default/orders")
    with pytest.raises(Unavailable, match="ListTopics"):
        link.topics()
    assert own.seconds < 10
    link.close()


# -- waiting ---------------------------------------------------------------------------------------


def stand(link: ClusterClient, *names: str) -> None:
    """Until a question stands for each; a slow machine needs the first turn to learn where they end."""
    for _ in range(100):
        link.wait_beyond(dict.fromkeys(names, 0), timeout_s=0.05)
        if link._tails.standing == len(names):
            return
    raise AssertionError("no question stands")


def test_growth_is_told_at_once_with_all_ends(hosted: Hosted, link: ClusterClient) -> None:
    timer = threading.Timer(0.2, hosted.append, (B, b"1"))
    began = time.monotonic()
    timer.start()
    assert link.wait_beyond({A: 0, B: 0}, timeout_s=PATIENCE_S) == {
        A: PartitionExtent(0, 0, 0),
        B: PartitionExtent(0, 0, 1),
    }
    assert 0.1 < time.monotonic() - began < PATIENCE_S / 2
    timer.join()


def test_what_has_grown_already_is_told_as_it_is_now(hosted: Hosted, link: ClusterClient) -> None:
    """The first message was told; while nobody asks others come; who asks next gets the end of that
    moment."""
    hosted.append(A, b"1")
    assert link.wait_beyond({A: 0}, timeout_s=PATIENCE_S)[A].end == 1
    hosted.append(A, b"2")
    hosted.append(A, b"3")
    assert link.wait_beyond({A: 1}, timeout_s=PATIENCE_S)[A].end == 3


def test_without_growth_the_time_is_kept(hosted: Hosted, link: ClusterClient) -> None:
    assert link.wait_beyond({A: 0, B: 0}, timeout_s=0.2) == {
        A: PartitionExtent(0, 0, 0),
        B: PartitionExtent(0, 0, 0),
    }
    began = time.monotonic()
    assert link.wait_beyond({}, timeout_s=0.2) == {}
    assert time.monotonic() - began > 0.15


def test_asking_again_and_again_asks_the_broker_once(hosted: Hosted, link: ClusterClient) -> None:
    """One question for the end, one that stands: for each partition, however often somebody waits."""
    stand(link, A, B)
    wait_until(lambda: hosted.broker.offsets_under_way == 2)
    asked = len(hosted.broker.offsets_asked)
    for _ in range(20):
        link.wait_beyond({A: 0, B: 0}, timeout_s=0.01)
    assert len(hosted.broker.offsets_asked) == asked
    assert hosted.broker.offsets_under_way == link._tails.standing == 2


def test_questions_do_not_outlive_who_asks(
    hosted: Hosted, link: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "IDLE_S", 0.2)
    monkeypatch.setattr(tails, "STAND_S", 0.1)
    stand(link, A)
    wait_until(lambda: not link._tails.standing)
    wait_until(lambda: not hosted.broker.offsets_under_way)
    hosted.append(A, b"1")
    assert link.wait_beyond({A: 0}, timeout_s=PATIENCE_S)[A].end == 1


def test_closing_ends_what_stands(hosted: Hosted) -> None:
    link = ClusterClient.of(hosted.access)
    stand(link, A, B)
    wait_until(lambda: hosted.broker.offsets_under_way == 2)
    link.close()
    wait_until(lambda: hosted.broker.offsets_under_way == 0)


def test_who_waits_while_the_link_is_closed_is_told(hosted: Hosted) -> None:
    link = ClusterClient.of(hosted.access)
    told: list[Exception] = []

    def wait() -> None:
        try:
            link.wait_beyond({A: 0}, timeout_s=60)
        except Closed as error:
            told.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: link._tails.standing)
    link.close()
    for thread in threads:
        thread.join(10)
    assert len(told) == 3
    with pytest.raises(Closed):
        link.partitions("/default/orders")


def test_threads_that_are_at_different_places_wait_side_by_side(hosted: Hosted, link: ClusterClient) -> None:
    """Each follows both partitions at its own pace; none misses what was appended."""
    total, seen = 60, []

    def follow(step: int) -> None:
        ends = {A: 0, B: 0}
        deadline = time.monotonic() + PATIENCE_S
        while sum(ends.values()) < total and time.monotonic() < deadline:
            for name, extent in link.wait_beyond(ends, timeout_s=PATIENCE_S).items():
                ends[name] = min(extent.end, ends[name] + step)
        seen.append(sum(ends.values()))

    threads = [threading.Thread(target=follow, args=(step,)) for step in (1, 3, 100)]
    for thread in threads:
        thread.start()
    for n in range(total):
        hosted.append((A, B)[n % 2], b"x")
    for thread in threads:
        thread.join(40)
    assert seen == [total] * 3
    assert link._tails.standing <= 2


def test_a_partition_that_cannot_be_reached_is_missing(hosted: Hosted, link: ClusterClient) -> None:
    hosted.broker.refuse_offsets[B] = AWAY
    assert link.wait_beyond({A: 0, B: 0}, timeout_s=0.1) == {A: PartitionExtent(0, 0, 0)}
    hosted.append(A, b"1")
    assert link.wait_beyond({A: 0, B: 0}, timeout_s=PATIENCE_S) == {A: PartitionExtent(0, 0, 1)}
    del hosted.broker.refuse_offsets[B]
    hosted.append(B, b"1")
    assert link.wait_beyond({A: 1, B: 0}, timeout_s=PATIENCE_S)[B].end == 1


def test_a_partition_that_is_gone_is_an_error(hosted: Hosted, link: ClusterClient) -> None:
    """Whether it goes while somebody waits, or was gone before."""
    stand(link, A, B)
    hosted.broker.refuse_offsets[B] = refused("topic_unknown")
    timer = threading.Timer(0.1, hosted.restart)
    timer.start()
    with pytest.raises(TopicUnknown):
        link.wait_beyond({A: 0, B: 0}, timeout_s=PATIENCE_S)
    timer.join()
    with pytest.raises(TopicUnknown):
        link.wait_beyond({A: 0, B: 0}, timeout_s=PATIENCE_S)


def test_a_broker_that_restarts_is_watched_again(hosted: Hosted, link: ClusterClient) -> None:
    stand(link, A)
    hosted.restart()
    timer = threading.Timer(0.3, hosted.append, (A, b"1"))
    timer.start()
    assert link.wait_beyond({A: 0}, timeout_s=PATIENCE_S)[A].end == 1
    timer.join()


# -- reading ---------------------------------------------------------------------------------------


def test_a_range_is_read_exactly(hosted: Hosted, link: ClusterClient) -> None:
    for first in range(0, 30, 10):
        hosted.append(A, *(b"%d" % n for n in range(first, first + 10)))
    assert payloads(link.read(A, 3, 25)) == [b"%d" % n for n in range(3, 25)]
    assert payloads(link.read(A, 5, 5)) == []


def test_reading_goes_on_after_a_restart(hosted: Hosted, link: ClusterClient) -> None:
    for n in range(20):
        hosted.append(A, b"%d" % n)
    batches = link.read(A, 0, 20)
    found = [next(batches).payloads()[0]]
    hosted.restart()
    found += payloads(batches)
    assert found == [b"%d" % n for n in range(20)]


def test_messages_that_are_gone_are_named(hosted: Hosted, link: ClusterClient) -> None:
    hosted.append(A, b"0", b"1", b"2")
    hosted.broker.topics[A].start_offset = 2
    hosted.broker.refuse_reading = Fault(grpc.StatusCode.FAILED_PRECONDITION, "offset_out_of_range")
    with pytest.raises(OffsetGone) as raised:
        list(link.read(A, 1, 3))
    error = raised.value
    assert (error.name, error.start, error.first) == (A, 1, 2)
    assert "\n" not in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(Refused, match="as ordered"):  # beyond the end is something else
        list(link.read(A, 2, 9))


def test_a_gap_is_an_error(hosted: Hosted, link: ClusterClient) -> None:
    for n in range(3):
        hosted.append(A, b"%d" % n)
    del hosted.broker.topics[A].batches[1]
    with pytest.raises(ClientError, match="a gap: 2 follows 1"):
        list(link.read(A, 0, 3))


def test_what_never_comes_is_not_waited_for(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sava.pipeline.cluster.OPEN_TIMEOUT_S", 0.1)
    hosted.append(A, b"0")
    link = ClusterClient.of(ClusterAccess(hosted.broker.address, timeout_s=0.2))
    with pytest.raises(Exception, match="nothing came within"):
        list(link.read(A, 0, 2))
    link.close()


def test_a_reading_that_is_given_up_ends(hosted: Hosted, link: ClusterClient) -> None:
    for n in range(50):
        hosted.append(A, b"%d" % n)
    batches = link.read(A, 0, 50)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert payloads(link.read(A, 48, 50)) == [b"48", b"49"]


# -- publishing ------------------------------------------------------------------------------------


def test_batches_are_published_in_order(hosted: Hosted, link: ClusterClient) -> None:
    many = (batch(*(b"%d.%d" % (n, m) for m in range(3))) for n in range(100))
    assert link.publish(A, many) == 300
    assert hosted.broker.topics[A].payloads() == [b"%d.%d" % (n, m) for n in range(100) for m in range(3)]
    assert link.publish(A, iter(())) == 0


def test_publishing_goes_on_after_broken_streams(hosted: Hosted, link: ClusterClient) -> None:
    def many() -> Iterator[RecordBatch]:
        for n in range(60):
            if n in (20, 40):
                hosted.break_streams()
            yield batch(b"%d" % n)

    assert link.publish(A, many()) == 60
    assert hosted.broker.topics[A].payloads() == [b"%d" % n for n in range(60)]


def test_a_batch_that_is_refused_fails_the_call(hosted: Hosted, link: ClusterClient) -> None:
    hosted.broker.refuse_payload[b"bad"] = refused("schema_refused")
    with pytest.raises(Refused):
        link.publish(A, (batch(b"bad" if n == 3 else b"good") for n in range(1000)))
    assert link.publish(B, iter([batch(b"x")])) == 1


def test_an_error_of_the_batches_ends_the_call(hosted: Hosted, link: ClusterClient) -> None:
    def many() -> Iterator[RecordBatch]:
        yield batch(b"1")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        link.publish(A, many())


def test_receipts_that_never_come_are_an_error(hosted: Hosted) -> None:
    link = ClusterClient.of(ClusterAccess(hosted.broker.address, timeout_s=0.5))
    hosted.broker.receipts.clear()
    with pytest.raises(OutcomeUnknown):
        link.publish(A, iter([batch(b"1")]))
    hosted.broker.receipts.set()
    link.close()


# -- committing ------------------------------------------------------------------------------------

COMMIT = writers_pb2.CommitRequest(writer="w", run="r", batch=3)


def test_a_commit_is_repeated_until_it_is_answered(hosted: Hosted, link: ClusterClient) -> None:
    """Whatever comes between: nobody knows then what has become of it, and repeating it is safe."""
    assert link.staging("w").prefix == "staging/w"
    lost = Fault(grpc.StatusCode.UNKNOWN, "outcome_unknown")
    hosted.broker.writers.faults = [Fault(grpc.StatusCode.UNAVAILABLE), lost]
    assert link.commit(COMMIT).decided_now
    assert hosted.broker.writers.commits == [COMMIT] * 3


def test_a_commit_has_more_time_than_other_calls(hosted: Hosted) -> None:
    hosted.broker.writers.takes_s = 1.0
    link = ClusterClient.of(ClusterAccess(hosted.broker.address, timeout_s=0.2))
    assert link.commit(COMMIT).decided_now
    assert len(hosted.broker.writers.commits) == 1
    link.close()


def test_a_commit_that_is_refused_is_not_repeated(hosted: Hosted, link: ClusterClient) -> None:
    hosted.broker.writers.faults = [refused("writer_fenced")]
    with pytest.raises(Refused) as raised:
        link.commit(COMMIT)
    assert raised.value.code == "writer_fenced"
    assert len(hosted.broker.writers.commits) == 1


def test_another_broker_takes_a_commit(hosted: Hosted) -> None:
    """One that was named, or one that a look-up has named."""
    other = Hosted()
    try:
        for service in (f"{other.broker.address},{hosted.broker.address}", other.broker.address):
            link = ClusterClient.of(ClusterAccess(service))
            other.broker.elsewhere = hosted.broker.address
            link.partitions("/default/orders")
            other.stop()
            assert link.commit(COMMIT).decided_now
            link.close()
            other.restart()
        assert (len(hosted.broker.writers.commits), len(other.broker.writers.commits)) == (2, 0)
    finally:
        other.close()


# -- ending ----------------------------------------------------------------------------------------

LEFT_OPEN = """
import sys
from sava.pipeline.cluster import ClusterAccess, ClusterClient

link = ClusterClient.of(ClusterAccess(sys.argv[1]))
link.wait_beyond({sys.argv[2]: 0}, timeout_s=1)
reading = link.read(sys.argv[2], 0, 1000)
print(len(next(reading)))
"""


def test_a_process_that_closes_nothing_ends_quietly(hosted: Hosted) -> None:
    hosted.append(A, b"0", b"1")
    command = [sys.executable, "-c", LEFT_OPEN, hosted.broker.address, A]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("2\n", "", 0)
