"""What the log does on a healthy disk, simulated and real alike."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sava.wal import (
    DirectoryLocked,
    Disk,
    ForeignLog,
    Identity,
    LocalDisk,
    LogClosed,
    LogOptions,
    PositionOutside,
    Record,
    RecordTooLarge,
    UnsupportedFormat,
)
from sava.wal.format import HEADER, encode, encode_header, file_name
from tests.sim.disk import SimDisk
from tests.unit.wal.helpers import SMALL_FILES, append, open_log, recovered_payloads


def test_records_come_back_in_order_after_a_restart(disk: Disk) -> None:
    log = open_log(disk)
    one = log.append(7, [b"one"])
    two, three = log.append_many([(8, [b"t", memoryview(b"wo")]), (0, [])])
    assert log.durable_end < log.end
    assert log.sync() == log.end == log.durable_end
    log.close()

    seen: list[Record] = []
    reopened = open_log(disk, replay=seen.append)

    assert seen == [Record(one, 7, b"one"), Record(two, 8, b"two"), Record(three, 0, b"")]
    assert list(reopened.scan(reopened.first)) == seen
    assert list(reopened.scan(two)) == seen[1:]
    assert reopened.read(two) == seen[1]
    assert reopened.torn_bytes == 0
    reopened.close()


@pytest.mark.parametrize("size", [1, 16_000, 16_384, 100_001, 3 << 20])
def test_a_payload_may_come_in_pieces_of_any_kind_and_size(disk: Disk, size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 2)
    pieces = [data[:7], memoryview(data)[7:size], pa.py_buffer(data).slice(size, 100)]
    whole = b"".join(pieces)
    log = open_log(disk)
    position = log.append(1, pieces)
    following = log.append(2, [b"next"])
    log.sync()
    assert log.read(position) == Record(position, 1, whole)
    log.close()
    seen: list[Record] = []
    open_log(disk, replay=seen.append).close()
    assert seen == [Record(position, 1, whole), Record(following, 2, b"next")]


def test_a_restart_keeps_the_storage_id_and_raises_the_incarnation(disk: Disk) -> None:
    identities = []
    for _ in range(3):
        log = open_log(disk)
        identities.append(log.identity)
        log.close()
    assert [identity.incarnation for identity in identities] == [1, 2, 3]
    assert len({identity.storage_id for identity in identities}) == 1


def test_incarnation_and_positions_survive_the_trimming_of_everything(disk: Disk) -> None:
    for expected in range(1, 6):
        log = open_log(disk, options=SMALL_FILES)
        assert log.identity.incarnation == expected
        append(log, b"x" * 100)
        end = log.end
        log.roll()
        log.trim(log.end)
        assert list(log.scan(log.first)) == []
        assert log.first >= end
        assert len(disk.list()) == 1
        log.close()


def test_files_roll_by_size_and_records_are_found_in_all_of_them(disk: Disk) -> None:
    log = open_log(disk, options=SMALL_FILES)
    payloads = [bytes([n]) * 200 for n in range(20)]
    positions = [log.append(1, [payload]) for payload in payloads]
    assert len(disk.list()) > 5
    assert [log.read(position).payload for position in positions] == payloads
    assert [record.position for record in log.scan(positions[3])] == positions[3:]
    log.close()
    assert recovered_payloads(disk) == payloads


def test_trim_keeps_every_record_from_the_position_on(disk: Disk) -> None:
    log = open_log(disk, options=SMALL_FILES)
    positions = [log.append(1, [bytes([n]) * 200]) for n in range(20)]
    for index in (0, 1, 7, 12, 19):
        log.trim(positions[index])
        assert log.first <= positions[index]
        assert log.read(positions[index]).payload == bytes([index]) * 200
    with pytest.raises(PositionOutside):
        log.read(positions[0])
    with pytest.raises(PositionOutside):
        log.scan(positions[0])
    with pytest.raises(PositionOutside):
        log.read(log.end)
    assert list(log.scan(log.end)) == []
    log.close()


def test_a_scan_shows_the_records_that_were_there_when_it_began(disk: Disk) -> None:
    log = open_log(disk, options=SMALL_FILES)
    append(log, b"a" * 600, b"b" * 600)
    scan = log.scan(log.first)
    assert next(scan).payload == b"a" * 600
    append(log, b"c")
    log.roll()
    assert [record.payload for record in scan] == [b"b" * 600]
    log.close()


def test_rolling_an_empty_file_changes_nothing(disk: Disk) -> None:
    log = open_log(disk)
    log.roll()
    assert len(disk.list()) == 1
    append(log, b"x")
    log.roll()
    log.roll()
    assert len(disk.list()) == 2
    log.close()


def test_a_batch_never_spans_two_files(disk: Disk) -> None:
    log = open_log(disk, options=SMALL_FILES)
    append(log, *[b"x" * 500] * 10)
    assert len(disk.list()) == 1
    append(log, b"y")
    assert len(disk.list()) == 2
    log.close()


def test_what_can_never_be_appended_is_refused_and_leaves_nothing(disk: Disk) -> None:
    log = open_log(disk, options=LogOptions(max_record_bytes=100))
    end = log.end
    with pytest.raises(RecordTooLarge):
        log.append_many([(1, [b"fits"]), (1, [b"x" * 60, b"y" * 41])])
    with pytest.raises(ValueError, match="kind"):
        log.append(HEADER, [b""])
    assert log.end == end
    log.close()


def test_lowering_the_record_limit_does_not_lose_larger_records(disk: Disk) -> None:
    log = open_log(disk)
    append(log, b"x" * 5000)
    log.close()
    assert recovered_payloads(disk, options=LogOptions(max_record_bytes=100)) == [b"x" * 5000]


def test_another_owner_is_refused_by_name(disk: Disk) -> None:
    open_log(disk, owner="node-1").close()
    with pytest.raises(ForeignLog) as refusal:
        open_log(disk, owner="node-2")
    assert (refusal.value.found, refusal.value.expected) == ("node-1", "node-2")
    assert disk.path in str(refusal.value)
    open_log(disk, owner="node-1").close()


def test_a_file_of_another_log_is_refused(disk: Disk) -> None:
    log = open_log(disk)
    append(log, b"x")
    log.close()
    end = log.end
    stranger = Identity(owner="node-1", storage_id="another disk", incarnation=1)
    file = disk.open(file_name(end), create=True)
    file.write(0, [encode_header(stranger, end)])
    file.close()
    with pytest.raises(ForeignLog):
        open_log(disk)


def test_an_open_directory_cannot_be_opened_twice(disk: Disk) -> None:
    log = open_log(disk)
    twin = LocalDisk(disk.path) if isinstance(disk, LocalDisk) else disk
    with pytest.raises(DirectoryLocked):
        open_log(twin)
    log.close()
    open_log(twin).close()


def test_a_copied_directory_has_the_same_storage_id(sim: SimDisk) -> None:
    log = open_log(sim)
    append(log, b"x")
    log.sync()
    copy = open_log(sim.clone())
    assert copy.identity.storage_id == log.identity.storage_id
    append(copy, b"only in the copy")
    assert len(list(log.scan(log.first))) == 1


def test_other_files_in_the_directory_are_left_alone(disk: Disk) -> None:
    disk.open("snapshot-7", create=True).close()
    open_log(disk).close()
    assert disk.list() == [file_name(0), "snapshot-7"]


def test_a_log_file_of_an_unknown_kind_is_refused(disk: Disk) -> None:
    disk.open("log-12.wal2", create=True).close()
    with pytest.raises(UnsupportedFormat, match=r"log-12\.wal2"):
        open_log(disk)


def test_a_newer_format_is_named_and_not_called_corrupt(disk: Disk) -> None:
    file = disk.open(file_name(0), create=True)
    text = b'SAVA-WAL 2\n{"something": "else"}'
    file.write(0, [encode(HEADER, [text], position=0, durable=0, incarnation=1, seed=0)])
    file.close()
    with pytest.raises(UnsupportedFormat, match="version 2"):
        open_log(disk)


def test_a_closed_log_refuses_everything(disk: Disk) -> None:
    log = open_log(disk)
    position = log.append(1, [b"x"])
    log.close()
    log.close()
    for call in (lambda: log.append(1, [b""]), log.sync, log.mark, log.roll, lambda: log.read(position)):
        with pytest.raises(LogClosed):
            call()


def test_a_read_needs_a_record_of_the_caller(disk: Disk) -> None:
    log = open_log(disk)
    append(log, b"x")
    log.sync()
    at_mark = log.end
    log.mark()
    with pytest.raises(PositionOutside):
        log.read(at_mark)
    log.close()


def test_marks_are_written_once_per_sync_and_are_not_shown(disk: Disk) -> None:
    log = open_log(disk)
    log.mark()
    assert log.end == log.first, "nothing to tell yet"
    append(log, b"x")
    log.sync()
    log.mark()
    end = log.end
    log.mark()
    log.sync()
    log.mark()
    assert log.end == end
    assert [record.payload for record in log.scan(log.first)] == [b"x"]
    log.close()
    assert recovered_payloads(disk) == [b"x"]


def test_an_owner_too_long_for_the_header_is_refused(disk: Disk) -> None:
    with pytest.raises(ValueError, match="too long"):
        open_log(disk, owner="n" * 500)
    open_log(disk).close()
