"""One topic: order, acknowledgement, deduplication, reading over all places, following, sealing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.records import BatchCorrupt, RecordBatch
from sava.storage.broker_storage import StorageOptions, TopicBusy
from sava.storage.errors import Fenced, OffsetOutOfRange, SequenceGap
from sava.storage.journal import JournalOptions
from sava.storage.maintenance import RetentionPolicy
from sava.storage.objectstore import ObjectStore
from sava.storage.topic_log import LogStatus, TopicClosed, TopicLog
from sava.storage.uploader import UploadOptions
from sava.wal import DiskFailed, DiskFull
from tests.sim.disk import SimDisk
from tests.support.memory_store import MemoryStore
from tests.support.storage import (
    EAGER,
    FORGETFUL,
    LAZY,
    OTHER,
    TOPIC,
    Cluster,
    append_each,
    batch,
    contents,
    expected,
    numbered,
    small_files,
    wake,
)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


async def stored(log: TopicLog, end: int) -> None:
    """Wait until segments hold everything before ``end``."""
    await log._parts.uploader.flush(log._backlog, end)


# -- appending -------------------------------------------------------------------------------


async def test_offsets_are_given_out_in_the_order_of_the_calls(cluster: Cluster) -> None:
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        sizes = [3, 1, 5, 2, 1]
        tasks, base = [], 0
        for size in sizes:
            tasks.append(asyncio.create_task(log.append(numbered(base, base + size))))
            base += size
        assert await asyncio.gather(*tasks) == [0, 3, 4, 9, 11]
        assert await contents(log) == expected(0, 12)
        assert log.next_offset == log.assigned_offset == 12


async def test_nothing_can_be_read_before_it_is_durable(cluster: Cluster) -> None:
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await wake(log)
        task = asyncio.create_task(log.append(numbered(0, 5)))
        await asyncio.sleep(0)
        assert log.assigned_offset == 5
        assert log.next_offset == 0
        assert await contents(log) == []
        await task
        assert log.next_offset == 5


async def test_bytes_are_as_good_as_a_batch_and_garbage_is_refused(cluster: Cluster) -> None:
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        assert await log.append(numbered(0, 3).to_bytes()) == 0
        assert await log.append(memoryview(numbered(3, 5).to_bytes())) == 3
        with pytest.raises(BatchCorrupt):
            await log.append(b"no batch")
        assert await contents(log) == expected(0, 5)


async def test_a_caller_who_leaves_does_not_disturb_the_others(cluster: Cluster) -> None:
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await wake(log)
        leaving = asyncio.create_task(log.append(numbered(0, 1, producer=5)))
        staying = asyncio.create_task(log.append(numbered(1, 2)))
        repeating = asyncio.create_task(log.append(numbered(0, 1, producer=5)))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await staying == 1
        assert await repeating == 0
        assert await contents(log) == expected(0, 2)


# -- deduplication ------------------------------------------------------------------------------


async def test_a_repeated_batch_gets_the_offset_it_has(cluster: Cluster) -> None:
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        first = log.append(numbered(0, 3, producer=5))
        again_in_flight = log.append(numbered(0, 3, producer=5))
        assert list(await asyncio.gather(first, again_in_flight)) == [0, 0]
        assert await log.append(numbered(3, 5, producer=5, sequence=3)) == 3
        assert await log.append(numbered(0, 3, producer=5)) == 0
        with pytest.raises(SequenceGap):
            await log.append(batch("lost before", producer=5, sequence=9))
        assert await contents(log) == expected(0, 5)


@pytest.mark.parametrize("life", ["restart", "reopen", "move"])
async def test_a_repeated_batch_is_known_after(cluster: Cluster, life: str) -> None:
    broker = await cluster.start()
    log = await broker.open_topic(TOPIC, epoch=1)
    await log.append(numbered(0, 3, producer=5))
    await log.append(numbered(3, 4, producer=6))
    await log.append(numbered(4, 6, producer=5, sequence=3))
    if life == "restart":
        await broker.close()
        broker = await cluster.start()
    elif life == "move":
        await log.seal()
        await broker.close()
        broker = await cluster.start("b")
    log = await broker.open_topic(TOPIC, epoch=2)
    assert await log.append(numbered(4, 6, producer=5, sequence=3)) == 4
    assert await log.append(numbered(3, 4, producer=6)) == 3
    assert await log.append(numbered(6, 7, producer=5, sequence=5)) == 6
    with pytest.raises(SequenceGap):
        await log.append(numbered(8, 9, producer=6, sequence=2))
    assert await contents(log) == expected(0, 7)
    await broker.close()


async def test_what_a_producer_had_in_flight_is_known_after_a_restart(cluster: Cluster) -> None:
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await asyncio.gather(*(log.append(numbered(n, n + 1, producer=5, sequence=n)) for n in range(6)))
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=2)
        again = [await log.append(numbered(n, n + 1, producer=5, sequence=n)) for n in range(8)]
        assert again == list(range(8))


# -- a full and a failing disk ---------------------------------------------------------------------


async def test_a_refused_batch_leaves_no_hole(cluster: Cluster) -> None:
    """The schedule of the module: what is in flight behind the refused batch fails with it, small as it is,
    and the next one gets the offset of the refused one."""
    sim = SimDisk(Random(3))
    async with cluster.broker(disk=sim) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await log.append(numbered(0, 2, producer=5))
        sim.set_capacity(sim.used + 3000)
        outcomes = await asyncio.gather(
            log.append(batch("x" * 300_000, producer=5, sequence=2)),
            log.append(batch("small", producer=5, sequence=3)),
            log.append(batch("another's")),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [DiskFull] * 3
        assert log.next_offset == log.assigned_offset == 2
        assert await contents(log) == expected(0, 2), "reads go on"
        assert await _append_when_accepted(log, numbered(2, 4, producer=5, sequence=2)) == 2
        sim.set_capacity(None)
        assert await log.append(batch("y" * 9000)) == 4
    async with cluster.broker(disk=sim) as broker:
        log = await broker.open_topic(TOPIC, epoch=2)
        assert log.next_offset == 5
        assert await contents(log, 0, 4) == expected(0, 4)


async def _append_when_accepted(log: TopicLog, each: RecordBatch) -> int:
    while True:
        try:
            return await log.append(each)
        except DiskFull:
            await asyncio.sleep(0)


async def test_random_refusals_never_leave_a_hole_or_a_lost_acknowledgement(cluster: Cluster) -> None:
    rng = Random(11)
    sim = SimDisk(rng)
    acknowledged: dict[int, list[str]] = {}

    async def produce(log: TopicLog, number: int) -> None:
        payloads = [f"{number}-{i}" + "x" * rng.randrange(800) for i in range(rng.randrange(1, 4))]
        with suppress(DiskFull):
            acknowledged[await log.append(batch(*payloads))] = payloads

    async with cluster.broker(disk=sim) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        for round_ in range(40):
            sim.set_capacity(sim.used + rng.randrange(12_000))
            await asyncio.gather(*(produce(log, round_ * 100 + n) for n in range(12)))
            await asyncio.sleep(0.001)
        sim.set_capacity(None)
        assert acknowledged
        await _check_acknowledged(log, acknowledged)
    async with cluster.broker(disk=sim) as broker:
        await _check_acknowledged(await broker.open_topic(TOPIC, epoch=2), acknowledged)


async def _check_acknowledged(log: TopicLog, acknowledged: dict[int, list[str]]) -> None:
    found = await contents(log)
    assert len(found) == log.next_offset == sum(map(len, acknowledged.values()))
    for base, payloads in acknowledged.items():
        assert found[base : base + len(payloads)] == payloads


async def test_a_failed_disk_is_told_once_and_acknowledges_nothing(cluster: Cluster) -> None:
    sim = SimDisk(Random(3))
    broker = await cluster.start(disk=sim)
    log = await broker.open_topic(TOPIC, epoch=1)
    await append_each(log, 0, 3)
    sim.fail_next("sync")
    outcomes = await asyncio.gather(*(log.append(numbered(3, 4)) for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [DiskFailed] * 3
    assert [type(failure) for failure in cluster.failures] == [DiskFailed]
    assert log.next_offset == 3
    await broker.close()


async def test_appends_wait_when_the_journal_is_full_of_what_cannot_be_uploaded(cluster: Cluster) -> None:
    options = StorageOptions(
        journal=JournalOptions(file_bytes=4096, max_held_bytes=20_000),
        upload=UploadOptions(segment_age_s=3600),
    )
    cluster.store = DownStore.open("memory://")
    async with cluster.broker(options=options) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        tasks = [asyncio.create_task(log.append(batch("x" * 500))) for _ in range(100)]
        while broker.journal.held_bytes < 20_000:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0.01)
        await asyncio.wait(tasks, timeout=0.3)
        done = sum(task.done() for task in tasks)
        assert 20 < done < 60
        # What was on its way takes its headers and paddings with it; all of them are more than 50,000 bytes.
        assert broker.journal.held_bytes < 25_000
        assert isinstance(cluster.store, DownStore)
        cluster.store.is_down = False
        assert await asyncio.gather(*tasks) == list(range(100))


class DownStore(ObjectStore):
    is_down = True

    async def put_new(self, key: str, data: object) -> None:
        if self.is_down:
            raise Unavailable("the store is down")
        await super().put_new(key, data)  # type: ignore[arg-type]


# -- reading -----------------------------------------------------------------------------------------


async def test_one_gapless_stream_over_segments_journal_and_cache(cluster: Cluster) -> None:
    options = StorageOptions(cache_bytes=6000, upload=UploadOptions(segment_age_s=3600))
    async with cluster.broker(options=options) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 20)
        await stored(log, 20)
        await append_each(log, 20, 60)
        assert log.stored_offset == 20
        assert broker.journal.holdings.index(TOPIC.topic_id).ranges == [(20, 60)]
        for start, end in ((0, 60), (6, 60), (19, 21), (25, 26), (59, 60), (0, 20), (33, 58), (60, 60)):
            assert await contents(log, start, end) == expected(start, end)


@pytest.mark.parametrize("options", [LAZY, FORGETFUL, EAGER])
async def test_a_range_cuts_batches_at_both_ends(cluster: Cluster, options: StorageOptions) -> None:
    async with cluster.broker(options=options) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        for base in range(0, 50, 10):
            await log.append(numbered(base, base + 10))
        if options is EAGER:
            await stored(log, 50)
        assert await contents(log, 13, 37) == expected(13, 37)
        assert await contents(log, 14, 15) == expected(14, 15)
        assert [len(each) async for each in log.read(5, max_bytes=1)] == [5]
        with pytest.raises(OffsetOutOfRange):
            await contents(log, 51)


async def test_readers_go_on_while_what_they_read_moves_into_segments(cluster: Cluster) -> None:
    options = StorageOptions(
        cache_bytes=0,
        upload=UploadOptions(segment_age_s=3600, segment_bytes=3000),
        journal=JournalOptions(file_bytes=4096),
    )
    async with cluster.broker(options=options) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)

        async def read_slowly(start: int) -> list[str]:
            found: list[str] = []
            async for each in log.tail(start):
                found += [payload.decode() for payload in each.payloads()]
                await asyncio.sleep(0)
                if each.next_offset == 300:
                    return found
            raise AssertionError("a tail has no end")

        readers = [asyncio.create_task(read_slowly(start)) for start in (0, 0, 0)]
        await append_each(log, 0, 300)
        late = [asyncio.create_task(read_slowly(start)) for start in (0, 150, 299)]
        await stored(log, 300)
        for reader in readers:
            assert await reader == expected(0, 300)
        assert [await each for each in late] == [expected(0, 300), expected(150, 300), expected(299, 300)]
        assert await cluster.object_count() > 3


async def test_a_follower_waits_without_polling(cluster: Cluster) -> None:
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        stream = log.tail(0)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await log.append(numbered(0, 4))
        assert (await waiting).next_offset == 4
        last = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await log.close()
        with pytest.raises(TopicClosed):
            await last


@pytest.mark.parametrize("options", [LAZY, EAGER])
async def test_an_offset_is_found_by_time(cluster: Cluster, options: StorageOptions) -> None:
    async with cluster.broker(options=options) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        for base in range(0, 50, 10):
            times = list(range(1000 + base, 1010 + base))
            await log.append(RecordBatch.encode([b"x"] * 10, publish_time=times))
            if options is EAGER and base == 20:
                await stored(log, 30)
        for time, offset in ((0, 0), (1000, 0), (1013, 13), (1029, 29), (1030, 30), (1047, 47), (2000, 50)):
            assert await log.offset_at(time) == offset


async def test_retention_moves_the_start_and_a_reader_behind_it_is_told(cluster: Cluster) -> None:
    async with cluster.broker(options=FORGETFUL) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        for end in (10, 20, 30):
            await append_each(log, end - 10, end)
            await stored(log, end)
        reader = log.read(0)
        await anext(reader)
        behind = log.read(3)
        dropped = await log.enforce_retention(RetentionPolicy(max_bytes=0), now_ms=0, keep_from=20)
        assert [(segment.start, segment.end) for segment in dropped] == [(0, 10), (10, 20)]
        assert log.start_offset == 20
        with pytest.raises(OffsetOutOfRange):
            await anext(behind)
        with pytest.raises(OffsetOutOfRange):
            await contents(log, 19)
        await append_each(log, 30, 40)
        await stored(log, 40)
        assert log.start_offset == 20
        assert await contents(log, 20) == expected(20, 40)
        await reader.aclose()


async def test_what_is_in_memory_is_given_without_waiting(cluster: Cluster) -> None:
    """Whole batches or parts of them, from the start on; nothing that retention has removed, although memory
    has it, and nothing that is not durable."""
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)

        def recent(start: int, end: int, max_bytes: int = 1 << 20) -> list[tuple[int, int]]:
            batches = log.recent(start, end, max_bytes=max_bytes)
            return [(each.base_offset, each.next_offset) for each in batches]

        for base in range(0, 40, 10):
            await log.append(numbered(base, base + 10))
            if base == 10:
                await stored(log, 20)
        first, second, *_ = (each.header.length for each in log.recent(0, 40, max_bytes=1 << 20))
        assert recent(5, 25) == [(5, 10), (10, 20), (20, 25)]
        assert recent(30, 100) == [(30, 40)]
        assert (recent(40, 50), recent(60, 50)) == ([], [])
        assert recent(0, 40, first + second) == [(0, 10), (10, 20)]
        assert recent(0, 40, first - 1) == []
        task = asyncio.create_task(log.append(numbered(40, 50)))
        await asyncio.sleep(0)
        assert (log.assigned_offset, recent(40, 50)) == (50, [])
        await task
        await log.enforce_retention(RetentionPolicy(max_bytes=0), now_ms=0, keep_from=20)
        assert (recent(19, 50), recent(20, 50)[0]) == ([], (20, 30))
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=2)
        assert recent(20, 50) == [], "an earlier life had it in memory"


async def test_topics_do_not_see_each_other(cluster: Cluster) -> None:
    async with cluster.broker(options=FORGETFUL) as broker:
        one, two = await broker.open_topic(TOPIC, epoch=1), await broker.open_topic(OTHER, epoch=4)
        for offset in range(20):
            await asyncio.gather(one.append(batch(f"one {offset}")), two.append(batch(f"two {offset}")))
        await one.seal()
        assert await contents(one) == [f"one {offset}" for offset in range(20)]
        assert await contents(two) == [f"two {offset}" for offset in range(20)]


# -- sealing -------------------------------------------------------------------------------------------


async def test_sealing_resolves_what_is_in_flight_and_refuses_what_comes_later(cluster: Cluster) -> None:
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await wake(log)
        in_flight = [asyncio.create_task(log.append(numbered(n, n + 1))) for n in range(10)]
        await asyncio.sleep(0)
        sealing = asyncio.create_task(log.seal())
        await asyncio.sleep(0)
        with pytest.raises(TopicClosed):
            await log.append(batch("late"))
        state = await sealing
        assert await asyncio.gather(*in_flight) == list(range(10))
        assert state.sealed
        assert state.end == 10
        assert (await cluster.catalog().load()) == state
        assert await log.seal() == state, "sealing again changes nothing"
        assert broker.journal.holdings.topic_ids == [], "the journal lets go of it"


async def test_a_seal_that_comes_to_its_deadline_is_taken_back(cluster: Cluster) -> None:
    cluster.store = DownStore.open("memory://")
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 3)
        with pytest.raises(TimeoutError):
            await log.seal(timeout=0.2)
        assert log.status is LogStatus.OPEN
        await append_each(log, 3, 5)
        assert isinstance(cluster.store, DownStore)
        cluster.store.is_down = False
        assert (await log.seal()).end == 5


class ForgetfulMetadata(MemoryStore):
    """The next transaction takes effect, or not, and its answer is lost; so is what is read after it."""

    lose: str = ""

    async def txn(self, *args: Any, **kwargs: Any) -> Any:
        how, self.lose = self.lose, "read" if self.lose else ""
        if how == "refused":
            self.lose = ""
            raise Unavailable("no leader")
        if how == "applied":
            await super().txn(*args, **kwargs)
        if how:
            raise OutcomeUnknown("no answer")
        return await super().txn(*args, **kwargs)

    async def get(self, *args: Any, **kwargs: Any) -> Any:
        if self.lose == "read":
            raise Unavailable("no leader")
        return await super().get(*args, **kwargs)


@pytest.mark.parametrize("how", ["applied", "lost"])
async def test_a_seal_of_unknown_outcome_is_not_taken_back(tmp_path: Path, how: str) -> None:
    """It may take effect later: whatever would be acknowledged meanwhile would be lost."""
    metadata = ForgetfulMetadata()
    cluster = Cluster(tmp_path, metadata=metadata)
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 3)
        await stored(log, 3)
        metadata.lose = how
        with pytest.raises(OutcomeUnknown):
            await log.seal()
        with pytest.raises(TopicClosed):
            await log.append(batch("beyond the end"))
        metadata.lose = ""
        assert (await log.seal()).end == 3


async def test_a_seal_that_had_no_effect_is_taken_back(tmp_path: Path) -> None:
    metadata = ForgetfulMetadata()
    cluster = Cluster(tmp_path, metadata=metadata)
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 3)
        await stored(log, 3)
        metadata.lose = "refused"
        with pytest.raises(Unavailable):
            await log.seal()
        await append_each(log, 3, 4)


async def test_a_fenced_topic_acknowledges_nothing_more(cluster: Cluster) -> None:
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 3)
        in_flight = asyncio.create_task(log.append(numbered(3, 4)))
        await asyncio.sleep(0)
        log.fence(Fenced(TOPIC.path, 1, 2))
        with pytest.raises(Fenced):
            await in_flight
        with pytest.raises(Fenced):
            await log.append(numbered(3, 4))
        with pytest.raises(Fenced):
            await log.seal()


async def test_frames_of_a_fenced_epoch_that_are_still_on_their_way_are_disowned(cluster: Cluster) -> None:
    """Another owner had the topic meanwhile. If the journal were asked before it has answered for the old
    frames, it would hold two frames for one offset."""
    async with cluster.broker("a") as here, cluster.broker("b") as there:
        old = await here.open_topic(TOPIC, epoch=1)
        await append_each(old, 0, 3)
        await stored(old, 3)
        await cluster.catalog().seal(epoch=1, end=3, producers=(), origins=())
        other = await there.open_topic(TOPIC, epoch=2)
        await append_each(other, 3, 4)
        await other.seal()
        late = [asyncio.create_task(old.append(batch("late"))) for _ in range(5)]
        await asyncio.sleep(0)
        old.fence(Fenced(TOPIC.path, 1, 2))
        log = await here.open_topic(TOPIC, epoch=3)
        assert all(isinstance(each, Fenced) for each in await asyncio.gather(*late, return_exceptions=True))
        await append_each(log, 4, 8)
        assert await contents(log) == expected(0, 8)
        assert not cluster.failures
    async with cluster.broker("a") as here:
        assert await contents(await here.open_topic(TOPIC, epoch=4)) == expected(0, 8)


async def test_opening_again_here_ends_the_older_opening(cluster: Cluster) -> None:
    async with cluster.broker(options=small_files()) as broker:
        old = await broker.open_topic(TOPIC, epoch=1)
        await wake(old)
        in_flight = [asyncio.create_task(old.append(numbered(n, n + 1))) for n in range(5)]
        await asyncio.sleep(0)
        opening = asyncio.create_task(broker.open_topic(TOPIC, epoch=2))
        await asyncio.sleep(0)
        with pytest.raises(TopicBusy):
            await broker.open_topic(TOPIC, epoch=2)
        new = await opening
        assert await asyncio.gather(*in_flight) == list(range(5))
        assert new.next_offset == 5
        with pytest.raises(TopicClosed):
            await old.append(numbered(5, 6))
        await append_each(new, 5, 8)
        with pytest.raises(Fenced):
            await broker.open_topic(TOPIC, epoch=1)
        assert await contents(new) == expected(0, 8)


async def test_a_discarded_topic_no_longer_holds_the_journal(cluster: Cluster) -> None:
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 3)
        await log.close()
        assert broker.leftovers == [TOPIC.topic_id]
        await broker.discard(TOPIC.topic_id)
        assert broker.leftovers == []
        assert broker.journal.held_bytes < 200
