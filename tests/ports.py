"""Free ports on loopback, for servers that tests start.

Not those that the kernel gives out by itself (32768 and up on Linux): between the choice and the server's
start one of them may become the near end of somebody's connection. Each test process has a range of its own.
"""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _WIDTH, _RANGES = 12_000, 1_000, 20


def _own_ports() -> itertools.cycle[int]:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    number = int(worker.removeprefix("gw")) if worker else os.getpid()
    start = _FIRST + number % _RANGES * _WIDTH
    # From anywhere in it: another run of the tests may have the same range.
    ports = list(range(start, start + _WIDTH))
    turn = os.getpid() * 37 % _WIDTH
    return itertools.cycle(ports[turn:] + ports[:turn])


_ports = _own_ports()


def free_ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = next(_ports)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found
