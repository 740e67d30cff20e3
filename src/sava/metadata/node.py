"""RaftNode: one replica, driven by an event loop.

The replica is a plain object; this file gives it time, threads and a network. One loop owns it, and
everything that reaches it (messages, requests, completions of the log's writer thread, ticks) is a callback
on that loop, so no lock exists.

Batching comes by itself: an input only *schedules* one ``pump`` for the end of the current pass of the
loop. Whatever else arrives in that pass is proposed in the same log batch, synced by the same fdatasync and
sent in the same message; an input that comes alone is pumped at once.

Ticks are the node's only notion of time, and a process may be stopped for seconds (garbage, a swapped page,
SIGSTOP). When it wakes up, its timer is overdue and the heartbeats that the leader sent meanwhile are still
in the sockets: ticking first would start a needless election. So an overdue timer waits a moment for the
inbox to drain, delivers one tick, and forgets the rest.

``fail`` is the one way out for errors that forbid going on (a failed sync, corruption, a copied directory,
an unknown command): the node stops moving at once, ``failed`` resolves, and the process is expected to end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from typing import TypeVar

import sava
from sava.errors import SavaError
from sava.metadata.bootstrap import check_voters
from sava.metadata.errors import NotInitialized, OutcomeUnknown, Unavailable, Unfinished
from sava.metadata.identity import NodeState, open_state
from sava.metadata.peer import (
    Bootstrap,
    Conflict,
    Doubt,
    Envelope,
    Failed,
    LeaderRequest,
    NodeInfo,
    Opinion,
    Propose,
    ReadIndex,
    Reply,
    Transport,
    error_of,
)
from sava.metadata.replica.replica import Process, Replica, ReplicaConfig, ReplicaDisk, ReplicaStatus
from sava.metadata.snapshots import BackgroundSaver
from sava.metadata.suspicion import Note, Sign, Suspicion
from sava.raft.output import Status
from sava.raft.types import NO_NODE, InvariantError, NodeId, SnapshotMeta
from sava.wal.disk import LocalDisk
from sava.wal.log import LogOptions
from sava.wal.writer import Writer

T = TypeVar("T")

log = logging.getLogger(__name__)

DRAIN_S = 0.02
"""Time for the sockets' content to reach the replica before an overdue tick does: several passes of the
loop."""
MAX_VOICES = 1024
_MS = 1_000_000
"""Nanoseconds."""


def _unobserved(*_: float) -> None:
    """Not measured."""


@dataclass(frozen=True, slots=True)
class Observer:
    """Where measurements go; the node itself knows no metrics library."""

    proposal: Callable[[float], object] = _unobserved
    """Seconds from a request to its committed and applied result."""
    sync: Callable[[float, int], object] = _unobserved
    """Seconds to write a group of records and make it durable, and its bytes; called on the log's thread."""
    snapshot: Callable[[float, int], object] = _unobserved
    """Seconds that a snapshot took, and its size."""


