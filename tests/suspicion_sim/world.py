"""A world of N nodes that run the real ``Suspicion``. Every delay and every loss comes of a seed.

What is modelled, and how:

* **TCP.** A lost message is sent again after a timeout that doubles, and what was sent behind it waits for
  it. So loss shows as pauses of one to several seconds, as it does in reality. A connection that carries
  nothing for four seconds breaks (``TCP_USER_TIMEOUT``).
* **Connections.** When a process dies, its peers learn it a moment later; after that, connects are refused,
  with the pauses of a lane in between. A stopped process accepts connections and says nothing.
* **Processes** are killed, stopped, and slowed down: a busy process handles what has arrived only in its
  slices of time, ticks included.
* **Raft** is a stand-in: one leader at a time, which sends a heartbeat with every tick; when it cannot be
  heard, another one leads after an election timeout. Registering is a message to the leader. Ending a lease
  needs a majority that can be reached, and names the term and the lease, as the product's write does.

The oracle knows the truth. An eviction is *false* when its victim ran, was not slowed down beyond the floor,
and a majority could reach it, for long enough to connect to it again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from sava.metadata.peer import Doubt, Opinion, Ping
from sava.metadata.suspicion import FLOOR_MS, Note, Suspicion
from sava.raft.types import NodeId

TICK_MS = 100
LEASE_MS = 6_000
ELECTION_MS = 1_500
REFUSED_ELECTION_MS = 500
REGISTER_MS = 50
WRITE_MS = 20
BREAKS_MS = 4_000
CONNECT_MS = 2_000
SETTLE_MS = CONNECT_MS + 1_500
"""A connect under way fails, the lane pauses, and the next one succeeds."""
DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Network:
    delay_ms: int = 1
    jitter_ms: int = 1
    loss: float = 0.0

    @property
    def retransmit_ms(self) -> int:
        return 200 + 2 * (self.delay_ms + self.jitter_ms)


@dataclass(slots=True)
class _Link:
    """From one node to another."""

    is_connected: bool = False
    is_connecting: bool = False
    pause_ms: int = 50
    resume_at: int = 0
    delivered_at: int = 0
    cut_at: int = -1


@dataclass(slots=True)
class Eviction:
    at: int
    node: NodeId
    sign: str
    is_false: bool


@dataclass(slots=True)
class Node:
    id: NodeId
    suspicion: Suspicion
    life: int = 1
    state: str = "running"
    lease: int = 0
    busy_until: int = 0
    """It handles nothing before then; what arrives waits."""
    inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    term: int = 0
    """In which it believes to lead."""
    down_since: int = -1
    out_since: int = -1
    """Since when it does not run, or cannot be reached; for the lease."""
    well_since: int = 0


class World:
    def __init__(self, seed: int | str, nodes: int = 3, network: Network | None = None) -> None:
        self.rng = Random(f"suspicion/{seed}")
        self.net = network or Network()
        self.now = 1_000
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self.ids = [NodeId(number) for number in range(1, nodes + 1)]
        self.nodes: dict[NodeId, Node] = {}
        self.links: dict[tuple[NodeId, NodeId], _Link] = {}
        self.registered: dict[NodeId, int] = {}
        self._leases = 0
        self.term = 0
        self.leader: NodeId | None = None
        self.evictions: list[Eviction] = []
        self.expiries: list[tuple[int, NodeId]] = []
        self.notes: list[tuple[int, NodeId, Note]] = []
        self.broken: list[str] = []
        """Rules that were broken."""
        for id_ in self.ids:
            self.nodes[id_] = Node(id_, self._detector(id_))
            for other in self.ids:
                if other != id_:
                    self.links[id_, other] = _Link()
        for id_ in self.ids:
            self._register(id_, 1)
            self.after(self.rng.randrange(TICK_MS), self._tick, id_, 1)
        self.after(1, self._supervise)

    def _detector(self, node: NodeId) -> Suspicion:
        suspicion = Suspicion(node, tick_ms=TICK_MS)
        suspicion.watch(lambda each: self.registered.get(each, 0), lease_ms=LEASE_MS)
        return suspicion

    # -- time ----------------------------------------------------------------------------------

    def after(self, delay_ms: int, action: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._events, (self.now + delay_ms, self._order, action, arguments))

    def run(self, duration_ms: int) -> None:
        end = self.now + duration_ms
        events = self._events
        while events and events[0][0] <= end:
            self.now, _, action, arguments = heapq.heappop(events)
            action(*arguments)
        self.now = end

    # -- faults --------------------------------------------------------------------------------

    def kill(self, id_: NodeId) -> None:
        node = self.nodes[id_]
        node.state, node.down_since, node.term = "dead", self.now, 0
        node.inbox.clear()
        for other in self.ids:
            if other != id_:
                self.links[id_, other] = _Link(cut_at=self.links[id_, other].cut_at)
                self.after(self.net.delay_ms, self._reset, other, id_)

    def restart(self, id_: NodeId) -> None:
        node = self.nodes[id_]
        node.state, node.down_since = "running", -1
        node.life += 1
        node.lease = 0
        node.suspicion = self._detector(id_)
        self.after(1, self._tick, id_, node.life)
        self.after(REGISTER_MS, self._register, id_, node.life)

    def stop(self, id_: NodeId) -> None:
        node = self.nodes[id_]
        node.state, node.down_since = "stopped", self.now

    def resume(self, id_: NodeId) -> None:
        node = self.nodes[id_]
        node.state, node.down_since = "running", -1
        self._drain(node)

    def stall(self, id_: NodeId, duration_ms: int) -> None:
        node = self.nodes[id_]
        node.busy_until = max(node.busy_until, self.now + duration_ms)
        self.after(node.busy_until - self.now, self._drain, node)

    def cut(self, source: NodeId, target: NodeId) -> None:
        self.links[source, target].cut_at = self.now

    def mend(self, source: NodeId, target: NodeId) -> None:
        self.links[source, target].cut_at = -1

    def isolate(self, id_: NodeId) -> None:
        for other in self.ids:
            if other != id_:
                self.cut(id_, other)
                self.cut(other, id_)

    def rejoin(self, id_: NodeId) -> None:
        for other in self.ids:
            if other != id_:
                self.mend(id_, other)
                self.mend(other, id_)

    # -- the network ---------------------------------------------------------------------------

    def _passes(self, source: NodeId, target: NodeId) -> bool:
        """Whether data gets through: also a cut of the other direction ends it, after the patience of TCP,
        for nothing is confirmed any more."""
        back = self.links[target, source].cut_at
        return self.links[source, target].cut_at < 0 and (back < 0 or self.now - back < BREAKS_MS)

    def _send(self, source: NodeId, target: NodeId, message: Any) -> None:
        node, link = self.nodes[source], self.links[source, target]
        node.suspicion.sent(target, self.now)
        if link.is_connected:
            if self.nodes[target].state == "dead":
                return
            if not self._passes(source, target):
                if self.now - max(link.cut_at, self.links[target, source].cut_at) >= BREAKS_MS:
                    self._break(source, target, is_refused=False)
                return
            self._transmit(source, target, link, message)
        elif not link.is_connecting and self.now >= link.resume_at:
            link.is_connecting = True
            self.after(2 * self.net.delay_ms, self._connected, source, target, node.life, message)

    def _transmit(self, source: NodeId, target: NodeId, link: _Link, message: Any) -> None:
        rng, net = self.rng, self.net
        delay, timeout = net.delay_ms + rng.randrange(net.jitter_ms + 1), net.retransmit_ms
        while net.loss and rng.random() < net.loss:
            delay += timeout
            timeout *= 2
        link.delivered_at = max(link.delivered_at, self.now + delay)
        arguments = (source, self.nodes[source].life, target, self.nodes[target].life, message)
        self.after(link.delivered_at - self.now, self._arrive, *arguments)

    def _connected(self, source: NodeId, target: NodeId, life: int, message: Any) -> None:
        node, link = self.nodes[source], self.links[source, target]
        if node.life != life or node.state == "dead":
            return
        cuts = (link.cut_at, self.links[target, source].cut_at)
        if max(cuts) >= 0:
            self.after(CONNECT_MS, self._break, source, target, False)
        elif self.nodes[target].state == "dead":
            self._break(source, target, is_refused=True)
        else:
            link.is_connected, link.is_connecting, link.pause_ms = True, False, 50
            self._transmit(source, target, link, message)

    def _reset(self, source: NodeId, target: NodeId) -> None:
        if self.links[source, target].is_connected:
            self._break(source, target, is_refused=False)

    def _break(self, source: NodeId, target: NodeId, is_refused: bool) -> None:
        link = self.links[source, target]
        link.is_connected = link.is_connecting = False
        link.resume_at = self.now + link.pause_ms
        link.pause_ms = min(2 * link.pause_ms, 1_000)
        node = self.nodes[source]
        self._handle(node, self._lost, source, target, node.life, is_refused)

    def _lost(self, source: NodeId, target: NodeId, life: int, is_refused: bool) -> None:
        node = self.nodes[source]
        if node.life == life:
            node.suspicion.lost(target, self.now, is_refused=is_refused)

    def _arrive(self, source: NodeId, life: int, target: NodeId, target_life: int, message: Any) -> None:
        node = self.nodes[target]
        if node.life == target_life and node.state != "dead":
            self._handle(node, self._receive, source, life, target, message)

    # -- processes -----------------------------------------------------------------------------

    def _handle(self, node: Node, action: Callable[..., None], *arguments: Any) -> None:
        if node.state == "stopped" or node.busy_until > self.now:
            node.inbox.append((action, arguments))
        elif node.state == "running":
            action(*arguments)

    def _drain(self, node: Node) -> None:
        if node.state == "running" and node.busy_until <= self.now:
            inbox, node.inbox = node.inbox, []
            for action, arguments in inbox:
                action(*arguments)

    def _receive(self, source: NodeId, life: int, target: NodeId, message: Any) -> None:
        node = self.nodes[target]
        node.suspicion.heard(source, life, self.now)
        if message == "heartbeat":
            self._send(target, source, "reply")
        elif isinstance(message, Doubt | Opinion):
            node.suspicion.receive(source, message, self.now)
        elif isinstance(message, str) and message.startswith("register"):
            if self.leader == target and self._is_well(target):
                self._grant(source, int(message.split()[1]))
        else:
            assert message == "reply" or isinstance(message, Ping)
        self._flush(node)

    def _tick(self, id_: NodeId, life: int) -> None:
        node = self.nodes[id_]
        if node.life != life or node.state == "dead":
            return
        if node.state == "stopped" or node.busy_until > self.now:
            # As the product: what has arrived is handled first, then one tick, and the others are forgotten.
            wait = 20 if node.state == "stopped" else node.busy_until - self.now + 20
            self.after(wait, self._tick, id_, life)
            return
        if node.term:
            for other in self.ids:
                if other != id_:
                    self._send(id_, other, "heartbeat")
        node.suspicion.tick(self.now, self.ids, node.term)
        self._flush(node)
        self.after(TICK_MS, self._tick, id_, life)

    def _flush(self, node: Node) -> None:
        suspicion = node.suspicion
        outbox, suspicion.outbox = suspicion.outbox, []
        for target, message in outbox:
            self._send(node.id, target, message)
        notes, suspicion.notes = suspicion.notes, []
        for note in notes:
            self.notes.append((self.now, node.id, note))
            if note.kind == "confirmed":
                if 2 * sum(1 for each in self.ids if self._reaches(node.id, each)) <= len(self.ids):
                    self.broken.append(f"{self.now}: {node.id} accuses {note.node} from a minority")
                    continue  # nothing is committed without a majority
                self.after(WRITE_MS, self._evict, node.id, note)

    # -- the cluster ---------------------------------------------------------------------------

    def _reaches(self, source: NodeId, target: NodeId) -> bool:
        runs = self.nodes[target].state == "running"
        is_cut = source != target and max(
            self.links[source, target].cut_at, self.links[target, source].cut_at
        )
        return runs and (source == target or is_cut == -1)

    def _is_settled(self, id_: NodeId) -> bool:
        """Well for long enough that the others have connected to it again."""
        return self._is_well(id_) and self.now - self.nodes[id_].well_since > SETTLE_MS

    def _is_well(self, id_: NodeId) -> bool:
        node = self.nodes[id_]
        near = sum(1 for each in self.ids if self._reaches(id_, each))
        return node.state == "running" and node.busy_until - self.now < FLOOR_MS and 2 * near > len(self.ids)

    def _evict(self, by: NodeId, note: Note) -> None:
        if note.term != self.term:
            return  # the write of a deposed leader
        if note.node == by:
            self.broken.append(f"{self.now}: leader {by} ends its own lease")
        if note.lease == self.registered.get(note.node):
            del self.registered[note.node]
            eviction = Eviction(self.now, note.node, note.sign.name.lower(), self._is_settled(note.node))
            self.evictions.append(eviction)
            self._notice(note.node)

    def _notice(self, id_: NodeId) -> None:
        """A broker whose registration is gone sees it in its copy of the metadata, and registers again."""
        node = self.nodes[id_]
        self.after(REGISTER_MS, self._handle, node, self._register, id_, node.life)

    def _register(self, id_: NodeId, life: int) -> None:
        """Ask the leader, until this life of the node is registered."""
        node = self.nodes[id_]
        if node.life != life or node.lease in self.registered.values():
            return
        self.after(5 * REGISTER_MS, self._handle, node, self._register, id_, life)
        if self.leader == id_:
            self._grant(id_, life)
        elif self.leader is not None:
            self._send(id_, self.leader, f"register {life}")

    def _grant(self, id_: NodeId, life: int) -> None:
        node = self.nodes[id_]
        if node.life == life and node.lease not in self.registered.values():
            self._leases += 1
            node.lease = self.registered[id_] = self._leases

    def _supervise(self) -> None:
        """Every 50 ms: leases that run out, and elections."""
        self.after(50, self._supervise)
        for id_, node in self.nodes.items():
            if self._is_well(id_):
                node.out_since = -1
                continue
            node.well_since = self.now
            if node.out_since < 0:
                node.out_since = self.now
            elif self.now - node.out_since > LEASE_MS and id_ in self.registered:
                del self.registered[id_]
                self.expiries.append((self.now, id_))
                self._notice(id_)
        self._elect()

    def _elect(self) -> None:
        leader = self.nodes[self.leader] if self.leader is not None else None
        if leader is not None and self._is_well(leader.id):
            return
        if leader is not None:
            patience = REFUSED_ELECTION_MS if leader.state == "dead" else ELECTION_MS
            if self.now - leader.out_since < patience:
                return
        for id_ in self.ids:
            if self._is_well(id_) and id_ != self.leader:
                self.term += 1
                if leader is not None:  # it learns it from the first message that it gets
                    self.after(200, self._depose, leader.id, self.term)
                self.leader = id_
                self.nodes[id_].term = self.term
                return

    def _depose(self, id_: NodeId, term: int) -> None:
        node = self.nodes[id_]
        if self.leader != id_ and node.state == "running" and self._is_well(id_):
            node.term = 0
        elif self.leader != id_ and node.state != "dead":
            self.after(200, self._depose, id_, term)

    # -- what is asked of it -------------------------------------------------------------------

    def false_evictions(self) -> list[Eviction]:
        return [each for each in self.evictions if each.is_false]

    def count(self, kind: str) -> int:
        return sum(1 for _, _, note in self.notes if note.kind == kind)

    def out_after(self, began: int, id_: NodeId) -> int | None:
        """Milliseconds from ``began`` until the registration was gone, by eviction or by the lease."""
        ends = [each.at for each in self.evictions if each.node == id_ and each.at >= began]
        ends += [at for at, node in self.expiries if node == id_ and at >= began]
        return min(ends) - began if ends else None


def others(world: World) -> Sequence[NodeId]:
    return [id_ for id_ in world.ids if id_ != world.leader]
