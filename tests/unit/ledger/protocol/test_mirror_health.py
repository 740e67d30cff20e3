"""How long an owner waits for a silent mirror, and which mirrors it avoids."""

from __future__ import annotations

from random import Random

import pytest

from sava.ledger.protocol.owner import (
    AVOID_S,
    DAMPED_S,
    ENOUGH_ANSWERS,
    FIRST_REFUSED_S,
    FLOOR_S,
    LONGEST_REFUSED_S,
    LONGEST_RETRY_S,
    RETRY_S,
    Answers,
    Health,
)
from sava.ledger.protocol.record import StorageId

A, B = StorageId("a"), StorageId("b")
LONGEST_S = 5.0


def answering(delay: float, *, times: int = 100) -> tuple[Answers, float]:
    """A mirror that has answered so often, each time after ``delay``; and the time."""
    answers, now = Answers(0.0), 0.0
    for end in range(1, times + 1):
        answers.expect(now, end)
        now += delay
        answers.answered(now, end, end)
        now += 0.1
    return answers, now


def refused_again_and_again(health: Health, storage: StorageId, *, until: float, times: int = 8) -> float:
    """A mirror that has no room each time it is tried, the last time at ``until``; for how long it is avoided
    after that."""
    pauses = [min(FIRST_REFUSED_S * 2.0**count, LONGEST_REFUSED_S) for count in range(times)]
    now = until - sum(pauses[:-1])
    for pause in pauses:
        assert storage not in health.avoided([], now)
        assert health.failed(storage, now, has_refused=True, is_needed=False)
        assert storage in health.avoided([], now + pause - 0.01)
        now += pause
    return pauses[-1]


def test_a_mirror_that_has_everything_owes_nothing() -> None:
    answers, now = answering(0.01)
    assert answers.silence(now + 100) == 0
    answers.expect(now + 100, 1000)
    assert abs(answers.silence(now + 101) - 1.0) < 1e-6


def test_silence_ends_with_each_answer_that_is_new() -> None:
    answers, now = answering(0.01)
    answers.expect(now, 200)
    answers.expect(now + 0.5, 300)
    answers.answered(now + 0.9, 200, 300)
    assert abs(answers.silence(now + 1.0) - 0.1) < 1e-6
    answers.answered(now + 1.1, 300, 300)
    assert answers.silence(now + 9) == 0


def test_a_lost_connection_owes_an_answer_and_measures_nothing() -> None:
    answers, now = answering(0.01)
    answers.lost(now)
    assert abs(answers.silence(now + 2) - 2.0) < 1e-6
    answers.answered(now + 3, 100, 100)
    assert answers.p99 is not None
    assert answers.p99 < 0.02


def test_a_needed_mirror_has_a_second_and_any_other_the_whole_timeout() -> None:
    health = Health(longest_s=LONGEST_S)
    fast, now = answering(0.005)
    assert health.patience(fast, now, is_needed=True) == FLOOR_S
    assert health.patience(fast, now, is_needed=False) == LONGEST_S


def test_a_slow_mirror_sets_its_own_measure() -> None:
    health = Health(longest_s=LONGEST_S)
    slow, now = answering(0.6)
    assert 2.9 < health.patience(slow, now, is_needed=True) < 3.1
    slower, now = answering(3.0)
    assert health.patience(slower, now, is_needed=True) == LONGEST_S


def test_a_mirror_of_few_answers_has_twice_the_floor() -> None:
    few, now = answering(0.005, times=ENOUGH_ANSWERS - 1)
    assert Health(longest_s=LONGEST_S).patience(few, now, is_needed=True) == 2 * FLOOR_S


@pytest.mark.parametrize("seed", [1, 2])
def test_a_line_with_delay_and_loss_trips_at_most_once_a_day(seed: int) -> None:
    """A delay of 200 ms, and a loss of 2 percent.

    A day of one message per second. A lost packet comes again after a retransmission timeout of 600 ms,
    which doubles with each further loss."""
    rng, health = Random(seed), Health(longest_s=LONGEST_S)
    answers, now, trips = Answers(0.0), 0.0, 0
    for end in range(1, 86_400):
        answers.expect(now, end)
        delay, timeout = 0.4 + rng.random() * 0.02, 0.6
        while rng.random() < 0.04:  # either direction
            delay, timeout = delay + timeout, 2 * timeout
        if delay > FLOOR_S:
            trips += delay > health.patience(answers, now, is_needed=True)
        now += delay
        answers.answered(now, end, end)
        now += 0.6
    assert trips <= 1, f"{trips} changes of mirrors in a day"


