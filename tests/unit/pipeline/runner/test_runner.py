"""A runner does what the records say, alone or with others, and never what may be another's."""

from __future__ import annotations

import pytest

from sava.pipeline.runner.kinds import JobProgress
from sava.pipeline.runner.runner import (
    FIRST_DELAY_S,
    LEAVE_S,
    LEFT_S,
    LONGEST_DELAY_S,
    PATIENCE_S,
    STARTING_S,
    STARTS,
    NotStopped,
)
from tests.unit.pipeline.runner.fakes import TTL_S, FakeJob, Hosts


def _started(name: str = "copy") -> tuple[Hosts, FakeJob]:
    hosts = Hosts("a")
    hosts.cluster.apply(name)
    hosts.pass_time(2)
    (job,) = hosts.kinds["a"].running
    return hosts, job


def test_a_pipeline_is_claimed_started_and_reported() -> None:
    hosts, job = _started()
    job.shown = JobProgress(is_running=True, rows=5, rate=2.0, batch=3, lag_messages=7, lag_seconds=0.5)
    hosts.pass_time(3)
    status = hosts.cluster.status("copy")
    assert (status.state, status.rows, status.rate, status.batch) == ("running", 5, 2.0, 3)
    assert (status.lag_messages, status.lag_seconds, status.restarts) == (7, 0.5, 0)


def test_a_lost_answer_to_a_claim_does_not_lose_the_pipeline() -> None:
    hosts = Hosts("a")
    hosts.cluster.apply("copy")
    hosts.controls["a"].lost.add("claim")
    hosts.pass_time(3)
    assert [job.name for job in hosts.kinds["a"].running] == ["copy"]


# -- the claim -----------------------------------------------------------------------------------


def test_a_runner_that_is_cut_off_stops_before_another_may_have_it() -> None:
    hosts = Hosts("a")
    hosts.cluster.apply("copy")
    hosts.pass_time(2)
    hosts.add("b")
    hosts.pass_time(2)
    hosts.controls["a"].is_reachable = False
    hosts.pass_time(0.6 * TTL_S)
    assert not hosts.kinds["a"].running, "stopped while the claim is still its own"
    assert hosts.cluster.holders() == {"copy": "a"}
    hosts.pass_time(TTL_S)  # pass_time checks that it is never run by two
    assert [job.name for job in hosts.kinds["b"].running] == ["copy"]
    hosts.controls["a"].is_reachable = True
    hosts.pass_time(5)
    assert not hosts.kinds["a"].running
    assert hosts.cluster.holders() == {"copy": "b"}


def test_slow_failing_calls_leave_time_to_stop() -> None:
    """Every call takes as long as it may and fails: the clock is looked at often enough all the same."""
    hosts, _ = _started()
    for number in range(20):
        hosts.cluster.apply(f"more-{number}")
    hosts.pass_time(6)
    assert len(hosts.kinds["a"].running) == 21
    hosts.controls["a"].is_reachable = False
    hosts.controls["a"].call_s = 1.5
    began = hosts.cluster.clock.now
    while hosts.kinds["a"].running:
        hosts.cluster.clock.now += 0.2
        hosts.runners["a"].step()
    assert hosts.cluster.clock.now - began < 0.8 * TTL_S


def test_slow_calls_that_are_answered_leave_time_to_stop_too() -> None:
    """Twenty reports of a second each in one step: longer than a claim lives."""
    hosts, _ = _started()
    for number in range(20):
        hosts.cluster.apply(f"more-{number}")
    hosts.pass_time(6)
    hosts.controls["a"].call_s = 1.0
    for _ in range(5):
        hosts.cluster.clock.now += 0.2
        before = len(hosts.controls["a"].calls)
        hosts.runners["a"].step()
        assert len(hosts.controls["a"].calls) > before
    hosts.add("b")
    hosts.controls["a"].call_s = 0.0
    hosts.pass_time(30)
    assert sum(hosts.shares().values()) == 21


def test_when_the_cluster_is_heard_in_time_the_pipeline_goes_on() -> None:
    hosts, _ = _started()
    hosts.controls["a"].is_reachable = False
    hosts.pass_time(0.7 * TTL_S)
    assert not hosts.kinds["a"].running
    hosts.controls["a"].is_reachable = True
    hosts.pass_time(2)
    assert [job.name for job in hosts.kinds["a"].running] == ["copy"]
    assert hosts.cluster.status("copy").restarts == 0, "nothing was wrong with the pipeline"


