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
harmless) while the waiter stays, and peers receive "unknown".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sava.metadata.commands import (
    Command,
    CommandRefused,
    LeaseResult,
    LeaseTouch,
    Proposal,
    Result,
    SessionExpire,
    encode,
)
from sava.metadata.errors import LeaseNotFound
from sava.metadata.lessor import Lessor
from sava.metadata.machine.state_machine import StateMachine
from sava.metadata.peer import Alive, Committed, Failed, KeepAlive, Propose, ReadIndex, Reply
from sava.metadata.replica.requests import FOREVER, OwnSession, PendingRequests, Request, living
from sava.raft.core import RaftCore
from sava.raft.types import Busy, NotLeader, Transferring

MAX_BATCH_BYTES = 4 << 20
"""Bytes per call of ``core.propose``: a batch that exceeds the core's limit as a whole would be refused
each time."""

BATCH_ENTRIES = 16
"""How many entries are worth an append of their own. They do not wait, and the followers' disks work at the
same time as the leader's."""

_INTERNAL = 0
"""The ticket of the leader's own commands. They are not among the pending requests: nothing waits for
them beyond this leadership."""


class Proposals:
    def __init__(self, requests: PendingRequests, session: OwnSession, wall_ms: Callable[[], int]) -> None:
        self._requests = requests
        self._session = session
        self._wall_ms = wall_ms
        self._queue: deque[Request] = deque()
        self._waiters: dict[int, tuple[int, Request]] = {}

    def submit(self, pending: Request) -> None:
        pending.explain("the leader's disk has not finished what came before")
        self._queue.append(pending)

    def submit_own(
        self, command: Command, fence_term: int, done: Callable[[Reply], None] | None = None
    ) -> None:
        """A command of the leader itself. It applies only in the term that proposed it, so a deposed leader's
        late look at the clock cannot expire anything."""
        self._queue.append(Request(_INTERNAL, Propose(command, fence_term=fence_term), done, FOREVER))

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
                    pending.explain(str(error))
                queue.extendleft(reversed(batch))
                return
            except NotLeader as error:
                queue.extendleft(reversed(batch))
                self._give_back(str(error))
                return
            waiters, term = self._waiters, core.term_at(indexes[0])
            for index, pending in zip(indexes, batch, strict=True):
                pending.appended("the majority has not confirmed it")
                waiters[index] = (term, pending)

    def _next_batch(self) -> tuple[list[Request], list[bytes]]:
        queue, stamp, size = self._queue, self._wall_ms(), 0
        session, low = self._session.session, self._session.low
        batch: list[Request] = []
        payloads: list[bytes] = []
        while queue and size < MAX_BATCH_BYTES:
            pending = queue.popleft()
            if pending.is_done:
                continue
            request = pending.body
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

    def _overwritten(self, pending: Request) -> None:
        pending.overwritten()
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

    def _retry(self, pending: Request, reason: str) -> None:
        if pending.ticket != _INTERNAL:
            self._requests.retry(pending, reason)
        elif pending.done is not None:
            pending.done(Failed("not_leader", reason, 0, pending.may_have_effect))


# -- reads ---------------------------------------------------------------------------------------------------


Pulse = Callable[[], None]
"""The leader's own question whether it still leads."""


