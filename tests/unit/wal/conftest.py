from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from sava.wal import Disk, LocalDisk
from tests.sim.disk import SimDisk


@pytest.fixture(params=["sim", "local"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    """The same story on both disks."""
    return SimDisk(Random(1)) if request.param == "sim" else LocalDisk(tmp_path / "log")


@pytest.fixture
def sim() -> SimDisk:
    return SimDisk(Random(1))
