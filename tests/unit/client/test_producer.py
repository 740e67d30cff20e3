"""The producer against a broker in memory: batching, routing, back-pressure, and faults of the stream."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime

import grpc
import pytest

from sava.client import (
    Client,
    Closed,
    OutcomeUnknown,
    Producer,
    ProducerFenced,
    Refused,
    Sent,
    Timeout,
    TopicUnknown,
    Unavailable,
    connection,
    publish_stream,
)
from sava.client.producer import partition_of
from sava.records import Compression, RecordBatch
from tests.support.waiting import PATIENCE_S
from tests.unit.client.server import AWAY, Fault, MemoryBroker, refused

TOPIC = "/default/orders"


async def send_all(producer: Producer, *payloads: bytes) -> list[int]:
    return await asyncio.gather(*(producer.send(payload) for payload in payloads))


# -- batching ---------------------------------------------------------------------


async def test_messages_sent_at_the_same_time_share_a_batch(client: Client, broker: MemoryBroker) -> None:
    async with client.producer(TOPIC) as producer:
        assert await send_all(producer, b"a", b"b", b"c") == [0, 1, 2]
    assert broker.received == [(0, 3)]


async def test_a_message_arrives_with_all_that_it_has(client: Client, broker: MemoryBroker) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    async with client.producer(TOPIC, name="p", compression="zstd") as producer:
        await asyncio.gather(
            producer.send(b"plain"),
            producer.send(b"full", key="k", attributes={"a": "1"}, publish_time=at),
            producer.send(bytearray(b"other")),
        )
    plain, full, other = broker.topic(TOPIC).batches[0]
    assert (plain.key, plain.attributes, plain.producer) == (None, {}, "p")
    assert plain.publish_time > 1_600_000_000_000_000
    assert (full.key, full.attributes, full.publish_time) == ("k", {"a": "1"}, 1_767_225_600_000_000)
    assert other.payload == b"other"


async def test_encoded_batches_go_as_they_are_between_single_messages(
    client: Client, broker: MemoryBroker
) -> None:
    """Each with its producer and the sequence that is next, compressed as it came; nothing else is added."""

    def encoded(*payloads: bytes) -> RecordBatch:
        return RecordBatch.encode(
            payloads, publish_time=5, keys=["k"] * len(payloads), codec=Compression.ZSTD
        )

    async with client.producer(TOPIC, name="p", linger_ms=1000) as producer:
        first = producer.send(b"0")
        second = await producer.send_batch(encoded(b"1", b"2"))
        third = await producer.send_batch(encoded(b"3"))
        last = producer.send(b"4")
        await producer.flush()
        assert [await each for each in (first, second, third, last)] == [0, 1, 3, 4]
    assert broker.received == [(0, 1), (1, 2), (3, 1), (4, 1)]
    stored = broker.topic(TOPIC).batches[1]
    assert (stored.header.producer_id, stored.header.codec) == (7, Compression.ZSTD)
    assert [(m.payload, m.key, m.publish_time, m.producer) for m in stored] == [
        (b"1", "k", 5, None),
        (b"2", "k", 5, None),
    ]


async def test_an_encoded_batch_is_sent_again_after_a_broken_stream(
    client: Client, broker: MemoryBroker
) -> None:
    """And not stored twice: the stream breaks between the batch and its receipt."""
    async with client.producer(TOPIC) as producer:
        broker.receipts.clear()
        sent = await producer.send_batch(RecordBatch.encode([b"a", b"b"], publish_time=1))
        await broker.received_batches(1)
        await broker.break_streams()
        broker.receipts.set()
        assert await sent == 0
    assert broker.topic(TOPIC).payloads() == [b"a", b"b"]


async def test_an_encoded_batch_is_for_one_partition(client: Client, broker: MemoryBroker) -> None:
    broker.partitioned(TOPIC, 2)
    async with client.producer(TOPIC) as producer:
        with pytest.raises(Refused, match="partitioned"):
            await producer.send_batch(RecordBatch.encode([b"a"], publish_time=1))
        assert producer._pending.messages == 0
    with pytest.raises(Closed):
        await producer.send_batch(RecordBatch.encode([b"a"], publish_time=1))
    assert producer._pending.messages == 0


async def test_a_full_batch_does_not_linger(client: Client, broker: MemoryBroker) -> None:
    async with client.producer(
        TOPIC, linger_ms=60_000, max_batch_messages=2, max_batch_bytes=100
    ) as producer:
        assert await send_all(producer, b"a", b"b") == [0, 1]
        large = [b"x" * 60, b"y" * 60]
        first = asyncio.ensure_future(producer.send(large[0]))
        second = asyncio.ensure_future(producer.send(large[1]))
        assert await first == 2
        assert not second.done()
        await producer.flush()
        assert await second == 3
    assert broker.received == [(0, 2), (2, 1), (3, 1)]


async def test_by_default_messages_share_a_batch_only_while_another_is_under_way(
    client: Client, broker: MemoryBroker
) -> None:
    async with client.producer(TOPIC) as producer:
        broker.receipts.clear()
        first = asyncio.ensure_future(producer.send(b"a"))
        await broker.received_batches(1)
        rest = [asyncio.ensure_future(producer.send(payload)) for payload in (b"b", b"c")]
        await asyncio.sleep(0)
        assert broker.received == [(0, 1)]
        broker.receipts.set()
        assert [await first, *[await each for each in rest]] == [0, 1, 2]
    assert broker.received == [(0, 1), (1, 2)]


async def test_send_many_cuts_large_inputs_and_says_where_they_are(
    client: Client, broker: MemoryBroker
) -> None:
    async with client.producer(TOPIC, max_batch_messages=4, max_pending=1000) as producer:
        sent = await producer.send_many([b"%d" % n for n in range(10)], keys=["k"] * 10)
        assert sent == [Sent(TOPIC, 0, 4), Sent(TOPIC, 4, 4), Sent(TOPIC, 8, 2)]
        assert await producer.send_many([]) == []
        assert await producer.send_many([b"x" * (1 << 20), b"y"]) == [Sent(TOPIC, 10, 1), Sent(TOPIC, 11, 1)]
    assert broker.topic(TOPIC).payloads()[:10] == [b"%d" % n for n in range(10)]


async def test_one_wrong_message_fails_alone(client: Client, broker: MemoryBroker) -> None:
    broker.max_message_size = 100
    async with client.producer(TOPIC) as producer:
        good = asyncio.ensure_future(producer.send(b"good"))
        await asyncio.sleep(0)
        wrong = [
            lambda: producer.send("text"),
            lambda: producer.send(b"x" * 101),
            lambda: producer.send(b"x", key=b"bytes"),  # type: ignore[arg-type]  # a caller's mistake
            lambda: producer.send(b"x", key="\udc00"),
            lambda: producer.send(b"x", attributes={"a": 1}),  # type: ignore[dict-item]  # a caller's mistake
            lambda: producer.send_many([b"x"], keys=["a", "b"]),
            lambda: producer.send_many([b"x", "y"]),
            lambda: producer.send_many([b"x"], keys=[1]),  # type: ignore[list-item]  # a caller's mistake
        ]
        for attempt in wrong:
            with pytest.raises(Refused):
                await attempt()
        assert await good == 0
        assert producer._pending.messages == 0


async def test_options_that_cannot_be_are_refused(client: Client) -> None:
    for wrong in (
        {"compression": "gzip"},
        {"max_batch_messages": 0},
        {"max_pending": 0},
        {"linger_ms": -1},
        {"timeout": 0},
    ):
        with pytest.raises(Refused):
            client.producer(TOPIC, **wrong)


# -- partitions -------------------------------------------------------------------


async def test_keys_have_their_partition_and_keyless_messages_take_turns(
    client: Client, broker: MemoryBroker
) -> None:
    parts = broker.partitioned(TOPIC, 3)
    async with client.producer(TOPIC, max_batch_messages=10) as producer:
        keys = [f"k{n}" for n in range(30)]
        await asyncio.gather(*(producer.send(key.encode(), key=key) for key in keys[:15]))
        await producer.send_many([key.encode() for key in keys[15:]], keys=keys[15:])
        for index, part in enumerate(parts):
            assert set(part.payloads()) == {k.encode() for k in keys if partition_of(k, 3) == index}
        before = [part.next_offset for part in parts]
        await asyncio.gather(*(producer.send(b"x") for _ in range(30)))
        assert [part.next_offset - b for part, b in zip(parts, before, strict=True)] == [10, 10, 10]


async def test_an_unserved_partition_does_not_hold_messages_for_others(
    client: Client, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker of one partition dies. Its open batch is never sent, so it stays open, and the messages
    without a key would all go into it, a thousand before the next partition gets one."""
    monkeypatch.setattr(publish_stream, "STUCK_S", 0.05)
    parts = broker.partitioned(TOPIC, 3)
    async with client.producer(TOPIC, timeout=20) as producer:
        broker.away.add(parts[1].name)
        await broker.break_streams()
        sends: list[asyncio.Future[int]] = []
        async with asyncio.timeout(10):
            while min(parts[0].next_offset, parts[2].next_offset) < 50:
                sends += [producer.send(b"x") for _ in range(5)]
                await asyncio.sleep(0.01)
        assert sum(not send.done() for send in sends) < 100
        broker.away.clear()
        async with asyncio.timeout(15):
            await asyncio.gather(*sends)
            while not parts[1].next_offset:
                await producer.send(b"x")


