"""ExpiryClock: the time by which stored things may be deleted, safe against one clock that is wrong.

Retention compares a segment's stamp with now. If both come from brokers' clocks, one wrong clock is enough:

    broker A   stores a segment at noon; it is to be kept for an hour
    broker B   takes the topic over; its clock is a day ahead
    B          the segment is 24 hours old: deleted, together with everything that was stored that day

The object store has a clock, too: it stamps every object that it takes. So now is the *smaller* of the
broker's clock and the store's, and a segment is stamped with the *larger* of the two (``segment``). Whichever
of them is wrong, ahead or behind, a message lives at least as long as its policy says; it may live longer by
the difference.

The metadata store's clock (``clock_ms`` of its machine) is no third witness. It is the largest stamp of any
leader so far: after one leader with a wrong clock it stays ahead.

The store is asked every ``ASK_S``, by a small object. In between the monotonic clock, which no operator sets,
carries its answer on. If the store cannot be asked, it cannot delete either: the caller leaves everything as
it is. Where brokers keep objects in a local directory, the store's clock is the machine's. Then a clock that
is wrong from the start has no witness; one that jumps later has one until the store is asked again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from sava.storage.objectstore import ObjectStore
from sava.storage.staging import store_time_ms

log = logging.getLogger(__name__)

ASK_S: Final = 600.0
TOLERATED_MS: Final = 60_000
"""Clocks that differ by more are reported."""


class ExpiryClock:
    """Of one broker. Owned by the event loop."""

    def __init__(self, store: ObjectStore, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._asked: tuple[int, float] | None = None
        """What the store's clock said, and when that was."""
        self._is_reported = False

    async def now_ms(self) -> int:
        """What is due by this time may be deleted. Raises ObjectStoreUnavailable."""
        now = self._monotonic()
        if self._asked is None or now - self._asked[1] >= ASK_S:
            # The moment after the answer: what the answer took makes the estimate late, and never early.
            self._asked = await store_time_ms(self._store), self._monotonic()
        store_ms, at = self._asked
        store_ms += int((self._monotonic() - at) * 1000)
        own_ms = time.time_ns() // 1_000_000
        self._report(own_ms - store_ms)
        return min(own_ms, store_ms)

    def _report(self, ahead_ms: int) -> None:
        """Once for each time that the clocks part."""
        is_apart = abs(ahead_ms) > TOLERATED_MS
        if is_apart and not self._is_reported:
            log.warning(
                "storage: this broker's clock is %.0f s %s that of the object store %s; nothing is deleted "
                "before both agree that it is due. Set the clock (NTP); `sava doctor` compares all brokers",
                *(abs(ahead_ms) / 1000, "ahead of" if ahead_ms > 0 else "behind", self._store.url),
            )
        self._is_reported = is_apart
