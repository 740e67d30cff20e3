"""A few replicas in one process, driven by hand: a network of lists, a clock that a test moves, disks that
forget and fail.

``World.settle`` runs until nothing moves; ``World.pass_time`` ticks. Nothing is random except what the seed
gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from sava.metadata import snapshots
from sava.metadata.commands import Command, Delete, Operation, Proposal, Put, Txn, encode
from sava.metadata.identity import NodeState, cluster_id_of, open_state
from sava.metadata.machine.state_machine import FrozenState
from sava.metadata.peer import (
    Bootstrap,
    Envelope,
    LeaderRequest,
    Propose,
    ReadIndex,
    Reply,
    decode_envelope,
    encode_envelope,
)
from sava.metadata.replica.replica import Process, Replica, ReplicaConfig, ReplicaDisk
from sava.raft.core import Status
from sava.raft.types import CoreConfig, Membership, NodeId, SnapshotMeta
from sava.wal.errors import DiskFailed, DiskFull
from sava.wal.log import Buffers, Log
from tests.sim.disk import CrashPolicy, SimDisk

TICK_MS = 100
CONFIG = ReplicaConfig(core=CoreConfig(keep_entries=10), tick_ms=TICK_MS, snapshot_entries=1_000_000)

Records = Sequence[tuple[int, Buffers]]
Done = Callable[[BaseException | None], None]


class PowerCut(BaseException):
    """Raised out of a disk operation: the process is gone. Not an Exception, so nobody survives it."""


class StepWriter:
    """The log's writer without a thread: a submission is carried out when the world steps, unless held."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.queue: list[tuple[Records | Callable[[Log], None], Done]] = []
        self.is_held = False
        self.failure: BaseException | None = None
        self.appends = 0

    def append(self, records: Records, done: Done) -> None:
        self.queue.append((list(records), done))

    def run(self, action: Callable[[Log], None], done: Done) -> None:
        self.queue.append((action, done))

    def step(self) -> bool:
        if self.is_held or not self.queue:
            return False
        work, done = self.queue.pop(0)
        done(self.failure or self._perform(work))
        return True

    def _perform(self, work: Records | Callable[[Log], None]) -> BaseException | None:
        try:
            if callable(work):
                work(self.log)
            else:
                self.log.append_many(work)
                self.appends += 1
            self.log.sync()
        except DiskFailed as error:
            self.failure = error
            return error
        except Exception as error:  # noqa: BLE001 (it belongs to whoever submitted, as in wal.Writer)
            return error
        return None


class StepSaver:
    def __init__(self, store: snapshots.SnapshotStore) -> None:
        self._store = store
        self.queue: list[
            tuple[SnapshotMeta, FrozenState, Callable[[SnapshotMeta | BaseException], None]]
        ] = []
        self.is_held = False

    def save(
        self, base: SnapshotMeta, frozen: FrozenState, done: Callable[[SnapshotMeta | BaseException], None]
    ) -> None:
        self.queue.append((base, frozen, done))

    def step(self) -> bool:
        if self.is_held or not self.queue:
            return False
        base, frozen, done = self.queue.pop(0)
        try:
            done(snapshots.save(self._store, base, frozen.chunks()))
        except DiskFull as error:
            done(error)
        return True


