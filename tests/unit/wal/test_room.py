"""Room: zeros ahead of the end, so that a sync has data to make durable and no new size."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random

import pytest

from sava.wal import DiskFull, LocalDisk, LogOptions
from sava.wal.format import file_name
from tests.sim.disk import CrashPolicy, SimDisk
from tests.unit.wal.helpers import append, open_log, recovered_payloads

ROOM = LogOptions(room_bytes=10_000)


def size_of(disk: SimDisk, start: int = 0) -> int:
    return disk.open(file_name(start)).size()


def test_small_groups_overwrite_the_room_and_leave_the_size_alone() -> None:
    disk = SimDisk(Random(1))
    log = open_log(disk, options=ROOM)
    append(log, b"first")
    size = size_of(disk)
    assert size == log.end + ROOM.room_bytes
    for number in range(20):
        append(log, b"%d" % number)
        log.sync()
    assert size_of(disk) == size
    while log.end < size:
        append(log, bytes(100))
    assert size_of(disk) == log.end + ROOM.room_bytes, "used up: there is new room"


def test_a_large_group_gets_no_room() -> None:
    disk = SimDisk(Random(1))
    log = open_log(disk, options=ROOM)
    append(log, bytes(20_000))
    assert size_of(disk) == log.end


def test_a_killed_process_leaves_room_that_is_no_torn_tail() -> None:
    disk = SimDisk(Random(1))
    log = open_log(disk, options=ROOM)
    append(log, b"a", b"b")
    log.sync()
    disk = disk.kill()
    log = open_log(disk, options=ROOM)
    assert log.torn_bytes == 0
    assert [record.payload for record in log.scan(log.first)] == [b"a", b"b"]
    assert size_of(disk) == log.end + ROOM.room_bytes, "its record of the opening has room behind it"


def test_a_torn_record_in_the_room_is_counted_without_the_room() -> None:
    disk = SimDisk(Random(1))
    log = open_log(disk, options=ROOM)
    end = append(log, b"kept", b"x" * 64)[1]
    torn = log.end - end
    disk = disk.kill()
    file = disk.open(file_name(0))
    file.write(end, [b"lost"])
    log = open_log(disk, options=ROOM)
    assert log.torn_bytes == torn
    assert [record.payload for record in log.scan(log.first)] == [b"kept"]


def test_files_that_are_closed_end_with_their_last_record() -> None:
    disk = SimDisk(Random(1))
    log = open_log(disk, options=ROOM)
    append(log, b"a")
    end = log.end
    log.roll()
    assert size_of(disk) == end
    append(log, b"b")
    log.close()
    assert size_of(disk, end) < end + ROOM.room_bytes
    assert recovered_payloads(disk.crash()) == [b"a", b"b"]


def test_without_space_for_room_it_goes_on_without_room() -> None:
    disk = SimDisk(Random(1))
    log = open_log(disk, options=ROOM)
    append(log, bytes(20_000))
    disk.set_capacity(disk.used + 500)
    append(log, b"small")
    assert size_of(disk) == log.end


def test_what_fits_into_the_room_is_durable_in_one_call() -> None:
    disk = SimDisk(Random(1))
    log = open_log(disk, options=ROOM)
    append(log, b"a")
    log.sync()
    operations: list[str] = []
    disk.on_operation(operations.append)
    append(log, b"b", b"c", is_synced_next=True)
    assert log.durable_end == log.sync() == log.end
    assert operations == ["write", "sync"], "the simulated disk has no call for both, and nobody else syncs"
    assert recovered_payloads(disk.crash(CrashPolicy.LOSE)) == [b"a", b"b", b"c"]


def test_a_copy_is_on_its_way_while_the_disk_syncs() -> None:
    """One call that writes and syncs would hand the group out after the sync: whoever waits for this disk and
    for another would wait for the sum of both."""
    disk = SimDisk(Random(1))
    log = open_log(disk, options=ROOM)
    append(log, b"a")
    log.sync()
    events: list[str] = []
    disk.on_operation(events.append)
    log.tap = lambda position, records: events.append("tap")
    append(log, b"b", is_synced_next=True)
    log.sync()
    assert events == ["write", "tap", "sync"]


@pytest.mark.parametrize("before", ["a mark", "a record"])
def test_behind_what_is_not_synced_nothing_is_durable_by_itself(before: str) -> None:
    """A call that syncs no more than it writes would leave a hole before it: after a power cut the log would
    end there, and what it wrote be lost although it was acknowledged."""
    disk = SimDisk(Random(1))
    log = open_log(disk, options=ROOM)
    append(log, b"a")
    log.sync()
    if before == "a mark":
        log.mark()
    else:
        append(log, b"b")
    durable = log.durable_end
    assert durable < log.end
    append(log, b"c", is_synced_next=True)
    assert log.durable_end == durable
    log.sync()
    kept = recovered_payloads(disk.crash(CrashPolicy.LOSE))
    assert kept == ([b"a", b"c"] if before == "a mark" else [b"a", b"b", b"c"])


def test_a_write_that_fills_the_disk_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a is appended, with room behind it. b and c are to follow, b fits into the room and c does not: the
    disk is full when b is written. Cutting the file back to its former size would leave b, whose caller was
    told that it is not there."""
    log = open_log(LocalDisk(tmp_path), options=ROOM)
    append(log, b"a")
    end, write = log.end, os.pwritev

    def write_some(fd: int, buffers: list[bytes], offset: int) -> int:
        return write(fd, [b"".join(buffers)[:8000]], offset)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", write_some)
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(DiskFull):
            append(log, b"b" * 5000, b"c" * 20_000)

    assert log.end == end
    assert (tmp_path / file_name(0)).stat().st_size == end
    log.sync()
    log.close()
    assert recovered_payloads(LocalDisk(tmp_path)) == [b"a"]
