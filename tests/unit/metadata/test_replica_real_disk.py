"""The replica over the real parts: a directory, the log's writer thread, fsync."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from random import Random

from sava.metadata import snapshots
from sava.metadata.commands import Put, Txn
from sava.metadata.identity import NodeState, cluster_id_of, open_state
from sava.metadata.machine.state_machine import FrozenState
from sava.metadata.peer import Bootstrap, Committed, Propose, Reply
from sava.metadata.replica.replica import Process, Replica, ReplicaConfig, ReplicaDisk
from sava.raft.types import Membership, SnapshotMeta
from sava.wal.disk import LocalDisk
from sava.wal.writer import Writer
from tests.support.waiting import PATIENCE_S


class RealNode:
    """One life of a node on a real directory; the test's thread is its event loop."""

    def __init__(self, path: Path) -> None:
        self.state: NodeState = open_state(LocalDisk(path), rng=Random(1))
        self.completions: queue.Queue[Callable[[], None]] = queue.Queue()
        self.writer = Writer(self.state.log, deliver=self.completions.put)
        self.failures: list[BaseException] = []
        self.replica = Replica(
            Process(self.state.node, "a:1", self.state.incarnation, nonce=1),
            ReplicaConfig(snapshot_entries=50),
            ReplicaDisk(self.state.recovered, self.writer, self.state.snapshots, self.save),
            send=lambda _: None,
            fail=self.failures.append,
            rng=Random(2),
            wall_ms=lambda: 1,
        )

    def save(
        self, base: SnapshotMeta, frozen: FrozenState, done: Callable[[SnapshotMeta | BaseException], None]
    ) -> None:
        meta = snapshots.save(self.state.snapshots, base, frozen.chunks())
        self.completions.put(lambda: done(meta))

    def run_until(self, condition: Callable[[], bool]) -> None:
        self.replica.pump(0)
        while not condition():
            self.completions.get(timeout=PATIENCE_S)()
            self.replica.pump(0)
            assert self.failures == []

    def close(self) -> None:
        self.writer.close()
        self.state.release()


def test_two_lives_on_a_real_directory(tmp_path: Path) -> None:
    first = RealNode(tmp_path)
    node = first.state.node
    membership = Membership(voters=(node,), addresses=((node, "a:1"),))
    first.replica.bootstrap(Bootstrap(cluster_id_of([node]), membership), lambda _: None)
    first.run_until(lambda: first.replica.is_leader)
    replies: list[Reply] = []
    for number in range(200):
        first.replica.ask(Propose(Txn(then=(Put(f"/k/{number}", b"v"),))), replies.append, deadline_ms=1_000)
        if number % 10 == 9:
            first.run_until(lambda wanted=number + 1: len(replies) == wanted)  # type: ignore[misc]
    assert all(isinstance(reply, Committed) for reply in replies)
    first.run_until(lambda: first.replica.status().snapshot_index >= 150)
    digest = first.replica.machine.digest()
    first.close()

    second = RealNode(tmp_path)
    second.run_until(lambda: second.replica.is_leader)
    assert second.replica.machine.digest() == digest
    assert second.replica.status().keys == 200
    second.close()
