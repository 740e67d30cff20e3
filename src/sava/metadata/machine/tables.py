"""What the replicated state consists of: keys in order, leases and what each holds, sessions.

**Keys.** A dict answers ``get`` in one lookup; a sorted list of the same keys gives order. Order is by code
point, which for UTF-8 is the order of the encoded bytes, so every replica and every language agrees on it.

**Leases.** Which leases exist and what each holds: the replicated half; deadlines live in ``lessor``. The
table is the one truth. With a second map, from time to keys, an apply that drops what is due by its own clock
leaves keys behind that nothing will ever expire, on each node different ones. Here a key knows its lease, a
lease knows its keys, both change together, and the snapshot writes only the first.

**Sessions** make a retry harmless. A client that lost the answer to a request cannot know whether the request
took effect. It sends it again under the same (session, seq), and the state machine answers the second copy
from memory: the first result, no effect, no events. The memory is part of the replicated state and of the
snapshot; kept anywhere else, a new leader or a restart would execute the copy.

The window is bounded three ways: the session says ``low`` (it will never ask about anything below), and
``Limits`` bounds the number of answers and their bytes. What has fallen out of the window is refused, never
executed again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

import msgspec
from sortedcontainers import SortedList

from sava.metadata.commands import KeyValue
from sava.metadata.machine.limits import Limits, is_prefix, key_bytes

# -- keys ----------------------------------------------------------------------------------------------------


def size_of(kv: KeyValue) -> int:
    """What a key counts against the quota: its own bytes and its value's."""
    return key_bytes(kv.key) + len(kv.value)


def end_of(prefix: str) -> str:
    """The first text after everything that begins with ``prefix`` (which ends in '/'): '0' follows '/'."""
    return prefix[:-1] + "0"


class KeySpace:
    __slots__ = ("kvs", "order", "total_bytes")

    def __init__(self) -> None:
        self.kvs: dict[str, KeyValue] = {}
        self.order = SortedList()
        self.total_bytes = 0

    @classmethod
    def of_sorted(cls, kvs: dict[str, KeyValue]) -> KeySpace:
        """From a dict whose insertion order is already the key order (a snapshot)."""
        space = cls()
        space.kvs = kvs
        space.order = SortedList(kvs)
        space.total_bytes = sum(map(size_of, kvs.values()))
        return space

    def store(self, kv: KeyValue) -> None:
        key = kv.key
        previous = self.kvs.get(key)
        if previous is None:
            self.order.add(key)
            self.total_bytes += key_bytes(key) + len(kv.value)
        else:
            self.total_bytes += len(kv.value) - len(previous.value)
        self.kvs[key] = kv

    def remove(self, key: str) -> None:
        self.total_bytes -= size_of(self.kvs.pop(key))
        self.order.remove(key)

    def keys_under(self, prefix: str, start_after: str = "") -> Iterator[str]:
        """Keys below ``prefix`` (ends in '/'), in order. The prefix itself is never a key."""
        return iter(self.order.irange(max(prefix, start_after), end_of(prefix), inclusive=(False, False)))

    def range(self, prefix: str, limit: int, start_after: str) -> tuple[tuple[KeyValue, ...], bool]:
        if not is_prefix(prefix):
            kv = self.kvs.get(prefix)
            return ((kv,) if kv is not None and prefix > start_after else ()), False
        keys = self.keys_under(prefix, start_after)
        if limit <= 0:
            return tuple(map(self.kvs.__getitem__, keys)), False
        page = tuple(map(self.kvs.__getitem__, islice(keys, limit + 1)))
        return page[:limit], len(page) > limit


# -- leases --------------------------------------------------------------------------------------------------


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


# -- sessions ------------------------------------------------------------------------------------------------


class Session(msgspec.Struct, array_like=True):
    session: int
    nonce: bytes
    last_stamp: int
    """Largest stamp of its requests; the only thing that its expiry looks at."""
    low: int = 1
    """Requests below are not answered any more."""
    responses: dict[int, bytes] = msgspec.field(default_factory=dict)
    held_bytes: int = 0

    def forget_below(self, low: int) -> None:
        if low <= self.low:
            return
        if low - self.low <= len(self.responses):
            gone = [seq for seq in range(self.low, low) if seq in self.responses]
        else:
            gone = [seq for seq in self.responses if seq < low]
        for seq in gone:
            self.held_bytes -= len(self.responses.pop(seq))
        self.low = low

    def remember(self, seq: int, response: bytes, limits: Limits) -> None:
        self.responses[seq] = response
        self.held_bytes += len(response)
        if len(self.responses) > limits.max_session_window or self.held_bytes > limits.max_session_bytes:
            self._evict(limits)

    def _evict(self, limits: Limits) -> None:
        """Lowest number first, raising ``low`` with it: a gap inside the window would let a late copy of a
        forgotten request look like a new one. The highest stays, however large."""
        for seq in sorted(self.responses)[:-1]:
            if (
                len(self.responses) <= limits.max_session_window
                and self.held_bytes <= limits.max_session_bytes
            ):
                return
            self.held_bytes -= len(self.responses.pop(seq))
            self.low = seq + 1

    def frozen(self) -> Session:
        return Session(
            self.session, self.nonce, self.last_stamp, self.low, self.responses.copy(), self.held_bytes
        )


class SessionTable:
    __slots__ = ("_by_nonce", "by_id", "next_id")

    def __init__(self) -> None:
        self.by_id: dict[int, Session] = {}
        self._by_nonce: dict[bytes, int] = {}
        self.next_id = 1

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(self.by_id.values())

    def find(self, nonce: bytes) -> Session | None:
        """The session that an earlier copy of the same open created."""
        session = self._by_nonce.get(nonce)
        return None if session is None else self.by_id[session]

    def open(self, nonce: bytes, stamp_ms: int) -> Session:
        session = Session(self.next_id, nonce, stamp_ms)
        self.next_id += 1
        self.add(session)
        return session

    def add(self, session: Session) -> None:
        self.by_id[session.session] = session
        self._by_nonce[session.nonce] = session.session

    def expire(self, before_ms: int) -> int:
        """Forget sessions whose last stamp is before ``before_ms``; returns how many."""
        idle = [session for session in self if session.last_stamp < before_ms]
        for session in idle:
            del self.by_id[session.session]
            del self._by_nonce[session.nonce]
        return len(idle)
