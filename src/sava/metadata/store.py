"""MetadataStore: what the rest of Sava sees of the replicated store.

``RaftStore`` replicates; the ``MemoryStore`` of the tests is the same state machine without Raft. Consistency
is said, never implied:

* ``local``: what this node has applied, no waiting. With ``min_revision`` it first waits (bounded) until it
  has applied that.
* ``linearizable``: at least everything acknowledged anywhere before the call.

``ClusterOperations`` is for the cluster itself: forming it, adding and removing nodes, moving leadership.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from sava.errors import SavaError, cut
from sava.metadata.bootstrap import IDENTIFY_TIMEOUT_S, bootstrap, check_address
from sava.metadata.commands import (
    AllocateId,
    AllocateResult,
    BatchResult,
    Command,
    CommandRefused,
    Compare,
    Delete,
    DeletePrefix,
    KeyValue,
    LeaseGrant,
    LeaseResult,
    LeaseRevoke,
    Operation,
    Proposal,
    Put,
    Result,
    Txn,
    TxnBatch,
    TxnResult,
)
from sava.metadata.errors import IdentityConflict, InvalidRequest, OutcomeUnknown, Unavailable, Unfinished
from sava.metadata.machine.limits import DEFAULT_LIMITS, check_batchable, check_key_or_prefix, check_proposal
from sava.metadata.node import RaftNode, resolve
from sava.metadata.peer import (
    Alive,
    Bootstrap,
    ChangeMembership,
    Committed,
    KeepAlive,
    Propose,
    TransferLeadership,
    Transferred,
    error_of,
)
from sava.metadata.replica.replica import Replica
from sava.metadata.watch import Watch
from sava.raft.types import (
    NO_NODE,
    Membership,
    MembershipBusy,
    MembershipChange,
    MembershipRefused,
    NodeId,
    SnapshotMeta,
)
from sava.tasks import spawn

DEFAULT_TIMEOUT_S = 10.0
"""Long enough for an election to pass unnoticed, short enough that no caller hangs."""


@dataclass(frozen=True, slots=True)
class RangeResult:
    """Keys in order, and the revision they were read at: watching from ``revision + 1`` misses nothing."""

    kvs: tuple[KeyValue, ...]
    revision: int
    more: bool = False


class LocalView(Protocol):
    """This node's applied state, synchronously: a dictionary lookup."""

    @property
    def revision(self) -> int: ...

    def get(self, key: str) -> KeyValue | None: ...

    def range(self, prefix: str, *, limit: int = 0, start_after: str = "") -> RangeResult: ...


