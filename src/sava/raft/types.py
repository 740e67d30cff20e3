"""The nouns of consensus: entries, hard state, membership, snapshots.

All of them are frozen ``msgspec`` structs encoded as arrays, so the same object is what the core reasons
about, what the log stores and what goes over the wire, and ``decode(encode(x)) == x`` holds by construction.

Sets of nodes are *sorted tuples*: iteration order of a ``frozenset`` depends on the process, and two replicas
that iterate differently would not be replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

import msgspec

from sava.errors import CallerError, Outcome, RetryableError, SavaError

NodeId = NewType("NodeId", int)

NO_NODE = NodeId(0)
"""Absence of a node in ``vote`` and ``leader``; real ids are positive."""


RandomSource = Callable[[int], int]
"""The one thing that the core asks of chance: a number from 0 up to below its argument, such as
``random.Random.randrange``. It is injected: the core cannot reach a generator that it was not given."""


class EntryKind(IntEnum):
    NOOP = 0
    COMMAND = 1
    MEMBERSHIP = 2


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One slot of the log. The core never looks inside ``data`` of a COMMAND; a MEMBERSHIP holds a
    ``Membership``."""

    index: int
    term: int
    kind: EntryKind
    data: bytes


class HardState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What must survive a crash. ``commit`` is a hint that saves work on restart; correctness never rests on
    it."""

    term: int = 0
    vote: NodeId = NO_NODE
    commit: int = 0


class Membership(msgspec.Struct, frozen=True, array_like=True):
    """Who votes, who only listens, and where they are.

    ``outgoing`` is non-empty exactly while the cluster is between two voter sets (joint consensus): every
    decision then needs a majority of ``voters`` and a majority of ``outgoing``. ``addresses`` maps every
    member to its transport address; the core carries it along and never reads it.
    """

    voters: tuple[NodeId, ...] = ()
    outgoing: tuple[NodeId, ...] = ()
    learners: tuple[NodeId, ...] = ()
    addresses: tuple[tuple[NodeId, str], ...] = ()

    @property
    def is_joint(self) -> bool:
        return bool(self.outgoing)

    @property
    def members(self) -> tuple[NodeId, ...]:
        """Everyone who must receive the log, sorted."""
        return tuple(sorted({*self.voters, *self.outgoing, *self.learners}))

    @property
    def all_voters(self) -> tuple[NodeId, ...]:
        return tuple(sorted({*self.voters, *self.outgoing}))

    def address(self, node: NodeId) -> str | None:
        return dict(self.addresses).get(node)


class MembershipChange(msgspec.Struct, frozen=True, array_like=True):
    """One requested change. Adding or removing learners alone is a plain entry; anything that touches the
    voter set goes through a joint configuration. ``forced`` skips the check that the new majority is
    reachable now."""

    add_learners: tuple[tuple[NodeId, str], ...] = ()
    promote: tuple[NodeId, ...] = ()
    remove: tuple[NodeId, ...] = ()
    forced: bool = False


class SnapshotMeta(msgspec.Struct, frozen=True, array_like=True):
    """What a snapshot is, apart from its bytes.

    State machines are deterministic, so two nodes that snapshot at the same index produce the same bytes:
    (index, term, digest) names the content, not the sender, and a transfer may resume from another leader.
    ``membership`` is the configuration in force at ``index`` (it may be joint).
    """

    index: int
    term: int
    membership: Membership
    size: int
    digest: bytes
    format: int = 1


# -- errors: what the core refuses, before any state changes -------------------------------------------------
#
# What the core refuses, by whose fault it is. A refusal happens before any state changes.


class NotLeader(RetryableError):
    """Only the leader takes this request. ``leader`` is who this node believes leads, or NO_NODE."""

    def __init__(self, leader: NodeId = NO_NODE) -> None:
        super().__init__(f"this node is not the leader; the leader is {leader or 'unknown'}")
        self.leader = leader


class Busy(RetryableError):
    """A limit is reached (uncommitted bytes, pending reads); try again after what is pending has been
    committed."""


class Transferring(RetryableError):
    """Leadership is being handed over; the next leader takes the request."""

    def __init__(self, target: NodeId) -> None:
        super().__init__(f"leadership is being transferred to node {target}")
        self.target = target


class MembershipBusy(RetryableError):
    """An earlier membership change is not committed yet, or this leader has not committed an entry of its
    term."""


class LearnerLagging(MembershipBusy):
    """The node to promote has not kept up with the log at two consecutive checks, or has not answered lately.
    Try again a moment later.

    Making it a voter now could cost the group its majority."""

    def __init__(self, node: NodeId, lag: int) -> None:
        super().__init__(f"learner {node} misses {lag} entries or was not heard lately")
        self.node = node
        self.lag = lag


class MembershipRefused(CallerError):
    """The change would break the cluster, or names nodes that do not fit it."""


class TransferRefused(CallerError):
    """The target cannot lead: unknown, not a voter, or this node itself."""


class MalformedMessage(CallerError):
    """Bytes that no core has encoded: garbage, another version, or a peer gone wrong. Nothing was changed."""


class InvariantError(SavaError):
    """The core found an impossible state. The node stops.

    To continue could destroy what other nodes rely on."""

    outcome = Outcome.UNKNOWN


# -- settings ------------------------------------------------------------------------------------------------
#
# Tunables of the core, each with the reason for its default. Time is counted in ticks; the driver decides how
# long one is.


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    election_ticks: int = 10
    """T: a follower campaigns after T..2T-1 silent ticks, drawn again each time. Ten heartbeats may be lost
    before that."""
    heartbeat_ticks: int = 1
    max_append_bytes: int = 1 << 20
    """One message is large enough to amortise its cost and small enough not to delay a heartbeat. At least
    one entry goes."""
    max_inflight: int = 64
    max_inflight_bytes: int = 8 << 20
    """Optimistic sends per follower, by count and by bytes: either alone lets the other grow without
    bound."""
    max_uncommitted_bytes: int = 32 << 20
    """Payload that the leader accepts beyond the commit index; more is refused with ``Busy``. Empty entries
    never are."""
    max_apply_bytes: int = 4 << 20
    """Committed entries handed out by one ``poll``, so that applying never starves the network."""
    max_pending_reads: int = 4096
    keep_entries: int = 2000
    """Entries kept below a snapshot, so that a follower that was away for a moment needs no snapshot."""
    snapshot_chunk_bytes: int = 256 << 10
    snapshot_timeout_ticks: int = 50
    """A transfer without progress for this long goes back to probing."""
    promote_max_lag: int = 100
    """A learner may be promoted when it misses at most this many entries at two consecutive checks."""

    def __post_init__(self) -> None:
        if self.heartbeat_ticks < 1 or self.election_ticks <= self.heartbeat_ticks:
            raise ValueError(
                "election_ticks must exceed heartbeat_ticks, and heartbeat_ticks must be at least 1"
            )
        for name in (
            "max_append_bytes",
            "max_inflight",
            "max_inflight_bytes",
            "max_uncommitted_bytes",
            "max_apply_bytes",
            "max_pending_reads",
            "snapshot_chunk_bytes",
            "snapshot_timeout_ticks",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.keep_entries < 0 or self.promote_max_lag < 0:
            raise ValueError("keep_entries and promote_max_lag must not be negative")
