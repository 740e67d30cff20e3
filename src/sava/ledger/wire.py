"""What brokers send each other about ledgers, on a connection of the Raft port that was opened for that.

    request   ticket, origin, message      an answer has the same ticket; 0 on an owner's stream
    answer    ticket, message

A frame's payload is a small msgpack array and, behind it, the bytes of the journal if the message has some:

    length of the array u32 | array | data

So data is neither copied into an array nor out of one: it goes from the log's buffers to the socket.

``LedgerSession`` is the end that accepted the connection, ``LedgerConnection`` the end that opened it.
``PeerClient`` asks a disk one question at a time (``ports.Peers``), for the recovery of a journal.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Final, Protocol, cast

import msgspec

from sava.ledger.protocol import (
    LedgerAppend,
    Message,
    ReadAnswer,
    StorageId,
    WriteBack,
)
from sava.ledger.registry import LiveBrokers, PeerUnreachable
from sava.ledger.store import Reply
from sava.metadata.peer import error_from
from sava.peer_connection import (
    BadFrame,
    Dialer,
    HandshakeRefused,
    PeerConnection,
    Welcome,
    decode_handshake_reply,
    frame_parts,
)

CONNECT_S: Final = 2.0

_LENGTH = struct.Struct("<I")

Write = Callable[[Sequence[bytes]], object]
"""To the other side; of no effect once the connection is gone."""


class LedgerRequest(msgspec.Struct, frozen=True, array_like=True):
    ticket: int
    origin: StorageId
    message: Message


class LedgerAnswer(msgspec.Struct, frozen=True, array_like=True):
    ticket: int
    message: Message


_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(LedgerRequest)
_answers: Final = msgspec.msgpack.Decoder(LedgerAnswer)


def encode(said: LedgerRequest | LedgerAnswer) -> tuple[bytes, bytes]:
    """The pieces of a frame."""
    message, data = said.message, b""
    if isinstance(message, (LedgerAppend, WriteBack, ReadAnswer)):
        data = message.data
        said = msgspec.structs.replace(said, message=msgspec.structs.replace(message, data=b""))
    array = _encoder.encode(said)
    return frame_parts(_LENGTH.pack(len(array)) + array, data)


def decode_request(payload: bytes) -> LedgerRequest:
    """Raises BadFrame."""
    return cast(LedgerRequest, _decode(_requests, payload))


def decode_answer(payload: bytes) -> LedgerAnswer:
    """Raises BadFrame."""
    return cast(LedgerAnswer, _decode(_answers, payload))


def _decode(
    decoder: msgspec.msgpack.Decoder[LedgerRequest] | msgspec.msgpack.Decoder[LedgerAnswer], payload: bytes
) -> LedgerRequest | LedgerAnswer:
    try:
        (length,) = _LENGTH.unpack_from(payload)
        said = decoder.decode(memoryview(payload)[_LENGTH.size : _LENGTH.size + length])
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"not a message about ledgers of this version: {error}") from error
    if isinstance(said.message, (LedgerAppend, WriteBack, ReadAnswer)):
        data = payload[_LENGTH.size + length :]
        said = msgspec.structs.replace(said, message=msgspec.structs.replace(said.message, data=data))
    return said


class Holder(Protocol):
    """This broker's disk, with all that it holds of ledgers."""

    def receive(self, origin: StorageId, message: Message, reply: Reply) -> None: ...

    def forget_owner(self, reply: Reply) -> None: ...


class LedgerSession:
    """A connection that another broker has opened here: it takes requests in order, gives them to this
    broker's disk, and sends back what the disk answers, when that becomes true. Owned by the event loop."""

    def __init__(self, holder: Holder, write: Write) -> None:
        self._holder = holder
        self._write = write
        self._stream: Reply = partial(self._answer, 0)
        self._is_closed = False

    def receive(self, payloads: Sequence[bytes]) -> None:
        """Raises BadFrame: the connection is of no use then."""
        for payload in payloads:
            request = decode_request(payload)
            reply = partial(self._answer, request.ticket) if request.ticket else self._stream
            self._holder.receive(request.origin, request.message, reply)

    def _answer(self, ticket: int, message: Message) -> None:
        if not self._is_closed:
            self._write(encode(LedgerAnswer(ticket, message)))

    def closed(self) -> None:
        self._is_closed = True
        self._holder.forget_owner(self._stream)


