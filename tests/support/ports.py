"""Free ports on loopback, for servers that tests start.

Between the choice of a port and the server's start nobody else may take it. So they are not of those that the
kernel gives out by itself (32768 and up on Linux): one of them may become the near end of somebody's
connection. And each test process has a range of its own, which it holds by a lock on a file: other processes
of this run, and other runs on this machine, have others. Within it every port has its turn before one comes
again, so what a process left behind a moment ago, or has not bound yet, is in nobody's way.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import IO, Final

_FIRST, _WIDTH, _RANGES = 12_000, 500, 40
_LOCKS: Final = Path(tempfile.gettempdir()) / f"sava-test-ports-{os.getuid()}"


def _held_range() -> tuple[int, IO[bytes]]:
    """The first port of a range that nobody has, and what holds it until this process ends."""
    _LOCKS.mkdir(exist_ok=True)
    for number in range(_RANGES):
        lock = (_LOCKS / str(number)).open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            return _FIRST + number * _WIDTH, lock
    raise RuntimeError(f"{_RANGES} test processes run on this machine, and have all ports: see {_LOCKS}")


class _Ports:
    """Of this process; a child that was forked takes a range of its own."""

    def __init__(self) -> None:
        self._process = 0
        self._first = self._turn = 0
        self._lock: IO[bytes] | None = None

    def row(self, count: int) -> list[int]:
        if self._process != os.getpid():
            self._first, self._lock = _held_range()
            self._process, self._turn = os.getpid(), 0
        for _ in range(_WIDTH):
            if self._turn + count > _WIDTH:
                self._turn = 0
            row = range(self._first + self._turn, self._first + self._turn + count)
            if all(map(_is_free, row)):
                self._turn += count
                return list(row)
            self._turn += 1
        raise RuntimeError(f"no {count} free ports in a row from {self._first} on")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_ports: Final = _Ports()


def free_ports(count: int) -> list[int]:
    """In a row."""
    return _ports.row(count)
