from __future__ import annotations

import asyncio
import itertools
import time

from sava.load.traffic import NANOSECONDS, LoadPace, Production


async def test_messages_are_due_at_even_distances_whenever_they_are_asked_for() -> None:
    pace = LoadPace(1000, 0.2)
    times: list[int] = []
    while due := await pace.due(50):
        times += due
        time.sleep(0.01)  # noqa: ASYNC251 (whoever asks is late)
    assert len(times) == 200
    gaps = {later - earlier for earlier, later in itertools.pairwise(times)}
    assert all(abs(gap - NANOSECONDS // 1000) <= 1 for gap in gaps)


async def test_without_a_rate_everything_is_due_until_the_time_is_over() -> None:
    assert len(await LoadPace(None, 60).due(1000)) == 1000
    assert await LoadPace(None, 0).due(1000) == []


async def test_of_many_callers_each_has_a_moment_of_its_own() -> None:
    """And waits for that one alone: if all waited for the next, one would get it and the others would wait
    again, and callers, not calls, would be what takes the time."""
    pace = LoadPace(1000, 0.2)
    asked = 0

    async def call() -> list[int]:
        nonlocal asked
        moments: list[int] = []
        while due := await pace.due(1):
            asked += 1
            moments += due
        return moments

    moments = sorted(itertools.chain(*await asyncio.gather(*(call() for _ in range(100)))))
    assert len(set(moments)) == len(moments) == asked == 200


async def test_producers_that_keep_a_rate_together_take_turns() -> None:
    load = Production(topic="/default/any", run=1, producers=10, rate=1000, seconds=0.1)
    began = time.time_ns()
    paces = [load.pace(number) for number in range(10)]
    moments = sorted(
        itertools.chain(*[[each for _ in range(10) for each in await pace.due(1)] for pace in paces])
    )
    assert len(moments) == 100
    assert moments[0] >= began
    # Each pace has begun a moment after the one before it.
    slack = NANOSECONDS // 2000
    assert all(later - earlier > slack for earlier, later in itertools.pairwise(moments))
