"""Outbox: what leaves with the next send, and what may wait a moment for company.

After each commit the leader owes its followers the news. Sent at once and alone, that is a second message
and a second answer per follower for every write that comes alone, half of all traffic, and a caller that
writes again as soon as it was answered finds the loops of all nodes busy with it. The next append tells the
same:

    answer the caller -> hold the news -> the caller writes again -> one append: entry and news

So an append without entries is held until the pump after the one that made it, and an append with entries to
the same peer takes its place. When nothing follows, it leaves one pass of the loop later. Nothing depends on
when it arrives: losing or delaying it is what a network may do at any time.
"""

from __future__ import annotations

from sava.metadata.peer import PeerMessage
from sava.raft.messages import Append
from sava.raft.types import NodeId


class Outbox:
    __slots__ = ("_due", "_fresh", "_ready")

    def __init__(self) -> None:
        self._ready: list[tuple[NodeId, PeerMessage]] = []
        self._fresh: dict[NodeId, Append] = {}
        """News of this pump."""
        self._due: dict[NodeId, Append] = {}
        """News of the pump before; it leaves with this one."""

    @property
    def has_news(self) -> bool:
        return bool(self._due)

    def add(self, dst: NodeId, message: PeerMessage) -> None:
        if type(message) is Append:
            if not message.entries:
                (self._due if dst in self._due else self._fresh)[dst] = message
                return
            self._due.pop(dst, None)
            self._fresh.pop(dst, None)
        self._ready.append((dst, message))

    def end_pump(self) -> None:
        self._ready += self._due.items()
        self._due, self._fresh = self._fresh, {}

    def take(self) -> list[tuple[NodeId, PeerMessage]]:
        ready, self._ready = self._ready, []
        return ready

    def clear(self) -> None:
        self._ready, self._due, self._fresh = [], {}, {}
