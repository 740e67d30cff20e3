"""Tasks that nobody waits for, and work that is shared out."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from sava import tasks as module
from sava.errors import HostError
from sava.tasks import Backoff, Reconciler, Stops, cancelled, is_done_within, spawn, spread, until_success
from tests.support.waiting import PATIENCE_S


async def fail() -> None:
    raise ValueError("not foreseen")


class TestSpawned:
    async def test_a_failure_is_told_while_somebody_still_holds_the_task(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """asyncio itself tells of it only when the task is forgotten. The load reports of a broker were held
        so until it stopped: had they failed, nobody would have known why the leader got none."""
        task = spawn(fail(), name="load reports")
        await asyncio.wait((task,))
        assert "a background task failed name=load reports" in caplog.text
        assert "not foreseen" in caplog.text

    async def test_whoever_is_to_decide_about_a_failure_gets_it(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        failures: list[BaseException] = []
        await asyncio.wait((spawn(fail(), name="journal", failed=failures.append),))
        assert [str(failure) for failure in failures] == ["not foreseen"]
        assert not caplog.text

    async def test_ending_it_is_no_failure(self, caplog: pytest.LogCaptureFixture) -> None:
        failures: list[BaseException] = []
        task = spawn(asyncio.sleep(60), name="watch", failed=failures.append)
        await cancelled(None, task)
        assert task.cancelled()
        assert not failures
        assert not caplog.text


async def test_a_wait_that_is_over_leaves_what_it_waited_for() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert not await is_done_within(0, future)
    future.set_result(None)
    assert await is_done_within(1, future)


class TestSpread:
    async def test_results_are_in_the_order_of_the_items_and_no_more_run_than_may(self) -> None:
        running = most = 0

        async def double(number: int) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            for _ in range(10 - number):  # the first take longest
                await asyncio.sleep(0)
            running -= 1
            return 2 * number

        assert await spread(range(10), double, parallel=3) == [2 * number for number in range(10)]
        assert most == 3

    async def test_the_first_failure_is_raised_and_the_rest_is_given_up(self) -> None:
        began: list[int] = []
        ended: list[int] = []

        async def work(number: int) -> None:
            began.append(number)
            try:
                if number == 1:
                    raise ValueError(f"number {number}")
                await asyncio.sleep(60)
            finally:
                ended.append(number)

        with pytest.raises(ValueError, match="number 1"):
            await spread(range(10), work, parallel=2)
        assert sorted(began) == sorted(ended) == [0, 1]


class TestStopping:
    async def test_a_part_that_hangs_is_left_behind_and_the_others_are_stopped(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """journal     waits for a disk that does not answer, and does not hear of being cancelled
        broker      waited for it, and its ports stayed open, its node at work, until the process was killed
        """
        monkeypatch.setattr(module, "STEP_S", 0.05)
        stopped: list[str] = []
        answers = asyncio.Event()

        async def hangs() -> None:
            while not answers.is_set():
                with suppress(asyncio.CancelledError):
                    await answers.wait()

        async def fails() -> None:
            raise KeyError("no such file")

        async def stops(what: str) -> None:
            stopped.append(what)

        stops_all = Stops()
        stops_all.add("node", lambda: stops("node"))
        stops_all.add("journal", hangs)
        stops_all.add("peers", fails)
        stops_all.add("http port", lambda: stops("http port"))
        stopping = asyncio.create_task(stops_all.run())
        try:
            done, _ = await asyncio.wait((stopping,), timeout=PATIENCE_S / 10)
        finally:
            answers.set()
        assert done, "it waits for the part that hangs"
        assert not stopping.result()
        assert stopped == ["http port", "node"]
        assert "not stopped within 0.05 s, left behind part=journal" in caplog.text
        assert "not stopped in order part=peers" in caplog.text

    async def test_what_stops_in_order_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        stops = Stops()
        stops.add("node", lambda: asyncio.sleep(0))
        assert await stops.run()
        assert not caplog.text


# -- trying again ------------------------------------------------------------------------------


def test_pauses_double_up_to_the_limit_and_begin_again_after_a_success() -> None:
    backoff = Backoff(1.0, 5.0, jitter=0)
    assert [backoff.next() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff.is_longest
    backoff.reset()
    assert backoff.next() == 1.0


def test_chance_shortens_a_pause_by_no_more_than_the_jitter() -> None:
    pauses = [Backoff(1.0, 5.0, jitter=0.5).next() for _ in range(200)]
    assert all(0.5 <= pause <= 1.0 for pause in pauses)
    assert len(set(pauses)) > 1


async def test_an_event_ends_a_pause_early() -> None:
    woken = asyncio.Event()
    woken.set()
    async with asyncio.timeout(PATIENCE_S):
        await Backoff(1000.0, 1000.0).pause(woken)


class Passes:
    """What a Reconciler under test does, and what it raises."""

    def __init__(self, *failures: Exception | None) -> None:
        self._failures = list(failures)
        self.count = 0
        self.changed = asyncio.Event()

    async def work(self) -> None:
        self.count += 1
        self.changed.set()
        failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            raise failure

    async def reached(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.count < count:
                self.changed.clear()
                await self.changed.wait()


async def test_a_reconciler_passes_at_once_and_whenever_it_is_woken() -> None:
    passes = Passes()
    reconciler = Reconciler("example", passes.work, period_s=1000.0)
    task = asyncio.create_task(reconciler.run())
    await passes.reached(1)
    reconciler.wake()
    await passes.reached(2)
    await cancelled(task)


async def test_what_changes_during_a_pass_leads_to_another() -> None:
    began, may_end, count = asyncio.Event(), asyncio.Event(), 0

    async def work() -> None:
        nonlocal count
        count += 1
        began.set()
        await may_end.wait()

    reconciler = Reconciler("example", work, period_s=1000.0)
    task = asyncio.create_task(reconciler.run())
    await began.wait()
    began.clear()
    reconciler.wake()
    may_end.set()
    async with asyncio.timeout(PATIENCE_S):
        await began.wait()
    assert count == 2
    await cancelled(task)


async def test_a_pass_comes_without_being_woken_too() -> None:
    passes = Passes()
    task = asyncio.create_task(Reconciler("example", passes.work, period_s=0.01).run())
    await passes.reached(3)
    await cancelled(task)


async def test_the_same_failure_is_logged_once_until_a_pass_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = HostError("the disk is full")
    passes = Passes(full, full, HostError("no route"), None, full)
    task = asyncio.create_task(
        Reconciler("example", passes.work, period_s=0.001, retry=Backoff(0.001, 0.001)).run()
    )
    await passes.reached(6)
    await cancelled(task)
    lines = [record.getMessage() for record in caplog.records if "pass failed" in record.getMessage()]
    assert lines == [
        "example pass failed, retrying error=HostError: the disk is full",
        "example pass failed, retrying error=HostError: no route",
        "example pass failed, retrying error=HostError: the disk is full",
    ]


async def test_what_no_code_foresaw_ends_the_loop() -> None:
    passes = Passes(KeyError("a bug"))
    with pytest.raises(KeyError):
        await Reconciler("example", passes.work, period_s=1000.0).run()


async def test_a_failure_that_repeats_is_reported_once() -> None:
    outcomes: list[object] = [TimeoutError("away"), TimeoutError("away"), HostError("full"), "done"]
    failures: list[str] = []

    async def attempt() -> object:
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    found = await until_success(
        attempt, lambda error: failures.append(str(error)), pauses=Backoff(0.001, 0.001)
    )
    assert (found, failures) == ("done", ["away", "full"])
