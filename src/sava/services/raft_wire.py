"""The bytes on the Raft port: a greeting, an opening, then frames.

A connection begins with eight bytes that nothing else sends, then one *opening* that says what it is for:

    Lane(cluster)     answered by Welcome; then envelopes, one per frame, in this direction only
    Identify          answered by Introduction
    Bind(bootstrap)   answered by Bound

and any of them may be answered by Refusal, after which the connection is closed.

A frame is its length, the CRC-32C of its payload, the payload. TCP's own checksum lets one in some tens of
thousands of damaged segments through, and a flipped bit in an entry would be replicated faithfully; so a
frame that does not verify ends the connection. A length is believed only up to ``MAX_FRAME_BYTES``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, TypeVar

import google_crc32c
import msgspec

from sava.errors import SavaError
from sava.metadata.peer import Bootstrap
from sava.metadata.transport import NodeInfo

GREETING: Final = b"SAVARFT1"
MAX_FRAME_BYTES: Final = 64 << 20

_HEAD = struct.Struct("<II")
T = TypeVar("T")


class BadFrame(SavaError):
    """Bytes that no Sava node sends, or that were damaged on the way."""


class OpenLane(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """``cluster`` is empty while the sender belongs to none."""

    cluster: str


class Identify(msgspec.Struct, frozen=True, array_like=True, tag=2):
    pass


class Bind(msgspec.Struct, frozen=True, array_like=True, tag=3):
    bootstrap: Bootstrap


Opening = OpenLane | Identify | Bind


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=1):
    pass


class Introduction(msgspec.Struct, frozen=True, array_like=True, tag=2):
    info: NodeInfo


class Bound(msgspec.Struct, frozen=True, array_like=True, tag=3):
    pass


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """An error by its stable code (``metadata.failures``)."""

    code: str
    message: str
    detail: int = 0


Response = Welcome | Introduction | Bound | Refusal

_encoder = msgspec.msgpack.Encoder()
_opening_decoder: msgspec.msgpack.Decoder[Opening] = msgspec.msgpack.Decoder(Opening)
_response_decoder: msgspec.msgpack.Decoder[Response] = msgspec.msgpack.Decoder(Response)


def frame(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), google_crc32c.value(payload)) + payload


def frames(payloads: Iterable[bytes]) -> bytes:
    return b"".join(map(frame, payloads))


def encode(message: Opening | Response) -> bytes:
    return frame(_encoder.encode(message))


def decode_opening(payload: bytes) -> Opening:
    return _decode(_opening_decoder, payload)


def decode_response(payload: bytes) -> Response:
    return _decode(_response_decoder, payload)


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(f"not a message of this version: {error}") from error


class FrameReader:
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
                raise BadFrame("whoever connected does not speak Sava's Raft protocol")
            if len(head) < len(self._expected):
                self._keep(data, 0)
                return []
            at, self._expected = len(head), b""
        return self._split(data, at)

    def _split(self, data: bytes, at: int) -> list[bytes]:
        payloads, size, wanted = [], len(data), 0
        while at + _HEAD.size <= size:
            length, crc = _HEAD.unpack_from(data, at)
            if length > MAX_FRAME_BYTES:
                raise BadFrame(f"a frame claims {length} bytes, more than {MAX_FRAME_BYTES}")
            end = at + _HEAD.size + length
            if end > size:
                wanted = end - at
                break
            payload = data[at + _HEAD.size : end]
            if google_crc32c.value(payload) != crc:
                raise BadFrame("a frame was damaged on the way")
            payloads.append(payload)
            at = end
        self._keep(data[at:], wanted)
        return payloads

    def _keep(self, rest: bytes, wanted: int) -> None:
        self._parts = [rest] if rest else []
        self._held = len(rest)
        self._wanted = wanted
