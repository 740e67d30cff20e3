"""What a broker process does before it serves, and when it is asked to stop."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from sava.config import Config
from sava.server import Broker, process
from tests.support.waiting import FAR_S, PATIENCE_S


def test_it_takes_as_many_open_files_as_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell starts it with a limit of 1024 files, and a thousand clients connect. Then the journal is to go
    on in its next file, which cannot be opened: the broker stops."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def run(work: Coroutine[Any, Any, int]) -> int:
        work.close()
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    monkeypatch.setattr("uvloop.run", run)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        may_have = process.run(Config())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert may_have == (process.OPEN_FILES if hard < 0 else min(process.OPEN_FILES, hard))


class Leaving:
    """A broker whose topics do not go to others."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.was_cancelled = False
        self.parts = self

    async def leave(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def test_a_second_signal_ends_the_hand_over_that_the_first_one_began() -> None:
    broker, hurry = Leaving(), asyncio.Event()
    leaving = asyncio.create_task(process._leave(cast(Broker, broker), hurry, FAR_S))
    async with asyncio.timeout(PATIENCE_S):
        await broker.began.wait()
        hurry.set()
        await leaving
    assert broker.was_cancelled


async def test_a_hand_over_that_hangs_does_not_keep_the_broker_from_stopping() -> None:
    broker = Leaving()
    async with asyncio.timeout(PATIENCE_S):
        await process._leave(cast(Broker, broker), asyncio.Event(), 0.05)
    assert broker.was_cancelled


async def test_a_hand_over_that_fails_does_not_keep_the_broker_from_stopping() -> None:
    class Failing:
        def __init__(self) -> None:
            self.parts = self

        async def leave(self) -> None:
            raise RuntimeError("a bug")

    async with asyncio.timeout(PATIENCE_S):
        await process._leave(cast(Broker, Failing()), asyncio.Event(), FAR_S)
