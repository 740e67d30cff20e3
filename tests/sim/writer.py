"""SimWriter and SimSaver: the background threads of a node, as events of virtual time.

``SimWriter`` is the twin of ``sava.wal.Writer`` and follows it step by step: it takes all that is queued,
writes it with one ``append_many``, syncs once, and hands the completions to the node's loop. Each of the
three is an event of its own, so a crash may fall between the write and the sync, and between the sync and the
moment the node learns of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from sava.metadata.machine.state_machine import FrozenState
from sava.raft.types import SnapshotMeta
from sava.wal.errors import DiskFailed, DiskFull
from sava.wal.log import Buffers, Log
from tests.sim.ledger import Ledger
from tests.sim.schedule import Schedule

Records = Sequence[tuple[int, Buffers]]
Done = Callable[[BaseException | None], None]

IDLE_MARK_US = 100_000


class Host(Protocol):
    """What the node offers to its background threads."""

    def post(self, callback: Callable[[], None]) -> None:
        """Run on the node's own loop."""

    def guard(self, action: Callable[[], Any]) -> bool:
        """Run disk work; False when the node died in it."""

    def frozen_for(self) -> int:
        """Microseconds until the process runs again (0: it runs)."""

    def disk_latency(self) -> int: ...

    def on_submit(self, records: Records) -> None: ...

    def on_durable(self) -> None: ...

    def on_snapshot(self, meta: SnapshotMeta) -> None: ...


@dataclass(slots=True)
class _Submission:
    done: Done
    records: Records = ()
    action: Callable[[Log], None] | None = None
    outcome: BaseException | None = None


class SimWriter:
    def __init__(self, schedule: Schedule, host: Host, log: Log, ledger: Ledger, rng: Random) -> None:
        self._schedule = schedule
        self._host = host
        self._log = log
        self._ledger = ledger
        self._rng = rng
        self._queue: deque[_Submission] = deque()
        self._busy = False
        self._failure: BaseException | None = None
        self._marked = True
        self.dead = False
        self.proven_end = 0
        """Up to here, a record that is itself durable tells that the log is durable."""

    @property
    def failed(self) -> bool:
        """The disk has failed, though the node may not know it yet: an idle mark tells nobody."""
        return self._failure is not None

    def append(self, records: Records, done: Done) -> None:
        self._host.on_submit(records)
        self._submit(_Submission(done, records))

    def run(self, action: Callable[[Log], None], done: Done) -> None:
        self._submit(_Submission(done, action=action))

    def _submit(self, submission: _Submission) -> None:
        self._queue.append(submission)
        if not self._busy:
            self._busy = True
            self._schedule.after(self._rng.randrange(1, 60), self._begin)

    # -- the thread ------------------------------------------------------------------------------------------

    def _deferred(self, step: Callable[..., None], *args: Any) -> bool:
        frozen = self._host.frozen_for()
        if frozen:
            self._schedule.after(frozen, step, *args)
        return bool(frozen)

    def _begin(self) -> None:
        if self.dead or self._deferred(self._begin):
            return
        group = [self._queue.popleft()]
        while self._queue and group[0].action is None and self._queue[0].action is None:
            group.append(self._queue.popleft())
        if self._failure is None and not self._host.guard(lambda: self._perform(group)):
            return
        self._schedule.after(self._host.disk_latency(), self._finish, group)

    def _perform(self, group: list[_Submission]) -> None:
        action = group[0].action
        if action is not None:
            try:
                action(_WatchedLog(self._log, self._host, self._ledger))  # type: ignore[arg-type]
            except Exception as error:  # noqa: BLE001 (it belongs to the caller, as in wal.Writer)
                group[0].outcome = error
            return
        try:
            self._log.append_many([record for submission in group for record in submission.records])
        except DiskFull:
            for submission in group:
                self._append_one(submission)
        except DiskFailed as failure:
            self._failure = failure

    def _append_one(self, submission: _Submission) -> None:
        try:
            self._log.append_many(submission.records)
        except DiskFull as full:
            submission.outcome = full
        except DiskFailed as failure:
            self._failure = failure

    def _finish(self, group: list[_Submission]) -> None:
        if self.dead or self._deferred(self._finish, group):
            return
        if self._failure is None and not self._host.guard(self._sync):
            return
        for submission in group:
            # What a full disk refused is not on it, whatever the sync says, and will be submitted again.
            if submission.action is None and (submission.outcome is not None or self._failure is None):
                self._settle(submission)
            submission.outcome = submission.outcome or self._failure
        self._host.on_durable()
        self._schedule.after(self._rng.randrange(1, 100), self._hand_over, group)
        self._marked = False
        self._next()

    def _settle(self, submission: _Submission) -> None:
        """The persister has one submission under way at a time, so all that is pending belongs to it."""
        if submission.outcome is not None:
            self._ledger.refused()
        else:
            self._ledger.synced()

    def _sync(self) -> None:
        before = self._log.durable_end
        try:
            self._log.sync()
        except DiskFailed as failure:
            self._failure = failure
            return
        if self._log.durable_end > before:
            self.proven_end = before

    def _hand_over(self, group: list[_Submission]) -> None:
        if self.dead:
            return

        def complete() -> None:
            for submission in group:
                submission.done(submission.outcome)

        self._host.post(complete)

    def _next(self) -> None:
        if self._queue:
            self._schedule.after(self._rng.randrange(1, 30), self._begin)
            return
        self._busy = False
        self._schedule.after(IDLE_MARK_US, self._mark)

    def _mark(self) -> None:
        if self.dead or self._busy or self._marked or self._failure is not None:
            return
        self._marked = True

        def mark() -> None:
            try:
                self._log.mark()
            except DiskFailed as failure:
                self._failure = failure

        self._host.guard(mark)


