"""Lane: one ordered, lossy, bounded stream of frames to one peer, over one TCP connection.

Frames are handed to the socket at once; only while the peer does not keep up do they wait here, and then go
out together. Nothing is kept for later: Raft repeats what matters, and a message that waited out an outage is
stale. Hence the states:

* connected or connecting: frames queue up to the limits, the newest is dropped beyond them;
* pausing: after a connection broke or could not be made, frames are dropped at once; the first frame after
  the pause connects anew. The pause grows until a connection was welcomed.

A peer that is stopped or cut off without a reset shows as a socket that takes no more: ``expire`` (called by
the transport's sweep, cheaper than a timer per write) breaks the connection then. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, cast

from sava.framing import BadFrame, FrameReader, frames
from sava.peers.raft_wire import (
    GREETING,
    OpenLane,
    Refusal,
    Welcome,
    decode_response,
    encode,
)
from sava.peers.sockets import is_gone, is_refused, settle
from sava.tasks import cancelled

PAUSE_MIN_S = 0.05
PAUSE_MAX_S = 1.0
CONNECT_TIMEOUT_S = 2.0
STUCK_S = 5.0
"""Longer than any pause of a healthy peer, shorter than an operator's patience."""
SOCKET_BUFFER_BYTES = 1 << 20
"""What the loop may hold for a slow socket before frames wait here, where they are counted."""


@dataclass(frozen=True, slots=True)
class LaneLimits:
    frames: int
    size: int


class Connect(Protocol):
    async def __call__(self, protocol: Callable[[], asyncio.Protocol], /) -> object: ...


class Lane(asyncio.Protocol):
    def __init__(
        self,
        connect: Connect,
        cluster: Callable[[], str],
        limits: LaneLimits,
        failed: Callable[[str], None],
        dropped: Callable[[str, int], None],
    ) -> None:
        """``connect`` opens the connection; ``failed`` is told each time it breaks, and why; ``dropped``
        counts by reason."""
        self._connect = connect
        self._cluster = cluster
        self._limits = limits
        self._failed = failed
        self._dropped = dropped
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._transport: asyncio.WriteTransport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._reader = FrameReader()
        self._stuck_since = 0.0
        self._pause_s = PAUSE_MIN_S
        self._resume_at = 0.0
        self._reason = "the connection was closed"
        self.was_refused = False
        """The last attempt to connect found that no process listens."""
        self._is_closing = False
        self._gone = asyncio.Event()
        self._gone.set()

    # -- for the transport -----------------------------------------------------------------------------------

    def offer(self, payloads: Sequence[bytes]) -> bool:
        """Send, or queue, or drop and count. Says whether all were taken."""
        if self._transport is not None and not self._stuck_since:
            if self._write(self._transport, payloads):
                return True
            self._dropped("unreachable", len(payloads))
            return False
        if self._resume_at and self._loop.time() < self._resume_at:
            self._dropped("unreachable", len(payloads))
            return False
        taken = 0
        for payload in payloads:
            if (
                len(self._queue) >= self._limits.frames
                or self._queued_bytes + len(payload) > self._limits.size
            ):
                self._dropped("queue_full", len(payloads) - taken)
                break
            self._queue.append(payload)
            self._queued_bytes += len(payload)
            taken += 1
        if self._transport is None and self._connecting is None and not self._is_closing:
            self._connecting = self._loop.create_task(self._open())
        return taken == len(payloads)

    def expire(self, now: float) -> None:
        if self._transport is not None and self._stuck_since and now - self._stuck_since > STUCK_S:
            self._reason = f"it took nothing for {STUCK_S:g} s"
            self._transport.abort()

    async def close(self) -> None:
        self._is_closing = True
        if self._connecting is not None:
            await cancelled(self._connecting)
            await settle()
        if self._transport is not None:
            self._transport.abort()
        await is_gone(self._gone)

    # -- connection ------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._connect(lambda: self)
        except Exception as error:  # noqa: BLE001 (a name that cannot be one is no OSError)
            self._reason = str(error) or "no answer"
            self.was_refused = is_refused(error)
            self._broke()
        finally:
            self._connecting = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.WriteTransport, transport)
        self._gone.clear()
        if self._is_closing:
            transport.abort()
            return
        self._transport = transport
        self._reader = FrameReader()
        self._stuck_since = 0.0
        self.was_refused = False
        self._reason = "the connection was closed"
        transport.set_write_buffer_limits(high=SOCKET_BUFFER_BYTES)
        transport.write(GREETING + encode(OpenLane(self._cluster())))
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                match decode_response(payload):
                    case Welcome():
                        self._pause_s = PAUSE_MIN_S
                    case Refusal(message=message):
                        self._reason = message
                    case _:
                        raise BadFrame("an answer to another question")
        except BadFrame as error:
            self._reason = str(error)
            if self._transport is not None:
                self._transport.abort()

    def pause_writing(self) -> None:
        self._stuck_since = self._loop.time()

    def resume_writing(self) -> None:
        self._stuck_since = 0.0
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is None and self._gone.is_set():
            return  # given up already, by a write that failed
        if error is not None:
            self._reason = str(error)
        self._transport = None
        self._gone.set()
        self._broke()

    def _flush(self) -> None:
        if self._queue and self._transport is not None:
            waiting, self._queue, self._queued_bytes = self._queue, deque(), 0
            if not self._write(self._transport, waiting):
                self._dropped("unreachable", len(waiting))

    def _write(self, transport: asyncio.WriteTransport, payloads: Iterable[bytes]) -> bool:
        """No error of this connection leaves it: ``offer`` is called from the middle of the node's pump, and
        an error that gets there ends the broker. The connection is given up instead."""
        try:
            transport.write(frames(payloads))
        except Exception as error:  # noqa: BLE001 (uvloop raises RuntimeError for a handle that is closed)
            with suppress(Exception):
                transport.abort()
            # The loop may not tell of it: see ``sockets``. If it does, that comes long before the pause is
            # over, and so before another connection could be taken for this one.
            self.connection_lost(ConnectionError(f"writing failed: {error}"))
            return False
        return True

    def _broke(self) -> None:
        if self._is_closing:
            return
        self._resume_at = self._loop.time() + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
        self._stuck_since = 0.0
        if self._queue:
            self._dropped("unreachable", len(self._queue))
            self._queue.clear()
            self._queued_bytes = 0
        self._failed(self._reason)
