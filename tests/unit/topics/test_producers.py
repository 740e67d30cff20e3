"""Who may publish into a topic: identities, taking over, exclusive access, sharing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sava.config import PolicySettings
from sava.records import BatchCorrupt, Message, RecordBatch
from sava.storage import producers
from sava.storage.errors import SequenceGap
from sava.storage.producers import ProducerEpochs
from sava.storage.topic_log import TopicClosed
from sava.storage.types import TopicState
from sava.topics.errors import (
    LimitReached,
    MessageInvalid,
    ProducerBusy,
    ProducerFenced,
    TopicUnknown,
)
from sava.topics.names import InvalidName, TopicName
from sava.topics.producers import (
    AccessMode,
    ProducerHandle,
    TopicProducers,
    producer_id,
)
from sava.topics.publishing import Publisher
from sava.topics.registry import Namespaces
from sava.topics.rules import TopicLimits
from sava.topics.specs import NamespacePolicy, TopicSpec
from tests.support.memory_store import MemoryStore
from tests.support.storage import TOPIC, Cluster, contents
from tests.unit.topics.test_publishing import CountingLog, unchecked

NAME = TopicName(TOPIC.namespace, TOPIC.name)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Stage:
    def __init__(self, sink: CountingLog) -> None:
        self.store = MemoryStore()
        self.sink = sink
        self.clock = Clock()
        self._publisher = Publisher(
            NAME, sink, TopicLimits(self.store, PolicySettings()), unchecked(self.store)
        )
        self.producers = TopicProducers(
            TopicSpec(topic_id=7, reliable=True), 1, self._publisher, sink.log.epochs, clock=self.clock
        )

    async def stream(self, name: str, access: AccessMode = AccessMode.SHARED, **more: Any) -> ProducerHandle:
        return await self.producers.open(name, access=access, schema_subject="", takeover=True, **more)

    def recreate(self, topic_id: int, *, epoch: int = 1, is_reliable: bool = True) -> None:
        """Another topic of the same name, or one that keeps nothing: no open is known."""
        spec = TopicSpec(topic_id=topic_id, reliable=is_reliable)
        self.producers = TopicProducers(spec, epoch, self._publisher, ProducerEpochs.in_memory())

    async def state(self) -> TopicState:
        found = await self.sink.log._catalog.load()
        assert found is not None
        return found

    async def shared(self, name: str, access: AccessMode = AccessMode.SHARED) -> ProducerHandle:
        return await self.producers.open(name, access=access, schema_subject="", takeover=False)

    @property
    def names(self) -> list[str]:
        return [producer.name for producer in self.producers]


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    cluster = Cluster(tmp_path)
    async with cluster.broker() as storage:
        yield Stage(CountingLog(await storage.open_topic(TOPIC, epoch=1)))


def batch_of(producer: ProducerHandle, *payloads: str, sequence: int, name: str | None = None) -> RecordBatch:
    return RecordBatch.encode(
        [payload.encode() for payload in payloads],
        publish_time=1,
        producer_id=producer.producer_id,
        producer=name,
        base_sequence=sequence,
    )


def test_an_id_is_that_of_topic_and_name() -> None:
    assert producer_id(7, "p") == producer_id(7, "p")
    ids = {producer_id(topic, name) for topic in range(100) for name in ("p", "q", "1", "11")}
    assert len(ids) == 400
    assert all(0 < each < 1 << 63 for each in ids)


async def test_batches_are_appended_in_order_and_repeated_ones_once(stage: Stage) -> None:
    producer = await stage.stream("p")
    assert (producer.epoch, producer.is_reliable, producer.next_sequence) == (1, True, 0)
    first = await producer.begin(batch_of(producer, "a", "b", sequence=0))
    second = await producer.begin(batch_of(producer, "c", sequence=2, name="p"))
    again = await producer.begin(batch_of(producer, "a", "b", sequence=0))
    assert (await first, await second, await again) == (0, 2, 0)
    assert producer.next_sequence == 3
    with pytest.raises(SequenceGap):
        await producer.begin(batch_of(producer, "e", sequence=4))
    assert await contents(stage.sink.log) == ["a", "b", "c"]


async def test_a_batch_that_is_not_this_producers_is_refused(stage: Stage) -> None:
    producer, other = await stage.stream("p"), await stage.stream("q")
    with pytest.raises(MessageInvalid):
        await producer.begin(batch_of(other, "a", sequence=0))
    with pytest.raises(MessageInvalid):
        await producer.begin(batch_of(producer, "a", sequence=0, name="q"))
    mixed = RecordBatch.encode(
        [b"a", b"b"], publish_time=1, producer_id=producer.producer_id, producer=["p", "q"]
    )
    with pytest.raises(MessageInvalid):
        await producer.begin(mixed)
    with pytest.raises(MessageInvalid):
        await producer.send(Message(b"a", producer="q"))
    damaged = bytearray(batch_of(producer, "a", sequence=0).to_bytes())
    damaged[-1] ^= 1
    with pytest.raises(BatchCorrupt):
        await producer.begin(RecordBatch.parse(damaged))
    assert stage.sink.log.next_offset == 0


async def test_single_messages_carry_their_producers_name(stage: Stage) -> None:
    first, second = await stage.shared("p"), await stage.shared("q")
    await asyncio.gather(first.send(Message(b"a")), second.send(Message(b"b")))
    messages = [message async for each in stage.sink.log.read(0) for message in each]
    assert [(message.payload, message.producer) for message in messages] == [(b"a", "p"), (b"b", "q")]


class TestTakingOver:
    async def test_the_older_stream_of_a_name_is_fenced_and_its_sends_resolve(self, stage: Stage) -> None:
        old = await stage.stream("p")
        begun = await old.begin(batch_of(old, "a", sequence=0))
        new = await stage.stream("p")
        assert await begun == 0
        assert new.producer_id == old.producer_id
        assert new.next_sequence == 1
        with pytest.raises(ProducerFenced):
            await old.begin(batch_of(old, "b", sequence=1))
        old.close()
        assert await (await new.begin(batch_of(new, "b", sequence=1))) == 1
        assert stage.names == ["p"]

    async def test_the_new_one_waits_until_nothing_of_the_old_one_can_get_in(self, stage: Stage) -> None:
        """Otherwise its first batch would be taken for a repetition of the old one's last."""
        old = await stage.stream("p")
        stage.sink.gate.clear()
        late = asyncio.create_task(old.begin(batch_of(old, "old", sequence=0)))
        await asyncio.sleep(0)
        opening = asyncio.create_task(stage.stream("p"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not opening.done()
        stage.sink.gate.set()
        new = await opening
        assert await (await late) == 0
        assert new.next_sequence == 1

    async def test_of_several_at_once_the_last_one_stays(self, stage: Stage) -> None:
        """Those before it are told at once, or when they publish."""
        opened = await asyncio.gather(*(stage.stream("p") for _ in range(5)), return_exceptions=True)
        *others, last = opened
        assert isinstance(last, ProducerHandle)
        assert last.is_open
        for other in others:
            assert isinstance(other, ProducerFenced) or (
                isinstance(other, ProducerHandle) and not other.is_open
            )


class TestLastOpen:
    async def test_a_reconnect_with_the_number_of_an_earlier_open_is_refused(self, stage: Stage) -> None:
        """The connection of A breaks unnoticed; B opens and closes; A comes back with what it was given."""
        first = await stage.stream("p")
        second = await stage.stream("p")
        assert second.number > first.number
        second.close()
        with pytest.raises(ProducerFenced):
            await stage.stream("p", presented=first.number)
        again = await stage.stream("p", presented=second.number)
        assert again.number == second.number
        assert again.is_open

    async def test_a_reconnect_takes_the_place_of_its_own_older_stream(self, stage: Stage) -> None:
        first = await stage.stream("p")
        again = await stage.stream("p", presented=first.number)
        assert (first.is_open, again.is_open) == (False, True)
        assert again.number == first.number

    async def test_an_open_that_is_refused_fences_nobody(self, stage: Stage) -> None:
        """An exclusive producer of another name has the topic: what comes under the name of a third one is
        refused, and that one continues when the topic is free."""
        first = await stage.stream("p")
        first.close()
        exclusive = await stage.stream("q", AccessMode.EXCLUSIVE)
        with pytest.raises(ProducerBusy):
            await stage.stream("p")
        exclusive.close()
        assert (await stage.stream("p", presented=first.number)).is_open

    async def test_a_generated_name_costs_no_write_and_takes_no_name(self, stage: Stage) -> None:
        before = await stage.state()
        generated = await stage.stream("p-1", is_generated=True)
        again = await stage.stream("p-1", is_generated=True)
        assert (generated.number, again.number) == (0, 0)
        assert (generated.is_open, again.is_open) == (False, True)
        assert await stage.state() == before
        named = await stage.stream("p-1")
        with pytest.raises(ProducerFenced):
            await stage.stream("p-1", is_generated=True)
        assert named.is_open
        assert await stage.state() != before

    async def test_a_producer_that_was_forgotten_is_refused(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(producers, "MAX_NAMES", 3)
        first = await stage.stream("p")
        first.close()
        for name in "qrs":
            (await stage.stream(name)).close()
        with pytest.raises(ProducerFenced, match="open it again"):
            await stage.stream("p", presented=first.number)
        assert (await stage.stream("p")).is_open

    async def test_a_topic_that_was_created_again_refuses_producers_of_the_old_one(
        self, stage: Stage
    ) -> None:
        """A opens on the topic of id 7; it is deleted and created again, with id 8; B opens there; A comes
        back. If nobody has opened the name, A continues."""
        old = [await stage.stream("p") for _ in range(5)][-1]
        unused = await stage.stream("q")
        stage.recreate(topic_id=8)
        new = await stage.stream("p")
        with pytest.raises(ProducerFenced):
            await stage.stream("p", presented=old.number)
        assert new.is_open
        assert (await stage.stream("q", presented=unused.number)).is_open

    async def test_an_open_after_a_restart_wins_on_a_topic_that_keeps_nothing(self, stage: Stage) -> None:
        """A opens; the broker restarts, and has forgotten it; B opens; A comes back."""
        stage.recreate(7, epoch=1, is_reliable=False)
        old = [await stage.stream("p") for _ in range(5)][-1]
        stage.recreate(7, epoch=2, is_reliable=False)
        new = await stage.stream("p")
        with pytest.raises(ProducerFenced):
            await stage.stream("p", presented=old.number)
        assert new.is_open

    async def test_a_danube_client_shares_a_name_and_fences_nobody(self, stage: Stage) -> None:
        """It presents no number, and cannot be told from one that has come back."""
        first = await stage.stream("p")
        shared = await stage.shared("p")
        assert shared is first
        first.close()
        await stage.shared("p")
        again = await stage.stream("p", presented=first.number)
        assert again.is_open

    async def test_an_open_that_waits_for_its_predecessor_is_overtaken(self, stage: Stage) -> None:
        """A has a batch on its way in. B opens and waits for it; C opens after B. Only C has the name."""
        first = await stage.stream("p")
        stage.sink.gate.clear()
        entering = asyncio.ensure_future(first.begin(batch_of(first, "a", sequence=0)))
        await asyncio.sleep(0)
        second, third = (asyncio.ensure_future(stage.stream("p")) for _ in range(2))
        while (await stage.state()).epochs.last < first.number + 2:  # noqa: ASYNC110 (a record has no event)
            await asyncio.sleep(0)
        stage.sink.gate.set()
        await (await entering)
        with pytest.raises(ProducerFenced):
            await second
        assert (await third).is_open


class TestExclusive:
    async def test_an_exclusive_producer_keeps_others_out_until_it_closes(self, stage: Stage) -> None:
        first = await stage.stream("p", AccessMode.EXCLUSIVE)
        for access in AccessMode:
            with pytest.raises(ProducerBusy):
                await stage.stream("q", access)
            with pytest.raises(ProducerBusy):
                await stage.shared("q", access)
        first.close()
        assert (await stage.stream("q")).is_open

    async def test_others_keep_an_exclusive_producer_out(self, stage: Stage) -> None:
        first = await stage.stream("p")
        with pytest.raises(ProducerBusy):
            await stage.stream("q", AccessMode.EXCLUSIVE)
        first.close()
        await stage.stream("q", AccessMode.EXCLUSIVE)

    async def test_it_may_take_its_own_place(self, stage: Stage) -> None:
        old = await stage.stream("p", AccessMode.EXCLUSIVE)
        new = await stage.stream("p", AccessMode.EXCLUSIVE)
        assert (old.is_open, new.is_open) == (False, True)


class TestSharing:
    async def test_a_name_without_a_stream_is_registered_once(self, stage: Stage) -> None:
        first, second = await stage.shared("p"), await stage.shared("p")
        assert first is second
        assert list(stage.producers) == [first]

    async def test_an_idle_one_is_dropped_and_comes_back_with_its_next_message(self, stage: Stage) -> None:
        idle, busy, stream = await stage.shared("idle"), await stage.shared("busy"), await stage.stream("s")
        stage.clock.now = 599.0
        await busy.send(Message(b"a"))
        stage.clock.now = 601.0
        stage.producers.drop_idle()
        assert stage.names == ["busy", "s"]
        with pytest.raises(TopicClosed):
            await idle.send(Message(b"b"))
        assert await (await stage.shared("idle")).send(Message(b"b")) == 1
        assert stream.is_open


async def test_the_number_of_producers_is_limited_by_those_that_are_open(stage: Stage) -> None:
    namespaces = Namespaces(stage.store)
    await namespaces.create(NAME.namespace, NamespacePolicy(max_producers_per_topic=2))
    first = await stage.stream("a")
    await stage.shared("b")
    with pytest.raises(LimitReached):
        await stage.stream("c")
    await stage.stream("a")
    assert not first.is_open
    await namespaces.change_policy(NAME.namespace, lambda _: NamespacePolicy(max_producers_per_topic=3))
    third = await stage.stream("c")
    third.close()
    await stage.stream("d")


async def test_when_the_topic_ends_all_its_producers_get_to_know_why(stage: Stage) -> None:
    producer = await stage.stream("p")
    stage.producers.end(TopicUnknown(NAME))
    with pytest.raises(TopicUnknown):
        await producer.begin(batch_of(producer, "a", sequence=0))
    with pytest.raises(TopicUnknown):
        await producer.send(Message(b"a"))
    with pytest.raises(TopicUnknown):
        await stage.stream("q")


@pytest.mark.parametrize("name", ["", "x" * 201])
async def test_a_name_has_a_length(stage: Stage, name: str) -> None:
    with pytest.raises(InvalidName):
        await stage.stream(name)
