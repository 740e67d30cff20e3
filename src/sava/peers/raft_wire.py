"""The bytes on the Raft port: a greeting, an opening, then frames.

A connection begins with eight bytes that nothing else sends, then one *opening* that says what it is for:

    Lane(cluster)     answered by Welcome; then envelopes, one per frame, in this direction only
    Journals(cluster) answered by Welcome; then requests in this direction and answers in the other
                      (``mirroring.wire``)
    Identify          answered by Introduction
    Bind(bootstrap)   answered by Bound

and any of them may be answered by Refusal, after which the connection is closed.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from sava.framing import BadFrame, frame
from sava.metadata.peer import Bootstrap, NodeInfo

GREETING: Final = b"SAVARFT1"

T = TypeVar("T")


class OpenLane(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """``cluster`` is empty while the sender belongs to none."""

    cluster: str


class Identify(msgspec.Struct, frozen=True, array_like=True, tag=2):
    pass


class Bind(msgspec.Struct, frozen=True, array_like=True, tag=3):
    bootstrap: Bootstrap


class OpenJournals(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """For the copies of journals; ``cluster`` as above."""

    cluster: str


Opening = OpenLane | Identify | Bind | OpenJournals


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=1):
    pass


class Introduction(msgspec.Struct, frozen=True, array_like=True, tag=2):
    info: NodeInfo


class Bound(msgspec.Struct, frozen=True, array_like=True, tag=3):
    pass


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """An error by its stable code (``metadata.peer``)."""

    code: str
    message: str
    detail: int = 0


Response = Welcome | Introduction | Bound | Refusal

_encoder = msgspec.msgpack.Encoder()
_opening_decoder: msgspec.msgpack.Decoder[Opening] = msgspec.msgpack.Decoder(Opening)
_response_decoder: msgspec.msgpack.Decoder[Response] = msgspec.msgpack.Decoder(Response)


def encode(message: Opening | Response) -> bytes:
    return frame(_encoder.encode(message))


def decode_opening(payload: bytes) -> Opening:
    return _decode(_opening_decoder, payload)


def decode_response(payload: bytes) -> Response:
    return _decode(_response_decoder, payload)


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"not a message of this version: {error}") from error
