"""Sessions: what makes a retry harmless.

A client that lost the answer to a request cannot know whether the request took effect. It sends it again
under the same (session, seq), and the state machine answers the second copy from memory: the first result, no
effect, no events. The memory is part of the replicated state and of the snapshot; kept anywhere else, a new
leader or a restart would execute the copy.

The window is bounded three ways: the session says ``low`` (it will never ask about anything below), and
``Limits`` bounds the number of answers and their bytes. What has fallen out of the window is refused, never
executed again.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sava.metadata.machine.limits import Limits


class Session(msgspec.Struct, array_like=True):
    session: int
    nonce: bytes
    last_stamp: int
    """Largest stamp of its requests; the only thing that its expiry looks at."""
    low: int = 1
    """Requests below are not answered any more."""
    responses: dict[int, bytes] = msgspec.field(default_factory=dict)
    held_bytes: int = 0

    def forget_below(self, low: int) -> None:
        if low <= self.low:
            return
        if low - self.low <= len(self.responses):
            gone = [seq for seq in range(self.low, low) if seq in self.responses]
        else:
            gone = [seq for seq in self.responses if seq < low]
        for seq in gone:
            self.held_bytes -= len(self.responses.pop(seq))
        self.low = low

    def remember(self, seq: int, response: bytes, limits: Limits) -> None:
        self.responses[seq] = response
        self.held_bytes += len(response)
        if len(self.responses) > limits.max_session_window or self.held_bytes > limits.max_session_bytes:
            self._evict(limits)

    def _evict(self, limits: Limits) -> None:
        """Lowest number first, raising ``low`` with it: a gap inside the window would let a late copy of a
        forgotten request look like a new one. The highest stays, however large."""
        for seq in sorted(self.responses)[:-1]:
            if (
                len(self.responses) <= limits.max_session_window
                and self.held_bytes <= limits.max_session_bytes
            ):
                return
            self.held_bytes -= len(self.responses.pop(seq))
            self.low = seq + 1

    def frozen(self) -> Session:
        return Session(
            self.session, self.nonce, self.last_stamp, self.low, self.responses.copy(), self.held_bytes
        )


class SessionTable:
    __slots__ = ("_by_nonce", "by_id", "next_id")

    def __init__(self) -> None:
        self.by_id: dict[int, Session] = {}
        self._by_nonce: dict[bytes, int] = {}
        self.next_id = 1

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(self.by_id.values())

    def find(self, nonce: bytes) -> Session | None:
        """The session that an earlier copy of the same open created."""
        session = self._by_nonce.get(nonce)
        return None if session is None else self.by_id[session]

    def open(self, nonce: bytes, stamp_ms: int) -> Session:
        session = Session(self.next_id, nonce, stamp_ms)
        self.next_id += 1
        self.add(session)
        return session

    def add(self, session: Session) -> None:
        self.by_id[session.session] = session
        self._by_nonce[session.nonce] = session.session

    def expire(self, before_ms: int) -> int:
        """Forget sessions whose last stamp is before ``before_ms``; returns how many."""
        idle = [session for session in self if session.last_stamp < before_ms]
        for session in idle:
            del self.by_id[session.session]
            del self._by_nonce[session.nonce]
        return len(idle)
