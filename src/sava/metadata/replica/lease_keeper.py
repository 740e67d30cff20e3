"""LeaseKeeper: what the leader does for leases and sessions besides applying their commands.

A keep-alive is answered from the leader's memory, but only by a leader that is one: a deposed leader would
go on saying "alive" about leases that its successor is about to end, or "not found" about leases that it
never heard of. So both answers wait for a round to the majority that began after the question, and for this
node to have applied what was committed by then. The deadline itself is moved when the question arrives: a
lease may end late, never early.

While the leader cannot reach its majority, holders cannot reach the leader either, as far as anybody can
tell: every TTL starts anew (``Lessor.quorum_lost``). Its pulse finds out: one confirmation round per tick
while there are leases.
"""

from __future__ import annotations

from collections.abc import Callable

from sava.metadata.commands import Command, LeaseResult, LeaseTouch, Refused, Result, SessionExpire
from sava.metadata.errors import LeaseNotFound
from sava.metadata.lessor import Lessor
from sava.metadata.machine.state_machine import StateMachine
from sava.metadata.peer import Alive, Committed, Failed, KeepAlive, Reply
from sava.metadata.replica.proposals import Proposals
from sava.metadata.replica.reads import Reads
from sava.metadata.replica.requests import Desk, Pending

PULSE_TICKS = 3
"""Ticks without a confirmed pulse after which the majority counts as out of reach: less than any TTL, more
than a hiccup."""


class LeaseKeeper:
    def __init__(
        self, desk: Desk, reads: Reads, proposals: Proposals, *, session_idle_ms: int, grace_ms: int
    ) -> None:
        self._desk = desk
        self._reads = reads
        self._proposals = proposals
        self._session_idle_ms = session_idle_ms
        self._grace_ms = grace_ms
        self._term = 0
        self._early: list[Pending] = []
        """Keep-alives that came before this leader had applied its own first entry."""
        self._pulse_age = 0
        self._pulse_out = False
        self._next_session_scan_ms = 0
        self.lessor: Lessor | None = None

    @property
    def is_leading(self) -> bool:
        return self.lessor is not None and self.lessor.is_leading

    def observe(self, command: Command, result: Result, now_ms: int) -> None:
        """A command was applied while this node leads."""
        if self.lessor is not None:
            self.lessor.observe(command, result, now_ms)

    # -- leadership --------------------------------------------------------------------------------------

    def become_leader(self, term: int, machine: StateMachine, now_ms: int) -> None:
        """Everything that earlier leaders committed is applied: all leases are known, and get their full TTL
        again."""
        self._term = term
        self.lessor = Lessor(machine, grace_ms=self._grace_ms)
        self.lessor.become_leader(now_ms)
        self._pulse_age, self._pulse_out = 0, False
        self._next_session_scan_ms = now_ms + self._session_idle_ms // 4
        early, self._early = self._early, []
        for pending in early:
            self.serve(pending, now_ms)

    def step_down(self, reason: str) -> None:
        if self.lessor is not None:
            self.lessor.step_down()
        early, self._early = self._early, []
        for pending in early:
            self._desk.retry(pending, reason)

    # -- keep-alives -------------------------------------------------------------------------------------

    def serve(self, pending: Pending, now_ms: int) -> None:
        if not self.is_leading:
            self._early.append(pending)
            return
        self._renew(pending, now_ms)
        self._reads.confirm(pending)

    def confirmed(self, pending: Pending, now_ms: int) -> None:
        """This node led after the question was asked, and has applied everything committed before it."""
        if pending.is_done:
            return
        if not self.is_leading:
            self._desk.retry(pending, "the leader changed")
            return
        ttl = self._renew(pending, now_ms)
        if isinstance(ttl, LeaseNotFound):
            self._desk.refuse(pending, ttl)
        elif ttl is not None:
            self._desk.answer(pending, Alive(ttl))
        else:
            self._touch(pending)

    def _renew(self, pending: Pending, now_ms: int) -> int | LeaseNotFound | None:
        assert isinstance(pending.request, KeepAlive)
        assert self.lessor is not None
        try:
            return self.lessor.keep_alive(pending.request.lease, now_ms)
        except LeaseNotFound as error:
            return error

    def _touch(self, pending: Pending) -> None:
        """An expiry of this lease is in the log already. Which of the two counts, the log decides."""
        assert isinstance(pending.request, KeepAlive)
        lease = pending.request.lease

        def done(reply: Reply) -> None:
            match reply:
                case Committed(result=LeaseResult(ttl_ms=ttl_ms)):
                    self._desk.answer(pending, Alive(ttl_ms))
                case Committed(result=Refused(code, message, detail)):
                    self._desk.answer(pending, Failed(code, message, detail))
                case _:
                    self._desk.retry(pending, "the leader changed")

        self._proposals.submit_own(LeaseTouch(lease), self._term, done)

    # -- time --------------------------------------------------------------------------------------------

    def tick(self, machine: StateMachine, now_ms: int) -> None:
        lessor = self.lessor
        if lessor is None or not lessor.is_leading:
            return
        if lessor.next_deadline_ms is not None:
            self._check_pulse(lessor, now_ms)
        for expiry in lessor.due(now_ms):
            self._proposals.submit_own(expiry, self._term, self._survival(expiry.lease, now_ms))
        if now_ms >= self._next_session_scan_ms:
            self._next_session_scan_ms = now_ms + self._session_idle_ms // 4
            before_ms = machine.clock_ms - self._session_idle_ms
            if before_ms > 0:
                self._proposals.submit_own(SessionExpire(before_ms), self._term)

    def _survival(self, lease: int, now_ms: int) -> Callable[[Reply], None]:
        """An expiry that was refused (or not appended) leaves the lease alive. What applied is told by
        ``Lessor.observe``."""

        def done(reply: Reply) -> None:
            refused = isinstance(reply, Committed) and isinstance(reply.result, Refused)
            if (refused or isinstance(reply, Failed)) and self.lessor is not None:
                self.lessor.survived(lease, now_ms)

        return done

    def _check_pulse(self, lessor: Lessor, now_ms: int) -> None:
        self._pulse_age += 1
        if self._pulse_age > PULSE_TICKS:
            lessor.quorum_lost(now_ms)
        if not self._pulse_out:
            self._pulse_out = True
            self._reads.confirm(self._beat)

    def _beat(self) -> None:
        self._pulse_age, self._pulse_out = 0, False
