"""Replica: one node of the replicated store, without an event loop.

It joins the consensus core, the durable log, the snapshot files, the state machine, the lessor and the watch
hub, and is itself free of threads, sockets and clocks: its edges are injected, its inputs are method calls,
its answers are callbacks. The asyncio node and the simulator drive the very same object.

Inputs only queue; ``pump`` does the work, in turns:

    completions of the disk -> requests to the core or to the leader -> outputs of the core
    -> send and write -> apply -> answer

What arrived between two pumps is one batch: one ``propose``, one read round, one ``send``, one submission to
the log. Sending and writing are begun before applying, so the network and the disk work while the state
machine does.

Where things are:

    replica     this object; which messages may come in (``EnvelopeGuard``), what leaves (``SendQueue``)
    requests    who waits and what may be said of it, the replica's own session, requests sent to the leader
    router      requests on their way to the leader and back, and those of operators
    proposals   what a leader serves: proposals, read rounds, leases
    persister   what is durable, and what may be promised then; the state machine at the end of the log;
                snapshots, and what may be forgotten
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import google_crc32c

from sava.errors import HostError
from sava.metadata.durable import bootstrap_record, origin
from sava.metadata.errors import IdentityConflict, Unavailable
from sava.metadata.machine.state_machine import StateMachine
from sava.metadata.peer import (
    Ask,
    Bootstrap,
    Conflict,
    Doubt,
    Envelope,
    LeaderAnswer,
    LeaderRequest,
    Opinion,
    PeerMessage,
    Ping,
)
from sava.metadata.replica.config import OnSaved, Process, ReplicaConfig, ReplicaDisk, ReplicaStatus
from sava.metadata.replica.persister import (
    Applier,
    Callback,
    Compaction,
    OnApplied,
    Persisted,
    Persister,
    Task,
)
from sava.metadata.replica.requests import OnReply, PendingRequests
from sava.metadata.replica.router import Router
from sava.metadata.watch import WatchHub
from sava.raft.core import RaftCore
from sava.raft.messages import Append, SnapshotChunk
from sava.raft.output import ChunkSend, Output, Recovered
from sava.raft.types import InvariantError, NodeId
from sava.wal.errors import DiskFailed, FileMissing
from sava.wal.log import Log

__all__ = ["OnReply", "Process", "Replica", "ReplicaConfig", "ReplicaDisk", "ReplicaStatus"]

_TICKET_BITS = 40
"""Tickets per incarnation of a node: far more than one can use."""
_MAX_ROUNDS = 3
"""Rounds of work and answers per pump. Internal answers lead to more work at once; a caller that asks again
from within its answer must not keep the event loop without limit."""
_UNBOUND = "this node waits for 'sava cluster init', or to be added to a cluster"


class Replica:
    """Owned by one thread. After any input, and after the writer or the saver delivered a completion, the
    driver calls ``pump`` (once for many inputs is best: it batches)."""

    core: RaftCore | None
    """None while the node waits for initialization."""

    def __init__(
        self,
        process: Process,
        config: ReplicaConfig,
        disk: ReplicaDisk,
        *,
        send: Callable[[Sequence[Envelope]], None],
        fail: Callable[[BaseException], None],
        rng: Random,
        wall_ms: Callable[[], int],
    ) -> None:
        """``send`` hands envelopes to the network (bounded, may drop). ``fail`` receives an error after which
        this node must stop. ``wall_ms`` stamps proposals."""
        self._process, self._node = process, process.node
        self._config = config
        self._snapshots = disk.snapshots
        self._send_out, self._report_failure = send, fail
        self._rng = rng
        self._failure: BaseException | None = None
        self.now_ms = 0
        """The driver's clock at the last tick or pump."""
        self.outbox = SendQueue()
        """Messages of the driver's go in here as well; they leave with the next pump."""
        self.wants_pump = False
        """After a pump: something waits for the next one, in case nothing else calls for it."""
        self._conflicts: dict[NodeId, Conflict] = {}
        self._later: list[Callback] = []
        self._guard = EnvelopeGuard(self._node)
        self.requests = PendingRequests(process.incarnation << _TICKET_BITS, config.max_pending)
        self._applier = Applier(self._node, config.limits, disk.snapshots)
        self._persister = Persister(disk, self._applier.restore)
        self._router = Router(
            self._node,
            self.requests,
            config,
            self._applier,
            self._persister,
            session_name=f"{process.node:x}-{process.incarnation:x}-{process.nonce:x}",
            wall_ms=wall_ms,
        )
        self._compaction = Compaction(config, disk, self._persister)
        self.core = None
        self._bootstrap: Bootstrap | None = None
        self._binding: tuple[Bootstrap, list[Callable[[BaseException | None], None]]] | None = None
        recovered = disk.recovered
        if recovered.bootstrap is not None and recovered.core is not None:
            self._start(recovered.bootstrap, recovered.core)

    def _start(self, bootstrap: Bootstrap, recovered: Recovered) -> None:
        self._bootstrap = bootstrap
        self._applier.begin(recovered.snapshot)
        self.core = RaftCore(self._node, self._config.core, recovered, self._rng.randrange)
        if self.core.membership.all_voters == (self._node,):
            self.core.campaign()  # there is no other to wait for

    # -- what others look at -----------------------------------------------------------------------------

    @property
    def machine(self) -> StateMachine:
        """Replaced as a whole when a snapshot is installed: look it up again for each use."""
        return self._applier.machine

    @property
    def hub(self) -> WatchHub:
        return self._applier.hub

    @property
    def is_leader(self) -> bool:
        """Leads, and has applied an entry of its own term: everything that earlier leaders committed is
        visible here."""
        return self._router.is_ready_to_lead

    @property
    def term(self) -> int:
        return self.core.term if self.core is not None else 0

    def address_of(self, node: NodeId) -> str | None:
        """Where to send what is addressed to ``node``: by the newest membership, or as it said itself."""
        return self.member_address(node) or self._guard.address_of(node)

    def member_address(self, node: NodeId) -> str | None:
        """By the newest membership, or by that of the founders."""
        known = self.core.membership.address(node) if self.core is not None else None
        if known is None and self._bootstrap is not None:
            known = self._bootstrap.membership.address(node)
        return known

    def status(self) -> ReplicaStatus:
        core = self.core.status() if self.core is not None else None
        machine = self.machine
        return ReplicaStatus(
            node=self._node,
            cluster=self._bootstrap.cluster if self._bootstrap is not None else "",
            core=core,
            revision=machine.revision,
            keys=machine.key_count,
            total_bytes=machine.total_bytes,
            limit_bytes=machine.limit_bytes,
            snapshot_index=core.snapshot_index if core is not None else 0,
            removed=self._applier.is_removed,
            dropped=dict(self._guard.dropped),
        )

    def trace(self, on_applied: OnApplied) -> None:
        """Report each command that is applied from now on (the simulator's history)."""
        self._applier.on_applied = on_applied

    # -- inputs ------------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """``tick_ms`` of the monotonic clock have passed (lease deadlines, request deadlines and the core's
        tick)."""
        self.now_ms = max(self.now_ms, now_ms)
        if self._failure is not None:
            return
        self._persister.retry()
        self._compaction.tick()
        if self.core is not None:
            try:
                self.core.tick()
                self._router.tick(self.now_ms)
            except (HostError, InvariantError) as error:
                self._fail(error)
        self.requests.expire(self.now_ms, "" if self.core is not None else _UNBOUND)
        self._router.sweep()

    def receive(self, envelope: Envelope) -> bool:
        """Whether the message was let in: it is from a member's process that still counts."""
        refusal = self._guard.refusal(envelope, self._bootstrap.cluster if self._bootstrap else "")
        if refusal is not None:
            self._guard.dropped[refusal] += 1
            if refusal in CONTESTED:
                self._conflicts[envelope.src] = Conflict(envelope.src, envelope.nonce)
            return False
        if self.core is None or self._failure is not None:
            return False
        try:
            self._dispatch(self.core, envelope)
        except (HostError, InvariantError) as error:
            self._fail(error)
        return True

    def _dispatch(self, core: RaftCore, envelope: Envelope) -> None:
        match envelope.message:
            case Ask() as ask:
                if self._guard.is_repeated(envelope.src, ask.ticket):
                    self._guard.dropped["repeated"] += 1
                else:
                    self._router.asked(core, envelope.src, ask, self.now_ms)
            case LeaderAnswer() as answer:
                self._router.answered(answer)
            case Conflict() as conflict:
                self._contested(conflict)
            case SnapshotChunk(data=data, crc=crc) if google_crc32c.value(data) != crc:
                self._guard.dropped["checksum"] += 1
            case Ping() | Doubt() | Opinion():
                pass  # for the driver, which knows the time at which it came
            case message:
                core.step(message)

    def _contested(self, conflict: Conflict) -> None:
        if (conflict.node, conflict.nonce) == (self._node, self._process.nonce):
            self._fail(
                IdentityConflict(
                    f"another process speaks as node {self._node}: two processes run on copies of one data "
                    "directory, and the others listen to the one that was started later. Stop both, keep one "
                    "directory, remove the copy"
                )
            )

    def ask(self, request: LeaderRequest, done: OnReply, *, deadline_ms: int) -> int:
        """Make a request, here or at the leader; ``done`` is called exactly once, at the latest when the
        monotonic clock passes ``deadline_ms``. A ``Propose`` without a session gets this replica's own and
        is retried under the same (session, seq) until the deadline; ``Committed`` and ``ReadAt`` arrive
        only once this replica has applied their index, so that a local read right after them sees the
        effect. Returns a ticket for ``cancel``."""
        if self._failure is None:
            return self._router.ask(request, done, deadline_ms, self.now_ms).ticket
        pending = self.requests.open(request, done, deadline_ms)
        self.requests.refuse(pending, Unavailable(f"this node has stopped: {self._failure}"))
        return pending.ticket

    def cancel(self, ticket: int) -> None:
        """Forget a request or a ``when_…``; its ``done`` is not called."""
        self.requests.cancel(ticket)
        self._applier.by_index.cancel(ticket)
        self._applier.by_revision.cancel(ticket)

    def take_snapshot(self, done: OnSaved) -> None:
        if self.core is None:
            self._later.append(partial(done, Unavailable(_UNBOUND)))
        else:
            self._compaction.asked.append(done)

    def peer_unreachable(self, peer: NodeId) -> None:
        if self.core is not None:
            self.core.peer_unreachable(peer)

    def leader_unreachable(self, leader: NodeId) -> None:
        """The process of ``leader`` is gone, as far as this node can tell."""
        if self.core is not None:
            self.core.leader_unreachable(leader)

    def when_revision(self, revision: int, done: Callback) -> int:
        """Returns a ticket for ``cancel``. Raises Unavailable when too many wait: callers that wait for a
        revision which never comes must not be able to fill the memory."""
        waiting = self._applier.by_revision
        if len(waiting.callbacks) >= 2 * self._config.max_pending:
            raise Unavailable(f"{len(waiting.callbacks)} callers wait on this node already")
        ticket = self.requests.new_ticket()
        waiting.add(revision, ticket, done)
        return ticket

    # -- initialization ----------------------------------------------------------------------------------

    def bootstrap(self, bootstrap: Bootstrap, done: Callable[[BaseException | None], None]) -> None:
        """Bind a pristine node to a cluster, durably. The same again: done(None). Another one:
        done(IdentityConflict)."""
        error = self._contradiction(bootstrap)
        if error is not None or self._bootstrap is not None:
            self._later.append(partial(done, error))
        elif self._binding is not None:
            self._binding[1].append(done)
        else:
            self._binding = bootstrap, [done]
            self._persister.queue.append(Task(partial(_write_bootstrap, bootstrap), self._bound))

    def check_bootstrap(self, bootstrap: Bootstrap) -> None:
        """Raises IdentityConflict if ``bootstrap`` would be refused."""
        error = self._contradiction(bootstrap)
        if error is not None:
            raise error

    def _contradiction(self, bootstrap: Bootstrap) -> IdentityConflict | None:
        bound = self._binding[0] if self._binding is not None else self._bootstrap
        return _contradiction(self._node, bound, bootstrap)

    def _bound(self, error: BaseException | None) -> None:
        assert self._binding is not None
        bootstrap, callbacks = self._binding
        self._binding = None
        self._later += [partial(done, error) for done in callbacks]
        if error is None:
            self._start(bootstrap, origin(bootstrap))
        elif isinstance(error, HostError):
            raise error

    # -- work --------------------------------------------------------------------------------------------

    def pump(self, now_ms: int) -> None:
        """Carry out all that the inputs made possible: propose in one batch, send, write, apply, answer."""
        self.now_ms = max(self.now_ms, now_ms)
        requests, outbox = self.requests, self.outbox
        for _ in range(_MAX_ROUNDS):
            if self._failure is None:
                try:
                    while self._turn():
                        pass
                except (HostError, InvariantError) as error:
                    self._fail(error)
            if requests.answers or self._later:
                self._answer_all()
            if self._failure is not None or not (requests.waiting and self._router.has_work):
                break
        if outbox.due or outbox.fresh:
            outbox.end_pump()
        self.wants_pump = bool(outbox.due)
        if outbox.ready or requests.outbox or self._conflicts:
            self._send()

    def _turn(self) -> bool:
        """One round through all parts; says whether another one has something to do. Every message costs a
        turn, so each part is only entered when it has something to do."""
        persister, requests, core = self._persister, self.requests, self.core
        if persister.completion is not None:
            for item in persister.collect():
                self._persisted(item)
            core = self.core
        if core is None:
            persister.submit()
            return persister.completion is not None
        self._router.route(core, self.now_ms)
        while core.has_output():
            self._carry_out(core, core.poll())
        self._router.look_at(core)
        assert self._bootstrap is not None
        compaction, applier = self._compaction, self._applier
        has_moved = compaction.step(core, self._bootstrap, applier)
        if self.outbox.ready or requests.outbox or self._conflicts:
            self._send()
        if persister.queue:
            persister.submit()
        if applier.queue:
            self._apply(core)
            has_moved = True
        if applier.by_index.callbacks or applier.by_revision.callbacks:
            applier.reach()
        return (
            persister.completion is not None
            or (has_moved and core.has_output())
            or compaction.result is not None
            or bool(requests.waiting and self._router.has_work)
        )

    def _carry_out(self, core: RaftCore, output: Output) -> None:
        for message in output.send_now:
            self.outbox.add(message.dst, message)
        for chunk in output.send_chunks:
            self._send_chunk(core, chunk)
        if self._persister.add(output):
            self._release(core, output)
        self._applier.queue += output.apply
        for ready in output.reads_ready:
            self._router.confirmed(ready.token, ready.index, self.now_ms)
        for token in output.reads_failed:
            self._router.reads.failed(token, "the leader changed")

    def _release(self, core: RaftCore, output: Output) -> None:
        """Everything that the output's promises rest on is durable: now they may be made."""
        for message in output.send_after_persist:
            self.outbox.add(message.dst, message)
        core.persisted(output.number)

    def _persisted(self, item: Persisted) -> None:
        core, output, install = self.core, item.output, item.output.install
        assert core is not None
        if install is not None and item.install_error is not None:
            self._guard.dropped["corrupt snapshot"] += 1
            core.install_failed(output.number)
            return
        if install is not None:
            assert item.machine is not None
            self._applier.adopt(install, item.machine)
            self._router.proposals.replaced()
            self._compaction.installed()
        self._release(core, output)

    def _send_chunk(self, core: RaftCore, chunk: ChunkSend) -> None:
        try:
            data = self._snapshots.read(chunk.meta, chunk.offset, chunk.length)
        except (FileMissing, DiskFailed):
            core.snapshot_failed(chunk.peer)  # pruned meanwhile: the next attempt takes the newest
            return
        crc = google_crc32c.value(data)
        message = SnapshotChunk(self._node, chunk.peer, chunk.term, chunk.meta, chunk.offset, data, crc)
        self.outbox.add(chunk.peer, message)

    def _apply(self, core: RaftCore) -> None:
        router = self._router
        entries, size = self._applier.apply(core, router.proposals, router.leases, self.now_ms)
        self._compaction.applied(entries, size)
        router.applied(self.now_ms)

    def _answer_all(self) -> None:
        requests = self.requests
        while requests.answers:
            answers, requests.answers = requests.answers, []
            for done, reply in answers:
                done(reply)
        later, self._later = self._later, []
        for callback in later:
            callback()

    def _send(self) -> None:
        if self._bootstrap is None:
            return
        messages, self.outbox.ready = self.outbox.ready, []
        messages += self.requests.outbox
        self.requests.outbox.clear()
        if self._conflicts:
            messages += self._conflicts.items()
            self._conflicts = {}
        cluster, process = self._bootstrap.cluster, self._process
        src, address = process.node, process.address
        incarnation, nonce = process.incarnation, process.nonce
        self._send_out(
            [Envelope(cluster, src, incarnation, nonce, dst, message, address) for dst, message in messages]
        )

    def _fail(self, error: BaseException) -> None:
        """Nothing may be promised any more: what the disk holds, or who this node is, is no longer known."""
        if self._failure is not None:
            return
        self._failure = error
        self.outbox.clear()
        self.requests.end_all(Unavailable(f"this node stops: {error}"))
        self._report_failure(error)