UNOBSERVED = Observer()
_DEFAULT_REPLICA = ReplicaConfig()
_DEFAULT_LOG = LogOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What a node needs to know besides its data directory. ``address`` is where its Raft port can be
    reached."""

    address: str
    seeds: tuple[str, ...] = ()
    cluster_name: str = ""
    node: NodeId = NO_NODE
    """The id that the node is to have, by its certificate; 0: it draws one."""
    replica: ReplicaConfig = _DEFAULT_REPLICA
    log: LogOptions = _DEFAULT_LOG


class RaftNode:
    """Implements ``metadata.peer.Inbound``. Owned by the event loop that opened it."""

    def __init__(
        self,
        state: NodeState,
        options: NodeOptions,
        transport: Transport,
        observer: Observer = UNOBSERVED,
    ) -> None:
        """``state`` is what ``identity.open_state`` found; the node owns it from here on and ``close``
        gives it up."""
        self._loop = asyncio.get_running_loop()
        self._state = state
        self._address = options.address
        self._seeds, self._cluster_name = options.seeds, options.cluster_name
        self._is_fixed = options.node != NO_NODE
        self._transport = transport
        self._observer = observer
        self._bootstrap = state.recovered.bootstrap
        self._tick_s = options.replica.tick_ms / 1000
        self._is_draining = False
        self._pump_scheduled = False
        self._is_stopped = False
        self._callers: set[asyncio.Future[Reply]] = set()
        self._spoke_from: dict[int, str] = {}
        """By nonce, that is by process: the address it gave as its own."""
        self.send_errors = 0
        """Messages that the transport raised an error for."""
        self._send_trouble: dict[str, str] = {}
        """By address: the error that was logged last."""
        self._conditions: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self.failed: asyncio.Future[BaseException] = self._loop.create_future()
        """Resolves with the error after which this node must stop."""
        self._writer = Writer(state.log, deliver=self._from_writer, observe=observer.sync)
        self._saver = BackgroundSaver(state.snapshots, observer.snapshot)
        self.replica = Replica(
            Process(state.node, options.address, state.incarnation, nonce=secrets.randbits(63)),
            options.replica,
            ReplicaDisk(state.recovered, self._writer, state.snapshots, self._saver.save),
            send=self._send,
            fail=self.fail,
            rng=Random(secrets.randbits(128)),
            wall_ms=lambda: time.time_ns() // 1_000_000,
        )
        self.barrier = ReadBarrier(self._submit_until)
        self.suspicion = Suspicion(state.node, tick_ms=options.replica.tick_ms)
        """Which of its peers this node takes for alive."""
        self.confirmed: Callable[[Note], None] = lambda _: None
        """Called with each suspicion that other members have confirmed, while this node leads."""
        transport.attach(self)
        self._tick_due = self._loop.time() + self._tick_s
        self._timer = self._loop.call_at(self._tick_due, self._on_timer)
        self._wake()

    # -- what callers use --------------------------------------------------------------------------------

    @property
    def status(self) -> ReplicaStatus:
        return self.replica.status()

    @property
    def core_status(self) -> Status | None:
        """The consensus part of ``status`` alone (cheap), or None while waiting for initialization."""
        core = self.replica.core
        return core.status() if core is not None else None

    @property
    def transport(self) -> Transport:
        return self._transport

    def require_cluster(self) -> str:
        """The id of the cluster. Raises NotInitialized at once: waiting for an operator is not this node's
        business."""
        if self._bootstrap is None:
            raise NotInitialized(
                f"node {self._state.node} belongs to no cluster yet; run `sava cluster init --nodes …`, "
                "or add it to a running cluster with `sava cluster add-node`"
            )
        return self._bootstrap.cluster

    async def ask(self, request: LeaderRequest, *, timeout: float) -> Reply:
        """The reply to ``request``, from wherever the leader is. Raises what the reply says went wrong."""
        self.require_cluster()
        if self._is_stopped:
            raise Unavailable("this node has stopped")
        started = time.perf_counter()
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._callers.add(future)
        ticket = self._submit(request, lambda reply: resolve(future, reply), _now_ms() + int(timeout * 1000))
        try:
            reply = await future
        except asyncio.CancelledError:
            self.replica.cancel(ticket)
            raise
        finally:
            self._callers.discard(future)
        if isinstance(reply, Failed):
            raise error_of(reply)
        if isinstance(request, Propose):
            self._observer.proposal(time.perf_counter() - started)
        return reply

    async def take_snapshot(self, *, timeout: float) -> SnapshotMeta:
        future: asyncio.Future[SnapshotMeta | BaseException] = self._loop.create_future()
        self.replica.take_snapshot(lambda outcome: resolve(future, outcome))
        self._wake()
        try:
            outcome = await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise Unfinished(f"the snapshot was not finished within {timeout:g} s; it continues") from None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def wait_until(self, condition: Callable[[], bool], what: str, *, timeout: float) -> None:
        """Wait until ``condition`` holds; it is looked at after every pump. Raises Unavailable naming
        ``what``."""
        if condition():
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._conditions.append((condition, future))
        try:
            await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise Unavailable(f"{what}: not within {timeout:g} s") from None

    async def close(self) -> None:
        """Answer who still waits, stop moving, finish what the writer holds, give up the directory."""
        if not self._is_stopped:
            self.replica.requests.end_all(Unavailable("this node is shutting down"))
            self._pump()
        self._stop()
        await self._transport.close()
        await self._saver.close()
        await asyncio.to_thread(self._writer.close)
        self._state.release()

    def fail(self, error: BaseException) -> None:
        """Report that this node must stop. One line says why; the process that runs the node ends."""
        if self._is_stopped:
            return
        self._stop()
        log.critical(
            "raft: stopped node=%d error=%s: %s",
            self._state.node,
            type(error).__name__,
            error,
            # Of a bug the news is where it is.
            exc_info=error if isinstance(error, InvariantError) or not isinstance(error, SavaError) else None,
        )
        resolve(self.failed, error)

    # -- Inbound: what the transport calls ---------------------------------------------------------------

    def info(self) -> NodeInfo:
        bootstrap = self._bootstrap
        return NodeInfo(
            self._state.node,
            bootstrap.cluster if bootstrap else "",
            self._address,
            bootstrap.membership.voters if bootstrap else (),
            sava.__version__,
            self._seeds,
            self._cluster_name,
            is_fixed=self._is_fixed,
            has_history=self.replica.term > 0,
        )

    def member_address(self, node: NodeId) -> str | None:
        return self.replica.member_address(node)

    def receive(self, envelopes: Sequence[Envelope]) -> None:
        if self._is_stopped:
            return
        receive, spoke_from = self.replica.receive, self._spoke_from
        suspicion, now = self.suspicion, time.monotonic_ns() // _MS
        try:
            for envelope in envelopes:
                if envelope.nonce not in spoke_from:
                    self._remember_voice(envelope)
                if receive(envelope):
                    suspicion.heard(envelope.src, envelope.incarnation, now)
                    if isinstance(envelope.message, Doubt | Opinion):
                        suspicion.receive(envelope.src, envelope.message, now)
                        self._act_on_suspicion()
        except Exception as error:  # noqa: BLE001 (as in ``_pump``)
            self.fail(error)
        if not self._pump_scheduled:
            self._wake()

    def _remember_voice(self, envelope: Envelope) -> None:
        """One entry per process of a peer; bounded, because strangers may speak as well."""
        if len(self._spoke_from) >= MAX_VOICES:
            self._spoke_from.clear()
        self._spoke_from[envelope.nonce] = envelope.address

    def unreachable(self, peer: NodeId) -> None:
        if not self._is_stopped:
            try:
                self.replica.peer_unreachable(peer)
            except Exception as error:  # noqa: BLE001 (as in ``_pump``)
                self.fail(error)
            self._wake()

    def disconnected(self, peer: NodeId, *, is_refused: bool) -> None:
        self.suspicion.lost(peer, _now_ms(), is_refused=is_refused)

    async def bind(self, bootstrap: Bootstrap, prepare: Callable[[], Awaitable[None]] | None = None) -> None:
        check_voters(self.info(), bootstrap)
        self.replica.check_bootstrap(bootstrap)
        if prepare is not None:
            await prepare()
        future: asyncio.Future[BaseException | None] = self._loop.create_future()
        self.replica.bootstrap(bootstrap, lambda error: resolve(future, error))
        self._wake()
        error = await future
        if error is not None:
            raise error
        if self._bootstrap is None:
            self._bootstrap = bootstrap
            log.info(
                "raft: bound to cluster cluster=%s founders=%d",
                bootstrap.cluster,
                len(bootstrap.membership.voters),
            )

    # -- the loop ----------------------------------------------------------------------------------------

    def _submit(self, request: LeaderRequest, done: Callable[[Reply], None], deadline_ms: int) -> int:
        ticket = self.replica.ask(request, done, deadline_ms=deadline_ms)
        self._wake()
        return ticket

    def _submit_until(self, request: LeaderRequest, done: Callable[[Reply], None], deadline: float) -> None:
        left = deadline - self._loop.time()
        self._submit(request, done, _now_ms() + max(int(left * 1000), 0))

    def _wake(self) -> None:
        if not self._pump_scheduled and not self._is_stopped:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _from_writer(self, completions: Callable[[], None]) -> None:
        """Called on the writer's thread. What just became durable is what all callers wait for: the pump
        follows at once."""
        self._loop.call_soon_threadsafe(self._pump, completions)

    def _pump(self, first: Callable[[], None] | None = None) -> None:
        """Let the replica carry out what its inputs made possible, after the work ``first``."""
        self._pump_scheduled = False
        if self._is_stopped:
            return
        replica = self.replica
        try:
            if first is not None:
                first()
            replica.pump(time.monotonic_ns() // _MS)
            if self._conditions:
                self._settle_conditions()
        except Exception as error:  # noqa: BLE001
            # An error that gets here left the replica in a state that cannot be; whatever it is, continuing
            # could do harm.
            self.fail(error)
        if replica.wants_pump:
            # Behind the callers that were just answered: their next requests take the news along.
            self._wake()

    def _settle_conditions(self) -> None:
        still: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        for condition, future in self._conditions:
            if future.done():
                continue
            if condition():
                future.set_result(None)
            else:
                still.append((condition, future))
        self._conditions = still

    def _on_timer(self) -> None:
        now = self._loop.time()
        is_overdue = now - self._tick_due > self._tick_s
        if is_overdue and not self._is_draining:
            self._is_draining = True
            self._timer = self._loop.call_later(DRAIN_S, self._on_timer)
            return
        self._is_draining = False
        self._pump(self._tick)
        if self._is_stopped:
            return
        self._tick_due = now + self._tick_s if is_overdue else self._tick_due + self._tick_s
        self._timer = self._loop.call_at(self._tick_due, self._on_timer)

    def _tick(self) -> None:
        replica, suspicion, now_ms = self.replica, self.suspicion, _now_ms()
        core = replica.core
        if core is not None:
            suspicion.tick(now_ms, core.membership.members, replica.term if replica.is_leader else 0)
            if suspicion.sign(core.leader, now_ms) is Sign.REFUSED:
                log.info("raft: the leader refuses connections leader=%d term=%d", core.leader, core.term)
                replica.leader_unreachable(core.leader)
            self._act_on_suspicion()
        replica.tick(now_ms)

    def _act_on_suspicion(self) -> None:
        suspicion = self.suspicion
        outbox, suspicion.outbox = suspicion.outbox, []
        for peer, message in outbox:
            self.replica.outbox.add(peer, message)
        notes, suspicion.notes = suspicion.notes, []
        for note in notes:
            _log_suspicion(note)
            if note.kind == "confirmed":
                self.confirmed(note)

    def _send(self, envelopes: Sequence[Envelope]) -> None:
        now = self.replica.now_ms
        by_address: dict[str, list[Envelope]] = {}
        for envelope in envelopes:
            message = envelope.message
            if isinstance(message, Conflict):
                # Meant for one of two processes with the same id: it is where it spoke from, while the
                # membership names where the other one is.
                address: str | None = self._spoke_from.get(message.nonce)
            else:
                address = self.replica.address_of(envelope.dst)
            if address:
                by_address.setdefault(address, []).append(envelope)
                self.suspicion.sent(envelope.dst, now)
        for address, group in by_address.items():
            try:
                self._transport.send(address, group)
            except Exception as error:  # noqa: BLE001
                # Sending is lossy by contract, so losing these is within what Raft expects. Let through, the
                # error of one connection would pass for a broken replica, and end a healthy broker.
                self._not_sent(address, group, error)

    def _not_sent(self, address: str, envelopes: Sequence[Envelope], error: Exception) -> None:
        self.send_errors += len(envelopes)
        if self._send_trouble.get(address) != str(error):
            if len(self._send_trouble) >= MAX_VOICES:
                self._send_trouble.clear()
            self._send_trouble[address] = str(error)
            log.error("raft: not sent peer=%s error=%s", address, error, exc_info=error)
        for peer in {envelope.dst for envelope in envelopes}:
            # Never from inside ``send``: the replica is in the middle of handing out messages.
            self._loop.call_soon(self.unreachable, peer)

    def _stop(self) -> None:
        self._is_stopped = True
        self._timer.cancel()
        # The replica answers all callers when it stops by itself; this is for when it cannot.
        self._loop.call_soon(self._abandon_callers)

    def _abandon_callers(self) -> None:
        for future in self._callers:
            resolve(future, Failed(OutcomeUnknown.code, "this node has stopped", 0, maybe_applied=True))


async def open_node(
    data_dir: Path, options: NodeOptions, transport: Transport, observer: Observer = UNOBSERVED
) -> RaftNode:
    """Open ``data_dir`` (created when missing) and start the node on the running loop. Raises HostError.

    The log is read on another thread: that takes seconds for a long one on a slow disk, and a broker that has
    to stop meanwhile must hear of it. If the start is cancelled, what was opened is closed when the
    thread is done; otherwise the lock of the directory would last as long as the process."""

    def give_up(opening: asyncio.Future[NodeState]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            state = opening.result()
            state.log.close()
            state.release()

    work = partial(
        open_state, LocalDisk(data_dir), rng=SystemRandom(), options=options.log, node=options.node
    )
    opening = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        state = await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(give_up)
        raise
    return RaftNode(state, options, transport, observer)


def _log_suspicion(note: Note) -> None:
    opinions = " ".join(f"{node}:{sign.name.lower()}" for node, sign in note.opinions)
    log.log(
        logging.INFO if note.kind in ("doubted", "refuted") else logging.WARNING,
        "raft: a member is %s node=%d sign=%s silent_ms=%d threshold_ms=%d lease=%d opinions=%s",
        note.kind,
        note.node,
        note.sign.name.lower(),
        note.silent_ms,
        note.threshold_ms,
        note.lease,
        opinions or "-",
    )


def resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _now_ms() -> int:
    return time.monotonic_ns() // _MS


# -- reads ---------------------------------------------------------------------------------------------------


Submit = Callable[[LeaderRequest, Callable[[Reply], None], float], object]
"""Ask the replica; the last argument is the deadline on the loop's clock."""


