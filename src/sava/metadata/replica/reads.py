"""Reads: linearizable read points, many for one round to the majority.

A read may use a round only if the round began after the read was asked for, or it could miss a write
acknowledged in between. So all that arrived before a pump share the round that this pump begins: locally
asked reads become one request (the *carrier*), which goes to the leader like any other, and at the leader
the carriers of all nodes, and the keep-alives, share one token.
"""

from __future__ import annotations

from collections.abc import Callable

from sava.metadata.peer import Failed, ReadIndex, Reply
from sava.metadata.replica.requests import Desk, Pending, living
from sava.raft.core import RaftCore
from sava.raft.errors import Busy, NotLeader

Pulse = Callable[[], None]
"""The leader's own question whether it still leads."""


class Reads:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._arrived: list[Pending] = []
        self._next: list[Pending | Pulse] = []
        self._rounds: dict[int, list[Pending | Pulse]] = {}
        self._token = 0

    # -- any node ----------------------------------------------------------------------------------------

    def add(self, pending: Pending) -> None:
        self._arrived.append(pending)

    def sweep(self) -> None:
        self._arrived = living(self._arrived)

    def gather(self) -> None:
        """Make one request of all reads that arrived, and let it find the leader."""
        if not self._arrived:
            return
        members = living(self._arrived)
        self._arrived.clear()
        if not members:
            return
        deadline = max(pending.deadline_ms for pending in members)
        carrier = self._desk.open(ReadIndex(), lambda reply: self._arrive(members, reply), deadline)
        self._desk.wait(carrier)

    def _arrive(self, members: list[Pending], reply: Reply) -> None:
        for pending in members:
            if isinstance(reply, Failed):
                pending.reason = reply.message
            self._desk.answer(pending, reply)

    # -- the leader --------------------------------------------------------------------------------------

    def confirm(self, asker: Pending | Pulse) -> None:
        """Tell ``asker`` the read index of a round that has not begun yet."""
        self._next.append(asker)

    def flush(self, core: RaftCore) -> None:
        if not self._next:
            return
        self._token += 1
        try:
            core.request_read(self._token)
        except Busy:
            return
        except NotLeader as error:
            self.lost_leadership(str(error))
            return
        self._rounds[self._token] = self._next
        self._next = []

    def ready(self, token: int) -> list[Pending | Pulse]:
        """Who may read at the index that came with ``token``."""
        return self._rounds.pop(token, [])

    def failed(self, token: int, reason: str) -> None:
        self._give_back(self._rounds.pop(token, []), reason)

    def lost_leadership(self, reason: str) -> None:
        """Reads have no effect: everybody may ask elsewhere. (Rounds under way are failed by the core.)"""
        askers, self._next = self._next, []
        self._give_back(askers, reason)

    def _give_back(self, askers: list[Pending | Pulse], reason: str) -> None:
        for asker in askers:
            if isinstance(asker, Pending):
                self._desk.retry(asker, reason)
