"""Random schedules over the core alone: every fault that needs no real disk, every request, every seed
reproducible.

The simulator in ``tests/sim`` does this with the real log, codec and state machine. This one is smaller and
faster, and checks after every step what must hold in any schedule (see ``World.check``).
"""

from __future__ import annotations

import os
from random import Random

import pytest

from sava.errors import SavaError
from sava.raft import (
    CoreConfig,
    InvariantError,
    MembershipChange,
    NodeId,
    Role,
)
from sava.raft.progress import has_quorum
from tests.unit.raft.harness import Cluster, Node


class World(Cluster):
    """A cluster whose wire is a bag: messages are lost, doubled, reordered; disks are late; nodes crash."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(f"world/{seed}")
        rng = self.rng
        size = rng.choice([1, 2, 3, 3, 3, 5])
        config = CoreConfig(
            election_ticks=rng.choice([5, 10]),
            keep_entries=rng.choice([0, 0, 3, 1000]),
            snapshot_chunk_bytes=rng.choice([4, 64]),
            snapshot_timeout_ticks=rng.choice([5, 50]),
            max_inflight=rng.choice([1, 2, 64]),
            max_append_bytes=rng.choice([1, 100, 1 << 20]),
            max_apply_bytes=rng.choice([1, 1 << 20]),
            promote_max_lag=rng.choice([2, 100]),
        )
        super().__init__(range(1, size + 1), learners=range(size + 1, size + 3), config=config, seed=seed)
        for node in self.nodes.values():
            node.auto_persist = False
        self.seen_commit: dict[int, tuple[int, bytes]] = {}
        self.max_commit = 0
        self.reads: dict[int, int] = {}
        self.checked_reads: dict[int, int] = {}
        self.proposals = 0
        self.loss = rng.choice([0, 0.02, 0.2])
        self.next_id = size + 3

    # -- actions ---------------------------------------------------------------------------------------------

    def act(self) -> None:
        rng = self.rng
        node = self.nodes[rng.choice(sorted(self.nodes))]
        roll = rng.random()
        if roll < 0.40:
            self.deliver_some()
        elif roll < 0.68:
            for each in list(self.nodes.values()):
                if rng.random() < 0.7:
                    self.progress(each)
        elif roll < 0.78:
            for each in self.nodes.values():
                if each.is_up and rng.random() < 0.9:
                    each.core.tick()
        elif roll < 0.93:
            self.request(self.nodes.get(self.leader(), node))
        elif roll < 0.94:
            self.crash_or_restart(node)
        elif roll < 0.945:
            self.repartition()
        else:
            self.operate(self.nodes.get(self.leader(), node) if rng.random() < 0.6 else node)

    def deliver_some(self) -> None:
        for _ in range(self.rng.randrange(1, 12)):
            if not self.wire:
                return
            message = self.wire.pop(self.rng.randrange(min(len(self.wire), 8)))
            if self.rng.random() < self.loss:
                continue
            if self.rng.random() < 0.03:
                self.wire.append(message)
            self.deliver(message)

    def progress(self, node: Node) -> None:
        if not node.is_up:
            return
        node.pump()
        if self.rng.random() < 0.8:
            node.persist(self.rng.choice([1, None]))
            node.pump()

    def request(self, node: Node) -> None:
        if not node.is_up:
            return
        try:
            if self.rng.random() < 0.7:
                node.core.propose([b"%d" % (self.proposals + n) for n in range(self.rng.randrange(1, 4))])
                self.proposals += 3
            else:
                token = len(self.reads)
                node.core.request_read(token)
                self.reads[token] = self.max_commit
        except InvariantError:
            raise
        except SavaError:
            pass

    def crash_or_restart(self, node: Node) -> None:
        if node.is_up:
            node.persist(self.rng.randrange(len(node.unwritten) + 1))
            node.crash()
        else:
            node.restart()

    def repartition(self) -> None:
        self.cuts.clear()
        if self.rng.random() < 0.6:
            nodes = sorted(self.nodes)
            self.rng.shuffle(nodes)
            at = self.rng.randrange(len(nodes) + 1)
            self.cut(nodes[:at], nodes[at:])
        elif self.rng.random() < 0.5:
            self.cuts.update(
                (self.rng.choice(sorted(self.nodes)), self.rng.choice(sorted(self.nodes))) for _ in range(4)
            )

    def operate(self, node: Node) -> None:
        if not node.is_up:
            return
        roll = self.rng.random()
        if roll < 0.4:
            if node.core.can_checkpoint() and not node.unwritten and node.applied > node.disk.snapshot.index:
                node.snapshot()
            return
        try:
            if roll < 0.6:
                node.core.transfer_leadership(NodeId(self.rng.choice(sorted(self.nodes))))
            elif roll < 0.7:
                node.core.peer_unreachable(NodeId(self.rng.choice(sorted(self.nodes))))
                node.core.snapshot_failed(NodeId(self.rng.choice(sorted(self.nodes))))
                node.core.leader_unreachable(node.core.leader)
            else:
                self.reconfigure(node)
        except InvariantError:
            raise
        except SavaError:
            pass

    def reconfigure(self, node: Node) -> None:
        members = node.status.membership
        change = MembershipChange(forced=self.rng.random() < 0.3)
        if self.rng.random() < 0.3 and len(self.nodes) < 8:
            joiner = self.next_id
            node.core.change_membership(MembershipChange(add_learners=((NodeId(joiner), f"h{joiner}"),)))
            self.next_id += 1
            self.join(joiner).auto_persist = False
            return
        some = [n for n in members.learners if self.rng.random() < 0.5]
        gone = [n for n in members.voters if self.rng.random() < 0.25]
        node.core.change_membership(
            MembershipChange(promote=tuple(some), remove=tuple(gone), forced=change.forced)
        )

    # -- what must hold --------------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        for node in self.nodes.values():
            if node.is_up:
                self._check_commit(node)
        for node in self.nodes.values():
            self._check_reads(node)

    def _check_commit(self, node: Node) -> None:
        """I3, I6, I7: what is committed never changes, and was durable on a quorum of the configuration in
        force."""
        status = node.status
        if status.commit > self.max_commit:
            self.max_commit = status.commit
            if status.role is Role.LEADER:
                holders = {
                    NodeId(n): self._holds(other, status.commit, node.core.term_at(status.commit))
                    for n, other in self.nodes.items()
                }
                if not has_quorum(status.membership, holders):
                    raise InvariantError(f"{status.commit} is committed and durable on {holders} only")
        for index in range(max(status.first_index, status.commit - 5), status.commit + 1):
            entry = node.core._state.log.between(index, index + 1)[0]
            known = self.seen_commit.setdefault(index, (entry.term, entry.data))
            if known != (entry.term, entry.data):
                raise InvariantError(f"node {node.id} committed {entry} where {known} was committed")

    @staticmethod
    def _holds(node: Node, index: int, term: int) -> bool:
        disk = node.disk
        if index <= disk.snapshot.index:
            return True
        return any(entry.index == index and entry.term == term for entry in disk.entries)

    def _check_reads(self, node: Node) -> None:
        for token, index in node.reads_ready:
            if token in self.checked_reads:
                continue
            self.checked_reads[token] = index
            if index < self.reads[token]:
                raise InvariantError(
                    f"read {token} answered at {index}; {self.reads[token]} was committed before it"
                )

    def heal_and_converge(self) -> None:
        self.cuts.clear()
        self.loss = 0
        for node in self.nodes.values():
            if not node.is_up:
                node.restart()
            node.auto_persist = True
            node.pump()
            node.persist()
        self.run()
        leader = self.converge(ticks=600)
        machine = self.nodes[leader].machine
        for n in self.nodes[leader].status.membership.members:
            assert self.nodes[n].machine == machine
        assert self.nodes[leader].commit >= self.max_commit
        indexes = self.nodes[leader].core.propose([b"last"])
        self.run()
        assert self.nodes[leader].commit == indexes[-1]


def run_seed(seed: int, steps: int = 1200) -> World:
    world = World(seed)
    for _ in range(steps):
        world.act()
        world.check()
    world.heal_and_converge()
    return world


SEEDS = range(int(os.environ.get("SAVA_RAFT_SEED", "0")), int(os.environ.get("SAVA_RAFT_SEED", "0")) + 40)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_schedule(seed):
    print(f"seed {seed}")
    run_seed(seed)
