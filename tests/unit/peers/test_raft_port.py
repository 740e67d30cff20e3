"""The Raft port: frames arrive in order, in two streams; full and broken ones are counted and reported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import pytest

from sava.ledger.wire import LedgerSession, Write
from sava.metadata.errors import IdentityConflict, Unavailable, Unfinished
from sava.metadata.peer import (
    Ask,
    Bootstrap,
    Envelope,
    Failed,
    LeaderAnswer,
    PeerMessage,
    ReadIndex,
    encode_envelope,
)
from sava.peer_connection import (
    GREETING,
    BadFrame,
    Dialer,
    FrameDecoder,
    PeerConnection,
    frame,
    is_refused,
)
from sava.peers import raft_transport
from sava.peers.raft_listener import RaftListener
from sava.peers.raft_transport import QueueLimits, RaftStream, TcpTransport, is_bulk
from sava.raft.messages import Append, AppendReply, Heartbeat
from sava.raft.types import Entry, EntryKind, Membership, NodeId
from sava.security.handshake import DialerHandshake, ListenerHandshake, Purpose
from tests.support.network import free_ports
from tests.support.peers import Named, credentials
from tests.support.waiting import PATIENCE_S

ONE, TWO = NodeId(1), NodeId(2)


class FakeInbound(Named):
    """An ``Inbound`` that remembers."""

    def __init__(self, node: NodeId, address: str, cluster: str = "c") -> None:
        super().__init__(node, cluster, address)
        self.received: list[PeerMessage] = []
        self.arrived = asyncio.Condition()
        self.lost: asyncio.Queue[NodeId] = asyncio.Queue()
        self.refusals: list[bool] = []

    def receive(self, envelopes: Sequence[Envelope]) -> None:
        self.received += [envelope.message for envelope in envelopes]
        asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self.arrived:
            self.arrived.notify_all()

    async def have(self, count: int) -> list[PeerMessage]:
        async with asyncio.timeout(PATIENCE_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.received) >= count)
        return self.received

    def unreachable(self, peer: NodeId) -> None:
        self.lost.put_nowait(peer)

    def disconnected(self, peer: NodeId, *, is_refused: bool) -> None:
        self.refusals.append(is_refused)

    async def bind(self, bootstrap: Bootstrap, prepare: Callable[[], Awaitable[None]] | None = None) -> None:
        if self.cluster and bootstrap.cluster != self.cluster:
            raise IdentityConflict(f"belongs to {self.cluster}")
        if prepare is not None:
            await prepare()
        self.cluster = bootstrap.cluster


def listening(inbound: FakeInbound) -> RaftListener:
    return RaftListener(cast(Any, inbound), inbound.address, credentials(inbound))


async def opened(address: str, purpose: Purpose) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of node one whose handshake is over."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    handshake = DialerHandshake(credentials(Named(ONE)), purpose, address, node=TWO)
    writer.write(GREETING + frame(handshake.begin()))
    decoder = FrameDecoder()
    while True:
        (payload,) = decoder.feed(await reader.read(1000))
        said = handshake.received(payload, None)
        if not isinstance(said, bytes):
            return reader, writer
        writer.write(frame(said))


def envelope(message: PeerMessage) -> Envelope:
    return Envelope("c", ONE, 1, 1, TWO, message)


def append(index: int, size: int = 10) -> Append:
    return Append(ONE, TWO, 1, index, 1, (Entry(index + 1, 1, EntryKind.COMMAND, b"x" * size),), 0)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[TcpTransport, FakeInbound, FakeInbound]]:
    (port,) = free_ports(1)
    target = FakeInbound(TWO, f"127.0.0.1:{port}")
    server = listening(target)
    await server.start()
    sender = FakeInbound(ONE, "127.0.0.1:1")
    transport = TcpTransport(Dialer(credentials()))
    transport.attach(sender)
    yield transport, sender, target
    await transport.close()
    await server.stop()


async def test_frames_of_one_stream_arrive_in_order(
    pair: tuple[TcpTransport, FakeInbound, FakeInbound],
) -> None:
    transport, _, target = pair
    messages = [append(index) for index in range(1, 301)]
    for message in messages[:100]:
        transport.send(target.address, [envelope(message)])
    transport.send(target.address, [envelope(message) for message in messages[100:]])
    assert await target.have(300) == messages
    assert transport.dropped() == {}


async def test_identify_and_bootstrap(pair: tuple[TcpTransport, FakeInbound, FakeInbound]) -> None:
    transport, _, target = pair
    info = await transport.identify(target.address, timeout=PATIENCE_S)
    assert info == target.info()
    await transport.bootstrap(target.address, Bootstrap("c", Membership()), timeout=PATIENCE_S)
    with pytest.raises(IdentityConflict):
        await transport.bootstrap(target.address, Bootstrap("other", Membership()), timeout=PATIENCE_S)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        await transport.identify("127.0.0.1:1", timeout=2.0)


async def test_a_stream_of_another_cluster_is_refused(
    pair: tuple[TcpTransport, FakeInbound, FakeInbound],
) -> None:
    transport, sender, target = pair
    sender.cluster = "foreign"
    transport.send(target.address, [envelope(append(1))])
    async with asyncio.timeout(PATIENCE_S):
        # The first write may be under way when the refusal arrives; the stream notices with the next one at
        # the latest.
        while sender.lost.empty():
            transport.send(target.address, [envelope(append(2))])
            await asyncio.sleep(0.02)
    assert target.received == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionRefusedError(111, "Connection refused"), True),
        (
            OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 111] Connect call failed"),
            True,
        ),
        (
            OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 113] No route to host"),
            False,
        ),
        (OSError(113, "No route to host"), False),
        (ConnectionResetError(104, "reset"), False),
        (TimeoutError(), False),
        (ValueError("[Errno 111]"), False),
    ],
)
def test_refused_means_that_no_process_listens_under_any_address(error: Exception, expected: bool) -> None:
    assert is_refused(error) is expected


async def test_a_connection_that_breaks_is_not_a_refusal(
    pair: tuple[TcpTransport, FakeInbound, FakeInbound],
) -> None:
    transport, sender, target = pair
    sender.cluster = "foreign"
    transport.send(target.address, [envelope(append(1))])
    async with asyncio.timeout(PATIENCE_S):
        while sender.lost.empty():
            transport.send(target.address, [envelope(append(2))])
            await asyncio.sleep(0.02)
    assert True not in sender.refusals


async def test_an_unreachable_peer_is_told_and_nothing_is_kept(
    pair: tuple[TcpTransport, FakeInbound, FakeInbound],
) -> None:
    transport, sender, _ = pair
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    transport.send(address, [envelope(append(index)) for index in range(1, 6)])
    async with asyncio.timeout(PATIENCE_S):
        assert await sender.lost.get() == TWO
    assert sender.refusals == [True], "no process listens there"
    assert transport.dropped()["unreachable"] >= 1

    late = FakeInbound(TWO, address)
    server = listening(late)
    await server.start()
    async with asyncio.timeout(PATIENCE_S):
        while not late.received:
            transport.send(address, [envelope(append(9))])
            await asyncio.sleep(0.02)
    assert append(1) not in late.received
    await server.stop()


def test_heartbeats_and_replies_never_share_a_stream_with_bulk() -> None:
    assert is_bulk(envelope(append(1)), 100)
    assert not is_bulk(envelope(Heartbeat(ONE, TWO, 1, 0, 1)), 100)
    assert not is_bulk(envelope(AppendReply(ONE, TWO, 1, True, 5)), 100)
    assert not is_bulk(envelope(Ask(1, ReadIndex())), 100)
    assert is_bulk(envelope(LeaderAnswer(1, Failed("x", "y"))), 1 << 20)


class StuckTransport(asyncio.Transport):
    """A socket that takes no more: a peer that is stopped."""

    def __init__(self, connection: PeerConnection) -> None:
        super().__init__()
        self._connection = connection
        self.written: list[bytes] = []

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Not needed."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def abort(self) -> None:
        self._connection.connection_lost(None)


async def test_a_full_stream_drops_the_newest_and_a_stuck_peer_is_given_up() -> None:
    dropped: list[tuple[str, int]] = []
    failures: list[str] = []
    connected: asyncio.Future[PeerConnection] = asyncio.get_running_loop().create_future()

    async def connect(connection: PeerConnection) -> None:
        connection.connection_made(StuckTransport(connection))
        connected.set_result(connection)

    stream = RaftStream(
        connect,
        QueueLimits(frames=3, size=1000),
        lambda reason, _: failures.append(reason),
        lambda why, count: dropped.append((why, count)),
    )
    assert stream.offer([b"connects"])
    (await connected).pause_writing()
    assert stream.offer([b"queued"] * 3)
    assert not stream.offer([b"too many"])
    assert dropped == [("queue_full", 1)]
    assert failures == []
    stream.expire(asyncio.get_running_loop().time() + 60)
    assert len(failures) == 1
    assert dropped[-1] == ("unreachable", 3)
    assert not stream.offer([b"during the pause"])
    await stream.close()


async def test_an_address_that_cannot_be_one_is_not_tried_without_a_pause() -> None:
    """The name of a host with an empty part is refused before anybody is asked, and not with an OSError."""
    failures: list[str] = []
    attempts = 0

    async def connect(connection: PeerConnection) -> None:
        nonlocal attempts
        attempts += 1
        await connection.dial("broker..example:7000", None)

    stream = RaftStream(
        connect, QueueLimits(frames=3, size=1000), lambda reason, _: failures.append(reason), lambda *_: None
    )
    for _ in range(20):
        stream.offer([b"heartbeat"])
        await asyncio.sleep(0)
    assert (attempts, len(failures)) == (1, 1)
    await stream.close()


async def test_a_stranger_on_the_raft_port_is_dropped_and_counted() -> None:
    (port,) = free_ports(1)
    node = FakeInbound(TWO, f"127.0.0.1:{port}")
    listener = listening(node)
    await listener.start()
    try:
        damaged = frame(encode_envelope(envelope(append(1))))[:-1] + b"?"
        for garbage, purpose in (
            (b"GET / HTTP/1.1\r\n\r\n", None),
            (GREETING + b"\xff" * 64, None),
            (GREETING + frame(b"\x00 no opening"), None),
            (damaged, Purpose.RAFT),
        ):
            if purpose is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            else:
                reader, writer = await opened(node.address, purpose)
            writer.write(garbage)
            async with asyncio.timeout(PATIENCE_S):
                while await reader.read(100):
                    pass
            writer.close()
        assert listener.malformed == 4
        assert node.received == []
    finally:
        await listener.stop()


def test_frames_survive_any_cutting() -> None:
    payloads = [b"", b"a", b"b" * 1000, b"c" * 70_000]
    stream = GREETING + b"".join(map(frame, payloads))
    for step in (1, 7, 8, 9, 4096, len(stream)):
        reader = FrameDecoder(GREETING)
        found = [
            payload for at in range(0, len(stream), step) for payload in reader.feed(stream[at : at + step])
        ]
        assert found == payloads


def test_a_frame_cannot_claim_more_than_the_limit() -> None:
    with pytest.raises(BadFrame, match="claims"):
        FrameDecoder().feed(b"\xff\xff\xff\x7f" + bytes(4))


async def test_a_listener_stops_although_peers_keep_connecting() -> None:
    """A connection that was accepted before ``stop`` is handed over after it has begun. Left open, it would
    keep the listener waiting for a peer that has no reason to close it."""
    (port,) = free_ports(1)
    node = FakeInbound(TWO, f"127.0.0.1:{port}")
    for _ in range(20):
        listener = listening(node)
        await listener.start()
        peers = [asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        connecting = asyncio.gather(*peers, return_exceptions=True)
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            await listener.stop()
        for opened in await connecting:
            if not isinstance(opened, BaseException):
                opened[1].close()


class StallsAtFirst(asyncio.Protocol):
    """A server in the loop of its client: accepting the first connections takes longer than the client's
    deadline allows. So a loop is slow when a partition heals: everything arrives at once."""

    stalls = 0
    accepted = 0

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        StallsAtFirst.accepted += 1
        if StallsAtFirst.stalls:
            StallsAtFirst.stalls -= 1
            # Not a pause of a task but of the whole loop: what is due meanwhile runs before what is ready.
            time.sleep(self._stall_s)


@pytest.fixture
async def late(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The address of a server to which connecting succeeds just after the deadline, twice."""
    monkeypatch.setattr(raft_transport, "CONNECT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(StallsAtFirst, "stalls", 2)
    monkeypatch.setattr(StallsAtFirst, "accepted", 0)
    (port,) = free_ports(1)
    server = await asyncio.get_running_loop().create_server(lambda: StallsAtFirst(0.1), "127.0.0.1", port)
    yield f"127.0.0.1:{port}"
    server.close()


async def test_a_connection_made_at_its_deadline_leaves_nothing_behind(late: str) -> None:
    """loop        is late: the connection stands, and the deadline for it has passed
    uvloop      connection_made(transport), the connection is there
    timeout     cancels create_connection, which has not returned yet
    uvloop      closes the handle, without connection_lost
    stream        had the transport: the next message raised RuntimeError through the node's pump, which ends
                the broker; and its close waited for connection_lost, until the process was killed
    """
    sender, transport = FakeInbound(ONE, "127.0.0.1:1"), TcpTransport(Dialer(credentials()))
    transport.attach(sender)
    transport.send(late, [envelope(append(1))])
    async with asyncio.timeout(PATIENCE_S):
        assert await sender.lost.get() == TWO
    assert StallsAtFirst.accepted == 1, "the connection stood"
    transport.send(late, [envelope(append(2)), envelope(Heartbeat(ONE, TWO, 1, 0, 1))])
    async with asyncio.timeout(PATIENCE_S):
        while StallsAtFirst.accepted < 4:  # two that were late, and then one for each stream
            transport.send(late, [envelope(append(3)), envelope(Heartbeat(ONE, TWO, 1, 0, 1))])
            await asyncio.sleep(0.01)
    async with asyncio.timeout(2.0):
        await transport.close()


async def test_a_question_at_its_deadline_has_its_answer_once_connected(late: str) -> None:
    """As above for one question: whoever asked waited for connection_lost, without an end."""
    transport = TcpTransport(Dialer(credentials()))
    transport.attach(FakeInbound(ONE, "127.0.0.1:1"))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Unavailable, match="did not answer within"):
            await transport.identify(late, timeout=0.05)
    assert StallsAtFirst.accepted == 1, "the connection stood"
    await transport.close()


