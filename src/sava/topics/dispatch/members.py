"""Keys: the key that a message counts under, the filters of consumers, and the ring that gives each key a
consumer.

The ring is consistent hashing: every member has many points on a circle, and a key belongs to the first point
at or after its own. A member that comes or goes changes the keys of its own points only. A member whose
filter refuses the key is passed over, to the next one that accepts it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

import pyarrow.compute as pc

from sava.records import RecordBatch
from sava.topics.ranges import IntervalSet

NO_KEY: Final = ""
"""The key of messages that have neither a key nor a named producer: they are one sequence."""
_POINTS: Final = 128
"""On the circle, for each member: shares differ by about a tenth."""


class KeyFilter:
    """Globs of which one must match the whole key: ``*`` is any text, ``?`` any one character, everything
    else itself, in the case it has. Without a glob every key is accepted."""

    __slots__ = ("_accepted", "globs")

    def __init__(self, globs: Sequence[str] = ()) -> None:
        self.globs = tuple(globs)
        patterns = "|".join(f"(?:{_pattern(glob)})" for glob in self.globs)
        self._accepted = re.compile(patterns, re.DOTALL) if patterns else None

    def accepts(self, key: str) -> bool:
        return self._accepted is None or self._accepted.fullmatch(key) is not None


def _pattern(glob: str) -> str:
    """Each ``*`` takes as little as it can and is not tried again: globs come from clients, and with a plain
    ``.*`` for each star ``*a*a*a*a*b`` takes time in the power of its stars."""
    first, *rest = (
        "".join("." if char == "?" else re.escape(char) for char in part) for part in glob.split("*")
    )
    if not rest:
        return first
    return first + "".join(f"(?>.*?{part})" for part in rest[:-1] if part) + ".*" + rest[-1]


def _place(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


class HashRing:
    """Of members by name. ``version`` changes with every change, so that answers can be kept."""

    def __init__(self) -> None:
        self.version = 0
        self._points: list[int] = []
        self._names: list[str] = []
        self._filters: dict[str, KeyFilter] = {}

    def set(self, members: Iterable[DispatchMember]) -> None:
        self.version += 1
        known = list(members)
        circle = sorted((_place(f"{each.name}\0{i}"), each.name) for each in known for i in range(_POINTS))
        self._points = [point for point, _ in circle]
        self._names = [name for _, name in circle]
        self._filters = {each.name: each.key_filter for each in known}

    def home(self, key: str) -> str | None:
        """The member that the key belongs to, None if none accepts it."""
        names = self._names
        if not names:
            return None
        first = bisect_left(self._points, _place(key))
        asked: set[str] = set()
        for step in range(len(names)):
            name = names[(first + step) % len(names)]
            if name in asked:
                continue
            if self._filters[name].accepts(key):
                return name
            asked.add(name)
            if len(asked) == len(self._filters):
                break
        return None


def effective_keys(batch: RecordBatch) -> Sequence[str]:
    """For each row: its key, else the name of its producer, else ``NO_KEY``."""
    columns = batch.to_arrow(("key", "producer"))
    encoded = pc.coalesce(columns.column(0), columns.column(1), NO_KEY).dictionary_encode()
    names: list[str] = encoded.dictionary.to_pylist()
    if len(names) == 1:
        return names * len(batch)
    indices = encoded.indices
    codes = memoryview(indices.buffers()[1]).cast("i")[indices.offset : indices.offset + len(indices)]
    return list(map(names.__getitem__, codes))


QUEUE_BYTES: Final = 4 << 20
"""Sent to a consumer's queue and not fetched from it. Credits count messages, and a thousand of them may be a
gigabyte; this bounds what a consumer holds that stopped reading."""


@dataclass(slots=True, eq=False)
class DispatchMember:
    """A consumer as dispatch sees it, one for each attachment: a consumer that comes back under its name is
    another member."""

    name: str
    key_filter: KeyFilter = field(default_factory=KeyFilter)
    credits: int = 0
    """Messages that may still be sent."""
    queued_bytes: int = 0
    is_stalled: bool = False
    """Left messages in its queue for longer than the ack timeout. Gets nothing until it fetches again."""
    again: IntervalSet = field(default_factory=IntervalSet)
    """Key-shared: redeliveries that only this member may get, now."""
    ahead: IntervalSet = field(default_factory=IntervalSet)
    """Key-shared: messages never sent that only this member may get, passed over for want of credits."""

    @property
    def has_room(self) -> bool:
        return self.credits > 0 and not self.is_stalled and self.queued_bytes < QUEUE_BYTES
