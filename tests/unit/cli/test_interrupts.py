"""Ctrl-C ends a command whenever it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.waiting import PATIENCE_S

WAITING = """
import asyncio, signal, threading
from sava.cli.connection import run_to_end

async def wait():
    print("waiting", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("ended", flush=True)

threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
try:
    run_to_end(wait())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_a_signal_that_does_not_wake_the_loop_ends_it_all_the_same() -> None:
    """A signal that comes after the loop has looked for signals and before it sleeps does not wake it. The
    same happens here for certain: the signal is blocked in the loop's thread, so another thread takes it."""
    command = [sys.executable, "-c", WAITING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            time.sleep(0.2)  # nothing tells when the loop sleeps
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=PATIENCE_S)[0] == "ended\ninterrupted\n"
            assert process.returncode == 0
        finally:
            process.kill()


def test_a_command_that_is_still_being_loaded_ends_without_a_word(tmp_path: Path) -> None:
    """Most of a short command's time. It showed in which of a hundred modules it had been."""
    (tmp_path / "typer.py").write_text("import time; print('loading', flush=True); time.sleep(600)")
    with subprocess.Popen(
        [sys.executable, "-m", "sava.cli", "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (process.returncode, said) == (-signal.SIGINT, "")
