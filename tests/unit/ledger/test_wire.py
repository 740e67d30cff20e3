"""The bytes between brokers about journals, and both ends of a connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sava.ledger.protocol import (
    Durable,
    Fence,
    FenceAnswer,
    LedgerAppend,
    LedgerId,
    LedgerRefused,
    Message,
    ReadAnswer,
    RefusalReason,
    StorageId,
    WriteBack,
)
from sava.ledger.registry import LiveBroker, PeerUnreachable
from sava.ledger.wire import (
    LedgerAnswer,
    LedgerRequest,
    decode_answer,
    decode_request,
    encode,
)
from sava.peer_connection import BadFrame, FrameDecoder
from tests.support.waiting import PATIENCE_S
from tests.unit.ledger.hosts import Hosts

JOURNAL = LedgerId(1, 2)
HERE = StorageId("here")


@pytest.mark.parametrize(
    "message",
    [
        LedgerAppend(JOURNAL, HERE, 0, 512, b"records" * 1000, 400, 100),
        WriteBack(JOURNAL, HERE, 3, 512, b"records"),
        ReadAnswer(JOURNAL, HERE, 512, b""),
        Fence(JOURNAL, HERE, 4),
        LedgerRefused(JOURNAL, HERE, RefusalReason.GAP, 1, 99),
    ],
)
def test_what_is_sent_is_what_arrives(message: Message) -> None:
    request, answer = LedgerRequest(7, StorageId("origin"), message), LedgerAnswer(7, message)
    sent = b"".join((*encode(request), *encode(answer)))
    reader = FrameDecoder()
    arrived = [payload for at in range(0, len(sent), 100) for payload in reader.feed(sent[at : at + 100])]
    assert decode_request(arrived[0]) == request
    assert decode_answer(arrived[1]) == answer


def test_damaged_data_does_not_arrive() -> None:
    head, body = encode(LedgerRequest(0, HERE, LedgerAppend(JOURNAL, HERE, 0, 512, b"records")))
    with pytest.raises(BadFrame, match="damaged"):
        FrameDecoder().feed(head + body.replace(b"c", b"k"))


@pytest.mark.parametrize(
    "payload", [b"", b"\x01\x00\x00\x00", b"\xff\xff\xff\xff\x93", b"\x01\x00\x00\x00\xc0"]
)
def test_other_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_request(payload)


async def test_a_disk_is_asked_wherever_it_is(tmp_path: Path) -> None:
    async with Hosts(2, tmp_path) as hosts:
        here, there = hosts[0], hosts[1]
        origin = StorageId("origin")
        await hosts.claim(JOURNAL, *(LedgerId(1, number) for number in range(3, 40)), origin=origin)
        for host in here, there:
            fence = Fence(JOURNAL, host.storage, 1)
            answer = await here.mirrored.peers.ask(host.storage, fence, origin=origin, timeout=PATIENCE_S)
            assert answer == FenceAnswer(JOURNAL, host.storage, 1, None)
        many = [Fence(LedgerId(1, number), there.storage, 1) for number in range(3, 40)]
        answers = await asyncio.gather(
            *(
                here.mirrored.peers.ask(there.storage, each, origin=origin, timeout=PATIENCE_S)
                for each in many
            )
        )
        assert [answer.ledger for answer in answers] == [each.ledger for each in many]


async def test_a_disk_that_is_not_reached_is_named_within_the_deadline(tmp_path: Path) -> None:
    async with Hosts(2, tmp_path) as hosts:
        here, there = hosts[0], hosts[1]
        ask = here.mirrored.peers.ask
        origin, fence = StorageId("origin"), Fence(JOURNAL, there.storage, 1)
        await hosts.claim(JOURNAL, origin=origin)
        with pytest.raises(PeerUnreachable, match="no registered broker has the disk gone"):
            await ask(StorageId("gone"), Fence(JOURNAL, StorageId("gone"), 1), origin=origin, timeout=5)
        there.gate.is_silent = True
        with pytest.raises(PeerUnreachable, match="did not answer within"):
            await ask(there.storage, fence, origin=origin, timeout=0.2)
        there.gate.cut()
        with pytest.raises(PeerUnreachable, match=there.storage):
            await ask(there.storage, fence, origin=origin, timeout=5)
        there.gate.heal()
        assert isinstance(await ask(there.storage, fence, origin=origin, timeout=PATIENCE_S), FenceAnswer)
        there.gate.drop()  # the connection that is kept
        later = Fence(JOURNAL, there.storage, 2)
        for _ in range(2):  # the first may still meet the old one
            try:
                answer = await ask(there.storage, later, origin=origin, timeout=PATIENCE_S)
                break
            except PeerUnreachable:
                continue
        assert isinstance(answer, FenceAnswer)


async def test_a_broker_with_another_disk_says_whose_it_is(tmp_path: Path) -> None:
    async with Hosts(2, tmp_path) as hosts:
        here, there = hosts[0], hosts[1]
        former = StorageId("former")
        await hosts.claim(JOURNAL, origin=StorageId("origin"))
        hosts.town.there[former] = LiveBroker(former, there.broker, there.gate.address)
        answer = await here.mirrored.peers.ask(
            former, Fence(JOURNAL, former, 1), origin=StorageId("origin"), timeout=10
        )
        assert answer == LedgerRefused(JOURNAL, there.storage, RefusalReason.OTHER_DISK)


async def test_an_own_journal_is_refused_and_an_unknown_generation_not_empty(
    tmp_path: Path,
) -> None:
    async with Hosts(1, tmp_path) as hosts:
        host = hosts[0]
        await host.begin()
        unknown = Fence(LedgerId(host.broker, 99), host.storage, 1)
        answer = await host.mirrored.peers.ask(host.storage, unknown, origin=host.storage, timeout=PATIENCE_S)
        assert answer == LedgerRefused(unknown.ledger, host.storage, RefusalReason.NOT_JOINED)
        append = LedgerAppend(host.id, host.storage, 0, 512, b"x")
        answer = await host.mirrored.peers.ask(host.storage, append, origin=host.storage, timeout=PATIENCE_S)
        assert isinstance(answer, LedgerRefused)
        assert answer.reason is RefusalReason.FENCED
        write_back = WriteBack(host.id, host.storage, 1, 0, b"x")
        answer = await host.mirrored.peers.ask(
            host.storage, write_back, origin=host.storage, timeout=PATIENCE_S
        )
        assert not isinstance(answer, Durable)
