"""The time by which stored things may be deleted, when one of the clocks is wrong."""

from __future__ import annotations

import logging
import time

import pytest

from sava.storage import maintenance
from sava.storage.errors import ObjectStoreUnavailable
from sava.storage.maintenance import ASK_S, ExpiryClock
from sava.storage.objectstore import ObjectStore

NOON_MS = 1_800_000_000_000
DAY_MS = 86_400_000


class Clocks:
    """The broker's, the store's and the monotonic one, each set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own_ms = self.store_ms = NOON_MS
        self.seconds = 1000.0
        self.questions = 0
        self.is_down = False
        monkeypatch.setattr(time, "time_ns", lambda: self.own_ms * 1_000_000)
        monkeypatch.setattr(maintenance, "store_time_ms", self._ask)
        self.clock = ExpiryClock(ObjectStore.open("memory://"), monotonic=lambda: self.seconds)

    async def _ask(self, _: ObjectStore) -> int:
        self.questions += 1
        if self.is_down:
            raise ObjectStoreUnavailable("the object store is down")
        return self.store_ms

    def later(self, seconds: float) -> None:
        self.seconds += seconds
        self.own_ms += round(seconds * 1000)
        self.store_ms += round(seconds * 1000)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


async def test_a_clock_that_is_a_day_ahead_is_not_believed(clocks: Clocks) -> None:
    clocks.own_ms += DAY_MS
    assert await clocks.clock.now_ms() == NOON_MS


async def test_a_store_whose_clock_is_a_day_ahead_is_not_believed(clocks: Clocks) -> None:
    clocks.store_ms += DAY_MS
    assert await clocks.clock.now_ms() == NOON_MS


async def test_a_clock_that_jumps_between_two_questions_is_not_believed(clocks: Clocks) -> None:
    """Schedule: the store is asked at noon. A minute later the broker's clock jumps a day ahead, before the
    next question."""
    assert await clocks.clock.now_ms() == NOON_MS
    clocks.later(60.0)
    clocks.own_ms += DAY_MS
    assert await clocks.clock.now_ms() == NOON_MS + 60_000
    assert clocks.questions == 1


async def test_the_store_is_asked_again_after_a_while(clocks: Clocks) -> None:
    await clocks.clock.now_ms()
    clocks.later(ASK_S)
    clocks.store_ms -= 5_000
    assert await clocks.clock.now_ms() == NOON_MS + round(ASK_S * 1000) - 5_000
    assert clocks.questions == 2


async def test_a_store_that_does_not_answer_is_no_time(clocks: Clocks) -> None:
    clocks.is_down = True
    with pytest.raises(ObjectStoreUnavailable):
        await clocks.clock.now_ms()
    clocks.is_down = False
    assert await clocks.clock.now_ms() == NOON_MS


async def test_clocks_that_differ_are_reported_once(clocks: Clocks, caplog: pytest.LogCaptureFixture) -> None:
    clocks.own_ms += DAY_MS
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await clocks.clock.now_ms()
    (record,) = caplog.records
    assert "86400 s ahead of" in record.getMessage()
