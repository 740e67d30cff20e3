"""force-new-cluster: one survivor of a lost majority becomes a cluster of its own. Offline, and a last
resort.

What it cannot know: entries that only the lost members held are gone, and entries of its own log that were
never committed may now take effect. Both are told before anything is written. What it makes sure of:

* the new cluster has a new id, so a lost member that comes back cannot talk to it;
* the term is one higher, the membership is this node alone;
* the revision jumps by a million and all events before it are compacted, so that no watcher and no
  compare-and-swap can take a revision of the lost future for one of the new present.

Everything becomes effective with one durable record. Before it, only a snapshot file that nobody names was
added; after it, only files that nobody names are left to delete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from sava.errors import CallerError
from sava.metadata.commands import decode_proposal
from sava.metadata.durable import checkpoint_records, write_checkpoint
from sava.metadata.errors import NotInitialized
from sava.metadata.identity import NodeState, open_state
from sava.metadata.machine.limits import DEFAULT_LIMITS, Limits
from sava.metadata.machine.state_machine import SNAPSHOT_FORMAT, StateMachine
from sava.metadata.peer import Bootstrap
from sava.metadata.snapshots import save
from sava.raft.codec import decode_membership
from sava.raft.output import Checkpoint, Recovered
from sava.raft.types import NO_NODE, EntryKind, HardState, Membership, NodeId, SnapshotMeta
from sava.wal.disk import Disk
from sava.wal.log import LogOptions

REVISION_STEP = 1_000_000


class NotConfirmed(CallerError):
    """The operator saw what may be lost and said no. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class ForceReport:
    """What the operator is told, and must agree to."""

    node: NodeId
    old_cluster: str
    new_cluster: str
    missing_members: tuple[NodeId, ...]
    """They must be wiped; whatever they alone hold is lost."""
    known_commit: int
    """Everything up to this index of the log was certainly committed."""
    last_index: int
    """Entries after ``known_commit`` up to this one may never have been committed; they take effect now."""
    revision: int
    """The first revision of the new cluster lies beyond it."""

    @property
    def uncertain_entries(self) -> int:
        return self.last_index - self.known_commit

    def __str__(self) -> str:
        return (
            f"node {self.node} becomes cluster {self.new_cluster} of its own (was {self.old_cluster}); "
            f"{len(self.missing_members)} member(s) {self.missing_members} are given up and must be wiped; "
            f"what only they held is lost; {self.uncertain_entries} entries after {self.known_commit} were "
            f"perhaps never committed and take effect now; revisions continue after {self.revision}"
        )


def force_new_cluster(
    disk: Disk,
    *,
    address: str,
    rng: Random,
    confirm: Callable[[ForceReport], bool],
    limits: Limits = DEFAULT_LIMITS,
    options: LogOptions | None = None,
) -> ForceReport:
    """``disk`` is the data directory of a stopped node; ``address`` is where it will listen. ``confirm`` sees
    what may be lost. Whether another member still answers must be checked by the caller (it takes a
    network).

    Raises NotConfirmed, NotInitialized (there is nothing to recover), and what ``open_state`` raises."""
    state = open_state(disk, rng=rng, options=options)
    try:
        return _force(state, address, rng, confirm, limits)
    finally:
        state.log.close()
        state.release()


def _force(
    state: NodeState, address: str, rng: Random, confirm: Callable[[ForceReport], bool], limits: Limits
) -> ForceReport:
    bootstrap, recovered = state.recovered.bootstrap, state.recovered.core
    if bootstrap is None or recovered is None:
        raise NotInitialized(
            f"{state.disk.path} belongs to no cluster: start the node and run 'sava cluster init'"
        )
    machine, members = _replay(state, recovered, limits)
    machine.bump_revision(REVISION_STEP)
    last_index = recovered.entries[-1].index if recovered.entries else recovered.snapshot.index
    report = ForceReport(
        node=state.node,
        old_cluster=bootstrap.cluster,
        new_cluster=f"{rng.getrandbits(128):032x}",
        missing_members=tuple(node for node in members.members if node != state.node),
        known_commit=max(recovered.snapshot.index, min(recovered.hard_state.commit, last_index)),
        last_index=last_index,
        revision=machine.revision,
    )
    if not confirm(report):
        raise NotConfirmed("force-new-cluster was not confirmed; nothing was changed")
    _write(state, recovered, machine, report, address)
    return report


def _replay(state: NodeState, recovered: Recovered, limits: Limits) -> tuple[StateMachine, Membership]:
    """The state with *every* entry applied: one that was acknowledged may look uncommitted on this node, and
    must not be dropped."""
    snapshot = recovered.snapshot
    machine = (
        StateMachine.restore(state.snapshots.load(snapshot), limits)
        if snapshot.index
        else StateMachine(limits)
    )
    members = snapshot.membership
    for entry in recovered.entries:
        if entry.index <= snapshot.index:
            continue
        if entry.kind is EntryKind.COMMAND:
            machine.apply(decode_proposal(entry.data), entry.term)
        elif entry.kind is EntryKind.MEMBERSHIP:
            members = decode_membership(entry.data)
    return machine, members


def _write(
    state: NodeState, recovered: Recovered, machine: StateMachine, report: ForceReport, address: str
) -> None:
    term = recovered.hard_state.term + 1
    index = report.last_index + 1  # as if the force itself were an entry: no other snapshot has this name
    alone = Membership(voters=(state.node,), addresses=((state.node, address),))
    base = SnapshotMeta(index, term, alone, 0, b"", SNAPSHOT_FORMAT)
    snapshot = save(state.snapshots, base, machine.freeze().chunks())
    checkpoint = Checkpoint(HardState(term, NO_NODE, index), snapshot, (), term)
    write_checkpoint(state.log, checkpoint_records(Bootstrap(report.new_cluster, alone), checkpoint))
    state.snapshots.prune(snapshot)
