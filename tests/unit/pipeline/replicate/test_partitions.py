"""PartitionState: what is planned, when, and what is told of it. Clocks are numbers."""

from __future__ import annotations

import pytest

from sava.pipeline.cluster import PartitionExtent
from sava.pipeline.replicate.partitions import (
    BELIEVED_AFTER_S,
    FIRST_DELAY_S,
    GROWS_AFTER_S,
    IDLE_S,
    LONGEST_DELAY_S,
    ROUND_BYTES,
    CopyStep,
    PartitionState,
    Rate,
    Throttle,
)
from sava.pipeline.replicate.target import CopyOutcome
from sava.proto import replication_pb2 as pb
from sava.replication.matrix import LinkState
from sava.tasks import Backoff

NAME = "/default/orders-part-0"
REMEDY = "`sava replication recreate`"
US = 1_000_000
GROWTH_S = round(GROWS_AFTER_S) + 1


def partition(end: int = 10, *, start: int = 0, now: float = 0.0) -> PartitionState:
    """Admitted, from its first message on."""
    made = PartitionState(NAME, 0, 7, remedy=REMEDY, throttle=Throttle(0, now), now=now)
    made.see(PartitionExtent(start, start, end), now, 100 * US)
    made.start_at(start)
    made.admit(70)
    return made


def told(state: PartitionState, position: int, *, now: float = 0.0, **fields: object) -> None:
    """The step that is planned comes to this end."""
    step = state.plan(now, 0)
    assert step is not None
    state.begin_step(step, 0.0)
    outcome = CopyOutcome(name=NAME, is_known=True, position=position, **fields)  # type: ignore[arg-type]
    state.note(outcome, now, 0)


class TestPlanning:
    def test_the_position_is_asked_for_before_anything_is_copied(self) -> None:
        state = partition()
        assert state.plan(0.0, 0) == CopyStep(0, 0, 256.0, is_heavy=False)
        told(state, 4)
        step = state.plan(0.0, 0)
        assert step is not None
        assert (step.start, step.end, step.is_heavy) == (4, 10, False)

    def test_there_is_one_step_at_a_time(self) -> None:
        state = partition()
        step = state.plan(0.0, 0)
        assert step is not None
        state.begin_step(step, 0.0)
        assert state.plan(0.0, 0) is None
        assert state.due_in(0.0) is None

    def test_a_held_partition_is_left_alone(self) -> None:
        state = partition()
        state.hold(LinkState.PARTITION_MISMATCH, "other partitions")
        assert state.plan(0.0, 0) is None
        state.look(0.0)
        assert (state.state, state.reason) == (LinkState.PARTITION_MISMATCH, "other partitions")

    def test_a_round_is_bounded_by_bytes_once_message_sizes_are_known(self) -> None:
        state = partition(end=1_000_000)
        told(state, 0)
        told(state, 1000, messages=1000, bytes=1000 << 10)
        step = state.plan(0.0, 0)
        assert step is not None
        assert step.is_heavy
        assert (step.start, step.end - step.start) == (1000, ROUND_BYTES >> 10)

    def test_nothing_is_planned_without_something_to_copy(self) -> None:
        state = partition(end=10)
        told(state, 10)
        assert state.plan(0.0, 0) is None
        state.see(PartitionExtent(0, 0, 11), 1.0, 0)
        assert state.plan(1.0, 0) is not None

    def test_a_copy_that_has_not_begun_begins_where_it_was_first_planned(self) -> None:
        state = partition(start=3)
        step = state.plan(0.0, 0)
        assert step is not None
        state.begin_step(step, 0.0)
        state.note(CopyOutcome(name=NAME), 0.0, 0)
        assert (state.begin, state.position, state.was_seen, state.is_answered) == (3, 3, False, True)
        state.see(PartitionExtent(5, 5, 10), 0.0, 0)  # retention goes on
        assert state.begin == 3

    def test_a_copy_does_not_begin_before_it_is_on_record_where(self) -> None:
        state = partition(start=3)
        step = state.plan(0.0, 0)
        assert step is not None
        assert state.is_recorded, "the target has not been heard: the copy may have begun elsewhere"
        state.begin_step(step, 0.0)
        state.note(CopyOutcome(name=NAME), 0.0, 0)
        assert (state.is_recorded, state.due_begin) == (False, 3)
        assert state.plan(0.0, 0) is None
        assert state.due_in(0.0) is None
        state.recorded_begin = 3
        told(state, 10, messages=7)
        assert (state.is_recorded, state.due_begin) == (True, 3)

    def test_where_a_copy_began_stays_on_record_under_any_later_policy(self) -> None:
        state = partition(start=0)
        state.recorded_begin = 3
        told(state, 5)
        assert (state.is_recorded, state.due_begin) == (True, 3)
        state.renew()
        state.start_at(0)
        told(state, 5)  # it was begun again, and is still there
        assert state.due_begin == 3

    def test_a_copy_that_was_reported_must_be_there(self) -> None:
        state = PartitionState(NAME, 0, 7, remedy=REMEDY, throttle=Throttle(0, 0.0), now=0.0)
        state.seed(pb.LinkPartition(position=5, end=9, was_seen=True), is_same_target=True)
        assert (state.was_seen, state.position, state.needs_begin) == (True, 5, False)
        state.start_at(0)
        assert state.begin is None

    def test_a_copy_of_a_topic_that_is_not_there_any_more_begins_anew(self) -> None:
        state = PartitionState(NAME, 0, 7, remedy=REMEDY, throttle=Throttle(0, 0.0), now=0.0)
        state.seed(
            pb.LinkPartition(position=5, messages=5, was_seen=True, disconnects=3), is_same_target=False
        )
        assert (state.was_seen, state.position, state.messages, state.disconnects) == (False, None, 0, 3)

    def test_a_plan_from_before_a_new_beginning_does_not_count(self) -> None:
        """An errand into the old topic is under way when somebody asks for the topic to be created again. Its
        outcome must not make the new topic's copy one that must be there."""
        state = partition()
        told(state, 4)
        step = state.plan(0.0, 0)
        assert step is not None
        state.begin_step(step, 0.0)
        state.renew()
        outcome = CopyOutcome(name=NAME, is_known=True, position=10, messages=6)
        state.note(outcome, 0.0, 0)
        assert (state.is_under_way, state.was_seen, state.position) == (False, False, None)


