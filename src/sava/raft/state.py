"""CoreState: all that one node's consensus remembers, and the few primitives every concern needs.

The modules ``election``, ``replication`` and ``leading`` are functions over this state, one concern each;
``core.RaftCore`` only dispatches to them. Imports go one way:

    state  <-  replication  <-  leading  <-  election  <-  core
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from sava.raft.log import RaftLog
from sava.raft.membership import History
from sava.raft.messages import Message, decode_membership
from sava.raft.output import ChunkSend, ChunkWrite, ReadReady, Recovered, Role
from sava.raft.progress import Inflights, Progress
from sava.raft.types import (
    NO_NODE,
    Busy,
    CoreConfig,
    Entry,
    EntryKind,
    Membership,
    NodeId,
    RandomSource,
    SnapshotMeta,
)

__all__ = ["CoreState", "Incoming", "Outbox", "ReadQueue"]


class Outbox:
    """What the next output will carry besides durable state."""

    __slots__ = ("after_persist", "chunk_sends", "chunk_writes", "now", "reads_failed", "reads_ready")

    def __init__(self) -> None:
        self.now: list[Message] = []
        self.after_persist: list[Message] = []
        self.chunk_sends: list[ChunkSend] = []
        self.chunk_writes: list[ChunkWrite] = []
        self.reads_ready: list[ReadReady] = []
        self.reads_failed: list[int] = []

    def __bool__(self) -> bool:
        return bool(
            self.now
            or self.after_persist
            or self.chunk_sends
            or self.chunk_writes
            or self.reads_ready
            or self.reads_failed
        )


class Incoming:
    """A snapshot on its way in: bytes before ``next_offset`` have been handed to the driver."""

    __slots__ = ("meta", "next_offset", "term")

    def __init__(self, meta: SnapshotMeta, term: int) -> None:
        self.meta = meta
        self.term = term
        self.next_offset = 0

    def is_same(self, meta: SnapshotMeta) -> bool:
        """(index, term, digest) names the content, whichever node sends it: a new leader resumes the old
        one's transfer."""
        mine = self.meta
        return (mine.index, mine.term, mine.digest) == (meta.index, meta.term, meta.digest)


class CoreState:
    __slots__ = (
        "all_voters",
        "append_wanted",
        "config",
        "departing",
        "disk_elapsed",
        "disk_end",
        "draw",
        "durable_ballot",
        "election_elapsed",
        "election_timeout",
        "heartbeat_elapsed",
        "history",
        "hurried_timeout",
        "incoming",
        "install",
        "install_number",
        "leader",
        "log",
        "members",
        "node",
        "outbox",
        "progress",
        "reads",
        "role",
        "round",
        "term",
        "transfer_elapsed",
        "transferee",
        "uncommitted_bytes",
        "vote",
        "votes",
    )

    def __init__(self, node: NodeId, config: CoreConfig, recovered: Recovered, draw: RandomSource) -> None:
        self.node = node
        self.config = config
        self.draw = draw
        hard = recovered.hard_state
        self.term = hard.term
        self.vote = hard.vote
        self.durable_ballot = (hard.term, hard.vote)
        """(term, vote) as confirmed by the driver."""
        self.log = RaftLog(recovered.snapshot, recovered.entries, hard.commit, recovered.compacted_term)
        self.history = History(recovered.snapshot.index, recovered.snapshot.membership)

        self.role = Role.FOLLOWER
        self.leader = NO_NODE
        self.votes: dict[NodeId, bool] = {}
        self.election_elapsed = 0
        self.heartbeat_elapsed = 0
        self.election_timeout = 0
        self.hurried_timeout = 0
        """The ticks after which a follower campaigns whose leader's process is gone; 0: it has the whole
        timeout."""

        self.progress: dict[NodeId, Progress] = {}
        """Filled on the leader only; this node too when it is a member, so that it counts itself like anyone
        else."""
        self.departing: tuple[NodeId, ...] = ()
        """Members that the newest configuration leaves out; they hear it once, when it is committed."""
        self.append_wanted = False
        """Send appends at the next poll: everything that arrives between two polls shares its messages."""
        self.uncommitted_bytes = 0
        self.round = 0
        self.reads = ReadQueue(config.max_pending_reads)
        self.transferee = NO_NODE
        self.transfer_elapsed = 0
        self.disk_end = 0
        """On the leader: where the durable part of its log has ended for ``disk_elapsed`` ticks."""
        self.disk_elapsed = 0

        self.incoming: Incoming | None = None
        self.install: SnapshotMeta | None = None
        """A complete snapshot that is not durable yet. Until then the old log stays in force, and is not
        added to."""
        self.install_number: int | None = None
        self.outbox = Outbox()

        # The newest configuration *in the log* wins over any other copy, committed or not: this node may be
        # part of the quorum that made it effective.
        self.members: tuple[NodeId, ...] = ()
        self.all_voters: tuple[NodeId, ...] = ()
        after_snapshot = self.log.between(recovered.snapshot.index + 1, self.log.last_index + 1)
        self.note_memberships(after_snapshot)
        self.membership_changed()
        self.reset_election_timer()

    # -- membership ------------------------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        return self.history.current

    @property
    def is_promotable(self) -> bool:
        """May campaign: a configuration that may still decide gives this node a vote, and its log is not
        about to be replaced.

        The configuration in force counts, and so does each before it back to the one that is known to be
        committed. {1,2} becomes {2}; leader 1 appends C_new and loses its office before 2 has it. 2 cannot
        win against 1's longer log, so the group stands still for good unless 1, outside its own newest
        configuration, campaigns once more (thesis §4.2.2). With a snapshot half installed, the log that would
        back the candidacy is about to vanish.
        """
        if self.install is not None:
            return False
        return self.node in self.all_voters or self.history.has_voter_since(self.log.commit, self.node)

    def note_memberships(self, entries: Iterable[Entry]) -> bool:
        """Put the configurations among ``entries`` in force, at the moment they are appended."""
        found = False
        for entry in entries:
            if entry.kind is EntryKind.MEMBERSHIP:
                self.history.push(entry.index, decode_membership(entry.data))
                found = True
        return found

    def membership_changed(self) -> None:
        membership = self.history.current
        self.members = membership.members
        self.all_voters = membership.all_voters
        if self.role is Role.LEADER:
            self._follow_members()

    def _follow_members(self) -> None:
        last = self.log.last_index
        old = self.progress
        # In order of ids, so that messages leave in the same order on every run. A new member starts active:
        # it must not cost the leader its quorum before it had a chance to answer.
        self.progress = {
            node: old[node] if node in old else self.new_progress(last + 1, active=True)
            for node in self.members
        }
        if self.transferee not in self.membership.voters:
            self.transferee = NO_NODE

    def new_progress(self, next_index: int, *, active: bool) -> Progress:
        window = Inflights(self.config.max_inflight, self.config.max_inflight_bytes)
        return Progress(next_index, window, active=active)

    # -- time ------------------------------------------------------------------------------------------------

    def reset_election_timer(self) -> None:
        """Redrawn every time, from the injected generator: two nodes that once drew alike would split every
        vote."""
        ticks = self.config.election_ticks
        self.election_elapsed = 0
        self.hurried_timeout = 0
        self.election_timeout = ticks + self.draw(ticks)

    @property
    def hears_leader(self) -> bool:
        """Stickiness: a leader is known and has been heard within the shortest election timeout."""
        return self.leader != NO_NODE and self.election_elapsed < self.config.election_ticks

    # -- sending ---------------------------------------------------------------------------------------------

    @property
    def is_ballot_durable(self) -> bool:
        return self.durable_ballot == (self.term, self.vote)

    def send(self, message: Message) -> None:
        self.outbox.now.append(message)

    def send_when_durable(self, message: Message) -> None:
        self.outbox.after_persist.append(message)

    def reply(self, message: Message, index: int = 0) -> None:
        """Answer a peer: now if all that the answer promises (term, vote, entries up to ``index``) is durable
        already, else with the batch that makes it so."""
        if index <= self.log.durable and self.is_ballot_durable:
            self.outbox.now.append(message)
        else:
            self.outbox.after_persist.append(message)

    # -- roles -----------------------------------------------------------------------------------------------

    def become_follower(self, term: int, leader: NodeId) -> None:
        """Follow ``leader`` (NO_NODE while unknown) in ``term``. A new term forgets the vote, the same term
        never does."""
        if term > self.term:
            self.term = term
            self.vote = NO_NODE
        self.leave_role()
        self.role = Role.FOLLOWER
        self.leader = leader
        self.reset_election_timer()

    def leave_role(self) -> None:
        """Drop all that belongs to the role left behind. Reads fail definitely: they had no effect."""
        self.outbox.reads_failed.extend(self.reads.fail_all())
        self.progress = {}
        self.departing = ()
        self.votes = {}
        self.append_wanted = False
        self.uncommitted_bytes = 0
        self.transferee = NO_NODE
        self.transfer_elapsed = 0
        self.disk_elapsed = 0
        self.heartbeat_elapsed = 0


