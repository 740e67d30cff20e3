"""What a disk that is gone had beyond segments becomes segments, and its topics end there."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sava.ledger.protocol import (
    LedgerId,
    LedgerRecord,
    Range,
    StorageId,
)
from sava.ledger.protocol import record as steps
from sava.ledger.recoverer import BytesMissing, parse
from sava.ledger.registry import LedgerRecords
from sava.ledger.tail_recovery import (
    WAVE,
    NotClosed,
    Share,
    TailRecovery,
    TailRecoveryReport,
    share_of,
)
from sava.metadata.errors import Unavailable
from sava.records import RecordBatch
from sava.storage.catalog import Catalog
from sava.storage.journal_index import BATCH, DISOWNED
from sava.storage.keys import state_key
from sava.storage.objectstore import ObjectStore
from sava.storage.orphans import sweep_orphans
from sava.storage.segment import SegmentReader
from sava.storage.types import OriginMark, Segment, TopicKey, TopicState
from tests.support.copying import Origins
from tests.support.memory_store import MemoryStore
from tests.support.messages import read_messages, write
from tests.support.storage import LAZY, Cluster
from tests.support.waiting import PATIENCE_S
from tests.unit.ledger.disks import Disks, Writing
from tests.unit.topics.copies import copier_into

ORDERS, PAYMENTS = TopicKey("default", "orders", 7), TopicKey("default", "payments", 8)
FIRST, SECOND = LedgerId(1, 5), LedgerId(1, 9)
HERE, THERE = StorageId("here"), StorageId("there")


def frame(
    topic: TopicKey, start: int, end: int, *, epoch: int = 1, said: str = "", size: int = 10
) -> RecordBatch:
    payloads = [f"{said}{offset:0{size}}".encode() for offset in range(start, end)]
    batch = RecordBatch.encode(payloads, publish_time=1, producer_id=topic.topic_id, base_sequence=start)
    return batch.assigned(topic_id=topic.topic_id, epoch=epoch, base_offset=start)


class Story:
    def __init__(self, path: Path) -> None:
        self.metadata = MemoryStore()
        self.objects = ObjectStore.open("memory://")
        self.records = LedgerRecords(self.metadata)
        self.disks = Disks()
        self.writing = Writing(path, file_bytes=4096)
        self.origin = self.writing.origin
        self._start = 0

    def append(self, *frames: RecordBatch) -> None:
        self.writing.append(BATCH, *(each.buffers for each in frames))

    def disown(self, topic: TopicKey, offset: int) -> None:
        self.writing.append(DISOWNED, [struct.pack("<qq", topic.topic_id, offset)])

    async def close_journal(
        self, journal: LedgerId = FIRST, *, on: tuple[str, ...] = (HERE,), **facts: object
    ) -> LedgerRecord:
        """A generation ends: what was written in it is a closed journal."""
        start, end = self._start, self.writing.log.end
        opened = steps.opened(start, (self.origin, HERE, THERE), qw=3, qa=2, by="owner")
        record = steps.closed(steps.claimed(opened, "c"), Range(start, end), tuple(map(StorageId, on)))
        record = msgspec.structs.replace(record, **facts)
        await self.records.open(journal, record)
        for storage in on:
            self.disks.put(storage, journal, self.writing.bytes(start, end), base=start)
        self._start = end
        return record

    async def claim(self, topic: TopicKey = ORDERS, *, epoch: int = 1, is_awake: bool = True) -> TopicState:
        catalog = Catalog(self.metadata, topic)
        await catalog.claim(epoch=epoch, storage_id=self.origin, has_tail=True)
        return await catalog.mark_dirty(epoch=epoch) if is_awake else await self.state(topic)

    async def state(self, topic: TopicKey = ORDERS) -> TopicState:
        state = await Catalog(self.metadata, topic).load()
        assert state is not None
        return state

    async def run(self, share: Share = Share(), **bounds: Any) -> TailRecoveryReport:  # noqa: B008 (immutable)
        tail_recovery = TailRecovery(
            self.records, self.disks, self.metadata, self.objects, own=HERE, **bounds
        )
        async with asyncio.timeout(PATIENCE_S):
            return await tail_recovery.run(1, self.origin, share)

    async def payloads(self, topic: TopicKey = ORDERS) -> list[str]:
        reader, found = SegmentReader(self.objects), []
        for segment in await Catalog(self.metadata, topic).segments():
            found += [message.payload.decode() for message in await read_messages(reader, segment)]
        return found


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def numbers(start: int, end: int, said: str = "") -> list[str]:
    return [f"{said}{offset:010}" for offset in range(start, end)]


async def test_the_tail_becomes_segments_and_the_topic_ends_there(story: Story) -> None:
    await story.claim()
    story.append(frame(ORDERS, 0, 10), frame(ORDERS, 10, 12))
    await story.close_journal()
    done = await story.run()
    state = await story.state()
    assert (state.sealed, state.end, state.epoch) == (True, 12, 1)
    assert await story.payloads() == numbers(0, 12)
    assert (done.topics, done.messages, done.removed) == (["/default/orders"], 12, [FIRST])
    assert await story.records.of(1) == {}
    (producer,) = state.producers
    assert (producer.producer_id, producer.next_sequence, producer.last_base_offset) == (7, 12, 10)


async def test_only_what_is_not_in_segments_is_taken(story: Story) -> None:
    await story.claim()
    segment = await write(story.objects, 0, 10)
    await Catalog(story.metadata, ORDERS).register(segment, epoch=1, producers=(), origins=())
    story.append(frame(ORDERS, 0, 6), frame(ORDERS, 6, 10), frame(ORDERS, 10, 15, said="x"))
    await story.close_journal()
    done = await story.run()
    assert done.messages == 5
    assert await story.payloads() == numbers(0, 10) + numbers(10, 15, "x")


@pytest.mark.parametrize("segment_bytes", [1, 16 << 20], ids=["a segment for each frame", "one segment"])
async def test_a_copied_topic_is_left_as_its_owner_would_have_left_it(
    story: Story, tmp_path: Path, segment_bytes: int
) -> None:
    """Which ranges of other clusters it has, and which of their messages came by which way: told wrongly,
    something is copied twice, or never. A part is in a segment, the rest in the journal; one message comes
    late, after higher ones that came another way."""
    eu = Origins("eu").publish(40, skip=(12, 13))
    asia = Origins("asia").relay(eu, 5, 25, skip=(15,)).publish(5)
    cluster = Cluster(tmp_path / "cluster")
    async with cluster.broker(options=LAZY) as broker:
        log = await broker.open_topic(ORDERS, epoch=1)
        catalog = Catalog(cluster.metadata, ORDERS)
        direct = await copier_into(log, eu.source, cluster.metadata)
        await (await direct.begin(eu.source_range(0, 10, begin=True)))
        await log._parts.uploader.flush(log._backlog, log.next_offset)
        before = await catalog.load()
        indirect = await copier_into(log, asia.source, cluster.metadata)
        await (await indirect.begin(asia.source_range(0, 12, begin=True)))
        await log.append(RecordBatch.encode([b"ours"], publish_time=1, producer_id=3, base_sequence=0))
        await (await direct.begin(eu.source_range(10, 30)))
        await (await indirect.begin(asia.source_range(12, len(asia.held))))
        await (await direct.begin(eu.source_range(30, 40)))
        assert before is not None
        frames = await broker.journal.read(ORDERS.topic_id, before.end, 1 << 30)
        wanted = await log.seal()
    assert len(frames) == 5
    held = msgspec.structs.replace(before, storage_id=story.origin)
    await story.metadata.put(state_key(ORDERS), msgspec.json.encode(held))
    story.append(*frames)
    await story.close_journal()
    await story.run(segment_bytes=segment_bytes)
    found = await story.state()
    assert (found.sealed, found.end, set(found.producers)) == (True, wanted.end, set(wanted.producers))
    assert marks(found) == marks(wanted)
    assert any(mark.late for mark in found.origins)


def marks(state: TopicState) -> dict[tuple[str, str], OriginMark]:
    return {(mark.cluster, mark.topic): mark for mark in state.origins}


async def test_many_topics_in_one_journal_within_little_memory(story: Story) -> None:
    topics = [TopicKey("default", f"topic-{number}", 100 + number) for number in range(20)]
    for topic in topics:
        await story.claim(topic)
    for start in range(0, 50, 5):
        story.append(*(frame(topic, start, start + 5, size=100) for topic in topics))
    await story.close_journal()
    done = await story.run(segment_bytes=2000, held_bytes=5000)
    assert len(done.topics) == 20
    for topic in topics:
        assert (await story.state(topic)).end == 50
        assert [int(payload) for payload in await story.payloads(topic)] == list(range(50))


async def test_an_unsettled_topic_without_frames_ends_where_its_segments_do(
    story: Story,
) -> None:
    """Its owner had woken it, and died before the first message was written."""
    await story.claim()
    await story.close_journal()
    await story.run()
    state = await story.state()
    assert (state.sealed, state.end) == (True, 0)


async def test_a_topic_at_rest_is_left_as_it_is(story: Story) -> None:
    await story.claim(is_awake=False)
    before = await story.state()
    await story.close_journal()
    done = await story.run()
    assert await story.state() == before
    assert (done.topics, done.removed) == ([], [FIRST])


async def test_a_topic_of_another_disk_is_left_as_it_is(story: Story) -> None:
    catalog = Catalog(story.metadata, ORDERS)
    await catalog.claim(epoch=4, storage_id="another", has_tail=False)
    await catalog.mark_dirty(epoch=4)
    story.append(frame(ORDERS, 0, 10))
    await story.close_journal()
    done = await story.run()
    assert not (await story.state()).sealed
    assert done.removed == [FIRST]


async def test_the_tail_may_reach_over_several_lives(story: Story) -> None:
    await story.claim(epoch=1)
    story.append(frame(ORDERS, 0, 10))
    await story.close_journal(FIRST)
    await story.claim(epoch=3)
    story.append(frame(ORDERS, 10, 20, epoch=3))
    await story.close_journal(SECOND)
    done = await story.run()
    assert await story.payloads() == numbers(0, 20)
    assert done.removed == [FIRST, SECOND]


async def test_a_later_life_corrects_what_only_mirrors_had(story: Story) -> None:
    """A mirror had synced 8..10, the owner's disk had not, and nobody was told of them. The owner came back,
    and gave out 8 anew."""
    await story.claim(epoch=1)
    story.append(frame(ORDERS, 0, 8), frame(ORDERS, 8, 10, said="old"))
    await story.close_journal(FIRST)
    await story.claim(epoch=3)
    story.append(frame(ORDERS, 8, 9, epoch=3, said="new"))
    await story.close_journal(SECOND)
    await story.run()
    assert await story.payloads() == numbers(0, 8) + numbers(8, 9, "new")


async def test_what_an_owner_has_written_down_once_more_counts_once(story: Story) -> None:
    await story.claim(epoch=1)
    story.append(frame(ORDERS, 0, 8), frame(ORDERS, 8, 10), frame(ORDERS, 10, 11))
    await story.close_journal(FIRST)
    await story.claim(epoch=3)
    story.append(frame(ORDERS, 8, 10), frame(ORDERS, 10, 11), frame(ORDERS, 11, 13, epoch=3))
    await story.close_journal(SECOND)
    await story.run()
    assert await story.payloads() == numbers(0, 13)


async def test_disowned_frames_are_not_history(story: Story) -> None:
    await story.claim(epoch=1)
    story.append(frame(ORDERS, 0, 5), frame(ORDERS, 5, 9, said="given up"))
    story.disown(ORDERS, 5)
    await story.claim(epoch=4)
    story.append(frame(ORDERS, 5, 7, epoch=4))
    await story.close_journal()
    await story.run()
    assert await story.payloads() == numbers(0, 7)


@pytest.mark.parametrize("is_claimed", [False, True], ids=["open", "recovering"])
async def test_nothing_is_done_while_a_ledger_of_the_disk_is_not_closed(
    story: Story, is_claimed: bool
) -> None:
    """Its frames of a later epoch would be cut off."""
    await story.claim(epoch=1)
    story.append(frame(ORDERS, 0, 10))
    await story.close_journal(FIRST)
    await story.claim(epoch=3)
    going_on = steps.opened(900, (story.origin, HERE), qw=2, qa=2, by="owner")
    await story.records.open(SECOND, steps.claimed(going_on, "c") if is_claimed else going_on)
    with pytest.raises(NotClosed, match="1/9"):
        await story.run()
    assert not (await story.state()).sealed


async def test_a_disk_without_records_is_left_to_its_owner(story: Story) -> None:
    await story.claim()
    done = await story.run()
    assert done.topics == []
    assert not (await story.state()).sealed


async def test_an_owner_that_came_back_first_keeps_its_topic(story: Story) -> None:
    """Between the look at the states and the registration."""
    await story.claim(epoch=1)
    await story.claim(PAYMENTS, epoch=1)
    story.append(frame(ORDERS, 0, 10), frame(PAYMENTS, 0, 3))
    await story.close_journal()
    catalog = Catalog(story.metadata, ORDERS)

    async def come_back(storage: StorageId, message: object) -> None:
        await catalog.claim(epoch=2, storage_id=story.origin, has_tail=True)

    story.disks.before = come_back
    done = await story.run()
    assert (done.overtaken, done.topics) == (["/default/orders"], ["/default/payments"])
    state = await story.state()
    assert (state.sealed, state.epoch, state.end) == (False, 2, 0)
    assert done.removed == []


async def test_a_topic_that_is_deleted_meanwhile_leaves_nothing(story: Story) -> None:
    await story.claim()
    story.append(frame(ORDERS, 0, 10))
    await story.close_journal()
    catalog = Catalog(story.metadata, ORDERS)

    async def delete(storage: StorageId, message: object) -> None:
        await catalog.delete_all()

    story.disks.before = delete
    done = await story.run()
    assert done.overtaken == ["/default/orders"]
    assert await catalog.load() is None
    assert [each async for each in story.objects.list("topics")] == []


async def test_whoever_is_second_finds_what_the_first_has_registered(story: Story) -> None:
    """Two brokers tail_recovery one disk, or one does it again after its answers were lost."""
    await story.claim()
    story.append(frame(ORDERS, 0, 4), frame(ORDERS, 4, 10))
    await story.close_journal()
    segment = await write(story.objects, 0, 4)
    catalog, reads = Catalog(story.metadata, ORDERS), 0

    async def register(storage: StorageId, message: object) -> None:
        nonlocal reads
        reads += 1
        if reads == 2:
            await catalog.register(segment, epoch=1, producers=(), origins=())

    story.disks.before = register
    done = await story.run()
    assert done.topics == ["/default/orders"]
    assert await story.payloads() == numbers(0, 10)
    assert (await story.state()).sealed


async def test_what_another_has_registered_whole_is_still_to_be_sealed(story: Story) -> None:
    """Another broker registers the whole tail, as an object of its own, and dies before it seals. A
    tail_recovery that takes its own refused registration for done would leave the topic unsealed, and so
    unserved."""
    await story.claim()
    story.append(frame(ORDERS, 0, 4))
    await story.close_journal()
    segment = await write(story.objects, 0, 4)
    catalog, reads = Catalog(story.metadata, ORDERS), 0

    async def register(storage: StorageId, message: object) -> None:
        nonlocal reads
        reads += 1
        if reads == 2:
            await catalog.register(segment, epoch=1, producers=(), origins=())

    story.disks.before = register
    assert (await story.run()).topics == ["/default/orders"]
    assert (await story.state()).sealed
    assert await story.payloads() == numbers(0, 4)


def test_every_topic_is_in_one_share() -> None:
    a, b, c = (StorageId(each) for each in "abc")
    shares = [share_of((a, b, c), {a, b, c}, own) for own in (a, b, c)]
    for topic_id in range(1, 20):
        assert sum(share is not None and share.has(topic_id) for share in shares) == 1
    assert share_of((a, b, c), {a, c}, c) == Share(1, 2)
    assert share_of((a, b, c), {c}, c) == Share(0, 1)
    assert share_of((a, b), {a, b, c}, c) is None


async def test_the_records_stay_until_the_last_share_is_done(story: Story) -> None:
    """Two brokers share a disk. The first is done; its end must not remove the journal, which holds the only
    copy of the tail of the other's topic. The second one's end does."""
    for topic in (ORDERS, PAYMENTS):
        await story.claim(topic)
        story.append(frame(topic, 0, 4))
    await story.close_journal()
    first = await story.run(Share(PAYMENTS.topic_id % 2, 2))
    assert (first.topics, first.others, first.removed) == (["/default/payments"], 1, [])
    assert not (await story.state(ORDERS)).sealed
    second = await story.run(Share(ORDERS.topic_id % 2, 2))
    assert (second.topics, second.others, second.removed) == (["/default/orders"], 0, [FIRST])
    assert await story.payloads(ORDERS) == await story.payloads(PAYMENTS) == numbers(0, 4)


async def test_two_brokers_share_the_work_and_the_last_removes_the_records(story: Story) -> None:
    """Neither is done before the other has read the states, so the last must look again; a removal that
    relied on the first look would never happen."""
    topics = [TopicKey("default", f"topic-{number}", 100 + number) for number in range(20)]
    for topic in topics:
        await story.claim(topic)
        story.append(frame(topic, 0, 3))
    await story.close_journal()
    done = await asyncio.gather(*(story.run(Share(index, 2)) for index in range(2)))
    assert sorted(path for each in done for path in each.topics) == sorted(topic.path for topic in topics)
    assert any(each.removed for each in done)
    assert await story.records.of(1) == {}
    for topic in topics:
        assert await story.payloads(topic) == numbers(0, 3)


async def test_two_brokers_that_do_the_same_topics_register_each_message_once(story: Story) -> None:
    """They see different brokers present, or one helps the other, which was slow and not dead."""
    topics = [TopicKey("default", f"topic-{number}", 100 + number) for number in range(20)]
    for topic in topics:
        await story.claim(topic)
        story.append(frame(topic, 0, 3), frame(topic, 3, 5))
    await story.close_journal()
    done = await asyncio.gather(story.run(), story.run(Share(0, 2)), story.run(segment_bytes=1))
    assert all(each.is_complete for each in done)
    for topic in topics:
        assert ((await story.state(topic)).sealed, await story.payloads(topic)) == (True, numbers(0, 5))


async def test_a_tail_and_its_seal_are_one_write_and_many_are_made_at_once(story: Story) -> None:
    """More topics than are registered together, and one of them taken back by its owner meanwhile: it holds
    up no other."""
    topics = [TopicKey("default", f"topic-{number}", 100 + number) for number in range(WAVE + 10)]
    for topic in topics:
        await story.claim(topic)
        story.append(frame(topic, 0, 2))
    await story.close_journal()
    back, reads = topics[5], 0

    async def take_back(storage: StorageId, message: object) -> None:
        nonlocal reads
        reads += 1
        if reads == 2:
            await Catalog(story.metadata, back).claim(epoch=2, storage_id=story.origin, has_tail=True)

    story.disks.before = take_back
    before = story.metadata.machine.revision
    done = await story.run()
    assert (len(done.topics), done.overtaken) == (WAVE + 9, [back.path])
    assert story.metadata.machine.revision - before == WAVE + 9 + 1  # with the owner's own
    for topic in topics:
        assert (await story.state(topic)).sealed == (topic is not back)


async def test_an_object_that_was_put_and_not_registered_is_nobody_s(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker that recovers a tail dies between the two. The journal still has the messages, and whoever
    is next puts them once more; the first object is named by nothing, and removed in time."""
    await story.claim()
    story.append(frame(ORDERS, 0, 10))
    await story.close_journal()
    with monkeypatch.context() as patched:

        async def die(*_: object, **__: object) -> None:
            raise Unavailable("gone")

        patched.setattr(Catalog, "register", die)
        done = await story.run()
    assert done.failed == {"/default/orders": "gone"}
    assert ((await story.state()).end, list(await story.records.of(1))) == (0, [FIRST])
    assert (await story.run()).topics == ["/default/orders"]
    assert await story.payloads() == numbers(0, 10)
    catalog = Catalog(story.metadata, ORDERS)
    (segment,) = await catalog.segments()
    put = [info.key async for info in story.objects.list("topics")]
    swept = await sweep_orphans(catalog, story.objects, now_ms=1 << 50)
    assert [info.key for info in swept] == [key for key in put if key != segment.key]
    assert len(put) == 2
    assert await story.payloads() == numbers(0, 10)


