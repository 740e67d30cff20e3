"""Child processes of asynchronous tests, with the interface of asyncio's.

uvloop starts a child by forking and running some Python in it. In a process that has used gRPC, what is freed
there may be a gRPC channel, which waits for a thread that the child does not have: it spins for ever and
never becomes the program it was to be. ``subprocess`` runs no Python between fork and exec.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Mapping
from typing import IO, TypedDict, Unpack

from tests.support.processes import Forked

PIPE = subprocess.PIPE


class Input:
    """The child's standard input; what tests write there is small."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe

    def write(self, data: bytes) -> None:
        self._pipe.write(data)
        self._pipe.flush()

    def close(self) -> None:
        self._pipe.close()


class _Output(asyncio.StreamReaderProtocol):
    """Tells when everything that the child has said is here."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.has_ended = asyncio.Event()

    def eof_received(self) -> bool:
        self.has_ended.set()
        return bool(super().eof_received())

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended.set()
        super().connection_lost(error)


class Child:
    def __init__(self, process: subprocess.Popen[bytes] | Forked) -> None:
        self._process = process
        self._outputs: list[tuple[asyncio.BaseTransport, _Output]] = []
        self._waiting: asyncio.Future[int] | None = None
        self.stdin: Input | None = Input(process.stdin) if process.stdin is not None else None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def connect(self, limit: int) -> None:
        if self._process.stdout is not None:
            self.stdout = await self._reader(self._process.stdout, limit)
        if self._process.stderr is not None:
            self.stderr = await self._reader(self._process.stderr, limit)

    async def _reader(self, pipe: IO[bytes], limit: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader(limit=limit)
        output = _Output(reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: output, pipe)
        self._outputs.append((transport, output))
        return reader

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    async def wait(self) -> int:
        if self._waiting is None:
            self._waiting = asyncio.ensure_future(asyncio.to_thread(self._process.wait))
        code = await asyncio.shield(self._waiting)
        if self.stdin is not None:
            self.stdin.close()
        for transport, output in self._outputs:
            with contextlib.suppress(TimeoutError):  # nobody reads it, or a child of the child goes on
                async with asyncio.timeout(1):
                    await output.has_ended.wait()
            transport.close()
        return code

    async def communicate(self) -> tuple[bytes, bytes]:
        """Everything that it says, up to its end."""
        if self.stdin is not None:
            self.stdin.close()
        said = await asyncio.gather(*(_all_of(reader) for reader in (self.stdout, self.stderr)))
        await self.wait()
        return said[0], said[1]


async def _all_of(reader: asyncio.StreamReader | None) -> bytes:
    return await reader.read() if reader is not None else b""


class Surroundings(TypedDict, total=False):
    """What a child is given; what is left out it has in common with this process."""

    stdin: int | None
    stdout: int | None
    stderr: int | None
    env: Mapping[str, str] | None


async def start_child(*command: str, limit: int = 1 << 16, **given: Unpack[Surroundings]) -> Child:
    process = subprocess.Popen(command, **given)  # noqa: ASYNC220 (that is the point)
    return await _connected(process, limit)


async def start_sava(
    *arguments: str, module: str = "sava.cli", limit: int = 1 << 16, **given: Unpack[Surroundings]
) -> Child:
    """``python -m sava.cli``, or another program that is mostly Sava."""
    return await _connected(Forked(module, arguments, **given), limit)


async def _connected(process: subprocess.Popen[bytes] | Forked, limit: int) -> Child:
    child = Child(process)
    await child.connect(limit)
    return child
