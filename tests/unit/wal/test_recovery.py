"""Power cuts at every place: recovery gives a prefix of what was appended that holds all that was
promised."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sava.wal import Disk, DiskFailed, LocalDisk, LogOptions
from sava.wal.format import NEW_FILE, file_name
from tests.sim.disk import CrashPolicy, SimDisk
from tests.unit.wal.helpers import SMALL_FILES, Ledger, append, open_log, recovered_payloads


class PowerCut(BaseException):
    """Not an Exception: nothing may catch and survive it."""


def put_file(disk: Disk, name: str, content: bytes) -> None:
    file = disk.open(name, create=True)
    file.write(0, [content])
    file.sync()
    file.close()
    disk.sync_dir()


def log_file_bytes(disk: Disk, name: str = file_name(0)) -> bytes:
    file = disk.open(name)
    try:
        return file.read(0, file.size())
    finally:
        file.close()


@pytest.mark.parametrize("kind", ["sim", "local"])
@pytest.mark.parametrize("filler", ["nothing", "zeros"])
def test_the_last_batch_may_tear_at_every_byte(kind: str, filler: str, tmp_path: Path) -> None:
    source = SimDisk(Random(1))
    log = open_log(source)
    append(log, b"first", b"second")
    promised = log.sync()
    append(log, b"third", b"fourth" * 20)
    whole = log_file_bytes(source)
    starts = [record.position for record in log.scan(promised)] + [log.end]

    for cut in range(promised, log.end + 1):
        disk: Disk = SimDisk(Random(1)) if kind == "sim" else LocalDisk(tmp_path / str(cut))
        content = whole[:cut] + (bytes(len(whole) - cut) if filler == "zeros" else b"")
        put_file(disk, file_name(0), content)
        survivors = sum(content[:end] == whole[:end] for end in starts[1:])
        assert recovered_payloads(disk) == [b"first", b"second", b"third", b"fourth" * 20][: 2 + survivors]
        assert recovered_payloads(disk) == [b"first", b"second", b"third", b"fourth" * 20][: 2 + survivors]


def test_lost_unsynced_writes_take_nothing_else_along(sim: SimDisk) -> None:
    log = open_log(sim)
    append(log, b"kept")
    log.sync()
    append(log, b"lost")
    log.mark()
    assert recovered_payloads(sim.crash(CrashPolicy.LOSE)) == [b"kept"]


def test_the_death_of_the_process_alone_loses_nothing(sim: SimDisk) -> None:
    log = open_log(sim)
    append(log, b"written, not synced")
    after = sim.kill()
    with pytest.raises(DiskFailed):
        append(log, b"by a ghost")
    reopened = open_log(after)
    assert [record.payload for record in reopened.scan(reopened.first)] == [b"written, not synced"]
    # What was replayed is now promised: it must also survive a power cut.
    assert recovered_payloads(after.crash(CrashPolicy.LOSE)) == [b"written, not synced"]


def test_records_behind_a_hole_of_their_own_batch_are_cut_and_counted(sim: SimDisk) -> None:
    """append A, B, C; the sectors of A are lost, those of B and C are not. Nothing was promised: cut, not
    corrupt."""
    log = open_log(sim)
    append(log, b"promised")
    hole = log.sync()
    append(log, b"a" * 600, b"b" * 600, b"c" * 600)
    torn = log.end - hole
    file = sim.open(file_name(0))
    file.write(hole, [bytes(40)])
    reopened = open_log(sim.crash(CrashPolicy.KEEP))
    assert [record.payload for record in reopened.scan(reopened.first)] == [b"promised"]
    assert reopened.torn_bytes == torn


def test_what_was_cut_never_comes_back_to_life() -> None:
    """A is lost, B survives; the next start writes a record of A's size over A and the power goes before the
    truncation has reached the disk. B must not follow the new record."""
    for seed in range(40):
        for operation in range(6):
            disk, ledger = SimDisk(Random(seed)), Ledger()
            log = ledger.open(disk)
            position = log.end
            ledger.append(log, b"", b"b", b"c", b"d" * 600)  # the first is as large as an OPENED record
            file = disk.open(file_name(0))
            file.write(position, [b"lost"])
            file.sync()
            disk = disk.kill()
            cut_power_at(disk, operation)
            with suppress(PowerCut):
                ledger.open(disk)
            disk = disk.crash()
            disk.on_operation(None)
            log = ledger.open(disk)
            assert list(log.scan(log.first)) == []


def cut_power_at(disk: SimDisk, operation: int) -> None:
    """Let the operation of this number (counted from now) raise PowerCut."""
    remaining = operation

    def count_down(_: str) -> None:
        nonlocal remaining
        if remaining == 0:
            raise PowerCut
        remaining -= 1

    disk.on_operation(count_down)


def test_any_power_cut_keeps_what_was_promised() -> None:
    for seed in range(400):
        try:
            _live_and_die(Random(seed))
        except BaseException:
            print(f"seed {seed}")
            raise


def _live_and_die(rng: Random) -> None:
    """Several lives of one log, each ended at any operation, also within recovery."""
    disk, ledger = SimDisk(rng), Ledger()
    options = LogOptions(file_bytes=rng.choice([600, 2000, 1 << 20]), room_bytes=rng.choice([0, 100, 3000]))
    number = 0
    for _ in range(6):
        cut_power_at(disk, rng.randrange(1, 40))
        try:
            log = ledger.open(disk, options)
            while True:
                count = rng.randrange(1, 4)
                step = rng.random()
                ledger.append(
                    log,
                    *(b"%d." % n + bytes(rng.choice([0, 9, 700])) for n in range(number, number + count)),
                    is_synced_next=step < 0.4,
                )
                number += count
                if step < 0.5:
                    ledger.sync(log)
                elif step < 0.6:
                    log.mark()
                elif step < 0.7:
                    log.roll()
                    ledger.promised = len(ledger.appended)
                elif step < 0.8 and ledger.promised and ledger.promised - 1 in ledger.positions:
                    ledger.trim(log, rng.randrange(min(ledger.positions), ledger.promised))
        except PowerCut:
            disk = disk.crash() if rng.random() < 0.8 else disk.kill()
    disk.on_operation(None)
    ledger.open(disk, options)


def roll_story(log_of: Callable[[], tuple[SimDisk, Ledger]]) -> None:
    disk, ledger = log_of()
    log = ledger.open(disk)
    for n in range(3):
        ledger.append(log, b"%d" % n * 300, b"%d and more" % n * 30)
        ledger.sync(log)
        log.roll()
    ledger.append(log, b"last")


def trim_story(log_of: Callable[[], tuple[SimDisk, Ledger]]) -> None:
    disk, ledger = log_of()
    log = ledger.open(disk)
    for n in range(8):
        ledger.append(log, b"%d" % n * 800)
    ledger.sync(log)
    ledger.trim(log, 2)
    ledger.trim(log, 6)
    ledger.append(log, b"last")
    ledger.sync(log)
    log.close()


@pytest.mark.parametrize("story", [roll_story, trim_story])
@pytest.mark.parametrize("policy", [policy for policy in CrashPolicy if policy is not CrashPolicy.ANY])
def test_a_power_cut_at_each_operation_of_rolling_and_trimming(
    story: Callable[[Callable[[], tuple[SimDisk, Ledger]]], None], policy: CrashPolicy
) -> None:
    for seed in range(3):
        for operation in range(200):
            disk, ledger = SimDisk(Random(seed)), Ledger()
            cut_power_at(disk, operation)
            try:
                story(lambda: (disk, ledger))  # noqa: B023 (called at once)
            except PowerCut:
                _recover_through_more_power_cuts(disk.crash(policy), ledger)
            else:
                assert operation > 20
                break
        else:
            pytest.fail("the story never came to its end")


def _recover_through_more_power_cuts(disk: SimDisk, ledger: Ledger) -> None:
    """The power goes again at each operation of the recovery, until one comes through."""
    for operation in range(50):
        cut_power_at(disk, operation)
        try:
            ledger.open(disk).close()
        except PowerCut:
            disk = disk.crash()
        else:
            disk.on_operation(None)
            return
    pytest.fail("recovery never came to its end")


def test_a_half_made_file_is_removed(disk: Disk) -> None:
    """A power cut while the next file is made: its header is torn, but it does not bear a log file's name
    yet."""
    log = open_log(disk)
    append(log, b"x")
    log.close()
    put_file(disk, NEW_FILE, b"torn hea")
    assert recovered_payloads(disk) == [b"x"]
    assert disk.list() == [file_name(0)]


@settings(max_examples=150, deadline=None)
@given(
    batches=st.lists(
        st.tuples(st.lists(st.binary(max_size=700), min_size=1, max_size=4), st.booleans()), max_size=8
    ),
    policy=st.sampled_from(list(CrashPolicy)),
    seed=st.integers(0, 2**32),
)
def test_property_recovery_is_a_prefix_that_holds_all_that_was_synced(
    batches: list[tuple[list[bytes], bool]], policy: CrashPolicy, seed: int
) -> None:
    disk = SimDisk(Random(seed))
    log = open_log(disk, options=SMALL_FILES)
    appended: list[bytes] = []
    promised = 0
    for payloads, is_synced in batches:
        append(log, *payloads)
        appended += payloads
        if is_synced:
            log.sync()
            promised = len(appended)
    found = recovered_payloads(disk.crash(policy))
    assert found == appended[: len(found)]
    assert len(found) >= promised