async def test_a_producer_can_ask_for_partitions(client: Client, broker: MemoryBroker) -> None:
    async with client.producer(TOPIC, partitions=2) as producer:
        await producer.send_many([b"x"] * 10)
    assert broker.partitions[TOPIC] == 2
    async with client.producer(TOPIC, partitions=4):
        assert broker.partitions[TOPIC] == 4


async def test_partitions_that_come_later_are_used(
    client: Client, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LOOK_UP_EVERY_S", 0.01)
    broker.partitioned(TOPIC, 1)
    async with client.producer(TOPIC, linger_ms=0) as producer:
        await producer.send(b"a")
        _, later = broker.partitioned(TOPIC, 2)
        async with asyncio.timeout(PATIENCE_S):
            while not later.next_offset:
                await producer.send(b"b")


# -- back-pressure ----------------------------------------------------------------


async def test_sending_waits_when_too_much_is_pending(client: Client, broker: MemoryBroker) -> None:
    async with client.producer(TOPIC, max_pending=4, max_batch_messages=2, timeout=PATIENCE_S) as producer:
        broker.receipts.clear()
        sends = [asyncio.ensure_future(producer.send(b"%d" % n)) for n in range(9)]
        many = asyncio.ensure_future(producer.send_many([b"m"] * 5))
        await broker.received_batches(2)
        assert producer._pending.messages == 4
        broker.receipts.set()
        assert sorted([await each for each in sends]) == list(range(9))
        assert sum(sent.count for sent in await many) == 5
    assert broker.topic(TOPIC).payloads()[:9] == [b"%d" % n for n in range(9)]


async def test_waiting_for_room_has_a_deadline_and_can_be_cancelled(
    client: Client, broker: MemoryBroker
) -> None:
    async with client.producer(TOPIC, max_pending=1, timeout=0.2) as producer:
        broker.receipts.clear()
        first = asyncio.ensure_future(producer.send(b"a"))
        await broker.received_batches(1)
        waiting = asyncio.ensure_future(producer.send(b"b"))
        await asyncio.sleep(0)
        waiting.cancel()
        late = asyncio.ensure_future(producer.send(b"c"))
        with pytest.raises((Timeout, Unavailable, OutcomeUnknown)):
            await late
        with pytest.raises(OutcomeUnknown):
            await first
        broker.receipts.set()


async def test_a_cancelled_send_does_not_disturb_the_others(client: Client, broker: MemoryBroker) -> None:
    async with client.producer(TOPIC) as producer:
        sends = [asyncio.ensure_future(producer.send(b"%d" % n)) for n in range(3)]
        await asyncio.sleep(0)
        sends[1].cancel()
        assert [await sends[0], await sends[2]] == [0, 2]
    assert broker.topic(TOPIC).payloads() == [b"0", b"1", b"2"]


# -- faults -----------------------------------------------------------------------


async def test_a_broken_stream_loses_and_doubles_nothing(client: Client, broker: MemoryBroker) -> None:
    async with client.producer(TOPIC, max_batch_messages=3) as producer:
        broker.receipts.clear()
        sends = [asyncio.ensure_future(producer.send(b"%d" % n)) for n in range(30)]
        await broker.received_batches(1)
        await broker.break_streams()
        broker.receipts.set()
        assert [await each for each in sends] == list(range(30))
    assert broker.topic(TOPIC).payloads() == [b"%d" % n for n in range(30)]
    assert broker.received.count((0, 3)) == 2
    assert {opening.producer_name for opening in broker.openings} == {producer.name}


async def test_a_broker_that_restarts_under_load_keeps_order(client: Client, broker: MemoryBroker) -> None:
    async with client.producer(TOPIC, max_batch_messages=5, linger_ms=0) as producer:
        for life in range(3):
            first = life * 100
            sends = [asyncio.ensure_future(producer.send(b"%d" % (first + n))) for n in range(100)]
            await broker.received_batches(len(broker.received) + 2)
            await broker.restart()
            assert [await each for each in sends] == list(range(first, first + 100))
    assert broker.topic(TOPIC).payloads() == [b"%d" % n for n in range(300)]


async def test_a_refused_batch_fails_its_messages_only(client: Client, broker: MemoryBroker) -> None:
    broker.refuse_payload[b"4"] = refused("schema_refused")
    async with client.producer(TOPIC, max_batch_messages=2) as producer:
        sends = [asyncio.ensure_future(producer.send(b"%d" % n)) for n in range(10)]
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(result) for result in results[4:6]] == [Refused, Refused]
        assert results[:4] + results[6:] == list(range(8))
    assert broker.topic(TOPIC).payloads() == [b"%d" % n for n in (0, 1, 2, 3, 6, 7, 8, 9)]


