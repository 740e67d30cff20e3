from __future__ import annotations

import itertools
import time

from sava.load.pace import NANOSECONDS, Pace


async def test_messages_are_due_at_even_distances_whenever_they_are_asked_for() -> None:
    pace = Pace(1000)
    until = time.time() + 0.2
    times: list[int] = []
    while due := await pace.due(50, until):
        times += due
        time.sleep(0.01)  # noqa: ASYNC251 (whoever asks is late)
    assert abs(len(times) - (until * NANOSECONDS - times[0]) / NANOSECONDS * 1000) <= 1
    gaps = {later - earlier for earlier, later in itertools.pairwise(times)}
    assert all(abs(gap - NANOSECONDS // 1000) <= 1 for gap in gaps)


async def test_without_a_rate_everything_is_due_until_the_time_is_over() -> None:
    pace = Pace(None)
    assert len(await pace.due(1000, time.time() + 60)) == 1000
    assert await pace.due(1000, time.time() - 1) == []