class ReadBarrier:
    """Many linearizable reads, one round to the majority.

    A read may share a round only if the round began after the read was asked for; otherwise it could miss a
    write acknowledged in between. So at most one round is under way, all who ask meanwhile wait for
    the next, and that one serves them all. Under load a round therefore serves as many reads as arrived
    during the one before it, and a lone read waits for no other.

    Owned by the event loop.
    """

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._waiting: list[tuple[float, asyncio.Future[None]]] = []
        self._under_way = False

    async def wait(self, timeout: float) -> None:
        """Return once this node has applied everything that was acknowledged before the call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append((loop.time() + timeout, future))
        if not self._under_way:
            self._under_way = True
            # One pass later, so that all who ask in this pass are served by the same round.
            loop.call_soon(self._begin)
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            raise Unavailable(
                f"no majority confirmed the read within {timeout:g} s; more than half of the voters that "
                "`sava cluster status` lists must run and reach each other"
            ) from None

    def _begin(self) -> None:
        readers = [(deadline, future) for deadline, future in self._waiting if not future.done()]
        self._waiting = []
        if not readers:
            self._under_way = False
            return
        futures = [future for _, future in readers]
        self._submit(
            ReadIndex(), lambda reply: self._end(futures, reply), max(deadline for deadline, _ in readers)
        )

    def _end(self, futures: list[asyncio.Future[None]], reply: Reply) -> None:
        for future in futures:
            if future.done():
                continue
            if isinstance(reply, Failed):
                future.set_exception(error_of(reply))
            else:
                future.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._begin)
        else:
            self._under_way = False
