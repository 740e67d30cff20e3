"""Routing: which partition a key belongs to. As Danube's clients do it, so that both send a key to the same
one."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

_BASIS: Final = 0xCBF29CE484222325
_PRIME: Final = 0x100000001B3
_MASK: Final = (1 << 64) - 1


@lru_cache(maxsize=1 << 16)
def fnv1a(key: str) -> int:
    """FNV-1a, 64 bits, of the key's UTF-8. A byte costs about 0.1 µs here, and keys repeat: hence the
    memory."""
    value = _BASIS
    for byte in key.encode():
        value = ((value ^ byte) * _PRIME) & _MASK
    return value


def partition_of(key: str, partitions: int) -> int:
    return fnv1a(key) % partitions
