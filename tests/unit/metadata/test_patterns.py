"""The six patterns in which metadata is used, on MemoryStore."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.memory_store import MemoryStore
from tests.support.metadata_patterns import *  # noqa: F403


class MemoryHarness:
    ttl_ms = 1_000

    def __init__(self) -> None:
        self._store = MemoryStore(clock=lambda: 0)

    @property
    def stores(self) -> Sequence[MemoryStore]:
        return (self._store,)

    @property
    def term(self) -> int:
        return self._store.term

    async def pass_time(self, ms: int) -> None:
        self._store.advance(ms)


@pytest.fixture
def harness() -> MemoryHarness:
    return MemoryHarness()
