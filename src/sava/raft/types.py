"""The nouns of consensus: entries, hard state, membership, snapshots.

All of them are frozen ``msgspec`` structs encoded as arrays, so the same object is what the core reasons
about, what the log stores and what goes over the wire, and ``decode(encode(x)) == x`` holds by construction.

Sets of nodes are *sorted tuples*: iteration order of a ``frozenset`` depends on the process, and two replicas
that iterate differently would not be replicas.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NewType, Protocol

import msgspec

NodeId = NewType("NodeId", int)

NO_NODE = NodeId(0)
"""Absence of a node in ``vote`` and ``leader``; real ids are positive."""


class RandomSource(Protocol):
    """The one thing that the core asks of chance; an injected ``random.Random`` provides it.

    A protocol and not an import: the core has no way to reach a generator that it was not given."""

    def randrange(self, stop: int, /) -> int: ...


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
        return next((address for member, address in self.addresses if member == node), None)


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
