"""Rounds: what is copied together, and what becomes of it when something breaks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sava.client.errors import Unavailable
from sava.pipeline.cluster import ClusterAccess, ClusterClient, PartitionExtent
from sava.pipeline.options import TopicPartition
from sava.pipeline.replicate import rounds as module
from sava.pipeline.replicate.copying import copy
from sava.pipeline.replicate.partitions import CopyStep, PartitionState, Throttle
from sava.pipeline.replicate.rounds import (
    MAX_ROUNDS,
    CopyCandidate,
    CopyRounds,
    Drafted,
    RoundResult,
    Weight,
    choose,
    ration,
    share_out,
    skip,
)
from sava.pipeline.replicate.target import CopyOutcome, CopyShare, Errand, LinkEnds
from sava.pipeline.source.planning import Piece
from sava.proto import streams_pb2
from tests.support.waiting import PATIENCE_S
from tests.unit.pipeline.replicate.memory import World

ENDS = LinkEnds(
    source=ClusterAccess("127.0.0.1:1"),
    source_name="east",
    source_id="e",
    target=ClusterAccess("127.0.0.1:2"),
    target_name="west",
    target_id="w",
)


def candidate(name: str, *, messages: int = 10, suspect: bool = False, alone: bool = False) -> CopyCandidate:
    partition = PartitionState(name, 0, 1, remedy="", throttle=Throttle(0, 0.0), now=0.0)
    partition.is_suspect, partition.is_alone = suspect, alone
    return CopyCandidate(partition, CopyStep(0, messages, 256.0, is_heavy=messages > 4096))


def errand(name: str, weight: float) -> Errand:
    piece = Piece(TopicPartition(name, 0), name, 0, 100, None, weight / 100)
    return Errand(
        name=name,
        topic_id=1,
        target_topic_id=2,
        subject="",
        begin=0,
        end=100,
        pieces=(piece,),
        store_url="",
        forward=False,
    )


def names(chosen: list[tuple[Weight, list[CopyCandidate]]]) -> list[tuple[Weight, list[str]]]:
    return [(weight, [each.partition.name for each in of_it]) for weight, of_it in chosen]


class TestChoosing:
    def test_those_that_would_keep_others_waiting_go_by_themselves(self) -> None:
        found = [
            candidate("a"),
            candidate("history", messages=1_000_000),
            candidate("b"),
            candidate("slow", suspect=True),
        ]
        assert names(choose(found, [], 2)) == [
            (Weight.LIGHT, ["a", "b"]),
            (Weight.HEAVY, ["history"]),
            (Weight.SUSPECT, ["slow"]),
        ]

    def test_there_is_always_room_for_a_light_round(self) -> None:
        under_way: list[Weight] = []
        heavy = [candidate("history", messages=1_000_000), candidate("slow", suspect=True)]
        for _ in range(10):
            under_way += [weight for weight, _ in choose(heavy, under_way, 2)]
        assert under_way == [Weight.HEAVY, Weight.SUSPECT]
        for _ in range(10):
            under_way += [weight for weight, _ in choose([candidate("a")], under_way, 2)]
        assert len(under_way) == MAX_ROUNDS

    def test_a_round_has_what_can_be_done_in_its_time_and_nobody_is_forgotten(self) -> None:
        """After an outage everybody has much to copy."""
        found = [candidate(f"h{number}", messages=1_000_000) for number in range(20)]
        seen: list[str] = []
        for now in range(1, 6):
            ((_, chosen),) = choose(found, [], 2)
            assert len(chosen) == 4
            seen += [each.partition.name for each in chosen]
            for each in chosen:
                each.partition.began_at = now
        assert sorted(seen) == sorted(each.partition.name for each in found)
        light = [candidate(f"l{number}", messages=4096) for number in range(100)]
        ((_, chosen),) = choose(light, [], 2)
        assert len(chosen) == 32
        ((_, chosen),) = choose([candidate(f"s{number}", suspect=True) for number in range(20)], [], 2)
        assert len(chosen) == 8

    def test_after_a_breakdown_each_has_a_round_of_its_own(self) -> None:
        found = [candidate(name, alone=True) for name in "abc"]
        assert names(choose(found, [], 2)) == [(Weight.SUSPECT, ["a"])]
        assert choose(found, [Weight.SUSPECT], 2) == []


class TestSharing:
    def test_small_ones_are_one_task(self) -> None:
        errands = [errand(f"t{number}", 1000) for number in range(100)]
        (share,) = share_out(errands, ENDS, tasks=4, budget_s=1.0)
        assert len(share.errands) == 100
        assert (share.budget_s, share.ends) == (1.0, ENDS)

    def test_larger_ones_are_spread_evenly_and_never_cut(self) -> None:
        errands = [errand(f"t{number}", 1 << 20) for number in range(6)] + [errand("large", 5 << 20)]
        shares = share_out(errands, ENDS, tasks=2, budget_s=1.0)
        assert len(shares) == 2
        assert sorted(each.name for share in shares for each in share.errands) == sorted(
            each.name for each in errands
        )
        weights = [sum(p.weight for each in share.errands for p in each.pieces) for share in shares]
        assert max(weights) < 1.5 * min(weights)

    def test_one_is_one(self) -> None:
        assert len(share_out([errand("t", 1 << 30)], ENDS, tasks=8, budget_s=1.0)) == 1


class Engine(module.CopyEngine):
    """Runs what the test says, in the thread that asks."""

    cores = 2

    def __init__(self, run: Callable[[Sequence[CopyShare]], list[CopyOutcome]]) -> None:
        self._run = run
        self.groups: list[str] = []
        self.cancelled: list[str] = []
        self.on_cancel = threading.Event()

    def run(self, group: str, shares: Sequence[CopyShare]) -> list[CopyOutcome]:
        self.groups.append(group)
        return self._run(shares)

    def cancel(self, group: str) -> None:
        self.cancelled.append(group)
        self.on_cancel.set()


def draft(name: str, *, messages: int = 10) -> Drafted:
    step = CopyStep(0, messages, 256.0, is_heavy=messages > 4096)
    empty = errand(name, 0.0)
    return Drafted(empty, TopicPartition(name, 0), step, stored=messages)


class Source:
    """A cluster that does not answer much."""

    def __init__(self, first: int = 0) -> None:
        self._first = first

    @property
    def link(self) -> ClusterClient:
        found: Any = self
        return found

    def extents(self, names: Sequence[str]) -> dict[str, PartitionExtent]:
        return {name: PartitionExtent(self._first, self._first, 100) for name in names}

    def segments(self, name: str, start: int) -> Any:
        raise Unavailable(f"no broker has answered of {name}")


def made(engine: Engine) -> tuple[CopyRounds, queue.Queue[RoundResult]]:
    done: queue.Queue[RoundResult] = queue.Queue()
    return CopyRounds("replicate-west", engine, Source().link, done.put), done


class TestRunning:
    def test_outcomes_come_by_name(self) -> None:
        engine = Engine(
            lambda shares: [
                CopyOutcome(name=each.name, is_known=True, position=each.end)
                for share in shares
                for each in share.errands
            ]
        )
        rounds, done = made(engine)
        group = rounds.start(Weight.LIGHT, [draft("a"), draft("b")], ENDS)
        found = done.get(timeout=PATIENCE_S)
        assert (found.group, found.error, set(found.outcomes)) == (group, "", {"a", "b"})
        rounds.close()

    def test_what_breaks_is_told_and_others_go_on(self) -> None:
        answers = iter([RuntimeError("Job aborted: executor lost"), None])

        def run(shares: Sequence[CopyShare]) -> list[CopyOutcome]:
            if (error := next(answers)) is not None:
                raise error
            return [CopyOutcome(name=each.name) for share in shares for each in share.errands]

        rounds, done = made(Engine(run))
        rounds.start(Weight.LIGHT, [draft("a")], ENDS)
        broken = done.get(timeout=PATIENCE_S)
        assert (broken.error, broken.outcomes) == ("RuntimeError: Job aborted: executor lost", {})
        rounds.start(Weight.LIGHT, [draft("a")], ENDS)
        assert done.get(timeout=PATIENCE_S).error == ""
        rounds.close()

    def test_a_silent_source_is_the_outcome_of_that_partition_alone(self) -> None:
        engine = Engine(lambda shares: [CopyOutcome(name="a", is_known=True)])
        rounds, done = made(engine)
        rounds.start(Weight.HEAVY, [draft("a"), draft("history", messages=1_000_000)], ENDS)
        found = done.get(timeout=PATIENCE_S)
        assert (found.error, found.outcomes["a"].code) == ("", "")
        history = found.outcomes["history"]
        assert (history.code, history.may_pass) == ("source_unavailable", True)
        rounds.close()

    def test_a_round_that_does_not_end_is_cancelled_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "OVERDUE_S", 0.0)
        engine = Engine(lambda shares: [])

        def hang(shares: Sequence[CopyShare]) -> list[CopyOutcome]:
            assert engine.on_cancel.wait(PATIENCE_S)
            raise RuntimeError("cancelled")

        engine._run = hang
        rounds, done = made(engine)
        group = rounds.start(Weight.LIGHT, [draft("a")], ENDS)
        later = 1e12
        assert rounds.overdue(later) == [group]
        rounds.cancel_overdue(later)
        rounds.cancel_overdue(later)
        assert engine.cancelled == [group]
        assert done.get(timeout=PATIENCE_S).error == "RuntimeError: cancelled"
        rounds.close()

    def test_stopping_does_not_wait_for_a_source_that_does_not_answer(self) -> None:
        asked, answered = threading.Event(), threading.Event()

        def segments(name: str, start: int) -> Any:
            asked.set()
            assert answered.wait(PATIENCE_S)
            return streams_pb2.SegmentsResponse(store_url="file:///nowhere")

        engine = Engine(lambda shares: [])
        rounds, done = made(engine)
        rounds._history._cluster.segments = segments  # type: ignore[method-assign]
        rounds.start(Weight.HEAVY, [draft("history", messages=1_000_000)], ENDS)
        assert asked.wait(PATIENCE_S)
        was_any = rounds.is_any
        rounds.stop()
        assert (was_any, rounds.is_any) == (True, False)
        answered.set()
        assert done.get(timeout=PATIENCE_S).error == "the link is stopped"
        assert engine.groups == []
        rounds.close()

    def test_extents_do_not_matter_for_a_light_one(self) -> None:
        """It is read from the owner, and the driver asks nobody."""
        shares: list[CopyShare] = []

        def run(given: Sequence[CopyShare]) -> list[CopyOutcome]:
            shares.extend(given)
            return []

        rounds, done = made(Engine(run))
        rounds.start(Weight.LIGHT, [draft("a")], ENDS)
        done.get(timeout=PATIENCE_S)
        (piece,) = shares[0].errands[0].pieces
        assert (piece.start, piece.end, piece.segment) == (0, 10, None)
        rounds.close()

    def test_only_errands_that_are_light_and_did_not_fail_are_copied_together(self) -> None:
        shares: list[CopyShare] = []

        def run(given: Sequence[CopyShare]) -> list[CopyOutcome]:
            shares.extend(given)
            return []

        rounds, done = made(Engine(run))
        for weight in Weight:
            rounds.start(weight, [draft("a")], ENDS)
            done.get(timeout=PATIENCE_S)
        assert [share.is_light for share in shares] == [weight is Weight.LIGHT for weight in Weight]
        rounds.close()


class TestRationing:
    """Partitions of one link, whose rounds take no time. The clock is a number."""

    def throttled(self, rate: int, *backlogs: int) -> None:
        self.throttle = Throttle(rate, 0.0)
        self.now = 0.0
        self.partitions = [self.partition(f"p{number}", end) for number, end in enumerate(backlogs)]

    def partition(self, name: str, end: int) -> PartitionState:
        partition = PartitionState(name, 0, 1, remedy="", throttle=self.throttle, now=0.0)
        partition.see(PartitionExtent(0, 0, end), self.now, 0)
        partition.start_at(0)
        partition.admit(2)
        return partition

    def copy(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            planned = [(each, each.plan(self.now, 0)) for each in self.partitions]
            candidates = [CopyCandidate(each, step) for each, step in planned if step is not None]
            for _, chosen in ration(choose(candidates, [], 2), self.throttle, self.now):
                for partition, step in chosen:
                    partition.begin_step(step, self.now)
                    outcome = CopyOutcome(
                        name=partition.name, is_known=True, position=step.end, messages=step.messages
                    )
                    partition.note(outcome, self.now, 0)
            self.now += 0.01

    def test_a_link_keeps_its_rate_however_many_partitions_it_has(self) -> None:
        self.throttled(1000, *[1_000_000] * 60)
        self.copy(10.0)
        counts = [partition.messages for partition in self.partitions]
        assert 10_000 <= sum(counts) <= 11_050
        assert min(counts) > 100
        assert max(counts) - min(counts) <= 250, "what went at once in the beginning"

    def test_a_short_partition_does_not_wait_for_a_long_one(self) -> None:
        self.throttled(1000, *[1_000_000] * 10)
        self.copy(5.0)
        self.partitions.append(self.partition("new", 20))
        self.copy(0.5)
        assert self.partitions[-1].messages == 20
        self.copy(4.5)
        assert 10_000 <= sum(partition.messages for partition in self.partitions) <= 11_050

    def test_what_failed_was_not_copied(self) -> None:
        self.throttled(100, 1000)
        (partition,) = self.partitions
        partition.is_answered = True
        step = partition.plan(0.0, 0)
        assert step is not None
        ((_, (chosen,)),) = ration([(Weight.LIGHT, [CopyCandidate(partition, step)])], self.throttle, 0.0)
        assert chosen.step.messages == 100
        partition.begin_step(chosen.step, 0.0)
        assert self.throttle.portions([100], 0.0) == [0]
        partition.break_down("an executor was lost", 0.0, 0)
        assert self.throttle.portions([100], 0.0) == [100]

    def test_whoever_only_asks_needs_no_allowance(self) -> None:
        self.throttled(10, 100)
        self.throttle.take(10)
        asks = CopyCandidate(self.partitions[0], CopyStep(0, 0, 256.0, is_heavy=False, skips=True))
        waits = candidate("waits")
        assert ration([(Weight.LIGHT, [waits]), (Weight.SUSPECT, [asks])], self.throttle, 0.0) == [
            (Weight.SUSPECT, [asks])
        ]


def test_an_extent_is_what_a_partition_needs_to_be_planned() -> None:
    partition = PartitionState("a", 0, 1, remedy="", throttle=Throttle(0, 0.0), now=0.0)
    partition.start_at(0)
    partition.admit(2)
    assert partition.plan(0.0, 0) is None
    partition.see(PartitionExtent(0, 0, 1), 0.0, 0)
    assert partition.plan(0.0, 0) is not None


def test_what_is_lost_is_left_out_of_the_copy_when_somebody_has_agreed(world: World) -> None:
    world.publish("/default/t", 100)
    copy(CopyShare(ends=world.ends, errands=(world.errand("/default/t", end=40),), budget_s=1.0))
    lost = replace(world.errand("/default/t", begin=None), pieces=())
    link = Source(first=60)
    outcome = skip(link.link, lost, world.ends, 40)
    assert (outcome.is_known, outcome.position, outcome.code) == (True, 60, "")
    # Somebody else was faster, or it was repeated: nothing more is left out.
    assert skip(Source(first=80).link, lost, world.ends, 40).position == 60
    assert skip(Source(first=50).link, lost, world.ends, 60).position == 60
    copy(
        CopyShare(ends=world.ends, errands=(world.errand("/default/t", begin=None, start=60),), budget_s=1.0)
    )
    assert world.copied("/default/t") == [*range(40), *range(60, 100)]


def test_a_copy_that_has_not_begun_begins_behind_what_is_lost(world: World) -> None:
    world.publish("/default/t", 100)
    outcome = skip(Source(first=60).link, world.errand("/default/t"), world.ends, 0)
    assert (outcome.is_known, outcome.position) == (False, 60)
