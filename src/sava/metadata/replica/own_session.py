"""OwnSession: the replica's own name for its requests, which makes repeating them harmless.

A request that was sent and not answered may have been applied. It is repeated under the same (session, seq),
and the state machine answers the copy from memory. The session is opened by the first request that
needs it, with a nonce that no other life of any node uses; repeating the opening gives the same session.

``low`` is the lowest number still asked about: the state machine forgets answers below it. The machine keeps
a bounded window of answers, so numbers are given out only within that window; requests beyond it wait here.

The cluster closes sessions that were idle for long. A request refused for that reason was certainly not
applied if its only copy was the one that was refused; then it begins anew under a new session. Otherwise an
earlier copy may have been applied, and the memory of it is gone with the session: its outcome is unknown. To
make that rare, a session that was idle for half the time is given up before it is used again.
"""

from __future__ import annotations

from collections import deque

from sava.errors import SavaError
from sava.metadata.commands import Refused, Result, SessionOpen, SessionResult
from sava.metadata.errors import OutcomeUnknown, RequestForgotten, SessionExpired, Unavailable
from sava.metadata.peer import Committed, Failed, Propose, Reply
from sava.metadata.replica.requests import FOREVER, Desk, Pending, living

_GONE = (SessionExpired.code, RequestForgotten.code)


class OwnSession:
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
