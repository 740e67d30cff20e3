"""Words for membership changes, shared by the tests that tell their stories."""

from __future__ import annotations

from typing import Any

from sava.raft import Entry, EntryKind, Membership, MembershipChange, NodeId, encode_membership
from tests.unit.raft.harness import Cluster, ids


def add_learner(node: int) -> MembershipChange:
    return MembershipChange(add_learners=((NodeId(node), f"host-{node}:7650"),))


def promote(*nodes: int, remove: tuple[int, ...] = (), forced: bool = False) -> MembershipChange:
    return MembershipChange(promote=ids(nodes), remove=ids(remove), forced=forced)


def remove(*nodes: int, forced: bool = False) -> MembershipChange:
    return MembershipChange(remove=ids(nodes), forced=forced)


def change(cluster: Cluster, node: int, what: MembershipChange) -> int:
    index = cluster[node].core.change_membership(what)
    cluster.run()
    return index


def with_learner(node: int = 4, voters: tuple[int, ...] = (1, 2, 3), **options: Any) -> Cluster:
    """A cluster led by 1 with a learner that has caught up."""
    cluster = Cluster(voters, **options)
    cluster.elect(1)
    cluster.join(node)
    change(cluster, 1, add_learner(node))
    cluster.tick(3)
    return cluster


def membership_entry(index: int, term: int, members: Membership) -> Entry:
    return Entry(index, term, EntryKind.MEMBERSHIP, encode_membership(members))
