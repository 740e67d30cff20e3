"""What a task makes of its share: everything that goes wrong is told of the errand that it happened to, and
nothing is left out or done twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from sava.client.errors import Denied, Unavailable
from sava.pipeline.cluster import ClusterClient, OffsetGone
from sava.pipeline.replicate import copying
from sava.pipeline.replicate.copying import copy
from sava.pipeline.replicate.target import CopyOutcome, CopyShare, Errand
from sava.proto import replica_pb2 as pb
from sava.records import RecordBatch
from sava.storage.source_positions import ORIGIN_TOPIC, PATH, origin_topic
from tests.support.waiting import HURRIES, PATIENCE_S, OwnTime
from tests.unit.client.server import AWAY, Fault, refused
from tests.unit.pipeline.replicate.memory import MemoryCopy, World

TOPIC = "/default/orders"
LARGE = 20_000
"""Bytes of messages, so that fifty make a range."""


def run(world: World, *errands: Errand, budget: float = PATIENCE_S) -> list[CopyOutcome]:
    return copy(CopyShare(ends=world.ends, errands=errands, budget_s=budget))


def run_one(world: World, errand: Errand, budget: float = PATIENCE_S) -> CopyOutcome:
    (outcome,) = run(world, errand, budget=budget)
    return outcome


def hurry(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """What takes at most some ten seconds takes at most so many."""
    for name, part in (("OPEN_S", 0.7), ("SETTLE_S", 0.85), ("END_S", 1.0)):
        monkeypatch.setattr(copying, name, part * seconds)


def ends(code: str, at: Callable[[pb.SourceRange], bool], *, may_pass: bool = False) -> Any:
    def order(copied: MemoryCopy, source_range: pb.SourceRange) -> pb.SourceEnded | None:
        if not at(source_range):
            return None
        return pb.SourceEnded(
            code=code,
            reason="as ordered",
            may_pass=may_pass,
            is_known=copied.is_known,
            position=copied.position,
        )

    return order


# -- where the copy is ----------------------------------------------------------------------------


def test_a_new_copy_begins_where_it_is_told_to(world: World) -> None:
    world.publish(TOPIC, 1000)
    outcome = run_one(world, world.errand(TOPIC, begin=300, start=300))
    assert (outcome.code, outcome.is_known, outcome.position, outcome.kept_position) == ("", True, 1000, 1000)
    assert outcome.messages == 700
    assert outcome.bytes > 700
    assert world.copied(TOPIC) == list(range(300, 1000))
    last = world.replica.copied(TOPIC).messages[-1]
    assert last.origin == ("eu", 999)
    assert last.attributes == {PATH: "eu", ORIGIN_TOPIC: origin_topic("id-of-eu", 1)}
    assert last.publish_time == 900


def test_a_copy_goes_on_where_it_is_whatever_was_planned(world: World) -> None:
    world.publish(TOPIC, 1000)
    run_one(world, world.errand(TOPIC, end=450))
    outcome = run_one(world, world.errand(TOPIC, begin=None))
    assert (outcome.position, outcome.messages) == (1000, 550)
    again = run_one(world, world.errand(TOPIC))
    assert (again.code, again.position, again.messages) == ("", 1000, 0)
    assert world.copied(TOPIC) == list(range(1000))


def test_a_plan_that_begins_behind_the_position_is_made_anew(world: World) -> None:
    world.publish(TOPIC, 1000)
    run_one(world, world.errand(TOPIC, end=450))
    outcome = run_one(world, world.errand(TOPIC, start=600))
    assert (outcome.code, outcome.is_known, outcome.position, outcome.messages) == ("", True, 450, 0)
    assert world.copied(TOPIC) == list(range(450))


def test_a_copy_that_must_be_there_is_not_begun_again(world: World) -> None:
    world.publish(TOPIC, 100)
    outcome = run_one(world, world.errand(TOPIC, begin=None))
    assert (outcome.code, outcome.is_known, outcome.may_pass) == ("source_position_missing", False, False)
    assert world.copied(TOPIC) == []


def test_another_topic_of_the_same_name_is_not_written_to(world: World) -> None:
    world.publish(TOPIC, 100)
    outcome = run_one(world, replace(world.errand(TOPIC), target_topic_id=77))
    assert (outcome.code, outcome.may_pass) == ("target_replaced", False)
    assert world.copied(TOPIC) == []


def test_nor_is_another_topic_of_the_same_name_read(world: World) -> None:
    world.publish(TOPIC, 100)
    outcome = run_one(world, replace(world.errand(TOPIC), topic_id=2))
    assert (outcome.code, outcome.may_pass) == ("source_replaced", True)
    assert world.copied(TOPIC) == []


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", range(6))
def test_the_failure_of_one_range_in_a_row_loses_nothing(world: World, failing: int) -> None:
    """One of several that are on their way fails, the stream lives on, and those behind it are refused: they
    are no proof that it came. (A watermark would have taken the repeated one for a duplicate.)"""
    world.publish(TOPIC, 300, per_batch=10, size=LARGE)
    seen = 0

    def at(source_range: pb.SourceRange) -> bool:
        nonlocal seen
        seen += 1
        return seen == failing + 1

    world.replica.order = ends("disk_full", at, may_pass=True)
    outcome = run_one(world, world.errand(TOPIC))
    assert (outcome.code, outcome.may_pass) == ("disk_full", True)
    assert outcome.position == len(world.copied(TOPIC)) < 300
    assert run_one(world, world.errand(TOPIC)).position == 300
    assert world.copied(TOPIC) == list(range(300))


def test_somebody_who_was_faster_is_no_error(world: World) -> None:
    world.publish(TOPIC, 300, per_batch=10, size=LARGE)
    is_first = True

    def order(copied: MemoryCopy, source_range: pb.SourceRange) -> None:
        """The other one copies up to 200 as soon as this one has begun."""
        nonlocal is_first
        if is_first:
            is_first = False
            copied.is_known, copied.position = True, 200

    world.replica.order = order
    outcome = run_one(world, world.errand(TOPIC))
    assert (outcome.code, outcome.is_known, outcome.position) == ("", True, 200)
    assert run_one(world, world.errand(TOPIC)).position == 300
    assert world.copied(TOPIC) == list(range(200, 300))


def test_two_at_once_copy_each_message_once(world: World) -> None:
    world.publish(TOPIC, 2000, per_batch=10, size=LARGE)

    def work() -> None:
        while run_one(world, world.errand(TOPIC)).position < 2000:
            pass

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert world.copied(TOPIC) == list(range(2000))


def test_one_that_fails_does_not_disturb_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"/default/t{number}" for number in range(12)]
    for name in names:
        world.publish(name, 200)
    world.replica.refuse_opening[names[0]] = Fault(grpc.StatusCode.PERMISSION_DENIED, text="not yours")
    world.replica.refuse_opening[names[1]] = AWAY
    world.replica.refuse_opening[names[2]] = refused("limit_of_something")
    world.replica.silent_openings.add(names[3])
    for seconds in HURRIES:
        hurry(monkeypatch, seconds)
        outcomes = run(world, *map(world.errand, names), budget=seconds)
        if all(outcome.position for outcome in outcomes[4:]):
            break
    assert [outcome.name for outcome in outcomes] == names
    told = [(outcome.code, outcome.may_pass) for outcome in outcomes]
    assert told[:4] == [
        ("denied", False),
        ("unavailable", True),
        ("limit_of_something", False),
        ("unavailable", True),
    ]
    assert told[4:] == [("", False)] * 8
    assert [outcome.position for outcome in outcomes[4:]] == [200] * 8


def test_a_target_that_is_not_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, HURRIES[0])
    world.publish(TOPIC, 100)
    world.loop.run(world.remote.stop())
    outcome = run_one(world, world.errand(TOPIC), budget=0.2)
    assert (outcome.code, outcome.may_pass, outcome.is_known) == ("unavailable", True, False)


@pytest.mark.parametrize(
    ("error", "code", "may_pass"),
    [(Unavailable("away"), "source_unavailable", True), (Denied("not yours"), "source_denied", False)],
)
def test_what_the_source_says_is_not_told_as_the_target_s_word(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str, may_pass: bool
) -> None:
    class Failing:
        def read(self, name: str, start: int, end: int) -> Iterator[RecordBatch]:
            raise error

    world.publish(TOPIC, 100)
    monkeypatch.setattr(ClusterClient, "of", lambda access: Failing())
    outcome = run_one(world, world.errand(TOPIC))
    monkeypatch.undo()
    assert (outcome.code, outcome.may_pass) == (code, may_pass)
    assert str(error) in outcome.reason


def test_a_target_that_falls_silent_holds_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has said before counts."""
    world.publish(TOPIC, 300, per_batch=10, size=LARGE)

    def order(copied: MemoryCopy, source_range: pb.SourceRange) -> None:
        if source_range.start > 100:
            world.replica.receipts.clear()

    world.replica.order = order
    for seconds in HURRIES:
        hurry(monkeypatch, seconds)
        own = OwnTime()
        outcome = run_one(world, world.errand(TOPIC), budget=seconds / 2)
        assert own.seconds < 3 * seconds
        if outcome.position and outcome.code:
            break
    assert (outcome.code, outcome.may_pass) == ("unavailable", True)
    assert 0 < outcome.position < 300
    world.replica.order = lambda copied, source_range: None
    world.call(world.replica.receipts.set)
    assert run_one(world, world.errand(TOPIC)).position == 300
    assert world.copied(TOPIC) == list(range(300))


