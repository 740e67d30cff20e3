"""A full disk is survived, a failed one is not, and a failed sync is never believed later."""

from __future__ import annotations

from random import Random

import pytest

from sava.wal import DiskFailed, DiskFull, Log, LogCorrupt
from sava.wal.format import HEADER_BYTES, NEW_FILE, file_name
from tests.sim.disk import CrashPolicy, SimDisk
from tests.unit.wal.helpers import SMALL_FILES, append, open_log, recovered_payloads


def test_a_full_disk_takes_nothing_and_the_log_goes_on_once_there_is_room(sim: SimDisk) -> None:
    log = open_log(sim)
    append(log, b"before")
    end = log.end
    sim.set_capacity(sim.used + 100)

    with pytest.raises(DiskFull):
        append(log, b"small", b"x" * 1000)

    assert log.end == end
    assert [record.payload for record in log.scan(log.first)] == [b"before"]
    append(log, b"small")
    sim.set_capacity(None)
    append(log, b"after")
    log.sync()
    assert recovered_payloads(sim.crash(CrashPolicy.LOSE)) == [b"before", b"small", b"after"]


@pytest.mark.parametrize("step", ["header", "name"])
def test_a_disk_too_full_for_the_next_file_leaves_the_log_as_it_was(sim: SimDisk, step: str) -> None:
    log = open_log(sim, options=SMALL_FILES)
    append(log, b"x" * 1000)
    end = log.end
    if step == "header":
        sim.set_capacity(sim.used + 100)
    else:
        sim.fail_next("create")

    with pytest.raises(DiskFull):
        append(log, b"y")

    assert log.end == end
    assert NEW_FILE not in sim.list()
    sim.set_capacity(None)
    append(log, b"y")
    log.close()
    assert recovered_payloads(sim) == [b"x" * 1000, b"y"]


def test_a_mark_that_finds_no_room_is_left_out(sim: SimDisk) -> None:
    log = open_log(sim)
    append(log, b"x")
    log.sync()
    sim.set_capacity(sim.used)
    log.mark()
    log.close()
    sim.set_capacity(None)
    assert recovered_payloads(sim) == [b"x"]


def test_a_disk_too_full_to_open_is_no_corruption(sim: SimDisk) -> None:
    log = open_log(sim)
    append(log, b"x")
    log.close()
    sim.set_capacity(sim.used)
    with pytest.raises(DiskFull):
        open_log(sim)
    sim.set_capacity(None)
    assert recovered_payloads(sim) == [b"x"]


def append_and_sync(log: Log, payload: bytes) -> None:
    append(log, payload)
    log.sync()


@pytest.mark.parametrize("operation", ["sync", "write"])
def test_after_a_failure_the_log_refuses_everything(sim: SimDisk, operation: str) -> None:
    log = open_log(sim)
    position = log.append(1, [b"before"])
    log.sync()
    sim.fail_next(operation)
    with pytest.raises(DiskFailed):
        append_and_sync(log, b"x")
    for call in (lambda: append(log, b"y"), log.sync, log.mark, log.roll, lambda: log.trim(position)):
        with pytest.raises(DiskFailed):
            call()
    log.close()
    assert recovered_payloads(sim.crash())[:1] == [b"before"]


def test_a_failed_directory_sync_is_final_as_well(sim: SimDisk) -> None:
    log = open_log(sim)
    append(log, b"before")
    sim.fail_next("sync_dir")
    with pytest.raises(DiskFailed):
        log.roll()
    with pytest.raises(DiskFailed):
        append(log, b"after")
    log.close()
    assert recovered_payloads(sim.crash()) == [b"before"]


def test_what_a_failed_sync_left_in_the_cache_is_written_again() -> None:
    """sync fails -> the kernel holds the pages for clean -> the process restarts, reads them, syncs with
    success -> the power goes. What was replayed and built upon must still be there."""
    for seed in range(50):
        disk = SimDisk(Random(seed))
        log = open_log(disk)
        append(log, b"one" * 100, b"two" * 300)
        disk.fail_next("sync")
        with pytest.raises(DiskFailed):
            log.sync()
        disk = disk.kill()
        log = open_log(disk)
        assert [record.payload for record in log.scan(log.first)] == [b"one" * 100, b"two" * 300]
        append(log, b"three")
        log.sync()
        assert recovered_payloads(disk.crash(CrashPolicy.LOSE)) == [b"one" * 100, b"two" * 300, b"three"]


def test_an_unreadable_disk_stops_recovery_and_cuts_nothing(sim: SimDisk) -> None:
    log = open_log(sim)
    append(log, b"x")
    log.close()
    before = sim.open(file_name(0)).size()
    sim.fail_next("read")
    with pytest.raises(DiskFailed):
        open_log(sim)
    assert sim.open(file_name(0)).size() == before
    assert recovered_payloads(sim) == [b"x"]


def test_a_refused_opening_holds_neither_lock_nor_handles(sim: SimDisk) -> None:
    log = open_log(sim)
    append(log, b"x")
    log.close()
    sim.flip_bit(file_name(0), HEADER_BYTES)
    for _ in range(2):
        with pytest.raises(LogCorrupt):
            open_log(sim)
    sim.flip_bit(file_name(0), HEADER_BYTES)
    assert recovered_payloads(sim) == [b"x"]


def test_a_failing_sync_at_close_is_told_and_releases_the_lock(sim: SimDisk) -> None:
    log = open_log(sim)
    append(log, b"x")
    sim.fail_next("sync")
    with pytest.raises(DiskFailed):
        log.close()
    open_log(sim).close()


def test_syncs_are_not_wasted(sim: SimDisk) -> None:
    log = open_log(sim)
    before = sim.counts["sync"]
    log.sync()
    append(log, b"x")
    log.sync()
    log.sync()
    assert sim.counts["sync"] == before + 1
    writes = sim.counts["write"]
    append(log, *[b"x"] * 5000)
    assert sim.counts["write"] == writes + 1