class MetadataStore(Protocol):
    """The metadata of the cluster. A Protocol, as unit tests and simulators use a store without Raft."""

    @property
    def local(self) -> LocalView: ...

    async def get(
        self,
        key: str,
        *,
        linearizable: bool = True,
        min_revision: int = 0,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> KeyValue | None: ...

    async def range(
        self,
        prefix: str,
        *,
        limit: int = 0,
        start_after: str = "",
        linearizable: bool = True,
        min_revision: int = 0,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> RangeResult: ...

    async def put(
        self, key: str, value: bytes, *, lease: int = 0, timeout: float = DEFAULT_TIMEOUT_S
    ) -> TxnResult: ...

    async def delete(self, key: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> TxnResult: ...

    async def delete_prefix(self, prefix: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> TxnResult: ...

    async def txn(
        self,
        compare: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        fence_term: int = 0,
        batched: bool = False,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> TxnResult:
        """``batched``: it may share a log entry with others that are under way (``batching``), for callers of
        which there may be a thousand at once. Puts and deletes only, no ``otherwise``; what the operations
        return is not in the result."""
        ...

    async def allocate_id(self, key: str, *, count: int = 1, timeout: float = DEFAULT_TIMEOUT_S) -> int: ...

    def watch(self, prefix: str, *, from_revision: int = 0) -> Watch:
        """``prefix`` ends in '/' or is a whole key. ``from_revision`` 0 = from now on."""
        ...

    async def grant_lease(self, ttl_ms: int, *, timeout: float = DEFAULT_TIMEOUT_S) -> int: ...

    async def keep_alive(self, lease: int, *, timeout: float = DEFAULT_TIMEOUT_S) -> int:
        """Returns the TTL in ms. Raises LeaseNotFound: the holder must stop acting on what the lease
        protected."""
        ...

    async def revoke_lease(
        self, lease: int, *, fence_term: int = 0, timeout: float = DEFAULT_TIMEOUT_S
    ) -> None: ...


# -- many transactions, one entry ----------------------------------------------------------------------------


ENTRIES: Final = 4
"""On their way at a time. More of them hold fewer transactions each; with one, the disks of the cluster would
wait while its answer is on the way back."""
TXNS: Final = 256
"""In one entry."""
OPERATIONS: Final = DEFAULT_LIMITS.max_batch_operations
BYTES: Final = 1 << 20
"""Of values in one entry: enough to share, and little to wait behind."""

ProposeCommand = Callable[[Command, float, int], Awaitable[Result]]
"""Command, timeout, fence term."""


@dataclass(eq=False, slots=True)
class _Waiting:
    txn: Txn
    fence_term: int
    deadline: float
    answer: asyncio.Future[TxnResult] = field(default_factory=asyncio.Future)
    is_sent: bool = False

    @property
    def operations(self) -> int:
        return len(self.txn.compare) + len(self.txn.then)

    @property
    def bytes(self) -> int:
        return sum(len(getattr(operation, "value", b"")) for operation in self.txn.then)


class Batches:
    """Transactions of one node that are under way at the same time share log entries.

    A broker that takes up a thousand topics writes for each of them, on the conditions of each. As a thousand
    entries these would be encoded, forwarded, remembered and applied one by one. Here they wait for each
    other while the entries before them are on their way:

        entries    | a ................. | b c d e ............ | f g …
        callers    a   b c d e              f g h

    A lone caller waits for nothing but one turn of the event loop. Each transaction keeps its own conditions
    and its own answer (``commands.TxnBatch``): one that is refused does not hold up the others.

    What an entry's outcome means for its transactions: refused before it was appended, none of them had any
    effect; unknown, each of them is unknown. A caller whose time is up before its transaction has left gets
    ``Unavailable``, and later ``OutcomeUnknown``: the entry may still be applied.

    **Bounds.** ``ENTRIES`` are on their way at a time, each within the limits of a batch. Callers that wait
    hold what they have asked for, and each has a deadline.

    Owned by the event loop.
    """

    def __init__(self, propose: ProposeCommand) -> None:
        self._propose = propose
        self._queue: deque[_Waiting] = deque()
        self._sending: set[asyncio.Task[None]] = set()
        self._is_due = False

    async def txn(self, txn: Txn, *, fence_term: int, timeout: float) -> TxnResult:
        """As ``MetadataStore.txn``, without what the operations return."""
        check_batchable(txn)
        # Here, and not with the batch: one that breaks a limit must not be refused together with the others.
        check_proposal(Proposal(txn, fence_term=fence_term), DEFAULT_LIMITS)
        loop = asyncio.get_running_loop()
        waiting = _Waiting(txn, fence_term, loop.time() + timeout)
        self._queue.append(waiting)
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._flush)
        try:
            async with asyncio.timeout(timeout):
                return await waiting.answer
        except TimeoutError:
            if waiting.is_sent:
                raise OutcomeUnknown(f"no answer within {timeout:g} s; it may still take effect") from None
            raise Unavailable(f"not sent within {timeout:g} s: those before it have no answer") from None

    def _flush(self) -> None:
        self._is_due = False
        while self._queue and len(self._sending) < ENTRIES:
            batch = self._next_batch()
            if batch:
                task = spawn(self._send(batch), name="metadata: a batch")
                self._sending.add(task)
                task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        self._flush()

    def _next_batch(self) -> list[_Waiting]:
        """Those of one fence term, in order; those whose callers have left are passed over."""
        batch: list[_Waiting] = []
        operations = size = 0
        while self._queue and len(batch) < TXNS:
            first = self._queue[0]
            if not first.answer.done():
                operations, size = operations + first.operations, size + first.bytes
                is_other = batch and first.fence_term != batch[0].fence_term
                if is_other or (batch and (operations > OPERATIONS or size > BYTES)):
                    break
                first.is_sent = True
                batch.append(first)
            self._queue.popleft()
        return batch

    async def _send(self, batch: list[_Waiting]) -> None:
        timeout = max(waiting.deadline for waiting in batch) - asyncio.get_running_loop().time()
        single = len(batch) == 1
        command: Command = batch[0].txn if single else TxnBatch(tuple(waiting.txn for waiting in batch))
        try:
            result = await self._propose(command, timeout, batch[0].fence_term)
        except (SavaError, TimeoutError) as error:
            for waiting in batch:
                _fail(waiting.answer, error)
            return
        except BaseException:
            for waiting in batch:
                _fail(waiting.answer, OutcomeUnknown("its log entry was given up; it may still take effect"))
            raise
        if isinstance(result, TxnResult):
            _resolve(batch[0].answer, result.succeeded, result.revision)
            return
        assert isinstance(result, BatchResult)
        for waiting, outcome in zip(batch, result.outcomes, strict=True):
            if isinstance(outcome, CommandRefused):
                _fail(waiting.answer, error_of(outcome))
            else:
                _resolve(waiting.answer, outcome, result.revision)


def _resolve(answer: asyncio.Future[TxnResult], succeeded: bool, revision: int) -> None:
    if not answer.done():
        answer.set_result(TxnResult(succeeded, revision, ()))


def _fail(answer: asyncio.Future[TxnResult], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


# -- the replicated store ------------------------------------------------------------------------------------


class ReplicaView:
    """What this node has applied: ``store.LocalView``. The machine is looked up each time because
    installing a snapshot replaces it."""

    __slots__ = ("_replica",)

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    @property
    def revision(self) -> int:
        return self._replica.machine.revision

    def get(self, key: str) -> KeyValue | None:
        return self._replica.machine.get(key)

    def range(self, prefix: str, *, limit: int = 0, start_after: str = "") -> RangeResult:
        check_key_or_prefix(prefix, DEFAULT_LIMITS)
        machine = self._replica.machine
        kvs, more = machine.range(prefix, limit=limit, start_after=start_after)
        return RangeResult(kvs, machine.revision, more)


class RaftStore:
    """The replicated ``MetadataStore``: translates its methods into requests to the node's replica.

    Every write is one ``Txn`` in the log, or one of a ``TxnBatch``: one path to reason about. Reads never
    enter the log: local ones look into this node's state, linearizable ones first pass the ``ReadBarrier``.
    """

    def __init__(self, node: RaftNode) -> None:
        self._node = node
        self.local = ReplicaView(node.replica)
        self._batches = Batches(self._propose)

    async def get(
        self,
        key: str,
        *,
        linearizable: bool = True,
        min_revision: int = 0,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> KeyValue | None:
        await self._fresh(linearizable, min_revision, timeout)
        return self.local.get(key)

    async def range(
        self,
        prefix: str,
        *,
        limit: int = 0,
        start_after: str = "",
        linearizable: bool = True,
        min_revision: int = 0,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> RangeResult:
        await self._fresh(linearizable, min_revision, timeout)
        return self.local.range(prefix, limit=limit, start_after=start_after)

    async def put(
        self, key: str, value: bytes, *, lease: int = 0, timeout: float = DEFAULT_TIMEOUT_S
    ) -> TxnResult:
        return await self._txn(Txn(then=(Put(key, value, lease),)), timeout)

    async def delete(self, key: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> TxnResult:
        return await self._txn(Txn(then=(Delete(key),)), timeout)

    async def delete_prefix(self, prefix: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> TxnResult:
        return await self._txn(Txn(then=(DeletePrefix(prefix),)), timeout)

    async def txn(
        self,
        compare: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        fence_term: int = 0,
        batched: bool = False,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> TxnResult:
        txn = Txn(tuple(compare), tuple(then), tuple(otherwise))
        if batched:
            return await self._batches.txn(txn, fence_term=fence_term, timeout=timeout)
        return await self._txn(txn, timeout, fence_term)

    async def allocate_id(self, key: str, *, count: int = 1, timeout: float = DEFAULT_TIMEOUT_S) -> int:
        result = await self._txn(Txn(then=(AllocateId(key, count),)), timeout)
        (allocated,) = result.results
        assert isinstance(allocated, AllocateResult)
        return allocated.first

    def watch(self, prefix: str, *, from_revision: int = 0) -> Watch:
        return Watch(self._node.replica.hub.watch(prefix, from_revision))

    async def grant_lease(self, ttl_ms: int, *, timeout: float = DEFAULT_TIMEOUT_S) -> int:
        result = await self._propose(LeaseGrant(ttl_ms), timeout)
        assert isinstance(result, LeaseResult)
        return result.lease

    async def keep_alive(self, lease: int, *, timeout: float = DEFAULT_TIMEOUT_S) -> int:
        reply = await self._node.ask(KeepAlive(lease), timeout=timeout)
        assert isinstance(reply, Alive)
        return reply.ttl_ms

    async def revoke_lease(
        self, lease: int, *, fence_term: int = 0, timeout: float = DEFAULT_TIMEOUT_S
    ) -> None:
        await self._propose(LeaseRevoke(lease), timeout, fence_term)

    async def _txn(self, txn: Txn, timeout: float, fence_term: int = 0) -> TxnResult:
        result = await self._propose(txn, timeout, fence_term)
        assert isinstance(result, TxnResult)
        return result

    async def _propose(self, command: Command, timeout: float, fence_term: int = 0) -> Result:
        reply = await self._node.ask(Propose(command, fence_term=fence_term), timeout=timeout)
        assert isinstance(reply, Committed)
        if isinstance(reply.result, CommandRefused):
            raise error_of(reply.result)
        return reply.result

    async def _fresh(self, linearizable: bool, min_revision: int, timeout: float) -> None:
        if linearizable:
            self._node.require_cluster()
            await self._node.barrier.wait(timeout)
        if min_revision > self.local.revision:
            reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            ticket = self._node.replica.when_revision(min_revision, lambda: resolve(reached, None))
            try:
                async with asyncio.timeout(timeout):
                    await reached
            except TimeoutError:
                raise Unavailable(
                    f"this node has applied revision {self.local.revision}, not {min_revision}, "
                    f"after {timeout:g} s"
                ) from None
            finally:
                self._node.replica.cancel(ticket)


# -- the cluster itself --------------------------------------------------------------------------------------


RETRY_S = 0.1
OPERATION_TIMEOUT_S = 30.0
"""Membership changes wait for a majority and, when promoting, for a learner that catches up."""


@dataclass(frozen=True, slots=True)
class Founded:
    cluster: str
    leader: NodeId
    voters: tuple[NodeId, ...]
    already: bool


@dataclass(frozen=True, slots=True)
class Added:
    node: NodeId
    address: str
    already: bool


class ClusterOperations:
    """Operations on the cluster itself: forming it (``bootstrap``), adding, promoting and removing nodes,
    handing over leadership.

    Runs on any node; what only the leader may do is forwarded by the replica.
    """

    def __init__(self, node: RaftNode) -> None:
        self._node = node

    async def init(self, addresses: Sequence[str], *, timeout: float = OPERATION_TIMEOUT_S) -> Founded:
        already = await bootstrap(
            self._node.transport,
            self._node.info,
            addresses,
            voters_now=lambda: self.membership().voters,
            timeout=timeout,
        )
        try:
            await self._node.wait_until(
                lambda: self._leader() != NO_NODE, "a leader was elected", timeout=timeout
            )
        except Unavailable as error:
            raise Unfinished(f"the cluster is formed, but {error}; `sava cluster status` shows it") from error
        return Founded(self._node.info().cluster, self._leader(), self.membership().voters, already)

    async def add(self, address: str, *, timeout: float = OPERATION_TIMEOUT_S) -> Added:
        """Make the node at ``address`` a learner. Repeating it is harmless."""
        cluster = self._node.require_cluster()
        info = await self._node.transport.identify(check_address(address), timeout=IDENTIFY_TIMEOUT_S)
        if info.is_reticent or (info.cluster and info.cluster != cluster):
            whose = f"cluster {info.cluster}" if info.cluster else "a cluster with another secret"
            raise IdentityConflict(
                f"node {info.node} at {address} belongs to {whose}; wipe its data directory to add it here"
            )
        await self._node.barrier.wait(timeout)
        membership = self.membership()
        if info.node in membership.members:
            if info.is_fixed and not info.cluster:
                raise IdentityConflict(
                    f"node {info.node} at {address} is a member that has lost its disk; remove it, start "
                    "it with a certificate that names another node id, and add it"
                )
            return Added(info.node, membership.address(info.node) or address, already=True)
        holder = next((node for node, taken in membership.addresses if taken == address), None)
        if holder is not None:
            raise InvalidRequest(
                f"{address} is the address of member {holder}; remove that node first if its disk is lost"
            )
        await self._node.transport.bootstrap(address, Bootstrap(cluster, Membership()), timeout=timeout)
        change = MembershipChange(add_learners=((info.node, address),))
        await self._node.ask(ChangeMembership(change), timeout=timeout)
        return Added(info.node, address, already=False)

    async def promote(
        self, node: NodeId, address: str, *, timeout: float = OPERATION_TIMEOUT_S
    ) -> tuple[NodeId, bool]:
        """Make a learner a voter; returns its id, and whether it was one already."""
        target = await self._member(node, address, timeout)
        if target in self.membership().voters:
            return target, True
        change = ChangeMembership(MembershipChange(promote=(target,)))
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            left = deadline - asyncio.get_running_loop().time()
            try:
                await self._node.ask(change, timeout=left)
                return target, False
            except MembershipBusy:
                # Still catching up, or another change under way: had no effect, and a moment may help.
                if left < 2 * RETRY_S:
                    raise
                await asyncio.sleep(RETRY_S)

    async def remove(
        self,
        node: NodeId,
        address: str,
        *,
        force: bool,
        check: Callable[[NodeId], None] = lambda node: None,
        timeout: float = OPERATION_TIMEOUT_S,
    ) -> NodeId:
        """Returns once the node is out of a committed configuration; only then may its data be deleted.
        ``check`` raises if the node should stay for reasons of its own; it is not asked when forced."""
        target = await self._member(node, address, timeout)
        if not force:
            check(target)
        if not force and target in self.membership().voters:
            await self._check_rest(target)
        change = MembershipChange(remove=(target,), forced=force)
        await self._node.ask(ChangeMembership(change), timeout=timeout)
        return target

    async def _check_rest(self, leaving: NodeId) -> None:
        """Refuse when the voters that would remain are, as far as they answer now, no majority. The leader
        makes the same check by whom it heard lately; a node that died a moment ago passes there, and the
        change would then wait for it with the cluster standing still."""
        membership = self.membership()
        rest = [voter for voter in membership.voters if voter != leaving]
        answers = await asyncio.gather(*(self._answers(voter, membership) for voter in rest))
        if rest and 2 * sum(answers) <= len(rest):
            silent = [str(voter) for voter, answered in zip(rest, answers, strict=True) if not answered]
            raise MembershipRefused(
                f"without node {leaving}, {len(rest)} voters remain and node {', '.join(silent)} does "
                "not answer: no majority; bring it back or remove it first, or use --force"
            )

    async def _answers(self, voter: NodeId, membership: Membership) -> bool:
        address = membership.address(voter)
        if voter == self._node.info().node or address is None:
            return address is not None
        try:
            return (await self._node.transport.identify(address, timeout=IDENTIFY_TIMEOUT_S)).node == voter
        except SavaError:
            return False

    async def transfer(self, node: NodeId, address: str, *, timeout: float = OPERATION_TIMEOUT_S) -> NodeId:
        """Hand leadership to ``node``, or to the most up-to-date voter when neither id nor address is
        given. Asking for the one that leads already is done at once: a script may repeat the command."""
        target = await self._member(node, address, timeout) if node or address else NO_NODE
        if target and target == self._leader():
            return target
        reply = await self._node.ask(TransferLeadership(target), timeout=timeout)
        assert isinstance(reply, Transferred)
        return reply.to

    async def snapshot(self, *, timeout: float = OPERATION_TIMEOUT_S) -> SnapshotMeta:
        self._node.require_cluster()
        return await self._node.take_snapshot(timeout=timeout)

    def membership(self) -> Membership:
        core = self._node.core_status
        return core.membership if core is not None else Membership()

    def _leader(self) -> NodeId:
        core = self._node.core_status
        return core.leader if core is not None else NO_NODE

    async def _member(self, node: NodeId, address: str, timeout: float) -> NodeId:
        """The member that is meant. Read behind a barrier: this node's own view may be old."""
        self._node.require_cluster()
        await self._node.barrier.wait(timeout)
        membership = self.membership()
        if node:
            found = node if node in membership.members else None
        else:
            found = next((member for member, taken in membership.addresses if taken == address), None)
        if found is None:
            known = ", ".join(f"{member} at {taken}" for member, taken in membership.addresses)
            raise InvalidRequest(
                f"{node or cut(address) or 'no node'} is not a member of the cluster; members: {known}"
            )
        return found
