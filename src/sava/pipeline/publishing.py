"""Publishing: encoded batches on their way into one partition, some of them at a time."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from typing import Final

from sava.client.connection import Connection
from sava.client.producer import Producer, ProducerOptions
from sava.records import MAX_BATCH_BYTES, MAX_COUNT, RecordBatch

UNDER_WAY: Final = 24
"""Batches without a receipt: a broker's window is full, and some are there when it has room again."""


class Publishing:
    """A producer of its own, under a new name: whoever repeats the work begins anew. Owned by one event
    loop."""

    def __init__(self, connection: Connection, name: str) -> None:
        options = ProducerOptions(
            name=f"spark-{secrets.token_hex(8)}",
            is_name_generated=True,
            reliable=None,
            partitions=None,
            exclusive=False,
            linger_ms=0,
            max_batch_messages=MAX_COUNT,
            max_batch_bytes=MAX_BATCH_BYTES,
            max_pending=UNDER_WAY * MAX_COUNT,
            compression=None,
            schema=None,
            codec=None,
            timeout=connection.timeout,
        )
        self._producer = Producer(connection, name, options)
        self._is_open = False
        self._under_way: deque[asyncio.Future[int]] = deque()

    async def put(self, batch: RecordBatch) -> None:
        """Returns when there is room for the next. Raises what became of an earlier one, if that is an
        error."""
        if not self._is_open:
            await self._producer.open()
            self._is_open = True
        while self._under_way and (len(self._under_way) >= UNDER_WAY or self._under_way[0].done()):
            await self._under_way.popleft()
        self._under_way.append(await self._producer.send_batch(batch))

    async def settle(self) -> None:
        """Until everything is durable."""
        while self._under_way:
            await self._under_way.popleft()

    async def close(self) -> None:
        for future in self._under_way:
            future.cancel()  # the batches go their way or not, and nobody asks what became of them
        self._under_way.clear()
        if self._is_open:
            await self._producer.close(timeout=0)
