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
import logging
import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Final, Protocol, cast

import msgspec

from sava.errors import SavaError
from sava.ledger.protocol import (
    Fence,
    Join,
    LedgerAppend,
    LedgerId,
    Message,
    ReadAnswer,
    StorageId,
    Trim,
    WriteBack,
)
from sava.ledger.registry import LiveBrokers, PeerUnreachable
from sava.ledger.store import Reply
from sava.peer_connection import BadFrame, Dialer, PeerConnection, frame_parts
from sava.raft.types import NodeId
from sava.tasks import spawn

log = logging.getLogger(__name__)

CONNECT_S: Final = 2.0
MAX_CHECKS: Final = 256
"""Fences of one session that wait for the metadata store."""

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


class Claims(Protocol):
    """What a session must know of the records of ledgers. A Protocol, as the records are below and their
    store is not there in tests of the wire."""

    async def is_claimed(self, ledger: LedgerId, epoch: int, origin: StorageId) -> bool: ...


class LedgerSession:
    """A connection that another broker has opened here: it takes requests in order, gives them to this
    broker's disk, and sends back what the disk answers, when that becomes true. Owned by the event loop.

    Which broker it is, the handshake has proved. It may write its own ledgers alone. It may end and repair
    those of others when a recovery has claimed them, under the epoch that their record in the metadata store
    names: a fence is a promise for good, and one for a made-up epoch would keep the ledger from every
    recovery to come. This node's copy of the record is enough if it shows the claim, since epochs only grow;
    if not, it may be behind, and the store is asked. A fence that cannot be checked is not answered, and
    asked again."""

    def __init__(self, holder: Holder, write: Write, broker: int, claims: Claims) -> None:
        self._holder = holder
        self._write = write
        self._broker = broker
        self._claims = claims
        self._stream: Reply = partial(self._answer, 0)
        self._is_closed = False
        self._checking: set[asyncio.Task[None]] = set()

    def receive(self, payloads: Sequence[bytes]) -> None:
        """Raises BadFrame: the connection is of no use then."""
        for payload in payloads:
            request = decode_request(payload)
            message = request.message
            reply = partial(self._answer, request.ticket) if request.ticket else self._stream
            if isinstance(message, (Join, LedgerAppend, Trim)):
                if message.ledger.broker != self._broker:
                    raise BadFrame(
                        f"broker {self._broker} writes ledger {message.ledger}, which is not its own"
                    )
            elif isinstance(message, WriteBack) and message.epoch < 1:
                raise BadFrame(f"broker {self._broker} repairs ledger {message.ledger} without a claim")
            elif isinstance(message, Fence):
                self._check(request, message, reply)
                continue
            self._holder.receive(request.origin, message, reply)

    def _check(self, request: LedgerRequest, fence: Fence, reply: Reply) -> None:
        if len(self._checking) >= MAX_CHECKS:
            return  # it is asked again
        task = spawn(self._fence(request.origin, fence, reply), name="checking a fence")
        self._checking.add(task)
        task.add_done_callback(self._checking.discard)

    async def _fence(self, origin: StorageId, fence: Fence, reply: Reply) -> None:
        try:
            is_claimed = await self._claims.is_claimed(fence.ledger, fence.epoch, origin)
        except (SavaError, TimeoutError) as error:
            log.info("ledgers: a fence is not answered ledger=%s error=%s", fence.ledger, error)
            return
        if not is_claimed:
            log.warning(
                "ledgers: a fence without a claim is refused ledger=%s epoch=%d broker=%d",
                *(fence.ledger, fence.epoch, self._broker),
            )
        elif not self._is_closed:
            self._holder.receive(origin, fence, reply)

    def _answer(self, ticket: int, message: Message) -> None:
        if not self._is_closed:
            self._write(encode(LedgerAnswer(ticket, message)))

    def closed(self) -> None:
        self._is_closed = True
        for task in self._checking:
            task.cancel()
        self._holder.forget_owner(self._stream)


class LedgerConnection:
    """A connection to another broker's disk, from its opening to its end. Owned by the event loop."""

    def __init__(
        self, received: Callable[[LedgerAnswer], None], resumed: Callable[[], None] | None = None
    ) -> None:
        """``received`` is called with each answer, ``resumed`` when a paused connection takes more."""
        self._answered = received
        self.connection = PeerConnection(lost=self._lost)
        self.connection.received = self._receive
        if resumed is not None:
            self.connection.writable = resumed
        self.is_gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the connection is over, with the reason."""

    async def open(self, dialer: Dialer, address: str, broker: int) -> None:
        """Connect to ``broker``, and be accepted there, within ``CONNECT_S``. Raises OSError,
        TimeoutError."""
        async with asyncio.timeout(CONNECT_S):
            await dialer.open_ledgers(address, NodeId(broker), self.connection)

    def send(self, request: LedgerRequest) -> None:
        """Of no effect once the connection is gone, and never raises: the journal's owner sends from the
        middle of an append."""
        if self.connection.is_open:
            self.connection.write(encode(request))

    def _receive(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            self._answered(decode_answer(payload))

    def _lost(self, connection: PeerConnection) -> None:
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
        self._connections: dict[tuple[str, int], _Asked] = {}
        self._connecting: dict[tuple[str, int], asyncio.Lock] = {}

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
        connection = await self._connected(live.address, live.broker)
        ticket = next(self._tickets)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        connection.waiting[ticket] = future
        try:
            connection.send(LedgerRequest(ticket, origin, message))
            return await future
        finally:
            connection.waiting.pop(ticket, None)

    async def _connected(self, address: str, broker: int) -> _Asked:
        key = address, broker
        async with self._connecting.setdefault(key, asyncio.Lock()):
            connection = self._connections.get(key)
            if connection is None or connection.is_gone.done():
                connection = _Asked()
                await connection.open(self._dialer, address, broker)
                self._connections[key] = connection
            return connection

    async def close(self) -> None:
        connections, self._connections = list(self._connections.values()), {}
        await asyncio.gather(*(each.connection.close() for each in connections))
