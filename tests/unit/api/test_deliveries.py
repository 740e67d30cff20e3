"""What is written by hand around a batch is what Protobuf would have written."""

from __future__ import annotations

import tracemalloc

import pytest

from sava.api.streams import MAX_RESPONSE_BYTES, DeliveryEncoder
from sava.proto import streams_pb2 as pb
from sava.records import RecordBatch
from sava.topics.consumer import Delivery


def batch_of(count: int, *, base_offset: int = 0, topic_id: int = 1) -> RecordBatch:
    batch = RecordBatch.encode([b"x" * 100] * count, publish_time=1, producer="p")
    return batch.assigned(topic_id=topic_id, epoch=1, base_offset=base_offset)


@pytest.mark.parametrize("count", [1, 10, 1000, 20_000])
@pytest.mark.parametrize("attempt", [1, 300])
def test_a_range_of_the_topic_is_encoded_as_by_protobuf(count: int, attempt: int) -> None:
    batch = batch_of(count, base_offset=7)
    encoded = DeliveryEncoder().encode(Delivery(batch, ((7, 7 + count),), attempt))

    response = pb.SubscribeResponse.FromString(encoded)
    assert response == pb.SubscribeResponse(delivered=[pb.Delivered(batch=batch.to_bytes(), attempt=attempt)])
    assert RecordBatch.parse(response.delivered[0].batch).verify().base_offset == 7


def test_chosen_rows_bring_their_offsets() -> None:
    chosen = batch_of(5, base_offset=10).select([0, 1, 4])
    encoded = DeliveryEncoder().encode(Delivery(chosen, ((10, 12), (14, 15)), 2))

    [delivered] = pb.SubscribeResponse.FromString(encoded).delivered
    assert list(delivered.ranges) == [10, 12, 14, 15]
    assert (delivered.batch, delivered.attempt) == (chosen.to_bytes(), 2)


def test_the_same_batch_for_another_subscription_is_not_encoded_again() -> None:
    deliveries = DeliveryEncoder()
    first = deliveries.encode(Delivery(batch_of(10), ((0, 10),)))

    assert deliveries.encode(Delivery(batch_of(10), ((0, 10),))) is first
    assert deliveries.encode(Delivery(batch_of(10), ((0, 10),), 2)) != first, "another attempt"
    assert deliveries.encode(Delivery(batch_of(9), ((0, 9),))) != first, "another part"
    assert deliveries.encode(Delivery(batch_of(10, topic_id=2), ((0, 10),))) != first, "another topic"


def test_what_is_kept_is_bounded() -> None:
    size = len(DeliveryEncoder().encode(Delivery(batch_of(10), ((0, 10),))))
    deliveries = DeliveryEncoder(max_held_bytes=2 * size)
    first = deliveries.encode(Delivery(batch_of(10), ((0, 10),)))
    for base in (10, 20):
        deliveries.encode(Delivery(batch_of(10, base_offset=base), ((base, base + 10),)))

    assert deliveries.encode(Delivery(batch_of(10), ((0, 10),))) is not first


def test_single_small_messages_keep_the_bound_of_memory_too() -> None:
    """A day of single messages: each entry costs more than its bytes, and an hour's soak saw brokers grow by
    30 MB in a cache of 8."""
    bound = 1 << 20
    deliveries = DeliveryEncoder(max_held_bytes=bound)
    tracemalloc.start()
    try:
        for base in range(8000):
            deliveries.encode(Delivery(batch_of(1, base_offset=base), ((base, base + 1),)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.3 * bound


def test_what_is_there_together_travels_together_up_to_a_bound() -> None:
    deliveries = [
        Delivery(batch_of(1000, base_offset=base), ((base, base + 1000),)) for base in range(0, 20_000, 1000)
    ]
    responses = list(DeliveryEncoder().responses(deliveries))

    assert 1 < len(responses) < 5
    assert all(len(response) <= MAX_RESPONSE_BYTES for response in responses)
    found = [
        RecordBatch.parse(delivered.batch).base_offset
        for response in responses
        for delivered in pb.SubscribeResponse.FromString(response).delivered
    ]
    assert found == list(range(0, 20_000, 1000))
