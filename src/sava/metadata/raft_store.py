"""RaftStore: the replicated ``MetadataStore``. A thin translation of its methods into requests to the
node's replica.

Every write is one ``Txn`` in the log, or one of a ``Batch``: one path to reason about. Reads never enter the
log: local ones look into this node's state, linearizable ones first pass the ``ReadBarrier``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sava.metadata.batching import Batches
from sava.metadata.commands import (
    AllocateId,
    AllocateResult,
    Command,
    Compare,
    Delete,
    DeletePrefix,
    KeyValue,
    LeaseGrant,
    LeaseResult,
    LeaseRevoke,
    Operation,
    Put,
    Refused,
    Result,
    Txn,
    TxnResult,
)
from sava.metadata.errors import Unavailable
from sava.metadata.failures import error_of
from sava.metadata.machine.limits import DEFAULT_LIMITS, check_key_or_prefix
from sava.metadata.node import RaftNode, resolve
from sava.metadata.peer import Alive, Committed, KeepAlive, Propose
from sava.metadata.replica.replica import Replica
from sava.metadata.store import DEFAULT_TIMEOUT_S, RangeResult, Watch
from sava.metadata.watch import HubWatch


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
        return HubWatch(self._node.replica.hub.watch(prefix, from_revision))

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
        if isinstance(reply.result, Refused):
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
