"""The leader's receiving side: acknowledgements, commit, confirmed rounds, check-quorum and transfer."""

from __future__ import annotations

from sava.raft.messages import AppendReply, HeartbeatReply, TimeoutNow
from sava.raft.output import Role
from sava.raft.progress import Progress, ProgressState, has_quorum, quorum_index
from sava.raft.reconfigure import after_commit, check_learners, has_committed_own_term
from sava.raft.replication import broadcast_heartbeat, payload_size, send_append, tick_transfers
from sava.raft.state import CoreState
from sava.raft.types import NO_NODE, InvariantError, NodeId, NotLeader, TransferRefused

__all__ = [
    "acknowledge_self",
    "advance_commit",
    "confirm_reads",
    "next_leader",
    "on_append_reply",
    "on_heartbeat_reply",
    "request_read",
    "send_read_round",
    "tick_leader",
    "transfer_leadership",
]


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
    if state.reads.wanted_round > state.round:
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
# An entry is applied where it is committed *and* durable, and the node that has applied it answers callers.
# A leader whose disk is full, or hangs, answers no caller, however well the others are:
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
