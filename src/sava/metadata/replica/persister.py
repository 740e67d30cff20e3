"""Persister: carries out what the core wants durable, in order, and reports each output exactly when it is.

One submission is at the log's writer at a time; what comes meanwhile is collected and becomes the next one,
so a busy node writes groups and syncs once for each. Having only one at a time is what makes a full disk
harmless:

    output 7 does not fit · output 8 is smaller and does · it is acknowledged · crash: a log with a hole

A refused submission stays at the head of the queue and is tried again with every tick; nothing later passes
it. Meanwhile the node reads and takes part in elections as far as that needs no disk, and refuses proposals.

An output without anything durable costs no write. Its messages may still depend on earlier outputs, so it
waits its turn behind them. A node whose disk stands still answers every heartbeat with such an output, ten a
second for hours: of these only so many wait. The others are lost, as a network would lose them, and the
leader asks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sava.metadata.durable import batch_records, has_durable_part
from sava.metadata.errors import SnapshotCorrupt
from sava.metadata.machine.state_machine import StateMachine
from sava.raft.output import Output
from sava.raft.types import SnapshotMeta
from sava.wal.errors import DiskFull, LogBusy
from sava.wal.fullness import Fullness
from sava.wal.log import Buffers, Log

MAX_GROUP = 256
"""Outputs per submission; each is at most a few megabytes (the core's limits), most are a few hundred bytes.
"""
MAX_WAITING = 1024
"""Outputs behind which one that has nothing durable does not wait any more."""

Done = Callable[[BaseException | None], None]


class LogWriter(Protocol):
    """``sava.wal.Writer``, or its twin in the simulator. ``done`` is called on the replica's own thread."""

    def append(self, records: Sequence[tuple[int, Buffers]], done: Done) -> None: ...

    def run(self, action: Callable[[Log], None], done: Done) -> None: ...


class ReceivedFiles(Protocol):
    """The part of ``SnapshotStore`` that receives snapshots."""

    def write_chunk(self, meta: SnapshotMeta, offset: int, data: bytes) -> None: ...

    def install(self, meta: SnapshotMeta) -> None: ...


@dataclass(slots=True)
class Task:
    """Work on the log that is no output (checkpoint, bootstrap); not tried again when the disk is full."""

    action: Callable[[Log], None]
    done: Done


@dataclass(slots=True)
class Persisted:
    output: Output
    machine: StateMachine | None = None
    """What an installed snapshot was restored to."""
    install_error: SnapshotCorrupt | None = None


class Persister:
    def __init__(
        self, writer: LogWriter, restore: Callable[[SnapshotMeta], StateMachine], files: ReceivedFiles
    ) -> None:
        self._writer = writer
        self._restore = restore
        self._files = files
        self._queue: deque[Output | Task] = deque()
        self._in_flight: list[Output] | Task | None = None
        self._restored: StateMachine | None = None
        self._completion: tuple[BaseException | None] | None = None
        self.full: DiskFull | LogBusy | None = None
        """Why nothing can be written at present; until a write succeeds."""
        self._may_try = True
        self._fullness = Fullness("raft", "nothing can be changed")

    @property
    def is_idle(self) -> bool:
        return self._in_flight is None and not self._queue

    @property
    def has_completion(self) -> bool:
        return self._completion is not None

    def add(self, output: Output) -> bool:
        """Queue an output; True when there is nothing to wait for: no durable part, and nothing earlier
        under way."""
        if not output.chunks and not has_durable_part(output):
            if self.is_idle:
                return True
            if not output.send_after_persist or len(self._queue) >= MAX_WAITING:
                # It promises nothing, or nobody will hear it: no need to know when its turn would have come.
                return False
        self._queue.append(output)
        return False

    def add_task(self, task: Task) -> None:
        self._queue.append(task)

    def retry(self) -> None:
        """Time has passed: there may be room again."""
        self._may_try = True

    # -- submitting --------------------------------------------------------------------------------------

    def submit(self) -> None:
        if self._in_flight is not None or not self._queue or not self._may_try:
            return
        head = self._queue[0]
        if isinstance(head, Task):
            self._queue.popleft()
            self._in_flight = head
            self._writer.run(head.action, self._completed)
        elif head.chunks or head.install is not None:
            self._queue.popleft()
            self._in_flight = [head]
            self._writer.run(lambda log: self._receive(log, head), self._completed)
        else:
            self._submit_group()

    def _submit_group(self) -> None:
        group: list[Output] = []
        records: list[tuple[int, Buffers]] = []
        queue = self._queue
        while queue and len(group) < MAX_GROUP:
            head = queue[0]
            if isinstance(head, Task) or head.chunks or head.install is not None:
                break
            queue.popleft()
            group.append(head)
            if has_durable_part(head):
                records += batch_records(head)
        self._in_flight = group
        if not records:
            self._completion = (None,)
            return
        try:
            self._writer.append(records, self._completed)
        except LogBusy as busy:
            self._completion = (busy,)

    def _receive(self, log: Log, output: Output) -> None:
        """On the writer's thread: bytes of a snapshot, and perhaps its installation. The file is durable
        under its name before the record that names it is, and both before the machine is replaced."""
        for chunk in output.chunks:
            self._files.write_chunk(chunk.meta, chunk.offset, chunk.data)
        if output.install is not None:
            self._files.install(output.install)
            self._restored = self._restore(output.install)
        if has_durable_part(output):
            log.append_many(batch_records(output))
            log.sync()

    def _completed(self, error: BaseException | None) -> None:
        self._completion = (error,)

    # -- completing --------------------------------------------------------------------------------------

    def collect(self) -> list[Persisted]:
        """Outputs that are durable now, in order. Raises what forbids going on."""
        if self._completion is None:
            return []
        (error,) = self._completion
        self._completion = None
        finished, self._in_flight = self._in_flight, None
        if isinstance(finished, Task):
            finished.done(error)
            return []
        assert finished is not None
        if error is None:
            self.full = None
            self._fullness.passed()
            machine, self._restored = self._restored, None
            return [Persisted(output, machine if output.install is not None else None) for output in finished]
        if isinstance(error, SnapshotCorrupt):
            return [Persisted(finished[0], install_error=error)]
        if not isinstance(error, DiskFull | LogBusy):
            raise error
        self.full, self._may_try = error, False
        if isinstance(error, DiskFull):
            self._fullness.refused(error)
        self._queue.extendleft(reversed(finished))
        return []