async def test_a_broker_that_forgot_the_producer_makes_the_outcome_unknown(
    client: Client, broker: MemoryBroker
) -> None:
    async with client.producer(TOPIC, linger_ms=0) as producer:
        await producer.send(b"a")
        broker.receipts.clear()
        in_flight = asyncio.ensure_future(producer.send(b"b"))
        await broker.received_batches(2)
        waiting = asyncio.ensure_future(producer.send(b"c"))
        broker.topic(TOPIC).producers.clear()
        await broker.break_streams()
        broker.receipts.set()
        with pytest.raises(OutcomeUnknown):
            await in_flight
        assert await waiting == 2
        assert await producer.send(b"d") == 3


async def test_a_producer_that_comes_back_under_its_name_goes_on_counting(
    client: Client, broker: MemoryBroker
) -> None:
    for _ in range(2):
        async with client.producer(TOPIC, name="p") as producer:
            await producer.send_many([b"x"] * 3)
    assert broker.received == [(0, 3), (3, 3)]


async def test_a_fenced_producer_ends(client: Client, broker: MemoryBroker) -> None:
    broker.refuse_payload[b"late"] = refused("producer_fenced")
    async with client.producer(TOPIC) as producer:
        for payload in (b"late", b"more"):
            with pytest.raises(ProducerFenced):
                await producer.send(payload)
        with pytest.raises(ProducerFenced):
            await producer.send_many([b"more"])
        await producer.flush()