async def test_parts_are_read_from_whoever_has_them(story: Story) -> None:
    """One disk has the beginning and is damaged in the middle, the other joined later."""
    await story.claim()
    story.append(*(frame(ORDERS, start, start + 1, size=400) for start in range(30)))
    await story.close_journal(on=(HERE, THERE))
    whole = story.writing.bytes()
    here = story.disks.copies[HERE, FIRST]
    borders = [start for start, _ in _frames(whole)]
    here.bad = (Range(borders[10], borders[20]),)
    story.disks.put(THERE, FIRST, whole[borders[5] :], base=borders[5])
    await story.run()
    assert [int(payload) for payload in await story.payloads()] == list(range(30))


def _frames(data: bytes) -> list[tuple[int, int]]:
    found, _ = parse(data, 0, StorageId("disk-of-1"))
    return [(record.position, record.kind) for record in found]


async def test_a_part_that_nobody_has_is_waited_for(story: Story) -> None:
    await story.claim()
    story.append(frame(ORDERS, 0, 10))
    await story.close_journal()
    story.disks.lose(HERE)
    with pytest.raises(BytesMissing, match="1/5"):
        await story.run()
    story.disks.known.add(HERE)
    await story.run()
    assert await story.payloads() == numbers(0, 10)


async def test_a_hole_that_nobody_gave_up_keeps_its_topic_waiting_and_no_other(story: Story) -> None:
    await story.claim()
    await story.claim(PAYMENTS)
    story.append(frame(ORDERS, 0, 5), frame(ORDERS, 6, 9), frame(PAYMENTS, 0, 3))
    await story.close_journal()
    done = await story.run()
    assert "offset 5 is missing" in done.failed["/default/orders"]
    assert done.topics == ["/default/payments"]
    assert not (await story.state()).sealed
    assert list(await story.records.of(1)) == [FIRST]


