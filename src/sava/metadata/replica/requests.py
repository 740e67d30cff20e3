"""PendingRequests: all that wait for an answer on this node, and the promise that each gets exactly one.

The hard question about a request whose answer is missing is whether it may have taken effect. So a request
counts its *open attempts*: places where a copy of it was appended or sent, and whose fate is not known. A
definite refusal ("I do not lead, nothing was appended", or another entry found at the index where it was
appended) closes one attempt. When the deadline passes, a request without open attempts had no effect and may
be repeated; one with open attempts is ``outcome_unknown``, and saying anything else about it
would be a guess.

Answers are collected and handed out at the end of a pump, never from inside the call that asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from sava.errors import SavaError
from sava.metadata.commands import CommandRefused, Result, SessionOpen, SessionResult
from sava.metadata.errors import NotInitialized, OutcomeUnknown, RequestForgotten, SessionExpired, Unavailable
from sava.metadata.peer import (
    Ask,
    Committed,
    Failed,
    KeepAlive,
    LeaderAnswer,
    LeaderRequest,
    Propose,
    ReadIndex,
    Reply,
    code_of,
    detail_of,
)
from sava.raft.types import NO_NODE, NodeId

OnReply = Callable[[Reply], None]

FOREVER = 1 << 62
"""The deadline of requests that end by themselves: those of peers (answered when leadership goes) and
internal ones."""


class Request:
    """One request that waits for its answer. ``src`` is the peer that asked, or NO_NODE for a caller on this
    node. Only its own methods change what may be said of it."""

    __slots__ = (
        "blocked_by",
        "body",
        "copies",
        "deadline_ms",
        "done",
        "is_done",
        "is_settled",
        "is_waiting",
        "open_attempts",
        "reason",
        "sent_tick",
        "seq",
        "session",
        "src",
        "ticket",
        "was_sent",
    )

    def __init__(
        self,
        ticket: int,
        request: LeaderRequest,
        done: OnReply | None,
        deadline_ms: int,
        src: NodeId = NO_NODE,
    ) -> None:
        self.ticket = ticket
        self.body = request
        self.done = done
        self.deadline_ms = deadline_ms
        self.src = src
        self.is_done = False
        self.is_settled = False
        """Its answer is known and waits for this node to have applied it."""
        self.is_waiting = False
        """Must find a leader (again)."""
        self.open_attempts = 0
        self.was_sent = False
        """A copy of it has left this node, at whatever time."""
        self.copies: list[int] | None = None
        """Tickets of the copies sent to leaders."""
        self.sent_tick = 0
        self.session = 0
        self.seq = 0
        """Its name in this replica's own session, when it has one."""
        self.reason = "no leader is known"
        self.blocked_by: Request | None = None
        """Another request that must be answered first; its reason is then this one's too."""

    # -- what may be said of it --------------------------------------------------------------------------

    @property
    def is_local(self) -> bool:
        return self.src == NO_NODE

    @property
    def is_repeatable(self) -> bool:
        """Whether a second copy is harmless although the first may have taken effect."""
        request = self.body
        if isinstance(request, Propose):
            return bool(self.seq or request.session) or isinstance(request.command, SessionOpen)
        return isinstance(request, ReadIndex | KeepAlive)

    @property
    def may_have_effect(self) -> bool:
        """A copy of it is at large: it may have taken effect, or may yet."""
        return self.open_attempts > 0

    @property
    def may_repeat(self) -> bool:
        return self.open_attempts == 0 or self.is_repeatable

    @property
    def was_only_appended_here(self) -> bool:
        """Its one copy is the one in this node's log."""
        return self.open_attempts == 1 and not self.was_sent

    # -- what happens to it ------------------------------------------------------------------------------

    def queued(self) -> None:
        self.is_waiting = True

    def taken(self) -> None:
        self.is_waiting = False

    def ended(self) -> None:
        self.is_done = True

    def explain(self, reason: str) -> None:
        """What it waits for; its caller reads that when the deadline passes."""
        self.reason = reason

    def named(self, session: int, seq: int) -> None:
        """From now on a second copy is harmless."""
        self.session, self.seq = session, seq
        self.blocked_by = None

    def postponed(self, reason: str, blocked_by: Request | None) -> None:
        self.reason = reason
        self.blocked_by = blocked_by

    def appended(self, reason: str) -> None:
        """A copy is in the log of this node, which leads: an attempt is open."""
        self.open_attempts += 1
        self.reason = reason

    def overwritten(self) -> None:
        """Another entry is where it was appended: that attempt is closed."""
        self.open_attempts -= 1

    def sent(self, ticket: int, leader: NodeId, tick: int) -> None:
        """A copy is on its way to the leader: an attempt is open, unless the request changes nothing."""
        if self.copies is None:
            self.copies = [ticket]
        else:
            self.copies.append(ticket)
        if not _is_without_effect(self.body):
            self.open_attempts += 1
        self.was_sent = True
        self.sent_tick = tick
        self.reason = f"node {leader}, the leader known here, does not answer"

    def copy_answered(self, ticket: int) -> None:
        if self.copies is not None:
            self.copies.remove(ticket)

    def copy_refused(self, reply: Failed) -> None:
        """A definite refusal closes the attempt of that copy."""
        if not reply.maybe_applied and not _is_without_effect(self.body):
            self.open_attempts -= 1
        self.reason = reply.message

    def begin_anew(self) -> None:
        """Its session is gone, and its only copy was refused for that: it certainly had no effect."""
        self.open_attempts = 0
        self.session = self.seq = 0

    def settled(self, index: int) -> None:
        """It is committed; nothing can change its answer any more."""
        self.is_settled = True
        self.reason = f"it is committed at {index}, which this node has not applied yet"

    def drop_copies(self) -> list[int]:
        """The tickets whose answers no caller waits for any more."""
        copies, self.copies = self.copies or [], None
        return copies


