"""RaftCore: consensus as a pure state machine.

Theory of operation
-------------------

The core has no sockets, files, clocks, threads or global chance. Inputs are method calls (``tick``, ``step``,
``propose``, …); whatever they make possible is collected by ``poll`` into one numbered ``Output``. The driver
carries it out and reports back with ``persisted`` and ``applied``. Same inputs, same random generator: same
outputs.

Durability is the heart of it. Three promises leave a node: *I voted for you*, *I hold these entries*, *I
count myself*. Each is released only when the batch that makes it true is on disk:

* messages that promise something wait in ``send_after_persist`` (``CoreState.reply`` decides);
* the own vote and the own acknowledgement are counted in ``persisted``, never before;
* entries are handed out for applying when they are committed *and* durable here.

The disk may be asynchronous: outputs are written in order, completions are cumulative, and a completion
counts only for what is still in the log (see ``log`` for the ABA story). A leader sends appends before its
own disk has them.

Where things are:

    election      campaigns, votes, terms
    replication   appends, heartbeats and snapshots: what a leader sends, and a follower takes
    leading       acknowledgements, commit, reads, transfer, changes of the membership
    state         all that is remembered; ``log``, ``progress``, ``membership`` are its parts

A state that cannot be raises ``InvariantError``; the node must stop then. Wrong requests raise before
anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sava.raft.election import (
    admit_higher_term,
    answer_lower_term,
    campaign,
    count_own_vote,
    leader_unreachable,
    on_timeout_now,
    on_vote_reply,
    on_vote_request,
    tick_election,
)
from sava.raft.leading import (
    acknowledge_self,
    change_membership,
    on_append_reply,
    on_heartbeat_reply,
    request_read,
    send_read_round,
    tick_leader,
    transfer_leadership,
)
from sava.raft.messages import (
    Append,
    AppendReply,
    Heartbeat,
    HeartbeatReply,
    Message,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from sava.raft.output import (
    Checkpoint,
    ChunkSend,
    ChunkWrite,
    Output,
    PeerStatus,
    ReadReady,
    Recovered,
    Role,
    Status,
)
from sava.raft.replication import (
    abandon_install,
    append_payloads,
    finish_install,
    flush_appends,
    on_append,
    on_heartbeat,
    on_snapshot,
    on_snapshot_reply,
    peer_unreachable,
    snapshot_failed,
    snapshot_taken,
)
from sava.raft.state import CoreState, Outbox
from sava.raft.types import (
    NO_NODE,
    Busy,
    CoreConfig,
    HardState,
    InvariantError,
    Membership,
    MembershipChange,
    NodeId,
    NotLeader,
    RandomSource,
    SnapshotMeta,
    Transferring,
)

__all__ = [
    "Checkpoint",
    "ChunkSend",
    "ChunkWrite",
    "Output",
    "PeerStatus",
    "RaftCore",
    "ReadReady",
    "Recovered",
    "Role",
    "Status",
]

_HANDLERS: dict[type, Callable[[CoreState, Any], None]] = {
    VoteRequest: on_vote_request,
    VoteReply: on_vote_reply,
    Append: on_append,
    AppendReply: on_append_reply,
    Heartbeat: on_heartbeat,
    HeartbeatReply: on_heartbeat_reply,
    TimeoutNow: on_timeout_now,
    SnapshotChunk: on_snapshot,
    SnapshotReply: on_snapshot_reply,
}

_REPLIES = (VoteReply, AppendReply, HeartbeatReply, SnapshotReply)


class RaftCore:
    """One node's consensus. One task owns it; nothing here blocks, sleeps, reads a clock or draws from a
    global RNG."""

    __slots__ = ("_ballots", "_number", "_persisted", "_polled_ballot", "_polled_commit", "_state")

    def __init__(self, node: NodeId, config: CoreConfig, recovered: Recovered, draw: RandomSource) -> None:
        if node < 1:
            raise ValueError(f"{node} is not a node id")
        self._state = CoreState(node, config, recovered, draw)
        self._number = 0
        self._persisted = 0
        self._polled_ballot = self._state.durable_ballot
        self._polled_commit = recovered.hard_state.commit
        self._ballots: list[tuple[int, tuple[int, NodeId]]] = []
        """(number, (term, vote)) of outputs in flight."""

    # -- inputs ----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """One unit of time has passed."""
        state = self._state
        if state.role is Role.LEADER:
            tick_leader(state)
        else:
            tick_election(state)

    def step(self, message: Message) -> None:
        """A message from a peer. Messages not addressed to this node are dropped."""
        state = self._state
        if message.dst != state.node or message.src == state.node:
            return
        if isinstance(message, _REPLIES) and message.src not in state.members:
            # Looked at before the term: a removed node whose term ran away must not depose anyone.
            return
        if message.term > state.term:
            if not admit_higher_term(state, message):
                return
        elif message.term < state.term:
            answer_lower_term(state, message)
            return
        _HANDLERS[type(message)](state, message)

    def propose(self, payloads: Sequence[bytes]) -> range:
        """Append commands; returns their indexes. Raises NotLeader, Busy or Transferring before any
        effect."""
        state = self._state
        if state.role is not Role.LEADER:
            raise NotLeader(state.leader)
        if state.transferee != NO_NODE:
            raise Transferring(state.transferee)
        size = sum(map(len, payloads))
        # A single proposal larger than the cap passes when nothing else is pending; otherwise it could never
        # be made.
        if (
            size
            and state.uncommitted_bytes
            and state.uncommitted_bytes + size > state.config.max_uncommitted_bytes
        ):
            raise Busy(f"{state.uncommitted_bytes} bytes are uncommitted")
        state.uncommitted_bytes += size
        return append_payloads(state, payloads)

    def change_membership(self, change: MembershipChange) -> int:
        """Start a change; returns the index of its first entry. Raises MembershipBusy, MembershipRefused,
        NotLeader.

        A voter change is complete when ``status().membership`` is not joint any more and its entry is
        committed; the leader appends the second phase by itself."""
        return change_membership(self._state, change)

    def transfer_leadership(self, to: NodeId) -> None:
        """Hand leadership to a voter. Raises NotLeader or TransferRefused. Until the target has taken over,
        or one election timeout has passed, proposals raise Transferring."""
        transfer_leadership(self._state, to)

    def request_read(self, token: int) -> None:
        """Ask for a linearizable read index. Raises NotLeader or Busy; answers in ``reads_ready`` or
        ``reads_failed``."""
        request_read(self._state, token)

    def peer_unreachable(self, peer: NodeId) -> None:
        peer_unreachable(self._state, peer)

    def leader_unreachable(self, leader: NodeId) -> None:
        """The driver has evidence that the process of ``leader`` is gone (connects to it are refused). Wrong
        evidence costs at most an election."""
        leader_unreachable(self._state, leader)

    def snapshot_failed(self, peer: NodeId) -> None:
        """The driver could not read or send a chunk; go back to probing."""
        snapshot_failed(self._state, peer)

    def campaign(self) -> None:
        """Start an election now (tests, and a single voter at start)."""
        campaign(self._state)

    # -- outputs ---------------------------------------------------------------------------------------------

    @property
    def _is_ballot_news(self) -> bool:
        return self._polled_ballot != (self._state.term, self._state.vote)

    @property
    def _has_durable_output(self) -> bool:
        state = self._state
        return (
            self._is_ballot_news
            or state.log.has_unpolled
            or bool(state.outbox.after_persist)
            or (state.install is not None and state.install_number is None)
        )

    def has_output(self) -> bool:
        # Asked several times per step of a driver, hence ``_has_durable_output`` in line.
        state = self._state
        log = state.log
        return (
            state.append_wanted
            or bool(state.outbox)
            or log.has_unpolled
            or self._polled_ballot != (state.term, state.vote)
            or (min(log.commit, log.durable) > log.handed_out and state.install is None)
            or (state.install is not None and state.install_number is None)
            or state.reads.wanted_round > state.round
        )

    def poll(self) -> Output:
        state = self._state
        if state.append_wanted:
            flush_appends(state)
        if state.reads.wanted_round > state.round:
            send_read_round(state)
        self._number += 1
        if state.install is None:
            apply, install = state.log.poll_apply(state.config.max_apply_bytes), None
        else:  # until it is complete, the state machine belongs to the snapshot
            apply, install = (), self._poll_install()
        if install is None:
            truncate_from, entries = state.log.poll_writes(self._number)
        else:
            truncate_from = state.log.commit + 1 if state.log.last_index > state.log.commit else None
            entries = ()
        hard_state = self._poll_hard_state(rides_along=bool(entries))
        outbox, state.outbox = state.outbox, Outbox()
        return Output(
            number=self._number,
            hard_state=hard_state,
            truncate_from=truncate_from,
            entries=entries,
            chunks=tuple(outbox.chunk_writes),
            install=install,
            send_now=tuple(outbox.now),
            send_chunks=tuple(outbox.chunk_sends),
            send_after_persist=tuple(outbox.after_persist),
            apply=apply,
            reads_ready=tuple(outbox.reads_ready),
            reads_failed=tuple(outbox.reads_failed),
        )

    def _poll_install(self) -> SnapshotMeta | None:
        """Alone in its output as far as the disk is concerned: ``install_failed`` means that nothing of it
        was written, and a vote or an entry must not fall with it. What else is pending goes first."""
        state = self._state
        if state.install_number is not None:
            return None
        if self._is_ballot_news or state.log.has_unpolled or state.outbox.after_persist:
            return None
        state.install_number = self._number
        return state.install

    def _poll_hard_state(self, *, rides_along: bool) -> HardState | None:
        """In the same batch as the entries of its term, never after them: found on disk without their term,
        entries of it could be overwritten by a leader of an earlier one."""
        state = self._state
        commit, ballot = state.log.commit, (state.term, state.vote)
        if ballot == self._polled_ballot and not (rides_along and commit != self._polled_commit):
            return None
        if ballot != self._polled_ballot:
            self._ballots.append((self._number, ballot))
        self._polled_ballot = ballot
        self._polled_commit = commit
        return HardState(state.term, state.vote, commit)

    def can_checkpoint(self) -> bool:
        """Whether ``checkpoint`` may be called: nothing durable waits to be polled, and no install is under
        way."""
        return not self._has_durable_output and self._state.install is None

    def checkpoint(self) -> Checkpoint:
        """Valid only while ``has_output()`` is false for the durable part; see ``Checkpoint`` and
        ``can_checkpoint``."""
        if not self.can_checkpoint():
            raise InvariantError("a checkpoint was asked for while durable output is pending")
        log = self._state.log
        term, vote = self._polled_ballot
        return Checkpoint(
            HardState(term, vote, log.commit), log.snapshot, log.all_entries(), log.compacted_term
        )

    # -- acknowledgements ------------------------------------------------------------------------------------

    def persisted(self, number: int) -> None:
        """All outputs up to ``number`` are durable. Cumulative; an older number is ignored."""
        if number <= self._persisted:
            return
        if number > self._number:
            raise InvariantError(f"output {number} is durable before it was polled (last {self._number})")
        self._persisted = number
        state = self._state
        while self._ballots and self._ballots[0][0] <= number:
            state.durable_ballot = self._ballots.pop(0)[1]
        state.log.persisted(number)
        if state.install_number is not None and state.install_number <= number:
            finish_install(state)
        count_own_vote(state)
        if state.role is Role.LEADER:
            acknowledge_self(state)

    def install_failed(self, number: int) -> None:
        """The received snapshot of output ``number`` did not verify; nothing was changed on disk. Ask for it
        again."""
        if self._state.install_number == number:
            abandon_install(self._state)

    def applied(self, index: int) -> None:
        """The state machine has applied everything up to ``index``."""
        log = self._state.log
        if index > log.handed_out:
            raise InvariantError(f"entry {index} is applied before it was handed out (last {log.handed_out})")
        log.applied = max(log.applied, index)

    def snapshot_taken(self, meta: SnapshotMeta) -> None:
        """A local snapshot at ``meta.index`` is durable; the log may be compacted below it."""
        snapshot_taken(self._state, meta)

    # -- questions -------------------------------------------------------------------------------------------

    # What drivers look at after every step, each without the cost of a whole ``status``.

    @property
    def role(self) -> Role:
        """A follower without a vote is a learner."""
        state = self._state
        if state.role is Role.FOLLOWER and state.node not in state.all_voters:
            return Role.LEARNER
        return state.role

    @property
    def leading_term(self) -> int:
        """The term in which this node leads; 0 when it does not."""
        return self._state.term if self._state.role is Role.LEADER else 0

    @property
    def term(self) -> int:
        return self._state.term

    @property
    def leader(self) -> NodeId:
        return self._state.leader

    @property
    def membership(self) -> Membership:
        return self._state.history.current

    def status(self) -> Status:
        state = self._state
        log = state.log
        return Status(
            node=state.node,
            role=self.role,
            term=state.term,
            vote=state.vote,
            leader=state.leader,
            commit=log.commit,
            applied=log.applied,
            first_index=log.first_index,
            last_index=log.last_index,
            durable_index=log.durable,
            snapshot_index=log.snapshot.index,
            membership=state.membership,
            membership_index=state.history.current_index,
            transferring_to=state.transferee,
            peers=tuple(
                PeerStatus(
                    node,
                    progress.match,
                    progress.next,
                    progress.state.value,
                    progress.recently_active or node == state.node,
                )
                for node, progress in state.progress.items()
            ),
        )

    def membership_at(self, index: int) -> Membership:
        """The configuration in force at ``index`` (for the meta of a snapshot taken there)."""
        return self._state.history.at(index)

    def term_at(self, index: int) -> int:
        return self._state.log.term(index)
