"""One log for all topics: group commit, index, recovery, trimming, full and failing disks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest

from sava.records import RecordBatch
from sava.storage.errors import Fenced
from sava.storage.journal import Journal, JournalOptions
from sava.storage.journal_index import JournalCorrupt
from sava.wal import (
    Disk,
    DiskFailed,
    DiskFull,
    ForeignLog,
    LocalDisk,
    LogClosed,
    LogCorrupt,
)
from sava.wal import (
    errors as wal_errors,
)
from tests.sim.disk import CrashPolicy, SimDisk
from tests.support.one_disk import OneDisk

SMALL = JournalOptions(file_bytes=4096)


def frame(base: int, count: int = 1, *, topic: int = 1, epoch: int = 1, size: int = 100) -> RecordBatch:
    payloads = [b"%d " % (base + i) + b"x" * size for i in range(count)]
    return RecordBatch.encode(payloads, publish_time=base, producer_id=9, base_sequence=base).assigned(
        topic_id=topic, epoch=epoch, base_offset=base
    )


def append(journal: Journal, batch: RecordBatch) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(outcome: BaseException | None) -> None:
        if outcome is None:
            future.set_result(None)
        else:
            future.set_exception(outcome)

    journal.append(batch, done)
    return future


@asynccontextmanager
async def opened(
    disk: Disk, options: JournalOptions = SMALL, *, fail: Callable[[BaseException], None] | None = None
) -> AsyncIterator[Journal]:
    failures: list[BaseException] = []
    journal = await Journal.open(disk, broker="a", options=options, fail=fail or failures.append)
    await journal.begin_generation(OneDisk())
    try:
        yield journal
    finally:
        await journal.close()
    assert not failures


def log_files(path: Path) -> list[Path]:
    return sorted(path.glob("log-*"))


async def offsets(journal: Journal, topic: int = 1, start: int = 0) -> list[int]:
    found: list[int] = []
    while batches := await journal.read(topic, start, 1 << 16):
        for batch in batches:
            found += range(batch.base_offset, batch.next_offset)
        start = batches[-1].next_offset
    return found


async def test_batches_of_many_topics_come_back_after_a_restart(tmp_path: Path) -> None:
    async with opened(LocalDisk(tmp_path)) as journal:
        for base in range(0, 100, 2):
            await asyncio.gather(*(append(journal, frame(base, 2, topic=topic)) for topic in (1, 2, 3)))
        identity = journal.identity
    async with opened(LocalDisk(tmp_path)) as journal:
        assert journal.holdings.topic_ids == [1, 2, 3]
        for topic in (1, 2, 3):
            assert journal.holdings.index(topic).ranges == [(0, 100)]
            assert await offsets(journal, topic) == list(range(100))
        assert journal.identity.storage_id == identity.storage_id
        assert journal.identity.incarnation == identity.incarnation + 1
        assert (await journal.read(1, 51, 1))[0].base_offset == 50


async def test_one_sync_serves_what_came_in_meanwhile(tmp_path: Path) -> None:
    async with opened(LocalDisk(tmp_path), JournalOptions()) as journal:
        await asyncio.gather(*(append(journal, frame(0, topic=topic)) for topic in range(500)))
        assert journal.queue.syncs < 50


async def test_completions_come_in_the_order_of_the_appends(tmp_path: Path) -> None:
    order: list[int] = []

    def note(base: int, _: object) -> None:
        order.append(base)

    async with opened(LocalDisk(tmp_path)) as journal:
        for base in range(200):
            journal.append(frame(base), partial(note, base))
        await append(journal, frame(0, topic=2))
    assert order == list(range(200))


async def test_a_journal_of_another_broker_is_refused(tmp_path: Path) -> None:
    async with opened(LocalDisk(tmp_path)) as journal:
        await append(journal, frame(0))
    with pytest.raises(ForeignLog):
        await Journal.open(LocalDisk(tmp_path), broker="b", fail=print)


# -- releasing -------------------------------------------------------------------------------


async def test_released_frames_are_trimmed_up_to_the_lowest_that_is_needed(tmp_path: Path) -> None:
    async with opened(LocalDisk(tmp_path)) as journal:
        for base in range(200):
            await append(journal, frame(base))
            if base % 50 == 0:
                await append(journal, frame(base // 50, topic=2))
        files = len(log_files(tmp_path))
        journal.release(1, 200)
        await append(journal, frame(200))
        assert len(log_files(tmp_path)) == files, "the first frame of topic 2 holds everything"
        journal.release(2, 4)
        await append(journal, frame(201))
        assert len(log_files(tmp_path)) < files / 4
        assert await offsets(journal, 1, 200) == [200, 201]
        assert await journal.read(1, 199, 1 << 20) == []
        assert journal.holdings.topic_ids == [1]


async def test_trimmed_files_give_their_space_back(tmp_path: Path) -> None:
    """A descriptor of a removed file keeps its space occupied."""
    async with opened(LocalDisk(tmp_path)) as journal:
        for base in range(100):
            await append(journal, frame(base))
        await offsets(journal)
        assert len(_open_files(tmp_path)) > 5
        journal.release(1, 100)
        await append(journal, frame(100))
        while any("(deleted)" in name for name in _open_files(tmp_path)):  # noqa: ASYNC110 (a thread does it)
            await asyncio.sleep(0.001)
        assert await offsets(journal, 1, 100) == [100]


def _open_files(path: Path) -> list[str]:
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            names.append(str(descriptor.readlink()))
    return [name for name in names if name.startswith(str(path))]


async def test_released_frames_do_not_come_back_after_a_restart(tmp_path: Path) -> None:
    """Nobody opens a topic that has moved away: its frames would hold the log for ever."""
    async with opened(LocalDisk(tmp_path), JournalOptions()) as journal:
        for base in range(10):
            await append(journal, frame(base))
            await append(journal, frame(base, topic=2))
        journal.release(1, 10)
        journal.release(2, 4)
    async with opened(LocalDisk(tmp_path), JournalOptions()) as journal:
        assert journal.holdings.topic_ids == [2]
        assert journal.holdings.index(2).ranges == [(4, 10)]


async def test_appends_wait_while_too_much_is_held(tmp_path: Path) -> None:
    options = JournalOptions(file_bytes=4096, max_held_bytes=20_000)
    async with opened(LocalDisk(tmp_path), options) as journal:
        base = 0
        while journal.held_bytes <= 20_000:
            await journal.reserve(200)
            await append(journal, frame(base))
            base += 1
        assert journal.is_pressed
        waiting = asyncio.create_task(journal.reserve(200))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        journal.release(1, base // 2)
        await waiting


async def test_waiting_appends_are_served_in_their_order(tmp_path: Path) -> None:
    """A newcomer must not pass one who was woken and has not run yet: a producer's batches would swap."""
    order: list[int] = []
    options = JournalOptions(max_in_flight_bytes=1000)

    async with opened(LocalDisk(tmp_path), options) as journal:

        async def one(number: int) -> None:
            await journal.reserve(500)
            order.append(number)
            await append(journal, frame(len(order) - 1, size=400))

        tasks = []
        for number in range(60):
            tasks.append(asyncio.create_task(one(number)))
            if number % 7 == 0:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
    assert order == list(range(60))


