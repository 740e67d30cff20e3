"""Commands whose standard input or output is closed, or whose reader leaves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.unit.cli.conftest import FakeAdmin


@pytest.mark.parametrize("arguments", ["--version >&-", "meta put /greeting - <&-", "brokers list <&- >&-"])
def test_a_stream_that_is_closed_is_one_line_and_exit_code_one(arguments: str, admin: FakeAdmin) -> None:
    """Python has none then, and commands ended with a traceback, or as if they had printed."""
    ended = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m sava.cli {arguments}'], capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ended.stderr == "sava: standard input or output is closed: Bad file descriptor\n"


def test_a_stream_that_is_closed_and_not_used_is_no_obstacle(admin: FakeAdmin) -> None:
    command = f'"{sys.executable}" -m sava.cli brokers list -o json <&-'
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_reader_who_leaves_does_not_make_the_command_fail(admin: FakeAdmin) -> None:
    """``sava cluster status | head -1`` ended with 1, as if it had been refused, and said nothing."""
    nobody, output = os.pipe()
    os.close(nobody)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "sava.cli", "brokers", "list"], stdout=output, stderr=subprocess.PIPE
        )
    finally:
        os.close(output)
    assert (ended.returncode, ended.stderr) == (0, b"")
