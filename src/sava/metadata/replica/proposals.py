"""Proposals: what the leader appends, and who waits for which index of the log.

All requests that are queued become one batch of entries: one append per follower, one sync. Callers that come
over the network come one by one, and each alone would cost as much as a batch; so while the leader's disk
works, a few wait for more (``has_batch``):

    disk       sync of a ............ | sync of b c d ........ | …
    queue           b    c    d ----> one batch

A lone caller finds the disk idle. One that has to wait loses little, as the leader answers only what is on
its own disk, and that could not have begun earlier.

The leader stamps the time here and nowhere else: a forwarder's clock would make time run by who
forwarded.

A waiter is kept by (index, term). When the entry applied at that index has another term, this proposal was
overwritten by a later leader and did certainly not take effect *there*; it is tried again under the same
(session, seq). When leadership is lost, what was appended is neither done nor undone:

    leader A appends x · A is cut off, B leads · A says "failed" · B, which had received x, commits it

so the callers of this node are asked for again at the new leader (the session makes the second copy
harmless) while the waiter stays, and peers are told that it is unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sava.metadata.commands import Command, Proposal, Result, encode
from sava.metadata.peer import Committed, Failed, Propose, Reply
from sava.metadata.replica.own_session import OwnSession
from sava.metadata.replica.requests import FOREVER, Desk, Pending, living
from sava.raft.core import RaftCore
from sava.raft.errors import Busy, NotLeader, Transferring

MAX_BATCH_BYTES = 4 << 20
"""Bytes per call of ``core.propose``: a batch that exceeds the core's limit as a whole would be refused for
ever."""

BATCH_ENTRIES = 16
"""So many are worth an append of their own. They do not wait, and the followers' disks work at the same time
as the leader's."""

_INTERNAL = 0
"""The ticket of the leader's own commands. They are not on the desk: nobody waits for them beyond this
leadership."""


class Proposals:
    def __init__(self, desk: Desk, session: OwnSession, wall_ms: Callable[[], int]) -> None:
        self._desk = desk
        self._session = session
        self._wall_ms = wall_ms
        self._queue: deque[Pending] = deque()
        self._waiters: dict[int, tuple[int, Pending]] = {}

    def submit(self, pending: Pending) -> None:
        pending.reason = "the leader's disk has not finished what came before"
        self._queue.append(pending)

    def submit_own(
        self, command: Command, fence_term: int, done: Callable[[Reply], None] | None = None
    ) -> None:
        """A command of the leader itself. It applies only in the term that proposed it, so a deposed leader's
        late look at the clock cannot expire anything."""
        self._queue.append(Pending(_INTERNAL, Propose(command, fence_term=fence_term), done, FOREVER))

    @property
    def has_batch(self) -> bool:
        return len(self._queue) >= BATCH_ENTRIES

    def flush(self, core: RaftCore) -> None:
        """Append all that is queued, as far as the core takes it."""
        queue = self._queue
        while queue:
            batch, payloads = self._next_batch()
            if not batch:
                return  # all who waited have given up meanwhile
            try:
                indexes = core.propose(payloads)
            except (Busy, Transferring) as error:
                for pending in batch:
                    pending.reason = str(error)
                queue.extendleft(reversed(batch))
                return
            except NotLeader as error:
                queue.extendleft(reversed(batch))
                self._give_back(str(error))
                return
            waiters, term = self._waiters, core.term_at(indexes[0])
            for index, pending in zip(indexes, batch, strict=True):
                pending.open_attempts += 1
                pending.reason = "the majority has not confirmed it"
                waiters[index] = (term, pending)

    def _next_batch(self) -> tuple[list[Pending], list[bytes]]:
        queue, stamp, size = self._queue, self._wall_ms(), 0
        session, low = self._session.session, self._session.low
        batch: list[Pending] = []
        payloads: list[bytes] = []
        while queue and size < MAX_BATCH_BYTES:
            pending = queue.popleft()
            if pending.is_done:
                continue
            request = pending.request
            assert isinstance(request, Propose)
            command, fence = request.command, request.fence_term
            if pending.seq:
                own_low = low if pending.session == session else 0
                proposal = Proposal(command, stamp, pending.session, pending.seq, own_low, fence)
            else:
                proposal = Proposal(command, stamp, request.session, request.seq, request.low, fence)
            payload = encode(proposal)
            size += len(payload)
            batch.append(pending)
            payloads.append(payload)
        return batch, payloads

    def applied(self, index: int, term: int, result: Result | None) -> None:
        """The entry at ``index`` was applied; without a command in it there is no result."""
        waiter = self._waiters.pop(index, None)
        if waiter is None:
            return
        appended_term, pending = waiter
        if appended_term != term or result is None:
            self._overwritten(pending)
        elif pending.ticket == _INTERNAL:
            if pending.done is not None:
                pending.done(Committed(index, result))
        else:
            self._session.conclude(pending, index, result)

    def _overwritten(self, pending: Pending) -> None:
        pending.open_attempts -= 1
        self._retry(pending, "another leader's entry took its place in the log")

    def lost_leadership(self, reason: str) -> None:
        """The queue had no effect. Waiters of local callers stay: the entry may still be committed, and is
        then seen here."""
        self._give_back(reason)
        for index, (_, pending) in list(self._waiters.items()):
            if pending.ticket == _INTERNAL or not pending.is_local:
                del self._waiters[index]
            self._retry(pending, reason)

    def replaced(self) -> None:
        """A snapshot replaced the log: what became of the waiters' entries can no longer be seen here."""
        waiters, self._waiters = self._waiters, {}
        for _, pending in waiters.values():
            self._retry(pending, "its place in the log is now inside a snapshot")

    def sweep(self) -> None:
        self._queue = deque(living(self._queue))

    def _give_back(self, reason: str) -> None:
        queue, self._queue = self._queue, deque()
        for pending in queue:
            self._retry(pending, reason)

    def _retry(self, pending: Pending, reason: str) -> None:
        if pending.ticket != _INTERNAL:
            self._desk.retry(pending, reason)
        elif pending.done is not None:
            pending.done(Failed("not_leader", reason, 0, pending.open_attempts > 0))
