"""What the leader knows about one member's log, and how much it may send.

    PROBE      one append per heartbeat, until one is accepted: we do not know where the logs agree
    REPLICATE  optimistic: ``next`` runs ahead of the acknowledgements, bounded by the window
    SNAPSHOT   no appends: the member needs entries that are compacted here

``0 <= match < next`` always. ``match`` never goes back: a member that acknowledged an entry has it on disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum

from sava.raft.types import Membership, NodeId, SnapshotMeta

__all__ = [
    "Inflights",
    "Progress",
    "ProgressState",
    "Tally",
    "count_votes",
    "has_majority",
    "has_quorum",
    "majority",
    "majority_index",
    "quorum_index",
]


class ProgressState(Enum):
    PROBE = "probe"
    REPLICATE = "replicate"
    SNAPSHOT = "snapshot"


class Inflights:
    """Appends sent and not yet acknowledged, bounded by count and by bytes."""

    __slots__ = ("_bytes", "_max_bytes", "_max_count", "_sent")

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._sent: deque[tuple[int, int]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def is_full(self) -> bool:
        return len(self._sent) >= self._max_count or self._bytes >= self._max_bytes

    def add(self, last_index: int, size: int) -> None:
        self._sent.append((last_index, size))
        self._bytes += size

    def free_to(self, index: int) -> None:
        """An acknowledgement of ``index`` acknowledges every earlier append too."""
        sent = self._sent
        while sent and sent[0][0] <= index:
            self._bytes -= sent.popleft()[1]

    def clear(self) -> None:
        self._sent.clear()
        self._bytes = 0


class Progress:
    __slots__ = (
        "active",
        "caught_up_checks",
        "chunk_offset",
        "idle_ticks",
        "inflights",
        "match",
        "next",
        "round",
        "sent_commit",
        "snapshot",
        "state",
        "wait_for_reply",
        "was_active",
    )

    def __init__(self, next_index: int, inflights: Inflights, *, active: bool) -> None:
        self.match = 0
        self.next = next_index
        self.state = ProgressState.PROBE
        self.inflights = inflights
        self.wait_for_reply = False
        """Send no append before the next reply of any kind (a probe is out, or the window is full)."""
        self.sent_commit = 0
        """Highest commit that an append has carried; saves the empty appends that would repeat it."""
        self.active = active
        self.was_active = active
        self.round = 0
        """Highest heartbeat round answered."""
        self.caught_up_checks = 0
        self.snapshot: SnapshotMeta | None = None
        self.chunk_offset = 0
        """Offset of the one chunk in flight."""
        self.idle_ticks = 0
        """Ticks since the transfer last moved."""

    def __str__(self) -> str:
        extra = f" snapshot={self.snapshot.index}@{self.chunk_offset}" if self.snapshot else ""
        pause = " paused" if self.is_paused else ""
        window = f"inflight={len(self.inflights)}"
        return f"{self.state.value} match={self.match} next={self.next} {window}{extra}{pause}"

    @property
    def is_paused(self) -> bool:
        return self.wait_for_reply or self.state is ProgressState.SNAPSHOT

    @property
    def recently_active(self) -> bool:
        """Heard in this or the previous check-quorum window. One window alone would call everyone silent in
        the moment after the flags are cleared."""
        return self.active or self.was_active

    def wants_append(self, last_index: int, commit: int) -> bool:
        """Whether an append could tell something new: entries, or that entries sent before are committed by
        now."""
        if self.is_paused or (self.next <= last_index and self.inflights.is_full):
            return False
        return self.next <= last_index or self.wants_commit(commit)

    def wants_commit(self, commit: int) -> bool:
        return min(commit, self.next - 1) > self.sent_commit

    def start_window(self) -> None:
        self.was_active = self.active
        self.active = False

    # -- transitions -----------------------------------------------------------------------------------------

    def _reset(self, state: ProgressState) -> None:
        self.state = state
        self.wait_for_reply = False
        self.snapshot = None
        self.inflights.clear()

    def become_probe(self) -> None:
        self._reset(ProgressState.PROBE)
        self.next = self.match + 1
        self.sent_commit = min(self.sent_commit, self.match)

    def become_replicate(self) -> None:
        self._reset(ProgressState.REPLICATE)
        self.next = self.match + 1

    def become_snapshot(self, meta: SnapshotMeta) -> None:
        self._reset(ProgressState.SNAPSHOT)
        self.snapshot = meta
        self.chunk_offset = 0
        self.idle_ticks = 0

    # -- events ----------------------------------------------------------------------------------------------

    def sent(self, count: int, size: int) -> None:
        if self.state is ProgressState.REPLICATE:
            if count:
                self.next += count
                self.inflights.add(self.next - 1, size)
            # A message into a full window is itself the probe that finds out whether the window was lost.
            self.wait_for_reply = self.inflights.is_full
        else:
            self.wait_for_reply = True

    def accepted(self, index: int) -> bool:
        """The member holds everything up to ``index`` on disk. Says whether that is news."""
        self.wait_for_reply = False
        if index <= self.match:
            return False
        self.match = index
        self.next = max(self.next, index + 1)
        return True

    def rejected(self, index: int, retry_after: int) -> bool:
        """The member has no entry ``index`` that matches ours; logs may agree up to ``retry_after``. False:
        stale.

        A rejection can be older than what we know now (reordered network). Taking it would send ``next`` back
        for nothing, or, taken as "the follower lost data", stop the leader (openraft #1500).
        """
        if index <= self.match or self.state is ProgressState.SNAPSHOT:
            return False
        if self.state is ProgressState.REPLICATE:
            self.become_probe()
            return True
        if index != self.next - 1:
            return False
        self.next = max(min(index, retry_after + 1), self.match + 1)
        self.sent_commit = min(self.sent_commit, self.next - 1)
        self.wait_for_reply = False
        return True


# -- quorums -------------------------------------------------------------------------------------------------
#
# Majorities, computed the plain way.
#
# Every decision of the group (a vote, a commit, a confirmed read, staying leader) is one of the functions
# below. They sort a handful of numbers each time on purpose: an incremental structure for the commit index
# once let openraft commit on 2 of 5 voters (#1802), and nothing is won by being clever over five integers.
#
# While a configuration is joint, a decision needs a majority of *both* halves. A half that is empty decides
# nothing; a configuration without voters never decides.


class Tally(Enum):
    PENDING = "pending"
    WON = "won"
    LOST = "lost"


def majority(voters: int) -> int:
    return voters // 2 + 1


def majority_index(voters: Sequence[NodeId], reached: Mapping[NodeId, int]) -> int:
    """The largest number that a majority of ``voters`` has reached; a voter that is not in ``reached`` counts
    as 0."""
    ascending = sorted([reached.get(voter, 0) for voter in voters])
    return ascending[len(ascending) - majority(len(ascending))]


def quorum_index(membership: Membership, reached: Mapping[NodeId, int]) -> int:
    """The largest number reached by a majority of every half of ``membership``."""
    if not membership.voters:
        return 0
    index = majority_index(membership.voters, reached)
    if membership.outgoing:
        index = min(index, majority_index(membership.outgoing, reached))
    return index


def has_majority(voters: Sequence[NodeId], present: Mapping[NodeId, bool]) -> bool:
    return sum(1 for voter in voters if present.get(voter, False)) >= majority(len(voters))


def has_quorum(membership: Membership, present: Mapping[NodeId, bool]) -> bool:
    if not membership.voters or not has_majority(membership.voters, present):
        return False
    return not membership.outgoing or has_majority(membership.outgoing, present)


def _count_half(voters: Sequence[NodeId], votes: Mapping[NodeId, bool]) -> Tally:
    granted = sum(1 for voter in voters if votes.get(voter) is True)
    refused = sum(1 for voter in voters if votes.get(voter) is False)
    needed = majority(len(voters))
    if granted >= needed:
        return Tally.WON
    # Lost as soon as the votes still out cannot make a majority any more.
    return Tally.LOST if len(voters) - refused < needed else Tally.PENDING


def count_votes(membership: Membership, votes: Mapping[NodeId, bool]) -> Tally:
    """An election is won when every half is won, and lost as soon as one half is lost."""
    if not membership.voters:
        return Tally.PENDING
    halves = [_count_half(membership.voters, votes)]
    if membership.outgoing:
        halves.append(_count_half(membership.outgoing, votes))
    if Tally.LOST in halves:
        return Tally.LOST
    return Tally.WON if all(half is Tally.WON for half in halves) else Tally.PENDING