async def test_each_stream_of_a_producer_presents_the_number_of_its_open(
    client: Client, broker: MemoryBroker
) -> None:
    async with client.producer(TOPIC, name="p") as producer:
        await producer.send(b"a")
        await broker.break_streams()
        await producer.send(b"b")
    async with client.producer(TOPIC, name="p"):
        pass
    openings = [(each.producer_epoch, each.is_name_generated) for each in broker.openings]
    assert openings == [(0, False), (1, False), (0, False)]


async def test_a_producer_whose_name_was_opened_again_ends_when_it_comes_back(
    client: Client, broker: MemoryBroker
) -> None:
    """A's stream breaks; B opens the name before A is back."""
    async with client.producer(TOPIC, name="p") as producer:
        await producer.send(b"a")
        broker.epochs[TOPIC, "p"] = 2
        await broker.break_streams()
        with suppress(OutcomeUnknown, ProducerFenced):
            await producer.send(b"late")
        with pytest.raises(ProducerFenced):
            await producer.send(b"later")
    assert broker.topic(TOPIC).payloads() == [b"a"]


async def test_a_generated_name_needs_no_number(client: Client, broker: MemoryBroker) -> None:
    async with client.producer(TOPIC) as producer:
        await producer.send(b"a")
        await broker.break_streams()
        await producer.send(b"b")
    assert [(each.producer_epoch, each.is_name_generated) for each in broker.openings] == [(0, True)] * 2


