"""Child processes of asynchronous tests, with the interface of asyncio's.

uvloop starts a child by forking and running some Python in it. In a process that has used gRPC, what is freed
there may be a gRPC channel, which waits for a thread that the child does not have: it spins for ever and
never becomes the program it was to be. ``subprocess`` runs no Python between fork and exec.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping
from typing import IO

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


class Child:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._transports: list[asyncio.BaseTransport] = []
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
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        self._transports.append(transport)
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
        for transport in self._transports:
            if all(reader is None or reader.at_eof() for reader in (self.stdout, self.stderr)):
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


async def start_child(
    *command: str,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    env: Mapping[str, str] | None = None,
    limit: int = 1 << 16,
) -> Child:
    process = subprocess.Popen(  # noqa: ASYNC220 (that is the point)
        command, stdin=stdin, stdout=stdout, stderr=stderr, env=env
    )
    child = Child(process)
    await child.connect(limit)
    return child
