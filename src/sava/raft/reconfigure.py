"""The leader's part in membership changes (rules in ``membership``).

A change runs by itself once started:

    change_membership   appends C_old,new   (in force at once: both halves decide from here on)
    C_old,new commits   the leader appends C_new
    C_new commits       done; a leader outside C_new hands over to the best voter and steps down

Two guards open the way. The latest configuration must be committed, so that only one change is ever
undecided. And an entry of the leader's own term must be committed: without that, two leaders of different
terms can each append a change the other never saw, with majorities that do not meet (the 2015 bug of
single-server changes).
"""

from __future__ import annotations

from sava.raft.membership import apply_change, leave_joint
from sava.raft.messages import Append, TimeoutNow, encode_membership
from sava.raft.output import Role
from sava.raft.progress import ProgressState, has_majority
from sava.raft.replication import append_entry, flush_appends
from sava.raft.state import CoreState
from sava.raft.types import (
    NO_NODE,
    EntryKind,
    LearnerLagging,
    Membership,
    MembershipBusy,
    MembershipChange,
    MembershipRefused,
    NotLeader,
)

__all__ = ["after_commit", "change_membership", "check_learners", "has_committed_own_term", "open_term"]

_CHECKS_TO_PROMOTE = 2
"""One good moment may be luck between two bursts; two in a row is a learner that keeps up."""


def has_committed_own_term(state: CoreState) -> bool:
    return state.log.term(state.log.commit) == state.term


def open_term(state: CoreState) -> None:
    """An entry of the new leader's own term, at once: until it is committed the leader knows neither what is
    committed (reads, Figure 8) nor that no other change of membership is under way.

    It is empty, except in a group's very first term. The configuration that a group was bootstrapped with
    stands in no log; a node that joins later and replays the log from index 1 would not know it before the
    entry that added the node itself, and a snapshot taken in between would name no voters. So the first
    entry of all is that configuration."""
    if state.history.current_index > 0:
        append_entry(state, EntryKind.NOOP, b"")
    else:
        _append_membership(state, state.membership)


def change_membership(state: CoreState, change: MembershipChange) -> int:
    _check_may_change(state)
    planned = apply_change(state.membership, change)
    if planned.is_joint:
        _check_promotions(state, change)
        if not change.forced:
            _check_new_majority(state, planned)
    return _append_membership(state, planned)


def _check_may_change(state: CoreState) -> None:
    if state.role is not Role.LEADER:
        raise NotLeader(state.leader)
    if state.transferee != NO_NODE:
        raise MembershipBusy(f"leadership is being transferred to node {state.transferee}")
    if state.membership.is_joint or state.history.current_index > state.log.commit:
        raise MembershipBusy("an earlier change is not complete")
    if not has_committed_own_term(state):
        raise MembershipBusy("this leader has not committed an entry of its term yet")


def _check_promotions(state: CoreState, change: MembershipChange) -> None:
    for node in change.promote:
        progress = state.progress[node]
        if progress.caught_up_checks < _CHECKS_TO_PROMOTE or not progress.recently_active:
            raise LearnerLagging(node, state.log.last_index - progress.match)


def _check_new_majority(state: CoreState, planned: Membership) -> None:
    active = {node: progress.recently_active for node, progress in state.progress.items()}
    active[state.node] = True
    if not has_majority(planned.voters, active):
        silent = [node for node in planned.voters if not active.get(node, False)]
        raise MembershipRefused(f"no majority of the new voters is reachable: {silent} are silent")


def _append_membership(state: CoreState, membership: Membership) -> int:
    entry = append_entry(state, EntryKind.MEMBERSHIP, encode_membership(membership))
    # Sent under the old configuration first: a member that leaves with this entry gets it too, and once it
    # hears that the entry is committed it stops campaigning. A courtesy; nothing waits for its answer.
    flush_appends(state)
    state.departing = tuple(node for node in state.members if node not in membership.members)
    state.history.push(entry.index, membership)
    state.membership_changed()
    state.append_wanted = True
    return entry.index


def _dismiss(state: CoreState) -> None:
    """Tell those who left that their leaving is committed."""
    index, commit = state.history.current_index, state.log.commit
    for peer in state.departing:
        if peer != state.node:
            state.send(Append(state.node, peer, state.term, index, state.log.term(index), (), commit))
    state.departing = ()


def after_commit(state: CoreState) -> None:
    """Commit has moved: continue the change whose entry it has passed, if any."""
    if state.history.current_index > state.log.commit or not has_committed_own_term(state):
        # The second condition matters for a joint configuration inherited from an earlier leader: before our
        # own no-op is committed, "committed" may rest on the old leader's word alone.
        return
    membership = state.membership
    _dismiss(state)
    if membership.is_joint:
        _append_membership(state, leave_joint(membership))
    elif state.node not in membership.voters:
        _hand_over(state, membership)


def _hand_over(state: CoreState, membership: Membership) -> None:
    """The group has no more use for this leader. Without the nudge it would wait for an election timeout."""
    flush_appends(state)
    progress = state.progress
    best = max(
        membership.voters, key=lambda node: (progress[node].recently_active, progress[node].match, -node)
    )
    state.send(TimeoutNow(state.node, best, state.term))
    state.become_follower(state.term, NO_NODE)


def check_learners(state: CoreState) -> None:
    """One check of every learner, at each heartbeat. REPLICATE means that it has accepted an append: a
    learner that never answered has a small lag only because the log is short."""
    last = state.log.last_index
    for node in state.membership.learners:
        progress = state.progress[node]
        is_close = last - progress.match <= state.config.promote_max_lag
        if is_close and progress.recently_active and progress.state is ProgressState.REPLICATE:
            progress.caught_up_checks += 1
        else:
            progress.caught_up_checks = 0
