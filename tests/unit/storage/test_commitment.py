"""A journal that waits for others: nothing is told before it is committed, and everything in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sava.records import RecordBatch
from sava.storage.broker_storage import BrokerStorage
from sava.storage.commit_queue import NotCommittable
from sava.storage.errors import ClosedUncommitted, Fenced
from sava.storage.journal import Journal, JournalOptions
from sava.storage.maintenance import RetentionPolicy
from sava.storage.topic_log import TopicLog
from sava.wal import DiskFull, LocalDisk
from tests.support.storage import TOPIC, Cluster, append_each, contents, expected, numbered
from tests.support.waiting import PATIENCE_S
from tests.unit.storage.commitments import Ended, Mirrors
from tests.unit.storage.resting import TOLD


def batch(base: int, *, topic: int = 1, epoch: int = 1, size: int = 100) -> RecordBatch:
    encoded = RecordBatch.encode([b"x" * size], publish_time=1, producer_id=9, base_sequence=base)
    return encoded.assigned(topic_id=topic, epoch=epoch, base_offset=base)


class Answers:
    """Of a journal, in the order in which they come."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.told: list[tuple[int, type[BaseException] | None]] = []

    def append(self, base: int, *, topic: int = 1, epoch: int = 1, size: int = 100) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(outcome: BaseException | None) -> None:
            self.told.append((base, type(outcome) if outcome is not None else None))
            future.set_result(None)

        self.journal.append(batch(base, topic=topic, epoch=epoch, size=size), done)
        return future


