"""The Raft port also takes connections about journals: of this cluster, and when there is a disk to ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sava.ledger.protocol import (
    Fence,
    FenceAnswer,
    LedgerId,
    Message,
    StorageId,
)
from sava.ledger.store import Reply
from sava.ledger.wire import LedgerAnswer, LedgerConnection, LedgerRequest, LedgerSession
from sava.peers.raft_listener import RaftListener
from tests.support.network import free_ports
from tests.support.peers import dialer
from tests.support.waiting import PATIENCE_S
from tests.unit.peers.test_raft_port import (
    ONE,
    TWO,
    ClosedHandle,
    FakeInbound,
    StallsAtFirst,
    late,
    listening,
)

__all__ = ["late"]
"""A fixture."""

JOURNAL, HERE = LedgerId(1, 2), StorageId("here")


class Disk:
    """``server.Holder``."""

    def __init__(self) -> None:
        self.forgotten = asyncio.Event()

    def receive(self, origin: StorageId, message: Message, reply: Reply) -> None:
        assert isinstance(message, Fence)
        reply(FenceAnswer(message.ledger, message.storage, message.epoch, None))

    def forget_owner(self, reply: Reply) -> None:
        self.forgotten.set()


class Claimed:
    """Records that show each claim."""

    async def is_claimed(self, ledger: LedgerId, epoch: int, origin: StorageId) -> bool:
        return True


@pytest.fixture
async def listener() -> AsyncIterator[RaftListener]:
    (port,) = free_ports(1)
    listener = listening(FakeInbound(TWO, f"127.0.0.1:{port}"))
    await listener.start()
    yield listener
    await listener.stop()


async def connected(
    listener: RaftListener, cluster: str, answers: asyncio.Queue[LedgerAnswer]
) -> LedgerConnection:
    connection = LedgerConnection(answers.put_nowait)
    await connection.open(dialer(ONE, cluster), listener._address, TWO)
    return connection


async def test_requests_and_answers_go_over_the_raft_port(listener: RaftListener) -> None:
    disk, answers = Disk(), asyncio.Queue[LedgerAnswer]()
    listener.ledgers = lambda write, broker: LedgerSession(disk, write, broker, Claimed())
    link = await connected(listener, "c", answers)
    for epoch in range(1, 50):
        link.send(LedgerRequest(epoch, HERE, Fence(JOURNAL, HERE, epoch)))
    for epoch in range(1, 50):
        answer = await asyncio.wait_for(answers.get(), PATIENCE_S)
        assert answer == LedgerAnswer(epoch, FenceAnswer(JOURNAL, HERE, epoch, None))
    link.connection.abort()
    await asyncio.wait_for(disk.forgotten.wait(), PATIENCE_S)


@pytest.mark.parametrize("cluster", ["other", ""])
async def test_another_cluster_is_refused(listener: RaftListener, cluster: str) -> None:
    listener.ledgers = lambda write, broker: LedgerSession(Disk(), write, broker, Claimed())
    with pytest.raises(ConnectionError, match="belongs to cluster c"):
        await connected(listener, cluster, asyncio.Queue())


async def test_a_broker_whose_disk_is_not_open_says_so(listener: RaftListener) -> None:
    with pytest.raises(ConnectionError, match="not open yet"):
        await connected(listener, "c", asyncio.Queue())


async def test_a_request_to_a_closed_handle_ends_its_connection_and_nothing_else() -> None:
    """The journal's owner sends to a mirror from the middle of an append. uvloop had closed the handle
    without a word: the error went to the journal, and the stream waited for an end that nothing told it."""
    link, handle = LedgerConnection(lambda _: None), ClosedHandle()
    link.connection.connection_made(handle)
    handle.is_dead = True
    link.send(LedgerRequest(0, HERE, Fence(JOURNAL, HERE, 1)))
    assert "writing failed" in await asyncio.wait_for(link.is_gone, PATIENCE_S)


async def test_a_connection_made_at_its_deadline_is_not_given_to_its_link(late: str) -> None:
    link = LedgerConnection(lambda _: None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await link.open(dialer(), late, TWO)
    assert StallsAtFirst.accepted == 1, "the connection stood"
    assert link.connection._transport is None
    assert not link.connection.is_open
