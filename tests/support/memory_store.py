"""MemoryStore: the metadata store of one process, for tests and tools.

The same state machine, lessor and watch hub as the replicated store, without the log between: a store
for tests that behaves differently from the real one tests itself. Every call takes effect at once, so
linearizable and local reads are the same.

Time: by default the monotonic clock, with a timer on the event loop for the next lease deadline. With an
injected ``clock`` nothing happens by itself: the test says ``advance(ms)``.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Self

from sava.metadata.commands import (
    AllocateId,
    AllocateResult,
    Command,
    CommandRefused,
    Compare,
    Delete,
    DeletePrefix,
    KeyValue,
    LeaseGrant,
    LeaseResult,
    LeaseRevoke,
    LeaseTouch,
    Operation,
    Proposal,
    Put,
    Result,
    Txn,
    TxnResult,
)
from sava.metadata.errors import Unavailable, refusal
from sava.metadata.lessor import Lessor
from sava.metadata.machine.limits import DEFAULT_LIMITS, check_batchable, check_key_or_prefix
from sava.metadata.machine.state_machine import Limits, StateMachine
from sava.metadata.store import DEFAULT_TIMEOUT_S, RangeResult
from sava.metadata.watch import DEFAULT_HUB_LIMITS, HubLimits, Watch, WatchHub


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class MachineView:
    """``LocalView`` of a state machine: what is applied here, without waiting."""

    __slots__ = ("_limits", "_machine")

    def __init__(self, machine: StateMachine, limits: Limits = DEFAULT_LIMITS) -> None:
        self._machine = machine
        self._limits = limits

    @property
    def revision(self) -> int:
        return self._machine.revision

    def get(self, key: str) -> KeyValue | None:
        return self._machine.get(key)

    def range(self, prefix: str, *, limit: int = 0, start_after: str = "") -> RangeResult:
        check_key_or_prefix(prefix, self._limits)
        kvs, more = self._machine.range(prefix, limit=limit, start_after=start_after)
        return RangeResult(kvs, self._machine.revision, more)


class MemoryStore:
    """Owned by one event loop. ``close`` (or ``async with``) stops its timer and ends its watches."""

    def __init__(
        self,
        *,
        limits: Limits = DEFAULT_LIMITS,
        hub_limits: HubLimits = DEFAULT_HUB_LIMITS,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.machine = StateMachine(limits)
        self.hub = WatchHub(limits=hub_limits)
        self.lessor = Lessor(self.machine, grace_ms=0)
        self.term = 1
        """What ``fence_term`` is compared with."""
        self._view = MachineView(self.machine, limits)
        self._clock = clock or _monotonic_ms
        self._runs_by_itself = clock is None
        self._skipped_ms = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._tickets = count()
        self.lessor.become_leader(self._now())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._runs_by_itself = False
        self.hub.close()

    def advance(self, ms: int) -> None:
        """Let time pass, and expire what falls due on the way, in order."""
        end = self._now() + ms
        while (deadline := self.lessor.next_deadline_ms) is not None and deadline <= end:
            self._skipped_ms += max(0, deadline - self._now())
            self._expire_due()
        self._skipped_ms += max(0, end - self._now())

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def local(self) -> MachineView:
        return self._view

    async def get(
        self,
        key: str,
        *,
        linearizable: bool = True,
        min_revision: int = 0,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> KeyValue | None:
        await self._reach(min_revision, timeout)
        return self._view.get(key)

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
        await self._reach(min_revision, timeout)
        return self._view.range(prefix, limit=limit, start_after=start_after)

    def watch(self, prefix: str, *, from_revision: int = 0) -> Watch:
        return Watch(self.hub.watch(prefix, from_revision))

    # -- writing ---------------------------------------------------------------------------------------------

    async def put(
        self, key: str, value: bytes, *, lease: int = 0, timeout: float = DEFAULT_TIMEOUT_S
    ) -> TxnResult:
        return await self.txn((), (Put(key, value, lease),), timeout=timeout)

    async def delete(self, key: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> TxnResult:
        return await self.txn((), (Delete(key),), timeout=timeout)

    async def delete_prefix(self, prefix: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> TxnResult:
        return await self.txn((), (DeletePrefix(prefix),), timeout=timeout)

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
        """With nothing between call and effect there is never another one to share an entry with."""
        txn = Txn(tuple(compare), tuple(then), tuple(otherwise))
        if batched:
            check_batchable(txn)
        result = self._propose(txn, fence_term)
        assert isinstance(result, TxnResult)
        return TxnResult(result.succeeded, result.revision, ()) if batched else result

    async def allocate_id(self, key: str, *, count: int = 1, timeout: float = DEFAULT_TIMEOUT_S) -> int:
        result = (await self.txn((), (AllocateId(key, count),), timeout=timeout)).results[0]
        assert isinstance(result, AllocateResult)
        return result.first

    # -- leases ----------------------------------------------------------------------------------------------

    async def grant_lease(self, ttl_ms: int, *, timeout: float = DEFAULT_TIMEOUT_S) -> int:
        result = self._propose(LeaseGrant(ttl_ms))
        assert isinstance(result, LeaseResult)
        return result.lease

    async def keep_alive(self, lease: int, *, timeout: float = DEFAULT_TIMEOUT_S) -> int:
        ttl_ms = self.lessor.keep_alive(lease, self._now())
        if ttl_ms is None:
            result = self._propose(LeaseTouch(lease))
            assert isinstance(result, LeaseResult)
            ttl_ms = result.ttl_ms
        return ttl_ms

    async def revoke_lease(
        self, lease: int, *, fence_term: int = 0, timeout: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self._propose(LeaseRevoke(lease), fence_term)

    # -- the machinery ---------------------------------------------------------------------------------------

    def _now(self) -> int:
        return self._clock() + self._skipped_ms

    def _propose(self, command: Command, fence_term: int = 0) -> Result:
        """Check, apply, tell the watchers; a refusal becomes its typed error."""
        self._expire_due()
        proposal = Proposal(command, stamp_ms=self._now(), fence_term=fence_term)
        self.machine.check(proposal)
        result = self._apply(proposal)
        self._arm_timer()
        if isinstance(result, CommandRefused):
            raise refusal(result.code, result.message, result.detail)
        return result

    def _apply(self, proposal: Proposal) -> Result:
        applied = self.machine.apply(proposal, self.term)
        self.lessor.observe(proposal.command, applied.result, self._now())
        self.hub.publish(applied.events)
        while self._waiting and self._waiting[0][0] <= self.machine.revision:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)
        return applied.result

    def _expire_due(self) -> None:
        for expiry in self.lessor.due(self._now()):
            self._apply(Proposal(expiry, stamp_ms=self._now(), fence_term=self.term))

    def _arm_timer(self) -> None:
        """One timer, for the earliest deadline; none while there is no lease."""
        deadline = self.lessor.next_deadline_ms
        if not self._runs_by_itself or self._timer is not None or deadline is None:
            return
        delay_s = max(1, deadline - self._now()) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._expire_due()
        self._arm_timer()

    async def _reach(self, revision: int, timeout: float) -> None:
        self._expire_due()
        if revision <= self.machine.revision:
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (revision, next(self._tickets), future))
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            here = self.machine.revision
            raise Unavailable(
                f"revision {revision} was not reached within {timeout} s; this is {here}"
            ) from None
        finally:
            if not future.done() or future.cancelled():
                self._waiting = sorted(entry for entry in self._waiting if entry[2] is not future)
