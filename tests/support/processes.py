"""Child processes of tests: programs of Sava, started without the second of work that importing it takes,
and children with the interface of asyncio's.

A server process imports what brokers and commands import, and starts nothing. Each start is a fork of it that
becomes ``python -m MODULE ARGUMENTS`` with the environment and the files it was given: the same program, on
the same path, only that its modules are there already. The suite starts many hundreds of them.

The process that is asked for is the child of a *minder*, which tells its id, waits for it and tells how it
ended; the server forgets the minder. So the test process needs to be no parent:

    pytest ── socket ──▶ server ── fork ──▶ minder ── fork ──▶ broker
       ▲                                      │
       └───────── pipe: id, exit status ──────┘
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TypedDict, Unpack

PRELOADED = ("sava.server.process", "sava.cli.main", "uvloop")
_MAX_REQUEST = 1 << 18
_NUMBER = struct.Struct("<q")


class Forked:
    """As ``subprocess.Popen``, as far as tests use it."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        stdin: int | IO[bytes] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.returncode: int | None = None
        self._lock = threading.Lock()
        theirs: list[int] = []
        self.stdin, source = self._input(stdin, theirs)
        self.stdout, out = self._output(stdout, 1, theirs)
        self.stderr, err = self._output(stderr, 2, theirs)
        self._status, told = os.pipe()
        theirs.append(told)
        request = {
            "module": module,
            "arguments": [*arguments],
            "environment": dict(os.environ if env is None else env),
            "directory": str(Path.cwd()),
        }
        try:
            _server().send(json.dumps(request).encode(), [source, out, err, told])
        finally:
            for each in theirs:
                os.close(each)
        self.pid = self._read_number()

    def _input(self, given: int | IO[bytes] | None, theirs: list[int]) -> tuple[IO[bytes] | None, int]:
        if given != subprocess.PIPE:
            return None, _descriptor(given, 0)
        source, ours = os.pipe()
        theirs.append(source)
        return os.fdopen(ours, "wb", 0), source

    def _output(
        self, given: int | IO[bytes] | None, standard: int, theirs: list[int]
    ) -> tuple[IO[bytes] | None, int]:
        if given != subprocess.PIPE:
            return None, _descriptor(given, standard)
        ours, out = os.pipe()
        theirs.append(out)
        return os.fdopen(ours, "rb"), out

    def _read_number(self) -> int:
        data = os.read(self._status, _NUMBER.size)
        assert len(data) == _NUMBER.size, "the server of forks is gone"
        number: int = _NUMBER.unpack(data)[0]
        return number

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout if timeout is not None else 1e9)
        while (code := self._ended(min(0.5, max(0.0, deadline - time.monotonic())))) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("sava", timeout or 0.0)
        return code

    def _ended(self, patience: float) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._status], [], [], patience)[0]:
                self.returncode = self._read_number()
                os.close(self._status)
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _descriptor(given: int | IO[bytes] | None, standard: int) -> int:
    return standard if given is None else given if isinstance(given, int) else given.fileno()


class _Server:
    """The other side, of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.processes", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=Path(__file__).parents[2],
        )
        theirs.close()
        atexit.register(self.close)

    def send(self, request: bytes, descriptors: list[int]) -> None:
        assert len(request) < _MAX_REQUEST
        with self._lock:
            socket.send_fds(self._socket, [request], descriptors)

    def close(self) -> None:
        """End the server; processes that it has started go on."""
        atexit.unregister(self.close)
        self._socket.close()
        self._process.wait(10)


_running: list[_Server] = []
_starting = threading.Lock()


def _server() -> _Server:
    with _starting:
        if not _running:
            _running.append(_Server())
        return _running[0]


def stop_server() -> None:
    """End the server of this process, if there is one: a worker of pytest-xdist ends without ``atexit``."""
    with _starting:
        while _running:
            _running.pop().close()


# -- children of asynchronous tests ------------------------------------------------------------

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
    """A child process, with the interface of asyncio's.

    uvloop starts a child by forking and running some Python in it. In a process that has used gRPC, what is
    freed there may be a gRPC channel, which waits for a thread that the child does not have: it spins for
    ever and never becomes the program it was to be. ``subprocess`` runs no Python between fork and exec.
    """

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
        """uvloop closes the descriptor of a pipe and then the file, which closes the same number again: by
        then it may be a connection of another thread. The file it is given does not own its descriptor."""
        reader = asyncio.StreamReader(limit=limit)
        output = _Output(reader)
        lent = open(os.dup(pipe.fileno()), "rb", 0, closefd=False)  # noqa: ASYNC230, SIM115 (opens nothing)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: output, lent)
        pipe.close()
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


# -- the server's side -----------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Until nobody is there to ask. Returns in each process that was asked for, too, when it has ended."""
    for module in PRELOADED:
        __import__(module)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the processes that were asked for
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # minders are forgotten
    with socket.socket(fileno=descriptor) as requests:
        while True:
            request, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST, 4)
            if not request:
                return
            if os.fork() == 0:
                requests.close()
                break
            for each in descriptors:
                os.close(each)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told = descriptors.pop()
    if (child := os.fork()) != 0:
        _mind(child, told, descriptors)
    os.close(told)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _become(json.loads(request), descriptors)


def _mind(child: int, told: int, descriptors: list[int]) -> None:
    """It must not hold its child's pipes open."""
    for each in (*descriptors, 0, 1, 2):
        os.close(each)
    os.write(told, _NUMBER.pack(child))
    _, status = os.waitpid(child, 0)
    os.write(told, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _become(request: dict[str, object], descriptors: list[int]) -> None:
    for standard, each in enumerate(descriptors):
        os.dup2(each, standard)
        os.close(each)
    environment, arguments = request["environment"], request["arguments"]
    assert isinstance(environment, dict)
    assert isinstance(arguments, list)
    os.chdir(str(request["directory"]))
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["", *arguments]
    if "broker" in arguments:
        # As the command does where pyarrow is not loaded yet: the import would fall into a broker's first
        # segment, which is 0.3 s later than in a real process.
        from sava.cli.broker import WithoutPandas

        sys.meta_path.insert(0, WithoutPandas())
    runpy.run_module(str(request["module"]), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
