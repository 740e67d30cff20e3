"""SimNode: one machine with one process on it: a disk, a clock of its own, and a real ``Replica``.

The process's event loop is a list of things that arrived. ``wake`` is one pass of that loop, in the order of
the production driver: first all that arrived, then at most one tick, then one ``pump``. A stall or a stop
only delays the next pass; what arrives meanwhile waits, and the ticks that were missed are forgotten.

A crash takes the process at any point, also in the middle of a disk operation (``SimCrash`` out of the disk's
hook), and takes from the disk what the crash policy says. ``life`` numbers the processes; whatever an earlier
life had scheduled is void."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sava.errors import HostError, SavaError
from sava.metadata import snapshots
from sava.metadata.errors import IdentityConflict
from sava.metadata.identity import NodeState, open_state
from sava.metadata.peer import Bootstrap, Conflict, Envelope, LeaderRequest, Reply
from sava.metadata.replica.replica import Replica
from sava.metadata.snapshots import SnapshotStore
from sava.raft.core import RaftCore, Status
from sava.raft.types import Entry, NodeId, SnapshotMeta
from sava.wal.format import file_start
from sava.wal.log import Log
from tests.sim.disk import CrashPolicy, SimDisk
from tests.sim.history import Violation
from tests.sim.ledger import Ledger
from tests.sim.writer import Records, SimSaver, SimWriter

if TYPE_CHECKING:
    from tests.sim.world import World

OnReply = Callable[[Reply | None], None]
"""A client's callback; ``None`` when the connection broke because the node died."""


class SimCrash(BaseException):
    """The process dies inside a disk operation. Not an ``Exception``: no handler of the code under test may
    survive it."""


class FixedId(random.Random):
    """Draws this node's id whenever an id is drawn, so that scripts can speak of node 1, 2 and 3."""

    def __init__(self, node: NodeId, rng: random.Random) -> None:
        super().__init__(rng.getrandbits(32))
        self._node = node

    def randint(self, a: int, b: int) -> int:
        return self._node