class LedgerConnection:
    """A connection to another broker's disk, from its opening to its end. Owned by the event loop."""

    def __init__(
        self, received: Callable[[LedgerAnswer], None], resumed: Callable[[], None] | None = None
    ) -> None:
        """``received`` is called with each answer, ``resumed`` when a paused connection takes more."""
        self._answered = received
        self.connection = PeerConnection(self._welcomed, lost=self._lost)
        self.connection.received = self._receive
        if resumed is not None:
            self.connection.writable = resumed
        self._is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the connection is over, with the reason."""

    async def open(self, dialer: Dialer, address: str) -> None:
        """Connect and be accepted by the other side, within ``CONNECT_S``. Raises OSError, TimeoutError."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await dialer.open_ledgers(address, self.connection)
                await self._is_ready
        except BaseException:
            self.connection.abort()
            raise

    def send(self, request: LedgerRequest) -> None:
        """Of no effect once the connection is gone, and never raises: the journal's owner sends from the
        middle of an append."""
        if self.connection.is_open:
            self.connection.write(encode(request))

    def _welcomed(self, connection: PeerConnection, payload: bytes) -> None:
        match decode_handshake_reply(payload):
            case Welcome():
                if not self._is_ready.done():
                    self._is_ready.set_result(None)
            case HandshakeRefused(code=code, message=message, detail=detail):
                connection.abort(str(error_from(code, message, detail)))
            case _:
                raise BadFrame("an answer to another question")

    def _receive(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            self._answered(decode_answer(payload))

    def _lost(self, connection: PeerConnection) -> None:
        if not self._is_ready.done():
            self._is_ready.set_exception(ConnectionError(connection.reason))
            self._is_ready.exception()  # seen: its caller may have given up
        if not self.is_gone.done():
            self.is_gone.set_result(connection.reason)


class _Asked(LedgerConnection):
    """A connection with the questions that wait for their answers."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.waiting: dict[int, asyncio.Future[Message]] = {}
        self.is_gone.add_done_callback(self._fail)

    def _answer(self, answer: LedgerAnswer) -> None:
        future = self.waiting.pop(answer.ticket, None)
        if future is not None and not future.done():
            future.set_result(answer.message)

    def _fail(self, reason: asyncio.Future[str]) -> None:
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(ConnectionError(reason.result()))
        self.waiting.clear()


class PeerClient:
    """Asks disks, this broker's own included, one question and one answer at a time. Owned by the event loop.

    One connection leads to each broker that was asked, for as long as questions come. Several may be on their
    way; each has a deadline. A question to this broker's own disk takes no connection.
    """

    def __init__(self, dialer: Dialer, live_brokers: LiveBrokers, own: StorageId, holder: Holder) -> None:
        self._dialer = dialer
        self._live_brokers = live_brokers
        self._own = own
        self._holder = holder
        self._tickets = count(1)
        self._connections: dict[str, _Asked] = {}
        self._connecting: dict[str, asyncio.Lock] = {}

    async def ask(
        self, storage: StorageId, message: Message, *, origin: StorageId, timeout: float
    ) -> Message:
        try:
            async with asyncio.timeout(timeout):
                if storage == self._own:
                    return await self._ask_here(message, origin)
                return await self._ask_there(storage, message, origin)
        except TimeoutError as error:
            raise PeerUnreachable(f"disk {storage} did not answer within {timeout:g} s") from error
        except OSError as error:
            raise PeerUnreachable(f"disk {storage} cannot be reached: {error}") from error

    async def _ask_here(self, message: Message, origin: StorageId) -> Message:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def reply(answer: Message) -> None:
            if not future.done():
                future.set_result(answer)

        self._holder.receive(origin, message, reply)
        return await future

    async def _ask_there(self, storage: StorageId, message: Message, origin: StorageId) -> Message:
        live = self._live_brokers.find(storage)
        if live is None:
            raise PeerUnreachable(f"no registered broker has the disk {storage}")
        connection = await self._connected(live.address)
        ticket = next(self._tickets)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        connection.waiting[ticket] = future
        try:
            connection.send(LedgerRequest(ticket, origin, message))
            return await future
        finally:
            connection.waiting.pop(ticket, None)

    async def _connected(self, address: str) -> _Asked:
        async with self._connecting.setdefault(address, asyncio.Lock()):
            connection = self._connections.get(address)
            if connection is None or connection.is_gone.done():
                connection = _Asked()
                await connection.open(self._dialer, address)
                self._connections[address] = connection
            return connection

    async def close(self) -> None:
        connections, self._connections = list(self._connections.values()), {}
        await asyncio.gather(*(each.connection.close() for each in connections))