def _contradiction(node: NodeId, bound: Bootstrap | None, bootstrap: Bootstrap) -> IdentityConflict | None:
    founders = bootstrap.membership.voters
    if bound is None:
        if founders and node not in founders:
            return IdentityConflict(f"node {node} is not among the founders of cluster {bootstrap.cluster}")
        return None
    # Addresses may be written differently by two people; who founded which cluster may not.
    if (bound.cluster, bound.membership.voters) == (bootstrap.cluster, founders):
        return None
    return IdentityConflict(
        f"node {node} belongs to cluster {bound.cluster} with founders {bound.membership.voters}, not to "
        f"{bootstrap.cluster} with {founders}; a node joins one cluster and never another"
    )


def _write_bootstrap(bootstrap: Bootstrap, log: Log) -> None:
    log.append(*bootstrap_record(bootstrap))
    log.sync()


# -- which messages may come in ------------------------------------------------------------------------------


CONTESTED = frozenset({"earlier incarnation", "conflict"})
"""Refusals that the sender should hear about."""
MAX_PEERS = 1024
WINDOW = 8192
"""Tickets of one peer that are remembered; older ones than that are refused unseen."""


class _Peer:
    __slots__ = ("address", "floor", "highest", "incarnation", "nonce", "seen")

    def __init__(self, incarnation: int, nonce: int) -> None:
        self.incarnation = incarnation
        self.nonce = nonce
        self.address = ""
        self.seen: set[int] = set()
        self.floor = 0
        self.highest = 0


