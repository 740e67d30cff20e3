"""Tasks that nobody waits for, and work that is shared out."""

from __future__ import annotations

import asyncio

import pytest

from sava.tasks import cancelled, is_done_within, spawn, spread


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