async def test_partitions_take_over_the_number_that_the_first_one_gives(
    client: Client, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two producers that open a name at the same time, the same one is the later one everywhere; also on
    partitions that come later, where a producer that was fenced must not be the first."""
    monkeypatch.setattr(connection, "LOOK_UP_EVERY_S", 0.01)
    broker.partitioned(TOPIC, 3)
    broker.epochs[f"{TOPIC}-part-0", "p"] = 40
    async with client.producer(TOPIC, name="p", linger_ms=0) as producer:
        assert [each.producer_epoch for each in broker.openings] == [0, 41, 41]
        *_, later = broker.partitioned(TOPIC, 4)
        async with asyncio.timeout(PATIENCE_S):
            while not later.next_offset:
                await producer.send(b"b")
    assert broker.openings[-1].producer_epoch == 41


async def test_an_opening_that_is_refused_is_told(client: Client, broker: MemoryBroker) -> None:
    broker.refuse_opening = refused("producer_busy")
    with pytest.raises(Refused) as caught:
        await client.producer(TOPIC, exclusive=True).open()
    assert caught.value.code == "producer_busy"


async def test_a_topic_that_is_deleted_ends_the_producer(client: Client, broker: MemoryBroker) -> None:
    async with client.producer(TOPIC) as producer:
        await producer.send(b"a")
        broker.refuse_opening = refused("topic_unknown")
        await broker.break_streams()
        with suppress(OutcomeUnknown, TopicUnknown):
            await producer.send(b"b")
        with pytest.raises(TopicUnknown):
            await producer.send(b"c")


async def test_messages_that_cannot_be_sent_in_time_fail_as_unavailable(
    client: Client, broker: MemoryBroker
) -> None:
    async with client.producer(TOPIC, timeout=2) as producer:
        await producer.send(b"a")
        broker.refuse_opening = AWAY
        await broker.break_streams()
        await asyncio.sleep(0.05)
        with pytest.raises(Unavailable):
            await producer.send(b"b")
        broker.refuse_opening = None
        offset = None
        async with asyncio.timeout(PATIENCE_S):
            while offset is None:
                with suppress(Unavailable):
                    offset = await producer.send(b"c")
        assert offset == 1


async def test_a_silent_broker_leaves_the_outcome_unknown_and_a_new_stream(
    client: Client, broker: MemoryBroker
) -> None:
    async with client.producer(TOPIC, timeout=2) as producer:
        broker.receipts.clear()
        with pytest.raises(OutcomeUnknown):
            await producer.send(b"a")
        broker.receipts.set()
        assert await producer.send(b"b") == 1
    assert broker.topic(TOPIC).payloads() == [b"a", b"b"]


async def test_an_offset_that_is_not_remembered_is_unknown_and_no_error(
    client: Client, broker: MemoryBroker
) -> None:
    async with client.producer(TOPIC, linger_ms=0) as producer:
        broker.receipts.clear()
        send = asyncio.ensure_future(producer.send(b"once"))
        await broker.received_batches(1)
        broker.refuse_payload[b"once"] = Fault(grpc.StatusCode.FAILED_PRECONDITION, "duplicate_forgotten")
        await broker.break_streams()
        broker.receipts.set()
        assert await send == -1
        assert await producer.send(b"next") == 1
    assert broker.topic(TOPIC).payloads() == [b"once", b"next"]


async def test_messages_that_are_on_fewer_disks_are_counted_and_told_once(
    client: Client, broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    async with client.producer(TOPIC) as producer:
        await send_all(producer, b"a", b"b")
        assert producer.degraded == 0
        broker.is_degraded = True
        await send_all(producer, b"c", b"d", b"e")
        await producer.send(b"f")
        assert producer.degraded == 4
        broker.is_degraded = False
        await producer.send(b"g")
        assert producer.degraded == 4
    assert len([each for each in caplog.records if "fewer disks" in each.message]) == 1


# -- the end ----------------------------------------------------------------------


async def test_closing_sends_what_lingers(client: Client, broker: MemoryBroker) -> None:
    producer = client.producer(TOPIC, linger_ms=60_000)
    await producer.open()
    send = asyncio.ensure_future(producer.send(b"a"))
    await asyncio.sleep(0)
    await producer.close()
    assert await send == 0
    with pytest.raises(Closed):
        await producer.send(b"b")
    with pytest.raises(Closed):
        await client.producer(TOPIC).send(b"never opened")


async def test_closing_does_not_wait_for_ever(client: Client, broker: MemoryBroker) -> None:
    producer = client.producer(TOPIC)
    await producer.open()
    broker.receipts.clear()
    send = asyncio.ensure_future(producer.send(b"a"))
    await broker.received_batches(1)
    await producer.close(timeout=0.05)
    with pytest.raises(OutcomeUnknown):
        await send
    broker.receipts.set()


async def test_closing_the_client_closes_its_producers_and_leaves_no_task(broker: MemoryBroker) -> None:
    client = Client(broker.address)
    producer = client.producer(TOPIC)
    await producer.open()
    await producer.send(b"a")
    await client.close()
    assert producer.is_closed
    with pytest.raises(Closed):
        await producer.send(b"b")
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("sava ")]
