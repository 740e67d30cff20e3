"""Whether the broker at one address is still there, for calls that wait for its answer.

A broker that was stopped, or whose network was cut, closes no connection: a call would wait until gRPC's own
keepalive gives up after fifteen seconds. That time cannot be short, because a ping waits behind the batches
that are on their way on the same connection, and a slow line would be taken for a dead broker. So a second
connection is asked, which carries nothing but pings:

    last answer ── QUIET_S ──▶ open a second connection ── confirm ──▶ the broker is silent
                                  └─ it stands: the broker is there, and only has nothing to say

* **Quiet** is an address from which nothing came for ``QUIET_S`` while a call waits: a producer with batches
  on their way, any consumer or reader, a question.
* **Confirm.** A stopped process accepts connections (its kernel does) but never speaks HTTP/2 on them. It has
  ``CONFIRM_S``, or several times the fastest answer that it ever gave if that is longer, so that a distant
  broker is not taken for a silent one. Each attempt without an answer doubles it, until the broker is heard
  again.
* The second connection stays for as long as the address is quiet, and pings once a second; busy clients have
  none.

When a broker is silent, all calls to it end, and so does the connection: their owners look the topic up
elsewhere. What was sent and has no receipt is sent again with its sequence, so a broker that was merely slow
stores nothing twice. Owned by one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import grpc
from grpc import aio

from sava.tasks import cancelled, spawn

QUIET_S: Final = 1.0
CONFIRM_S: Final = 1.0
STRANGER_S: Final = 2.5
"""To confirm with a broker that has never answered: nothing is known of the way to it."""
LONGEST_CONFIRM_S: Final = 5.0
ANSWERS: Final = 6
"""Round trips that a new connection may take: TCP, TLS, HTTP/2, and one packet that is lost."""
TICK_S: Final = 0.25
LATE_S: Final = 0.25
"""A tick that is later than this shows that this process stood still, and could hear nothing."""
KEEP_S: Final = 10.0
"""For a second connection after an answer: traffic that comes and goes would open one each time."""
SHUN_S: Final = 5.0
"""How long a silent address is asked last."""

Options = Sequence[tuple[str, int]]
PINGS: Final[Options] = (
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
)


class WatchedCall:
    """One call that waits for a broker."""

    def __init__(self, liveness: Liveness, call: Any, owes: Callable[[], bool]) -> None:
        self.liveness = liveness
        self.call = call
        self.owes = owes
        """Whether the broker owes it an answer now."""
        self.is_given_up = False

    def was_given_up(self) -> bool:
        """For an owner that was cancelled: whether that is because the broker is silent. A call that is
        cancelled cancels the task that awaits it."""
        task = asyncio.current_task()
        return self.is_given_up and (task is None or not task.cancelling())


class Liveness:
    def __init__(
        self, target: str, open_channel: Callable[[str, Options], aio.Channel], silent: Callable[[str], None]
    ) -> None:
        """``silent`` is called with the target when it does not answer; all calls were given up then."""
        self._target = target
        self._open_channel = open_channel
        self._silent = silent
        self._loop = asyncio.get_running_loop()
        self._waiting: set[WatchedCall] = set()
        self._task: asyncio.Task[None] | None = None
        self._probe: aio.Channel | None = None
        self._probed_at = 0.0
        self._heard_at = self._quiet_since = self._loop.time()
        self._fastest: float | None = None
        self._failures = 0
        self._shunned_until = 0.0

    @property
    def is_silent(self) -> bool:
        """Whether the broker gave no answer a moment ago."""
        return self._loop.time() < self._shunned_until

    def heard(self) -> None:
        """Anything came from the broker."""
        self._heard_at = self._loop.time()
        self._failures = 0
        self._shunned_until = 0.0

    def answered(self, seconds: float) -> None:
        """The broker has answered a question within this time."""
        self.heard()
        self._fastest = seconds if self._fastest is None else min(self._fastest, seconds)

    @contextmanager
    def watch(self, call: Any, owes: Callable[[], bool]) -> Iterator[WatchedCall]:
        """Cancel the call if the broker falls silent while it owes an answer to any call."""
        waiting = WatchedCall(self, call, owes)
        self._waiting.add(waiting)
        if self._task is None or self._task.done():
            self._task = spawn(self._run(), name=f"liveness of {self._target}")
        try:
            yield waiting
        finally:
            self._waiting.discard(waiting)

    async def close(self) -> None:
        await cancelled(self._task)
        await self._end_probe()

    async def _run(self) -> None:
        self._quiet_since = self._loop.time()
        while True:
            if not self._waiting:
                await self._end_probe()
            if not self._waiting:
                return
            due = self._loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            if now - due > LATE_S or not self._is_owed(now):
                self._quiet_since = now
            if now - max(self._heard_at, self._quiet_since) < QUIET_S:
                if self._probe is not None and now - self._probed_at > KEEP_S:
                    await self._end_probe()
            elif not await self._is_there():
                self._give_up()

    def _is_owed(self, now: float) -> bool:
        """Whether to measure the quiet at all. After a recent answer it need not be known."""
        return now - self._heard_at < TICK_S or any(each.owes() for each in self._waiting)

    async def _is_there(self) -> bool:
        asked_at = self._probed_at = self._loop.time()
        if self._probe is None:
            self._probe = self._open_channel(self._target, PINGS)
        if self._probe.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
            return True
        try:
            async with asyncio.timeout(self._confirm_s):
                await self._probe.channel_ready()
        except TimeoutError:
            return self._heard_at >= asked_at
        return True

    @property
    def _confirm_s(self) -> float:
        wanted = STRANGER_S if self._fastest is None else max(CONFIRM_S, ANSWERS * self._fastest)
        return min(wanted * 2.0**self._failures, LONGEST_CONFIRM_S)

    def _give_up(self) -> None:
        self._failures = min(self._failures + 1, 8)
        self._shunned_until = self._loop.time() + SHUN_S
        waiting, self._waiting = self._waiting, set()
        for each in waiting:
            each.is_given_up = True
            each.call.cancel()
        self._silent(self._target)

    async def _end_probe(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None:
            await probe.close(None)
