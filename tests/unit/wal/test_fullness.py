"""An operator is told of a full disk when it begins and when it is over, however many writes it refuses."""

from __future__ import annotations

import pytest

from sava.wal import DiskFull
from sava.wal.errors import QUIET_S, Fullness


def test_one_line_when_it_is_full_and_one_when_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now = 100.0
    disk = Fullness("journal", "messages are refused", clock=lambda: now)
    disk.passed()
    assert not caplog.records

    for _ in range(20):
        disk.refused(DiskFull("/journal: No space left on device"))
        now += 1
        disk.passed()  # a small one
    assert (disk.is_full, [record.levelname for record in caplog.records]) == (True, ["WARNING"])

    now += QUIET_S
    disk.passed()
    disk.passed()
    assert not disk.is_full
    assert caplog.messages[1:] == ["journal: the disk has room again seconds=30"]

    disk.refused(DiskFull("again"))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
