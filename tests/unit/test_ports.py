"""Ports of tests: nobody else's, also not those of tests that run at the same time."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests.support.network import free_ports

ROOT = Path(__file__).parents[2]


def test_ports_are_in_a_row_and_not_given_out_twice_in_succession() -> None:
    first, second = free_ports(12), free_ports(4)
    assert first == list(range(first[0], first[0] + 12))
    assert not {*first} & {*second}
    assert max(*first, *second) < 32_768, "the kernel gives out the others to whoever connects"


def test_a_port_that_is_in_use_is_left_out() -> None:
    (port,) = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 2))
        assert port + 2 not in free_ports(4)


def test_processes_that_run_at_the_same_time_have_different_ports() -> None:
    """Two runs of the tests had the same ports: what one had chosen, the other bound."""
    program = "from tests.support.network import free_ports; print(*free_ports(100), flush=True); input()"
    chosen = [{*free_ports(100)}]
    others = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for other in others:
        assert other.stdout is not None
        chosen.append({int(port) for port in other.stdout.readline().split()})
    for other in others:
        other.communicate("\n", timeout=60)
    assert len(set().union(*chosen)) == 400
