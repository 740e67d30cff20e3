"""The desk: everything that waits for an answer on this node, and the promise that each gets exactly one.

The hard question about a request whose answer is missing is whether it may have taken effect. So a request
counts its *open attempts*: places where a copy of it was appended or sent, and whose fate is not known. A
definite refusal ("I do not lead, nothing was appended", or another entry found at the index where it was
appended) closes one attempt. When the deadline passes, a request without open attempts had no effect and may
be repeated by anybody; one with open attempts is ``outcome_unknown``, and saying anything else about it
would be a guess.

Answers are collected and handed out at the end of a pump, never from inside the call that asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from sava.errors import SavaError
from sava.metadata.commands import Refused, Result, SessionOpen, SessionResult
from sava.metadata.errors import NotInitialized, OutcomeUnknown, RequestForgotten, SessionExpired, Unavailable
from sava.metadata.peer import (
    Answer,
    Ask,
    Committed,
    Failed,
    KeepAlive,
    Propose,
    ReadIndex,
    Reply,
    Request,
    code_of,
    detail_of,
)
from sava.raft.types import NO_NODE, NodeId

OnReply = Callable[[Reply], None]

FOREVER = 1 << 62
"""The deadline of requests that end by themselves: those of peers (answered when leadership goes) and
internal ones."""


class Pending:
    """One request. ``src`` is the peer that asked, or NO_NODE for a caller on this node."""

    __slots__ = (
        "asks",
        "blocked_by",
        "deadline_ms",
        "done",
        "is_done",
        "is_settled",
        "is_waiting",
        "open_attempts",
        "reason",
        "request",
        "sent_tick",
        "seq",
        "session",
        "src",
        "ticket",
        "was_sent",
    )

    def __init__(
        self, ticket: int, request: Request, done: OnReply | None, deadline_ms: int, src: NodeId = NO_NODE
    ) -> None:
        self.ticket = ticket
        self.request = request
        self.done = done
        self.deadline_ms = deadline_ms
        self.src = src
        self.is_done = False
        self.is_settled = False
        """Its answer is known and waits for this node to have applied it."""
        self.is_waiting = False
        """In the desk's waiting room."""
        self.open_attempts = 0
        self.was_sent = False
        """A copy of it has left this node, at whatever time."""
        self.asks: list[int] | None = None
        """Tickets of the copies sent to leaders."""
        self.sent_tick = 0
        self.session = 0
        self.seq = 0
        """Its name in this replica's own session, when it has one."""
        self.reason = "no leader is known"
        self.blocked_by: Pending | None = None
        """Another request that must be answered first; its reason is then this one's too."""

    @property
    def is_local(self) -> bool:
        return self.src == NO_NODE

    @property
    def is_repeatable(self) -> bool:
        """Whether a second copy is harmless although the first may have taken effect."""
        request = self.request
        if isinstance(request, Propose):
            return bool(self.seq or request.session) or isinstance(request.command, SessionOpen)
        return isinstance(request, ReadIndex | KeepAlive)