async def test_a_newcomer_does_not_overtake_a_waiter_that_was_woken(
    tmp_path: Path,
) -> None:
    order: list[str] = []
    async with opened(LocalDisk(tmp_path), JournalOptions(max_held_bytes=1000)) as journal:
        await append(journal, frame(0, size=2000))

        async def wait() -> None:
            await journal.reserve(100)
            order.append("waiter")

        waiter = asyncio.create_task(wait())
        await asyncio.sleep(0)
        journal.release(1, 1)
        await journal.reserve(100)
        order.append("newcomer")
        await waiter
    assert order == ["waiter", "newcomer"]


async def test_a_cancelled_waiter_does_not_block_those_behind_it(tmp_path: Path) -> None:
    options = JournalOptions(file_bytes=4096, max_held_bytes=1000)
    async with opened(LocalDisk(tmp_path), options) as journal:
        await append(journal, frame(0, size=2000))
        waiters = [asyncio.create_task(journal.reserve(100)) for _ in range(3)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        await asyncio.sleep(0)
        journal.release(1, 1)
        await asyncio.gather(*waiters[1:])
        assert waiters[0].cancelled()


async def test_closing_refuses_those_who_wait(tmp_path: Path) -> None:
    options = JournalOptions(max_held_bytes=1000)
    async with opened(LocalDisk(tmp_path), options) as journal:
        await append(journal, frame(0, size=2000))
        waiter = asyncio.create_task(journal.reserve(100))
        await asyncio.sleep(0)
    await waiter
    with pytest.raises(LogClosed):
        append(journal, frame(1))
    with pytest.raises(LogClosed):
        await journal.read(1, 0, 1)


# -- epochs and disowned frames -----------------------------------------------------------------


async def test_a_fenced_epoch_appends_nothing(tmp_path: Path) -> None:
    async with opened(LocalDisk(tmp_path)) as journal:
        await append(journal, frame(0))
        journal.fence(1, 2)
        with pytest.raises(Fenced):
            append(journal, frame(1))
        await append(journal, frame(1, epoch=2))
        assert journal.holdings.index(1).ranges == [(0, 2)]


async def test_runs_of_several_epochs_are_told_apart(tmp_path: Path) -> None:
    async with opened(LocalDisk(tmp_path)) as journal:
        for base in range(5):
            await append(journal, frame(base))
        for base in range(9, 12):
            await append(journal, frame(base, epoch=3))
    async with opened(LocalDisk(tmp_path)) as journal:
        assert journal.holdings.index(1).ranges == [(0, 5), (9, 12)]
        assert await offsets(journal) == [0, 1, 2, 3, 4]
        assert await offsets(journal, start=9) == [9, 10, 11]
        assert await journal.read(1, 7, 1000) == []


async def test_disowned_frames_are_gone_for_good(tmp_path: Path) -> None:
    async with opened(LocalDisk(tmp_path)) as journal:
        for base in range(10):
            await append(journal, frame(base))
        await journal.disown(1, 6)
        await append(journal, frame(6, epoch=2))
        assert await offsets(journal) == list(range(7))
    async with opened(LocalDisk(tmp_path)) as journal:
        assert journal.holdings.index(1).ranges == [(0, 7)]
        assert (await journal.read(1, 6, 1))[0].header.epoch == 2


async def test_frames_that_cannot_have_been_written_stop_the_journal(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    journal = await Journal.open(LocalDisk(tmp_path), broker="a", fail=failures.append)
    await journal.begin_generation(OneDisk())
    await append(journal, frame(5))
    with pytest.raises(JournalCorrupt):
        await append(journal, frame(7))
    assert len(failures) == 1
    with pytest.raises(JournalCorrupt):
        append(journal, frame(6))
    await journal.close()
    with pytest.raises(JournalCorrupt):
        await Journal.open(LocalDisk(tmp_path), broker="a", fail=failures.append)


# -- trouble with the disk -----------------------------------------------------------------------


NO_ROOM = JournalOptions(room_bytes=0)
"""What the disk has left is then what is left for the next frame."""


async def test_nothing_is_written_behind_a_refused_frame() -> None:
    """On a full disk a small frame may fit where a large one did not; written, it would be a frame without
    its predecessor."""
    sim = SimDisk(Random(1))
    async with opened(sim, NO_ROOM) as journal:
        await append(journal, frame(0))
        sim.set_capacity(sim.used + 2000)
        large, small = append(journal, frame(1, size=5000)), append(journal, frame(2))
        other = append(journal, frame(0, topic=2))
        outcomes = await asyncio.gather(large, small, other, return_exceptions=True)
        assert isinstance(outcomes[0], DiskFull)
        assert isinstance(outcomes[1], DiskFull)
        assert await offsets(journal) == [0], "reads go on"
        await _until_accepting(journal)
        await append(journal, frame(1))
        assert await offsets(journal) == [0, 1]
    async with opened(sim, NO_ROOM) as journal:
        assert await offsets(journal) == [0, 1]


async def test_a_full_disk_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "sava.wal.errors")
    sim = SimDisk(Random(1))
    async with opened(sim, NO_ROOM) as journal:
        sim.set_capacity(sim.used + 2000)
        for _ in range(3):
            with pytest.raises(DiskFull):
                await append(journal, frame(0, size=5000))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "the disk is full, messages are refused" in caplog.text
        assert "behind a write" not in caplog.text, "the first is told of"
        sim.set_capacity(None)
        monkeypatch.setattr(wal_errors, "QUIET_S", 0.0)
        await _until_accepting(journal)
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_nothing_is_accepted_before_all_who_were_refused_know_it() -> None:
    """a and b are refused. Between the two answers somebody appends c to the topic of b, behind b, whose fate
    is not known there yet: c must not be written."""
    sim = SimDisk(Random(1))
    async with opened(sim, NO_ROOM) as journal:
        await append(journal, frame(0, topic=2))
        sim.set_capacity(sim.used + 2000)
        refused: list[BaseException | None] = []

        def of_a(outcome: BaseException | None) -> None:
            refused.append(outcome)
            with pytest.raises(DiskFull):
                append(journal, frame(2, topic=2))

        journal.append(frame(0, size=5000), of_a)
        b = append(journal, frame(1, topic=2))
        with pytest.raises(DiskFull):
            await b
        assert isinstance(refused[0], DiskFull)
        await _until_accepting(journal)
        await append(journal, frame(1, topic=2))
        assert await offsets(journal, 2) == [0, 1]


async def _until_accepting(journal: Journal) -> None:
    """The journal refuses at its door until its queue has drained."""
    while True:
        try:
            await append(journal, frame(0, topic=99, size=1))
            return
        except DiskFull:
            await asyncio.sleep(0)


async def test_a_failed_sync_is_final() -> None:
    sim = SimDisk(Random(1))
    failures: list[BaseException] = []
    journal = await Journal.open(sim, broker="a", fail=failures.append)
    await journal.begin_generation(OneDisk())
    await append(journal, frame(0))
    sim.fail_next("sync")
    refused = [append(journal, frame(base)) for base in (1, 2)]
    outcomes = await asyncio.gather(*refused, return_exceptions=True)
    assert all(isinstance(outcome, DiskFailed) for outcome in outcomes)
    assert len(failures) == 1
    with pytest.raises(DiskFailed):
        append(journal, frame(1))
    await journal.close()


@pytest.mark.parametrize("policy", [CrashPolicy.LOSE, CrashPolicy.PREFIX, CrashPolicy.TORN])
async def test_what_was_told_durable_survives_a_power_cut(policy: CrashPolicy) -> None:
    for seed in range(20):
        rng = Random(seed)
        disk, told = SimDisk(rng), 0
        for _ in range(4):
            journal = await Journal.open(disk, broker="a", options=SMALL, fail=lambda failure: None)
            await journal.begin_generation(OneDisk())
            end = _end(journal)
            assert end >= told
            assert await offsets(journal) == list(range(end))
            batch = [append(journal, frame(end + n, size=rng.randrange(300))) for n in range(20)]
            await batch[rng.randrange(20)]
            told = _end(journal)
            disk = disk.crash(policy)
            await asyncio.gather(*batch, return_exceptions=True)
            await _close_dead(journal)


def _end(journal: Journal) -> int:
    return (journal.holdings.index(1).ranges or [(0, 0)])[-1][1]


async def _close_dead(journal: Journal) -> None:
    try:
        await journal.close()
    except DiskFailed:
        return


async def test_damage_to_what_was_acknowledged_stops_the_start(tmp_path: Path) -> None:
    async with opened(LocalDisk(tmp_path)) as journal:
        for base in range(100):
            await append(journal, frame(base))
    second = log_files(tmp_path)[1]
    whole = second.read_bytes()

    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 4
    second.write_bytes(flipped)
    with pytest.raises(LogCorrupt):
        await Journal.open(LocalDisk(tmp_path), broker="a", fail=print)

    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LogCorrupt):
        await Journal.open(LocalDisk(tmp_path), broker="a", fail=print)

    second.unlink()
    with pytest.raises(LogCorrupt):
        await Journal.open(LocalDisk(tmp_path), broker="a", fail=print)

    second.write_bytes(whole)
    async with opened(LocalDisk(tmp_path)) as journal:
        assert await offsets(journal) == list(range(100))


