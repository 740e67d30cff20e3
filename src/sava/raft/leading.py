"""What a leader does with answers (acknowledgements, commit, confirmed rounds, check-quorum, transfer), and
how it changes the membership (rules in ``membership``).

A change of membership runs by itself once started:

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
from sava.raft.messages import Append, AppendReply, HeartbeatReply, TimeoutNow, encode_membership
from sava.raft.output import Role
from sava.raft.progress import Progress, ProgressState, has_majority, has_quorum, quorum_index
from sava.raft.replication import (
    append_entry,
    broadcast_heartbeat,
    flush_appends,
    payload_size,
    send_append,
    tick_transfers,
)
from sava.raft.state import CoreState
from sava.raft.types import (
    NO_NODE,
    EntryKind,
    InvariantError,
    LearnerLagging,
    Membership,
    MembershipBusy,
    MembershipChange,
    MembershipRefused,
    NodeId,
    NotLeader,
    TransferRefused,
)

__all__ = [
    "acknowledge_self",
    "advance_commit",
    "change_membership",
    "confirm_reads",
    "next_leader",
    "on_append_reply",
    "on_heartbeat_reply",
    "open_term",
    "request_read",
    "send_read_round",
    "tick_leader",
    "transfer_leadership",
]


_CHECKS_TO_PROMOTE = 2
"""One good moment may be luck between two bursts; two in a row is a learner that keeps up."""


# -- acknowledgements and commit -----------------------------------------------------------------------------


def on_append_reply(state: CoreState, message: AppendReply) -> None:
    progress = state.progress.get(message.src)
    if state.role is not Role.LEADER or progress is None:
        return
    progress.active = True
    if message.accepted:
        _on_accepted(state, message.src, progress, message.index)
    else:
        _on_rejected(state, progress, message)


def _on_rejected(state: CoreState, progress: Progress, message: AppendReply) -> None:
    retry_after = message.hint_index
    if message.hint_term > 0:
        retry_after = state.log.probe_point(message.hint_index, message.hint_term)
    if progress.rejected(message.index, retry_after):
        send_append(state, message.src, progress, even_if_empty=True)


def _on_accepted(state: CoreState, peer: NodeId, progress: Progress, index: int) -> None:
    if index > state.log.last_index:
        raise InvariantError(
            f"node {peer} acknowledges {index}, beyond this leader's end {state.log.last_index}"
        )
    is_news = progress.accepted(index)
    if progress.state is ProgressState.REPLICATE:
        progress.inflights.free_to(index)
    elif progress.state is ProgressState.PROBE:
        # Even an old match found again is proof of where the logs agree, as long as it is the newest we know.
        if index == progress.match:
            progress.become_replicate()
    elif progress.match >= state.log.compacted_index:
        progress.become_replicate()
    elif progress.snapshot is not None and progress.match >= progress.snapshot.index:
        progress.become_probe()  # installed, but our log has moved on meanwhile: the next one follows
    if is_news:
        advance_commit(state)
        if state.role is not Role.LEADER:
            return
    if progress.wants_append(state.log.last_index, state.log.commit):
        state.append_wanted = True
    if peer == state.transferee:
        _continue_transfer(state, progress)


def acknowledge_self(state: CoreState) -> None:
    """The leader's own disk has caught up: only now does it count itself."""
    progress = state.progress.get(state.node)
    if progress is None:
        return  # a leader outside the configuration never counts itself
    durable = state.log.durable
    if durable > progress.match:
        progress.match = durable
        progress.next = durable + 1
        advance_commit(state)


def advance_commit(state: CoreState) -> None:
    # Leaving a joint configuration shrinks the quorum and may let more commit, hence the loop.
    while state.role is Role.LEADER and _advance_commit_once(state):
        pass


def _advance_commit_once(state: CoreState) -> bool:
    log = state.log
    index = quorum_index(
        state.membership, {node: progress.match for node, progress in state.progress.items()}
    )
    # Only an entry of this term is committed by counting (Figure 8): an older one on a majority can still be
    # replaced by a leader that never saw it. Older ones are committed by whatever of ours stands after them.
    if index <= log.commit or log.term(index) != state.term:
        return False
    state.uncommitted_bytes -= payload_size(log.between(log.commit + 1, index + 1))
    log.commit_to(index)
    state.append_wanted = True
    if state.reads.has_waiting:
        state.reads.term_is_committed(log.commit, state.round + 1)
    after_commit(state)
    return True


def on_heartbeat_reply(state: CoreState, message: HeartbeatReply) -> None:
    progress = state.progress.get(message.src)
    if state.role is not Role.LEADER or progress is None:
        return
    progress.active = True
    progress.round = max(progress.round, message.round)
    # A full window whose appends were all lost gets no answer to any of them. One append after each
    # heartbeat's answer, empty if need be, finds the hole.
    progress.wait_for_reply = False
    if progress.match < state.log.last_index or progress.state is ProgressState.PROBE:
        send_append(state, message.src, progress, even_if_empty=True)
    confirm_reads(state)