class ReadRounds:
    """Linearizable read points, many for one round to the majority.

    A read may use a round only if the round began after the read was asked for, or it could miss a write
    acknowledged in between. So all that arrived before a pump share the round that this pump begins: locally
    asked reads become one request (the *carrier*), which goes to the leader like any other, and at the leader
    the carriers of all nodes, and the keep-alives, share one token.
    """

    def __init__(self, requests: PendingRequests) -> None:
        self._requests = requests
        self._arrived: list[Request] = []
        self._next: list[Request | Pulse] = []
        self._rounds: dict[int, list[Request | Pulse]] = {}
        self._token = 0

    # -- any node ----------------------------------------------------------------------------------------

    def add(self, pending: Request) -> None:
        self._arrived.append(pending)

    def sweep(self) -> None:
        self._arrived = living(self._arrived)

    def gather(self) -> None:
        """Make one request of all reads that arrived, and let it find the leader."""
        if not self._arrived:
            return
        members = living(self._arrived)
        self._arrived.clear()
        if not members:
            return
        deadline = max(pending.deadline_ms for pending in members)
        carrier = self._requests.open(ReadIndex(), lambda reply: self._arrive(members, reply), deadline)
        self._requests.wait(carrier)

    def _arrive(self, members: list[Request], reply: Reply) -> None:
        for pending in members:
            if isinstance(reply, Failed):
                pending.explain(reply.message)
            self._requests.answer(pending, reply)

    # -- the leader --------------------------------------------------------------------------------------

    def confirm(self, asker: Request | Pulse) -> None:
        """Tell ``asker`` the read index of a round that has not begun yet."""
        self._next.append(asker)

    def flush(self, core: RaftCore) -> None:
        if not self._next:
            return
        self._token += 1
        try:
            core.request_read(self._token)
        except Busy:
            return
        except NotLeader as error:
            self.lost_leadership(str(error))
            return
        self._rounds[self._token] = self._next
        self._next = []

    def ready(self, token: int) -> list[Request | Pulse]:
        """Who may read at the index that came with ``token``."""
        return self._rounds.pop(token, [])

    def failed(self, token: int, reason: str) -> None:
        self._give_back(self._rounds.pop(token, []), reason)

    def lost_leadership(self, reason: str) -> None:
        """Reads have no effect, so all may ask elsewhere. (Rounds under way are failed by the core.)"""
        askers, self._next = self._next, []
        self._give_back(askers, reason)

    def _give_back(self, askers: list[Request | Pulse], reason: str) -> None:
        for asker in askers:
            if isinstance(asker, Request):
                self._requests.retry(asker, reason)


# -- leases and sessions -------------------------------------------------------------------------------------


PULSE_TICKS = 3
"""Ticks without a confirmed pulse after which the majority counts as out of reach: less than any TTL, more
than a hiccup."""


