"""Reading durable records from other threads while the writer goes on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from sava.wal import Disk, LocalDisk, Log, LogClosed, LogCorrupt, LogOptions, PositionOutside, Record
from sava.wal.reader import WalReader
from tests.unit.wal.helpers import SMALL_FILES, append, open_log


def reader_of(disk: Disk, log: Log, *, max_open_files: int = 16) -> WalReader:
    return WalReader(disk, storage_id=log.identity.storage_id, max_open_files=max_open_files)


def append_numbered(log: Log, count: int, *, start: int = 0, size: int = 100) -> list[tuple[int, int]]:
    """Durable records of a number and filling; their spans."""
    payloads = [b"%06d" % number + b"." * size for number in range(start, start + count)]
    spans = [(append(log, payload)[0], len(payload)) for payload in payloads]
    log.sync()
    return spans


def numbers(records: list[Record]) -> list[int]:
    return [int(record.payload[:6]) for record in records]


def test_records_are_read_over_many_files_in_one_call(disk: Disk) -> None:
    log = open_log(disk, options=SMALL_FILES)
    spans = append_numbered(log, 60)
    reader = reader_of(disk, log)
    assert numbers(reader.read(spans)) == list(range(60))
    assert numbers(reader.read(spans[7:60:9])) == list(range(60))[7:60:9]
    assert reader.read([]) == []


def test_a_file_begun_after_the_last_look_is_found(disk: Disk) -> None:
    log = open_log(disk, options=SMALL_FILES)
    spans = append_numbered(log, 3)
    reader = reader_of(disk, log)
    reader.read(spans)
    more = append_numbered(log, 40, start=3)
    assert numbers(reader.read(spans + more)) == list(range(43))


def test_a_trimmed_record_is_outside(disk: Disk) -> None:
    log = open_log(disk, options=SMALL_FILES)
    spans = append_numbered(log, 40)
    log.trim(spans[-1][0])
    reader = reader_of(disk, log)
    with pytest.raises(PositionOutside):
        reader.read(spans[:1])
    assert numbers(reader.read(spans[-1:])) == [39]


def test_a_file_trimmed_between_reads_is_readable_until_forgotten(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    log = open_log(disk, options=SMALL_FILES)
    spans = append_numbered(log, 40)
    reader = reader_of(disk, log)
    reader.read(spans[:1])
    log.trim(spans[-1][0])
    assert numbers(reader.read(spans[:1])) == [0]
    reader.forget(spans[-1][0])
    with pytest.raises(PositionOutside):
        reader.read(spans[:1])


def test_a_flipped_bit_is_seen(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    log = open_log(disk)
    spans = append_numbered(log, 3)
    path = next(tmp_path.glob("log-*.wal"))
    data = bytearray(path.read_bytes())
    data[spans[1][0] + 50] ^= 1
    path.write_bytes(data)
    reader = reader_of(disk, log)
    assert numbers(reader.read(spans[:1])) == [0]
    with pytest.raises(LogCorrupt) as caught:
        reader.read(spans)
    assert caught.value.position == spans[1][0]


def test_a_wrong_position_or_length_is_never_a_record(disk: Disk) -> None:
    log = open_log(disk)
    (position, length), _ = append_numbered(log, 2)
    reader = reader_of(disk, log)
    for wrong in ((position + 8, length), (position, length - 1), (position, length + 8)):
        with pytest.raises(LogCorrupt):
            reader.read([wrong])


def test_the_number_of_open_files_is_bounded(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    log = open_log(disk, options=SMALL_FILES)
    spans = append_numbered(log, 100)
    reader = reader_of(disk, log, max_open_files=2)
    before = _open_descriptors()
    assert numbers(reader.read(spans)) == list(range(100))
    assert _open_descriptors() <= before + 2
    reader.close()
    assert _open_descriptors() == before
    with pytest.raises(LogClosed):
        reader.read(spans)


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_many_threads_read_while_the_log_is_written_and_trimmed(tmp_path: Path) -> None:
    """Whatever a reader gets is what was written; whatever it does not get was trimmed."""
    disk = LocalDisk(tmp_path)
    log = open_log(disk, options=LogOptions(file_bytes=8192))
    reader = reader_of(disk, log, max_open_files=3)
    spans: list[tuple[int, int]] = append_numbered(log, 50)
    trimmed, stop = [0], threading.Event()

    def read_on(seed: int) -> int:
        rng, reads = Random(seed), 0
        while not stop.is_set():
            first = rng.randrange(trimmed[0], len(spans))
            wanted = spans[first : first + rng.randrange(1, 40)]
            try:
                assert numbers(reader.read(wanted)) == list(range(first, first + len(wanted)))
                reads += 1
            except PositionOutside:
                assert first < trimmed[0]
        return reads

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read_on, seed) for seed in range(4)]
        try:
            for start in range(50, 800, 50):
                spans += append_numbered(log, 50, start=start, size=start)
                trimmed[0] = start - 30
                log.trim(spans[start - 30][0])
                reader.forget(spans[start - 30][0])
        finally:
            stop.set()
        assert all(each.result() > 0 for each in readers)