class Desk:
    def __init__(self, first_ticket: int, max_pending: int) -> None:
        self._next_ticket = first_ticket
        self._max_pending = max_pending
        self._pending: dict[int, Pending] = {}
        self._remote: dict[Pending, None] = {}
        self._earliest = FOREVER
        self._ended_early = 0
        self._answers: list[tuple[OnReply, Reply]] = []
        self.on_close: Callable[[Pending], None] | None = None
        """Told about each request that ends, however it ends."""
        self._waiting: list[Pending] = []
        self.outbox: list[tuple[NodeId, Answer | Ask]] = []

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    # -- opening -----------------------------------------------------------------------------------------

    def new_ticket(self) -> int:
        """Never used twice, not even by a later life of this node: an answer that was on its way when it died
        must not be taken for the answer to another question."""
        self._next_ticket += 1
        return self._next_ticket

    def open(self, request: Request, done: OnReply, deadline_ms: int) -> Pending:
        """A caller's request, or the replica's own (``FOREVER``). One too many is answered at once, and is
        then done."""
        pending = Pending(self.new_ticket(), request, done, deadline_ms)
        self._pending[pending.ticket] = pending
        if deadline_ms < self._earliest:
            self._earliest = deadline_ms
        if len(self._pending) + len(self._remote) > self._max_pending and deadline_ms != FOREVER:
            self.refuse(pending, Unavailable(f"{self._max_pending} requests wait on this node already"))
        return pending

    def open_remote(self, src: NodeId, ticket: int, request: Request) -> Pending | None:
        if len(self._pending) + len(self._remote) >= self._max_pending:
            busy = Unavailable("too many requests wait at the leader")
            self.outbox.append((src, Answer(ticket, failed(busy))))
            return None
        pending = Pending(ticket, request, None, FOREVER, src)
        self._remote[pending] = None
        return pending

    # -- finding a leader --------------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def wait(self, pending: Pending) -> None:
        """The request must find a leader (again)."""
        if not pending.is_waiting:
            pending.is_waiting = True
            self._waiting.append(pending)

    def take_waiting(self) -> list[Pending]:
        waiting, self._waiting = self._waiting, []
        ready = []
        for pending in waiting:
            pending.is_waiting = False
            if not pending.is_done and not pending.is_settled:
                ready.append(pending)
        return ready

    # -- ending ------------------------------------------------------------------------------------------

    def answer(self, pending: Pending, reply: Reply) -> None:
        if pending.is_done:
            return
        self._close(pending)
        if pending.done is not None:
            self._answers.append((pending.done, reply))
        elif pending.src != NO_NODE:
            self.outbox.append((pending.src, Answer(pending.ticket, reply)))

    def refuse(self, pending: Pending, error: SavaError) -> None:
        """End it with ``error``, or with ``outcome_unknown`` while a copy of it is still at large."""
        self.answer(pending, failed(error, maybe_applied=pending.open_attempts > 0))

    def cancel(self, ticket: int) -> None:
        pending = self._pending.get(ticket)
        if pending is not None and not pending.is_done:
            self._ended_early += 1
            self._close(pending)

    def _close(self, pending: Pending) -> None:
        pending.is_done = True
        if pending.src == NO_NODE:
            del self._pending[pending.ticket]
        else:
            del self._remote[pending]
        if self.on_close is not None:
            self.on_close(pending)

    def retry(self, pending: Pending, reason: str) -> None:
        """Let it find the leader again. A peer's request goes back to the peer: one hop, and the peer repeats
        it itself. One that must not be repeated stays open until its deadline, unless no copy is at large."""
        if pending.is_done or pending.is_settled:
            return
        pending.reason = reason
        if pending.src != NO_NODE:
            self.answer(pending, Failed("not_leader", reason, 0, pending.open_attempts > 0))
        elif pending.open_attempts == 0 or pending.is_repeatable:
            self.wait(pending)

    def expire(self, now_ms: int, why: str) -> None:
        """End all whose deadline has passed."""
        if now_ms < self._earliest:
            return
        overdue = [pending for pending in self._pending.values() if pending.deadline_ms <= now_ms]
        self._ended_early += len(overdue)
        for pending in overdue:
            self._time_out(pending, why)
        self._earliest = min((pending.deadline_ms for pending in self._pending.values()), default=FOREVER)

    def _time_out(self, pending: Pending, why: str) -> None:
        reason = why or (pending.blocked_by or pending).reason
        if pending.open_attempts > 0:
            error: SavaError = OutcomeUnknown(
                f"no answer before the deadline ({reason}); it may still take effect"
            )
        elif why:
            error = NotInitialized(why)
        else:
            error = Unavailable(f"not done before the deadline: {reason}")
        self.refuse(pending, error)

    def end_all(self, error: SavaError) -> None:
        """This node stops: nobody may wait for ever."""
        for pending in (*self._pending.values(), *self._remote):
            self.refuse(pending, error)

    def must_sweep(self) -> bool:
        """Whether requests have ended that still stand in some queue. Without a leader nobody takes them out,
        and callers that give up and ask again would fill the memory."""
        ended, self._ended_early = self._ended_early, 0
        self._waiting = living(self._waiting) if ended else self._waiting
        return ended > 0

    def take_answers(self) -> list[tuple[OnReply, Reply]]:
        answers, self._answers = self._answers, []
        return answers


def living(queue: Iterable[Pending]) -> list[Pending]:
    return [pending for pending in queue if not pending.is_done]


def failed(error: SavaError, *, maybe_applied: bool = False) -> Failed:
    code = OutcomeUnknown.code if maybe_applied else code_of(error)
    return Failed(code, str(error), detail_of(error), maybe_applied)


# -- the replica's own session -------------------------------------------------------------------------------


_GONE = (SessionExpired.code, RequestForgotten.code)