async def test_an_unanswered_order_to_bind_is_not_called_undone() -> None:
    """The node takes the order and its answer is lost: it may belong to the cluster by now. It was raised as
    Unavailable, which says that nothing has happened."""

    async def take_and_hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handshake = ListenerHandshake(credentials(Named(TWO, "")))
        decoder = FrameDecoder(GREETING)
        while not handshake.is_over:
            for payload in decoder.feed(await reader.read(1000)):
                if (reply := handshake.received(payload, None)) is not None:
                    writer.write(frame(reply))
        writer.transport.abort()

    server = await asyncio.start_server(take_and_hang_up, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    transport = TcpTransport(Dialer(credentials()))
    transport.attach(FakeInbound(ONE, "127.0.0.1:1"))
    with pytest.raises(Unfinished, match="may have bound itself"):
        await transport.bootstrap(address, Bootstrap("c", Membership()), timeout=PATIENCE_S)
    server.close()
    await server.wait_closed()
    with pytest.raises(Unavailable) as caught:
        await transport.bootstrap(address, Bootstrap("c", Membership()), timeout=PATIENCE_S)
    assert not isinstance(caught.value, Unfinished), "refused: it was never sent"
    await transport.close()


class ClosedHandle(asyncio.Transport):
    """What uvloop leaves of a connection whose handle it has closed: it denies that it closes, raises for
    every write, and never tells of its end."""

    def __init__(self) -> None:
        super().__init__()
        self.is_dead = False
        self.written: list[bytes] = []

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Not needed."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_dead:
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>")
        self.written.append(bytes(data))

    def abort(self) -> None:
        """Of no effect: it is closed."""


async def test_a_write_to_a_closed_handle_breaks_its_stream_and_nothing_else() -> None:
    """The stream reports the peer unreachable, counts what is lost, and connects again after a pause."""
    handles: list[ClosedHandle] = []
    connections: list[PeerConnection] = []
    connected = asyncio.Event()
    dropped: list[tuple[str, int]] = []
    failures: list[str] = []

    async def connect(connection: PeerConnection) -> None:
        handles.append(ClosedHandle())
        connections.append(connection)
        connection.connection_made(handles[-1])
        connected.set()

    stream = RaftStream(
        connect,
        QueueLimits(frames=3, size=1000),
        lambda reason, _: failures.append(reason),
        lambda why, count: dropped.append((why, count)),
    )
    assert stream.offer([b"connects"])
    await connected.wait()
    handles[0].is_dead = True
    assert not stream.offer([b"one", b"two"])
    assert dropped == [("unreachable", 2)]
    await asyncio.sleep(0)
    assert len(failures) == 1
    connections[0].connection_lost(None)  # the loop may tell of it after all
    assert len(failures) == 1

    connected.clear()
    async with asyncio.timeout(PATIENCE_S):
        while not connected.is_set():
            stream.offer([b"later"])
            await asyncio.sleep(raft_transport.PAUSE_MIN_S)
    assert any(b"later" in data for data in handles[1].written)

    # A socket that took no more takes again, and its handle is closed: what waited is counted.
    connections[1].pause_writing()
    assert stream.offer([b"waits"])
    handles[1].is_dead = True
    connections[1].resume_writing()
    assert dropped[-1] == ("unreachable", 1)
    await asyncio.sleep(0)
    assert len(failures) == 2
    async with asyncio.timeout(PATIENCE_S / 10):
        await stream.close()


async def test_a_stream_closes_although_the_loop_never_tells_of_its_end() -> None:
    """Its close waited for connection_lost without an end, and the broker's exit with it: 30 s, until the
    process gave up."""
    handle, connected = ClosedHandle(), asyncio.Event()

    async def connect(connection: PeerConnection) -> None:
        connection.connection_made(handle)
        connected.set()

    stream = RaftStream(connect, QueueLimits(frames=3, size=1000), lambda *_: None, lambda *_: None)
    stream.offer([b"connects"])
    await connected.wait()
    handle.is_dead = True
    async with asyncio.timeout(3.0):
        await stream.close()


async def test_an_answer_to_a_closed_handle_ends_its_connection_and_nothing_else() -> None:
    """A disk answers when it has synced; the connection that asked was closed under it. The error went to
    the disk, whose errors end the broker."""
    writes: list[Write] = []

    class Asked:
        is_closed = False

        def receive(self, payloads: Sequence[bytes]) -> None:
            """Answers later."""

        def closed(self) -> None:
            self.is_closed = True

    session = Asked()

    def begin(write: Write, _: NodeId) -> Any:
        writes.append(write)
        return session

    listener = listening(FakeInbound(TWO, "127.0.0.1:1"))
    listener.ledgers = begin
    connection, handle = listener._accept(), ClosedHandle()
    connection.connection_made(handle)
    handshake = DialerHandshake(credentials(Named(ONE)), Purpose.LEDGERS, "127.0.0.1:1")
    connection.data_received(GREETING + frame(handshake.begin()))
    (challenge,) = FrameDecoder().feed(b"".join(handle.written))
    proof = handshake.received(challenge, None)
    assert isinstance(proof, bytes)
    connection.data_received(frame(proof))
    handle.is_dead = True
    writes[0]((b"durable", b""))
    async with asyncio.timeout(3.0):
        await listener.stop()
    assert session.is_closed


async def test_unfinished_frames_end_with_their_own_connection() -> None:
    """Peers are killed in the middle of a frame, or stop there and stay: the stream beside them delivers, and
    the listener stops."""
    (port,) = free_ports(1)
    node = FakeInbound(TWO, f"127.0.0.1:{port}")
    listener = listening(node)
    await listener.start()
    hello = DialerHandshake(credentials(Named(ONE)), Purpose.RAFT, node.address).begin()
    whole = frame(encode_envelope(envelope(append(7))))
    transport = TcpTransport(Dialer(credentials()))
    transport.attach(FakeInbound(ONE, "127.0.0.1:1"))
    stays = []
    try:
        for cut in range(1, 2 * len(whole), 7):
            if cut < len(whole):
                _, writer = await opened(node.address, Purpose.RAFT)
                writer.write(whole[:cut])
            else:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write((GREETING + frame(hello))[: cut - len(whole)])
            if cut % 2:
                writer.close()
            else:
                stays.append(writer)
        transport.send(node.address, [envelope(append(1))])
        assert await node.have(1) == [append(1)]
        assert listener.malformed == 0
    finally:
        await transport.close()
        async with asyncio.timeout(3.0):
            await listener.stop()
        for writer in stays:
            writer.close()


@pytest.mark.parametrize("purpose", [Purpose.RAFT, Purpose.LEDGERS, None])
async def test_a_frame_that_is_whole_and_means_nothing_ends_its_connection_only(
    purpose: Purpose | None,
) -> None:
    """Among them arrays in arrays, deeper than the decoder goes: that is another error than a malformed
    message."""
    (port,) = free_ports(1)
    node = FakeInbound(TWO, f"127.0.0.1:{port}")
    listener = listening(node)

    class NoClaims:
        async def is_claimed(self, *_: object) -> bool:
            raise AssertionError("nothing of it is a fence")

    class NoDisk:
        def receive(self, *_: object) -> None:
            raise AssertionError("nothing of it is a request")

        def forget_owner(self, _: object) -> None:
            """Nothing was told to it."""

    listener.ledgers = lambda write, broker: LedgerSession(NoDisk(), write, broker, NoClaims())
    await listener.start()
    transport = TcpTransport(Dialer(credentials()))
    transport.attach(FakeInbound(ONE, "127.0.0.1:1"))
    deep = b"\x91" * 100_000
    # Whole messages with one field more than this version knows, which a decoder skips.
    request = b"\x94\x01\xa1o\x94\x05\x92\x01\x02\xa1h\x04" + deep
    garbage = [
        *(b"", b"\xc1", b"\xff" * 100, deep),
        b"\x93\x01\xa1c" + deep,
        len(request).to_bytes(4, "little") + request,
    ]
    try:
        for each in garbage:
            if purpose is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(GREETING)
            else:
                reader, writer = await opened(node.address, purpose)
            writer.write(frame(each))
            writer.write_eof()
            async with asyncio.timeout(PATIENCE_S):
                await reader.read()
            writer.close()
        transport.send(node.address, [envelope(append(1))])
        assert await node.have(1) == [append(1)]
        assert listener.malformed == len(garbage)
    finally:
        await transport.close()
        await listener.stop()
