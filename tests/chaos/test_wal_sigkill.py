"""A real process on a real directory, killed in the middle of its work: every record it was told durable is
there."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

from sava.wal import LocalDisk, Log, LogOptions

OPTIONS = LogOptions(file_bytes=256 << 10)

CHILD = """
import os, sys, threading
from sava.wal import LocalDisk, Log, LogOptions, Writer

directory, number, file_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
log = Log.open(LocalDisk(directory), owner="child", new_storage_id=lambda: "storage",
               options=LogOptions(file_bytes=file_bytes))
writer = Writer(log, deliver=lambda complete: complete(), idle_mark_s=0.001)
in_flight = threading.Semaphore(64)

def done(number):
    def told(outcome):
        assert outcome is None, outcome
        os.write(1, b"%d\\n" % number)
        in_flight.release()
    return told

while True:
    in_flight.acquire()
    writer.append([(1, [b"%d " % number, b"x" * (number % 700)])], done(number))
    number += 1
"""


def run_and_kill(directory: Path, start: int, life_s: float) -> int:
    """Let a child append from ``start`` on, kill it in the middle; returns the exclusive end of what it was
    told."""
    command = [sys.executable, "-c", CHILD, str(directory), str(start), str(OPTIONS.file_bytes)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    assert child.stdout is not None
    try:
        ready, _, _ = select.select([child.stdout], [], [], 20)
        assert ready, "the child has never been told anything"
        # The time of the kill is the point of this test, so here time itself is awaited.
        output = b""
        deadline = time.monotonic() + life_s
        while (left := deadline - time.monotonic()) > 0:
            if select.select([child.stdout], [], [], left)[0]:
                output += os.read(child.stdout.fileno(), 1 << 16)
        assert child.poll() is None, "the child must be alive when it is killed"
    finally:
        child.send_signal(signal.SIGKILL)
        output += child.stdout.read()
        child.stdout.close()
        child.wait()
    told = [int(line) for line in output.split(b"\n")[:-1]]
    assert told == list(range(start, start + len(told)))
    return start + len(told)


def stored_numbers(directory: Path) -> tuple[list[int], int]:
    """What the log holds, and its incarnation."""
    numbers: list[int] = []
    log = Log.open(
        LocalDisk(directory),
        owner="child",
        new_storage_id=lambda: "another",
        options=OPTIONS,
        replay=lambda record: numbers.append(int(record.payload.split()[0])),
    )
    assert log.identity.storage_id == "storage"
    log.close()
    return numbers, log.identity.incarnation


def test_what_was_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    rng = Random(seed)
    next_number = 0
    for life in range(10):
        acknowledged = run_and_kill(tmp_path, next_number, rng.uniform(0.0, 0.4))
        numbers, incarnation = stored_numbers(tmp_path)
        assert numbers == list(range(len(numbers))), "a gap or a repetition"
        assert len(numbers) >= acknowledged, "an acknowledged record is lost"
        assert incarnation == 2 * (life + 1)
        next_number = len(numbers)
    assert len(list(tmp_path.glob("log-*.wal"))) > 1