def test_a_pipeline_that_does_not_stop_in_time_ends_the_runner() -> None:
    hosts, job = _started()
    job.is_stubborn = True
    hosts.controls["a"].is_reachable = False
    began = hosts.cluster.clock.now
    with pytest.raises(NotStopped, match="copy"):
        hosts.pass_time(TTL_S)
    assert hosts.cluster.clock.now - began < TTL_S


def test_a_runner_that_stood_still_stops_everything_as_soon_as_it_moves() -> None:
    """Stopped for a minute (SIGSTOP, a laptop's lid), with another runner there: what it finds first is that
    its claims are void, by its own clock and without asking anybody."""
    hosts = Hosts("a")
    hosts.cluster.apply("copy")
    hosts.pass_time(2)
    job = hosts.kinds["a"].running[0]
    hosts.cluster.clock.now += 60
    hosts.controls["a"].is_reachable = False
    hosts.runners["a"].step()
    assert job.stops == [True]
    assert not hosts.kinds["a"].running


def test_a_lost_lease_is_a_lost_claim() -> None:
    hosts, job = _started()
    hosts.cluster.drop("a")
    hosts.pass_time(2)
    assert job.stops[0] is True
    hosts.pass_time(2)
    assert len(hosts.kinds["a"].running) == 1, "claimed anew"


def test_a_claim_that_somebody_else_has_is_given_up_at_once() -> None:
    hosts, job = _started()
    job.in_batch = True
    record = hosts.cluster.records["copy"]
    record.listed, record.claim = record.listed._replace(holder="z"), 999
    hosts.pass_time(3)
    assert True in job.stops
    assert not hosts.kinds["a"].running
    assert record.claim == 999


def test_a_lost_pipeline_that_does_not_stop_ends_the_runner() -> None:
    hosts, job = _started()
    job.is_stubborn = True
    hosts.cluster.drop("a")
    with pytest.raises(NotStopped, match="copy"):
        hosts.pass_time(TTL_S)


# -- several runners -----------------------------------------------------------------------------


def test_two_runners_share_and_take_over() -> None:
    hosts = Hosts("a", "b")
    for number in range(7):
        hosts.cluster.apply(f"p{number}")
    hosts.pass_time(10)
    assert sorted(hosts.shares().values()) == [3, 4]
    hosts.kill("a")
    hosts.pass_time(TTL_S + LEFT_S)
    assert hosts.shares()["b"] == 7
    assert len(hosts.kinds["b"].running) == 7


def test_a_runner_that_comes_later_gets_its_share() -> None:
    hosts = Hosts("a")
    for number in range(6):
        hosts.cluster.apply(f"p{number}")
    hosts.pass_time(2)
    assert hosts.shares() == {"a": 6}
    hosts.add("b")
    hosts.pass_time(15)
    assert hosts.shares() == {"a": 3, "b": 3}
    moved = sum(len(kind.jobs) for kind in hosts.kinds.values())
    hosts.pass_time(30)
    assert sum(len(kind.jobs) for kind in hosts.kinds.values()) == moved == 9, "and then nothing moves"


def test_a_runner_for_one_pipeline_takes_that_one_only() -> None:
    hosts = Hosts()
    hosts.add("special", only=["p1"])
    for number in range(3):
        hosts.cluster.apply(f"p{number}")
    hosts.pass_time(5)
    assert hosts.cluster.holders() == {"p0": "", "p1": "special", "p2": ""}
    hosts.add("b")
    hosts.pass_time(5)
    assert hosts.cluster.holders() == {"p0": "b", "p1": "special", "p2": "b"}


def test_what_the_others_do_not_take_is_taken() -> None:
    """The other runner has nothing to do, and never claims anything: it is of another version."""
    hosts = Hosts("a")
    hosts.cluster.heard["old"] = 1e12
    hosts.cluster.only["old"], hosts.cluster.kinds["old"] = frozenset(), frozenset({"other"})
    for number in range(4):
        hosts.cluster.apply(f"p{number}")
    hosts.pass_time(2)
    assert hosts.shares()["a"] == 2
    hosts.pass_time(LEFT_S + 2)
    assert hosts.shares()["a"] == 4
    jobs = len(hosts.kinds["a"].jobs)
    hosts.pass_time(10)
    assert len(hosts.kinds["a"].jobs) == jobs == 4, "nothing is given to somebody who does not take it"


def test_a_kind_that_is_not_known_is_left_alone() -> None:
    hosts = Hosts("a")
    hosts.cluster.apply("copy")
    hosts.cluster.change("copy", kind="other")
    hosts.pass_time(5)
    assert hosts.cluster.holders() == {"copy": ""}


