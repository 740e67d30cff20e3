"""Router: every request, on its way to the leader and back.

A request of a local caller is checked, named (``OwnSession``), and then either served here, because this
node leads, or sent to the leader (``Forwarding``). When the leader changes it finds its way again; without a
leader it waits. What peers ask is served only while this node leads, and is never passed on.

An answer that names an index of the log reaches a local caller when this node has applied that index, so
that a local read right after it sees the effect.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sava.metadata.commands import Proposal, SessionOpen
from sava.metadata.errors import InvalidRequest, OutcomeUnknown, Unavailable
from sava.metadata.peer import (
    Ask,
    Changed,
    ChangeMembership,
    Committed,
    Failed,
    KeepAlive,
    LeaderAnswer,
    LeaderRequest,
    Propose,
    ReadAt,
    ReadIndex,
    Reply,
    TransferLeadership,
    Transferred,
)
from sava.metadata.replica.config import ReplicaConfig
from sava.metadata.replica.persister import Applier, Persister
from sava.metadata.replica.proposals import LeaseKeeper, Proposals, ReadRounds
from sava.metadata.replica.requests import Forwarding, OnReply, OwnSession, PendingRequests, Request
from sava.raft.core import RaftCore, Role, Status
from sava.raft.types import (
    NO_NODE,
    MembershipBusy,
    MembershipRefused,
    NodeId,
    NotLeader,
    TransferRefused,
)


class Router:
    def __init__(
        self,
        node: NodeId,
        requests: PendingRequests,
        config: ReplicaConfig,
        applier: Applier,
        persister: Persister,
        *,
        session_name: str,
        wall_ms: Callable[[], int],
    ) -> None:
        self._node = node
        self._requests = requests
        self._applier = applier
        self._persister = persister
        self._session = OwnSession(
            requests, session_name, window=config.limits.max_session_window, idle_ms=config.session_idle_ms
        )
        election_ticks = config.core.election_ticks
        self.proposals = Proposals(requests, self._session, wall_ms)
        self.reads = ReadRounds(requests)
        self.leases = LeaseKeeper(
            requests,
            self.reads,
            self.proposals,
            session_idle_ms=config.session_idle_ms,
            grace_ms=2 * election_ticks * config.tick_ms,
        )
        self._forwarding = Forwarding(requests, self._session, retry_ticks=election_ticks)
        self._admin = AdminRequests(requests)
        self.leading_term = 0
        """The term in which this node leads; 0 when it does not."""
        self._leader = NO_NODE
        requests.on_close = self._on_close

    @property
    def has_work(self) -> bool:
        """A request waits, and a leader is known."""
        return bool(
            self._requests.waiting and (self.leading_term or self._leader not in (NO_NODE, self._node))
        )

    # -- requests of local callers -----------------------------------------------------------------------

    def ask(self, request: LeaderRequest, done: OnReply, deadline_ms: int, now_ms: int) -> Request:
        pending = self._requests.open(request, done, deadline_ms)
        if pending.is_done:
            return pending
        if isinstance(request, Propose):
            if not self._is_acceptable(pending, request):
                return pending
            if not request.session and not isinstance(request.command, SessionOpen):
                self._session.admit(pending, now_ms)
                return pending
        if isinstance(request, ReadIndex):
            self.reads.arrived.append(pending)
        else:
            self._requests.wait(pending)
        return pending

    def _is_acceptable(self, pending: Request, request: Propose) -> bool:
        """What the state machine would never take costs no log entry."""
        try:
            self._applier.machine.check(
                Proposal(request.command, 0, request.session, request.seq, request.low, request.fence_term)
            )
        except InvalidRequest as error:
            self._requests.refuse(pending, error)
            return False
        return True

    def route(self, core: RaftCore, now_ms: int) -> None:
        """Serve what waits, or send it to the leader; without a leader it waits on."""
        if self.reads.arrived:
            self.reads.gather()
        if self._requests.waiting and self.has_work:
            for pending in self._requests.take_waiting():
                if self.leading_term:
                    self._serve(core, pending, now_ms)
                else:
                    self._forwarding.send(pending, self._leader)
        if self.leading_term:
            # What waits here waits for a disk at work, whose completion brings the next turn.
            if self.proposals.queue and (self._persister.is_idle or self.proposals.has_batch):
                self.proposals.flush(core)
            if self.reads.asked:
                self.reads.flush(core)

    # -- the leader's side -------------------------------------------------------------------------------

    def asked(self, core: RaftCore, src: NodeId, ask: Ask, now_ms: int) -> None:
        """A peer's request. Refused at once unless this node leads: one hop, and nothing was appended."""
        if not self.leading_term:
            refusal = Failed("not_leader", str(NotLeader(self._leader)), self._leader)
            self._requests.outbox.append((src, LeaderAnswer(ask.ticket, refusal)))
            return
        pending = self._requests.open_remote(src, ask.ticket, ask.request)
        if pending is None:
            return
        if not isinstance(ask.request, Propose) or self._is_acceptable(pending, ask.request):
            self._serve(core, pending, now_ms)

    def _serve(self, core: RaftCore, pending: Request, now_ms: int) -> None:
        match pending.body:
            case Propose():
                if self._persister.full is not None:
                    full = f"the leader's disk is full: {self._persister.full}"
                    self._requests.refuse(pending, Unavailable(full))
                else:
                    self.proposals.submit(pending)
            case ReadIndex():
                self.reads.asked.append(pending)
            case KeepAlive():
                self.leases.serve(pending, now_ms)
            case ChangeMembership():
                self._admin.change(core, pending)
            case TransferLeadership():
                self._admin.transfer(core, pending)

    def confirmed(self, token: int, index: int, now_ms: int) -> None:
        """A majority confirmed that this node led after these had asked; ``index`` covers all that they may
        not miss."""
        for asker in self.reads.ready(token):
            if not isinstance(asker, Request):
                asker()
            elif asker.is_done:
                continue
            elif isinstance(asker.body, KeepAlive):
                confirmed = partial(self.leases.confirmed, asker, now_ms)
                self._applier.by_index.add(index, self._requests.new_ticket(), confirmed)
            elif asker.is_local:
                self._settle(asker, index, ReadAt(index))
            else:
                self._requests.answer(asker, ReadAt(index))

    # -- answers from the leader -------------------------------------------------------------------------

    def answered(self, answer: LeaderAnswer) -> None:
        pending = self._forwarding.take(answer.ticket)
        if pending is None or pending.is_settled:
            return
        match answer.reply:
            case Failed() as reply:
                self._forwarding.refused(pending, reply)
            case Committed(index) | ReadAt(index):
                self._settle(pending, index, answer.reply)
            case reply:
                self._requests.answer(pending, reply)

    def _settle(self, pending: Request, index: int, reply: Reply) -> None:
        """Nothing can change this answer any more; it waits for this node to have applied ``index``."""
        pending.settled(index)
        self._applier.by_index.add(index, pending.ticket, partial(self._hand_over, pending, reply))

    def _hand_over(self, pending: Request, reply: Reply) -> None:
        if isinstance(reply, Committed):
            self._session.conclude(pending, reply.index, reply.result)
        else:
            self._requests.answer(pending, reply)

    # -- leaders come and go -----------------------------------------------------------------------------

    def look_at(self, core: RaftCore) -> None:
        """After each round of the core's outputs: who leads now, and what follows from it."""
        leading_term = core.leading_term
        if leading_term != self.leading_term:
            if self.leading_term:
                self._lose_leadership(f"node {self._node} no longer leads")
            self.leading_term = leading_term
        if core.leader != self._leader:
            self._leader = core.leader
            self._forwarding.leader_changed()
        if self._admin.changes or self._admin.transferring is not None:
            self._admin.look(core)

    def _lose_leadership(self, reason: str) -> None:
        self.leases.step_down(reason)
        self.proposals.lost_leadership(reason)
        self.reads.lost_leadership(reason)

    @property
    def is_ready_to_lead(self) -> bool:
        return bool(self.leading_term) and self._applier.term == self.leading_term

    def applied(self, now_ms: int) -> None:
        if self.is_ready_to_lead and not self.leases.is_leading:
            self.leases.become_leader(self.leading_term, self._applier.machine, now_ms)

    # -- time and ends -----------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        self._forwarding.tick()
        if self.is_ready_to_lead:
            self.leases.tick(self._applier.machine, now_ms)

    def sweep(self) -> None:
        """Take what has ended out of the queues."""
        if self._requests.must_sweep():
            self._session.sweep()
            self.proposals.sweep()
            self.reads.sweep()

    def _on_close(self, pending: Request) -> None:
        if pending.seq:
            self._session.release(pending)
        if pending.copies:
            self._forwarding.forget(pending)
        if pending.is_settled:
            self._applier.by_index.cancel(pending.ticket)