class Box:
    """Where an answer arrives."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.ticket = 0

    def __call__(self, reply: Reply) -> None:
        self.replies.append(reply)

    @property
    def reply(self) -> Reply:
        assert len(self.replies) == 1, f"{len(self.replies)} answers: {self.replies}"
        return self.replies[0]


class Machine:
    """One computer: a disk, and at most one process on it."""

    def __init__(self, world: World, name: str, config: ReplicaConfig) -> None:
        self.world = world
        self.name = name
        self.config = config
        self.disk = SimDisk(Random(f"disk-{name}"), path=f"sim:{name}")
        self.address = f"{name}:7000"
        self.state: NodeState | None = None
        self.replica_or_none: Replica | None = None
        self.failures: list[BaseException] = []
        self.inbox: list[bytes] = []

    @property
    def is_up(self) -> bool:
        return self.replica_or_none is not None

    @property
    def replica(self) -> Replica:
        assert self.replica_or_none is not None, f"{self.name} is down"
        return self.replica_or_none

    @property
    def id(self) -> NodeId:
        assert self.state is not None
        return self.state.node

    @property
    def status(self) -> Status:
        status = self.replica.status().core
        assert status is not None
        return status

    def start(self) -> Replica:
        self.state = open_state(self.disk, rng=Random(f"ids-{self.name}"))
        self.writer = StepWriter(self.state.log)
        self.saver = StepSaver(self.state.snapshots)
        seed = Random(f"core-{self.name}-{self.state.incarnation}")
        self.nonce = seed.getrandbits(62)
        self.replica_or_none = Replica(
            Process(self.state.node, self.address, self.state.incarnation, self.nonce),
            self.config,
            ReplicaDisk(self.state.recovered, self.writer, self.state.snapshots, self.saver.save),
            send=lambda envelopes: self.world.send(self, envelopes),
            fail=self.failures.append,
            rng=seed,
            wall_ms=lambda: 1_790_000_000_000 + self.world.now_ms,
        )
        return self.replica

    def stop(self, policy: CrashPolicy | None = CrashPolicy.LOSE) -> None:
        """The process dies; with a policy, the power goes with it."""
        self.replica_or_none = None
        self.inbox.clear()
        self.disk = self.disk.kill() if policy is None else self.disk.crash(policy)

    def restart(self, policy: CrashPolicy | None = CrashPolicy.LOSE) -> Replica:
        self.stop(policy)
        return self.start()

    def ask(self, request: LeaderRequest, timeout_ms: int = 5_000) -> Box:
        box = Box()
        box.ticket = self.replica.ask(request, box, deadline_ms=self.world.now_ms + timeout_ms)
        return box

    def put(self, key: str, value: bytes | str, *, lease: int = 0, timeout_ms: int = 5_000) -> Box:
        return self.propose(txn(Put(key, as_bytes(value), lease)), timeout_ms)

    def delete(self, key: str) -> Box:
        return self.propose(txn(Delete(key)))

    def propose(self, command: Command, timeout_ms: int = 5_000) -> Box:
        return self.ask(Propose(command), timeout_ms)

    def propose_unnamed(self, command: Command) -> None:
        """Append a command as the leader appends its own: without a session, so nothing recognises a copy."""
        assert self.replica.core is not None
        self.replica.core.propose([encode(Proposal(command))])

    def read_index(self, timeout_ms: int = 5_000) -> Box:
        return self.ask(ReadIndex(), timeout_ms)

    def get(self, key: str) -> bytes | None:
        kv = self.replica.machine.get(key)
        return None if kv is None else kv.value


class World:
    def __init__(self, config: ReplicaConfig = CONFIG) -> None:
        self.config = config
        self.now_ms = 1_000
        self.machines: dict[str, Machine] = {}
        self.cut: set[tuple[str, str]] = set()
        self.addresses: dict[NodeId, str] = {}
        """Where nodes are, beyond what the replicas know."""
        self.log: list[tuple[str, str, Envelope]] = []
        self.tap: Callable[[Machine, Envelope], bool] | None = None
        """Sees each envelope before it is delivered; False loses it."""

    # -- making ------------------------------------------------------------------------------------------

    def machine(self, name: str) -> Machine:
        made = self.machines[name] = Machine(self, name, self.config)
        return made

    def found(self, *names: str) -> list[Machine]:
        """``cluster init`` with these machines; returns once they have a leader."""
        machines = [self.machine(name) for name in names]
        for machine in machines:
            machine.start()
        bootstrap = self.bootstrap_of(machines)
        for machine in machines:
            machine.replica.bootstrap(bootstrap, _must_be_none)
        self.settle()
        self.elect()
        return machines

    def bootstrap_of(self, machines: Sequence[Machine]) -> Bootstrap:
        addresses = tuple(sorted((machine.id, machine.address) for machine in machines))
        voters = tuple(node for node, _ in addresses)
        return Bootstrap(cluster_id_of(voters), Membership(voters=voters, addresses=addresses))

    # -- network -----------------------------------------------------------------------------------------

    def send(self, src: Machine, envelopes: Sequence[Envelope]) -> None:
        for envelope in envelopes:
            address = src.replica.address_of(envelope.dst) or self.addresses.get(envelope.dst)
            target = next((m for m in self.machines.values() if m.address == address), None)
            if target is None or not target.is_up or (src.name, target.name) in self.cut:
                continue
            self.log.append((src.name, target.name, envelope))
            if self.tap is not None and not self.tap(src, envelope):
                continue
            target.inbox.append(encode_envelope(envelope))

    def isolate(self, machine: Machine) -> None:
        for other in self.machines.values():
            self.cut |= {(machine.name, other.name), (other.name, machine.name)}

    def heal(self) -> None:
        self.cut.clear()

    # -- running -----------------------------------------------------------------------------------------

    def up(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.is_up]

    def settle(self, limit: int = 100_000) -> None:
        """Run until nothing moves."""
        for machine in self.up():
            machine.replica.pump(self.now_ms)
        for _ in range(limit):
            moved = [self._step(machine) for machine in self.up()]
            if not any(moved):
                return
        raise AssertionError("the world does not come to rest")

    def _step(self, machine: Machine) -> bool:
        if machine.failures:
            return False
        inbox, machine.inbox = machine.inbox, []
        for frame in inbox:
            machine.replica.receive(decode_envelope(frame))
        moved = machine.writer.step() | machine.saver.step() | machine.replica.wants_pump
        if inbox or moved:
            machine.replica.pump(self.now_ms)
        return bool(inbox) or moved

    def pass_time(self, ms: int) -> None:
        for _ in range(ms // TICK_MS):
            self.now_ms += TICK_MS
            for machine in self.up():
                if not machine.failures:
                    machine.replica.tick(self.now_ms)
            self.settle()

    def run_until(self, condition: Callable[[], bool], ms: int = 20_000) -> None:
        for _ in range(ms // TICK_MS):
            if condition():
                return
            self.pass_time(TICK_MS)
        raise AssertionError("it did not happen in time")

    def elect(self) -> Machine:
        """Wait for a leader that a majority follows."""
        self.run_until(lambda: self.leader_or_none() is not None)
        return self.leader()

    def leader_or_none(self) -> Machine | None:
        """The ready leader of the highest term among those that run."""
        leaders = [machine for machine in self.up() if not machine.failures and machine.replica.is_leader]
        return max(leaders, key=lambda machine: machine.replica.term, default=None)

    def leader(self) -> Machine:
        leader = self.leader_or_none()
        assert leader is not None
        return leader

    def followers(self) -> list[Machine]:
        leader = self.leader()
        return [machine for machine in self.up() if machine is not leader]

    def answer(self, box: Box, ms: int = 10_000) -> Reply:
        self.settle()
        self.run_until(lambda: bool(box.replies), ms)
        return box.reply

    def put(self, machine: Machine, key: str, value: bytes | str) -> Reply:
        return self.answer(machine.put(key, value))


def txn(*operations: Operation) -> Txn:
    return Txn(then=operations)


def as_bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _must_be_none(error: BaseException | None) -> None:
    assert error is None, error
