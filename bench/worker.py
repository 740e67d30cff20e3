"""A load generator in a process of its own, as its parent holds it; ``bench.workers`` has the other side.

Every system is called by its own Python client in such a process, so that on a machine with few cores a
client and its server share them in the same way whichever is measured. A worker runs as long as its section:
it is imported, connected and warm when its turn comes, and asleep when another's is on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from bench.processes import STOP_TIMEOUT_S, ProcessFailedError
from bench.samples import Sample

ANSWER_BYTES: Final = 64 << 20
JOB_TIMEOUT_S: Final = 120.0

_numbers = itertools.count(1)


class Worker:
    """``async with Worker("nats", folder, address)``; then ``await worker.do(job, …)``, one at a time."""

    def __init__(self, module: str, folder: Path, *arguments: str) -> None:
        self._module = module
        self._log = folder / f"worker-{module}-{next(_numbers)}.log"
        self._arguments = arguments
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"bench.workers.{self._module}", *self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=ANSWER_BYTES,
                start_new_session=True,
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process.stdin is not None
        process.stdin.close()  # the end of its input is the end of a worker
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if kind else STOP_TIMEOUT_S):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()

    async def do(self, job: str, **arguments: Any) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"job": job, "arguments": arguments}).encode() + b"\n")
        try:
            async with asyncio.timeout(JOB_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            raise ProcessFailedError(f"{self._module}: {job} is not done after {JOB_TIMEOUT_S} s") from None
        answer = json.loads(line) if line else {"error": self._log.read_text(errors="replace")[-2000:]}
        if "error" in answer:
            raise ProcessFailedError(f"{self._module}: {job} failed:\n{answer['error']}")
        return dict(answer)

    async def sample(self, job: str, **arguments: Any) -> Sample:
        """A job that measures."""
        return Sample(**await self.do(job, **arguments))
