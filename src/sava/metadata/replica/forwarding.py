"""Forwarding: requests of this node's callers, carried to the leader and repeated until somebody knows.

One hop: a node that does not lead refuses an ``Ask`` and never passes it on, so a request cannot circle
between two nodes that believe each other to lead. Each copy that is sent has a ticket of its own, so that
every answer closes exactly the copy it belongs to: a refusal that arrives twice must not make a second copy
look refused (see ``requests`` for what hangs on that).

A copy without an answer is repeated when the leader changes, and after an election timeout in any case, as
long as repeating is harmless. A membership change or a transfer is sent a second time only when the first
was definitely refused.
"""

from __future__ import annotations

from sava.metadata.errors import OutcomeUnknown
from sava.metadata.peer import Ask, Failed, KeepAlive, Propose, ReadIndex, Request
from sava.metadata.replica.own_session import OwnSession
from sava.metadata.replica.requests import Desk, Pending
from sava.raft.types import NodeId

_TRANSIENT = frozenset({"not_leader", "transferring", "busy", "disk_full", "unavailable", "outcome_unknown"})
"""Refusals that the same request may survive a moment later."""


class Forwarding:
    def __init__(self, desk: Desk, session: OwnSession, *, retry_ticks: int) -> None:
        self._desk = desk
        self._session = session
        self._retry_ticks = retry_ticks
        self._tick = 0
        self._asks: dict[int, Pending] = {}
        self._parked: list[Pending] = []
        """Refused for now; they try again with the next tick, not at once, or two nodes would keep each other
        busy."""

    def send(self, pending: Pending, leader: NodeId) -> None:
        ticket = self._desk.new_ticket()
        self._asks[ticket] = pending
        if pending.asks is None:
            pending.asks = [ticket]
        else:
            pending.asks.append(ticket)
        if not _is_without_effect(pending.request):
            pending.open_attempts += 1
        pending.was_sent = True
        pending.sent_tick = self._tick
        pending.reason = f"node {leader}, the leader known here, does not answer"
        self._desk.outbox.append((leader, Ask(ticket, self._named(pending))))

    def _named(self, pending: Pending) -> Request:
        request = pending.request
        if not pending.seq:
            return request
        assert isinstance(request, Propose)
        low = self._session.low if pending.session == self._session.session else 0
        return Propose(request.command, pending.session, pending.seq, low, request.fence_term)

    # -- answers -----------------------------------------------------------------------------------------

    def take(self, ticket: int) -> Pending | None:
        """The request whose copy was answered; None when nobody waits any more."""
        pending = self._asks.pop(ticket, None)
        if pending is not None and pending.asks is not None:
            pending.asks.remove(ticket)
        return pending

    def refused(self, pending: Pending, reply: Failed) -> None:
        if not reply.maybe_applied and not _is_without_effect(pending.request):
            pending.open_attempts -= 1
        pending.reason = reply.message
        if reply.code in _TRANSIENT and (pending.open_attempts == 0 or pending.is_repeatable):
            self._parked.append(pending)
        elif pending.open_attempts > 0:
            self._desk.answer(pending, Failed(OutcomeUnknown.code, reply.message, 0, maybe_applied=True))
        else:
            self._desk.answer(pending, reply)

    def forget(self, pending: Pending) -> None:
        if pending.asks:
            for ticket in pending.asks:
                del self._asks[ticket]
            pending.asks = None

    # -- time and leaders --------------------------------------------------------------------------------

    def tick(self) -> None:
        self._tick += 1
        parked, self._parked = self._parked, []
        for pending in parked:
            self._desk.retry(pending, pending.reason)
        if self._asks and self._tick % self._retry_ticks == 0:
            self._repeat(sent_before=self._tick - self._retry_ticks)

    def leader_changed(self) -> None:
        self._repeat(sent_before=self._tick)

    def _repeat(self, *, sent_before: int) -> None:
        stale = {
            pending.ticket: pending
            for pending in self._asks.values()
            if pending.sent_tick <= sent_before and pending.is_repeatable
        }
        for pending in stale.values():
            self._desk.retry(pending, pending.reason)


def _is_without_effect(request: Request) -> bool:
    """Asking twice, or never hearing the answer, leaves nothing behind."""
    return isinstance(request, ReadIndex | KeepAlive)
