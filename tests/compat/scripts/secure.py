"""A client with a certificate and a token, which it sends with every request."""

from __future__ import annotations

from typing import Any

from common import main, producer, receiver
from danube import DanubeClient, DanubeClientBuilder


async def hello(client: DanubeClient, topic: str, ca: str, cert: str, key: str) -> Any:
    tokens: list[str] = []

    def supply() -> str:
        tokens.append(f"token-{len(tokens)}")
        return tokens[-1]

    builder = DanubeClientBuilder().service_url(client.uri).with_mtls(ca, cert, key)
    secure = await builder.with_token_supplier(supply).build()
    sender = await producer(secure, topic)
    taker = await receiver(secure, topic)
    await sender.send(b"hello")
    message = await taker.next()
    await taker.close()
    return {
        "payload": message.payload.decode(),
        "broker": message.msg_id.broker_addr,
        "several_tokens": len(tokens) > 3,
    }


if __name__ == "__main__":
    main(hello)
