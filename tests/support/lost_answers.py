"""LostAnswers: a metadata store in memory that applies a write and loses the answer to it."""

from __future__ import annotations

from collections.abc import Sequence

from sava.metadata.commands import Compare, Operation, TxnResult
from sava.metadata.errors import OutcomeUnknown
from tests.support.memory_store import MemoryStore


class LostAnswers(MemoryStore):
    def __init__(self) -> None:
        super().__init__(clock=lambda: 0)
        self.lost = 0
        """Answers to the next conditional transactions that are lost, after these have taken effect."""
        self.conditional = 0
        """Conditional transactions so far."""

    async def txn(
        self,
        compare: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        fence_term: int = 0,
        batched: bool = False,
        timeout: float = 1.0,
    ) -> TxnResult:
        result = await super().txn(compare, then, otherwise, fence_term=fence_term, batched=batched)
        if compare:
            self.conditional += 1
            if self.lost:
                self.lost -= 1
                raise OutcomeUnknown("the answer was lost")
        return result
