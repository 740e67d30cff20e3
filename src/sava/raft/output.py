"""What goes into and comes out of the core besides messages: recovered state, numbered outputs, checkpoints,
status."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec

from sava.raft.messages import Message
from sava.raft.types import Entry, HardState, Membership, NodeId, SnapshotMeta


class Role(Enum):
    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre-candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"
    LEARNER = "learner"
    """A member without a vote, or a node that no configuration names yet; it never campaigns."""


class ChunkSend(msgspec.Struct, frozen=True):
    """Read ``length`` bytes at ``offset`` of the snapshot and send them to ``peer`` as a ``SnapshotChunk`` at
    ``term``."""

    peer: NodeId
    term: int
    meta: SnapshotMeta
    offset: int
    length: int


class ChunkWrite(msgspec.Struct, frozen=True):
    """Write received bytes of a snapshot. ``offset == 0`` starts a new file."""

    meta: SnapshotMeta
    offset: int
    data: bytes


class ReadReady(msgspec.Struct, frozen=True):
    """The read asked for with ``token`` may be answered by any state that has applied ``index``."""

    token: int
    index: int


class Output(msgspec.Struct, frozen=True):
    """All that became possible since the last ``poll``. The driver must carry it out in this order:

    1. send ``send_now`` and ``send_chunks``; they never depend on this batch being durable;
    2. make ``chunks``, ``install``, ``hard_state``, ``truncate_from`` and ``entries`` durable, atomically and
       in the order of ``number`` (``chunks`` alone need not be synced; ``install`` syncs them);
    3. only then send ``send_after_persist`` and call ``persisted(number)``;
    4. apply ``apply`` and call ``applied`` — independent of 2, for these entries are committed and durable
       here already; when ``install`` is set, the state machine is replaced by it (after 2) before anything
       later is applied.

    ``install`` comes without hard state, entries and dependent messages, so that a snapshot which does not
    verify (``install_failed``) takes nothing else down with it. It replaces *every* stored entry.
    """

    number: int
    hard_state: HardState | None
    truncate_from: int | None
    """Drop stored entries with index >= this, then append ``entries``; both in one record."""
    entries: tuple[Entry, ...]
    chunks: tuple[ChunkWrite, ...]
    install: SnapshotMeta | None
    send_now: tuple[Message, ...]
    send_chunks: tuple[ChunkSend, ...]
    send_after_persist: tuple[Message, ...]
    apply: tuple[Entry, ...]
    reads_ready: tuple[ReadReady, ...]
    reads_failed: tuple[int, ...]
    """Tokens of reads that this node can no longer answer (leadership lost). They had no effect; ask again
    elsewhere."""


class Recovered(msgspec.Struct, frozen=True):
    """What the log store found at start: the snapshot point (index 0 with the bootstrap membership when there
    is none), the hard state, and every entry after the compaction point, contiguous."""

    hard_state: HardState
    snapshot: SnapshotMeta
    entries: tuple[Entry, ...]
    """Contiguous; may begin below ``snapshot.index`` (kept for slow followers)."""
    compacted_term: int | None = None
    """Term of the entry just before ``entries[0]``, when the store knows it (see ``Checkpoint``)."""


class Checkpoint(msgspec.Struct, frozen=True):
    """The durable state after all outputs polled so far, as one value: what a fresh log must begin with so
    that all older records may be deleted. Same fields and meaning as ``Recovered``."""

    hard_state: HardState
    snapshot: SnapshotMeta
    entries: tuple[Entry, ...]
    compacted_term: int
    """Term of the entry just before ``entries[0]`` (log matching needs it)."""


@dataclass(frozen=True, slots=True)
class PeerStatus:
    node: NodeId
    match: int
    next: int
    state: str
    recently_active: bool


@dataclass(frozen=True, slots=True)
class Status:
    node: NodeId
    role: Role
    term: int
    vote: NodeId
    leader: NodeId
    commit: int
    applied: int
    first_index: int
    """Index of the first entry still held."""
    last_index: int
    durable_index: int
    snapshot_index: int
    membership: Membership
    membership_index: int
    transferring_to: NodeId
    peers: tuple[PeerStatus, ...]
