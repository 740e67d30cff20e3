"""Calls for topics of other brokers: found, passed on, and answered as the owner answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from sava.cluster.records import NotController
from sava.config import Auth
from sava.peers import forwarding
from sava.peers.channels import PeerChannel, PeerChannels, Unreachable
from sava.peers.error_mapping import Relayed
from sava.peers.forwarding import EOF
from sava.proto import streams_pb2 as pb
from sava.security.principal import ANONYMOUS
from sava.topics.errors import NotOwner, TopicMoved, TopicUnknown
from tests.support.guards import identity
from tests.support.waiting import FAR_S, HURRIES, PATIENCE_S
from tests.unit.api.brokers import ORDERS, Hosted, brokers
from tests.unit.cluster.fakes import registration

OFFSETS = pb.OffsetsRequest(topic=str(ORDERS))
OPEN = pb.PublishRequest(open=pb.OpenProducer(topic=str(ORDERS), producer_name="p"))
PATH = "/sava.streams.Streams/Offsets"


@pytest.fixture
async def three() -> AsyncIterator[dict[int, Hosted]]:
    async with brokers(3) as hosted, asyncio.timeout(PATIENCE_S):
        yield hosted


def give(three: dict[int, Hosted], owner: int) -> None:
    """To one broker, which everybody knows."""
    for each in three.values():
        each.service.topics = {ORDERS} if each.broker == owner else set()
        each.view.set_owner(owner)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str, dict[str, str | bytes]]:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    trailing: Any = caught.value.trailing_metadata() or ()
    return caught.value.code(), caught.value.details() or "", dict(trailing)


# -- unary ---------------------------------------------------------------------------------------


async def test_the_owner_answers_a_call_with_the_metadata_that_the_client_sent(
    three: dict[int, Hosted],
) -> None:
    give(three, 2)
    """But for its token: who the client is, the first broker says."""
    sent = (("authorization", "Bearer x"), ("trace", "t"), ("k-bin", b"\0"))
    answer = await three[1].stub.Offsets(OFFSETS, metadata=sent)
    assert answer.next_offset == 2
    (got,) = three[2].service.metadata
    assert "authorization" not in got
    assert (got["trace"], got["k-bin"]) == ("t", b"\0")
    call = identity(3).read(PATH, got["sava-forwarded"], None)
    assert call is not None
    assert (call.forwarder, call.is_own, call.principal) == (1, False, ANONYMOUS)


async def test_the_owner_gets_what_is_left_of_the_clients_deadline(three: dict[int, Hosted]) -> None:
    give(three, 2)

    async def left(request: Any, context: Any) -> pb.OffsetsResponse:
        return pb.OffsetsResponse(next_offset=round(context.time_remaining() * 1000))

    three[2].service.offsets = left
    with_deadline = await three[1].stub.Offsets(OFFSETS, timeout=20.0)
    assert 10_000 < with_deadline.next_offset < 20_000
    without = await three[1].stub.Offsets(OFFSETS)
    assert 25_000 < without.next_offset < 36_000  # longer than it may wait; gRPC rounds it up


async def test_a_refusal_of_the_owner_arrives_as_it_was_said(three: dict[int, Hosted]) -> None:
    give(three, 2)

    async def refuse(request: Any, context: Any) -> None:
        trailing = (("sava-code", "topic_unknown"), ("sava-detail", "7"), ("more-bin", b"\1\2"))
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "said by the owner", trailing)

    three[2].service.offsets = refuse
    code, details, trailing = await status_of(three[1].stub.Offsets(OFFSETS))
    assert (code, details) == (grpc.StatusCode.OUT_OF_RANGE, "said by the owner")
    assert trailing == {"sava-code": "topic_unknown", "sava-detail": "7", "more-bin": b"\1\2"}


async def test_a_forwarded_call_is_not_forwarded_again(three: dict[int, Hosted]) -> None:
    """Broker 1 takes 2 for the owner, and 2 takes 3 for it. 2 refuses; when 1 knows better, 3 answers."""
    give(three, 3)
    three[1].view.set_owner(2)
    asking = asyncio.create_task(_ask(three[1]))
    await three[2].service.asked.wait()
    assert not three[3].service.metadata
    three[1].view.set_owner(3)
    assert (await asking).next_offset == 3
    assert len(three[3].service.metadata) == 1


async def _ask(hosted: Hosted) -> pb.OffsetsResponse:
    answer: pb.OffsetsResponse = await hosted.stub.Offsets(OFFSETS)
    return answer


async def test_two_brokers_that_take_each_other_for_the_owner_refuse(three: dict[int, Hosted]) -> None:
    three[1].view.set_owner(2)
    three[2].view.set_owner(1)
    code, _, trailing = await status_of(three[1].stub.Offsets(OFFSETS))
    assert (code, trailing["sava-code"]) == (grpc.StatusCode.UNAVAILABLE, "topic_moved")
    assert len(three[2].service.metadata) == forwarding.ROUNDS
    assert len(three[1].service.metadata) == 1


async def test_a_call_waits_for_a_topic_that_nobody_has(three: dict[int, Hosted]) -> None:
    asking = asyncio.create_task(_ask(three[1]))
    await three[1].service.asked.wait()
    assert not asking.done()
    give(three, 2)
    assert (await asking).next_offset == 2


async def test_a_topic_that_nobody_has_is_unavailable_before_the_deadline(three: dict[int, Hosted]) -> None:
    for seconds in HURRIES:
        code, details, trailing = await status_of(three[1].stub.Offsets(OFFSETS, timeout=seconds))
        if code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            break
    assert (code, trailing["sava-code"]) == (grpc.StatusCode.UNAVAILABLE, "not_served")
    assert "/default/orders" in details


async def test_a_topic_that_came_here_meanwhile_is_served_here(three: dict[int, Hosted]) -> None:
    asking = asyncio.create_task(_ask(three[1]))
    await three[1].service.asked.wait()
    give(three, 1)
    assert (await asking).next_offset == 1


async def test_an_owner_that_cannot_be_reached_is_looked_for_again(three: dict[int, Hosted]) -> None:
    """Nothing was sent to it, so the call is not lost: the next owner answers it."""
    give(three, 2)
    await three[2].die()
    asking = asyncio.create_task(_ask(three[1]))
    await three[1].service.asked.wait()
    give(three, 3)
    assert (await asking).next_offset == 3


async def test_a_call_that_was_sent_and_has_no_answer_is_not_repeated(three: dict[int, Hosted]) -> None:
    """The owner dies with it: nobody knows whether it had an effect, and another broker has the topic now."""
    give(three, 2)
    began, ever = asyncio.Event(), asyncio.Event()

    async def hang(request: Any, context: Any) -> None:
        began.set()
        await ever.wait()

    three[2].service.offsets = hang
    asking = asyncio.create_task(status_of(three[1].stub.Offsets(OFFSETS)))
    await began.wait()
    give(three, 3)
    await three[2].die()
    code, _, trailing = await asking
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "sava-code" not in trailing
    assert not three[3].service.metadata


async def test_an_owner_that_does_not_answer_in_time_is_unavailable(
    three: dict[int, Hosted], monkeypatch: pytest.MonkeyPatch
) -> None:
    give(three, 2)
    monkeypatch.setattr("sava.peers.forwarding.FORWARD_S", 0.3)
    monkeypatch.setattr("sava.peers.forwarding.LONG_CALLS", {})

    async def hang(request: Any, context: Any) -> None:
        await asyncio.Event().wait()

    three[2].service.offsets = hang
    code, details, _ = await status_of(three[1].stub.Offsets(OFFSETS))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "broker 2" in details


async def test_a_client_that_gives_up_cancels_the_call_at_the_owner(three: dict[int, Hosted]) -> None:
    give(three, 2)
    began, cancelled = asyncio.Event(), asyncio.Event()
    three[2].service.offsets = _until_cancelled(began, cancelled)
    call = three[1].stub.Offsets(OFFSETS)
    await began.wait()
    call.cancel()
    await cancelled.wait()


def _until_cancelled(began: asyncio.Event, cancelled: asyncio.Event) -> Any:
    async def hang(request: Any, context: Any) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    return hang


async def test_what_the_leader_decides_goes_to_the_leaders_admin_port(three: dict[int, Hosted]) -> None:
    """Also from the client port, and while it is not known who leads, the call waits."""
    for each in three.values():
        each.service.topics = {ORDERS}

    async def not_here(request: Any, context: Any) -> None:
        raise NotController(0)

    three[1].service.offsets = not_here
    asking = asyncio.create_task(_ask(three[1]))
    await three[1].service.asked.wait()
    three[1].leader = 3
    assert (await asking).next_offset == 3


# -- asking for oneself --------------------------------------------------------------------------


async def test_a_broker_asks_the_owner_for_itself(three: dict[int, Hosted]) -> None:
    give(three, 2)
    one = three[1].forwarder
    assert (await one.ask("admin", PATH, OFFSETS, pb.OffsetsResponse, topic=ORDERS)).next_offset == 2
    three[3].service.topics = {ORDERS}
    assert (await one.ask("client", PATH, OFFSETS, pb.OffsetsResponse, broker=3)).next_offset == 3
    give(three, 1)
    with pytest.raises(NotOwner):
        await one.ask("client", PATH, OFFSETS, pb.OffsetsResponse, topic=ORDERS)


async def test_what_the_asked_broker_refuses_is_raised_with_its_code(three: dict[int, Hosted]) -> None:
    give(three, 2)

    async def refuse(request: Any, context: Any) -> None:
        raise TopicUnknown(ORDERS)

    three[2].service.offsets = refuse
    with pytest.raises(Relayed) as caught:
        await three[1].forwarder.ask("client", PATH, OFFSETS, pb.OffsetsResponse, topic=ORDERS)
    assert (caught.value.code, caught.value.status) == (
        "topic_unknown",
        grpc.StatusCode.FAILED_PRECONDITION,
    )


async def test_a_topic_is_located_by_its_owners_registration(
    three: dict[int, Hosted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "LOCATE_S", 0.1)
    assert await three[1].forwarder.locate(ORDERS) == (0, "")
    give(three, 2)
    assert await three[1].forwarder.locate(ORDERS) == (2, three[2].client)


# -- streams -------------------------------------------------------------------------------------


async def opened(hosted: Hosted, expected: int) -> Any:
    """A publish stream through a broker, opened by another."""
    call = hosted.stub.Publish()
    await call.write(OPEN)
    assert (await call.read()).opened.producer_id == expected
    return call


async def test_a_stream_goes_both_ways_until_the_client_has_no_more(three: dict[int, Hosted]) -> None:
    give(three, 2)
    call = await opened(three[1], 2)
    for size in (0, 1, 100_000):
        await call.write(pb.PublishRequest(batch=b"x" * size))
        (receipt,) = (await call.read()).receipts
        assert (receipt.base_offset, receipt.count) == (2, size)
    await call.done_writing()
    assert await call.read() is EOF
    assert await call.code() is grpc.StatusCode.OK
    assert dict(await call.trailing_metadata())["closed-by"] == "2"


async def test_a_stream_that_the_owner_refuses_goes_to_the_next_owner(three: dict[int, Hosted]) -> None:
    give(three, 3)
    three[1].view.set_owner(2)
    call = three[1].stub.Publish()
    await call.write(OPEN)
    await three[2].service.asked.wait()
    three[1].view.set_owner(3)
    assert (await call.read()).opened.producer_id == 3
    call.cancel()


async def test_the_topic_of_a_stream_may_come_here_while_it_is_opened(three: dict[int, Hosted]) -> None:
    """The opening was read already: the handler gets it again."""
    call = three[1].stub.Publish()
    await call.write(OPEN)
    await three[1].service.asked.wait()
    give(three, 1)
    assert (await call.read()).opened.producer_id == 1
    await call.write(pb.PublishRequest(batch=b"abc"))
    assert (await call.read()).receipts[0].count == 3
    call.cancel()


async def test_a_stream_whose_topic_moves_away_ends_with_the_reason(three: dict[int, Hosted]) -> None:
    """It was begun here, and the client knows what is under way: it is not passed on to the new owner."""
    give(three, 1)

    async def move(first: Any, context: Any) -> None:
        give(three, 2)
        raise TopicMoved(ORDERS)

    three[1].service.stream = move
    call = await opened(three[1], 1)
    code, _, trailing = await status_of(call.read())
    assert (code, trailing["sava-code"]) == (grpc.StatusCode.UNAVAILABLE, "topic_moved")
    assert not three[2].service.metadata


async def test_the_owners_end_of_a_stream_is_the_clients(three: dict[int, Hosted]) -> None:
    give(three, 2)

    async def end(first: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.DATA_LOSS, "broken batch", (("sava-code", "batch_corrupt"),))

    three[2].service.stream = end
    call = await opened(three[1], 2)
    code, details, trailing = await status_of(call.read())
    assert (code, details, trailing["sava-code"]) == (
        grpc.StatusCode.DATA_LOSS,
        "broken batch",
        "batch_corrupt",
    )


async def test_a_client_that_cancels_its_stream_ends_the_owners(three: dict[int, Hosted]) -> None:
    give(three, 2)
    began, cancelled = asyncio.Event(), asyncio.Event()
    three[2].service.stream = _until_cancelled(began, cancelled)
    call = await opened(three[1], 2)
    await began.wait()
    call.cancel()
    await cancelled.wait()


async def test_an_owner_that_dies_ends_the_stream_unavailable(three: dict[int, Hosted]) -> None:
    give(three, 2)
    call = await opened(three[1], 2)
    await three[2].die()
    code, _, _ = await status_of(call.read())
    assert code is grpc.StatusCode.UNAVAILABLE


async def test_a_server_stream_comes_from_the_owner(three: dict[int, Hosted]) -> None:
    give(three, 2)

    async def read(request: Any, context: Any) -> None:
        for offset in range(3):
            await context.write(pb.ReadResponse(next_offset=offset))

    three[2].service.read = read
    call = three[1].stub.Read(pb.ReadRequest(topic=str(ORDERS)))
    assert [response.next_offset async for response in call] == [0, 1, 2]


CHUNK = 256 << 10
BOUND = 32 << 20
"""What may be on its way over two connections; the flood is endless."""


async def settled(count: Any) -> int:
    """A number that has stopped growing."""
    last = -1
    while count() != last:
        last = count()
        await asyncio.sleep(0.5)
    return int(last)


async def test_a_client_that_does_not_read_stops_the_owner(three: dict[int, Hosted]) -> None:
    give(three, 2)
    written = 0

    async def flood(request: Any, context: Any) -> None:
        nonlocal written
        while True:
            await context.write(pb.ReadResponse(batches=[bytes(CHUNK)]))
            written += CHUNK

    three[2].service.read = flood
    call = three[1].stub.Read(pb.ReadRequest(topic=str(ORDERS)))
    assert len((await call.read()).batches[0]) == CHUNK
    stopped_at = await settled(lambda: written)
    assert stopped_at < BOUND
    for _ in range(2 * BOUND // CHUNK):
        await call.read()
    assert written > stopped_at
    call.cancel()


async def test_an_owner_that_does_not_read_stops_the_client(three: dict[int, Hosted]) -> None:
    give(three, 2)
    may_read = asyncio.Event()
    received = written = 0

    async def lazy(first: Any, context: Any) -> None:
        nonlocal received
        await may_read.wait()
        while (request := await context.read()) is not EOF:
            received += len(request.batch)

    async def flood(call: Any) -> None:
        nonlocal written
        for _ in range(2 * BOUND // CHUNK):
            await call.write(pb.PublishRequest(batch=bytes(CHUNK)))
            written += CHUNK
        await call.done_writing()

    three[2].service.stream = lazy
    call = await opened(three[1], 2)
    flooding = asyncio.create_task(flood(call))
    assert await settled(lambda: written) < BOUND
    may_read.set()
    await flooding
    assert await call.code() is grpc.StatusCode.OK
    assert received == written == 2 * BOUND


# -- peers ---------------------------------------------------------------------------------------


async def test_a_broker_that_registers_anew_gets_a_new_channel(three: dict[int, Hosted]) -> None:
    view, peers = three[1].view, three[1].peers
    first = await peers.link(2, "client", timeout=PATIENCE_S)
    assert await peers.link(2, "client", timeout=PATIENCE_S) is first
    assert await peers.link(2, "admin", timeout=PATIENCE_S) is not first
    view.brokers[2] = three[2].registration()
    assert await peers.link(2, "client", timeout=PATIENCE_S) is first
    view.brokers[2] = three[2].registration(incarnation=2)
    assert await peers.link(2, "client", timeout=PATIENCE_S) is not first


async def test_a_broker_without_a_registration_is_unreachable(three: dict[int, Hosted]) -> None:
    del three[1].view.brokers[2]
    with pytest.raises(Unreachable, match="broker 2"):
        await three[1].peers.link(2, "client", timeout=2)


async def test_a_broker_whose_registration_ends_is_not_waited_for(
    three: dict[int, Hosted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died; a call begins to connect to it; then its lease is over, and its topics go to others. The call
    finds them there at once, not when the time for connecting is up."""
    monkeypatch.setattr("sava.peers.channels.CONNECT_S", FAR_S)
    await three[2].die()
    linking = asyncio.create_task(three[1].peers.link(2, "client", timeout=FAR_S))
    await asyncio.sleep(0)  # it has begun to wait
    del three[1].view.brokers[2]
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Unreachable, match=r"broker 2 .* is gone"):
            await linking


