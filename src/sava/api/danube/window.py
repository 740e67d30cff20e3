"""Window: how far a stream on a reliable topic may be ahead of its client's acks.

HTTP/2's flow control stops a broker when a client's buffers are full, and those hold hundreds of small
messages. A client that works a second on each has what is in its buffers for minutes, while the ack timeout,
thirty seconds by default, takes it for lost: every message would be delivered several times, and be given up
as poison in the end. So the window follows the client. It begins small, grows by one with each ack that
comes promptly (it doubles in the time of a round trip), and shrinks when acks take long:

    fast client   64 ▶ 128 ▶ … ▶ 1000       acks come within milliseconds
    slow client   64 ▶ 32 ▶ 16 ▶ 10         acks take longer than a third of the ack timeout

A message that is not acked leaves the window after that time, so a client that does not ack, or loses one
message in a thousand, is slow and never stands still. If somebody has set the subscription's own limit of
unacked messages to no more than the largest window, that limit alone counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import takewhile
from typing import Final

from sava.topics.specs import SubscriptionSpec

START: Final = 64
LEAST: Final = 10
"""What Danube's own broker sends ahead at most."""
MOST: Final = 1000
PATIENCE: Final = 1 / 3
"""Of the ack timeout: so long a message that is not acked takes room in the window."""
PROMPT: Final = 1 / 30
"""Of the ack timeout: within so long an ack is prompt."""
NO_TIMEOUT_S: Final = 30.0
"""What stands for the ack timeout of a subscription that has none."""


class Window:
    """Of one stream; owned by the event loop. ``grant`` lets so many more messages through; ``spec`` is the
    subscription's, asked for again and again."""

    def __init__(self, grant: Callable[[int], None], spec: Callable[[], SubscriptionSpec]) -> None:
        """The first ``START`` messages are granted already."""
        self._grant = grant
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self._size = START
        self._open = START
        """Messages granted, and not acked or given up."""
        self._written: dict[int, float] = {}
        """Of these, the offsets that were written, oldest first, and when."""
        self._has_acks = False
        self._timer: asyncio.TimerHandle | None = None
        self._settle(0)

    @property
    def size(self) -> int:
        return MOST if self._spec().max_unacked_messages <= MOST else self._size

    def written(self, offset: int) -> None:
        if self._written.pop(offset, None) is not None:
            self._settle(1)  # delivered again, in the place of the first time
        self._written[offset] = self._loop.time()
        if self._timer is None:
            self._set_timer()

    def answered(self, offset: int) -> None:
        """By an ack or a nack, which need not be for this stream."""
        since = self._written.pop(offset, None)
        if since is None:
            return
        self._has_acks = True
        if self._loop.time() - since < PROMPT * self._timeout:
            self._size = min(self._size + 1, MOST)
        self._settle(1)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _settle(self, count: int) -> None:
        self._open -= count
        more = self.size - self._open
        if more > 0:
            self._open += more
            self._grant(more)

    @property
    def _timeout(self) -> float:
        return self._spec().failure_policy.ack_timeout_ms / 1000 or NO_TIMEOUT_S

    def _set_timer(self) -> None:
        oldest = next(iter(self._written.values()))
        self._timer = self._loop.call_at(oldest + PATIENCE * self._timeout, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        before = self._loop.time() - PATIENCE * self._timeout
        late = [offset for offset, _ in takewhile(lambda item: item[1] <= before, self._written.items())]
        for offset in late:
            del self._written[offset]
        if late:
            if self._has_acks:
                self._size = max(self._size // 2, LEAST)
            self._settle(len(late))
        if self._written:
            self._set_timer()
