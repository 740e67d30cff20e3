"""Many partitions with little to copy, by one call to each broker: whatever does not go smoothly is copied
one by one, and what became of each is told as if it always were."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sava.pipeline import calls as calls_module
from sava.pipeline.cluster import ClusterClient
from sava.pipeline.replicate import copying
from sava.pipeline.replicate.copying import copy
from sava.pipeline.replicate.target import CopyOutcome, CopyShare, Errand
from sava.proto import replica_pb2 as pb
from sava.storage.source_positions import ORIGIN_TOPIC, PATH, origin_topic
from tests.unit.pipeline.replicate.memory import MemoryCopy, Remote, Source, World

NAMES = [f"/default/t{number}" for number in range(20)]
BEFORE, NEWS = 100, 50


def run(world: World, errands: Sequence[Errand], *, budget: float = 5.0) -> list[CopyOutcome]:
    return copy(CopyShare(ends=world.ends, errands=tuple(errands), budget_s=budget, is_light=True))


@pytest.fixture
def errands(world: World) -> list[Errand]:
    """What has come since everything was copied; nobody has counted calls yet."""
    for name in NAMES:
        world.publish(name, BEFORE)
    assert {outcome.code for outcome in run(world, [world.errand(name) for name in NAMES])} == {""}
    assert not world.replica.together, "copies are begun one by one"
    for name in NAMES:
        world.publish(name, NEWS, per_batch=10)
    world.replica.openings = 0
    return [world.errand(name, begin=None, start=BEFORE) for name in NAMES]


def all_is_there(world: World) -> bool:
    return all(world.copied(name) == list(range(BEFORE + NEWS)) for name in NAMES)


def test_what_many_have_is_read_by_one_call_and_appended_by_one(world: World, errands: list[Errand]) -> None:
    outcomes = run(world, errands)
    assert world.source.together == [NAMES]
    assert world.replica.together == [NAMES]
    assert world.replica.openings == 0
    assert [outcome.name for outcome in outcomes] == NAMES
    for outcome in outcomes:
        assert (outcome.code, outcome.is_known, outcome.messages) == ("", True, NEWS)
        assert (outcome.position, outcome.kept_position) == (BEFORE + NEWS, BEFORE + NEWS)
        assert outcome.bytes > NEWS
    assert all_is_there(world)
    last = world.replica.copied(NAMES[0]).messages[-1]
    assert last.origin == ("eu", BEFORE + NEWS - 1)
    assert last.attributes == {PATH: "eu", ORIGIN_TOPIC: origin_topic("id-of-eu", 1)}


def test_each_broker_has_one_call_with_what_it_has(world: World) -> None:
    """Of two at either end, which have other halves of the topics."""
    source, remote = Source(), Remote()
    source.topics = world.source.topics
    remote.replica.sources = world.replica.sources
    for broker in (source, remote):
        world.loop.run(broker.start())
    for number, name in enumerate(NAMES):
        world.publish(name, BEFORE)
        world.replica.copied(name).is_known = True
        world.source.places[name] = (world.source if number % 2 else source).address
        world.remote.places[name] = (world.remote if number < 10 else remote).address
    outcomes = run(world, [world.errand(name, begin=None) for name in NAMES])
    assert {(outcome.code, outcome.position) for outcome in outcomes} == {("", BEFORE)}
    assert (source.together, world.source.together) == ([NAMES[::2]], [NAMES[1::2]])
    for replica, names in ((world.replica, NAMES[:10]), (remote.replica, NAMES[10:])):
        assert len(replica.together) <= 2, "one call for what has come from each broker of the source"
        assert sorted(name for each in replica.together for name in each) == sorted(names)
        assert replica.openings == 0
    for broker in (source, remote):
        world.loop.run(broker.stop())


def test_a_round_that_is_repeated_copies_nothing_twice(world: World, errands: list[Errand]) -> None:
    """Spark does that with a task whose answer was lost."""
    run(world, errands)
    again = run(world, errands)
    assert {(outcome.code, outcome.position, outcome.messages) for outcome in again} == {("", 150, 0)}
    assert all_is_there(world)


def test_the_same_twice_at_once(world: World, errands: list[Errand]) -> None:
    found: list[CopyOutcome] = []
    threads = [threading.Thread(target=lambda: found.extend(run(world, errands))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {(outcome.code, outcome.position) for outcome in found} == {("", BEFORE + NEWS)}
    assert sum(outcome.messages for outcome in found) == NEWS * len(NAMES)
    assert all_is_there(world)


def test_an_answer_that_is_lost_is_asked_for(world: World, errands: list[Errand]) -> None:
    """Everything is appended, the connection breaks, nobody was told: copies are opened, and say so."""
    world.replica.breaks_together = True
    outcomes = run(world, errands)
    assert {(outcome.code, outcome.position) for outcome in outcomes} == {("", BEFORE + NEWS)}
    assert world.replica.openings == len(NAMES)
    assert all_is_there(world)


@pytest.mark.parametrize("older", ["source", "target"])
def test_a_cluster_of_a_version_that_knows_no_such_calls(
    world: World, errands: list[Errand], older: str
) -> None:
    (world.source if older == "source" else world.replica).is_older = True
    assert {outcome.code for outcome in run(world, errands)} == {""}
    assert world.replica.openings == len(NAMES)
    assert all_is_there(world)
    world.remote.looked_up.clear()
    run(world, errands)
    assert world.remote.looked_up == [], "where topics are is known all the same"


def test_those_that_are_refused_say_why_and_disturb_no_other(world: World, errands: list[Errand]) -> None:
    """One has moved to another broker, one has another copy than was planned for, one is another topic by
    now, one has none any more, one meets a full disk."""
    moved, ahead, _, missing, full = NAMES[:5]
    world.replica.refuse_together[moved] = "not_owner"
    world.replica.copied(ahead).position = BEFORE + 30
    errands[2] = replace(errands[2], target_topic_id=77)
    world.replica.copied(missing).is_known = False

    def order(copied: MemoryCopy, source_range: pb.SourceRange) -> pb.SourceEnded | None:
        if copied is not world.replica.copied(full):
            return None
        return pb.SourceEnded(code="disk_full", may_pass=True, is_known=True, position=copied.position)

    world.replica.order = order
    outcomes = run(world, errands)
    assert [(outcome.code, outcome.position) for outcome in outcomes[:5]] == [
        ("", BEFORE + NEWS),
        ("", BEFORE + NEWS),
        ("target_replaced", BEFORE),
        ("source_position_missing", BEFORE),
        ("disk_full", BEFORE),
    ]
    assert (outcomes[1].messages, outcomes[0].messages) == (20, NEWS)
    assert {(outcome.code, outcome.position) for outcome in outcomes[5:]} == {("", BEFORE + NEWS)}
    assert world.replica.openings == 5
    world.replica.refuse_together.clear()
    assert run(world, [errands[5]])[0].code == ""


def test_a_message_that_is_too_large_stops_its_own_topic(world: World, errands: list[Errand]) -> None:
    """How large one may be is not known before; the target refuses the range, and what is before the
    message is copied all the same."""
    world.publish(NAMES[0], 10, per_batch=10, size=500)
    world.replica.max_message_size = 400

    def order(copied: MemoryCopy, source_range: pb.SourceRange) -> pb.SourceEnded | None:
        if copied is world.replica.copied(NAMES[0]) and source_range.end > BEFORE + NEWS:
            return pb.SourceEnded(code="message_too_large", is_known=True, position=copied.position)
        return None

    world.replica.order = order
    outcomes = run(world, [world.errand(NAMES[0], begin=None, start=BEFORE), *errands[1:]])
    assert (outcomes[0].code, outcomes[0].position) == ("message_too_large", BEFORE + NEWS)
    assert f"offset {BEFORE + NEWS} has 503 bytes, and the target takes 400" in outcomes[0].reason
    assert {outcome.code for outcome in outcomes[1:]} == {""}
    assert all_is_there(world)


def test_what_the_source_has_not_at_hand_is_read_one_by_one(world: World, errands: list[Errand]) -> None:
    world.source.forgotten.add(NAMES[0])
    world.source.gone.add(NAMES[1])
    outcomes = run(world, [*errands[:3], replace(errands[3], topic_id=2), *errands[4:]])
    assert [outcome.code for outcome in outcomes] == ["", "", "", "source_replaced", *[""] * 16]
    assert world.replica.together == [[name for name in NAMES if name not in (NAMES[0], NAMES[1], NAMES[3])]]
    assert world.copied(NAMES[3]) == list(range(BEFORE))


def test_a_source_that_does_not_answer_such_a_call_is_asked_otherwise(
    world: World, errands: list[Errand], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "READ_S", 0.2)
    world.source.is_silent = True
    assert {outcome.code for outcome in run(world, errands)} == {""}
    assert world.replica.together == []
    assert all_is_there(world)


def test_a_target_that_falls_silent_is_not_waited_for(
    world: World, errands: list[Errand], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent may be there or not: the next round is told."""
    for name, seconds in (("SETTLE_S", 1.0), ("END_S", 1.5)):
        monkeypatch.setattr(copying, name, seconds)
    world.call(world.replica.receipts.clear)
    began = time.monotonic()
    outcomes = run(world, errands, budget=0.2)
    assert time.monotonic() - began < 8
    assert {(outcome.code, outcome.may_pass) for outcome in outcomes} == {("unavailable", True)}
    monkeypatch.undo()
    world.call(world.replica.receipts.set)
    assert {(outcome.code, outcome.position) for outcome in run(world, errands)} == {("", BEFORE + NEWS)}
    assert all_is_there(world)