# -- errors --------------------------------------------------------------------------------------


def test_a_failing_pipeline_is_tried_again_and_again_with_longer_pauses() -> None:
    hosts = Hosts("a")
    kind = hosts.kinds["a"]
    kind.prepare = lambda job: setattr(job, "ended", "no such topic")
    hosts.cluster.apply("copy")
    hosts.pass_time(1.0, every=0.01)
    quick = len(kind.jobs)
    assert 3 <= quick <= 5
    hosts.pass_time(600, every=0.1)
    slow = len(kind.jobs)
    assert 15 <= slow <= 25
    status = hosts.cluster.status("copy")
    assert (status.state, status.last_error) == ("failing", "no such topic")
    assert status.restarts in (slow - 1, slow), "the last one may not have been seen to end yet"
    kind.prepare = lambda job: None
    hosts.pass_time(LONGEST_DELAY_S + 3)
    status = hosts.cluster.status("copy")
    assert (status.state, status.last_error, status.restarts) == ("running", "", slow)
    hosts.pass_time(LONGEST_DELAY_S)
    kind.running[0].ended = "a hiccup"
    hosts.pass_time(FIRST_DELAY_S + 0.4)
    assert kind.running, "after a long time without an error it is tried at once again"


def test_a_pipeline_is_failing_until_one_batch_has_ended_well() -> None:
    """A query starts well whatever its rows are. The first batch takes a while here, and then fails."""
    hosts, job = _started()
    kind, clock = hosts.kinds["a"], hosts.cluster.clock
    kind.prepare = lambda job: setattr(job, "shown", JobProgress(is_running=True))
    pauses = []
    for _ in range(8):
        job.ended = "boom in the row"
        failed_at = clock.now
        while not kind.running:
            hosts.pass_time(0.2)
        pauses.append(clock.now - failed_at)
        (job,) = kind.running
        hosts.pass_time(LONGEST_DELAY_S + 5)
        status = hosts.cluster.status("copy")
        assert (status.state, status.last_error) == ("failing", "boom in the row")
    assert pauses[-1] > 50 * FIRST_DELAY_S, "not tried at once again: it has done nothing yet"
    job.shown = JobProgress(is_running=True, has_worked=True, rows=3)
    hosts.pass_time(2)
    status = hosts.cluster.status("copy")
    assert (status.state, status.last_error, status.restarts) == ("running", "", 8)


def test_pipelines_are_started_a_few_at_a_time() -> None:
    """Each brings several processes; a dozen at once on two cores and none is in time."""
    hosts = Hosts("a")
    kind = hosts.kinds["a"]
    kind.prepare = lambda job: setattr(job, "shown", JobProgress())
    for number in range(6):
        hosts.cluster.apply(f"p{number}")
    hosts.pass_time(5)
    assert len(kind.jobs) == STARTS
    for job in kind.jobs:
        job.shown = JobProgress(is_running=True)
    hosts.pass_time(1)
    assert len(kind.jobs) == 2 * STARTS
    hosts.pass_time(STARTING_S + 1)
    assert len(kind.jobs) == 6, "what hangs does not hold the others up for ever"


def test_unusable_settings_are_reported_and_corrected_ones_used_at_once() -> None:
    hosts = Hosts("a")
    hosts.cluster.apply("copy", wrong=True)
    hosts.pass_time(100)
    assert hosts.cluster.status("copy").last_error == "wrong settings"
    hosts.kinds["a"].prepare = lambda job: setattr(job, "shown", JobProgress(is_running=True))
    hosts.cluster.apply("copy", right=True)
    hosts.pass_time(3)
    assert hosts.kinds["a"].running[0].settings == {"right": True}
    status = hosts.cluster.status("copy")
    assert (status.state, status.last_error) == ("running", ""), "the error was that of the former settings"


def test_rows_are_counted_over_restarts_and_runners() -> None:
    hosts, job = _started()
    job.shown = JobProgress(is_running=True, rows=5)
    hosts.pass_time(1)
    job.ended = "lost"
    hosts.pass_time(1)
    hosts.kinds["a"].running[0].shown = JobProgress(is_running=True, rows=2)
    hosts.runners["a"].stop()
    hosts.pass_time(2)
    hosts.add("b")
    hosts.pass_time(2)
    hosts.kinds["b"].running[0].shown = JobProgress(is_running=True, rows=1)
    hosts.pass_time(3)
    status = hosts.cluster.status("copy")
    assert (status.rows, status.restarts) == (8, 1)