class OwnSession:
    """The replica's own name for its requests, which makes repeating them harmless.

    A request that was sent and not answered may have been applied. It is repeated under the same (session,
    seq), and the state machine answers the copy from memory. The session is opened by the first request that
    needs it, with a nonce that no other life of any node uses; repeating the opening gives the same session.

    ``low`` is the lowest number still asked about: the state machine forgets answers below it. The machine
    keeps a bounded window of answers, so numbers are given out only within that window; requests beyond it
    wait here.

    The cluster closes sessions that were idle for long. A request refused for that reason was certainly not
    applied if its only copy was the one that was refused; then it begins anew under a new session. Otherwise
    an earlier copy may have been applied, and the memory of it is gone with the session: its outcome is
    unknown. To make that rare, a session that was idle for half the time is given up before it is used again.
    """

    def __init__(self, desk: Desk, name: str, *, window: int, idle_ms: int) -> None:
        self._desk = desk
        self._name = name
        self._window = window
        self._idle_ms = idle_ms
        self._openings = 0
        self._session = 0
        self._opening: Pending | None = None
        self._last_use_ms = 0
        self._next_seq = 1
        self._low = 1
        self._outstanding: set[int] = set()
        self._backlog: deque[Pending] = deque()

    @property
    def session(self) -> int:
        return self._session

    @property
    def low(self) -> int:
        """Of ``session``; it says nothing about the numbers of an earlier one."""
        return self._low

    def admit(self, pending: Pending, now_ms: int) -> None:
        """Give the request its number and let it find the leader, or keep it until there is one."""
        if self._session and not self._outstanding and now_ms - self._last_use_ms > self._idle_ms // 2:
            self._session = 0
        # Also when the request is only put aside: the session that it opens is fresh, and must not look idle
        # to the next one.
        self._last_use_ms = now_ms
        if not self._session or self._next_seq - self._low >= self._window or self._backlog:
            self._postpone(pending)
        else:
            self._number(pending)

    def _number(self, pending: Pending) -> None:
        pending.session, pending.seq = self._session, self._next_seq
        pending.blocked_by = None
        self._outstanding.add(self._next_seq)
        self._next_seq += 1
        self._desk.wait(pending)

    def _postpone(self, pending: Pending) -> None:
        self._backlog.append(pending)
        if not self._session and self._opening is None:
            self._openings += 1
            nonce = f"{self._name}-{self._openings}".encode()
            self._opening = self._desk.open(Propose(SessionOpen(nonce)), self._opened, FOREVER)
            self._desk.wait(self._opening)
        pending.reason = "too many requests are under way"
        pending.blocked_by = self._opening

    def _opened(self, reply: Reply) -> None:
        self._opening = None
        if isinstance(reply, Committed) and isinstance(reply.result, SessionResult):
            self._session = reply.result.session
            self._next_seq = self._low = 1
            self._outstanding.clear()
            self._drain()
            return
        message = _why(reply)
        backlog, self._backlog = self._backlog, deque()
        for pending in backlog:
            self._desk.refuse(pending, Unavailable(f"no session could be opened: {message}"))

    def _drain(self) -> None:
        while self._backlog and self._session and self._next_seq - self._low < self._window:
            pending = self._backlog.popleft()
            if not pending.is_done:
                self._number(pending)

    def release(self, pending: Pending) -> None:
        """The request has ended, however it ended: nobody will ask about its number again."""
        if pending.seq and pending.session == self._session:
            self._outstanding.discard(pending.seq)
            self._advance()

    def _advance(self) -> None:
        while self._low < self._next_seq and self._low not in self._outstanding:
            self._low += 1
        if self._backlog:
            self._drain()

    def sweep(self) -> None:
        self._backlog = deque(living(self._backlog))

    def conclude(self, pending: Pending, index: int, result: Result) -> None:
        """The log has answered: hand the result over, unless the session itself was refused."""
        if pending.seq and isinstance(result, Refused) and result.code in _GONE and not pending.is_done:
            self._refused(pending, result)
        else:
            self._desk.answer(pending, Committed(index, result))

    def _refused(self, pending: Pending, result: Refused) -> None:
        if pending.session == self._session and result.code == SessionExpired.code:
            self._session = 0
        only_copy = pending.open_attempts == 1 and not pending.was_sent
        if result.code == RequestForgotten.code or not only_copy:
            unknown: SavaError = OutcomeUnknown(f"{result.message}; an earlier copy may have taken effect")
            self._desk.answer(pending, Failed(OutcomeUnknown.code, str(unknown), 0, maybe_applied=True))
            return
        pending.open_attempts = 0
        pending.session = pending.seq = 0
        self._postpone(pending)


def _why(reply: Reply) -> str:
    if isinstance(reply, Failed):
        return reply.message
    if isinstance(reply, Committed) and isinstance(reply.result, Refused):
        return reply.result.message
    return "an unexpected answer"


# -- requests sent to the leader -----------------------------------------------------------------------------


_TRANSIENT = frozenset({"not_leader", "transferring", "busy", "disk_full", "unavailable", "outcome_unknown"})
"""Refusals that the same request may survive a moment later."""


class Forwarding:
    """Requests of this node's callers, carried to the leader and repeated until somebody knows.

    One hop: a node that does not lead refuses an ``Ask`` and never passes it on, so a request cannot circle
    between two nodes that believe each other to lead. Each copy that is sent has a ticket of its own, so that
    every answer closes exactly the copy it belongs to: a refusal that arrives twice must not make a second
    copy look refused (see ``requests`` for what hangs on that).

    A copy without an answer is repeated when the leader changes, and after an election timeout in any case,
    as long as repeating is harmless. A membership change or a transfer is sent a second time only when the
    first was definitely refused.
    """

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
