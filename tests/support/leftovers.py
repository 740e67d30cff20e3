"""Processes that a test process has started die with it.

Tests stop what they start. A test process that is killed, or that pytest ends after a timeout, cannot: its
brokers, servers and Javas would go on, for days. So each has a *sweeper*, a process that does nothing but
wait until the other end of its input is closed, in whatever way that happens:

    pytest ── pipe ──▶ sweeper        pytest is gone: whoever has its mark is killed
       │
       └── brokers, minders, Javas and their children, which all inherit the mark

The mark is a variable of the environment. The kernel shows what a process was started with, whatever became
of it and of its parents since.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

MARK: Final = "SAVA_TEST_PROCESS"
SWEEPS: Final = 100
"""What was starting others when it was killed leaves some for the next sweep."""
PAUSE_S: Final = 0.1

_sweepers: Final[list[subprocess.Popen[bytes]]] = []


def sweep_after_this_process() -> None:
    """What is started from now on does not outlive this process."""
    os.environ[MARK] = f"{os.getpid()}-{secrets.token_hex(8)}"
    # Isolated, and without anything that has to be installed: it is there in some milliseconds. In a session
    # of its own, because whoever interrupts the tests interrupts their group.
    sweeper = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, os.environ[MARK]],
        stdin=subprocess.PIPE,
        env={},
        start_new_session=True,
    )
    _sweepers.append(sweeper)


def wait_for_the_last(patience_s: float = 3.0) -> None:
    """Give what was asked to end, or has lost its parent, the time to end by itself. What is still there then
    is left to the sweeper, which names it."""
    wanted = f"{MARK}={os.environ[MARK]}".encode()
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and any(_has(process, wanted) for process in Path("/proc").iterdir()):
        time.sleep(PAUSE_S)


def _sweep(mark: str) -> None:
    wanted = f"{MARK}={mark}".encode()
    for _ in range(SWEEPS):
        left = [process for process in Path("/proc").iterdir() if _has(process, wanted)]
        if not left:
            return
        for process in left:
            line = f"left behind by tests, and killed: {process.name} {_command(process)}"
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)
            # The reader of this may be gone too: a terminal, or ``tail`` in a pipeline.
            with contextlib.suppress(OSError):
                print(line, file=sys.stderr, flush=True)
        time.sleep(PAUSE_S)


def _has(process: Path, wanted: bytes) -> bool:
    try:
        return process.name.isdecimal() and wanted in (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is somebody else's
        return False


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return ""


if __name__ == "__main__":
    sys.stdin.buffer.read()
    _sweep(sys.argv[1])