class EnvelopeGuard:
    """Which messages may reach this node at all.

    A message is meant for this node only when it names its cluster and its id, and speaks for a sender that
    still exists:

    * a lower incarnation than one already heard is an earlier process of the peer: what it promised may have
      been lost with it;
    * the same incarnation with another nonce is a second process on a copy of the peer's directory. Two
      voters with one vote can elect two leaders.

    In both cases the sender receives ``Conflict`` (which names the nonce that is not listened to). A late
    message of a process that is gone leads to a complaint that no process recognises. But a process that
    still runs, while a copy of its directory was started later, learns that it is not heard, and stops with a
    message to its operator instead of running on as a member that no other hears (tests/sim seed 68).

    A request is let through once: a copy that the network delivers again, after this node has refused the
    first one and became leader since, would be carried out although its sender has heard that it was not.
    """

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._peers: dict[NodeId, _Peer] = {}
        self.dropped: Counter[str] = Counter()

    def address_of(self, node: NodeId) -> str | None:
        """Where the peer said it listens."""
        peer = self._peers.get(node)
        return peer.address or None if peer is not None else None

    def refusal(self, envelope: Envelope, cluster: str) -> str | None:
        """Why the message must be dropped; None lets it through."""
        if not cluster:
            return "uninitialized"
        if envelope.cluster != cluster:
            return "cluster"
        if envelope.dst != self._node:
            return "addressee"
        if envelope.src == self._node:
            return "self"
        if getattr(envelope.message, "src", envelope.src) != envelope.src:
            return "forged"
        peer = self._peers.get(envelope.src)
        if peer is None or envelope.incarnation > peer.incarnation:
            if peer is None and len(self._peers) >= MAX_PEERS:
                return "too many peers"
            peer = self._peers[envelope.src] = _Peer(envelope.incarnation, envelope.nonce)
        elif envelope.incarnation < peer.incarnation:
            return "earlier incarnation"
        elif envelope.nonce != peer.nonce:
            return "conflict"
        if envelope.address:
            peer.address = envelope.address
        return None

    def is_repeated(self, src: NodeId, ticket: int) -> bool:
        peer = self._peers[src]
        if ticket <= peer.floor or ticket in peer.seen:
            return True
        peer.seen.add(ticket)
        peer.highest = max(peer.highest, ticket)
        if len(peer.seen) > 2 * WINDOW:
            peer.floor = peer.highest - WINDOW
            peer.seen = {seen for seen in peer.seen if seen > peer.floor}
        return False