# -- linearizable reads --------------------------------------------------------------------------------------


class ReadQueue:
    """Linearizable reads without a log entry: ReadIndex.

    A read may be answered by any state that has applied what was committed when the read arrived, provided
    this node was still the leader *at some moment after it arrived*. That moment is proved by a round of
    heartbeats sent after the arrival and answered by a quorum.

    * The number of the round is private to the leader and only grows. etcd let the caller's token name the
      round; a retry with the same token could then be confirmed by a late answer to the first attempt
      (etcd#20418).
    * Before the leader has committed an entry of its own term it does not know what is committed (etcd#7331):
      such reads wait, in bounded number.
    * All reads that arrive between two polls share one round.

    A lease would save the round trip, and be a bet on clocks. Correctness rests on none here.
    """

    __slots__ = ("_capacity", "_confirming", "_waiting", "wanted_round")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: list[int] = []
        """Tokens that arrived before an entry of this term was committed."""
        self._confirming: deque[tuple[int, ReadReady]] = deque()
        """(round that must be confirmed, answer), rounds never falling."""
        self.wanted_round = 0
        """The highest round that some read waits for; 0 when none does."""

    def check_room(self) -> None:
        if len(self._waiting) + len(self._confirming) >= self._capacity:
            raise Busy(f"{self._capacity} reads are pending")

    def wait_for_commit(self, token: int) -> None:
        self._waiting.append(token)

    def confirm_later(self, token: int, index: int, round_: int) -> None:
        self._confirming.append((round_, ReadReady(token, index)))
        self.wanted_round = round_

    def term_is_committed(self, index: int, round_: int) -> None:
        """The leader now knows what is committed: the waiting reads may start."""
        for token in self._waiting:
            self.confirm_later(token, index, round_)
        self._waiting.clear()

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def confirmed(self, round_: int) -> list[ReadReady]:
        ready = []
        while self._confirming and self._confirming[0][0] <= round_:
            ready.append(self._confirming.popleft()[1])
        if not self._confirming:
            self.wanted_round = 0
        return ready

    def fail_all(self) -> list[int]:
        tokens = [read.token for _, read in self._confirming] + self._waiting
        self._confirming.clear()
        self._waiting.clear()
        self.wanted_round = 0
        return tokens