def fill_disk(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise DiskFull("full")

    for name in ("write", "write_durably"):
        monkeypatch.setattr(journal._log._file, name, refuse)


def log_files(path: Path) -> int:
    return len(list(path.glob("log-*")))


@asynccontextmanager
async def opened(path: Path, mirrors: Mirrors) -> AsyncIterator[Answers]:
    failures: list[BaseException] = []
    journal = await Journal.open(
        LocalDisk(path),
        broker="a",
        options=JournalOptions(file_bytes=4096),
        fail=failures.append,
    )
    await journal.begin_generation(mirrors)
    try:
        yield Answers(journal)
    finally:
        await journal.close()
    assert not failures


async def test_durable_is_not_committed(tmp_path: Path) -> None:
    mirrors = Mirrors()
    async with opened(tmp_path, mirrors) as answers:
        first, second = answers.append(0), answers.append(1)
        middle = (await answers.journal.queue.drained()) - 8
        assert mirrors.own > middle
        assert answers.told == []
        assert not answers.journal.holdings.index(1)
        answers.journal.queue.committed(middle)
        await first
        assert answers.told == [(0, None)], "the second ends behind what is committed"
        assert answers.journal.holdings.index(1).ranges == [(0, 1)]
        answers.journal.queue.committed(mirrors.own)
        await second
        assert answers.journal.holdings.index(1).ranges == [(0, 2)]


async def test_a_refused_frame_is_reported_behind_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: a is durable here, not yet elsewhere; b finds the disk full. Told b first, the topic would
    give out a's offset again."""
    mirrors = Mirrors()
    async with opened(tmp_path, mirrors) as answers:
        journal = answers.journal
        first = answers.append(0)
        end = await journal.queue.drained()
        fill_disk(journal, monkeypatch)
        second = answers.append(1)
        await journal.queue.drained()
        assert answers.told == []
        with pytest.raises(DiskFull):
            answers.append(1)
        monkeypatch.undo()
        with pytest.raises(DiskFull):
            answers.append(1)  # nobody was told of the refusal yet
        journal.queue.committed(end)
        await asyncio.gather(first, second)
        assert answers.told == [(0, None), (1, DiskFull)]
        await journal.queue.drained()
        again = answers.append(1)
        journal.queue.committed(await journal.queue.drained())
        await again
        assert journal.holdings.index(1).ranges == [(0, 2)]


async def test_the_end_of_a_life_fails_what_is_in_flight_and_no_topic_goes_on(tmp_path: Path) -> None:
    mirrors = Mirrors()
    async with opened(tmp_path, mirrors) as answers:
        journal = answers.journal
        journal.fence(1, 1)
        durable = answers.append(0)
        await journal.queue.drained()
        queued = answers.append(1)
        journal.end_generation(Ended())
        await asyncio.gather(durable, queued)
        assert answers.told == [(0, Ended), (1, Ended)]
        with pytest.raises(Ended):
            answers.append(2)
        assert not journal.queue.has_generation
        await journal.queue.drained()
        await journal.begin_generation(mirrors)
        with pytest.raises(Fenced):
            answers.append(0, epoch=1)
        journal.fence(1, 2)
        mirrors.position = 1 << 62
        await answers.append(0, epoch=2)
        assert answers.told[-1] == (0, None)


async def test_what_waits_for_room_is_refused_when_the_life_ends(tmp_path: Path) -> None:
    async with opened(tmp_path, Mirrors()) as answers:
        journal = answers.journal
        size = 10 << 20
        answers.append(0, size=size)
        waiting = asyncio.create_task(journal.reserve(size))
        await asyncio.sleep(0)
        assert not waiting.done()
        journal.end_generation(Ended())
        await waiting
        with pytest.raises(Ended):
            answers.append(1)


async def test_appends_are_refused_at_the_door_while_nothing_could_be_committed(tmp_path: Path) -> None:
    mirrors = Mirrors()
    async with opened(tmp_path, mirrors) as answers:
        mirrors.refuses = True
        with pytest.raises(NotCommittable):
            answers.append(0)
        mirrors.refuses, mirrors.position = False, 1 << 62
        await answers.append(0)


async def test_the_log_is_trimmed_as_far_as_the_record_allows(tmp_path: Path) -> None:
    mirrors = Mirrors()
    mirrors.position = 1 << 62
    async with opened(tmp_path, mirrors) as answers:
        journal = answers.journal
        for base in range(100):
            await answers.append(base)
        files = log_files(tmp_path)
        mirrors.floor = 0
        journal.release(1, 100)
        await journal.queue.drained()
        assert log_files(tmp_path) == files
        assert mirrors.asked
        mirrors.floor = 1 << 62
        journal.trim()
        await journal.queue.drained()
        assert log_files(tmp_path) < files


async def test_a_journal_of_which_nothing_is_needed_holds_no_notes_either(tmp_path: Path) -> None:
    """What everything was released by lies behind it. Nobody needs it, and a quiet journal gets nothing that
    would lie behind it again."""
    mirrors = Mirrors()
    mirrors.position = 1 << 62
    async with opened(tmp_path, mirrors) as answers:
        journal = answers.journal
        await answers.append(0)
        await answers.append(0, topic=2)
        journal.release(1, 1)
        journal.release(2, 1)
        end = await journal.queue.drained()
        assert (journal.floor, journal.held_bytes) == (end, 0)
        assert mirrors.asked[-1] == end


async def test_a_frame_committed_before_the_loop_heard_of_it_is_needed(
    tmp_path: Path,
) -> None:
    """Schedule: everything is released; a frame is on its way. The writer's thread has synced it, and a
    mirror says that it is committed, before the loop runs what the writer has left for it."""
    mirrors = Mirrors()
    async with opened(tmp_path, mirrors) as answers:
        journal = answers.journal
        before = await journal.queue.drained()
        frame = answers.append(0)
        while journal._log.durable_end == before:
            pass  # the loop must not run
        journal.queue.committed(journal._log.durable_end)
        assert journal.floor == before
        mirrors.position = 1 << 62
        await frame
        assert journal.holdings.index(1).ranges == [(0, 1)]
        assert journal.floor == before


async def test_what_nobody_acknowledged_is_left_out_after_a_restart(tmp_path: Path) -> None:
    mirrors = Mirrors()
    async with opened(tmp_path, mirrors) as answers:
        first = answers.append(0)
        closed = await answers.journal.queue.drained()
        answers.append(1)
        end = await answers.journal.queue.drained()
        answers.journal.queue.committed(closed)
        await first
    failures: list[BaseException] = []
    journal = await Journal.open(
        LocalDisk(tmp_path), broker="a", uncommitted_tails=[(closed, end)], fail=failures.append
    )
    try:
        assert journal.holdings.index(1).ranges == [(0, 1)]
        assert journal.holdings.take_producers(1).next_sequence(9) == 1
    finally:
        await journal.close()


async def test_closing_tells_whoever_waits(tmp_path: Path) -> None:
    async with opened(tmp_path, Mirrors()) as answers:
        waiting = answers.append(0)
        await answers.journal.close()
        await waiting
        assert answers.told == [(0, ClosedUncommitted)], "it is on this disk, and mirrors may have it"


async def test_a_frame_on_a_full_disk_does_not_block_the_next_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrors = Mirrors()
    async with opened(tmp_path, mirrors) as answers:
        journal = answers.journal
        durable = answers.append(0)
        await journal.queue.drained()
        fill_disk(journal, monkeypatch)
        refused = answers.append(1)
        await journal.queue.drained()
        monkeypatch.undo()
        journal.end_generation(Ended())
        await asyncio.gather(durable, refused)
        assert answers.told == [(0, Ended), (1, DiskFull)]
        await journal.queue.drained()
        mirrors.position = 1 << 62
        await journal.begin_generation(mirrors)
        await answers.append(0, epoch=2)
        assert answers.told[-1] == (0, None)


async def test_whoever_waits_for_a_life_that_will_not_be_is_told(tmp_path: Path) -> None:
    """Schedule: a topic is being opened and waits for the journal; the registration is lost, and everything
    that is being opened is waited for before the broker registers anew. Both would wait for ever."""
    async with opened(tmp_path, Mirrors()) as answers:
        journal = answers.journal
        journal.end_generation(Ended())
        journal.queue.expect_generation()
        waiting = asyncio.create_task(journal.queue.wait_for_generation())
        await asyncio.sleep(0)
        journal.queue.fail_waiting(Ended())
        with pytest.raises(Ended):
            await waiting
        journal.queue.expect_generation()
        later = asyncio.create_task(journal.queue.wait_for_generation())
        await asyncio.sleep(0)
        await journal.begin_generation(Mirrors())
        await later


async def test_whoever_comes_to_wait_for_a_life_that_will_not_be_is_told_too(tmp_path: Path) -> None:
    """Schedule: a topic is being opened, and its tenure is being written when the registration is lost. It
    comes to the journal after all who waited there were told; it is waited for before the broker registers
    anew, and without that there is no life: the broker never came back."""
    async with opened(tmp_path, Mirrors()) as answers:
        journal = answers.journal
        for end in (journal.end_generation, journal.queue.fail_waiting):
            end(Ended())
            with pytest.raises(Ended):
                await asyncio.wait_for(journal.queue.wait_for_generation(), PATIENCE_S)


async def test_an_answer_is_degraded_if_it_was_so_when_it_was_given(tmp_path: Path) -> None:
    """And stays so: what was acknowledged on one disk is not on two because later messages are."""
    mirrors = Mirrors()
    mirrors.position = 1 << 62
    async with Cluster(tmp_path).broker() as broker:
        await broker.journal.begin_generation(mirrors)
        log = await broker.open_topic(TOPIC, epoch=1)
        for state in (False, True, True, False, True, False):
            mirrors.is_degraded = state
            await log.append(RecordBatch.encode([b"a", b"b"], publish_time=1))
            assert [log.is_degraded(log.next_offset - 2), log.is_degraded(log.next_offset - 1)] == [state] * 2
        assert [offset for offset in range(12) if log.is_degraded(offset)] == [8, 9], "the last ones in a row"


async def with_one_in_flight(broker: BrokerStorage, mirrors: Mirrors) -> tuple[TopicLog, asyncio.Future[int]]:
    """A topic of which 0..3 are in segments, and one more is on the disk and not committed."""
    log = await broker.open_topic(TOPIC, epoch=1)
    await append_each(log, 0, 3)
    await log._parts.uploader.flush(log._backlog, 3)
    mirrors.position = await broker.journal.queue.drained()
    in_flight = await log.begin(numbered(3, 4))
    await broker.journal.queue.drained()
    return log, in_flight


async def test_a_replaced_owner_shows_what_was_committed_and_nothing_else(tmp_path: Path) -> None:
    """Schedule: a broker is cut off with a message in flight, and does not know that its journal was closed
    without it and that its topic goes on elsewhere. Who reads from it sees old messages, and none that the
    topic does not have; nothing that it writes takes effect."""
    mirrors, cluster = Mirrors(), Cluster(tmp_path)
    mirrors.position = 1 << 62
    async with cluster.broker("a") as old, cluster.broker("b") as new:
        await old.journal.begin_generation(mirrors)
        zombie, in_flight = await with_one_in_flight(old, mirrors)
        # Who salvages the journal finds nothing beyond the segments.
        await cluster.catalog().seal(epoch=1, end=3, producers=(), origins=())
        log = await new.open_topic(TOPIC, epoch=2)
        assert await log.append(RecordBatch.encode([b"another"], publish_time=1)) == 3

        beyond = asyncio.create_task(zombie.wait_beyond(3))
        assert await contents(zombie) == expected(0, 3)
        assert (zombie.next_offset, in_flight.done(), beyond.done()) == (3, False, False)
        with pytest.raises(Fenced):
            await zombie.enforce_retention(RetentionPolicy(max_bytes=1), now_ms=1 << 50)
        old.journal.end_generation(Ended())
        with pytest.raises(Fenced):
            await zombie.append(numbered(3, 4))
        with pytest.raises(Fenced):
            await beyond
        assert await contents(log) == [*expected(0, 3), "another"]


async def test_a_topic_with_a_message_in_doubt_does_not_rest(tmp_path: Path) -> None:
    """Schedule: everything is in segments and the topic was woken for one more message, which is on this disk
    when the registration is lost. The topic is about to be dropped; before that, it is time to rest. The
    message is found to be the topic's when the journal is closed: the broker took itself for corrupt, and the
    producer was told so."""
    mirrors, cluster = Mirrors(), Cluster(tmp_path)
    mirrors.position = 1 << 62
    async with cluster.broker(options=TOLD) as broker:
        await broker.journal.begin_generation(mirrors)
        log, in_flight = await with_one_in_flight(broker, mirrors)
        broker.journal.end_generation(Ended())
        with pytest.raises(Ended):
            await in_flight
        log._marker._due()
        await asyncio.sleep(0.05)
        state = await cluster.catalog().load()
        assert state is not None
        assert not state.is_clean

        await log.close()
        await broker.journal.replay(())
        mirrors.position = 1 << 62
        await broker.journal.begin_generation(mirrors)
        again = await broker.open_topic(TOPIC, epoch=2)
        assert await contents(again) == expected(0, 4)