def test_a_query_that_has_work_and_does_nothing_is_begun_again() -> None:
    hosts, job = _started()
    job.shown = JobProgress(is_running=True, batch=4, has_backlog=True, lag_messages=12)
    hosts.pass_time(55)
    assert hosts.kinds["a"].running == [job]
    hosts.pass_time(10)
    assert hosts.kinds["a"].running != [job]
    assert job.stops == [True], "it is not waited for"
    hosts.pass_time(2)
    assert hosts.cluster.status("copy").restarts == 1


@pytest.mark.parametrize("what", ["idle", "busy"])
def test_a_query_that_is_idle_or_at_work_is_left_alone(what: str) -> None:
    hosts, job = _started()
    for pulse in range(40):
        job.shown = JobProgress(
            is_running=True, has_backlog=what == "busy", pulse=pulse if what == "busy" else 0
        )
        hosts.pass_time(5)
    assert hosts.kinds["a"].running == [job]


# -- what people ask for -------------------------------------------------------------------------


def test_a_paused_pipeline_stops_after_its_batch_and_can_be_resumed() -> None:
    hosts, job = _started()
    job.in_batch = True
    hosts.cluster.change("copy", is_wanted=False)
    hosts.pass_time(5)
    assert job.stops == [False]
    assert hosts.cluster.holders() == {"copy": "a"}, "not let go of before it has stopped"
    job.finish()
    hosts.pass_time(2)
    assert hosts.cluster.holders() == {"copy": ""}
    assert hosts.cluster.status("copy").state == "stopped"
    hosts.pass_time(10)
    assert not hosts.kinds["a"].running
    hosts.cluster.change("copy", is_wanted=True)
    hosts.pass_time(3)
    assert len(hosts.kinds["a"].running) == 1


def test_a_batch_that_takes_too_long_does_not_keep_a_pipeline_running() -> None:
    hosts, job = _started()
    job.in_batch = True
    hosts.cluster.change("copy", is_wanted=False)
    hosts.pass_time(PATIENCE_S + 5)
    assert job.stops == [False, True]
    assert hosts.cluster.holders() == {"copy": ""}


def test_a_pipeline_that_is_gone_is_stopped() -> None:
    hosts, job = _started()
    job.in_batch = True
    del hosts.cluster.records["copy"]
    hosts.pass_time(3)
    assert not hosts.kinds["a"].running
    assert not hosts.runners["a"].hosted


def test_a_changed_pipeline_is_begun_again_after_its_batch() -> None:
    hosts, job = _started()
    job.in_batch = True
    hosts.cluster.apply("copy", speed=2)
    hosts.pass_time(2)
    assert hosts.kinds["a"].running == [job]
    job.finish()
    hosts.pass_time(1)
    (changed,) = hosts.kinds["a"].running
    assert changed.settings == {"speed": 2}
    assert hosts.cluster.status("copy").restarts == 0
    hosts.cluster.change("copy")
    hosts.pass_time(3)
    assert hosts.kinds["a"].running == [changed], "another revision of the same is nothing new"


# -- the end -------------------------------------------------------------------------------------


def test_a_runner_that_is_told_to_end_finishes_its_batches_and_lets_go() -> None:
    hosts, job = _started()
    job.in_batch = True
    hosts.runners["a"].stop()
    hosts.pass_time(3)
    assert (job.stops, hosts.runners["a"].is_done) == ([False], False)
    job.shown = JobProgress(is_running=True, rows=9)
    job.finish()
    hosts.pass_time(2)
    assert hosts.runners["a"].is_done
    assert hosts.cluster.holders() == {"copy": ""}
    assert (hosts.cluster.status("copy").state, hosts.cluster.status("copy").rows) == ("stopped", 9)
    assert not hosts.cluster.heard


def test_told_twice_it_gives_its_batches_up() -> None:
    hosts, job = _started()
    job.in_batch = True
    hosts.runners["a"].stop()
    hosts.pass_time(1)
    hosts.runners["a"].stop()
    hosts.pass_time(2)
    assert job.stops == [False, True]
    assert hosts.runners["a"].is_done


def test_it_ends_without_the_cluster_too() -> None:
    hosts, _ = _started()
    hosts.controls["a"].is_reachable = False
    hosts.runners["a"].stop()
    hosts.pass_time(LEAVE_S + 2)
    assert hosts.runners["a"].is_done


def test_a_runner_without_pipelines_ends_at_once() -> None:
    hosts = Hosts("a")
    hosts.pass_time(1)
    hosts.runners["a"].stop()
    hosts.pass_time(0.4)
    assert hosts.runners["a"].is_done