class PendingRequests:
    def __init__(self, first_ticket: int, max_pending: int) -> None:
        self._next_ticket = first_ticket
        self._max_pending = max_pending
        self._pending: dict[int, Request] = {}
        self._remote: dict[Request, None] = {}
        self._earliest = FOREVER
        self._ended_early = 0
        self._answers: list[tuple[OnReply, Reply]] = []
        self.on_close: Callable[[Request], None] | None = None
        """Called with each request that ends, however it ends."""
        self._waiting: list[Request] = []
        self.outbox: list[tuple[NodeId, LeaderAnswer | Ask]] = []

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    # -- opening -----------------------------------------------------------------------------------------

    def new_ticket(self) -> int:
        """Never used twice, not even by a later life of this node: an answer that was on its way when it died
        must not be taken for the answer to another question."""
        self._next_ticket += 1
        return self._next_ticket

    def open(self, request: LeaderRequest, done: OnReply, deadline_ms: int) -> Request:
        """A caller's request, or the replica's own (``FOREVER``). One too many is answered at once, and is
        then done."""
        pending = Request(self.new_ticket(), request, done, deadline_ms)
        self._pending[pending.ticket] = pending
        if deadline_ms < self._earliest:
            self._earliest = deadline_ms
        if len(self._pending) + len(self._remote) > self._max_pending and deadline_ms != FOREVER:
            self.refuse(pending, Unavailable(f"{self._max_pending} requests wait on this node already"))
        return pending

    def open_remote(self, src: NodeId, ticket: int, request: LeaderRequest) -> Request | None:
        if len(self._pending) + len(self._remote) >= self._max_pending:
            busy = Unavailable("too many requests wait at the leader")
            self.outbox.append((src, LeaderAnswer(ticket, failed(busy))))
            return None
        pending = Request(ticket, request, None, FOREVER, src)
        self._remote[pending] = None
        return pending

    # -- finding a leader --------------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def wait(self, pending: Request) -> None:
        """The request must find a leader (again)."""
        if not pending.is_waiting:
            pending.queued()
            self._waiting.append(pending)

    def take_waiting(self) -> list[Request]:
        waiting, self._waiting = self._waiting, []
        ready = []
        for pending in waiting:
            pending.taken()
            if not pending.is_done and not pending.is_settled:
                ready.append(pending)
        return ready

    # -- ending ------------------------------------------------------------------------------------------

    def answer(self, pending: Request, reply: Reply) -> None:
        if pending.is_done:
            return
        self._close(pending)
        if pending.done is not None:
            self._answers.append((pending.done, reply))
        elif pending.src != NO_NODE:
            self.outbox.append((pending.src, LeaderAnswer(pending.ticket, reply)))

    def refuse(self, pending: Request, error: SavaError) -> None:
        """End it with ``error``, or with ``outcome_unknown`` while a copy of it is still at large."""
        self.answer(pending, failed(error, maybe_applied=pending.may_have_effect))

    def cancel(self, ticket: int) -> None:
        pending = self._pending.get(ticket)
        if pending is not None and not pending.is_done:
            self._ended_early += 1
            self._close(pending)

    def _close(self, pending: Request) -> None:
        pending.ended()
        if pending.src == NO_NODE:
            del self._pending[pending.ticket]
        else:
            del self._remote[pending]
        if self.on_close is not None:
            self.on_close(pending)

    def retry(self, pending: Request, reason: str) -> None:
        """Let it find the leader again. A peer's request goes back to the peer: one hop, and the peer repeats
        it itself. One that must not be repeated stays open until its deadline, unless no copy is at large."""
        if pending.is_done or pending.is_settled:
            return
        pending.reason = reason
        if pending.src != NO_NODE:
            self.answer(pending, Failed("not_leader", reason, 0, pending.may_have_effect))
        elif pending.may_repeat:
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

    def _time_out(self, pending: Request, why: str) -> None:
        reason = why or (pending.blocked_by or pending).reason
        if pending.may_have_effect:
            error: SavaError = OutcomeUnknown(
                f"no answer before the deadline ({reason}); it may still take effect"
            )
        elif why:
            error = NotInitialized(why)
        else:
            error = Unavailable(f"not done before the deadline: {reason}")
        self.refuse(pending, error)

    def end_all(self, error: SavaError) -> None:
        """Refuse all requests: this node stops, and no caller may wait without limit."""
        for pending in (*self._pending.values(), *self._remote):
            self.refuse(pending, error)

    def must_sweep(self) -> bool:
        """Whether requests have ended that still stand in some queue. Without a leader nothing takes them
        out, and callers that give up and ask again would fill the memory."""
        ended, self._ended_early = self._ended_early, 0
        self._waiting = living(self._waiting) if ended else self._waiting
        return ended > 0

    def take_answers(self) -> list[tuple[OnReply, Reply]]:
        answers, self._answers = self._answers, []
        return answers