class TestFailing:
    def test_it_is_tried_again_later_each_time_and_at_once_after_a_success(self) -> None:
        state = partition()
        told(state, 0)
        delays = []
        now = 0.0
        for _ in range(12):
            told(state, 0, now=now, code="unavailable", reason="no answer", may_pass=True)
            due = state.due_in(now)
            assert due is not None
            delays.append(due)
            assert state.plan(now + due - 0.001, 0) is None
            now += due
        assert 0.075 <= delays[0] <= 0.1
        assert 45 <= delays[-1] <= 60
        state.look(now)
        assert (state.state, state.reason, state.restarts) == (LinkState.UNREACHABLE, "no answer", 11)
        told(state, 10, now=now, messages=10)
        state.look(now)
        assert (state.state, state.restarts) == (LinkState.ACTIVE, 12)
        state.see(PartitionExtent(0, 0, 11), now, 0)
        told(state, 10, now=now, code="unavailable", reason="again")
        assert (state.due_in(now) or 1) <= 0.1

    @pytest.mark.parametrize(
        ("code", "expected"),
        [
            ("denied", LinkState.DENIED),
            ("source_unavailable", LinkState.SOURCE_UNREACHABLE),
            ("source_denied", LinkState.FAILED),
            ("schema_refused", LinkState.SCHEMA_REFUSED),
            ("message_too_large", LinkState.FAILED),
            ("source_position_missing", LinkState.FAILED),
        ],
    )
    def test_what_keeps_it_is_its_state(self, code: str, expected: LinkState) -> None:
        state = partition()
        told(state, 0)
        told(state, 0, code=code, reason="why")
        state.look(0.0)
        assert state.state is expected
        assert state.reason.startswith("why")
        assert state.due_in(0.0) is not None  # somebody may have helped meanwhile

    def test_it_is_tried_again_also_when_there_is_nothing_to_copy(self) -> None:
        """Otherwise it would fail for ever: nobody finds out that all is well."""
        state = partition(end=10)
        told(state, 5)
        told(state, 10, messages=5, code="unavailable", reason="the stream broke after the last receipt")
        step = state.plan(1.0, 0)
        assert step is not None
        assert step.start == step.end == 10

    def test_a_round_that_breaks_down_is_nobody_s_fault_until_each_has_its_own(self) -> None:
        state = partition()
        told(state, 0)
        step = state.plan(0.0, 0)
        assert step is not None
        state.begin_step(step, 0.0)
        state.break_down("an executor was lost", 0.0, 0)
        state.look(0.0)
        assert (state.state, state.is_alone, state.is_suspect) == (LinkState.FAILED, True, True)
        told(state, 10, now=1.0, messages=10)
        assert (state.is_alone, state.is_suspect) == (False, False)

    def test_lost_messages_stop_it_until_somebody_agrees(self) -> None:
        state = partition(end=10)
        told(state, 4)
        state.see(PartitionExtent(6, 6, 10), 0.0, 0)
        assert state.plan(0.0, 0) is None
        state.look(0.0)
        assert state.state is LinkState.DATA_LOSS
        assert "from offset 4 to 6" in state.reason
        assert REMEDY in state.reason
        assert state.plan(1000.0, 0) is None
        state.admit(71)  # nothing about the remote helps
        assert state.plan(1000.0, 0) is None

        state.renew()
        state.start_at(0)
        told(state, 4, now=1000.0)
        step = state.plan(1000.0, 0)
        assert step is not None
        assert (step.start, step.skips) == (4, True)
        told(state, 6, now=1000.0)
        step = state.plan(1000.0, 0)
        assert step is not None
        assert (step.start, step.end, step.skips) == (6, 10, False)

    def test_what_is_lost_meanwhile_is_left_out_until_something_is_copied(self) -> None:
        """Retention does not wait. Whoever has agreed to go on with what there is, need not do so again and
        again; but what is lost after that is another loss."""
        state = partition(end=10)
        told(state, 4)
        state.see(PartitionExtent(6, 6, 10), 0.0, 0)
        assert state.plan(0.0, 0) is None
        state.renew()
        state.start_at(0)
        told(state, 4)
        told(state, 6)
        told(state, 6, code="source_gone", reason="6 to 8 are gone")
        step = state.plan(1.0, 0)
        assert step is not None
        assert (step.start, step.skips) == (6, True)
        told(state, 8, now=1.0)
        told(state, 10, now=1.0, messages=2)
        state.see(PartitionExtent(12, 12, 20), 2.0, 0)
        assert state.plan(2.0, 0) is None
        assert state.is_lost

    def test_a_copy_that_has_not_begun_begins_behind_what_is_lost(self) -> None:
        state = partition(end=10)
        step = state.plan(0.0, 0)
        assert step is not None
        for outcome in (CopyOutcome(name=NAME), CopyOutcome(name=NAME, code="source_gone", reason="gone")):
            state.begin_step(step, 0.0)
            state.note(outcome, 0.0, 0)
        assert state.is_lost
        state.renew()
        state.start_at(0)
        for outcome in (CopyOutcome(name=NAME), CopyOutcome(name=NAME, position=6)):
            state.begin_step(step, 0.0)
            state.note(outcome, 0.0, 0)
        assert (state.begin, state.position, state.was_seen) == (6, 6, False)

    def test_nothing_is_taken_for_lost_before_the_target_was_heard(self) -> None:
        """A runner that starts knows an old position; the target is further."""
        state = PartitionState(NAME, 0, 7, remedy=REMEDY, throttle=Throttle(0, 0.0), now=0.0)
        state.seed(pb.LinkPartition(position=2, was_seen=True), is_same_target=True)
        state.see(PartitionExtent(5, 5, 10), 0.0, 0)
        state.admit(70)
        told(state, 8)
        state.look(0.0)
        assert state.state is LinkState.ACTIVE

    def test_a_former_owner_that_does_not_know_it_yet_is_no_loss(self) -> None:
        state = partition(end=10)
        told(state, 12)
        assert state.plan(0.0, 0) is None
        state.look(0.0)
        assert (state.state, state.backlog) == (LinkState.IDLE, None)
        state.see(PartitionExtent(0, 0, 14), BELIEVED_AFTER_S - 1, 0)
        step = state.plan(BELIEVED_AFTER_S - 1, 0)
        assert step is not None
        assert (step.start, step.end) == (12, 14)

    def test_what_is_lost_is_said_with_the_command_that_goes_on(self) -> None:
        state = partition(end=10)
        told(state, 4)
        state.see(PartitionExtent(6, 6, 10), 0.0, 0)
        state.plan(0.0, 0)
        assert state.reason.endswith(f"{REMEDY} continues with what there is")


