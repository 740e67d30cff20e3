"""Single messages joined into batches, and what is refused at the door of a topic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from sava.config import PolicySettings
from sava.errors import Outcome
from sava.records import InvalidMessage, Message, RecordBatch
from sava.schemas.registry import SchemaRegistry
from sava.schemas.types import TopicSchema
from sava.storage.topic_log import TopicClosed, TopicLog
from sava.topics import publishing
from sava.topics.errors import (
    LimitReached,
    MessageTooLarge,
    SchemaRefused,
    TopicMoved,
)
from sava.topics.names import TopicName
from sava.topics.publishing import Publisher
from sava.topics.registry import Namespaces
from sava.topics.rules import SchemaChecks, TopicCheck, TopicLimits
from sava.topics.specs import NamespacePolicy
from tests.support.memory_store import MemoryStore
from tests.support.storage import TOPIC, Cluster, batch, contents
from tests.support.waiting import PATIENCE_S

NAME = TopicName(TOPIC.namespace, TOPIC.name)


def unchecked(store: MemoryStore) -> SchemaChecks:
    """Without a record of a schema everything passes."""
    return SchemaChecks(store, SchemaRegistry(store))


class CountingLog:
    """A topic's log that counts its appends; they can be made to wait."""

    def __init__(self, log: TopicLog) -> None:
        self.log = log
        self.appends: list[int] = []
        self.gate = asyncio.Event()
        """Whether there is room."""
        self.gate.set()
        self.is_durable = asyncio.Event()
        """Whether what was accepted resolves."""
        self.is_durable.set()

    async def begin(self, batch: RecordBatch) -> asyncio.Future[int]:
        await self.gate.wait()
        self.appends.append(len(batch))
        return asyncio.ensure_future(self._resolved(await self.log.begin(batch)))

    async def _resolved(self, outcome: asyncio.Future[int]) -> int:
        await self.is_durable.wait()
        return await outcome

    def is_degraded(self, offset: int) -> bool:
        return False

    def next_sequence(self, producer_id: int) -> int:
        return self.log.next_sequence(producer_id)


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[CountingLog]:
    cluster = Cluster(tmp_path)
    async with cluster.broker() as storage:
        yield CountingLog(await storage.open_topic(TOPIC, epoch=1))


@pytest.fixture
def publisher(sink: CountingLog) -> Publisher:
    store = MemoryStore()
    return Publisher(NAME, sink, TopicLimits(store, PolicySettings()), unchecked(store))


def allowed() -> None:
    """Nothing speaks against it."""


async def test_a_thousand_messages_at_once_are_few_appends(publisher: Publisher, sink: CountingLog) -> None:
    sends = [publisher.send(Message(b"%d" % number), allowed) for number in range(1000)]
    offsets = await asyncio.gather(*sends)
    assert offsets == list(range(1000))
    assert len(sink.appends) <= 3
    assert await contents(sink.log) == list(map(str, range(1000)))


