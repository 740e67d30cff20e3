"""LeaseTable: which leases exist and what each holds. The replicated half of leases; deadlines live in
``lessor.py``.

The table is the one truth. With a second map, from time to keys, an apply that drops what is due by its own
clock leaves keys behind that nothing will ever expire, on each node different ones. Here a key knows its
lease, a lease knows its keys, both change together, and the snapshot writes only the first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import msgspec


class Lease(msgspec.Struct, array_like=True):
    """``keys`` is sorted, so that deleting them is in the same order everywhere. ``generation`` grows
    whenever the holder showed a sign of life through the log; an expiry that was decided before it is
    void."""

    lease: int
    ttl_ms: int
    generation: int
    keys: list[str]


class LeaseTable:
    __slots__ = ("by_id", "next_id")

    def __init__(self) -> None:
        self.by_id: dict[int, Lease] = {}
        self.next_id = 1
        """Never reused: a holder that slept through its expiry must not wake up with the lease of another
        holder."""

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self.by_id.values())

    def grant(self, ttl_ms: int) -> Lease:
        lease = Lease(self.next_id, ttl_ms, 1, [])
        self.next_id += 1
        self.by_id[lease.lease] = lease
        return lease

    def add(self, lease: Lease) -> None:
        self.by_id[lease.lease] = lease

    def drop(self, lease: int) -> None:
        del self.by_id[lease]

    def attach(self, lease: int, key: str) -> None:
        """The caller knows that the lease exists and that the key is not attached to it."""
        holder = self.by_id[lease]
        holder.generation += 1
        insort(holder.keys, key)

    def detach(self, lease: int, key: str) -> None:
        keys = self.by_id[lease].keys
        del keys[bisect_left(keys, key)]
