"""CleanMarker: an idle topic with all of its messages in segments says so, and any broker may continue it.

While a topic is dirty, only its owner's disk knows where it ends: when the owner dies, the topic waits for
that disk, even if nothing was published for a week. A *clean* topic has nothing there (``is_clean`` in its
state), and the owner keeps to that: it accepts nothing before it has marked the topic dirty.

    A   marks it clean at 22 ─▶ dies                     B   claims: clean, end 22 ─▶ continues at 22
    A   clean at 22 ─▶ first append: dirty ─▶ accepts 22 ─▶ dies   B   claims: dirty ─▶ TailElsewhere
    A   clean at 22 ─▶ cut off       B   claims          A   first append: dirty ─▶ Fenced, nothing accepted

Claim and ``mark_dirty`` compare the same record, so of the two one happens. What is not known counts as
clean: a ``mark_clean`` of unknown outcome may take effect at any time, and another broker would begin at the
same offset. The ``mark_dirty`` that comes before the next append writes the record even if it says 'dirty',
and whatever of a ``mark_clean`` is still on its way finds it changed. For the same reason a topic that is
opened without a tail begins clean here, whatever the record says: an earlier opening under the same epoch may
have left a ``mark_clean`` behind.

**In order.** Appends that find the topic clean wait in a line; one ``mark_dirty`` serves all. The line stands
until its last one has gone on:

    a, b wait ─▶ dirty is written ─▶ c comes: must not run before a and b, which have yet to run

**When.** A timer, set when an upload has caught up, and after a ``mark_dirty`` (of which nothing may come:
the append was refused). An append does not touch it. What it finds when it is due tells: not everything in
segments, so an upload will set it again; or all of it, and then nothing was appended since it was set. A
clean topic has no timer, and a thousand of them cost nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from enum import Enum
from typing import Any, Final

from sava.errors import HostError, RetryableError
from sava.storage.catalog import Catalog
from sava.storage.errors import Fenced, MarkDirtyFailed
from sava.storage.types import TopicState
from sava.tasks import Backoff

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


class _Record(Enum):
    """What the topic's state says, as far as is known here."""

    DIRTY = "dirty"
    CLEAN = "clean"
    IN_DOUBT = "in doubt"


class CleanMarker:
    """Marks one topic clean and dirty, for its TopicLog. Owned by the event loop; at most one write is on its
    way."""

    def __init__(
        self,
        catalog: Catalog,
        state: TopicState,
        *,
        has_tail: bool,
        after_s: float,
        is_stored: Callable[[], bool],
        is_quiet: Callable[[], bool],
        fence: Callable[[Fenced], None],
    ) -> None:
        """``is_stored``: all that is durable is in segments. ``is_quiet``: nothing is on its way to become
        durable."""
        self._catalog = catalog
        self._epoch = state.epoch
        self._after_s = after_s
        self._is_stored = is_stored
        self._is_quiet = is_quiet
        self._fence = fence
        self._record = _Record.DIRTY if has_tail else _Record.IN_DOUBT
        if state.is_clean:
            self._record = _Record.CLEAN
        self.is_on = self._record is not _Record.DIRTY
        """True: an append must ``mark_dirty`` first."""
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._retry = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._is_closed = False
        if self._record is _Record.IN_DOUBT:
            self.soon()

    async def mark_dirty(self) -> None:
        """Return when the record says that the topic is dirty, in the order of the calls; what follows
        without an await in between is in that order, too. Returns at once when the topic is closed: look.
        Raises what kept the record from being written, and had no effect."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._advance()
        try:
            await waiter
        finally:
            with suppress(ValueError):
                self._waiters.remove(waiter)
            self._advance()

    def _advance(self) -> None:
        """The line moves on by one, or the write that it waits for begins, or there is no line."""
        if not self._waiters:
            self.is_on = self._record is not _Record.DIRTY
        elif self._record is _Record.DIRTY:
            if not self._waiters[0].done():
                self._waiters[0].set_result(None)
        elif self._task is None:
            self._start(self._write_dirty())

    def soon(self) -> None:
        """Everything is in segments, or may be: mark it clean, unless something comes in the meantime."""
        self._arm(self._after_s)

    def _arm(self, pause_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._record is _Record.CLEAN or self._task is not None or not self._is_stored():
            return
        if self._waiters or not self._is_quiet():
            self.soon()  # nothing may come of it
            return
        before, self._record = self._record, _Record.IN_DOUBT
        self.is_on = True
        self._start(self._write_clean(before))

    # -- writing the record --------------------------------------------------------------------

    def _start(self, writing: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(writing, name=f"sava-clean-{self._catalog.topic.path}")

    async def _write_clean(self, before: _Record) -> None:
        try:
            await self._catalog.mark_clean(epoch=self._epoch)
        except Fenced as error:
            self._end(error)
            return
        except Exception as error:  # noqa: BLE001 (whatever it is, appends must not wait without end)
            if isinstance(error, RetryableError):
                self._record = before  # it had no effect
            _log.warning(
                "clean marker: write failed, retrying topic=%s epoch=%d error=%s",
                self._catalog.topic.path,
                self._epoch,
                error,
            )
            self._again()
        else:
            self._record = _Record.CLEAN
            self._retry.reset()
        self._task = None
        self._advance()

    async def _write_dirty(self) -> None:
        try:
            await self._catalog.mark_dirty(epoch=self._epoch)
        except Fenced as error:
            self._end(error)
            return
        except Exception as error:  # noqa: BLE001
            if not isinstance(error, RetryableError):
                self._record = _Record.IN_DOUBT
            if self._record is _Record.IN_DOUBT:
                self._again()
            self._refuse(error)
        else:
            self._record = _Record.DIRTY
            self._retry.reset()
            self.soon()
        self._task = None
        self._advance()

    def _refuse(self, error: Exception) -> None:
        """Fail all appends that wait now. The write may take effect or not; nothing was appended, so a
        producer may repeat them."""
        if not isinstance(error, RetryableError | HostError):
            cause, error = (
                error,
                MarkDirtyFailed(f"topic {self._catalog.topic.path} cannot be marked dirty: {error}"),
            )
            error.__cause__ = cause
        refused, self._waiters = self._waiters, deque()
        for waiter in refused:
            if not waiter.done():
                waiter.set_exception(error)

    def _again(self) -> None:
        """After a pause that grows, and is not the same for all: topics that lost the metadata store together
        do not come back in step."""
        self._arm(self._retry.next())

    # -- ending ----------------------------------------------------------------------------------

    def _end(self, error: Fenced) -> None:
        """(Closes this, too.)"""
        self._task = None
        self._fence(error)

    def close(self) -> None:
        """What is being written may take effect: it is true. The waiting appends run, and find the topic
        closed."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