# -- what leaves with the next send --------------------------------------------------------------------------


class SendQueue:
    """What leaves with the next send, and what may wait a moment for company.

    After each commit the leader owes its followers the news. Sent at once and alone, that is a second message
    and a second answer per follower for every write that comes alone, half of all traffic, and a caller that
    writes again as soon as it was answered finds the loops of all nodes busy with it. The next append says
    the same:

        answer the caller -> hold the news -> the caller writes again -> one append: entry and news

    So an append without entries is held until the pump after the one that made it, and an append with entries
    to the same peer takes its place. When nothing follows, it leaves one pass of the loop later. Nothing
    depends on when it arrives: losing or delaying it is what a network may do at any time.
    """

    __slots__ = ("due", "fresh", "ready")

    def __init__(self) -> None:
        self.ready: list[tuple[NodeId, PeerMessage]] = []
        self.fresh: dict[NodeId, Append] = {}
        """News of this pump."""
        self.due: dict[NodeId, Append] = {}
        """News of the pump before; it leaves with this one."""

    def add(self, dst: NodeId, message: PeerMessage) -> None:
        if type(message) is Append:
            if not message.entries:
                (self.due if dst in self.due else self.fresh)[dst] = message
                return
            self.due.pop(dst, None)
            self.fresh.pop(dst, None)
        self.ready.append((dst, message))

    def end_pump(self) -> None:
        self.ready += self.due.items()
        self.due, self.fresh = self.fresh, {}

    def clear(self) -> None:
        self.ready, self.due, self.fresh = [], {}, {}