async def test_an_unexpected_error_while_joining_leaves_no_caller_waiting(
    publisher: Publisher, sink: CountingLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: ten messages are joined, and making their batch fails with an error that no rule names. Their
    callers hear of it, and the next message is appended."""
    with monkeypatch.context() as broken:
        broken.setattr(RecordBatch, "from_messages", Mock(side_effect=MemoryError("no room for a batch")))
        sends = [publisher.send(Message(b"%d" % number), allowed) for number in range(10)]
        async with asyncio.timeout(PATIENCE_S):
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [TopicClosed] * 10
    assert await publisher.send(Message(b"next"), allowed) == 0
    assert sink.appends == [1]


@pytest.mark.parametrize("moment", ["queued", "durable"])
async def test_an_unexpected_error_behind_the_append_leaves_its_outcome_unknown(
    publisher: Publisher, sink: CountingLog, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Schedule: the log takes a batch of two messages, and then fails with an error that no rule names: at
    once, or while the batch becomes durable. The messages are in the topic, so their callers must not hear
    that nothing was appended."""
    accept = sink.log.begin

    async def fail_behind(batch: RecordBatch) -> asyncio.Future[int]:
        durable = await accept(batch)
        if moment == "queued":
            raise ValueError("not foreseen")

        async def fail_later() -> int:
            await durable
            raise ValueError("not foreseen")

        return asyncio.ensure_future(fail_later())

    with monkeypatch.context() as broken:
        broken.setattr(sink, "begin", fail_behind)
        async with asyncio.timeout(PATIENCE_S):
            outcomes = await asyncio.gather(
                *(publisher.send(Message(payload), allowed) for payload in (b"a", b"b")),
                return_exceptions=True,
            )
    assert [getattr(outcome, "outcome", outcome) for outcome in outcomes] == [Outcome.UNKNOWN] * 2
    assert await publisher.send(Message(b"next"), allowed) == 2
    assert await contents(sink.log) == ["a", "b", "next"]


async def test_what_comes_while_an_append_is_under_way_waits_for_the_next(
    publisher: Publisher, sink: CountingLog
) -> None:
    sink.gate.clear()
    first = asyncio.create_task(publisher.send(Message(b"0"), allowed))
    for _ in range(5):
        await asyncio.sleep(0)
    later = [asyncio.create_task(publisher.send(Message(b"%d" % n), allowed)) for n in range(1, 50)]
    for _ in range(5):
        await asyncio.sleep(0)
    sink.gate.set()
    assert await first == 0
    assert await asyncio.gather(*later) == list(range(1, 50))
    assert sink.appends == [1, 49]


async def test_appends_are_bounded(
    publisher: Publisher, sink: CountingLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "MAX_JOINED", 30)
    monkeypatch.setattr(publishing, "MAX_JOINED_BYTES", 5000)
    monkeypatch.setattr(publishing, "MAX_WAITING_BYTES", 10_000)
    await asyncio.gather(*(publisher.send(Message(b"x"), allowed) for _ in range(100)))
    await asyncio.gather(*(publisher.send(Message(b"x" * 2000), allowed) for _ in range(10)))
    await publisher.send(Message(b"x" * 20_000), allowed)
    assert sink.log.next_offset == 111
    assert max(sink.appends) <= 25


async def test_an_append_that_fails_fails_for_all_of_its_callers(
    publisher: Publisher, sink: CountingLog
) -> None:
    await sink.log.close()
    outcomes = await asyncio.gather(
        *(publisher.send(Message(b"x"), allowed) for _ in range(10)), return_exceptions=True
    )
    assert all(isinstance(outcome, TopicClosed) for outcome in outcomes)


async def test_a_message_that_no_batch_can_hold_fails_alone(publisher: Publisher, sink: CountingLog) -> None:
    messages = [Message(b"%d" % number) for number in range(10)]
    messages[3] = Message(b"3", publish_time=1 << 63)
    messages[7] = Message(b"7", key="\ud800")
    sends = [publisher.send(message, allowed) for message in messages]
    outcomes = await asyncio.gather(*sends, return_exceptions=True)
    assert isinstance(outcomes[3], InvalidMessage)
    assert isinstance(outcomes[7], InvalidMessage)
    assert [outcome for outcome in outcomes if isinstance(outcome, int)] == list(range(8))
    assert await contents(sink.log) == ["0", "1", "2", "4", "5", "6", "8", "9"]


async def test_a_caller_that_goes_away_leaves_the_others_alone(
    publisher: Publisher, sink: CountingLog
) -> None:
    sink.gate.clear()
    sends = [asyncio.create_task(publisher.send(Message(b"%d" % n), allowed)) for n in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    sends[1].cancel()
    sink.gate.set()
    assert (await sends[0], await sends[2]) == (0, 2)
    assert await publisher.send(Message(b"3"), allowed) == 3


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_closing_fails_what_waits_and_lets_what_is_under_way_resolve(
    publisher: Publisher, sink: CountingLog
) -> None:
    sink.is_durable.clear()
    first = asyncio.create_task(publisher.send(Message(b"0"), allowed))
    await turns()
    second = asyncio.create_task(publisher.send(Message(b"1"), allowed))
    await turns()
    closing = asyncio.create_task(publisher.close(TopicClosed("over")))
    with pytest.raises(TopicClosed):
        await second
    assert not first.done()
    sink.is_durable.set()
    await closing
    assert await first == 0
    with pytest.raises(TopicClosed):
        await publisher.send(Message(b"2"), allowed)


async def test_closing_does_not_wait_for_room_that_may_never_come(
    publisher: Publisher, sink: CountingLog
) -> None:
    """The journal is full and nothing can be uploaded; the topic must be let go of all the same."""
    sink.gate.clear()
    first = asyncio.create_task(publisher.send(Message(b"0"), allowed))
    await turns()
    await publisher.close(TopicMoved(NAME))
    with pytest.raises(TopicMoved):
        await first
    sink.gate.set()
    await turns()
    assert sink.appends == []


class TestHolding:
    async def test_accepted_messages_resolve_and_later_ones_wait_for_the_end(
        self, publisher: Publisher, sink: CountingLog
    ) -> None:
        sink.is_durable.clear()
        first = asyncio.create_task(publisher.send(Message(b"0"), allowed))
        await turns()
        queued = asyncio.create_task(publisher.send(Message(b"1"), allowed))
        await turns()
        holding = asyncio.create_task(publisher.hold())
        await turns()
        assert not holding.done()
        sink.is_durable.set()
        await holding
        assert await first == 0
        late = asyncio.create_task(publisher.send(Message(b"2"), allowed))
        batched = asyncio.create_task(publisher.begin(batch("3"), allowed))
        await turns(20)
        assert not any(task.done() for task in (queued, late, batched))
        await publisher.close(TopicMoved(NAME))
        for held in (queued, late, batched):
            with pytest.raises(TopicMoved):
                await held
        assert await contents(sink.log) == ["0"]

    async def test_a_batch_that_waited_for_room_when_it_began_is_held_too(
        self, publisher: Publisher, sink: CountingLog
    ) -> None:
        sink.gate.clear()
        batched = asyncio.create_task(publisher.begin(batch("0"), allowed))
        await turns()
        await publisher.hold()
        await sink.log.seal(timeout=PATIENCE_S)
        sink.gate.set()
        await turns()
        assert not batched.done()
        await publisher.close(TopicMoved(NAME))
        with pytest.raises(TopicMoved):
            await batched
        assert sink.log.next_offset == 0

    async def test_no_more_than_so_many_bytes_wait(
        self, publisher: Publisher, sink: CountingLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(publishing, "MAX_WAITING_BYTES", 1000)
        await publisher.hold()
        sends = [asyncio.create_task(publisher.send(Message(b"x" * 300), allowed)) for _ in range(10)]
        await turns(20)
        assert publisher._waiting_bytes == 1000
        await publisher.close(TopicMoved(NAME))
        for send in sends:
            with pytest.raises(TopicMoved):
                await send
        assert sink.appends == []


class _NoSevens(SchemaChecks):
    def batch_check(self, topic: TopicName) -> TopicCheck | None:
        return TopicCheck(self, topic, TopicSchema(subject="numbers"))

    async def check(self, topic: TopicName, schema: TopicSchema, batch: RecordBatch) -> None:
        if b"7" in batch.payloads():
            raise SchemaRefused("7 is not one")


async def test_a_message_against_the_schema_is_refused_alone(sink: CountingLog) -> None:
    store = MemoryStore()
    checks = _NoSevens(store, SchemaRegistry(store))
    publisher = Publisher(NAME, sink, TopicLimits(store, PolicySettings()), checks)
    sends = [publisher.send(Message(b"%d" % number), allowed) for number in range(10)]
    outcomes = await asyncio.gather(*sends, return_exceptions=True)
    assert isinstance(outcomes[7], SchemaRefused)
    assert sink.log.next_offset == 9
    with pytest.raises(SchemaRefused):
        await publisher.begin(batch("6", "7", "8"), allowed)


async def test_the_size_of_a_message_is_limited_and_the_limit_changes_at_once(sink: CountingLog) -> None:
    store = MemoryStore()
    namespaces = Namespaces(store)
    publisher = Publisher(
        NAME, sink, TopicLimits(store, PolicySettings(max_message_size=1000)), unchecked(MemoryStore())
    )
    ten_of_500 = batch(*["x" * 500] * 10)
    await (await publisher.begin(ten_of_500, allowed))
    with pytest.raises(MessageTooLarge):
        await publisher.begin(batch("x", "x" * 1001), allowed)
    with pytest.raises(MessageTooLarge):
        await publisher.send(Message(b"x" * 1001), allowed)
    await namespaces.create(NAME.namespace, NamespacePolicy(max_message_size=400))
    with pytest.raises(MessageTooLarge):
        await publisher.begin(ten_of_500, allowed)
    await namespaces.change_policy(NAME.namespace, lambda _: NamespacePolicy(max_message_size=0))
    assert await publisher.send(Message(b"x" * 5000), allowed) == 10


async def test_a_publish_rate_makes_publishers_wait_and_drops_nothing(sink: CountingLog) -> None:
    limits = TopicLimits(MemoryStore(), PolicySettings(max_publish_rate=200))
    publisher = Publisher(NAME, sink, limits, unchecked(MemoryStore()))
    loop = asyncio.get_running_loop()
    start = loop.time()
    await (await publisher.begin(batch(*"x" * 200), allowed))
    await asyncio.gather(*(publisher.send(Message(b"y"), allowed) for _ in range(50)))
    assert loop.time() - start >= 0.2
    assert sink.log.next_offset == 250
    await (await publisher.begin(batch(*"x" * 3000), allowed))
    with pytest.raises(LimitReached):
        await publisher.send(Message(b"z"), allowed)


async def test_whoever_may_not_publish_any_more_is_turned_away_after_a_wait(sink: CountingLog) -> None:
    limits = TopicLimits(MemoryStore(), PolicySettings(max_publish_rate=10))
    publisher = Publisher(NAME, sink, limits, unchecked(MemoryStore()))
    refused: list[bool] = []

    def check() -> None:
        if refused:
            raise TopicClosed("fenced meanwhile")

    await (await publisher.begin(batch(*"x" * 10), check))
    waiting = asyncio.create_task(publisher.begin(batch("x"), check))
    await asyncio.sleep(0)
    refused.append(True)
    with pytest.raises(TopicClosed):
        await waiting
    assert sink.log.next_offset == 10
