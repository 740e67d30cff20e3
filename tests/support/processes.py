"""Processes of Sava without the second of work that importing it takes.

A server process imports what brokers and commands import, and starts nothing. Each start is a fork of it that
becomes ``python -m MODULE ARGUMENTS`` with the environment and the files it was given: the same program, on
the same path, only that its modules are there already. The suite starts many hundreds of them.

The process that is asked for is the child of a *minder*, which tells its id, waits for it and tells how it
ended; the minder is forgotten by the server. So whoever asked needs to be nobody's parent:

    pytest ── socket ──▶ server ── fork ──▶ minder ── fork ──▶ broker
       ▲                                      │
       └───────── pipe: id, exit status ──────┘
"""

from __future__ import annotations

import atexit
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
from typing import IO

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
        self._socket.close()
        self._process.wait(10)


_running: list[_Server] = []
_starting = threading.Lock()


def _server() -> _Server:
    with _starting:
        if not _running:
            _running.append(_Server())
        return _running[0]


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
