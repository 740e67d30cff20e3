"""Connections between two brokers on the Raft port, from their frames to their handshake.

A stream of bytes is cut into *frames*: the length of the payload, its CRC-32C, the payload. TCP's own
checksum lets one in some tens of thousands of damaged segments through, and a flipped bit in an entry would
be replicated faithfully; so a frame that does not verify ends the connection. A length is believed only up to
``MAX_FRAME_BYTES``.

A connection begins with eight bytes that nothing else sends, then one frame, the *handshake*, that says what
the connection is for:

    OpenRaft(cluster)     answered by Welcome; then envelopes, one per frame, in this direction only
    OpenLedgers(cluster)  answered by Welcome; then requests in this direction and answers in the other
                          (``ledger.wire``)
    Identify              answered by Introduction
    Bind(bootstrap)       answered by Bound

and any of them may be answered by HandshakeRefused, after which the connection is closed.

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
from typing import Final, TypeVar, cast

import google_crc32c
import msgspec

from sava.errors import Outcome, SavaError, shown
from sava.metadata.errors import Unavailable, Unfinished
from sava.metadata.peer import Bootstrap, NodeInfo, error_from

log = logging.getLogger(__name__)

GREETING: Final = b"SAVARFT1"
MAX_FRAME_BYTES: Final = 72 << 20
"""A record of a log may have 64 MB, and something is written around it."""
SOCKET_BUFFER_BYTES: Final = 1 << 20
"""What the loop may hold for a slow socket before the connection is paused."""
VANISHED_MS: Final = 4000
"""A peer that vanished without a reset is noticed within this time, whether data waits for it or not."""
GONE_S: Final = 1.0
"""An aborted connection is gone within three passes of the loop. No caller waits longer for that: a close
that waits for an event which the loop has lost keeps the whole broker from stopping."""

_PASSES = 3
_HEAD = struct.Struct("<II")

T = TypeVar("T")


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
        self._held = 0
        self._wanted = 0
        """Bytes without which looking again is of no use: a large frame is joined once, not at every read."""

    def feed(self, data: bytes) -> list[bytes]:
        """Raises BadFrame, after which the connection is of no use."""
        self._parts.append(data)
        self._held += len(data)
        if self._held < self._wanted:
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
            if length > MAX_FRAME_BYTES:
                raise BadFrame(f"a frame claims {length} bytes, more than {MAX_FRAME_BYTES}")
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
        self._held = size - at
        return payloads


# -- handshake ---------------------------------------------------------------------------------


class OpenRaft(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """``cluster`` is empty while the sender belongs to none."""

    cluster: str


class Identify(msgspec.Struct, frozen=True, array_like=True, tag=2):
    pass


class Bind(msgspec.Struct, frozen=True, array_like=True, tag=3):
    bootstrap: Bootstrap


class OpenLedgers(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """For the mirrors of ledgers; ``cluster`` as above."""

    cluster: str


Handshake = OpenRaft | Identify | Bind | OpenLedgers


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=1):
    pass


class Introduction(msgspec.Struct, frozen=True, array_like=True, tag=2):
    info: NodeInfo


class Bound(msgspec.Struct, frozen=True, array_like=True, tag=3):
    pass


class HandshakeRefused(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """An error by its stable code (``metadata.failures``)."""

    code: str
    message: str
    detail: int = 0


HandshakeReply = Welcome | Introduction | Bound | HandshakeRefused

_encoder = msgspec.msgpack.Encoder()
_handshake_decoder: msgspec.msgpack.Decoder[Handshake] = msgspec.msgpack.Decoder(Handshake)
_reply_decoder: msgspec.msgpack.Decoder[HandshakeReply] = msgspec.msgpack.Decoder(HandshakeReply)


def encode_handshake(message: Handshake | HandshakeReply) -> bytes:
    return frame(_encoder.encode(message))


def decode_handshake(payload: bytes) -> Handshake:
    return _decode(_handshake_decoder, payload)


def decode_handshake_reply(payload: bytes) -> HandshakeReply:
    return _decode(_reply_decoder, payload)


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"not a message of this version: {error}") from error


# -- connection --------------------------------------------------------------------------------


def _ignore(*_: object) -> None:
    pass


class PeerConnection(asyncio.Protocol):
    """One end of a connection between two brokers: frames in, frames out. Owned by the event loop.

    ``handshake`` is called with the first frame of the other end, ``received`` with those after it; a
    BadFrame that they raise ends the connection. ``lost`` is called once when an open connection is over,
    and never from inside ``write``; ``writable`` when a paused one takes bytes again. ``opened`` is called
    when an accepted connection stands.
    """

    def __init__(
        self,
        handshake: Callable[[PeerConnection, bytes], None],
        *,
        opened: Callable[[PeerConnection], None] = _ignore,
        lost: Callable[[PeerConnection], None] = _ignore,
        greeting: bytes = b"",
        handshake_timeout_s: float = 0.0,
    ) -> None:
        """``greeting``: what the other end sends before its first frame. ``handshake_timeout_s``: how long an
        accepted connection may take for it; without one, the dialer's own deadline counts."""
        self._handshake = handshake
        self._opened = opened
        self.lost = lost
        self.received: Callable[[list[bytes]], None] = _ignore
        """May be set in the handshake, as ``lost`` may."""
        self.writable: Callable[[], None] = _ignore
        self._decoder = FrameDecoder(greeting)
        self._handshake_timeout_s = handshake_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._has_handshake = False
        self._transport: asyncio.WriteTransport | None = None
        self._is_dialing = False
        self._early: list[bytes] = []
        self._gone = asyncio.Event()
        self.is_open = False
        self.paused_at = 0.0
        """Since when the socket takes no more, in the loop's time; 0 while it does."""
        self.reason = ""
        """Why the connection is over."""
        self.is_malformed = False
        """The other end sent what no Sava node sends."""

    async def dial(self, address: str, tls: ssl.SSLContext | None) -> None:
        """Connect. The connection is open only if this returns, and ``lost`` is called in any case after
        that. Raises OSError, and Unavailable for what is no address."""
        host, port = split_address(address)
        self._is_dialing = True
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
        early, self._early = self._early, []
        for data in early:
            self.data_received(data)

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
        if self._handshake_timeout_s:
            self._deadline = asyncio.get_running_loop().call_later(
                self._handshake_timeout_s, self.abort, "no handshake"
            )
        self._opened(self)

    def _open(self, transport: asyncio.WriteTransport) -> None:
        """Raises OSError for a connection that was reset already, which the loop has not reported yet."""
        notice_vanishing(transport)
        transport.set_write_buffer_limits(high=SOCKET_BUFFER_BYTES)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._is_dialing:
            self._early.append(data)
            return
        try:
            payloads = self._decoder.feed(data)
            if payloads and not self._has_handshake:
                self._has_handshake = True
                self._cancel_deadline()
                self._handshake(self, payloads.pop(0))
            if payloads and self.is_open:
                self.received(payloads)
        except BadFrame as error:
            self.is_malformed = True
            self.abort(str(error))
        except Exception as error:
            log.exception("peers: connection dropped, a frame could not be handled")
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
    """Opens connections to the Raft ports of other brokers, with this broker's TLS and under the name of its
    cluster."""

    def __init__(self, tls: ssl.SSLContext | None, cluster: Callable[[], str]) -> None:
        self._tls = tls
        self._cluster = cluster

    async def dial(self, address: str, connection: PeerConnection) -> None:
        """Raises OSError, and Unavailable for what is no address."""
        await connection.dial(address, self._tls)

    async def open_raft(self, address: str, connection: PeerConnection) -> None:
        await self.dial(address, connection)
        connection.write((GREETING + encode_handshake(OpenRaft(self._cluster())),))

    async def open_ledgers(self, address: str, connection: PeerConnection) -> None:
        """Raises OSError."""
        try:
            await self.dial(address, connection)
        except SavaError as error:
            raise ConnectionError(str(error)) from error
        connection.write((GREETING + encode_handshake(OpenLedgers(self._cluster())),))

    async def ask(self, address: str, question: Identify | Bind, *, timeout: float) -> Introduction | Bound:
        """One question on a connection of its own. Raises the error that the other end refused with,
        Unavailable, and Unfinished if the other end may have done what it was asked."""
        answer: asyncio.Future[HandshakeReply] = asyncio.get_running_loop().create_future()

        def replied(_: PeerConnection, payload: bytes) -> None:
            if not answer.done():
                answer.set_result(decode_handshake_reply(payload))

        def lost(connection: PeerConnection) -> None:
            if not answer.done():
                answer.set_exception(ConnectionResetError(connection.reason))

        connection = PeerConnection(replied, lost=lost)
        is_sent = False
        try:
            async with asyncio.timeout(timeout):
                await self.dial(address, connection)
                is_sent = connection.write((GREETING + encode_handshake(question),))
                reply = await answer
        except (TimeoutError, OSError) as error:
            reason = f"node {address} cannot be reached: {error}"
            if isinstance(error, TimeoutError):
                reason = f"node {address} did not answer within {timeout:g} s"
            if is_sent and isinstance(question, Bind):
                raise Unfinished(f"{reason}; it may have bound itself") from error
            raise Unavailable(reason) from error
        finally:
            await connection.close()
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, even when the caller gave up before
        match reply:
            case HandshakeRefused(code=code, message=message, detail=detail):
                raise error_from(code, message, detail)
            case Welcome():
                raise Unavailable(f"node {address} gave an answer to another question")
        return reply


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
