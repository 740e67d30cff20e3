"""A handful of cores on one table: a network that does what it is told, disks that survive crashes, no time
but ticks.

``Cluster.run`` delivers messages one by one until nothing moves. A test shapes the schedule by cutting links,
holding back or dropping messages by predicate, switching a node's disk to manual, and crashing nodes. Every
message passes through the codec on its way. After each delivery the harness checks what must hold in *every*
schedule: one leader per term, committed entries that never change, and state machines that agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import TypeVar, overload

import msgspec

from sava.raft import (
    NO_NODE,
    CoreConfig,
    Entry,
    EntryKind,
    HardState,
    InvariantError,
    Membership,
    Message,
    NodeId,
    Output,
    PeerStatus,
    RaftCore,
    Recovered,
    Role,
    SnapshotChunk,
    SnapshotMeta,
    Status,
    check_message,
)

MESSAGES: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

CONFIG = CoreConfig(election_ticks=10, heartbeat_ticks=1, keep_entries=0, snapshot_chunk_bytes=16)

Predicate = Callable[[Message], bool]
Kind = TypeVar("Kind", bound=Message)

N1, N2, N3, N4, N5 = map(NodeId, range(1, 6))


def membership(
    voters: Iterable[int], learners: Iterable[int] = (), outgoing: Iterable[int] = ()
) -> Membership:
    return Membership(ids(sorted(voters)), ids(sorted(outgoing)), ids(sorted(learners)))


def ids(numbers: Iterable[int]) -> tuple[NodeId, ...]:
    return tuple(NodeId(number) for number in numbers)


def entries_of(terms: Sequence[int], start: int = 1) -> tuple[Entry, ...]:
    """A log written as the terms of its entries: ``[1, 1, 4]``."""
    return tuple(
        Entry(index, term, EntryKind.COMMAND, b"%d@%d" % (index, term))
        for index, term in enumerate(terms, start)
    )


def empty_snapshot(members: Membership) -> SnapshotMeta:
    return SnapshotMeta(0, 0, members, 0, b"")


def recovered(
    members: Membership, terms: Sequence[int] = (), *, term: int | None = None, vote: int = 0, commit: int = 0
) -> Recovered:
    hard = HardState(term if term is not None else max(terms, default=0), NodeId(vote), commit)
    return Recovered(hard, empty_snapshot(members), entries_of(terms))


def make_core(
    node: int,
    members: Membership,
    terms: Sequence[int] = (),
    *,
    term: int | None = None,
    vote: int = 0,
    commit: int = 0,
    config: CoreConfig = CONFIG,
    seed: int = 1,
) -> RaftCore:
    found = recovered(members, terms, term=term, vote=vote, commit=commit)
    return RaftCore(NodeId(node), config, found, Random(f"{seed}/{node}").randrange)


def drain(core: RaftCore, *, persist: bool = True) -> list[Output]:
    """Poll one core until it has nothing to say; the disk is instant unless ``persist`` is false."""
    outputs = []
    while core.has_output():
        output = core.poll()
        outputs.append(output)
        if persist:
            core.persisted(output.number)
        if output.apply:
            core.applied(output.apply[-1].index)
    return outputs


@overload
def sent(outputs: Iterable[Output], kind: type[Kind]) -> list[Kind]: ...
@overload
def sent(outputs: Iterable[Output]) -> list[Message]: ...
def sent(outputs: Iterable[Output], kind: type[Kind] | None = None) -> Sequence[Message]:
    messages = [m for out in outputs for m in (*out.send_now, *out.send_after_persist)]
    return [m for m in messages if kind is None or isinstance(m, kind)]


def only(outputs: Iterable[Output], kind: type[Kind]) -> Kind:
    """The one message that was sent."""
    (message,) = sent(outputs)
    assert isinstance(message, kind)
    return message


class Disk:
    """The durable image of one node: what a crash leaves."""

    def __init__(self, found: Recovered) -> None:
        self.hard_state = found.hard_state
        self.snapshot = found.snapshot
        self.entries = list(found.entries)
        self.compacted_term = found.compacted_term
        self.files: dict[SnapshotMeta, bytes] = {}
        self._partial = bytearray()
        self.corrupt_next_install = False

    def write(self, output: Output) -> bool:
        """Make an output durable. False: its snapshot did not verify, and nothing was changed."""
        for chunk in output.chunks:
            if chunk.offset == 0:
                self._partial = bytearray()
            assert chunk.offset == len(self._partial), "chunks leave a hole"
            self._partial += chunk.data
        if output.install is not None:
            assert output.hard_state is None
            assert not output.entries
            assert not output.send_after_persist
            if self.corrupt_next_install:
                self.corrupt_next_install = False
                return False
            assert hashlib.sha256(self._partial).digest() == output.install.digest
            self.files[output.install] = bytes(self._partial)
            self.snapshot = output.install
            self.entries.clear()
            self.compacted_term = output.install.term
        if output.truncate_from is not None and output.install is None:
            assert output.truncate_from > self.hard_state.commit or not self.entries
            self.entries = [entry for entry in self.entries if entry.index < output.truncate_from]
        if output.hard_state is not None:
            assert output.hard_state.term >= self.hard_state.term, "the term went back"
            self.hard_state = output.hard_state
        for entry in output.entries:
            expected = self.entries[-1].index + 1 if self.entries else None
            assert expected is None or entry.index == expected, f"wrote {entry.index}, expected {expected}"
            assert entry.term <= self.hard_state.term, "an entry is durable before its term"
            self.entries.append(entry)
        return True

    def recover(self) -> Recovered:
        return Recovered(self.hard_state, self.snapshot, tuple(self.entries), self.compacted_term)

    def terms(self) -> list[int]:
        return [entry.term for entry in self.entries]


class Node:
    def __init__(self, cluster: Cluster, node: int, found: Recovered) -> None:
        self.cluster = cluster
        self.id = NodeId(node)
        self.disk = Disk(found)
        self.auto_persist = True
        self.is_up = True
        self.lives = 0
        self.start()

    def start(self) -> None:
        self.lives += 1
        rng = Random(f"{self.cluster.seed}/{self.id}/{self.lives}")
        self.core = RaftCore(self.id, self.cluster.config_of(self.id), self.disk.recover(), rng.randrange)
        self.is_up = True
        self.unwritten: list[Output] = []
        self.outputs: list[Output] = []
        self.reads_ready: list[tuple[int, int]] = []
        self.reads_failed: list[int] = []
        self.load_state_machine()

    def load_state_machine(self) -> None:
        content = self.disk.files.get(self.disk.snapshot)
        self.machine: list[bytes] = msgspec.msgpack.decode(content, type=list[bytes]) if content else []
        self.applied = self.disk.snapshot.index

    def crash(self) -> None:
        """Everything that was not written is gone."""
        self.is_up = False

    def restart(self) -> None:
        self.start()

    # -- driving ---------------------------------------------------------------------------------------------

    def pump(self) -> None:
        while self.is_up and self.core.has_output():
            self.take(self.core.poll())

    def take(self, output: Output) -> None:
        self.outputs.append(output)
        self.cluster.post(output.send_now)
        for chunk in output.send_chunks:
            data = self.disk.files[chunk.meta][chunk.offset : chunk.offset + chunk.length]
            message = SnapshotChunk(self.id, chunk.peer, chunk.term, chunk.meta, chunk.offset, data, 0)
            self.cluster.post([message])
        for read in output.reads_ready:
            self.reads_ready.append((read.token, read.index))
        self.reads_failed.extend(output.reads_failed)
        self.apply(output.apply)
        self.unwritten.append(output)
        if self.auto_persist:
            self.persist()

    def persist(self, count: int | None = None) -> None:
        """The disk completes what it was asked to write (the first ``count`` outputs, or all)."""
        done = self.unwritten[:count] if count is not None else self.unwritten[:]
        del self.unwritten[: len(done)]
        for output in done:
            if not self.disk.write(output):
                self.core.install_failed(output.number)
                continue
            self.cluster.post(output.send_after_persist)
            if output.install is not None:
                self.load_state_machine()
            self.core.persisted(output.number)

    def apply(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            assert entry.index == self.applied + 1, f"applied {entry.index} after {self.applied}"
            self.applied = entry.index
            self.cluster.note_applied(self.id, entry)
            if entry.kind is EntryKind.COMMAND:
                self.machine.append(entry.data)
        if entries:
            durable = self.disk.entries[-1].index if self.disk.entries else self.disk.snapshot.index
            assert entries[-1].index <= durable, "applied before it was durable here"
            self.core.applied(self.applied)

    def snapshot(self, *, truncate_disk: bool = True) -> SnapshotMeta:
        """Take a local snapshot of all that is applied, make it durable, and compact."""
        content = msgspec.msgpack.encode(self.machine)
        index = self.applied
        meta = SnapshotMeta(
            index,
            self.core.term_at(index),
            self.core.membership_at(index),
            len(content),
            hashlib.sha256(content).digest(),
        )
        self.disk.files[meta] = content
        self.disk.snapshot = meta
        self.core.snapshot_taken(meta)
        if truncate_disk:
            checkpoint = self.core.checkpoint()
            self.disk.entries = list(checkpoint.entries)
            self.disk.compacted_term = checkpoint.compacted_term
        return meta

    # -- looking ---------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        return self.core.status()

    @property
    def role(self) -> Role:
        return self.core.status().role

    @property
    def term(self) -> int:
        return self.core.status().term

    @property
    def commit(self) -> int:
        return self.core.status().commit

    @property
    def last(self) -> int:
        return self.core.status().last_index

    def terms(self) -> list[int]:
        status = self.core.status()
        return [self.core.term_at(index) for index in range(status.first_index, status.last_index + 1)]

    def peer(self, node: int) -> PeerStatus:
        return next(peer for peer in self.status.peers if peer.node == node)


class Cluster:
    def __init__(
        self,
        voters: Iterable[int] = (1, 2, 3),
        learners: Iterable[int] = (),
        *,
        config: CoreConfig = CONFIG,
        seed: int = 1,
        logs: Mapping[int, Sequence[int]] | None = None,
        terms: dict[int, int] | None = None,
        commits: dict[int, int] | None = None,
    ) -> None:
        self.seed = seed
        self.config = config
        self.configs: dict[int, CoreConfig] = {}
        self.wire: list[Message] = []
        self.held: list[Message] = []
        self.delivered: list[Message] = []
        self.hold: Predicate | None = None
        self.drop: Predicate | None = None
        self.cuts: set[tuple[int, int]] = set()
        self._leaders: dict[int, int] = {}
        self._committed: dict[int, tuple[int, bytes]] = {}
        self.nodes: dict[int, Node] = {}
        members = membership(voters, learners)
        for node in members.members:
            found = recovered(
                members,
                (logs or {}).get(node, ()),
                term=(terms or {}).get(node),
                commit=(commits or {}).get(node, 0),
            )
            self.nodes[node] = Node(self, node, found)

    def config_of(self, node: int) -> CoreConfig:
        return self.configs.get(node, self.config)

    def __getitem__(self, node: int) -> Node:
        return self.nodes[node]

    def join(self, node: int) -> Node:
        """Start a pristine node that no configuration names yet."""
        self.nodes[node] = Node(self, node, recovered(Membership()))
        return self.nodes[node]

    # -- network ---------------------------------------------------------------------------------------------

    def post(self, messages: Iterable[Message]) -> None:
        self.wire.extend(messages)

    def cut(self, *groups: Iterable[int]) -> None:
        """Split the network into groups that do not hear each other."""
        sides = [tuple(group) for group in groups]
        for at, side in enumerate(sides):
            for other in (node for rest in sides[:at] + sides[at + 1 :] for node in rest):
                self.cuts.update((node, other) for node in side)

    def isolate(self, node: int) -> None:
        self.cut([node], [other for other in self.nodes if other != node])

    def cut_one_way(self, src: int, dst: int) -> None:
        self.cuts.add((src, dst))

    def heal(self) -> None:
        self.cuts.clear()
        self.drop = None

    def release(self, where: Predicate | None = None) -> None:
        """Put held messages back on the wire, in order, and stop holding."""
        self.hold = None
        again = [m for m in self.held if where is None or where(m)]
        self.held = [m for m in self.held if where is not None and not where(m)]
        self.wire.extend(again)
        self.run()

    def run(self, limit: int = 20000) -> None:
        """Deliver until nothing moves."""
        for _ in range(limit):
            for node in list(self.nodes.values()):
                node.pump()
            self.check()
            if not self.wire:
                return
            self.deliver(self.wire.pop(0))
        raise AssertionError("the cluster does not come to rest")

    def deliver(self, message: Message) -> None:
        if (message.src, message.dst) in self.cuts or (self.drop is not None and self.drop(message)):
            return
        if self.hold is not None and self.hold(message):
            self.held.append(message)
            return
        target = self.nodes.get(message.dst)
        if target is None or not target.is_up:
            return
        decoded = MESSAGES.decode(msgspec.msgpack.encode(message))
        check_message(decoded)
        assert decoded == message
        self.delivered.append(message)
        target.core.step(decoded)

    # -- time and roles --------------------------------------------------------------------------------------

    def tick(self, count: int = 1, *, only: Iterable[int] | None = None) -> None:
        who = sorted(self.nodes) if only is None else list(only)
        for _ in range(count):
            for node in who:
                if self.nodes[node].is_up:
                    self.nodes[node].core.tick()
            self.run()

    def elect(self, node: int) -> Node:
        """Make ``node`` the leader: everyone else forgets the old one first, then it campaigns."""
        for other in self.nodes.values():
            if other.is_up and other.id != node and other.role is not Role.LEADER:
                for _ in range(self.config_of(other.id).election_ticks):
                    other.core._state.election_elapsed += 1  # patience without a campaign of its own
        self.nodes[node].core.campaign()
        self.run()
        assert self.nodes[node].role is Role.LEADER, f"node {node} is {self.nodes[node].role}"
        return self.nodes[node]

    def propose(self, node: int, *payloads: bytes) -> range:
        indexes = self.nodes[node].core.propose(list(payloads))
        self.run()
        return indexes

    def leader(self) -> int:
        """The one leader of the highest term, or NO_NODE."""
        leaders = [node for node in self.nodes.values() if node.is_up and node.role is Role.LEADER]
        return max(leaders, key=lambda node: node.term).id if leaders else NO_NODE

    def tick_until_leader(self, limit: int = 200, *, only: Iterable[int] | None = None) -> int:
        among = sorted(only if only is not None else self.nodes)
        for _ in range(limit):
            self.tick()
            leaders = [n for n in among if self.nodes[n].is_up and self.nodes[n].role is Role.LEADER]
            if leaders:
                return max(leaders, key=lambda n: self.nodes[n].term)
        raise AssertionError("no leader was elected")

    # -- what must always hold -------------------------------------------------------------------------------

    def note_applied(self, node: int, entry: Entry) -> None:
        known = self._committed.setdefault(entry.index, (entry.term, entry.data))
        if known != (entry.term, entry.data):
            raise InvariantError(f"node {node} applied {entry} where {known} was applied before")

    def check(self) -> None:
        for node in self.nodes.values():
            if not node.is_up:
                continue
            state = node.core._state
            if state.role is Role.LEADER and self._leaders.setdefault(state.term, node.id) != node.id:
                raise InvariantError(
                    f"nodes {self._leaders[state.term]} and {node.id} lead term {state.term}"
                )
            log = state.log
            assert log.compacted_index <= log.snapshot.index <= log.applied <= log.commit <= log.last_index
            assert log.durable <= log.last_index
            for progress in state.progress.values():
                assert 0 <= progress.match < progress.next

    def converge(self, ticks: int = 300) -> int:
        """After healing: one leader, equal logs, everything committed. Returns the leader."""
        for _ in range(ticks):
            self.tick()
            leader = self.leader()
            if leader and self._is_settled(leader):
                return leader
        raise AssertionError("the cluster did not converge")

    def _is_settled(self, leader: int) -> bool:
        head = self.nodes[leader].status
        if head.transferring_to != NO_NODE:
            return False
        members = [self.nodes[n] for n in head.membership.members if n in self.nodes and self.nodes[n].is_up]
        return head.commit == head.last_index and all(
            (m.term, m.last, m.commit, m.applied) == (head.term, head.last_index, head.commit, head.commit)
            for m in members
        )
