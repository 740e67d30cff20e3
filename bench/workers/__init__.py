"""The load generators, one module per client library, each run as ``python -m bench.workers.NAME ADDRESS``.

A worker reads jobs from its standard input, a JSON object in each line, and answers each with one line. A job
is a method; what it returns is the answer, for measurements the fields of ``bench.samples.Sample``.

``SAVA_BENCH_PROFILE=FOLDER`` writes a profile of each job there (and of brokers, see
``bench.broker_process``): for finding out where time goes. The figures of such a run mean nothing.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from bench.samples import open_loop

SIZE: Final = 100
BATCH: Final = 1_000
POOL: Final = 64

PROFILE: Final = os.environ.get("SAVA_BENCH_PROFILE")


def payloads() -> list[list[bytes]]:
    """Batches of messages of 100 bytes that cannot be compressed, each batch another."""
    noise = os.urandom(SIZE * BATCH * POOL)
    messages = [noise[at : at + SIZE] for at in range(0, len(noise), SIZE)]
    return [messages[at : at + BATCH] for at in range(0, len(messages), BATCH)]


async def serve(jobs: object) -> None:
    """Do what the parent asks until it closes the pipe."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        try:
            answer = await _do(jobs, request["job"], request["arguments"])
        except Exception:  # noqa: BLE001 - the parent gets it, and decides
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


async def _do(jobs: object, job: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if not PROFILE:
        return dict(await getattr(jobs, job)(**arguments))
    profile = cProfile.Profile()
    profile.enable()
    try:
        return dict(await getattr(jobs, job)(**arguments))
    finally:
        profile.disable()
        name = type(jobs).__module__.replace("__main__", type(jobs).__name__.lower())
        profile.dump_stats(Path(PROFILE) / f"{name}-{job}-{time.time():.0f}.prof")


class Pace:
    """Messages at a fixed rate, from one job until another: what goes on in the cluster meanwhile is the
    parent's affair. Times are those of the machine's monotonic clock, which is the same in all its
    processes."""

    def __init__(self) -> None:
        self._is_over = False
        self._task: asyncio.Task[list[tuple[float, float]]] | None = None

    def begin(self, send: Callable[[int], Awaitable[object]], per_second: float) -> None:
        self._is_over = False
        self._task = asyncio.create_task(open_loop(send, per_second=per_second, until=lambda: self._is_over))

    async def end(self) -> dict[str, Any]:
        """When each message was due, and how long it took from then until it was acknowledged."""
        assert self._task is not None, "not begun"
        self._is_over = True
        task, self._task = self._task, None
        return {"done": await task}
