"""The commands of the pages for operators, each page run as one session, from its top to its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_ports

DOCS = Path(__file__).parents[2] / "docs"


def session(page: str, directory: Path, **environment: str) -> str:
    """What the commands of the page print. They must all succeed."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    bin_dir = str(Path(sys.executable).parent)
    shell = subprocess.Popen(
        ["bash", "-euc", "\n".join(blocks)],
        cwd=directory,
        env={**os.environ, **environment, "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # the brokers that the page starts die with it
    )
    reader = shell.stdout
    assert reader is not None
    try:
        # Not communicate(): the brokers inherit the pipe and keep it open.
        code = shell.wait(timeout=150)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
    output = reader.read()
    reader.close()
    assert code == 0, output
    return output


@pytest.mark.timeout(180)
def test_the_commands_of_the_operations_page_work(tmp_path: Path) -> None:
    output = session("operations.md", tmp_path)
    assert "hello" in output
    assert "is now a voter" in output
    assert re.search(r"^/default/orders-part-0 +\d+ +\d+ +\d+ +\d+ +moved", output, re.MULTILINE)
    assert output.count(" is drained, ") == 2


@pytest.mark.timeout(180)
def test_the_commands_of_the_topics_page_work(tmp_path: Path) -> None:
    client, admin, raft, http = free_ports(4)
    output = session(
        "topics.md",
        tmp_path,
        SAVA_ADMIN=f"127.0.0.1:{admin}",
        SAVA_SERVICE=f"http://127.0.0.1:{client}",
        SAVA__BROKER__PORTS__CLIENT=str(client),
        SAVA__BROKER__PORTS__ADMIN=str(admin),
        SAVA__BROKER__PORTS__RAFT=str(raft),
        SAVA__BROKER__PORTS__PROMETHEUS=str(http),
    )
    assert "second order" in output
    assert "subscription billing of /default/orders moved, at offset 10" in output
    assert "namespace shop deleted" in output


@pytest.mark.timeout(180)
def test_the_commands_of_the_replication_page_work(tmp_path: Path) -> None:
    output = session("replication.md", tmp_path)
    assert "remote west is cluster west" in output
    assert "it will be created at west with 2 partitions" in output
    assert re.search(r"^/default/orders +west +1 +waiting_runner", output, re.MULTILINE)
    assert "remote west removed" in output
