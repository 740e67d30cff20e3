"""World: the cluster, its network, its clocks, and everybody who watches it.

A world can be driven in two ways. ``run.simulate`` lets the nemesis, the operator and the clients loose for a
while, heals everything and demands that the cluster comes back. A scripted test makes a world with calm knobs
and tells each node what to do (``world.run``, ``world.wait_for``, ``node.crash``); the invariants watch in
both cases."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from sava.metadata.commands import decode_proposal
from sava.metadata.identity import NodeState, cluster_id_of
from sava.metadata.machine.state_machine import Applied
from sava.metadata.peer import Bootstrap
from sava.metadata.replica.replica import Process, Replica, ReplicaConfig, ReplicaDisk
from sava.raft.core import Role, Status
from sava.raft.types import CoreConfig, Entry, Membership, NodeId
from sava.wal.log import LogOptions
from tests.sim.history import History, Violation
from tests.sim.invariants import Checks
from tests.sim.knobs import Knobs
from tests.sim.net import SimNet
from tests.sim.node import SimNode
from tests.sim.oracle import Oracle
from tests.sim.schedule import Action, Schedule

MS = 1000
SECOND = 1_000_000


class World:
    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.schedule = Schedule()
        self.counts: Counter[str] = Counter()
        self.nodes: dict[NodeId, SimNode] = {}
        self.ghosts: list[SimNode] = []
        self.checks = Checks(self)
        self.history = History()
        self.oracle = Oracle(self.history)
        self.net = SimNet(
            self.schedule, knobs, self.rng("net"), self._receivers, lambda: sorted(self.nodes), self.count
        )
        self.config = _replica_config(knobs)
        self.log_options = LogOptions(file_bytes=knobs.file_bytes)
        self.healing = False
        self.cluster = ""
        self.on_stopped: list[Callable[[SimNode], None]] = []
        """Told when a node's process ends (watchers look for another node)."""
        self.on_applied: list[Callable[[SimNode, int, Any, Applied], None]] = []
        self.restart_after_ms: tuple[int, int] | None = (200, 3000)
        """A process that died is started again after a time in this range; None: only on command."""
        self.change_until = 0
        """Until then a membership change that somebody asked for may still begin."""
        self._next_id = 1
        self._restart_rng = self.rng("restart")

    # -- small tools -----------------------------------------------------------------------------------------

    @property
    def now(self) -> int:
        return self.schedule.now

    def after(self, delay_us: int, action: Action, *args: Any) -> None:
        self.schedule.after(delay_us, action, *args)

    def note(self, what: str, *details: Any) -> None:
        self.schedule.note(what, *details)

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def count_disk(self, operation: str) -> None:
        if operation == "sync":
            self.counts["syncs"] += 1

    def rng(self, name: str) -> random.Random:
        """One generator per component: adding a fault does not reshuffle the others."""
        return random.Random(f"{self.knobs.seed}/{name}")

    def run(self, milliseconds: int) -> None:
        self.schedule.run_until(self.now + milliseconds * MS)

    def wait_for(self, condition: Callable[[], bool], what: str, within_ms: int = 30_000) -> None:
        if not condition() and not self.schedule.run_until(self.now + within_ms * MS, condition):
            raise Violation(
                "liveness", f"{what} did not come true within {within_ms / 1000:g} s\n{self.describe()}"
            )

    # -- nodes -----------------------------------------------------------------------------------------------

    def add_node(self) -> SimNode:
        """A pristine machine under a new id."""
        node = SimNode(self, NodeId(self._next_id))
        self._next_id += 1
        self.nodes[node.id] = node
        low, high = self.knobs.skew_percent
        if "skew" in self.knobs.faults:
            node.set_rate(node.rng.randint(low, high))
        return node

    def found(self, count: int) -> None:
        """``sava cluster init`` with ``count`` new nodes."""
        founders = [self.add_node() for _ in range(count)]
        ids = tuple(node.id for node in founders)
        membership = Membership(voters=ids, addresses=tuple((node, f"sim:{node}") for node in ids))
        self.cluster = cluster_id_of(ids)
        self.checks.founded(membership)
        for node in founders:
            node.bootstrap = Bootstrap(self.cluster, membership)
            node.start()

    def join(self) -> SimNode:
        """A new machine that waits to be added to the cluster."""
        node = self.add_node()
        node.bootstrap = Bootstrap(self.cluster, Membership())
        node.start()
        return node

    def make_replica(self, node: SimNode, state: NodeState, rng: random.Random) -> Replica:
        assert node.writer is not None
        assert node.saver is not None
        replica = Replica(
            Process(node.id, f"sim:{node.id}", state.incarnation, nonce=node.rng.getrandbits(62)),
            self.config,
            ReplicaDisk(state.recovered, node.writer, state.snapshots, node.saver.save),
            send=node.send,
            fail=node.fail,
            rng=rng,
            wall_ms=node.wall_ms,
        )
        if not node.ghost:
            replica.trace(lambda entry, applied: self.applied(node, entry, applied))
        if state.recovered.bootstrap is None and node.bootstrap is not None:
            bootstrap = node.bootstrap

            def found() -> None:
                if node.replica is replica:
                    replica.bootstrap(bootstrap, _ignore)

            node.post(found)
        return replica

    def _receivers(self, node: NodeId) -> Sequence[SimNode]:
        found = [self.nodes[node]] if node in self.nodes else []
        return found + [ghost for ghost in self.ghosts if ghost.id == node] if self.ghosts else found

    def stopped(self, node: SimNode) -> None:
        for listener in self.on_stopped:
            listener(node)

    def node_died(self, node: SimNode) -> None:
        """Not by the nemesis' hand: in a disk operation, or by its own decision."""
        self.count("died")
        node.expect_failure = False
        if self.restart_after_ms is not None and not node.ghost:
            low, high = self.restart_after_ms
            self.after(self._restart_rng.randint(low, high) * MS, node.start)

    # -- what is observed ------------------------------------------------------------------------------------

    def observed(self, node: SimNode, before: Status | None, after: Status) -> None:
        if before is not None and before.role is after.role and before.term == after.term:
            return
        if after.role is Role.LEADER:
            self.count("elections")
        self.note("role", node.name, after.role.value, f"term {after.term}", f"commit {after.commit}")

    def applied(self, node: SimNode, entry: Entry, applied: Applied) -> None:
        proposal = decode_proposal(entry.data)
        if self.history.apply(node.id, entry.index, entry.term, entry.data, proposal, applied):
            self.count("commands")
        for listener in self.on_applied:
            listener(node, entry.index, proposal, applied)

    # -- questions -------------------------------------------------------------------------------------------

    def running(self) -> list[SimNode]:
        return [node for node in self.nodes.values() if node.alive]

    def leader(self) -> SimNode | None:
        """The leader of the highest term, if it runs."""
        leaders = [
            node
            for node in self.nodes.values()
            if node.status is not None and node.status.role is Role.LEADER
        ]
        return max(leaders, key=lambda node: node.status.term if node.status else 0, default=None)

    def describe(self) -> str:
        lines = []
        for node in self.nodes.values():
            status = node.status
            if status is None:
                lines.append(f"  node {node.name}: {'gone' if node.gone else 'down'}")
                continue
            lines.append(
                f"  node {node.name}: {status.role.value} term {status.term} leader {status.leader} commit "
                f"{status.commit} "
                f"applied {status.applied} log {status.first_index}..{status.last_index} durable "
                f"{status.durable_index} "
                f"voters {status.membership.voters}{status.membership.outgoing or ''} learners "
                f"{status.membership.learners}"
            )
        return "\n".join(lines)


def _ignore(_: object) -> None:
    pass


def _replica_config(knobs: Knobs) -> ReplicaConfig:
    core = CoreConfig(
        election_ticks=knobs.election_ticks,
        heartbeat_ticks=knobs.heartbeat_ticks,
        max_append_bytes=knobs.max_append_bytes,
        max_inflight=knobs.max_inflight,
        max_inflight_bytes=knobs.max_inflight_bytes,
        max_uncommitted_bytes=knobs.max_uncommitted_bytes,
        max_apply_bytes=knobs.max_apply_bytes,
        max_pending_reads=knobs.max_pending_reads,
        keep_entries=knobs.keep_entries,
        snapshot_chunk_bytes=knobs.snapshot_chunk_bytes,
        snapshot_timeout_ticks=knobs.snapshot_timeout_ticks,
        promote_max_lag=knobs.promote_max_lag,
    )
    return ReplicaConfig(core=core, tick_ms=knobs.tick_ms, snapshot_entries=knobs.snapshot_entries)
