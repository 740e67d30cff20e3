"""What a test process has started is gone when it is, however it went."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.leftovers import MARK
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, subprocess, sys
from pathlib import Path
from tests.support.leftovers import sweep_after_this_process
sweep_after_this_process()
from tests.support.brokers import Standalone

broker = Standalone(Path(sys.argv[1]))
broker.start()
other = subprocess.Popen(["sh", "-c", "sleep 1000 & exec sleep 1000"], start_new_session=True)
print(json.dumps([broker.pid, other.pid]), flush=True)
if input() == "end":
    sys.exit()
"""


def is_alive(pid: int) -> bool:
    """A process that nobody has waited for yet is dead all the same."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("how", ["killed", "ended", "killed with the reader of its errors"])
def test_what_a_test_process_has_started_dies_with_it(tmp_path: Path, how: str) -> None:
    """A broker, a process in a session of its own, and its child. The reader of the errors is a terminal, or
    ``tail`` in a pipeline."""
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if how == "killed with the reader of its errors" else subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        deadline = time.monotonic() + PATIENCE_S
        while not (found := children(started[1])):
            assert time.monotonic() < deadline
        started += found
        assert all(map(is_alive, started))
        if process.stderr is not None:
            process.stderr.close()
        if how == "ended":
            process.stdin.write(b"end\n")
            process.stdin.flush()
        else:
            process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
    while left := [pid for pid in started if is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