async def test_a_call_on_a_channel_that_is_replaced_ends_unavailable(
    three: dict[int, Hosted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not cancelled: to a client that has not cancelled anything, that would be the end of its call."""
    monkeypatch.setattr("sava.peers.channels.GRACE_S", 0.0)
    give(three, 2)
    began, cancelled = asyncio.Event(), asyncio.Event()
    three[2].service.offsets = _until_cancelled(began, cancelled)
    asking = asyncio.create_task(status_of(three[1].stub.Offsets(OFFSETS)))
    await began.wait()
    three[1].view.brokers[2] = three[2].registration(incarnation=2)
    await three[1].peers.link(2, "client", timeout=PATIENCE_S)
    code, _, _ = await asking
    assert code is grpc.StatusCode.UNAVAILABLE


async def test_a_call_to_a_broker_whose_registration_is_lost_ends(
    three: dict[int, Hosted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: a call was passed on to a broker, which is stopped: its connection stands, and no answer
    comes. The cluster takes the broker for dead. The caller must be told at once, since another broker takes
    the topic up; it would wait for its own deadline otherwise."""
    monkeypatch.setattr("sava.peers.forwarding.FORWARD_S", FAR_S)
    monkeypatch.setattr("sava.peers.forwarding.LONG_CALLS", {})
    give(three, 2)
    began, cancelled = asyncio.Event(), asyncio.Event()
    three[2].service.offsets = _until_cancelled(began, cancelled)
    asking = asyncio.create_task(status_of(three[1].stub.Offsets(OFFSETS)))
    await began.wait()
    three[1].peers.look()
    assert three[1].peers._links, "a broker that is registered is left alone"
    del three[1].view.brokers[2]
    three[1].peers.look()
    async with asyncio.timeout(PATIENCE_S):
        code, _, _ = await asking
    assert code is grpc.StatusCode.UNAVAILABLE


async def test_peers_that_are_closed_leave_nothing_open() -> None:
    async with brokers(2) as hosted:
        peers = PeerChannels(hosted[1].view, Auth())
        link = await peers.link(2, "client", timeout=PATIENCE_S)
        await peers.close()
        assert link.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_a_stream_that_waits_for_its_connection_ends_with_the_channel() -> None:
    """The connection to the owner breaks just before a stream is passed on, and the owner, which was stopped,
    accepts another one and says nothing. Its registration is lost, so its channel is closed: the stream must
    end then, and its client look for the topic elsewhere."""

    async def nothing_more() -> Any:
        return EOF

    async def no_reply(_: bytes) -> None:
        raise AssertionError("nobody answers")

    with socket.create_server(("127.0.0.1", 0)) as mute:
        channel = aio.insecure_channel(f"127.0.0.1:{mute.getsockname()[1]}")
        link = PeerChannel(channel, registration(2), "broker 2")
        passing = asyncio.create_task(
            forwarding.relay_both_ways(
                link, "/sava.streams.Streams/Publish", b"", None, (), nothing_more, no_reply
            )
        )
        accepted, _ = await asyncio.to_thread(mute.accept)
        await channel.close(None)
        async with asyncio.timeout(PATIENCE_S):
            with accepted, pytest.raises(Relayed, match="broker 2 is gone"):
                await passing
