"""The examples of danube-client's own documentation, with what they print returned instead."""

from __future__ import annotations

import json
from typing import Any

from common import main
from danube import DanubeClient, DispatchStrategy, SchemaType, SubType


async def simple(client: DanubeClient, topic: str) -> Any:
    """Create producer, create consumer, send, receive, ack."""
    producer = client.new_producer().with_topic(topic).with_name("test_producer").build()
    await producer.create()
    consumer = (
        client.new_consumer()
        .with_topic(topic)
        .with_consumer_name("test_consumer")
        .with_subscription("test_subscription")
        .with_subscription_type(SubType.EXCLUSIVE)
        .build()
    )
    await consumer.subscribe()
    queue = await consumer.receive()
    message_id = await producer.send(b"Hello Danube")
    message = await queue.get()
    await consumer.ack(message)
    await producer.close()
    await consumer.close()
    return {
        "message_id": message_id,
        "payload": message.payload.decode(),
        "topic": message.msg_id.topic_name,
        "producer": message.producer_name,
    }


async def reliable(client: DanubeClient, topic: str) -> Any:
    producer = (
        client.new_producer()
        .with_topic(topic)
        .with_name("reliable_producer")
        .with_dispatch_strategy(DispatchStrategy.RELIABLE)
        .build()
    )
    await producer.create()
    consumer = (
        client.new_consumer()
        .with_topic(topic)
        .with_consumer_name("reliable_consumer")
        .with_subscription("reliable_subscription")
        .with_subscription_type(SubType.EXCLUSIVE)
        .build()
    )
    await consumer.subscribe()
    for number in range(20):
        await producer.send(f"message {number}".encode(), {"number": str(number)})
    queue = await consumer.receive()
    received = []
    for _ in range(20):
        message = await queue.get()
        received.append((message.payload.decode(), message.attributes["number"], message.msg_id.topic_offset))
        await consumer.ack(message)
    await consumer.close()
    return received


async def partitions(client: DanubeClient, topic: str) -> Any:
    producer = client.new_producer().with_topic(topic).with_name("p").with_partitions(3).build()
    await producer.create()
    consumer = (
        client.new_consumer()
        .with_topic(topic)
        .with_consumer_name("c")
        .with_subscription("s")
        .with_subscription_type(SubType.EXCLUSIVE)
        .build()
    )
    await consumer.subscribe()
    queue = await consumer.receive()
    for number in range(9):
        await producer.send(f"{number}".encode())
    received = []
    for _ in range(9):
        message = await queue.get()
        received.append((message.payload.decode(), message.msg_id.topic_name))
        await consumer.ack(message)
    await consumer.close()
    return received


async def key_shared(client: DanubeClient, topic: str) -> Any:
    """Routing keys, and a consumer that takes two of them."""
    producer = (
        client.new_producer()
        .with_topic(topic)
        .with_name("orders")
        .with_dispatch_strategy(DispatchStrategy.RELIABLE)
        .build()
    )
    await producer.create()
    consumer = (
        client.new_consumer()
        .with_topic(topic)
        .with_consumer_name("payments-worker")
        .with_subscription("orders-sub")
        .with_subscription_type(SubType.KEY_SHARED)
        .with_key_filter("payment")
        .with_key_filter("invoice")
        .build()
    )
    await consumer.subscribe()
    for number, key in enumerate(["payment", "shipping", "invoice", "payment", "order-123"]):
        await producer.send_with_key(f"{number}".encode(), None, key)
    queue = await consumer.receive()
    received = []
    for _ in range(3):
        message = await queue.get()
        received.append((message.payload.decode(), message.routing_key))
        await consumer.ack(message)
    await consumer.close()
    return received


async def schema(client: DanubeClient, topic: str) -> Any:
    schemas = client.schema()
    definition = json.dumps(
        {"type": "object", "properties": {"field1": {"type": "string"}, "field2": {"type": "integer"}}}
    )
    schema_id = await (
        schemas.register_schema("my-app-events")
        .with_type(SchemaType.JSON_SCHEMA)
        .with_schema_data(definition.encode())
        .execute()
    )
    producer = (
        client.new_producer()
        .with_topic(topic)
        .with_name("schema_producer")
        .with_schema_subject("my-app-events")
        .build()
    )
    await producer.create()
    consumer = (
        client.new_consumer()
        .with_topic(topic)
        .with_consumer_name("c")
        .with_subscription("s")
        .with_subscription_type(SubType.EXCLUSIVE)
        .build()
    )
    await consumer.subscribe()
    queue = await consumer.receive()
    await producer.send(json.dumps({"field1": "value", "field2": 1}).encode())
    message = await queue.get()
    await consumer.ack(message)
    await consumer.close()
    found = await schemas.get_schema_by_id(message.schema_id)
    return {
        "registered": schema_id,
        "received": message.schema_id,
        "version": message.schema_version,
        "definition_is_raw": found.schema_definition_as_string() == definition,
    }


if __name__ == "__main__":
    main(simple, reliable, partitions, key_shared, schema)
