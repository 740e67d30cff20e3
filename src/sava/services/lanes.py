"""Lane: one ordered, lossy, bounded stream of frames to one peer.

A lane is one long client-streaming call. Everything queued while a write is under way goes out in the next
message, so the batch grows exactly when the peer or the network is slower than the sender, and a lone frame
never waits for company.

Nothing is kept for later: Raft repeats what matters, and a message that waited out an outage is stale.
Hence the states:

* ``open`` and ``connecting``: frames queue up to the limits, the newest is dropped beyond them;
* ``backoff``: frames are dropped at once, and the first frame after the pause opens a new call.

A peer that is stopped or cut off without a reset shows as a write that never completes; ``expire`` (called
by the transport's sweep, cheaper than a timer per write) cancels the call then. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpc import aio

from sava.proto.raft_pb2 import Frames

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 1.0
WRITE_TIMEOUT_S = 5.0
"""Longer than any pause of a healthy peer, shorter than an operator's patience."""
BATCH_BYTES = 4 << 20
"""A message is closed once it holds this much; a single larger frame still goes, alone."""


@dataclass(frozen=True, slots=True)
class LaneLimits:
    frames: int
    size: int


class Lane:
    def __init__(
        self,
        start_call: Callable[[], Any],
        limits: LaneLimits,
        failed: Callable[[], None],
        dropped: Callable[[str, int], None],
    ) -> None:
        """``start_call`` opens the gRPC call; ``failed`` is told each time it breaks; ``dropped`` counts by
        reason."""
        self._start_call = start_call
        self._limits = limits
        self._failed = failed
        self._dropped = dropped
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._ready = asyncio.Event()
        self._resume_at = 0.0
        self._writing = 0
        self._writing_since = 0.0
        self._call: Any = None
        self._closing = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    def offer(self, frame: bytes) -> bool:
        """Queue a frame, or drop it (and count it) when the lane is full or the peer was just found
        unreachable."""
        if self._resume_at and asyncio.get_running_loop().time() < self._resume_at:
            self._dropped("unreachable", 1)
            return False
        if len(self._queue) >= self._limits.frames or self._queued_bytes + len(frame) > self._limits.size:
            self._dropped("queue_full", 1)
            return False
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        self._ready.set()
        return True

    def expire(self, now: float) -> None:
        if self._writing_since and now - self._writing_since > WRITE_TIMEOUT_S and self._call is not None:
            self._call.cancel()

    async def close(self) -> None:
        self._closing = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff = BACKOFF_MIN_S
        while True:
            await self._ready.wait()
            self._resume_at = 0.0
            wrote = await self._stream()
            backoff = BACKOFF_MIN_S if wrote else min(2 * backoff, BACKOFF_MAX_S)
            self._resume_at = asyncio.get_running_loop().time() + backoff
            self._dropped("unreachable", self._writing + len(self._queue))
            self._writing = 0
            self._queue.clear()
            self._queued_bytes = 0
            self._ready.clear()
            self._failed()

    async def _stream(self) -> bool:
        """Write until the call breaks; tells whether anything was written."""
        wrote = False
        loop = asyncio.get_running_loop()
        self._call = call = self._start_call()
        try:
            while True:
                message = self._take()
                self._writing = len(message.envelopes)
                self._writing_since = loop.time()
                await call.write(message)
                self._writing = 0
                self._writing_since = 0.0
                wrote = True
                if not self._queue:
                    self._ready.clear()
                    await self._ready.wait()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return wrote
        except asyncio.CancelledError:
            # Our own close, or a call cancelled by ``expire``: gRPC reports both as a cancellation.
            if self._closing:
                raise
            return wrote
        finally:
            self._writing_since = 0.0
            self._call = None
            call.cancel()

    def _take(self) -> Frames:
        frames: list[bytes] = []
        size = 0
        while self._queue and (not frames or size + len(self._queue[0]) <= BATCH_BYTES):
            frame = self._queue.popleft()
            size += len(frame)
            frames.append(frame)
        self._queued_bytes -= size
        return Frames(envelopes=frames)