async def test_a_torn_tail_is_cut_off(tmp_path: Path) -> None:
    async with opened(LocalDisk(tmp_path), JournalOptions()) as journal:
        for base in range(10):
            await append(journal, frame(base))
    path = log_files(tmp_path)[0]
    with path.open("ab") as file:
        file.write(b"half a frame, never acknowledged")
    async with opened(LocalDisk(tmp_path), JournalOptions()) as journal:
        assert await offsets(journal) == list(range(10))
        await append(journal, frame(10))


class _Halting(LocalDisk):
    """Stops the thread that opens it at its first call of one method, until it may go on."""

    def __init__(self, path: Path, method: str) -> None:
        super().__init__(path)
        self._method = method
        self.halted, self.go_on = threading.Event(), threading.Event()

    def _halt(self, method: str) -> None:
        if method == self._method and not self.halted.is_set():
            self.halted.set()
            assert self.go_on.wait(10)

    def list(self) -> list[str]:
        self._halt("list")
        return super().list()

    def sync_dir(self) -> None:
        self._halt("sync_dir")
        super().sync_dir()


@pytest.mark.parametrize("halted_in", ["list", "sync_dir"], ids=["before the scan", "after it"])
async def test_a_cancelled_opening_leaves_nothing_locked(tmp_path: Path, halted_in: str) -> None:
    async with opened(LocalDisk(tmp_path)) as journal:
        await append(journal, frame(0))
    disk = _Halting(tmp_path, halted_in)
    opening = asyncio.create_task(Journal.open(disk, broker="a", fail=print))
    await asyncio.to_thread(disk.halted.wait, 10)
    opening.cancel()
    await asyncio.sleep(0)
    opening.cancel()  # whoever loses patience does not get away earlier
    assert not opening.done()
    disk.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    async with opened(LocalDisk(tmp_path)) as journal:
        assert await offsets(journal) == [0]
