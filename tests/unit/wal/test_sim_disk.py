"""The simulated disk itself: what it forgets, what it keeps, and that a seed repeats."""

from __future__ import annotations

from random import Random

import pytest

from sava.wal import DirectoryLocked, Disk, DiskFailed, DiskFull, FileExists, FileMissing
from tests.sim.disk import SECTOR, CrashPolicy, SimDisk, SimFile


def write(disk: Disk, name: str, content: bytes) -> None:
    file = disk.open(name, create=True)
    file.write(0, [content])


def content(disk: Disk, name: str) -> bytes:
    file = disk.open(name)
    return file.read(0, file.size())


def synced_file(disk: SimDisk, size: int) -> SimFile:
    file = disk.open("f", create=True)
    file.write(0, [b"a" * size])
    file.sync()
    disk.sync_dir()
    return file


@pytest.mark.parametrize("synced", ["content", "name", "both"])
def test_content_and_name_are_synced_apart(sim: SimDisk, synced: str) -> None:
    file = sim.open("f", create=True)
    file.write(0, [b"abc"])
    if synced != "name":
        file.sync()
    if synced != "content":
        sim.sync_dir()
    after = sim.crash(CrashPolicy.LOSE)
    if synced == "content":
        assert after.list() == []
    else:
        assert content(after, "f") == (b"abc" if synced == "both" else b"")


def test_renames_and_removals_are_forgotten_without_a_directory_sync(sim: SimDisk) -> None:
    write(sim, "a", b"1")
    write(sim, "b", b"2")
    sim.sync_dir()
    sim.rename("a", "c")
    sim.remove("b")
    assert sim.list() == ["c"]
    assert sim.clone().crash(CrashPolicy.LOSE).list() == ["a", "b"]
    assert sim.clone().crash(CrashPolicy.KEEP).list() == ["c"]
    outcomes = {tuple(sim.clone(Random(seed)).crash(CrashPolicy.SECTORS).list()) for seed in range(50)}
    assert outcomes == {("a", "b"), ("c",), ("a",), ("b", "c")}


def test_any_subset_of_unsynced_sectors_may_survive() -> None:
    outcomes = set()
    for seed in range(200):
        disk = SimDisk(Random(seed))
        synced_file(disk, 3 * SECTOR).write(0, [b"b" * (3 * SECTOR)])
        after = content(disk.crash(CrashPolicy.SECTORS), "f")
        sectors = [after[at : at + SECTOR] for at in range(0, 3 * SECTOR, SECTOR)]
        assert all(sector in (b"a" * SECTOR, b"b" * SECTOR) for sector in sectors)
        outcomes.add(tuple(sector[:1] for sector in sectors))
    assert len(outcomes) == 8


def test_a_sector_may_tear_at_any_byte() -> None:
    cuts = set()
    for seed in range(300):
        disk = SimDisk(Random(seed))
        synced_file(disk, 8).write(0, [b"b" * 8])
        cuts.add(content(disk.crash(CrashPolicy.TORN), "f"))
    assert {b"b" * n + b"a" * (8 - n) for n in range(9)} <= cuts


def test_a_prefix_keeps_the_order_of_the_writes() -> None:
    for seed in range(100):
        disk = SimDisk(Random(seed))
        file = synced_file(disk, 0)
        for n in range(5):
            file.write(4 * n, [b"%d" % n * 4])
        after = content(disk.crash(CrashPolicy.PREFIX), "f").rstrip(b"\0")
        assert b"00001111222233334444".startswith(after)


def test_truncation_is_durable_only_after_a_sync(sim: SimDisk) -> None:
    file = synced_file(sim, 10)
    file.truncate(4)
    assert content(sim.clone().crash(CrashPolicy.LOSE), "f") == b"a" * 10
    file.sync()
    assert content(sim.crash(CrashPolicy.LOSE), "f") == b"aaaa"


def test_a_failed_sync_lies_afterwards() -> None:
    lost = 0
    for seed in range(20):
        disk = SimDisk(Random(seed))
        file = synced_file(disk, 0)
        file.write(0, [b"x" * 100])
        disk.fail_next("sync")
        with pytest.raises(DiskFailed):
            file.sync()
        file.sync()
        assert content(disk, "f") == b"x" * 100
        lost += content(disk.crash(CrashPolicy.LOSE), "f") != b"x" * 100
    assert 0 < lost < 20