def rewound() -> PartitionState:
    """Copied up to 100; then its cluster is restored from a state in which it ends at 50."""
    state = partition(end=100)
    told(state, 0)
    told(state, 100, messages=100)
    state.see(PartitionExtent(0, 0, 50), 1.0, 0)
    assert state.plan(1.0, 0) is None
    assert state.plan(1.0 + BELIEVED_AFTER_S, 0) is None
    state.look(1.0 + BELIEVED_AFTER_S)
    return state


def reported(state: PartitionState, now: float = 100.0) -> pb.LinkPartition:
    state.look(now)
    report = state.report(now)
    assert report is not None
    return report


def taken_over(last: pb.LinkPartition, *, end: int) -> PartitionState:
    """By another runner, which begins with what was reported."""
    state = PartitionState(NAME, 0, 7, remedy=REMEDY, throttle=Throttle(0, 0.0), now=0.0)
    state.seed(last, is_same_target=True)
    state.see(PartitionExtent(0, 0, end), 0.0, 0)
    state.start_at(0)
    state.admit(70)
    return state


class TestRewound:
    """A source that was restored from an older state has other messages at offsets that were copied."""

    def test_it_stands_still_until_somebody_acts_wherever_it_ends_by_then(self) -> None:
        state = rewound()
        assert (state.state, state.backlog) == (LinkState.FAILED, None)
        assert "ended at offset 50 here when it was copied up to 100" in state.reason
        assert REMEDY in state.reason
        state.see(PartitionExtent(0, 0, 120), 100.0, 0)
        assert state.plan(100.0, 0) is None
        state.admit(71)
        assert state.plan(1000.0, 0) is None
        report = reported(state)
        assert (report.state, state.backlog, state.due_in(100.0)) == ("failed", None, None)

    def test_the_next_runner_knows_it(self) -> None:
        """Also if the source has grown beyond its copy when it comes."""
        before = rewound()
        after = taken_over(reported(before), end=120)
        assert after.plan(1000.0, 0) is None
        report = reported(after)
        assert (report.state, report.reason, after.backlog) == ("failed", before.reason, None)
        assert (report.rewound_to, report.rewound_from) == (50, 100)

    def test_an_end_that_grows_towards_the_copy_is_the_source_s_own(self) -> None:
        """It would have passed the copy before it is old enough to be believed."""
        state = partition(end=100)
        told(state, 0)
        told(state, 100, messages=100)
        for now in range(GROWTH_S):
            state.see(PartitionExtent(0, 0, 50 + 10 * now), float(now), 0)
            state.plan(float(now), 0)
        state.see(PartitionExtent(0, 0, 120), 10.0, 0)
        assert state.plan(10.0, 0) is None
        assert reported(state).rewound_to == 50

    def test_whoever_agrees_goes_on_where_the_copy_ends(self) -> None:
        state = rewound()
        state.renew()
        state.start_at(0)
        told(state, 100, now=100.0)
        assert state.plan(100.0, 0) is None
        assert state.plan(200.0, 0) is None
        report = reported(state, 200.0)
        assert (report.state, report.rewound_from) == ("failed", 0)
        assert "ends at offset 50, and is copied again from 100 on" in report.reason
        assert state.backlog is None
        state.see(PartitionExtent(0, 0, 120), 300.0, 0)
        step = state.plan(300.0, 0)
        assert step is not None
        assert (step.start, step.end) == (100, 120)
        told(state, 120, now=300.0, messages=20)
        state.see(PartitionExtent(0, 0, 110), 301.0, 0)  # and once more
        for now in (301.0, 301.0 + BELIEVED_AFTER_S):
            assert state.plan(now, 0) is None
        assert reported(state).rewound_from == 120

    def test_who_agrees_while_nobody_copies_is_heard_by_the_next_runner(self) -> None:
        state = PartitionState(NAME, 0, 7, remedy=REMEDY, throttle=Throttle(0, 0.0), now=0.0)
        state.seed(reported(rewound()), is_same_target=False)
        state.see(PartitionExtent(0, 0, 60), 0.0, 0)
        state.start_at(0)
        state.admit(70)
        told(state, 100)
        for now in (0.0, BELIEVED_AFTER_S):
            assert state.plan(now, 0) is None
        assert reported(state).rewound_from == 0
        state.see(PartitionExtent(0, 0, 120), 100.0, 0)
        step = state.plan(100.0, 0)
        assert step is not None
        assert (step.start, step.end) == (100, 120)

    def test_a_copy_that_was_deleted_is_made_anew_of_all_that_is_here(self) -> None:
        state = rewound()
        state.hold(LinkState.REMOTE_DELETED, "deleted")
        state.renew()
        state.start_at(0)
        state.admit(71)
        step = state.plan(100.0, 0)
        assert step is not None
        state.begin_step(step, 100.0)
        state.note(CopyOutcome(name=NAME), 100.0, 0)
        step = state.plan(100.0, 0)
        assert step is not None
        assert (step.start, step.end, state.backlog) == (0, 50, 50)


