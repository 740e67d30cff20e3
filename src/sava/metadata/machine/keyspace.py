"""KeySpace: the ordered map. A dict answers ``get`` in one lookup; a sorted list of the same keys gives
order.

Not thread-safe; owned by the state machine. Order is by code point, which for UTF-8 is the order of the
encoded bytes, so every replica and every language agrees on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from sortedcontainers import SortedList

from sava.metadata.commands import KeyValue
from sava.metadata.machine.limits import is_prefix, key_bytes


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