class _WatchedLog:
    """The log as an action on the writer's thread sees it; what the action writes is entered into the
    ledger."""

    def __init__(self, log: Log, host: Host, ledger: Ledger) -> None:
        self._log = log
        self._host = host
        self._ledger = ledger

    def append(self, kind: int, payload: Buffers) -> int:
        return self.append_many([(kind, payload)])[0]

    def append_many(self, records: Records) -> list[int]:
        self._host.on_submit(records)
        try:
            return self._log.append_many(records)
        except DiskFull:
            self._ledger.refused()
            raise

    def sync(self) -> int:
        end = self._log.sync()
        self._ledger.synced()
        self._host.on_durable()
        return end

    def roll(self) -> None:
        self._log.roll()

    def trim(self, position: int) -> None:
        self._log.trim(position)


class SimSaver:
    """Writes a snapshot at once when its time has come: the state that it writes was frozen long before, and
    meanwhile the node has gone on appending and applying."""

    def __init__(
        self,
        schedule: Schedule,
        host: Host,
        save: Callable[[SnapshotMeta, FrozenState], SnapshotMeta],
        rng: Random,
    ) -> None:
        self._schedule = schedule
        self._host = host
        self._save = save
        self._rng = rng
        self.dead = False

    def save(
        self,
        base: SnapshotMeta,
        frozen: FrozenState,
        done: Callable[[SnapshotMeta | BaseException], None],
    ) -> None:
        self._schedule.after(
            self._host.disk_latency() * self._rng.randrange(1, 20), self._work, base, frozen, done
        )

    def _work(
        self,
        base: SnapshotMeta,
        frozen: FrozenState,
        done: Callable[[SnapshotMeta | BaseException], None],
    ) -> None:
        if self.dead:
            return
        pause = self._host.frozen_for()
        if pause:
            self._schedule.after(pause, self._work, base, frozen, done)
            return
        outcome: list[SnapshotMeta | BaseException] = []

        def work() -> None:
            try:
                outcome.append(self._save(base, frozen))
            except Exception as error:  # noqa: BLE001 (the replica decides what it means)
                outcome.append(error)

        if self._host.guard(work):
            if isinstance(outcome[0], SnapshotMeta):
                self._host.on_snapshot(outcome[0])
            self._schedule.after(self._rng.randrange(1, 200), self._hand_over, done, outcome[0])

    def _hand_over(
        self, done: Callable[[SnapshotMeta | BaseException], None], outcome: SnapshotMeta | BaseException
    ) -> None:
        if not self.dead:
            self._host.post(lambda: done(outcome))