class TestTelling:
    def test_idle_means_that_nothing_comes_for_a_while(self) -> None:
        state = partition(end=10)
        told(state, 0)
        assert (state.look(0.0), state.state) == (True, LinkState.ACTIVE)
        told(state, 10, messages=10)
        assert (state.look(IDLE_S - 0.1), state.state) == (False, LinkState.ACTIVE)
        assert (state.look(IDLE_S), state.state) == (True, LinkState.IDLE)

    def test_what_is_not_copied_any_more_is_a_disconnect_and_its_backlog_grows(self) -> None:
        state = partition(end=10)
        told(state, 10)
        state.look(0.0)
        state.hold(LinkState.UNREACHABLE, "no answer", retry_ms=5)
        assert state.look(0.0)
        state.see(PartitionExtent(0, 0, 15), 1.0, 200 * US)
        state.look(1.0)
        report = state.report(1.0)
        assert report is not None
        assert (report.state, report.disconnects, report.next_retry_ms) == ("unreachable", 1, 5)
        assert (report.position, report.end, report.oldest_us) == (10, 15, 200 * US)

    def test_a_source_that_is_away_is_no_remote_that_was_lost(self) -> None:
        state = partition(end=10)
        told(state, 4)
        state.look(0.0)
        told(state, 4, code="source_unavailable", reason="no broker answers", may_pass=True)
        report = reported(state, 0.0)
        assert (report.state, report.disconnects) == ("source_unreachable", 0)

    def test_an_end_that_is_not_known_is_not_reported_as_none(self) -> None:
        state = PartitionState(NAME, 0, 7, remedy=REMEDY, throttle=Throttle(0, 0.0), now=0.0)
        assert state.report(0.0) is None
        state.seed(pb.LinkPartition(position=2, end=9, was_seen=True), is_same_target=True)
        report = state.report(0.0)
        assert report is not None
        assert (report.position, report.end) == (2, 9)

    def test_the_age_of_what_was_there_before_is_asked_for(self) -> None:
        state = partition(end=10)
        told(state, 4)
        assert state.oldest_us == 0  # longer than it is watched, and nobody knows how long
        assert state.wants_time(0.0) == 4
        assert state.wants_time(0.0) is None  # not all the time
        state.age.learn(4, 50 * US)
        assert state.oldest_us == 50 * US
        state.see(PartitionExtent(0, 0, 20), 1.0, 101 * US)
        told(state, 12, messages=8)
        assert state.oldest_us == 101 * US
        assert state.wants_time(1000.0) is None
        told(state, 20, messages=8)
        assert state.oldest_us == 0

    def test_until_it_has_looked_a_runner_repeats_what_was_seen_and_when(self) -> None:
        last = pb.LinkPartition(position=4, end=9, was_seen=True, oldest_us=50 * US, end_ms=77)
        state = PartitionState(NAME, 0, 7, remedy=REMEDY, throttle=Throttle(0, 0.0), now=0.0)
        state.seed(last, is_same_target=True)
        report = reported(state)
        assert (report.end, report.end_ms, report.oldest_us) == (9, 77, 50 * US)
        state.see(PartitionExtent(0, 0, 12), 0.0, 100 * US)
        report = reported(state)
        assert (report.end, report.end_ms, report.oldest_us) == (12, 0, 50 * US)

    def test_a_copy_that_was_found_and_not_made_is_known_to_the_next_runner(self) -> None:
        """The remote was removed and added again: all is there already, and nothing is copied. The next
        runner does not reach it."""
        state = partition(end=10)
        told(state, 10)
        after = taken_over(reported(state), end=10)
        assert (after.was_seen, after.position, after.backlog) == (True, 10, 0)

    def test_of_a_deleted_copy_two_runners_say_the_same(self) -> None:
        state = partition(end=4)
        told(state, 4)
        state.hold(LinkState.REMOTE_DELETED, "deleted")
        before = reported(state)
        after = taken_over(before, end=4)
        after.hold(LinkState.REMOTE_DELETED, "deleted")
        again = reported(after)
        assert (again.position, again.end) == (before.position, before.end) == (4, 4)

    def test_counts_go_on_where_the_last_runner_was(self) -> None:
        state = partition(end=10)
        state.seed(pb.LinkPartition(messages=3, skipped=1, restarts=4, was_seen=True), is_same_target=True)
        told(state, 0)
        told(state, 10, messages=5, bytes=50, skipped=1, duplicates=4)
        report = state.report(0.0)
        assert report is not None
        assert (report.messages, report.skipped, report.duplicates, report.restarts) == (8, 2, 4, 4)
        assert (report.rate, report.bytes_rate) == (0.5, 5.0)