def test_old_handles_are_dead_after_a_crash_and_a_kill(sim: SimDisk) -> None:
    for die in (SimDisk.crash, SimDisk.kill):
        disk = sim.clone()
        file = disk.open("f", create=True)
        disk.lock()
        after = die(disk)
        after.lock()
        for call in (file.size, file.sync, disk.list, disk.sync_dir):
            with pytest.raises(DiskFailed):
                call()


def test_directories_share_the_crash_but_not_the_names(sim: SimDisk) -> None:
    raft, journal = sim.directory("raft"), sim.directory("journal")
    write(raft, "f", b"r")
    write(journal, "f", b"j")
    raft.sync_dir()
    raft.open("f").sync()
    with pytest.raises(ValueError, match="root"):
        raft.kill()
    after = sim.crash(CrashPolicy.LOSE)
    assert content(after.directory("raft"), "f") == b"r"
    assert after.directory("journal").list() == []
    with pytest.raises(DiskFailed):
        journal.list()


def test_a_clone_lives_its_own_life(sim: SimDisk) -> None:
    file = synced_file(sim, 4)
    twin = sim.clone()
    file.write(0, [b"b"])
    write(sim, "g", b"")
    assert content(twin, "f") == b"aaaa"
    assert twin.list() == ["f"]


def test_space_is_counted_over_all_directories_and_given_back(sim: SimDisk) -> None:
    sim.set_capacity(100)
    write(sim, "a", b"x" * 60)
    other = sim.directory("other").open("b", create=True)
    with pytest.raises(DiskFull):
        other.write(0, [b"y" * 41])
    assert other.size() == 0
    other.write(0, [b"y" * 40])
    other.write(0, [b"z" * 40])
    sim.remove("a")
    other.write(40, [b"y" * 60])
    assert sim.used == 100
    assert sim.kill().used == 100


def test_names_follow_the_rules_of_the_protocol(disk: Disk) -> None:
    write(disk, "a", b"1")
    with pytest.raises(FileExists):
        disk.open("a", create=True)
    with pytest.raises(FileMissing):
        disk.open("b")
    with pytest.raises(FileMissing):
        disk.remove("b")
    with pytest.raises(FileMissing):
        disk.rename("b", "c")
    write(disk, "b", b"2")
    disk.rename("a", "b")
    assert disk.list() == ["b"]
    assert content(disk, "b") == b"1"
    sub = disk.directory("sub")
    write(sub, "a", b"3")
    assert disk.list() == ["b"]
    assert content(disk.directory("sub"), "a") == b"3"
    disk.lock()
    with pytest.raises(DirectoryLocked):
        disk.lock()
    disk.unlock()
    disk.lock()
    disk.unlock()


def test_files_follow_the_rules_of_the_protocol(disk: Disk) -> None:
    file = disk.open("f", create=True)
    assert file.name == "f"
    assert file.write(3, [b"ab", memoryview(b"cd"), b""]) == 4
    assert file.size() == 7
    assert file.read(0, 100) == b"\0\0\0abcd"
    assert file.read(7, 10) == b""
    assert file.write(0, [b"%d" % (n % 10) for n in range(3000)]) == 3000
    assert file.read(2995, 10) == b"56789"
    file.truncate(1)
    file.truncate(3)
    assert file.read(0, 9) == b"0\0\0"
    file.sync()
    file.close()


def test_a_seed_repeats_exactly() -> None:
    def run() -> list[bytes]:
        disk = SimDisk(Random(42))
        results = []
        for n in range(20):
            file = disk.open(f"f{n}", create=True)
            file.write(0, [b"x" * 2000])
            disk = disk.crash()
            results.append(b"|".join(content(disk, name) for name in disk.list()))
        return results

    assert run() == run()


def test_the_hook_sees_each_change_before_it_happens(sim: SimDisk) -> None:
    seen: list[tuple[str, list[str]]] = []
    sim.on_operation(lambda operation: seen.append((operation, sim.list())))
    file = sim.open("f", create=True)
    file.write(0, [b"x"])
    file.truncate(0)
    file.sync()
    sim.rename("f", "g")
    sim.remove("g")
    sim.sync_dir()
    assert seen == [
        ("create", []),
        *[(operation, ["f"]) for operation in ("write", "truncate", "sync", "rename")],
        ("remove", ["g"]),
        ("sync_dir", []),
    ]
    assert sim.counts == dict.fromkeys(dict(seen), 1)