# -- reads ---------------------------------------------------------------------------------------------------


def request_read(state: CoreState, token: int) -> None:
    if state.role is not Role.LEADER:
        raise NotLeader(state.leader)
    state.reads.check_room()
    if has_committed_own_term(state):
        state.reads.confirm_later(token, state.log.commit, state.round + 1)
    else:
        state.reads.wait_for_commit(token)


def send_read_round(state: CoreState) -> None:
    """At poll: one round for all reads that arrived since the last one left."""
    broadcast_heartbeat(state)
    confirm_reads(state)


def confirm_reads(state: CoreState) -> None:
    if not state.reads.wanted_round:
        return
    confirmed = quorum_index(
        state.membership, {node: progress.round for node, progress in state.progress.items()}
    )
    state.outbox.reads_ready.extend(state.reads.confirmed(confirmed))


# -- time ----------------------------------------------------------------------------------------------------


def tick_leader(state: CoreState) -> None:
    state.election_elapsed += 1
    state.heartbeat_elapsed += 1
    if state.election_elapsed >= state.config.election_ticks:
        state.election_elapsed = 0
        if not _check_quorum(state):
            state.become_follower(state.term, NO_NODE)
            return
    _tick_transfer(state)
    if (to := next_leader(state)) != NO_NODE and state.transferee == NO_NODE:
        transfer_leadership(state, to)
    is_heartbeat = state.heartbeat_elapsed >= state.config.heartbeat_ticks
    tick_transfers(state, resend=is_heartbeat)
    if is_heartbeat:
        check_learners(state)
        broadcast_heartbeat(state)
        confirm_reads(state)


def _check_quorum(state: CoreState) -> bool:
    """Whether a quorum was heard in the window that ends now. A leader cut off from it must step down:
    its clients would wait without end, and its reads would be someone else's past."""
    active = {node: progress.active for node, progress in state.progress.items()}
    active[state.node] = True
    for progress in state.progress.values():
        progress.start_window()
    return has_quorum(state.membership, active)


# -- transfer ------------------------------------------------------------------------------------------------


def transfer_leadership(state: CoreState, to: NodeId) -> None:
    if state.role is not Role.LEADER:
        raise NotLeader(state.leader)
    if to == state.node:
        raise TransferRefused(f"node {to} leads already")
    if to not in state.membership.voters:
        raise TransferRefused(f"node {to} is not a voter")
    if to == state.transferee:
        return
    state.transferee = to
    state.transfer_elapsed = 0
    progress = state.progress[to]
    _continue_transfer(state, progress)
    if progress.match < state.log.last_index:
        progress.wait_for_reply = False
        send_append(state, to, progress, even_if_empty=True)


def _continue_transfer(state: CoreState, progress: Progress) -> None:
    """Once the target holds the whole log it can win any vote: let it start."""
    if progress.match == state.log.last_index:
        state.send(TimeoutNow(state.node, state.transferee, state.term))


def _tick_transfer(state: CoreState) -> None:
    if state.transferee == NO_NODE:
        return
    state.transfer_elapsed += 1
    if state.transfer_elapsed >= state.config.election_ticks:
        state.transferee = NO_NODE  # it did not take over: proposals are welcome again


# -- the leader's own disk -----------------------------------------------------------------------------------
#
# The leader's own disk: a leader that cannot write stands in the way of all.
#
# An entry is applied where it is committed *and* durable, and callers are answered by the node that has
# applied it. A leader whose disk is full, or hangs, answers no caller, however well the others are:
#
#     leader   sends entry 7; its disk refuses it
#     others   have 7: it is committed
#     leader   cannot apply 7, takes no more proposals, and is heard by all, so that no node campaigns
#
# That the others can do without it stands in its own log: the commit is beyond what its disk has, so a quorum
# of *other* disks has it. If that lasts, it hands leadership to one of them, which has shown that its disk
# works. Without that proof it stays. Of two voters neither can be elected without the vote of the other,
# which a full disk does not take: leaving would end the reads, and gain nothing.


PATIENCE = 2
"""Election timeouts. A sync that takes as long as one is no reason to leave; and the leases of those who
wait for an answer last longer than this and an election."""


def next_leader(state: CoreState) -> NodeId:
    """At each tick of a leader: who is to lead in its place; NO_NODE while it is fit to lead, or while no
    other node is known to be fitter."""
    durable = state.log.durable
    if durable != state.disk_end or durable >= state.log.commit:
        state.disk_end, state.disk_elapsed = durable, 0
        return NO_NODE
    state.disk_elapsed += 1
    turn, rest = divmod(state.disk_elapsed, PATIENCE * state.config.election_ticks)
    if rest:
        return NO_NODE
    fit = [
        node
        for node, progress in state.progress.items()
        if progress.match > durable and progress.recently_active and node in state.membership.voters
    ]
    # Another one each time: what has filled this disk may have filled the first one's since.
    return fit[turn % len(fit)] if fit else NO_NODE


# -- changes of the membership -------------------------------------------------------------------------------


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