def living(queue: Iterable[Request]) -> list[Request]:
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
    applied if its only copy was the one that was refused; then it begins again under a new session. Otherwise
    an earlier copy may have been applied, and the memory of it is gone with the session: its outcome is
    unknown. To make that rare, a session that was idle for half the time is given up before it is used again.
    """

    def __init__(self, requests: PendingRequests, name: str, *, window: int, idle_ms: int) -> None:
        self._requests = requests
        self._name = name
        self._window = window
        self._idle_ms = idle_ms
        self._openings = 0
        self._session = 0
        self._opening: Request | None = None
        self._last_use_ms = 0
        self._next_seq = 1
        self._low = 1
        self._outstanding: set[int] = set()
        self._backlog: deque[Request] = deque()

    @property
    def session(self) -> int:
        return self._session

    @property
    def low(self) -> int:
        """Of ``session``; it says nothing about the numbers of an earlier one."""
        return self._low

    def admit(self, pending: Request, now_ms: int) -> None:
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

    def _number(self, pending: Request) -> None:
        pending.named(self._session, self._next_seq)
        self._outstanding.add(self._next_seq)
        self._next_seq += 1
        self._requests.wait(pending)

    def _postpone(self, pending: Request) -> None:
        self._backlog.append(pending)
        if not self._session and self._opening is None:
            self._openings += 1
            nonce = f"{self._name}-{self._openings}".encode()
            self._opening = self._requests.open(Propose(SessionOpen(nonce)), self._opened, FOREVER)
            self._requests.wait(self._opening)
        pending.postponed("too many requests are under way", self._opening)

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
            self._requests.refuse(pending, Unavailable(f"no session could be opened: {message}"))

    def _drain(self) -> None:
        while self._backlog and self._session and self._next_seq - self._low < self._window:
            pending = self._backlog.popleft()
            if not pending.is_done:
                self._number(pending)

    def release(self, pending: Request) -> None:
        """The request has ended, however it ended: no caller will ask about its number again."""
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

    def conclude(self, pending: Request, index: int, result: Result) -> None:
        """The log has answered: hand the result over, unless the session itself was refused."""
        if (
            pending.seq
            and isinstance(result, CommandRefused)
            and result.code in _GONE
            and not pending.is_done
        ):
            self._refused(pending, result)
        else:
            self._requests.answer(pending, Committed(index, result))

    def _refused(self, pending: Request, result: CommandRefused) -> None:
        if pending.session == self._session and result.code == SessionExpired.code:
            self._session = 0
        if result.code == RequestForgotten.code or not pending.was_only_appended_here:
            unknown: SavaError = OutcomeUnknown(f"{result.message}; an earlier copy may have taken effect")
            self._requests.answer(pending, Failed(OutcomeUnknown.code, str(unknown), 0, maybe_applied=True))
            return
        pending.begin_anew()
        self._postpone(pending)


def _why(reply: Reply) -> str:
    if isinstance(reply, Failed):
        return reply.message
    if isinstance(reply, Committed) and isinstance(reply.result, CommandRefused):
        return reply.result.message
    return "an unexpected answer"


# -- requests sent to the leader -----------------------------------------------------------------------------


_TRANSIENT = frozenset({"not_leader", "transferring", "busy", "disk_full", "unavailable", "outcome_unknown"})
"""Refusals that the same request may survive a moment later."""


class Forwarding:
    """Requests of this node's callers, carried to the leader and repeated until a leader answers.

    One hop: a node that does not lead refuses an ``Ask`` and never passes it on, so a request cannot circle
    between two nodes that believe each other to lead. Each copy that is sent has a ticket of its own, so that
    every answer closes exactly the copy it belongs to: a refusal that arrives twice must not make a second
    copy look refused (see ``requests`` for what hangs on that).

    A copy without an answer is repeated when the leader changes, and after an election timeout in any case,
    as long as repeating is harmless. A membership change or a transfer is sent a second time only when the
    first was definitely refused.
    """

    def __init__(self, requests: PendingRequests, session: OwnSession, *, retry_ticks: int) -> None:
        self._requests = requests
        self._session = session
        self._retry_ticks = retry_ticks
        self._tick = 0
        self._asks: dict[int, Request] = {}
        self._parked: list[Request] = []
        """Refused for now; they try again with the next tick, not at once, or two nodes would keep each other
        busy."""

    def send(self, pending: Request, leader: NodeId) -> None:
        ticket = self._requests.new_ticket()
        self._asks[ticket] = pending
        pending.sent(ticket, leader, self._tick)
        self._requests.outbox.append((leader, Ask(ticket, self._named(pending))))

    def _named(self, pending: Request) -> LeaderRequest:
        request = pending.body
        if not pending.seq:
            return request
        assert isinstance(request, Propose)
        low = self._session.low if pending.session == self._session.session else 0
        return Propose(request.command, pending.session, pending.seq, low, request.fence_term)

    # -- answers -----------------------------------------------------------------------------------------

    def take(self, ticket: int) -> Request | None:
        """The request whose copy was answered; None when no caller waits any more."""
        pending = self._asks.pop(ticket, None)
        if pending is not None:
            pending.copy_answered(ticket)
        return pending

    def refused(self, pending: Request, reply: Failed) -> None:
        pending.copy_refused(reply)
        if reply.code in _TRANSIENT and pending.may_repeat:
            self._parked.append(pending)
        elif pending.may_have_effect:
            self._requests.answer(pending, Failed(OutcomeUnknown.code, reply.message, 0, maybe_applied=True))
        else:
            self._requests.answer(pending, reply)

    def forget(self, pending: Request) -> None:
        for ticket in pending.drop_copies():
            del self._asks[ticket]

    # -- time and leaders --------------------------------------------------------------------------------

    def tick(self) -> None:
        self._tick += 1
        parked, self._parked = self._parked, []
        for pending in parked:
            self._requests.retry(pending, pending.reason)
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
            self._requests.retry(pending, pending.reason)


def _is_without_effect(request: LeaderRequest) -> bool:
    """Asking twice, or never hearing the answer, leaves nothing behind."""
    return isinstance(request, ReadIndex | KeepAlive)
