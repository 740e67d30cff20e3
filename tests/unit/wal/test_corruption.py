"""Damage to what was promised stops the log; damage to what was not does not. Hostile bytes do no harm."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest

from sava.wal import Disk, Identity, LogCorrupt
from sava.wal.format import (
    FRAME_BYTES,
    HEADER_BYTES,
    MARK,
    encode,
    encode_header,
    file_name,
    find_witness,
    read_frames,
    seed_of,
)
from tests.sim.disk import SimDisk
from tests.unit.wal.helpers import SMALL_FILES, append, open_log, recovered_payloads

PAYLOADS = [b"first", b"second" * 5, b"third", b"fourth" * 9]


def flip(disk: Disk, name: str, offset: int, bit: int) -> None:
    file = disk.open(name)
    byte = file.read(offset, 1)[0]
    file.write(offset, [bytes([byte ^ 1 << bit])])
    file.sync()
    file.close()


def log_of_two_batches(disk: SimDisk) -> tuple[int, int]:
    """Two synced batches, never closed; where the second begins and ends."""
    log = open_log(disk)
    append(log, *PAYLOADS[:2])
    second = log.sync()
    append(log, *PAYLOADS[2:])
    return second, log.sync()


def test_every_flipped_bit_in_what_a_later_record_witnesses_is_corruption() -> None:
    disk = SimDisk(Random(1))
    second, _ = log_of_two_batches(disk)
    for offset in range(second):
        damaged = disk.clone()
        flip(damaged, file_name(0), offset, offset % 8)
        with pytest.raises(LogCorrupt) as corrupt:
            open_log(damaged)
        assert corrupt.value.position <= offset


def test_every_flipped_bit_in_a_marked_last_batch_is_corruption() -> None:
    disk = SimDisk(Random(1))
    log_of_two_batches(disk)
    disk = disk.kill()
    log = open_log(disk)
    append(log, *PAYLOADS)
    end = log.sync()
    log.mark()
    for offset in range(end):
        damaged = disk.clone()
        flip(damaged, file_name(0), offset, offset % 8)
        with pytest.raises(LogCorrupt):
            open_log(damaged)


def test_a_flipped_bit_in_an_unmarked_last_batch_costs_that_batch_only() -> None:
    disk = SimDisk(Random(1))
    second, end = log_of_two_batches(disk)
    for offset in range(second, end):
        damaged = disk.clone()
        flip(damaged, file_name(0), offset, offset % 8)
        found = recovered_payloads(damaged)
        assert found == PAYLOADS[: len(found)]
        assert 2 <= len(found) < 4


def test_a_damaged_mark_is_cut_and_nothing_else(sim: SimDisk) -> None:
    log_of_two_batches(sim)
    disk = sim.kill()
    log = open_log(disk)
    append(log, b"x")
    end = log.sync()
    log.mark()
    for offset in range(end, end + FRAME_BYTES):
        damaged = disk.clone()
        flip(damaged, file_name(0), offset, 3)
        assert recovered_payloads(damaged) == [*PAYLOADS, b"x"]


def test_a_closed_log_shows_every_flipped_bit(disk: Disk) -> None:
    log = open_log(disk)
    append(log, *PAYLOADS)
    end = log.end
    log.close()
    for offset in range(0, end, 5):
        flip(disk, file_name(0), offset, 1)
        with pytest.raises(LogCorrupt):
            open_log(disk)
        flip(disk, file_name(0), offset, 1)
    assert recovered_payloads(disk) == PAYLOADS


def test_a_flipped_bit_in_the_header_of_an_empty_file_is_corruption(disk: Disk) -> None:
    """It alone holds the identity and the position after everything else was trimmed; made anew, both would
    repeat."""
    log = open_log(disk)
    append(log, b"x")
    log.roll()
    log.trim(log.end)
    start = log.first - HEADER_BYTES
    log.close()
    flip(disk, file_name(start), 40, 0)
    with pytest.raises(LogCorrupt):
        open_log(disk)


def test_damage_in_a_file_that_is_not_the_last_is_corruption(disk: Disk) -> None:
    log = open_log(disk, options=SMALL_FILES)
    for n in range(3):
        append(log, b"%d" % n * 800)
        log.roll()
    log.close()
    first = disk.open(disk.list()[1])
    size = first.size()
    first.truncate(size - 8)
    first.sync()
    with pytest.raises(LogCorrupt) as corrupt:
        open_log(disk)
    assert corrupt.value.file == disk.list()[1]


def test_a_missing_file_in_the_middle_is_corruption(disk: Disk) -> None:
    log = open_log(disk, options=SMALL_FILES)
    for n in range(3):
        append(log, b"%d" % n * 800)
        log.roll()
    log.close()
    disk.remove(disk.list()[1])
    with pytest.raises(LogCorrupt, match="missing"):
        open_log(disk)


def test_a_read_verifies_what_it_returns(disk: Disk) -> None:
    log = open_log(disk)
    first, second = append(log, b"first", b"second")
    log.sync()
    flip(disk, file_name(0), second + FRAME_BYTES, 0)
    assert log.read(first).payload == b"first"
    with pytest.raises(LogCorrupt):
        log.read(second)
    with pytest.raises(LogCorrupt):
        list(log.scan(first))
    log.close()


def test_garbage_as_a_log_file_is_refused_and_does_no_harm() -> None:
    for seed in range(150):
        rng = Random(seed)
        disk = SimDisk(rng)
        file = disk.open(file_name(rng.choice([0, 0, 4096, 10**19])), create=True)
        file.write(0, [rng.randbytes(rng.choice([0, 1, 31, 32, 511, 512, 5000]))])
        with pytest.raises(LogCorrupt):
            open_log(disk)


def test_garbage_behind_a_header_is_a_torn_tail(disk: Disk) -> None:
    open_log(disk).close()
    file = disk.open(file_name(0))
    file.write(file.size(), [Random(7).randbytes(100_000)])
    file.close()
    log = open_log(disk)
    assert log.torn_bytes == 100_000
    log.close()


@pytest.mark.parametrize("length", [1 << 20, (1 << 28) - 8, 1 << 28, (1 << 32) - 1])
def test_a_lying_length_allocates_nothing(length: int) -> None:
    disk = SimDisk(Random(1))
    open_log(disk).close()
    file = disk.open(file_name(0))
    size = file.size()
    record = encode(1, [b"x"], position=size, durable=0, incarnation=1, seed=0)
    file.write(size, [record[:4], length.to_bytes(4, "little"), record[8:]])
    tracemalloc.start()
    try:
        open_log(disk)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


def test_mutated_logs_never_show_a_record_that_was_not_written() -> None:
    disk = SimDisk(Random(1))
    log_of_two_batches(disk)
    size = disk.open(file_name(0)).size()
    for seed in range(300):
        rng = Random(seed)
        damaged = disk.clone()
        file = damaged.open(file_name(0))
        for _ in range(rng.randrange(1, 4)):
            offset = rng.randrange(HEADER_BYTES, size)
            file.write(
                offset,
                [rng.choice([rng.randbytes(rng.randrange(1, 60)), file.read(rng.randrange(size), 80)])],
            )
        try:
            found = recovered_payloads(damaged)
        except LogCorrupt:
            continue
        assert found == PAYLOADS[: len(found)], f"seed {seed}"


def test_a_payload_that_looks_like_a_record_bears_no_witness(sim: SimDisk) -> None:
    """A client sends bytes that would be a record, with the right position, if it knew the storage id."""
    log = open_log(sim)
    hole = log.sync()
    append(log, b"x" * 8)
    inner = log.end + FRAME_BYTES
    forged = encode(MARK, [], position=inner, durable=inner, incarnation=1, seed=seed_of("guessed"))
    append(log, forged)
    disk = sim.kill()
    flip(disk, file_name(0), hole, 0)
    assert recovered_payloads(disk) == []


def test_the_bytes_of_a_record_are_no_record_elsewhere(disk: Disk) -> None:
    log = open_log(disk)
    first, second = append(log, b"first", b"second")
    log.close()
    file = disk.open(file_name(0))
    stale = file.read(first, second - first)
    file.write(file.size(), [stale])
    file.close()
    seen: list[bytes] = []
    log = open_log(disk, replay=lambda record: seen.append(record.payload))
    assert seen == [b"first", b"second"]
    assert log.torn_bytes == len(stale)
    log.close()


def test_the_search_for_a_witness_crosses_its_chunks() -> None:
    disk, seed = SimDisk(Random(1)), seed_of("s")
    file = disk.open("f", create=True)
    file.write(0, [encode_header(Identity("o", "s", 1), 0)])
    for place in ((1 << 20) - 8, 1 << 20, (1 << 20) + 8, (2 << 20) + 512):
        file.truncate(HEADER_BYTES)
        mark = encode(MARK, [], position=place, durable=place, incarnation=1, seed=seed)
        file.write(place, [mark])
        found = find_witness(file, base=0, offset=HEADER_BYTES, end=file.size(), seed=seed)
        assert found == place
        assert find_witness(file, base=0, offset=place, end=file.size(), seed=seed) is None
        assert list(read_frames(file, base=0, offset=HEADER_BYTES, end=file.size(), seed=seed)) == []
