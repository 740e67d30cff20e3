"""The commands of docs/operations.md, run as one session in the order in which they stand there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.mark.timeout(180)
def test_the_commands_of_the_operations_page_work(tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    bin_dir = str(Path(sys.executable).parent)
    session = subprocess.Popen(
        ["bash", "-euc", "\n".join(blocks)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # the brokers that the page starts die with it
    )
    reader = session.stdout
    assert reader is not None
    try:
        # Not communicate(): the brokers inherit the pipe and keep it open.
        code = session.wait(timeout=150)
    finally:
        os.killpg(session.pid, signal.SIGKILL)
    output = reader.read()
    reader.close()
    assert code == 0, output
    assert "hello" in output
    assert "is now a voter" in output