class Slow:
    """In place of a link: what it reads comes, and then nothing more until it is let go."""

    def __init__(self) -> None:
        self.batches: list[RecordBatch] = []
        self.waits = threading.Event()

    def read(self, name: str, start: int, end: int) -> Iterator[RecordBatch]:
        yield from self.batches
        self.waits.wait(PATIENCE_S)


def test_a_source_that_falls_silent_holds_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setattr(ClusterClient, "of", lambda access: slow)
    try:
        for seconds in HURRIES:
            topic = f"{TOPIC}-{seconds:g}"
            world.publish(topic, 300, per_batch=100, size=LARGE)
            slow.batches = world.source.topics[topic].batches[:2]
            hurry(monkeypatch, seconds)
            own = OwnTime()
            outcome = run_one(world, world.errand(topic), budget=0.3)
            assert own.seconds < 3 * seconds
            if outcome.position:
                break
        assert (outcome.code, outcome.may_pass) == ("source_unavailable", True)
        assert outcome.position == outcome.messages > 0
    finally:
        slow.waits.set()
        monkeypatch.undo()


def test_the_budget_is_kept_and_each_round_gets_on(world: World) -> None:
    world.publish(TOPIC, 1000, per_batch=10, size=LARGE)
    rounds = 0
    position = 0
    while position < 1000:
        outcome = run_one(world, world.errand(TOPIC), budget=0.0)
        assert (outcome.code, position < outcome.position <= position + 60) == ("", True)
        position, rounds = outcome.position, rounds + 1
    assert rounds > 10
    assert world.copied(TOPIC) == list(range(1000))