class LeaseKeeper:
    """What the leader does for leases and sessions besides applying their commands.

    A keep-alive is answered from the leader's memory, but only by a leader that is one: a deposed leader
    would still say "alive" about leases that its successor is about to end, or "not found" about leases
    that it never heard of. So both answers wait for a round to the majority that began after the question,
    and for this node to have applied what was committed by then. The deadline itself is moved when the
    question arrives: a lease may end late, never early.

    While the leader cannot reach its majority, holders cannot reach the leader either, as far as the
    leader can tell: every TTL starts again (``Lessor.quorum_lost``). Its pulse finds out: one confirmation
    round per tick while there are leases.
    """

    def __init__(
        self,
        requests: PendingRequests,
        reads: ReadRounds,
        proposals: Proposals,
        *,
        session_idle_ms: int,
        grace_ms: int,
    ) -> None:
        self._requests = requests
        self._reads = reads
        self._proposals = proposals
        self._session_idle_ms = session_idle_ms
        self._grace_ms = grace_ms
        self._term = 0
        self._early: list[Request] = []
        """Keep-alives that came before this leader had applied its own first entry."""
        self._pulse_age = 0
        self._pulse_out = False
        self._next_session_scan_ms = 0
        self.lessor: Lessor | None = None

    @property
    def is_leading(self) -> bool:
        return self.lessor is not None and self.lessor.is_leading

    def observe(self, command: Command, result: Result, now_ms: int) -> None:
        """A command was applied while this node leads."""
        if self.lessor is not None:
            self.lessor.observe(command, result, now_ms)

    # -- leadership --------------------------------------------------------------------------------------

    def become_leader(self, term: int, machine: StateMachine, now_ms: int) -> None:
        """Everything that earlier leaders committed is applied: all leases are known, and get their full TTL
        again."""
        self._term = term
        self.lessor = Lessor(machine, grace_ms=self._grace_ms)
        self.lessor.become_leader(now_ms)
        self._pulse_age, self._pulse_out = 0, False
        self._next_session_scan_ms = now_ms + self._session_idle_ms // 4
        early, self._early = self._early, []
        for pending in early:
            self.serve(pending, now_ms)

    def step_down(self, reason: str) -> None:
        if self.lessor is not None:
            self.lessor.step_down()
        early, self._early = self._early, []
        for pending in early:
            self._requests.retry(pending, reason)

    # -- keep-alives -------------------------------------------------------------------------------------

    def serve(self, pending: Request, now_ms: int) -> None:
        if not self.is_leading:
            self._early.append(pending)
            return
        self._renew(pending, now_ms)
        self._reads.confirm(pending)

    def confirmed(self, pending: Request, now_ms: int) -> None:
        """This node led after the question was asked, and has applied everything committed before it."""
        if pending.is_done:
            return
        if not self.is_leading:
            self._requests.retry(pending, "the leader changed")
            return
        ttl = self._renew(pending, now_ms)
        if isinstance(ttl, LeaseNotFound):
            self._requests.refuse(pending, ttl)
        elif ttl is not None:
            self._requests.answer(pending, Alive(ttl))
        else:
            self._touch(pending)

    def _renew(self, pending: Request, now_ms: int) -> int | LeaseNotFound | None:
        assert isinstance(pending.body, KeepAlive)
        assert self.lessor is not None
        try:
            return self.lessor.keep_alive(pending.body.lease, now_ms)
        except LeaseNotFound as error:
            return error

    def _touch(self, pending: Request) -> None:
        """An expiry of this lease is in the log already. Which of the two counts, the log decides."""
        assert isinstance(pending.body, KeepAlive)
        lease = pending.body.lease

        def done(reply: Reply) -> None:
            match reply:
                case Committed(result=LeaseResult(ttl_ms=ttl_ms)):
                    self._requests.answer(pending, Alive(ttl_ms))
                case Committed(result=CommandRefused(code, message, detail)):
                    self._requests.answer(pending, Failed(code, message, detail))
                case _:
                    self._requests.retry(pending, "the leader changed")

        self._proposals.submit_own(LeaseTouch(lease), self._term, done)

    # -- time --------------------------------------------------------------------------------------------

    def tick(self, machine: StateMachine, now_ms: int) -> None:
        lessor = self.lessor
        if lessor is None or not lessor.is_leading:
            return
        if lessor.next_deadline_ms is not None:
            self._check_pulse(lessor, now_ms)
        for expiry in lessor.due(now_ms):
            self._proposals.submit_own(expiry, self._term, self._survival(expiry.lease, now_ms))
        if now_ms >= self._next_session_scan_ms:
            self._next_session_scan_ms = now_ms + self._session_idle_ms // 4
            before_ms = machine.clock_ms - self._session_idle_ms
            if before_ms > 0:
                self._proposals.submit_own(SessionExpire(before_ms), self._term)

    def _survival(self, lease: int, now_ms: int) -> Callable[[Reply], None]:
        """An expiry that was refused (or not appended) leaves the lease alive. ``Lessor.observe``
        hears of those that applied."""

        def done(reply: Reply) -> None:
            refused = isinstance(reply, Committed) and isinstance(reply.result, CommandRefused)
            if (refused or isinstance(reply, Failed)) and self.lessor is not None:
                self.lessor.survived(lease, now_ms)

        return done

    def _check_pulse(self, lessor: Lessor, now_ms: int) -> None:
        self._pulse_age += 1
        if self._pulse_age > PULSE_TICKS:
            lessor.quorum_lost(now_ms)
        if not self._pulse_out:
            self._pulse_out = True
            self._reads.confirm(self._beat)

    def _beat(self) -> None:
        self._pulse_age, self._pulse_out = 0, False
