"""MetadataStore: what the rest of Sava sees of the replicated store, and the one interface that both
implementations honour.

``RaftStore`` (``node.py``) replicates; ``MemoryStore`` (``memory.py``) is the same state machine without
Raft, for tests and tools. Consistency is said, never implied:

* ``local``: what this node has applied, no waiting. With ``min_revision`` it first waits (bounded) until it
  has applied that.
* ``linearizable``: at least everything acknowledged anywhere before the call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sava.metadata.commands import Compare, Event, KeyValue, Operation, TxnResult

DEFAULT_TIMEOUT_S = 10.0
"""Long enough for an election to pass unnoticed, short enough that nobody hangs."""


@dataclass(frozen=True, slots=True)
class RangeResult:
    """Keys in order, and the revision they were read at: watching from ``revision + 1`` misses nothing."""

    kvs: tuple[KeyValue, ...]
    revision: int
    more: bool = False


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """All events of one revision that match, sorted by key; never split."""

    revision: int
    events: tuple[Event, ...]


class Watch(Protocol):
    """Iterate for batches with strictly growing revisions, without gaps. Raises ``Compacted`` when this
    watcher fell too far behind or the node installed a snapshot: read the range again and watch from its
    revision + 1."""

    def __aiter__(self) -> AsyncIterator[WatchBatch]: ...

    async def __anext__(self) -> WatchBatch: ...

    def close(self) -> None: ...


class LocalView(Protocol):
    """This node's applied state, synchronously: a dictionary lookup."""

    @property
    def revision(self) -> int: ...

    def get(self, key: str) -> KeyValue | None: ...

    def range(self, prefix: str, *, limit: int = 0, start_after: str = "") -> RangeResult: ...


class MetadataStore(Protocol):
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
