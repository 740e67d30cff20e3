"""Elections: who may ask, who answers what, and what a higher or lower term does.

Three things keep a healthy group from being disturbed. *Pre-vote*: a candidate first asks whether it could
win, which changes nothing anywhere. *Stickiness*: a node that hears a leader does not even answer. The
*hatch*: a node whose term has run ahead anyway answers that leader with its term, so that the leader steps
down once and the node is not locked out for good.

A leader whose process is gone is not waited for. A follower that has evidence of it forgets the leader, which
ends its stickiness, and campaigns after a short random wait. Pre-vote is the confirmation: voters that still
hear the leader do not answer.
"""

from __future__ import annotations

from sava.raft.leading import open_term
from sava.raft.messages import (
    Append,
    AppendReply,
    Heartbeat,
    Message,
    SnapshotChunk,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from sava.raft.output import Role
from sava.raft.progress import Tally, count_votes
from sava.raft.replication import payload_size
from sava.raft.state import CoreState
from sava.raft.types import NO_NODE, NodeId

__all__ = [
    "admit_higher_term",
    "answer_lower_term",
    "campaign",
    "count_own_vote",
    "leader_unreachable",
    "on_timeout_now",
    "on_vote_reply",
    "on_vote_request",
    "tick_election",
]


# -- terms ---------------------------------------------------------------------------------------------------


def admit_higher_term(state: CoreState, message: Message) -> bool:
    """A message from a later term: take the term over, unless the message is hypothetical or unwelcome.
    False: drop."""
    if isinstance(message, VoteRequest):
        if state.hears_leader and not message.transfer:
            return False
        if message.pre:
            return True
    if isinstance(message, VoteReply) and message.pre and message.granted:
        return True  # carries the term that was asked about, which no node has entered
    from_leader = isinstance(message, Append | Heartbeat | SnapshotChunk | TimeoutNow)
    state.become_follower(message.term, message.src if from_leader else NO_NODE)
    return True


def answer_lower_term(state: CoreState, message: Message) -> None:
    """A message from an earlier term changes nothing here. Two kinds of sender must learn that they are
    behind."""
    if isinstance(message, Append | Heartbeat | SnapshotChunk):
        # The hatch. An election of ours may have been ignored by all who hear this leader (stickiness), while
        # we ignore its appends for being of an old term: without this answer we would never get back
        # into the group.
        state.reply(AppendReply(state.node, message.src, state.term, False, 0))
    elif isinstance(message, VoteRequest) and message.pre:
        # Dropped, a group whose longest log has the lowest term could not elect anyone.
        state.send(VoteReply(state.node, message.src, state.term, False, pre=True))


# -- asking --------------------------------------------------------------------------------------------------


def tick_election(state: CoreState) -> None:
    state.election_elapsed += 1
    if not state.is_promotable:
        return
    is_alone = state.all_voters == (state.node,) and state.role is Role.FOLLOWER
    timeout = min(state.election_timeout, state.hurried_timeout or state.election_timeout)
    if is_alone or state.election_elapsed >= timeout:
        campaign(state)


def leader_unreachable(state: CoreState, leader: NodeId) -> None:
    """Wait no longer for ``leader``. The wait that is left is random, as the whole timeout is: followers get
    this evidence in the same moment, and would split the vote. Said again about a leader that is forgotten
    already, it changes nothing: a candidate's timer must be able to run."""
    if state.role is not Role.FOLLOWER or leader == NO_NODE or state.leader != leader:
        return
    state.leader = NO_NODE
    wait = 1 + state.draw(max(1, state.config.election_ticks // 3))
    state.hurried_timeout = state.election_elapsed + wait


def campaign(state: CoreState) -> None:
    """Ask for pre-votes; the election proper begins when a quorum would grant it."""
    if state.role is Role.LEADER or not state.is_promotable:
        return
    state.leave_role()
    state.role = Role.PRE_CANDIDATE
    state.leader = NO_NODE
    state.reset_election_timer()
    state.votes[state.node] = True  # hypothetical, hence nothing to make durable
    if count_votes(state.membership, state.votes) is Tally.WON:
        _start_election(state, transfer=False)
        return
    for peer in state.all_voters:
        if peer != state.node:
            state.send(_vote_request(state, peer, state.term + 1, pre=True, transfer=False))


def _start_election(state: CoreState, *, transfer: bool) -> None:
    state.leave_role()
    state.term += 1
    state.vote = state.node
    state.role = Role.CANDIDATE
    state.leader = NO_NODE
    state.reset_election_timer()
    # Requests wait for the disk as the own vote does. Sent earlier, they could outlive a crash that takes the
    # term and the end of the log with it: the node would campaign in the same term again, with a shorter log,
    # and count the grants that its longer log had earned.
    for peer in state.all_voters:
        if peer != state.node:
            state.send_when_durable(_vote_request(state, peer, state.term, pre=False, transfer=transfer))


def _vote_request(state: CoreState, peer: NodeId, term: int, *, pre: bool, transfer: bool) -> VoteRequest:
    log = state.log
    return VoteRequest(state.node, peer, term, log.last_index, log.last_term, pre, transfer)


def count_own_vote(state: CoreState) -> None:
    """Called when something became durable. The own vote counts only then: a candidate that won with a vote
    it forgets in a crash could give the same term's vote to another."""
    if state.role is Role.CANDIDATE and state.durable_ballot == (state.term, state.node):
        state.votes[state.node] = True
        _conclude(state)


def on_timeout_now(state: CoreState, message: TimeoutNow) -> None:
    """The leader wants this node to take over at once: no pre-vote, and voters shall forget their
    patience."""
    if state.role is Role.FOLLOWER and state.is_promotable:
        _start_election(state, transfer=True)


# -- answering -----------------------------------------------------------------------------------------------


def on_vote_request(state: CoreState, message: VoteRequest) -> None:
    """Who asks is not compared with our own configuration: the asker may know a newer one, and a group in
    which those who have not heard of it refuse can lock itself up. For the same reason
    learners answer."""
    is_free = state.vote == message.src or (state.vote == NO_NODE and state.leader == NO_NODE)
    if message.pre and message.term > state.term:
        is_free = True
    granted = is_free and state.log.is_up_to_date(message.last_index, message.last_term)
    if message.pre:
        # A grant answers for the term asked about, a refusal names our own. Nothing here changes, so nothing
        # waits.
        term = message.term if granted else state.term
        state.send(VoteReply(state.node, message.src, term, granted, pre=True))
        return
    if granted:
        state.vote = message.src
        state.election_elapsed = 0
    # The vote, and the term even of a refusal, must be on disk before anyone can act on the answer.
    state.reply(VoteReply(state.node, message.src, state.term, granted))


def on_vote_reply(state: CoreState, message: VoteReply) -> None:
    awaited = Role.PRE_CANDIDATE if message.pre else Role.CANDIDATE
    if state.role is not awaited:
        return
    expected = state.term + 1 if message.pre and message.granted else state.term
    if message.term == expected:
        state.votes.setdefault(message.src, message.granted)
        _conclude(state)


def _conclude(state: CoreState) -> None:
    tally = count_votes(state.membership, state.votes)
    if tally is Tally.LOST:
        state.become_follower(state.term, NO_NODE)
    elif tally is Tally.WON and state.role is Role.PRE_CANDIDATE:
        _start_election(state, transfer=False)
    elif tally is Tally.WON:
        _become_leader(state)


def _become_leader(state: CoreState) -> None:
    state.leave_role()
    state.role = Role.LEADER
    state.leader = state.node
    state.reset_election_timer()
    log = state.log
    state.uncommitted_bytes = payload_size(log.between(log.commit + 1, log.last_index + 1))
    next_index = log.last_index + 1
    state.progress = {node: state.new_progress(next_index, active=False) for node in state.members}
    own = state.progress.get(state.node)
    if own is not None:
        own.match = log.durable
        own.become_replicate()
        own.round = state.round
    open_term(state)