async def test_where_an_operator_gave_up_a_part_the_topic_ends_before_it(story: Story) -> None:
    await story.claim()
    await story.claim(PAYMENTS)
    frames = [frame(ORDERS, 0, 5), frame(ORDERS, 5, 6), frame(PAYMENTS, 0, 3), frame(ORDERS, 6, 9)]
    positions = [story.writing.append(BATCH, each.buffers)[0] for each in frames]
    await story.close_journal(lost=(Range(positions[1], positions[2]),))
    done = await story.run()
    assert sorted(done.topics) == ["/default/orders", "/default/payments"]
    assert (await story.state()).end == 5
    assert await story.payloads(PAYMENTS) == numbers(0, 3)


async def test_frames_that_contradict_each_other_are_left_for_the_operator(story: Story) -> None:
    await story.claim()
    story.append(frame(ORDERS, 0, 5), frame(ORDERS, 3, 9))
    await story.close_journal()
    done = await story.run()
    assert "offset 3" in done.failed["/default/orders"]
    assert not (await story.state()).sealed


async def test_an_unexpected_error_of_one_topic_keeps_no_other_waiting(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: two topics of a disk that is gone; storing the first fails with an error that no rule names.
    The other is served again, and the first is reported and tried again."""
    for topic in (ORDERS, PAYMENTS):
        await story.claim(topic)
        story.append(frame(topic, 0, 4))
    await story.close_journal()
    real = Catalog.register

    async def register(self: Catalog, segment: Segment, **known: Any) -> TopicState:
        if self.topic == ORDERS:
            raise KeyError("an error that no rule names")
        return await real(self, segment, **known)

    monkeypatch.setattr(Catalog, "register", register)
    done = await story.run()
    assert done.topics == ["/default/payments"]
    assert "an error that no rule names" in done.failed["/default/orders"]
    assert (await story.state(PAYMENTS)).sealed
    monkeypatch.undo()
    assert (await story.run()).topics == ["/default/orders"]


async def test_a_frame_that_cannot_be_parsed_keeps_only_its_topic_waiting(story: Story) -> None:
    """Schedule: the disk is gone. One frame of orders has more bytes than its header says, which only the
    parsing of the whole frame shows. Payments must be served again, and orders is reported with the place."""
    await story.claim(ORDERS)
    await story.claim(PAYMENTS)
    story.append(frame(ORDERS, 0, 4))
    story.writing.append(BATCH, [*frame(ORDERS, 4, 6).buffers, b"more"])
    story.append(frame(PAYMENTS, 0, 4), frame(ORDERS, 6, 8))
    await story.close_journal()
    done = await story.run(segment_bytes=1)
    assert done.topics == ["/default/payments"]
    assert (await story.state(PAYMENTS)).sealed
    assert "offset 4" in done.failed["/default/orders"]
    assert not (await story.state(ORDERS)).sealed
    assert (await story.state(ORDERS)).end <= 4, "nothing behind the frame is history"
    assert await story.records.get(FIRST) is not None, "the journal is kept: orders is still in it"


async def test_an_unreadable_header_keeps_all_topics_waiting_it_may_be_of(
    story: Story,
) -> None:
    """Schedule: the disk is gone, and its journal has a frame whose header is not a header. It may be the
    last message of any topic that the disk had open, so none may be sealed without it. Tail recovery reports
    each of them with the place, and does not fail as a whole."""
    await story.claim(ORDERS)
    story.append(frame(ORDERS, 0, 4))
    story.writing.append(BATCH, [b"not a header"])
    await story.close_journal()
    done = await story.run()
    assert done.topics == []
    assert "cannot be read" in done.failed["/default/orders"]
    assert not (await story.state(ORDERS)).sealed
