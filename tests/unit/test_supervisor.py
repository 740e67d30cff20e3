"""What becomes of a broker one of whose tasks dies of a bug."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sava import supervisor as module
from sava.supervisor import Supervisor
from sava.tasks import cancelled
from tests.support.waiting import PATIENCE_S


async def forever() -> None:
    await asyncio.Event().wait()


async def bug() -> None:
    raise KeyError("orders")


async def stray() -> None:
    """Waits for something that somebody else has cancelled."""
    other: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    other.cancel()
    await other


class TestEssential:
    async def test_its_death_ends_the_process_and_is_told_with_its_name_and_place(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It was logged, and the broker stayed ready, with its lease and its topics."""
        supervisor = Supervisor()
        supervisor.essential(bug(), name="agent")
        assert (
            await asyncio.wait_for(supervisor.died, PATIENCE_S) == "the task 'agent' died: KeyError: 'orders'"
        )
        assert supervisor.reason
        assert "an essential task died task=agent" in caplog.text
        assert "in bug" in caplog.text, "the traceback"
        assert supervisor.failures == {"agent": 1}

    async def test_the_first_death_counts(self) -> None:
        """What dies later may die of it."""
        supervisor = Supervisor()
        await asyncio.wait([supervisor.essential(bug(), name=name) for name in ("agent", "cursors")])
        assert "'agent'" in await supervisor.died

    async def test_a_cancellation_that_nobody_meant_for_it_is_its_death(self) -> None:
        """A wait for something that was cancelled elsewhere raises as if the task itself were cancelled:

        topic    is closed: cancels its own work
        agent    waits for that work ─▶ CancelledError ─▶ its loop is over, without an error
        """
        supervisor = Supervisor()
        supervisor.essential(stray(), name="agent")
        assert "cancelled" in await asyncio.wait_for(supervisor.died, PATIENCE_S)

    @pytest.mark.parametrize("work", [forever, lambda: asyncio.sleep(0)])
    async def test_neither_being_stopped_nor_having_done_its_work_is_death(
        self, work: Callable[[], asyncio.Future[None]], caplog: pytest.LogCaptureFixture
    ) -> None:
        supervisor = Supervisor()
        task = supervisor.essential(work(), name="joining")  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await cancelled(task)
        await asyncio.sleep(0)
        assert not supervisor.reason
        assert not caplog.text


class TestRepeated:
    @pytest.fixture(autouse=True)
    def in_no_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)
        monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.004)

    @pytest.mark.parametrize("fault", [bug, stray])
    async def test_it_is_begun_again_and_the_process_goes_on(
        self, fault: Callable[[], asyncio.Future[None]], caplog: pytest.LogCaptureFixture
    ) -> None:
        supervisor = Supervisor()
        goes_on = asyncio.Event()

        async def work() -> None:
            if supervisor.failures["controller"] < 2:
                await fault()
            goes_on.set()
            await forever()

        task = supervisor.repeated(work, name="controller")
        await asyncio.wait_for(goes_on.wait(), PATIENCE_S)
        assert supervisor.failures == {"controller": 2}
        assert "task=controller" in caplog.text
        assert not supervisor.reason
        await cancelled(task)
        assert not supervisor.reason

    async def test_it_can_be_stopped_between_two_attempts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "FIRST_PAUSE_S", 3600)
        supervisor = Supervisor()
        task = supervisor.repeated(bug, name="controller")
        await asyncio.sleep(0)
        assert supervisor.failures
        await cancelled(task)
        assert not supervisor.reason

    async def test_pauses_grow_and_then_another_broker_may_lead(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Not before: a leader knows nothing of how long others have been silent, and one after another that
        leads for a moment would never take a dead broker for dead."""
        supervisor = Supervisor()
        resigned = asyncio.Event()

        async def resign() -> None:
            assert supervisor.failures["controller"] == 3  # after 1, 2 and 4 ms
            resigned.set()
            await forever()

        task = supervisor.repeated(bug, name="controller", resign=resign)
        await asyncio.wait_for(resigned.wait(), PATIENCE_S)
        await cancelled(task)
