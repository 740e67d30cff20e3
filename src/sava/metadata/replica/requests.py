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

from collections.abc import Callable, Iterable

from sava.errors import SavaError
from sava.metadata.commands import SessionOpen
from sava.metadata.errors import NotInitialized, OutcomeUnknown, Unavailable
from sava.metadata.failures import code_of, detail_of
from sava.metadata.peer import Answer, Ask, Failed, KeepAlive, Propose, ReadIndex, Reply, Request
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
