"""A client with a token, over the server's TLS, which shows no certificate unless it is given one."""

from __future__ import annotations

from typing import Any

from common import main, producer, receiver
from danube import DanubeClient, DanubeClientBuilder
from grpc import aio


async def hello(client: DanubeClient, topic: str, ca: str, tokens: list[str]) -> Any:
    """It sends a message and receives it; with each request it shows the next of the tokens."""
    shown = 0

    def supply() -> str:
        nonlocal shown
        shown += 1
        return tokens[shown % len(tokens)]

    builder = DanubeClientBuilder().service_url(client.uri).with_tls(ca)
    secure = await builder.with_token_supplier(supply).build()
    sender = await producer(secure, topic)
    taker = await receiver(secure, topic)
    await sender.send(b"hello")
    message = await taker.next()
    await taker.close()
    return {
        "payload": message.payload.decode(),
        "broker": message.msg_id.broker_addr,
        "several_tokens": shown > 3,
    }


async def refused(client: DanubeClient, topic: str, ca: str, token: str) -> Any:
    """How a producer is refused, and then how a consumer is."""
    builder = DanubeClientBuilder().service_url(client.uri).with_tls(ca)
    secure = await (builder.with_token(token) if token else builder).build()
    found = []
    for make in (producer, receiver):
        try:
            await make(secure, topic)
            found.append("OK")
        except aio.AioRpcError as error:
            found.append(error.code().name)
    return found


if __name__ == "__main__":
    main(hello, refused)
