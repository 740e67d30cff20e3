"""Danube's published client against a Sava broker:

    python examples/danube_client.py http://127.0.0.1:6650 /default/from-danube

Nothing here is Sava's: this is how a Danube application looks. Prints what it has sent, and how long it took.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from danube import DanubeClientBuilder, DispatchStrategy, SubType

COUNT = 100


async def main(url: str, topic: str) -> None:
    client = await DanubeClientBuilder().service_url(url).build()
    producer = (
        client.new_producer()
        .with_topic(topic)
        .with_name("danube-producer")
        .with_dispatch_strategy(DispatchStrategy.RELIABLE)
        .build()
    )
    await producer.create()
    consumer = (
        client.new_consumer()
        .with_topic(topic)
        .with_consumer_name("danube-consumer")
        .with_subscription("demo")
        .with_subscription_type(SubType.EXCLUSIVE)
        .build()
    )
    await consumer.subscribe()
    queue = await consumer.receive()
    began = time.monotonic()
    sent = [f"message {number}" for number in range(COUNT)]
    for text in sent:
        await producer.send(text.encode())
    for text in sent:
        message = await asyncio.wait_for(queue.get(), 10)
        if message.payload != text.encode():
            sys.exit(f"expected {text}, got {message.payload!r}")
        await consumer.ack(message)
    seconds = time.monotonic() - began
    await consumer.close()
    await producer.close()
    print(json.dumps({"sent": sent, "seconds": seconds}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
