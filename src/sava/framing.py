"""Frames: how brokers cut a stream of bytes into messages.

A frame is its length, the CRC-32C of its payload, the payload. TCP's own checksum lets one in some tens of
thousands of damaged segments through, and a flipped bit in an entry would be replicated faithfully; so a
frame that does not verify ends the connection. A length is believed only up to ``MAX_FRAME_BYTES``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

import google_crc32c

from sava.errors import Outcome, SavaError

MAX_FRAME_BYTES: Final = 72 << 20
"""A record of a log may have 64 MB, and something is written around it."""

_HEAD = struct.Struct("<II")


class BadFrame(SavaError):
    """Bytes that no Sava node sends, or that were damaged on the way."""

    outcome = Outcome.UNKNOWN


def frame(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), google_crc32c.value(payload)) + payload


def frames(payloads: Iterable[bytes]) -> bytes:
    return b"".join(map(frame, payloads))


def frame_parts(head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """A frame whose payload is ``head`` and ``body``, without copying the body."""
    crc = google_crc32c.extend(google_crc32c.value(head), body)
    return _HEAD.pack(len(head) + len(body), crc) + head, body


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
                raise BadFrame("whoever connected does not speak Sava's protocol between brokers")
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
