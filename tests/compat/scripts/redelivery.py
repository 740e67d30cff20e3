"""What happens to messages that are not acked."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from common import main, producer, receiver
from danube import DanubeClient, SubType


async def nack(client: DanubeClient, topic: str, kind: int) -> Any:
    """A message that is refused comes again, not before the delay, with everything it had."""
    sender = await producer(client, topic)
    taker = await receiver(client, topic, kind=SubType(kind))
    await sender.send_with_key(b"again", {"a": "1"}, "key")
    first = await taker.next(ack=False)
    nacked_at = time.monotonic()
    await taker.consumer.nack(first, delay_ms=1200, reason="busy")
    second = await taker.next()
    waited = time.monotonic() - nacked_at
    return {"same": first == second, "waited": waited, "silent": await taker.is_silent(0.3)}


async def ack_timeout(client: DanubeClient, topic: str) -> Any:
    """The test has set the subscription's ack timeout to 500 ms."""
    sender = await producer(client, topic)
    taker = await receiver(client, topic)
    await sender.send(b"again")
    first = await taker.next(ack=False)
    second = await taker.next()
    return {"same": first == second, "silent": await taker.is_silent(0.8)}


async def reconnect(client: DanubeClient, topic: str) -> Any:
    """What a consumer left unacked comes to it again when it returns, in order; what was acked does not."""
    sender = await producer(client, topic)
    taker = await receiver(client, topic)
    for number in range(10):
        await sender.send(str(number).encode())
    for number in range(10):
        await taker.next(ack=number < 4)
    await taker.close()
    again = await receiver(client, topic)
    return await again.texts(6)


async def shared_takes_over(client: DanubeClient, topic: str) -> Any:
    """What one shared consumer left unacked goes to the other at once."""
    sender = await producer(client, topic)
    leaver = await receiver(client, topic, "leaver", kind=SubType.SHARED)
    for number in range(5):
        await sender.send(str(number).encode())
    for _ in range(5):
        await leaver.next(ack=False)
    stayer = await receiver(client, topic, "stayer", kind=SubType.SHARED)
    await asyncio.sleep(0.2)
    left_at = time.monotonic()
    await leaver.close()
    texts = await stayer.texts(5)
    return {"texts": sorted(texts), "seconds": time.monotonic() - left_at}


async def poison(client: DanubeClient, topic: str) -> Any:
    """Nack one message until it is given up. The test has set one redelivery without delay."""
    sender = await producer(client, topic)
    taker = await receiver(client, topic)
    await sender.send_with_key(b"poison", {"a": "1"}, "key")
    await sender.send(b"good")
    received = []
    for _ in range(3):
        message = await taker.next(ack=False)
        received.append(message.payload.decode())
        if message.payload == b"good":
            await taker.consumer.ack(message)
        else:
            await taker.consumer.nack(message, reason="poison")
    return {"received": received, "silent": await taker.is_silent(0.3)}


async def dead_letters(client: DanubeClient, topic: str, dead: str) -> Any:
    """A second consumer finds them in their topic, with where they came from."""
    sender = await producer(client, topic)
    await producer(client, dead)
    graves = await receiver(client, dead, "graves", "graves")
    taker = await receiver(client, topic)
    await sender.send_with_key(b"poison", {"a": "1"}, "key")
    for _ in range(2):
        await taker.consumer.nack(await taker.next(ack=False), reason="poison")
    message = await graves.next()
    return {
        "payload": message.payload.decode(),
        "key": message.routing_key,
        "attributes": dict(message.attributes),
    }


if __name__ == "__main__":
    main(nack, ack_timeout, reconnect, shared_takes_over, poison, dead_letters)
