"""The torture itself, in short: it runs to its end, and the oracles find nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.long import only_long
from tests.torture.cluster import ROOT
from tests.torture.report import Report

LIMIT_S = 400.0
AS_IT_IS: list[str] = []
WITHOUT_MUCH = ["--no-namespaces", "--no-tls"]


@only_long("for a minute and more")
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("options", [AS_IT_IS, WITHOUT_MUCH], ids=["as it is", "on loopback"])
def test_a_short_torture_finds_nothing(tmp_path: Path, options: list[str]) -> None:
    report = tmp_path / "report.json"
    command = [
        *(sys.executable, "-m", "tests.torture", "--minutes", "0.7", "--report", str(report)),
        *("--directory", str(tmp_path / "run"), "--faults", "kill", "power all", "cut", *options),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    print(done.stdout[-6000:], done.stderr[-3000:])
    assert done.returncode == 0
    told = msgspec.json.decode(report.read_bytes(), type=Report)
    assert told.findings == []
    assert told.acked > 500
    assert told.power_losses >= 3
    assert told.faults >= 3
    assert told.metadata_calls > 100
