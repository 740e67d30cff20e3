"""Connections between two brokers on the Raft port, from their frames to their handshake.

A stream of bytes is cut into *frames*: the length of the payload, its CRC-32C, the payload. TCP's own
checksum lets one in some tens of thousands of damaged segments through, and a flipped bit in an entry would
be replicated faithfully; so a frame that does not verify ends the connection. A length is believed only up to
``MAX_FRAME_BYTES``.

A connection begins with eight bytes that nothing else sends, then the frames of a *handshake*
(``security.handshake``) that says what the connection is for, and proves to each end that the other is a
broker of this cluster:

    Raft       answered by Welcome; then envelopes, one per frame, in this direction only
    ledgers    answered by Welcome; then requests in this direction and answers in the other
               (``ledger.wire``)
    identify   answered by Introduction
    bind       answered by Bound

and any of them may be answered by HandshakeRefused, after which the connection is closed. Until it is over, a
frame may be ``HANDSHAKE_FRAME_BYTES`` long.

``PeerConnection`` is one end of such a connection, ``Dialer`` opens it; ``peers.raft_listener`` accepts it.

**A connection is given to its user only when it is certain that it stays.** uvloop calls ``connection_made``
one pass of the loop before ``create_connection`` returns. A deadline that passes in between cancels the call;
uvloop then closes the handle and calls no ``connection_lost``:

    peer       accepts after a long silence; the loop is busy, and late
    uvloop     connection_made(transport)
    deadline   cancels create_connection
    uvloop     closes the handle

A user that has taken the connection holds a corpse: ``is_closing()`` is false, every write raises
RuntimeError, and nothing ever says that it is gone.

**No error of one connection leaves it.** A write happens in the middle of the node's pump, of an append, or
of the sync of a disk, and an error that got there would end the broker. The connection is given up instead.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
import ssl
import struct
from collections.abc import Callable, Iterable
from typing import Final, cast

import google_crc32c

from sava.errors import Outcome, SavaError, shown
from sava.metadata.errors import Unavailable, Unfinished
from sava.metadata.peer import Bootstrap, NodeInfo
from sava.raft.types import NodeId
from sava.security.handshake import (
    Answer,
    BadHandshake,
    Bound,
    BrokerCredentials,
    DialerHandshake,
    Introduction,
    Purpose,
)

log = logging.getLogger(__name__)

GREETING: Final = b"SAVARFT1"
MAX_FRAME_BYTES: Final = 72 << 20
"""A record of a log may have 64 MB, and something is written around it."""
HANDSHAKE_FRAME_BYTES: Final = 64 << 10
"""The longest message of a handshake names the first voters of a cluster."""
SOCKET_BUFFER_BYTES: Final = 1 << 20
"""What the loop may hold for a slow socket before the connection is paused."""
VANISHED_MS: Final = 4000
"""A peer that vanished without a reset is noticed within this time, whether data waits for it or not."""
GONE_S: Final = 1.0
"""An aborted connection is gone within three passes of the loop. No caller waits longer for that: a close
that waits for an event which the loop has lost keeps the whole broker from stopping."""

_PASSES = 3
_HEAD = struct.Struct("<II")


class BadFrame(SavaError):
    """Bytes that no Sava node sends, or that were damaged on the way."""

    outcome = Outcome.UNKNOWN


# -- frames ------------------------------------------------------------------------------------


def frame(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), google_crc32c.value(payload)) + payload


def frame_parts(head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """A frame whose payload is ``head`` and ``body``, without copying the body."""
    crc = google_crc32c.extend(google_crc32c.value(head), body)
    return _HEAD.pack(len(head) + len(body), crc) + head, body


class FrameDecoder:
    """Bytes in, whole payloads out. Holds at most one unfinished frame and what came with it."""

    def __init__(self, greeting: bytes = b"") -> None:
        """``greeting``: bytes that must come first."""
        self._expected = greeting
        self._parts: list[bytes] = []
        self.held = 0
        """Bytes of a frame that is not finished."""
        self.limit = MAX_FRAME_BYTES
        self._wanted = 0
        """Bytes without which looking again is of no use: a large frame is joined once, not at every read."""

    def feed(self, data: bytes) -> list[bytes]:
        """Raises BadFrame, after which the connection is of no use."""
        self._parts.append(data)
        self.held += len(data)
        if self.held < self._wanted:
            return []
        if len(self._parts) > 1:
            data = b"".join(self._parts)
        at = 0
        if self._expected:
            head = data[: len(self._expected)]
            if not self._expected.startswith(head):
                raise BadFrame("the other end does not speak Sava's protocol between brokers")
            if len(head) < len(self._expected):
                self._parts = [data]
                return []
            at, self._expected = len(head), b""
        payloads, size, self._wanted = [], len(data), 0
        while at + _HEAD.size <= size:
            length, crc = _HEAD.unpack_from(data, at)
            if length > self.limit:
                raise BadFrame(f"a frame claims {length} bytes, more than {self.limit}")
            end = at + _HEAD.size + length
            if end > size:
                self._wanted = end - at
                break
            payload = data[at + _HEAD.size : end]
            if google_crc32c.value(payload) != crc:
                raise BadFrame("a frame was damaged on the way")
            payloads.append(payload)
            at = end
        self._parts = [data[at:]] if at < size else []
        self.held = size - at
        return payloads


# -- connection --------------------------------------------------------------------------------


def _ignore(*_: object) -> None:
    pass


Contexts = Callable[[], ssl.SSLContext | None]
"""What a new connection speaks TLS with, by the certificates of this moment; None: it is plain."""


class PeerConnection(asyncio.Protocol):
    """One end of a connection between two brokers: frames in, frames out. Owned by the event loop.

    ``handshake`` is called with each frame of the other end until ``establish`` is, ``received`` with those
    after it; a BadFrame or BadHandshake that they raise ends the connection. ``lost`` is called once when an
    open connection is over, and never from inside ``write``; ``writable`` when a paused one takes bytes
    again. ``opened`` is called when an accepted connection stands, before any TLS."""

    def __init__(
        self,
        *,
        handshake: Callable[[PeerConnection, bytes], None] = _ignore,
        opened: Callable[[PeerConnection], None] = _ignore,
        lost: Callable[[PeerConnection], None] = _ignore,
        greeting: bytes = b"",
        tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float = 0.0,
    ) -> None:
        """``greeting``: what the other end sends before its first frame. ``tls`` is for an accepted
        connection, and so is ``handshake_timeout_s``: how long it may take until it is established, TLS
        included; the dialer has a deadline of its own."""
        self.handshake = handshake
        self._opened = opened
        self.lost = lost
        self.received: Callable[[list[bytes]], None] = _ignore
        """May be set in the handshake, as ``lost`` may."""
        self.writable: Callable[[], None] = _ignore
        self._decoder = FrameDecoder(greeting)
        self._decoder.limit = HANDSHAKE_FRAME_BYTES
        self._tls = tls
        self._starting_tls: asyncio.Task[None] | None = None
        self._waits_for_tls = False
        self._handshake_timeout_s = handshake_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self.is_established = False
        """The handshake is over, and the other end is a broker."""
        self._transport: asyncio.WriteTransport | None = None
        self._is_dialing = False
        self._early: list[bytes] = []
        self._gone = asyncio.Event()
        self.is_open = False
        self.paused_at = 0.0
        """Since when the socket takes no more, in the loop's time; 0 while it does."""
        self.heard_at = 0.0
        """When bytes came last, in the loop's time."""
        self.reason = ""
        """Why the connection is over."""
        self.is_malformed = False
        """The other end sent what no Sava node sends, or is no broker of this cluster."""
        self.peer = ""
        """The address that the connection comes from, or goes to."""

    async def dial(self, address: str, tls: ssl.SSLContext | None) -> None:
        """Connect. The connection is open only if this returns, and ``lost`` is called in any case after
        that. Raises OSError, and Unavailable for what is no address."""
        host, port = split_address(address)
        self._is_dialing = True
        self.peer = address
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: self, host, port, ssl=tls, server_hostname=host if tls else None
            )
            if self._transport is None:
                raise ConnectionResetError(self.reason or "the other side closed the connection")
            self._open(self._transport)
        except BaseException as error:
            self.abort(str(error))  # TLS would say goodbye first, and wait half a minute for an answer
            self._transport = None
            raise
        # No await from here on: nothing can come between the connection and its user.
        self._is_dialing = False
        self._take_early()

    def _take_early(self) -> None:
        """What came while it was not known yet whether the connection stands."""
        early, self._early = self._early, []
        for data in early:
            self.data_received(data)

    def establish(self) -> None:
        """The handshake is over. What follows goes to ``received``."""
        self.is_established = True
        self._decoder.limit = MAX_FRAME_BYTES
        self._cancel_deadline()

    def answer_later(self) -> None:
        """The other end has said all that it has to say: it is no longer late."""
        self._cancel_deadline()

    @property
    def certificate(self) -> bytes | None:
        """What the other end has shown, verified by TLS; None: nothing."""
        shown = self._transport.get_extra_info("ssl_object") if self._transport is not None else None
        return shown.getpeercert(binary_form=True) if shown is not None else None

    @property
    def unfinished(self) -> int:
        """Bytes held of a frame that is not whole yet."""
        return self._decoder.held

    def write(self, parts: Iterable[bytes]) -> bool:
        """Send whole frames, which may come in pieces; False if the connection is over. Never raises."""
        if not self.is_open or self._transport is None:
            return False
        try:
            self._transport.writelines(parts)
        except Exception as error:  # noqa: BLE001 (uvloop raises RuntimeError for a handle that is closed)
            self.abort(f"writing failed: {error}")
            # The loop may not tell of a handle that it has closed itself; telling twice does no harm. Not at
            # once: the caller, such as a disk that answers, is in the middle of something.
            asyncio.get_running_loop().call_soon(self.connection_lost, None)
            return False
        return True

    def end(self, parts: Iterable[bytes]) -> None:
        """Send ``parts``, then close."""
        if self.write(parts) and self._transport is not None:
            self.is_open = False
            self._transport.close()

    def abort(self, reason: str = "it was closed here") -> None:
        self.reason = self.reason or reason or "no answer"
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> bool:
        """Abort, and wait a bounded time until the loop has closed the socket; False if it did not say so."""
        self.abort()
        await settle()
        return self._transport is None or await is_gone(self._gone)

    # -- asyncio -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = self._transport = cast(asyncio.WriteTransport, transport)
        if self.reason:
            transport.abort()  # closed before it stood
        if self._is_dialing or self.reason:
            return
        try:
            self._open(transport)
        except OSError as error:
            self.abort(str(error))
            return
        loop = asyncio.get_running_loop()
        if self._handshake_timeout_s:
            self._deadline = loop.call_later(self._handshake_timeout_s, self.abort, "no handshake in time")
        self._opened(self)
        if self._tls is not None and self.is_open:
            # Here and not by the server: before TLS stands, the server would let no one count or close it.
            self._waits_for_tls = True
            starting = self._start_tls(cast(asyncio.Transport, transport), self._tls)
            self._starting_tls = loop.create_task(starting)

    async def _start_tls(self, plain: asyncio.Transport, context: ssl.SSLContext) -> None:
        """TLS over a connection that stands, and not by the server, which would let no one count or close it
        before."""
        loop = asyncio.get_running_loop()
        starting = loop.create_task(
            loop.start_tls(
                plain, self, context, server_side=True, ssl_handshake_timeout=self._handshake_timeout_s
            )
        )
        # uvloop has begun to read, so the other end's hello may be here already. One pass on, TLS has taken
        # the transport over; it begins in the pass after that, and the hello follows.
        await asyncio.sleep(0)
        if self._early:
            loop.call_soon(_pass_on, plain, b"".join(self._early))
            self._early = []
        try:
            secured = await starting
            if secured is None:
                raise ConnectionResetError("the other side closed the connection")
        except Exception as error:  # noqa: BLE001 (as many kinds as there are faults)
            self.is_malformed = isinstance(error, ssl.SSLError)
            self.abort(f"no TLS: {tls_reason(error)}")
            self.connection_lost(None)
            return
        if self._gone.is_set() or self.reason:
            secured.abort()
            return
        self._transport, self._waits_for_tls = secured, False
        secured.set_write_buffer_limits(high=SOCKET_BUFFER_BYTES)
        self._take_early()

    def _open(self, transport: asyncio.WriteTransport) -> None:
        """Raises OSError for a connection that was reset already, which the loop has not reported yet."""
        notice_vanishing(transport)
        transport.set_write_buffer_limits(high=SOCKET_BUFFER_BYTES)
        if not self.peer:
            self.peer = _peer_of(transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._is_dialing or self._waits_for_tls:
            self._early.append(data)
            return
        self.heard_at = asyncio.get_running_loop().time()
        try:
            payloads = self._decoder.feed(data)
            while payloads and not self.is_established and self.is_open:
                self.handshake(self, payloads.pop(0))
            if payloads and self.is_open:
                self.received(payloads)
        except (BadFrame, BadHandshake) as error:
            self.is_malformed = True
            self.abort(str(error))
        except Exception as error:
            log.exception("peers: connection dropped, a frame could not be handled peer=%s", self.peer)
            self.abort(str(error))

    def pause_writing(self) -> None:
        self.paused_at = asyncio.get_running_loop().time()

    def resume_writing(self) -> None:
        self.paused_at = 0.0
        self.writable()

    def connection_lost(self, error: Exception | None) -> None:
        if self._gone.is_set():
            return  # reported already, after a write that failed
        self._gone.set()
        self._transport = None
        self.is_open = False
        self.reason = self.reason or str(error or "the other side closed the connection")
        self._cancel_deadline()
        if not self._is_dialing:
            self.lost(self)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()


class Dialer:
    """Opens connections to the Raft ports of other brokers, and proves there which broker this is."""

    def __init__(self, credentials: BrokerCredentials, contexts: Contexts = lambda: None) -> None:
        self.credentials = credentials
        self._contexts = contexts

    async def dial(self, address: str, connection: PeerConnection) -> None:
        """Raises OSError, and Unavailable for what is no address."""
        await connection.dial(address, self._contexts())

    async def open_raft(self, address: str, node: NodeId, connection: PeerConnection) -> None:
        """Returns when ``node`` has proved that it is the one at ``address``. Raises OSError, SavaError."""
        await self._open(
            address, connection, DialerHandshake(self.credentials, Purpose.RAFT, address, node=node)
        )

    async def open_ledgers(self, address: str, node: NodeId, connection: PeerConnection) -> None:
        """As ``open_raft``. Raises OSError."""
        handshake = DialerHandshake(self.credentials, Purpose.LEDGERS, address, node=node)
        try:
            await self._open(address, connection, handshake)
        except SavaError as error:
            raise ConnectionError(str(error)) from error

    async def identify(self, address: str, *, timeout: float) -> NodeInfo:
        """Raises Unavailable, NotAuthenticated."""
        answer = await self._ask(
            address, DialerHandshake(self.credentials, Purpose.IDENTIFY, address), timeout
        )
        assert isinstance(answer, Introduction)
        return answer.info

    async def bind(self, address: str, bootstrap: Bootstrap, *, timeout: float) -> None:
        """Raises the error that the other end refused with, Unavailable, and Unfinished if it may have bound
        itself."""
        handshake = DialerHandshake(self.credentials, Purpose.BIND, address, bootstrap=bootstrap)
        answer = await self._ask(address, handshake, timeout)
        assert isinstance(answer, Bound)

    async def _ask(self, address: str, handshake: DialerHandshake, timeout: float) -> Answer:
        """One question on a connection of its own."""
        connection = PeerConnection()
        try:
            async with asyncio.timeout(timeout):
                return await self._open(address, connection, handshake)
        except (TimeoutError, OSError, BadHandshake, BadFrame) as error:
            reason = f"node {address} cannot be reached: {error}"
            if isinstance(error, TimeoutError):
                reason = f"node {address} did not answer within {timeout:g} s"
            if handshake.has_sent_order:
                raise Unfinished(f"{reason}; it may have bound itself") from error
            raise Unavailable(reason) from error
        finally:
            await connection.close()

    async def _open(self, address: str, connection: PeerConnection, handshake: DialerHandshake) -> Answer:
        """Connect, and carry the handshake out. Until that is over, ``connection.lost`` is not called."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        lost = connection.lost

        def step(_: PeerConnection, payload: bytes) -> None:
            try:
                said = handshake.received(payload, connection.certificate)
            except SavaError as error:
                if not answer.done():
                    answer.set_exception(error)
                return
            if isinstance(said, bytes):
                connection.write((frame(said),))
            elif not answer.done():
                connection.establish()
                answer.set_result(said)

        def lost_early(_: PeerConnection) -> None:
            if not answer.done():
                answer.set_exception(ConnectionResetError(connection.reason))

        connection.handshake, connection.lost = step, lost_early
        try:
            await self.dial(address, connection)
            connection.write((GREETING + frame(handshake.begin()),))
            said = await answer
            if not connection.is_open and handshake.hello.purpose in (Purpose.RAFT, Purpose.LEDGERS):
                raise ConnectionResetError(connection.reason)
        except BaseException as error:
            connection.abort(str(error))
            raise
        finally:
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, even when the caller gave up before
        connection.lost = lost
        return said


# -- sockets -----------------------------------------------------------------------------------


async def settle() -> None:
    """Let asyncio finish what it has begun with a socket: between accepting or connecting it and
    ``connection_made`` lie up to three passes of the loop, in which no one else knows of the socket yet."""
    for _ in range(_PASSES):
        await asyncio.sleep(0)


async def is_gone(gone: asyncio.Event) -> bool:
    """Wait until aborted connections are gone; False when the loop does not say so within ``GONE_S``."""
    try:
        async with asyncio.timeout(GONE_S):
            await gone.wait()
    except TimeoutError:
        return False
    return True


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    try:
        return host.removeprefix("[").removesuffix("]"), int(port)
    except ValueError:
        raise Unavailable(f"{shown(address)} is not an address of the form host:port") from None


def tls_reason(error: BaseException) -> str:
    """Why TLS came to nothing, for people."""
    found = getattr(error, "verify_message", "") or getattr(error, "reason", "") or str(error)
    return str(found or type(error).__name__).lower().replace("_", " ")[:200]


def _pass_on(transport: asyncio.Transport, data: bytes) -> None:
    """Give ``data`` to the protocol that has the transport now, as if it came just now."""
    protocol = cast(asyncio.BufferedProtocol, transport.get_protocol())
    while data and not transport.is_closing():
        room = memoryview(protocol.get_buffer(len(data)))
        size = min(len(room), len(data))
        room[:size] = data[:size]
        protocol.buffer_updated(size)
        data = data[size:]


def _peer_of(transport: asyncio.BaseTransport) -> str:
    name = transport.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) and len(name) >= 2 else "?"


def is_refused(error: BaseException) -> bool:
    """Whether a connect failed since no process listens, under all addresses of the host. The loop joins the
    errors of several addresses into one that has only a text; an error among them that is not a refusal (a
    route that is missing) leaves open whether the process is there."""
    if isinstance(error, ConnectionRefusedError):
        return True
    causes = set(re.findall(r"\[Errno (\d+)\]", str(error)))
    return isinstance(error, OSError) and causes == {str(errno.ECONNREFUSED)}


def notice_vanishing(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", VANISHED_MS),
    ):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