class SimNode:
    def __init__(
        self, world: World, node: NodeId, *, disk: SimDisk | None = None, ghost: bool = False
    ) -> None:
        self.world = world
        self.id = node
        self.ghost = ghost
        """A second process on a copy of this node's disk: it hears nothing but conflicts."""
        self.name = f"{node}{'g' if ghost else ''}"
        self.rng = random.Random(f"{world.knobs.seed}/node{self.name}")
        self.disk = disk or SimDisk(
            random.Random(f"{world.knobs.seed}/disk{self.name}"), path=f"sim:{self.name}"
        )
        self.disk.on_operation(self._on_disk_operation)
        self.ledger = Ledger()
        self.replica: Replica | None = None
        self.status: Status | None = None
        """The core's status after the last pass of the loop."""
        self.life = 0
        self.gone = False
        """The disk is lost or corrupt: this node id never comes back."""
        self.removed = False
        self.rotten = False
        """A bit was flipped on this disk, so refusing to start is right."""
        self.bootstrap: Bootstrap | None = None
        self.wall_offset_ms = 0
        self.crash_after: int | None = None
        """Die before the n-th disk operation from now."""
        self.extra_disk_us = 0
        self.expect_failure = False
        """A disk failure was injected or a conflict provoked: ``fail`` is the right reaction."""
        self.had_ghost = ghost
        """Somebody else has spoken in this node's name, so being told of a conflict is right."""
        self._opened = False
        """This life has touched the disk."""
        self._log: Log | None = None
        self.store: SnapshotStore | None = None
        self.writer: SimWriter | None = None
        self.saver: SimSaver | None = None
        self._inbox: list[Envelope | Callable[[], object]] = []
        self._asks: dict[int, OnReply] = {}
        self._next_ask = 1
        self._wake_scheduled = False
        self._tick_due = False
        self._frozen_until = 0
        self._stalled_until = 0
        self._dying: BaseException | None = None
        self._rate = 100
        self._clock_base_us = self.rng.randrange(10**9)
        self._clock_from = 0

    # -- time ------------------------------------------------------------------------------------------------

    @property
    def clock_us(self) -> int:
        """This node's monotonic clock."""
        return self._clock_base_us + (self.world.now - self._clock_from) * self._rate // 100

    @property
    def clock_ms(self) -> int:
        return self.clock_us // 1000

    def set_rate(self, percent: int) -> None:
        self._clock_base_us, self._clock_from = self.clock_us, self.world.now
        self._rate = percent

    def wall_ms(self) -> int:
        return 1_790_000_000_000 + self.world.now // 1000 + self.wall_offset_ms

    # -- life and death --------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self.replica is not None

    @property
    def core(self) -> RaftCore | None:
        return self.replica.core if self.replica is not None else None

    def entry(self, index: int) -> Entry | None:
        """The entry as the core holds it now; its disk may be far behind. None: compacted, or beyond the
        end."""
        core = self.core
        log = core._state.log if core is not None else None
        if log is None or not log.first_index <= index <= log.last_index:
            return None
        return log.between(index, index + 1)[0]

    def start(self) -> None:
        if self.replica is not None or self.gone:
            return
        self.life += 1
        self._dying = None
        self.world.note("start", self.name)
        self.guard(self._open)
        if self.alive:
            self.world.after(self.rng.randrange(1, 1000 * self.world.knobs.tick_ms), self._tick, self.life)
            self._schedule_wake()

    def _open(self) -> None:
        self._opened = True
        try:
            state = open_state(self.disk, rng=FixedId(self.id, self.rng), options=self.world.log_options)
        except SavaError as error:
            self._cannot_start(error)
            return
        self._log, self.store = state.log, state.snapshots
        if not self.ghost:
            self.world.checks.recovered(self, state.recovered)
        self._build(state)

    def _cannot_start(self, error: SavaError) -> None:
        if not isinstance(error, HostError):
            self.world.note("start refused", self.name, error)
            self.world.after(500_000, self.start)
            return
        if not self.rotten:
            raise Violation("durability", f"node {self.name} cannot start: {error}") from error
        self.world.note("corrupt", self.name, error)
        self.world.count("corrupt disks refused")
        self.lose()

    def _build(self, state: NodeState) -> None:
        store = state.snapshots
        seed = f"{self.world.knobs.seed}/core{self.name}/{self.life}"
        self.writer = SimWriter(self.world.schedule, self, state.log, self.ledger, random.Random(seed + "w"))
        self.saver = SimSaver(
            self.world.schedule,
            self,
            lambda base, frozen: snapshots.save(store, base, frozen.chunks()),
            random.Random(seed + "s"),
        )
        self.replica = self.world.make_replica(self, state, random.Random(seed))
        self.status = None

    def crash(self, policy: CrashPolicy | None = CrashPolicy.ANY) -> None:
        """Power cut with ``policy``; ``None``: only the process dies and the page cache lives on."""
        if not self._opened:
            return
        self.world.note("crash", self.name, policy.name if policy else "kill")
        self._stop()
        self.disk = self.disk.kill() if policy is None else self.disk.crash(policy)

    def _stop(self) -> None:
        for part in (self.writer, self.saver):
            if part is not None:
                part.dead = True
        self.replica = self.writer = self.saver = self._log = self.store = None
        self.status = None
        self._opened = False
        self._inbox.clear()
        self.crash_after = None
        self._tick_due = False
        asks, self._asks = self._asks, {}
        for callback in asks.values():
            self.world.after(self.rng.randrange(1000, 20_000), callback, None)
        self.world.checks.stopped(self)
        self.world.stopped(self)

    def lose(self) -> None:
        """The disk is no more (or must not be used any more)."""
        self.world.note("disk lost", self.name)
        self._stop()
        self.gone = True

    def rot(self, rng: random.Random) -> bool:
        """Flip a bit in a log file, below what a later durable record proves to have been durable."""
        assert self.writer is not None
        log_disk = self.disk.directory("raft")
        starts = [(start, name) for name in log_disk.list() if (start := file_start(name)) is not None]
        spots = [
            (name, min(log_disk.open(name).size(), self.writer.proven_end - start))
            for start, name in starts
            if start < self.writer.proven_end
        ]
        spots = [(name, size) for name, size in spots if size > 0]
        if not spots:
            return False
        name, size = rng.choice(spots)
        log_disk.flip_bit(name, rng.randrange(size), rng.randrange(8))
        return True

    def mend_disk(self) -> None:
        self.crash_after = None
        self.extra_disk_us = 0
        self.disk.set_capacity(None)
        self.disk._machine.faults.clear()
        if self.writer is not None and self.writer.failed:
            self.crash(CrashPolicy.ANY)

    def fail(self, error: BaseException) -> None:
        """The replica says that it must not go on."""
        is_contested = self.had_ghost and isinstance(error, IdentityConflict)
        if not self.expect_failure and not is_contested:
            raise Violation("fail", f"node {self.name} stopped itself: {error!r}") from error
        self._dying = self._dying or error

    def _die(self) -> None:
        self.world.note("died", self.name, self._dying)
        self._dying = None
        self.crash(CrashPolicy.ANY)
        self.world.node_died(self)

    # -- what the background threads see ---------------------------------------------------------------------

    def guard(self, action: Callable[[], Any]) -> bool:
        """Run a piece of the process; False when the process did not survive it."""
        try:
            action()
        except SimCrash:
            self.crash(CrashPolicy.ANY)
            self.world.node_died(self)
            return False
        if self._dying is not None:
            self._die()
            return False
        return self._opened

    def _on_disk_operation(self, operation: str) -> None:
        self.world.count_disk(operation)
        if self.crash_after is None:
            return
        if self.crash_after <= 0:
            raise SimCrash
        self.crash_after -= 1

    def post(self, callback: Callable[[], object]) -> None:
        self._inbox.append(callback)
        self._schedule_wake()

    def frozen_for(self) -> int:
        return max(0, self._frozen_until - self.world.now)

    def disk_latency(self) -> int:
        return 20 + self.rng.randrange(2 * self.world.knobs.sync_us) + self.extra_disk_us

    def on_submit(self, records: Records) -> None:
        batches = self.ledger.submit(records)
        for batch in batches:
            if batch is not None and batch.install is not None:
                self.world.count("installs")
                self.on_snapshot(batch.install)
        if batches:
            self.world.checks.submitted(self, batches)

    def on_snapshot(self, meta: SnapshotMeta) -> None:
        self.world.count("snapshots")
        if not self.ghost:
            self.world.checks.snapshot(self, meta)

    def on_durable(self) -> None:
        self.world.checks.durable(self)

    # -- the loop --------------------------------------------------------------------------------------------

    def deliver(self, envelope: Envelope) -> None:
        if self.ghost and not isinstance(envelope.message, Conflict):
            return
        if self.alive:
            self._inbox.append(envelope)
            self._schedule_wake()

    def freeze(self, microseconds: int) -> None:
        """SIGSTOP: neither the loop nor the background threads run."""
        self._frozen_until = max(self._frozen_until, self.world.now + microseconds)
        self.stall(microseconds)

    def stall(self, microseconds: int) -> None:
        """The loop is busy; the background threads are not."""
        self._stalled_until = max(self._stalled_until, self.world.now + microseconds)
        self.world.after(microseconds, self._wake, self.life)

    def alarm(self) -> None:
        """Evidence, true or not, that the process of this node's leader is gone."""
        if self.alive and self.replica is not None and self.replica.core is not None:
            self.replica.leader_unreachable(self.replica.core.leader)
            self._schedule_wake()

    def thaw(self) -> None:
        self._frozen_until = self._stalled_until = self.world.now
        self._schedule_wake()

    def _schedule_wake(self) -> None:
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self.world.after(self.rng.randrange(5, 100), self._wake, self.life)

    def _tick(self, life: int) -> None:
        if life != self.life or not self.alive:
            return
        self._tick_due = True
        self.world.after(self.world.knobs.tick_ms * 1000 * 100 // self._rate, self._tick, life)
        self._wake(life)

    def _wake(self, life: int) -> None:
        self._wake_scheduled = False
        if life != self.life or not self.alive:
            if self.alive:
                self._schedule_wake()
            return
        if self._stalled_until > self.world.now:
            return
        if self.guard(self._pass):
            self.world.checks.passed(self)

    def _pass(self) -> None:
        replica = self.replica
        assert replica is not None
        inbox, self._inbox = self._inbox, []
        for item in inbox:
            if isinstance(item, Envelope):
                replica.receive(item)
            else:
                item()
            if self.replica is not replica:
                return
        if self._tick_due:
            self._tick_due = False
            replica.tick(self.clock_ms)
        replica.pump(self.clock_ms)
        if replica.wants_pump:
            self._schedule_wake()

    # -- the outside -----------------------------------------------------------------------------------------

    def send(self, envelopes: Sequence[Envelope]) -> None:
        for envelope in envelopes:
            if not self.ghost:
                self.world.checks.sent(self, envelope.message)
            if self.replica is not None and self.replica.address_of(envelope.dst) is not None:
                self.world.net.send(envelope)

    @property
    def open_asks(self) -> int:
        return len(self._asks)

    def ask(self, request: LeaderRequest, done: OnReply, timeout_ms: int) -> None:
        """A local caller asks; ``done`` is called exactly once."""
        number = self._next_ask
        self._next_ask += 1
        self._asks[number] = done

        def answered(reply: Reply) -> None:
            callback = self._asks.pop(number, None)
            if callback is None:
                raise Violation("API", f"node {self.name} answered {request} twice")
            callback(reply)

        def submit() -> None:
            if self.replica is not None:
                self.replica.ask(request, answered, deadline_ms=self.clock_ms + timeout_ms)

        self.post(submit)
