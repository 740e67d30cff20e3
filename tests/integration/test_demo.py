"""``make demo`` shows what it claims."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.harness import REPOSITORY


@pytest.mark.timeout(180)
def test_the_demo_succeeds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo"], cwd=REPOSITORY, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