def test_a_call_has_no_more_than_it_may(
    world: World, errands: list[Errand], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "MAX_EACH", 8)
    assert {outcome.code for outcome in run(world, errands)} == {""}
    assert sorted(map(len, world.source.together)) == [4, 8, 8]
    assert sorted(name for names in world.replica.together for name in names) == sorted(NAMES)
    assert max(map(len, world.replica.together)) <= 8
    assert world.replica.openings == 0
    assert all_is_there(world)


def test_more_than_fits_into_calls_is_copied_all_the_same(
    world: World, errands: list[Errand], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the source, what is beyond the limit of a call comes one by one; to the target go more calls."""
    size = sum(each.header.length for each in world.source.topics[NAMES[0]].batches[1:])
    monkeypatch.setattr(copying, "READ_BYTES", 10 * size)
    monkeypatch.setattr(calls_module, "PART_BYTES", 3 * size)
    assert {outcome.code for outcome in run(world, errands)} == {""}
    assert len(world.replica.together) > 1
    assert 0 < world.replica.openings < len(NAMES)
    assert all_is_there(world)


def test_errands_of_other_shapes_are_left_alone(world: World, errands: list[Errand]) -> None:
    """Who only asks, begins, or has history to copy does not take part."""
    asks = replace(errands[0], pieces=(), end=BEFORE)
    begins = replace(errands[1], begin=0)
    outcomes = run(world, [asks, begins])
    assert [(outcome.code, outcome.position) for outcome in outcomes] == [("", BEFORE), ("", BEFORE + NEWS)]
    assert (world.source.together, world.replica.together) == ([], [])


# -- how far they reach ----------------------------------------------------------------------------


def test_the_ends_of_many_are_asked_for_by_one_call(world: World) -> None:
    link = ClusterClient.of(world.ends.source)
    for name in NAMES:
        world.publish(name, BEFORE)
    ends = {
        name: extent.end for name, extent in link.wait_beyond(dict.fromkeys(NAMES, -1), timeout_s=5).items()
    }
    assert ends == dict.fromkeys(NAMES, BEFORE)
    for name in NAMES[5:]:
        world.publish(name, NEWS, per_batch=10)
    ends = {name: extent.end for name, extent in link.wait_beyond(ends, timeout_s=5).items()}
    assert ends == dict.fromkeys(NAMES[:5], BEFORE) | dict.fromkeys(NAMES[5:], BEFORE + NEWS)
    assert world.source.together == [NAMES, NAMES]
    assert world.source.offsets_asked == []


def test_an_end_that_the_broker_does_not_tell_so_is_asked_for_by_itself(world: World) -> None:
    for name in NAMES:
        world.publish(name, BEFORE)
    world.source.gone.add(NAMES[3])
    found = ClusterClient.of(world.ends.source).wait_beyond(dict.fromkeys(NAMES, -1), timeout_s=5)
    assert {name: extent.end for name, extent in found.items()} == dict.fromkeys(NAMES, BEFORE)
    assert [asked.topic for asked in world.source.offsets_asked] == [NAMES[3]]