def test_each_change_by_the_short_patience_doubles_the_floor_for_a_minute() -> None:
    health = Health(longest_s=LONGEST_S)
    fast, now = answering(0.005)
    assert health.failed(A, now, has_refused=False, is_needed=True)
    assert health.patience(fast, now, is_needed=True) == 2 * FLOOR_S
    assert not health.failed(A, now, has_refused=False, is_needed=True), "it is one failure, seen twice"
    assert health.failed(B, now, has_refused=False, is_needed=True)
    assert health.patience(fast, now, is_needed=True) == 4 * FLOOR_S
    assert health.patience(fast, now + DAMPED_S + 1, is_needed=True) == FLOOR_S


def test_what_an_owner_slept_through_is_not_silence_of_its_mirrors() -> None:
    """Schedule: a message is on its way to the mirror when the owner is stopped for a minute. The answer lies
    in the owner's socket when it continues."""
    answers, now = answering(0.005)
    answers.expect(now, 1000)
    answers.stood_still(60.0)
    assert answers.silence(now + 60.1) < 0.2
    answers.answered(now + 60.1, 1000, 1000)
    assert answers.p99 is not None
    assert answers.p99 < 0.01, "the pause is not taken for the mirror's answer"


def test_the_broker_that_failed_longest_ago_is_taken_first() -> None:
    """Places go round, with a pause.

    Two mirrors have had no room for a while, and there is one place."""
    health = Health(longest_s=LONGEST_S)
    for storage in (A, B):
        refused_again_and_again(health, storage, until=0.0)
    health.failed(A, 1.0, has_refused=True, is_needed=True)
    health.failed(B, 2.0, has_refused=True, is_needed=True)
    assert health.avoided([B], 2.0) == (A, B)
    health.retried(2.0)
    health.failed(A, 2.1, has_refused=True, is_needed=True)
    assert health.avoided([A], 2.1) == (A, B), "not before the pause is over"
    assert health.avoided([A], 2.0 + RETRY_S) == (B, A)
    for at in range(3, 20):
        health.retried(float(at))
    assert health.avoided([A], 19.0 + LONGEST_RETRY_S - 0.1) == (A, B)
    assert health.avoided([A], 19.0 + LONGEST_RETRY_S) == (B, A), "the pause is bounded"


def test_avoidance_ends_with_its_time_or_with_an_answer() -> None:
    health = Health(longest_s=LONGEST_S)
    health.failed(A, 0.0, has_refused=False, is_needed=False)
    health.failed(B, 0.0, has_refused=True, is_needed=False)
    assert health.avoided([], FIRST_REFUSED_S - 0.1) == (A, B)
    assert health.avoided([], FIRST_REFUSED_S) == (A,)
    assert health.avoided([], AVOID_S) == ()
    health.failed(A, 100.0, has_refused=False, is_needed=False)
    health.recovered(A)
    assert health.avoided([], 100.0) == ()


def test_a_mirror_that_keeps_refusing_is_tried_after_doubling_pauses() -> None:
    """Pauses double up to a minute.

    Schedule: a mirror's disk is full for minutes. It is tried after 1, 2, 4 .. 60 s: each try is two
    writes to the metadata store. When it had room for two minutes, the next pause is a second."""
    health = Health(longest_s=LONGEST_S)
    assert refused_again_and_again(health, A, until=1000.0) == LONGEST_REFUSED_S
    well_again = 1000.0 + 3 * LONGEST_REFUSED_S
    health.failed(A, well_again, has_refused=True, is_needed=False)
    assert health.avoided([], well_again + FIRST_REFUSED_S) == ()


def test_one_refusal_that_is_seen_again_and_again_counts_once() -> None:
    """The owner looks four times a second. A mirror that stays a member has refused once."""
    health = Health(longest_s=LONGEST_S)
    for now in (0.0, 0.25, 0.5):
        health.failed(A, now, has_refused=True, is_needed=True)
    assert health.avoided([], 0.5 + FIRST_REFUSED_S) == ()
