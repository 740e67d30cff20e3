"""Programs that use the published ``danube-client``, each in a process of its own: that package and Sava
define the same Protobuf names, of which one process can hold one set.

A program is one function of a file under ``scripts``. It prints one JSON value on a line for whatever it has
to say, the last of them being its result, and reads its orders, if it takes any, from its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.processes import PIPE, Child, start_child
from tests.support.waiting import PATIENCE_S

SCRIPTS = Path(__file__).parent / "scripts"


async def run(script: str, scenario: str, url: str, **arguments: Any) -> Any:
    """Run a program to its end; returns its result."""
    async with Program(script, scenario, url, **arguments) as program:
        return await program.result()


class Program:
    """``async with Program("restart", "produce", broker.url) as program``."""

    def __init__(self, script: str, scenario: str, url: str, **arguments: Any) -> None:
        self._command = [str(SCRIPTS / f"{script}.py"), scenario, url, json.dumps(arguments)]
        self._process: Child
        self._errors: asyncio.Task[bytes]

    async def __aenter__(self) -> Self:
        self._process = await start_child(
            sys.executable,
            *self._command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            limit=16 << 20,
        )
        assert self._process.stderr is not None
        self._errors = asyncio.create_task(self._process.stderr.read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.returncode is None:
            self.resume()
            self._process.kill()
        await self._process.wait()
        errors = await self._errors
        if error is not None:
            print(errors.decode()[-4000:])

    async def line(self, *, timeout: float = PATIENCE_S) -> Any:
        """The next thing it says."""
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout):
            text = await self._process.stdout.readline()
        assert text, f"{self._command[:2]} ended: {(await self._errors).decode()[-3000:]}"
        return json.loads(text)

    async def lines(self, count: int, *, timeout: float = PATIENCE_S) -> list[Any]:
        async with asyncio.timeout(timeout):
            return [await self.line(timeout=timeout) for _ in range(count)]

    def tell(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n".encode())

    async def result(self, *, timeout: float = PATIENCE_S) -> Any:
        """The last thing it says before it ends well."""
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout):
            text = await self._process.stdout.read()
            code = await self._process.wait()
        assert code == 0, f"{self._command[:2]} failed: {(await self._errors).decode()[-3000:]}"
        return json.loads(text.splitlines()[-1])

    def pause(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
