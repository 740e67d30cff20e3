"""A calm world for scripted tests: no chance faults, round numbers, and a few verbs that read like the
story."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sava.metadata.commands import Put, Txn, TxnResult
from sava.metadata.peer import Committed, LeaderRequest, Propose, ReadAt, ReadIndex, Reply
from tests.sim.knobs import draw
from tests.sim.node import SimNode
from tests.sim.world import World

CALM: dict[str, Any] = {
    "faults": frozenset(),
    "tick_ms": 100,
    "election_ticks": 10,
    "heartbeat_ticks": 1,
    "max_append_bytes": 1 << 20,
    "max_inflight": 64,
    "max_inflight_bytes": 8 << 20,
    "max_uncommitted_bytes": 32 << 20,
    "max_apply_bytes": 4 << 20,
    "max_pending_reads": 4096,
    "keep_entries": 0,
    "snapshot_entries": 10_000,
    "snapshot_chunk_bytes": 500,
    "snapshot_timeout_ticks": 50,
    "promote_max_lag": 100,
    "file_bytes": 1 << 20,
    "latency_us": 1_000,
    "sync_us": 1_000,
    "skew_percent": (100, 100),
}


class Story:
    """A cluster and what happens to it. Every invariant watches, as in a random run."""

    def __init__(self, nodes: int = 3, seed: int = 1, **knobs: Any) -> None:
        self.world = World(replace(draw(seed), **{**CALM, "seed": seed, "nodes": nodes, **knobs}))
        self.world.restart_after_ms = None
        self.world.found(nodes)
        self.wait_for_leader()

    def node(self, number: int) -> SimNode:
        return self.world.nodes[number]  # type: ignore[index]

    @property
    def leader(self) -> SimNode:
        leader = self.world.leader()
        assert leader is not None
        return leader

    @property
    def followers(self) -> list[SimNode]:
        leader = self.leader
        return [node for node in self.world.nodes.values() if node is not leader]

    def wait_for_leader(self) -> SimNode:
        def is_ready() -> bool:
            leader = self.world.leader()
            return leader is not None and leader.replica is not None and leader.replica.is_leader

        self.world.wait_for(is_ready, "a leader")
        return self.leader

    def ask(self, node: SimNode, request: LeaderRequest, timeout_ms: int = 5000) -> list[Reply | None]:
        """The list gets the reply when there is one."""
        replies: list[Reply | None] = []
        node.ask(request, replies.append, timeout_ms)
        return replies

    def answer(self, node: SimNode, request: LeaderRequest, timeout_ms: int = 5000) -> Reply | None:
        replies = self.ask(node, request, timeout_ms)
        self.world.wait_for(lambda: bool(replies), f"an answer to {request}")
        return replies[0]

    def put(self, key: str, value: bytes, node: SimNode | None = None) -> TxnResult:
        reply = self.answer(node or self.leader, Propose(Txn(then=(Put(key, value),))))
        assert isinstance(reply, Committed), reply
        assert isinstance(reply.result, TxnResult), reply
        return reply.result

    def read(self, key: str, node: SimNode | None = None) -> bytes | None:
        node = node or self.leader
        reply = self.answer(node, ReadIndex())
        assert isinstance(reply, ReadAt), reply
        assert node.replica is not None
        kv = node.replica.machine.get(key)
        return kv.value if kv is not None else None

    def cut_off(self, node: SimNode) -> None:
        others = [other for other in self.world.nodes if other != node.id]
        self.world.net.block([link for other in others for link in ((node.id, other), (other, node.id))])

    def reconnect(self) -> None:
        self.world.net.blocked.clear()

    def wait_for_equal_states(self) -> None:
        def is_equal() -> bool:
            running = [node.replica.machine for node in self.world.running() if node.replica is not None]
            return len({(m.revision, m.digest()) for m in running}) == 1

        self.world.wait_for(is_equal, "equal states on all running nodes")
