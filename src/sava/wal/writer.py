"""Writer: group commit for one Log, on a thread of its own.

A sync costs the same for one record as for a thousand, so while one sync runs, everything that arrives waits
in the queue, and the next sync serves all of it: a lone caller pays one sync of latency, a hundred callers
share one.

    callers     append a   append b, c, d           e
    thread      write a | sync ........... | write b c d | sync ........ | write e | sync
    delivered                       done(a)                    done(b, c, d)

No caller gets its answer before the sync that covers it, and completions come in the order of submission, one
``deliver`` per group.

* A full disk refuses a group as a whole; then its submissions are tried one by one, so that a small one is
  not refused for the size of its neighbour. Each is still all or nothing.
* A failed disk is final: what was queued and what comes later is completed with the failure. A submission of
  the failed group may well be on disk and come back at the next start: the failure says "not acknowledged",
  never "not there".
* The queue is bounded in bytes; ``append`` then raises LogBusy at once instead of waiting, since callers
  include the event loop.
* When idle, the thread lets the log write a mark, so that damage to the last acknowledged batch can be
  distinguished from a torn one; only then does it wait with a timeout, otherwise it sleeps until it is woken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from sava.wal.errors import DiskFull, LogBusy, LogClosed
from sava.wal.format import FRAME_BYTES
from sava.wal.log import Buffers, Log

Done = Callable[[BaseException | None], None]
"""Called once per submission, in order of submission, with None when durable, or with what stopped it."""

Observe = Callable[[float, int], object]
"""Called on the writer's thread for each group that was made durable: seconds to write and sync it, and its
bytes."""

Records = Sequence[tuple[int, Buffers]]


@dataclass(slots=True, eq=False)
class _Submission:
    done: Done
    records: Records = ()
    positions: list[int] | None = None
    size: int = 0
    action: Callable[[Log], None] | None = None
    outcome: BaseException | None = None


class Writer:
    """One thread owns the log. It takes all that is queued, writes it with one ``append_many``, syncs once,
    then hands the completions over through ``deliver`` (for asyncio: ``loop.call_soon_threadsafe``), one call
    per group.

    DiskFull completes the affected submissions with that error and the writer continues. DiskFailed completes
    everything queued with it, and every later submission too: the owner must stop the process. The queue is
    bounded by ``max_queued_bytes``; ``append`` raises ``LogBusy`` beyond it.
    """

    def __init__(
        self,
        log: Log,
        *,
        deliver: Callable[[Callable[[], None]], object],
        max_queued_bytes: int = 64 << 20,
        idle_mark_s: float = 0.1,
        observe: Observe | None = None,
    ) -> None:
        self._log = log
        self._deliver = deliver
        self._max_queued_bytes = max_queued_bytes
        self._idle_mark_s = idle_mark_s
        self._observe = observe
        self._queue: SimpleQueue[_Submission | None] = SimpleQueue()
        """None is the last: the writer is closed."""
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._queued_bytes = 0
        self._is_closing = False
        # Of the thread alone:
        self._next: _Submission | None = None
        """Taken from the queue, and not part of the group before it."""
        self._failure: BaseException | None = None
        self._is_marked = True
        self._thread = threading.Thread(target=self._serve, name="sava-wal-writer", daemon=True)
        self._thread.start()

    def append(self, records: Records, done: Done, *, positions: list[int] | None = None) -> None:
        """Queue records as one all-or-nothing unit (any thread). The buffers must not change until ``done``;
        before ``done(None)``, ``positions`` is extended by the records' positions.

        Raises LogBusy, LogClosed, RecordTooLarge, with nothing queued and ``done`` never called."""
        size = self._log.check(records) + FRAME_BYTES * len(records)
        self._submit(_Submission(done, records, positions, size))

    def run(self, action: Callable[[Log], None], done: Done) -> None:
        """Run ``action`` on the writer's thread after everything queued before it is durable (roll, trim,
        file work). What it raises goes to ``done``. Raises LogClosed."""
        self._submit(_Submission(done, action=action))

    def _submit(self, submission: _Submission) -> None:
        with self._lock:
            if self._is_closing:
                raise LogClosed("the log's writer is closed")
            # An empty queue takes any single submission: one larger than the bound would else never pass.
            if self._queued_bytes and self._queued_bytes + submission.size > self._max_queued_bytes:
                raise LogBusy(f"{self._queued_bytes} bytes wait for the disk")
            self._queued_bytes += submission.size
            self._queue.put(submission)

    def close(self) -> None:
        """Finish what is queued, close the log, join the thread. Raises DiskFailed when closing the log
        fails."""
        with self._lock:
            self._is_closing = True
            self._queue.put(None)
        self._thread.join()
        self._log.close()

    def _serve(self) -> None:
        while (group := self._next_group()) is not None:
            self._execute(group)
            if group:
                self._hand_over(group)

    def _next_group(self) -> list[_Submission] | None:
        """All appends up to the next action, or one action; empty when it is time for a mark; None at the
        end."""
        try:
            first = self._next or self._queue.get(timeout=None if self._is_marked else self._idle_mark_s)
        except Empty:
            return []
        self._next = None
        if first is None:
            return None
        group, size = [first], first.size
        with suppress(Empty):
            while first.action is None and self._next is None:
                following = self._queue.get_nowait()
                if following is None:
                    self._queue.put(None)  # nothing comes behind it
                    break
                if following.action is None:
                    group.append(following)
                    size += following.size
                else:
                    self._next = following
        with self._lock:
            self._queued_bytes -= size
        return group

    def _execute(self, group: list[_Submission]) -> None:
        """Whatever the log raises is final: the thread must never die and leave callers waiting."""
        if self._failure is None:
            try:
                if group:
                    began = time.perf_counter()
                    self._perform(group)
                    self._log.sync()
                    if self._observe is not None and group[0].action is None:
                        size = sum(submission.size for submission in group)
                        self._observe(time.perf_counter() - began, size)
                else:
                    self._log.mark()
            except Exception as failure:  # noqa: BLE001
                self._failure = failure
        self._is_marked = not group
        if self._failure is not None:
            for submission in group:
                submission.outcome = submission.outcome or self._failure

    def _perform(self, group: list[_Submission]) -> None:
        action = group[0].action
        if action is not None:
            try:
                action(self._log)
            except Exception as error:  # noqa: BLE001 (it belongs to the caller)
                group[0].outcome = error
            return
        try:
            self._append(group)
        except DiskFull:
            for submission in group:
                try:
                    self._append([submission])
                except DiskFull as full:
                    submission.outcome = full

    def _append(self, group: list[_Submission]) -> None:
        records: list[tuple[int, Buffers]] = []
        for submission in group:
            records += submission.records
        positions = self._log.append_many(records, is_synced_next=True)
        at = 0
        for submission in group:
            if submission.positions is not None:
                submission.positions += positions[at : at + len(submission.records)]
            at += len(submission.records)

    def _hand_over(self, group: list[_Submission]) -> None:
        def complete() -> None:
            for submission in group:
                submission.done(submission.outcome)

        try:
            self._deliver(complete)
        except Exception as failure:  # noqa: BLE001
            # The owner cannot be reached (its event loop is closed), so it is gone: write no more for it, but
            # let ``close`` end the log in order.
            self._failure = self._failure or failure
