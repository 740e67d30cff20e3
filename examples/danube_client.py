"""Danube's published client against a Sava broker: ``python examples/danube_client.py http://127.0.0.1:6650``.

Nothing here is Sava's: this is how a Danube application looks.
"""

from __future__ import annotations

import asyncio
import sys

from danube import DanubeClientBuilder, DispatchStrategy, SubType

TOPIC = "/default/from-danube"
COUNT = 100


async def main(url: str) -> None:
    client = await DanubeClientBuilder().service_url(url).build()
    producer = (
        client.new_producer()
        .with_topic(TOPIC)
        .with_name("danube-producer")
        .with_dispatch_strategy(DispatchStrategy.RELIABLE)
        .build()
    )
    await producer.create()
    consumer = (
        client.new_consumer()
        .with_topic(TOPIC)
        .with_consumer_name("danube-consumer")
        .with_subscription("demo")
        .with_subscription_type(SubType.EXCLUSIVE)
        .build()
    )
    await consumer.subscribe()
    queue = await consumer.receive()
    for number in range(COUNT):
        await producer.send(f"message {number}".encode())
    for number in range(COUNT):
        message = await asyncio.wait_for(queue.get(), 10)
        if message.payload != f"message {number}".encode():
            sys.exit(f"expected message {number}, got {message.payload!r}")
        await consumer.ack(message)
    await consumer.close()
    await producer.close()
    print(f"{COUNT} messages sent, received in order and acknowledged, one call each")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