# -- the source ------------------------------------------------------------------------------------


def test_messages_that_are_gone_are_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish(TOPIC, 300)

    class Gone:
        def read(self, name: str, start: int, end: int) -> Iterator[RecordBatch]:
            raise OffsetGone(name, start, 120)

    with monkeypatch.context() as patched:
        patched.setattr(ClusterClient, "of", lambda access: Gone())
        outcome = run_one(world, world.errand(TOPIC))
    assert (outcome.code, outcome.may_pass, outcome.position) == ("source_gone", False, 0)
    assert "offsets 0 to 120" in outcome.reason
    assert TOPIC in outcome.reason


def test_a_gap_in_what_is_read_is_not_passed_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range says that there is nothing else between its ends."""
    world.publish(TOPIC, 300)
    batches = world.source.topics[TOPIC].batches

    class Holed:
        def read(self, name: str, start: int, end: int) -> Iterator[RecordBatch]:
            yield batches[0]
            yield batches[2]

    with monkeypatch.context() as patched:
        patched.setattr(ClusterClient, "of", lambda access: Holed())
        outcome = run_one(world, world.errand(TOPIC))
    assert (outcome.code, outcome.may_pass) == ("failed", False)
    assert "offset 200 follows 100" in outcome.reason
    assert world.copied(TOPIC) in ([], list(range(100)))


def test_a_message_that_is_too_large_stops_there_and_not_before(world: World) -> None:
    world.publish(TOPIC, 300)
    world.publish(TOPIC, 10, per_batch=10, size=500)
    world.publish(TOPIC, 300)
    world.replica.max_message_size = 400
    outcome = run_one(world, world.errand(TOPIC))
    assert (outcome.code, outcome.may_pass, outcome.position) == ("message_too_large", False, 300)
    assert "offset 300 has 503 bytes, and the target takes 400" in outcome.reason
    assert world.copied(TOPIC) == list(range(300))
    world.replica.max_message_size = 503
    assert run_one(world, world.errand(TOPIC)).position == 610
    assert world.copied(TOPIC) == list(range(610))


def test_ranges_are_about_a_megabyte(world: World) -> None:
    world.publish(TOPIC, 20_000, per_batch=10, size=100)
    world.publish(TOPIC, 200, per_batch=200, size=LARGE)
    run_one(world, world.errand(TOPIC))
    ranges = world.replica.copied(TOPIC).ranges
    assert 4 <= len(ranges) <= 12
    assert world.copied(TOPIC) == list(range(20_200))
