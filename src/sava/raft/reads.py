"""Linearizable reads without a log entry: ReadIndex, and optionally a lease.

A read may be answered by any state that has applied what was committed when the read arrived, provided this
node was still the leader *at some moment after it arrived*. That moment is proved by a round of heartbeats
sent after the arrival and answered by a quorum.

* The number of the round is private to the leader and only grows. etcd let the caller's token name the round;
  a retry with the same token could then be confirmed by a late answer to the first attempt (etcd#20418).
* Before the leader has committed an entry of its own term it does not know what is committed (etcd#7331):
  such reads wait, in bounded number.
* All reads that arrive between two polls share one round.

A lease replaces the round trip by a bet on clocks. It begins at the *send* time of a round that a quorum
answered: a follower may have stopped hearing us right after it answered, and its patience began no earlier
than our sending.
"""

from __future__ import annotations

from collections import deque

from sava.raft.errors import Busy
from sava.raft.output import ReadReady

__all__ = ["Lease", "ReadQueue"]


class ReadQueue:
    __slots__ = ("_capacity", "_confirming", "_waiting")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: list[int] = []
        """Tokens that arrived before an entry of this term was committed."""
        self._confirming: deque[tuple[int, ReadReady]] = deque()
        """(round that must be confirmed, answer), rounds never falling."""

    def check_room(self) -> None:
        if len(self._waiting) + len(self._confirming) >= self._capacity:
            raise Busy(f"{self._capacity} reads are pending")

    def wait_for_commit(self, token: int) -> None:
        self._waiting.append(token)

    def confirm_later(self, token: int, index: int, round_: int) -> None:
        self._confirming.append((round_, ReadReady(token, index)))

    def term_is_committed(self, index: int, round_: int) -> None:
        """The leader now knows what is committed: the waiting reads may start."""
        for token in self._waiting:
            self.confirm_later(token, index, round_)
        self._waiting.clear()

    @property
    def wanted_round(self) -> int:
        """The highest round that some read waits for; 0 when none does."""
        return self._confirming[-1][0] if self._confirming else 0

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def confirmed(self, round_: int) -> list[ReadReady]:
        ready = []
        while self._confirming and self._confirming[0][0] <= round_:
            ready.append(self._confirming.popleft()[1])
        return ready

    def fail_all(self) -> list[int]:
        tokens = [read.token for _, read in self._confirming] + self._waiting
        self._confirming.clear()
        self._waiting.clear()
        return tokens


class Lease:
    """Valid until ``duration`` after the send time of the newest confirmed round, in the driver's clock."""

    __slots__ = ("_duration", "_is_broken", "_sent", "_start")

    def __init__(self, duration: int) -> None:
        self._duration = duration
        self._sent: deque[tuple[int, int]] = deque()
        self._start: int | None = None
        self._is_broken = False

    def sent(self, round_: int, now: int) -> None:
        # Rounds of the same instant share the first one's entry: confirming a later one confirms it too.
        if not self._sent or self._sent[-1][1] != now:
            self._sent.append((round_, now))

    def confirmed(self, round_: int) -> None:
        while self._sent and self._sent[0][0] <= round_:
            self._start = self._sent.popleft()[1]

    def break_for_term(self) -> None:
        """TimeoutNow has left. Its receiver may campaign past every follower's patience, at any later time:
        aborting the transfer does not call the message back, so this leader has no lease until its term
        ends."""
        self._is_broken = True

    def is_valid(self, now: int) -> bool:
        return self._start is not None and not self._is_broken and now - self._start < self._duration

    def reset(self) -> None:
        self._sent.clear()
        self._start = None
        self._is_broken = False
