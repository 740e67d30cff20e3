"""Batches: transactions of one node that are under way at the same time share log entries.

A broker that takes up a thousand topics writes for each of them, on the conditions of each. As a thousand
entries these would be encoded, forwarded, remembered and applied one by one. Here they wait for each other
while the entries before them are on their way:

    entries    | a ................. | b c d e ............ | f g …
    callers    a   b c d e              f g h

A lone caller waits for nothing but one turn of the event loop. Each transaction keeps its own conditions and
its own answer (``commands.Batch``): one that is refused does not hold up the others.

What an entry's outcome means for its transactions: refused before it was appended, none of them had any
effect; unknown, each of them is unknown. A caller whose time is up before its transaction has left gets
``Unavailable``, and later ``OutcomeUnknown``: the entry may still be applied.

**Bounds.** ``ENTRIES`` are on their way at a time, each within the limits of a batch. Callers that wait hold
what they have asked for, and each has a deadline.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from sava.errors import SavaError
from sava.metadata.commands import Batch, BatchResult, Command, Proposal, Refused, Result, Txn, TxnResult
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.metadata.failures import error_of
from sava.metadata.machine.limits import DEFAULT_LIMITS, check_batchable, check_proposal
from sava.tasks import spawn

ENTRIES: Final = 4
"""On their way at a time. More of them hold fewer transactions each; with one, the disks of the cluster would
wait while its answer is on the way back."""
TXNS: Final = 256
"""In one entry."""
OPERATIONS: Final = DEFAULT_LIMITS.max_batch_operations
BYTES: Final = 1 << 20
"""Of values in one entry: enough to share, and little to wait behind."""

Propose = Callable[[Command, float, int], Awaitable[Result]]
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
    """Owned by the event loop."""

    def __init__(self, propose: Propose) -> None:
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
        command: Command = batch[0].txn if single else Batch(tuple(waiting.txn for waiting in batch))
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
            if isinstance(outcome, Refused):
                _fail(waiting.answer, error_of(outcome))
            else:
                _resolve(waiting.answer, outcome, result.revision)


def _resolve(answer: asyncio.Future[TxnResult], succeeded: bool, revision: int) -> None:
    if not answer.done():
        answer.set_result(TxnResult(succeeded, revision, ()))


def _fail(answer: asyncio.Future[TxnResult], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
