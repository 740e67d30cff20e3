"""The bytes that brokers send each other about journals, on a connection that was opened for that.

    request   ticket, origin, message      an answer bears the same ticket; 0 on an owner's stream
    answer    ticket, message

A frame's payload is a small msgpack array and, behind it, the bytes of the journal if the message has some:

    length of the array u32 | array | data

So data is neither copied into an array nor out of one: it goes from the log's buffers to the socket.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Final, Protocol, cast

import msgspec

from sava.framing import BadFrame, FrameReader, frame_parts
from sava.ledger.protocol import (
    LedgerAppend,
    Message,
    ReadAnswer,
    StorageId,
    WriteBack,
)

SOCKET_BUFFER_BYTES: Final = 1 << 20
"""What the loop may hold for a slow socket."""

_LENGTH = struct.Struct("<I")


class Request(msgspec.Struct, frozen=True, array_like=True):
    ticket: int
    origin: StorageId
    message: Message


class Answer(msgspec.Struct, frozen=True, array_like=True):
    ticket: int
    message: Message


_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(Request)
_answers: Final = msgspec.msgpack.Decoder(Answer)


def encode(said: Request | Answer) -> tuple[bytes, bytes]:
    """The pieces of a frame."""
    message, data = said.message, b""
    if isinstance(message, (LedgerAppend, WriteBack, ReadAnswer)):
        data = message.data
        said = msgspec.structs.replace(said, message=msgspec.structs.replace(message, data=b""))
    array = _encoder.encode(said)
    return frame_parts(_LENGTH.pack(len(array)) + array, data)


def decode_request(payload: bytes) -> Request:
    """Raises BadFrame."""
    return cast(Request, _decode(_requests, payload))


def decode_answer(payload: bytes) -> Answer:
    """Raises BadFrame."""
    return cast(Answer, _decode(_answers, payload))


def _decode(
    decoder: msgspec.msgpack.Decoder[Request] | msgspec.msgpack.Decoder[Answer], payload: bytes
) -> Request | Answer:
    try:
        (length,) = _LENGTH.unpack_from(payload)
        said = decoder.decode(memoryview(payload)[_LENGTH.size : _LENGTH.size + length])
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"not a message about journals of this version: {error}") from error
    if isinstance(said.message, (LedgerAppend, WriteBack, ReadAnswer)):
        data = payload[_LENGTH.size + length :]
        said = msgspec.structs.replace(said, message=msgspec.structs.replace(said.message, data=data))
    return said


class Door(Protocol):
    """How connections to other brokers are opened; given from above, where TLS and the cluster are known."""

    async def connect(self, address: str, protocol: Callable[[], asyncio.Protocol]) -> None:
        """The protocol hears ``connection_made`` only if this returns. Raises OSError."""
        ...

    def opening(self) -> bytes:
        """What is sent first."""
        ...

    def admitted(self, payload: bytes) -> None:
        """Read the answer to it. Raises what the other side refused with."""
        ...


class Link(asyncio.Protocol):
    """The asking end of one connection. Owned by the event loop."""

    def __init__(self, door: Door, received: Callable[[Answer], None]) -> None:
        """``received`` is called with each answer."""
        self._door = door
        self._received = received
        self._reader = FrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._is_admitted = False
        self.is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the other side lets us in; failed when it does not."""
        self.is_gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the connection is over, with the reason."""
        self.is_paused = False
        self.resumed: Callable[[], None] = lambda: None
        self._reason = ""

    def send(self, request: Request) -> None:
        """Of no effect once the connection is gone. No error of the connection leaves it: the journal's owner
        sends from the middle of an append, and an error there would end the broker."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        parts = encode(request)
        try:
            transport.writelines(parts)
        except Exception as error:  # noqa: BLE001 (uvloop raises RuntimeError for a handle that is closed)
            self.abort(f"writing failed: {error}")
            # The loop may not tell of a handle that it has closed itself; telling twice does no harm.
            self.connection_lost(None)

    def abort(self, reason: str = "it was closed here") -> None:
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.set_write_buffer_limits(high=SOCKET_BUFFER_BYTES)
        self._transport.write(self._door.opening())

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                if self._is_admitted:
                    self._received(decode_answer(payload))
                else:
                    self._door.admitted(payload)
                    self._is_admitted = True
                    if not self.is_ready.done():
                        self.is_ready.set_result(None)
        except Exception as error:  # noqa: BLE001 (a refusal, or bytes that are none of ours)
            self.abort(str(error))

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self.resumed()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        reason = self._reason or (str(error) if error is not None else "the other side closed it")
        if not self.is_ready.done():
            self.is_ready.set_exception(ConnectionError(reason))
            self.is_ready.exception()  # seen: nobody may wait for it any more
        if not self.is_gone.done():
            self.is_gone.set_result(reason)
