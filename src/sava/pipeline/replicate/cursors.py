"""Cursors: tells the source what it needs not keep for a link any more.

The source keeps from retention what is not below the link's cursor (made and removed by its leader, see
``sava.replication.cursors``). Two things hold it: messages that the target may still have to be sent, and
messages of which it has not heard that they are acked, where subscriptions are replicated, for what is acked
of a copy is read off the copy.

Nobody waits for this: a cursor that is late keeps a little more for a little longer. So a thread sends the
latest offsets once a second, those that have changed, and what fails is sent again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Final, Protocol

from sava.client.errors import ClientError
from sava.storage.link_cursors import link_cursor

log = logging.getLogger(__name__)

EVERY_S: Final = 1.0
TIMEOUT_S: Final = 5.0
AGAIN_S: Final = 60.0
"""When nothing has changed for so long, all is sent again: a cursor may have been removed and made anew."""
MISSING: Final = "subscription_unknown"
"""The leader has not made it yet, or has removed it by now."""


class Advances(Protocol):
    """``pipeline.link.Link``."""

    def advance_all(
        self, subscription: str, offsets: Mapping[str, int], *, timeout_s: float
    ) -> dict[str, ClientError]: ...


class Cursors:
    """Any thread may call; its own thread sends, from the first offset on until ``close``."""

    def __init__(self, link: Advances, remote: str, *, every_s: float = EVERY_S) -> None:
        self._link = link
        self._remote = remote
        self._every_s = every_s
        self._guard = threading.Lock()
        self._copied: dict[str, int] = {}
        self._holds: dict[str, dict[str, int]] = {}
        self._sent: dict[str, int] = {}
        self._failing: dict[str, str] = {}
        self._changed = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def advance(self, name: str, offset: int) -> None:
        """Everything of the partition before the offset is kept at the target. Returns at once."""
        with self._guard:
            if offset <= self._copied.get(name, 0):
                return
            self._copied[name] = offset
            self._wake()

    def hold(self, name: str, subscription: str, offset: int | None) -> None:
        """What the subscription has acked from this offset on may not have been said at the target. None:
        nothing is to be said any more."""
        with self._guard:
            holds = self._holds.setdefault(name, {})
            if offset is None:
                holds.pop(subscription, None)
            else:
                holds[subscription] = offset
            self._wake()

    def begin_again(self, name: str) -> None:
        """It is copied once more: what was kept at the target counts no longer."""
        with self._guard:
            for known in (self._copied, self._sent):
                known.pop(name, None)

    def forget(self, name: str) -> None:
        """The partition is not copied any more; one of the same name is another."""
        with self._guard:
            for known in (self._copied, self._holds, self._sent, self._failing):
                known.pop(name, None)

    def close(self) -> None:
        """What was not sent is sent by whoever copies next."""
        self._is_closed.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        self._changed.set()
        if self._thread is None and not self._is_closed.is_set():
            self._thread = threading.Thread(target=self._run, name=f"cursors {self._remote}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            if not self._changed.wait(AGAIN_S):
                with self._guard:
                    self._sent.clear()
            self._changed.clear()
            if self._is_closed.is_set():
                return
            if not self.send():
                self._changed.set()  # once more
            self._is_closed.wait(self._every_s)

    def send(self) -> bool:
        """What has changed, now; whether nothing is left."""
        with self._guard:
            due = {
                name: offset
                for name, copied in self._copied.items()
                if (offset := min((copied, *self._holds.get(name, {}).values()))) > self._sent.get(name, 0)
            }
        if not due:
            return True
        try:
            failed = self._link.advance_all(link_cursor(self._remote), due, timeout_s=TIMEOUT_S)
        except ClientError as error:  # the link is closed
            failed = dict.fromkeys(due, error)
        with self._guard:
            for name, offset in due.items():
                if name not in failed:
                    self._failing.pop(name, None)
                    if name in self._copied:
                        self._sent[name] = offset
                elif self._failing.get(name) != (reason := str(failed[name])):
                    self._failing[name] = reason
                    level = logging.INFO if failed[name].code == MISSING else logging.WARNING
                    log.log(
                        level,
                        "replication: what is copied stays for now topic=%s remote=%s error=%s",
                        name,
                        self._remote,
                        reason,
                    )
        return not failed
