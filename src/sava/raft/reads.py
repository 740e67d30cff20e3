"""Linearizable reads without a log entry: ReadIndex.

A read may be answered by any state that has applied what was committed when the read arrived, provided this
node was still the leader *at some moment after it arrived*. That moment is proved by a round of heartbeats
sent after the arrival and answered by a quorum.

* The number of the round is private to the leader and only grows. etcd let the caller's token name the round;
  a retry with the same token could then be confirmed by a late answer to the first attempt (etcd#20418).
* Before the leader has committed an entry of its own term it does not know what is committed (etcd#7331):
  such reads wait, in bounded number.
* All reads that arrive between two polls share one round.

A lease would save the round trip, and be a bet on clocks. Correctness rests on none here.
"""

from __future__ import annotations

from collections import deque

from sava.raft.errors import Busy
from sava.raft.output import ReadReady

__all__ = ["ReadQueue"]


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
