"""The window of a stream follows its client: fast ones far ahead, slow ones close, silent ones never
stuck."""

from __future__ import annotations

import asyncio

import pytest

from sava.api.danube.consumers import (
    LEAST,
    MOST,
    START,
    CreditWindow,
)
from sava.topics.specs import FailurePolicy, SubscriptionSpec, SubscriptionType
from tests.support.waiting import PATIENCE_S


class Client:
    """Counts what it may get."""

    def __init__(self, *, ack_timeout_ms: int = 30_000, max_unacked: int = 65_536) -> None:
        self.spec = SubscriptionSpec(
            type=SubscriptionType.EXCLUSIVE,
            failure_policy=FailurePolicy(ack_timeout_ms=ack_timeout_ms),
            max_unacked_messages=max_unacked,
        )
        self.granted = START
        self.received = 0
        self.acked = 0
        self._changed = asyncio.Event()
        self.window = CreditWindow(self._grant, lambda: self.spec)

    def _grant(self, count: int) -> None:
        assert count > 0
        self.granted += count
        self._changed.set()

    def receive(self) -> int:
        """All that it may; returns how many."""
        count = self.granted - self.received
        for offset in range(self.received, self.granted):
            self.window.written(offset)
        self.received = self.granted
        return count

    def ack(self, count: int) -> None:
        for offset in range(self.acked, self.acked + count):
            self.window.answered(offset)
        self.acked += count

    @property
    def ahead(self) -> int:
        return self.granted - self.acked

    async def more(self) -> None:
        self._changed.clear()
        async with asyncio.timeout(PATIENCE_S):
            await self._changed.wait()


async def test_prompt_acks_open_it() -> None:
    client = Client()
    sizes = []
    for _ in range(6):
        client.ack(client.receive())
        sizes.append(client.window.size)
    client.window.close()
    assert sizes == [128, 256, 512, 1000, 1000, 1000]
    assert client.ahead == MOST


async def test_what_is_not_acked_is_not_exceeded() -> None:
    client = Client()
    assert client.receive() == START
    assert client.receive() == 0
    client.ack(1)
    assert client.ahead == client.window.size == START + 1
    client.window.close()


async def test_late_acks_close_it() -> None:
    client = Client(ack_timeout_ms=300)
    client.receive()
    client.ack(1)
    before = client.window.size
    await asyncio.sleep(0.35)
    assert client.window.size == before // 2
    client.window.close()


async def test_it_never_closes_altogether() -> None:
    client = Client(ack_timeout_ms=60)
    client.receive()
    client.ack(1)
    for _ in range(8):
        await client.more()
        assert client.receive() > 0
    assert client.window.size == LEAST
    client.window.close()


async def test_a_client_that_never_acks_goes_on() -> None:
    client = Client(ack_timeout_ms=300)
    client.receive()
    while client.received < 3 * START:
        await client.more()
        client.receive()
    assert client.window.size == START
    client.window.close()


@pytest.mark.parametrize("times", [1, 5])
async def test_a_message_that_comes_again_counts_once(times: int) -> None:
    client = Client()
    client.receive()
    for _ in range(times):
        client.window.written(0)  # took a credit each time, which comes back
    assert client.granted == START + times
    client.ack(1)
    assert client.ahead == client.window.size + times
    client.window.close()


async def test_a_limit_that_somebody_has_set_counts_alone() -> None:
    """The subscription itself keeps it."""
    client = Client(max_unacked=500)
    assert client.granted == MOST
    client.window.close()


async def test_acks_of_other_streams_mean_nothing() -> None:
    client = Client()
    client.receive()
    client.window.answered(10_000)
    assert client.granted == START
    client.window.close()