class TestPace:
    def test_a_throttle_holds_one_second_s_messages_and_fills_with_time(self) -> None:
        throttle = Throttle(100, 0.0)
        assert throttle.portions([1000], 0.0) == [100]
        throttle.take(100)
        assert throttle.portions([1000], 0.1) == [0]  # too few for a task
        assert throttle.due_in(1000, 0.1) == pytest.approx(0.1)
        assert throttle.portions([1000], 0.5) == [50]
        throttle.give_back(20)
        assert throttle.portions([1000], 0.5) == [70]
        assert throttle.portions([1000], 100.0) == [100]
        assert throttle.portions([3], 100.0) == [3]
        assert throttle.portions([], 100.0) == []

    def test_a_slow_throttle_lets_single_messages_pass(self) -> None:
        throttle = Throttle(1, 0.0)
        throttle.take(sum(throttle.portions([5, 5], 0.0)))
        assert throttle.portions([5, 5], 0.9) == [0, 0]
        assert throttle.portions([5, 5], 1.0) == [1, 0]

    def test_no_rate_is_no_limit(self) -> None:
        throttle = Throttle(0, 0.0)
        throttle.take(1 << 40)
        assert throttle.portions([1 << 30, 5], 0.0) == [1 << 30, 5]
        throttle.set(10, 5.0)
        assert throttle.portions([1000], 5.0) == [10]

    def test_all_get_the_same_or_what_they_want(self) -> None:
        throttle = Throttle(100, 0.0)
        assert throttle.portions([1000, 1000, 1000, 1000], 0.0) == [25] * 4
        assert throttle.portions([1000, 4, 1000], 0.0) == [48, 4, 48]
        assert throttle.portions([30, 20, 10], 0.0) == [30, 20, 10]

    def test_nobody_gets_crumbs_and_the_last_wait_for_their_turn(self) -> None:
        throttle = Throttle(100, 0.0)
        assert throttle.portions([1000] * 50, 0.0) == [5] * 20 + [0] * 30
        assert throttle.portions([1] * 200, 0.0) == [1] * 100 + [0] * 100

    def test_delays_double_to_a_minute(self) -> None:
        delays = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S, jitter=0)
        assert [delays.next() for _ in range(11)] == [
            *(0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2),
            60.0,
        ]
        delays.reset()
        assert delays.next() == 0.1

    def test_a_rate_is_that_of_the_last_seconds(self) -> None:
        rate = Rate()
        rate.note(100, 1000, 0.0)
        rate.note(50, 500, 6.0)
        assert rate.per_second(6.0) == (15.0, 150.0)
        assert rate.per_second(12.0) == (5.0, 50.0)
        assert rate.per_second(20.0) == (0.0, 0.0)