# -- admin requests ------------------------------------------------------------------------------------------


class AdminRequests:
    """Changes of the membership and hand-over of leadership, asked of the leader.

    Both answer when they are *complete*. A voter change is complete when the second, plain configuration is
    committed: in between, every decision needs two majorities, and an operator who switches the old node off
    at that moment may take the cluster with it. A transfer is complete when this node no longer leads.

    Neither can be repeated blindly, so when leadership goes while a change is open, its outcome is unknown to
    this node. So is that of a transfer which took longer than an election timeout: the request to campaign
    may arrive yet.
    """

    def __init__(self, requests: PendingRequests) -> None:
        self._requests = requests
        self.changes: list[tuple[Request, int, int]] = []
        """Index and term of the entry that began the change. More than one for a moment: the core takes the
        next as soon as the last is committed."""
        self.transferring: tuple[Request, NodeId] | None = None

    def change(self, core: RaftCore, pending: Request) -> None:
        assert isinstance(pending.body, ChangeMembership)
        try:
            index = core.change_membership(pending.body.change)
        except (MembershipBusy, MembershipRefused) as error:
            self._requests.refuse(pending, error)
        except NotLeader as error:
            self._requests.retry(pending, str(error))
        else:
            pending.appended("the change is not committed yet")
            self.changes.append((pending, index, core.term_at(index)))

    def transfer(self, core: RaftCore, pending: Request) -> None:
        assert isinstance(pending.body, TransferLeadership)
        if self.transferring is not None:
            self._requests.refuse(pending, MembershipBusy("leadership is being transferred already"))
            return
        to = pending.body.to or _most_up_to_date(core.status())
        if to == NO_NODE:
            self._requests.refuse(pending, TransferRefused("no other voter is known to be alive"))
            return
        try:
            core.transfer_leadership(to)
        except TransferRefused as error:
            self._requests.refuse(pending, error)
        except NotLeader as error:
            self._requests.retry(pending, str(error))
        else:
            pending.appended(f"node {to} has not taken over yet")
            self.transferring = pending, to

    def look(self, core: RaftCore) -> None:
        """Answer what is complete by now, and what can no longer be."""
        status = core.status()
        if self.changes:
            for pending, index, term in self.changes:
                self._look_at_change(pending, index, term, core, status)
            self.changes = [change for change in self.changes if not change[0].is_done]
        if self.transferring is not None:
            pending, to = self.transferring
            self._look_at_transfer(pending, to, status)
            if pending.is_done:
                self.transferring = None

    def _look_at_change(
        self, pending: Request, index: int, term: int, core: RaftCore, status: Status
    ) -> None:
        is_complete = not status.membership.is_joint and index <= status.membership_index <= status.commit
        if is_complete and _holds(core, status, index, term):
            self._requests.answer(pending, Changed(status.membership_index))
        elif status.role is not Role.LEADER:
            message = "leadership was lost before the change was complete; look at the membership and decide"
            self._requests.answer(pending, Failed(OutcomeUnknown.code, message, 0, maybe_applied=True))

    def _look_at_transfer(self, pending: Request, to: NodeId, status: Status) -> None:
        if status.role is not Role.LEADER:
            self._requests.answer(pending, Transferred(status.leader or to))
        elif status.transferring_to == NO_NODE:
            # The request to campaign may be on its way: a node that was slow, or cut off, takes over when it
            # arrives, although this leader has stopped waiting for it.
            message = f"node {to} has not taken over within an election timeout, and may do so yet"
            self._requests.answer(pending, Failed(OutcomeUnknown.code, message, 0, maybe_applied=True))


def _holds(core: RaftCore, status: Status, index: int, term: int) -> bool:
    """Whether the entry that began the change is the one in the log. Another leader may have put its own
    change in that place, unless this node has led ever since."""
    if status.role is Role.LEADER and status.term == term:
        return True
    return status.first_index <= index <= status.last_index and core.term_at(index) == term


def _most_up_to_date(status: Status) -> NodeId:
    voters = [
        peer
        for peer in status.peers
        if peer.node in status.membership.voters and peer.node != status.node and peer.recently_active
    ]
    return max(voters, key=lambda peer: (peer.match, -peer.node)).node if voters else NO_NODE
