"""Router: every request, on its way to the leader and back.

A request of a local caller is checked, named (``own_session``), and then either served here, because this
node leads, or sent to the leader (``forwarding``). When the leader changes it finds its way again; until
somebody leads it waits at the desk. What peers ask is served only while this node leads, and is never passed
on.

An answer that names an index of the log reaches a local caller when this node has applied that index, so
that a local read right after it sees the effect.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sava.metadata.commands import Proposal, SessionOpen
from sava.metadata.errors import InvalidRequest, Unavailable
from sava.metadata.peer import (
    Answer,
    Ask,
    ChangeMembership,
    Committed,
    Failed,
    KeepAlive,
    Propose,
    ReadAt,
    ReadIndex,
    Reply,
    Request,
    TransferLeadership,
)
from sava.metadata.replica.applier import Applier
from sava.metadata.replica.config import ReplicaConfig
from sava.metadata.replica.forwarding import Forwarding
from sava.metadata.replica.lease_keeper import LeaseKeeper
from sava.metadata.replica.own_session import OwnSession
from sava.metadata.replica.persister import Persister
from sava.metadata.replica.proposals import Proposals
from sava.metadata.replica.reads import Reads
from sava.metadata.replica.requests import Desk, OnReply, Pending
from sava.metadata.replica.steering import Steering
from sava.raft.core import RaftCore, Role
from sava.raft.errors import NotLeader
from sava.raft.types import NO_NODE, NodeId


class Router:
    def __init__(
        self,
        node: NodeId,
        desk: Desk,
        config: ReplicaConfig,
        applier: Applier,
        persister: Persister,
        *,
        session_name: str,
        wall_ms: Callable[[], int],
    ) -> None:
        self._node = node
        self._desk = desk
        self._applier = applier
        self._persister = persister
        self._session = OwnSession(
            desk, session_name, window=config.limits.max_session_window, idle_ms=config.session_idle_ms
        )
        election_ticks = config.core.election_ticks
        self.proposals = Proposals(desk, self._session, wall_ms)
        self.reads = Reads(desk)
        self.leases = LeaseKeeper(
            desk,
            self.reads,
            self.proposals,
            session_idle_ms=config.session_idle_ms,
            grace_ms=2 * election_ticks * config.tick_ms,
        )
        self._forwarding = Forwarding(desk, self._session, retry_ticks=election_ticks)
        self._steering = Steering(desk)
        self.leading_term = 0
        """The term in which this node leads; 0 when it does not."""
        self._leader = NO_NODE
        desk.on_close = self._on_close

    @property
    def has_work(self) -> bool:
        return self._desk.has_waiting and self._knows_leader

    @property
    def _knows_leader(self) -> bool:
        return bool(self.leading_term) or self._leader not in (NO_NODE, self._node)

    # -- requests of local callers -----------------------------------------------------------------------

    def ask(self, request: Request, done: OnReply, deadline_ms: int, now_ms: int) -> Pending:
        pending = self._desk.open(request, done, deadline_ms)
        if pending.is_done:
            return pending
        if isinstance(request, Propose):
            if not self._is_acceptable(pending, request):
                return pending
            if not request.session and not isinstance(request.command, SessionOpen):
                self._session.admit(pending, now_ms)
                return pending
        if isinstance(request, ReadIndex):
            self.reads.add(pending)
        else:
            self._desk.wait(pending)
        return pending

    def _is_acceptable(self, pending: Pending, request: Propose) -> bool:
        """What the state machine would never take costs no log entry."""
        try:
            self._applier.machine.check(
                Proposal(request.command, 0, request.session, request.seq, request.low, request.fence_term)
            )
        except InvalidRequest as error:
            self._desk.refuse(pending, error)
            return False
        return True

    def route(self, core: RaftCore, now_ms: int) -> None:
        """Serve what waits, or send it to the leader; without a leader it waits on."""
        self.reads.gather()
        if self.has_work:
            for pending in self._desk.take_waiting():
                if self.leading_term:
                    self._serve(core, pending, now_ms)
                else:
                    self._forwarding.send(pending, self._leader)
        if self.leading_term:
            # What waits here waits for a disk at work, whose completion brings the next turn.
            if self._persister.is_idle or self.proposals.has_batch:
                self.proposals.flush(core)
            self.reads.flush(core)

    # -- the leader's side -------------------------------------------------------------------------------

    def asked(self, core: RaftCore, src: NodeId, ask: Ask, now_ms: int) -> None:
        """A peer's request. Refused at once unless this node leads: one hop, and nothing was appended."""
        if not self.leading_term:
            refusal = Failed("not_leader", str(NotLeader(self._leader)), self._leader)
            self._desk.outbox.append((src, Answer(ask.ticket, refusal)))
            return
        pending = self._desk.open_remote(src, ask.ticket, ask.request)
        if pending is None:
            return
        if not isinstance(ask.request, Propose) or self._is_acceptable(pending, ask.request):
            self._serve(core, pending, now_ms)

    def _serve(self, core: RaftCore, pending: Pending, now_ms: int) -> None:
        match pending.request:
            case Propose():
                if self._persister.full is not None:
                    full = f"the leader's disk is full: {self._persister.full}"
                    self._desk.refuse(pending, Unavailable(full))
                else:
                    self.proposals.submit(pending)
            case ReadIndex():
                self.reads.confirm(pending)
            case KeepAlive():
                self.leases.serve(pending, now_ms)
            case ChangeMembership():
                self._steering.change(core, pending)
            case TransferLeadership():
                self._steering.transfer(core, pending)

    def confirmed(self, token: int, index: int, now_ms: int) -> None:
        """A majority confirmed that this node led after these had asked; ``index`` covers all that they may
        not miss."""
        for asker in self.reads.ready(token):
            if not isinstance(asker, Pending):
                asker()
            elif asker.is_done:
                continue
            elif isinstance(asker.request, KeepAlive):
                confirmed = partial(self.leases.confirmed, asker, now_ms)
                self._applier.by_index.add(index, self._desk.new_ticket(), confirmed)
            elif asker.is_local:
                self._settle(asker, index, ReadAt(index))
            else:
                self._desk.answer(asker, ReadAt(index))

    # -- answers from the leader -------------------------------------------------------------------------

    def answered(self, answer: Answer) -> None:
        pending = self._forwarding.take(answer.ticket)
        if pending is None or pending.is_settled:
            return
        match answer.reply:
            case Failed() as reply:
                self._forwarding.refused(pending, reply)
            case Committed(index) | ReadAt(index):
                self._settle(pending, index, answer.reply)
            case reply:
                self._desk.answer(pending, reply)

    def _settle(self, pending: Pending, index: int, reply: Reply) -> None:
        """Nothing can change this answer any more; it waits for this node to have applied ``index``."""
        pending.is_settled = True
        pending.reason = f"it is committed at {index}, which this node has not applied yet"
        self._applier.by_index.add(index, pending.ticket, partial(self._hand_over, pending, reply))

    def _hand_over(self, pending: Pending, reply: Reply) -> None:
        if isinstance(reply, Committed):
            self._session.conclude(pending, reply.index, reply.result)
        else:
            self._desk.answer(pending, reply)

    # -- leaders come and go -----------------------------------------------------------------------------

    def look_at(self, core: RaftCore) -> None:
        """After each round of the core's outputs: who leads now, and what follows from it."""
        leading_term = core.term if core.role is Role.LEADER else 0
        if leading_term != self.leading_term:
            if self.leading_term:
                self._lose_leadership(f"node {self._node} no longer leads")
            self.leading_term = leading_term
        if core.leader != self._leader:
            self._leader = core.leader
            self._forwarding.leader_changed()
        if self._steering.has_open:
            self._steering.look(core)

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
        if self._desk.must_sweep():
            self._session.sweep()
            self.proposals.sweep()
            self.reads.sweep()

    def _on_close(self, pending: Pending) -> None:
        if pending.seq:
            self._session.release(pending)
        if pending.asks:
            self._forwarding.forget(pending)
        if pending.is_settled:
            self._applier.by_index.cancel(pending.ticket)
