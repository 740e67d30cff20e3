"""History: what the cluster as a whole has applied, command by command.

The first replica that applies an index writes the line; every other replica that applies it, in this life or
a later one, must produce the same line (I5, I7): same entry, same result, same events. So the history is both
an invariant and the reference that clients' observations are compared with: replicas agree on it by
consensus, and a client that saw something else saw something wrong."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import msgspec

from sava.metadata.commands import CommandRefused, Event, KeyValue, Proposal
from sava.metadata.machine.state_machine import Applied

_encode = msgspec.msgpack.Encoder().encode


class Violation(AssertionError):
    """An invariant does not hold. ``rule`` is its number in ``tests.sim.invariants``."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


class Line(msgspec.Struct, frozen=True):
    term: int
    data: bytes
    outcome: bytes
    by: int


class History:
    def __init__(self) -> None:
        self.lines: dict[int, Line] = {}
        self.keys: dict[str, list[tuple[int, KeyValue | None]]] = {}
        """Per key, its states in order of revision."""
        self.revisions: list[int] = []
        """Revisions in order; consecutive by I9."""
        self.events: dict[int, tuple[Event, ...]] = {}
        self.values: dict[bytes, tuple[str, int]] = {}
        """Where each (unique) value took effect."""
        self.expired: list[tuple[int, int]] = []
        """Leases that ended, with the index that ended them."""
        self._requests: dict[tuple[int, int], tuple[int, bytes]] = {}

    def apply(
        self, node: int, index: int, term: int, data: bytes, proposal: Proposal, applied: Applied
    ) -> bool:
        """A replica applied a command; True when it was the first to."""
        outcome = _encode((applied.result, applied.events))
        known = self.lines.get(index)
        if known is None:
            self.lines[index] = Line(term, data, outcome, node)
            self._extend(index, proposal, applied)
            return True
        if known.term != term or known.data != data:
            raise Violation(
                "I7", f"index {index}: node {node} applies another entry than node {known.by} did"
            )
        if known.outcome != outcome:
            raise Violation(
                "I5",
                f"index {index}: node {node} got {applied.result}, node {known.by} got another outcome for "
                "the same "
                f"entry {proposal}",
            )
        return False

    def _extend(self, index: int, proposal: Proposal, applied: Applied) -> None:
        self._check_once(index, proposal, applied)
        if not applied.events:
            return
        revision = applied.events[0].revision
        if self.revisions and revision != self.revisions[-1] + 1:
            raise Violation("I9", f"index {index} made revision {revision} after {self.revisions[-1]}")
        keys = [event.key for event in applied.events]
        if keys != sorted(keys) or any(event.revision != revision for event in applied.events):
            raise Violation(
                "I15", f"index {index}: events of one revision, sorted by key, but {applied.events}"
            )
        self.revisions.append(revision)
        self.events[revision] = applied.events
        for event in applied.events:
            self._take_event(event)

    def _take_event(self, event: Event) -> None:
        states = self.keys.setdefault(event.key, [])
        last = states[-1][1] if states else None
        if event.prev != last:
            raise Violation(
                "I20", f"revision {event.revision}: {event.key} was {last}, the event says {event.prev}"
            )
        states.append((event.revision, event.kv))
        if event.kv is not None and event.kv.value.startswith(b"v"):
            if event.kv.value in self.values and self.values[event.kv.value][0] == event.key:
                raise Violation("I13", f"{event.kv.value[:40]!r} took effect twice on {event.key}")
            self.values[event.kv.value] = (event.key, event.revision)

    def _check_once(self, index: int, proposal: Proposal, applied: Applied) -> None:
        """I13: whatever is sent twice under one (session, seq) has effect once, and the copy gets the same
        answer."""
        if not proposal.session:
            return
        request = (proposal.session, proposal.seq)
        result = _encode(applied.result)
        first = self._requests.get(request)
        if first is None:
            if not isinstance(applied.result, CommandRefused):
                self._requests[request] = (index, result)
            return
        if applied.events:
            raise Violation("I13", f"request {request} took effect at {first[0]} and again at {index}")
        if result != first[1] and not isinstance(applied.result, CommandRefused):
            raise Violation(
                "I13", f"the copy of request {request} at {index} got another answer than at {first[0]}"
            )

    # -- questions -------------------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        return self.revisions[-1] if self.revisions else 0

    def at(self, key: str, revision: int) -> KeyValue | None:
        """The key as of ``revision``."""
        states = self.keys.get(key)
        if not states:
            return None
        position = bisect_right(states, revision, key=_revision_of)
        return states[position - 1][1] if position else None

    def prefix_at(self, prefix: str, revision: int) -> tuple[KeyValue, ...]:
        found = [self.at(key, revision) for key in sorted(self.keys) if key.startswith(prefix)]
        return tuple(kv for kv in found if kv is not None)

    def between(self, prefix: str, low: int, high: int) -> list[tuple[Event, ...]]:
        """Events under ``prefix`` with revisions in low..high, one tuple per revision."""
        batches = []
        for revision in range(low, high + 1):
            batch = tuple(event for event in self.events.get(revision, ()) if event.key.startswith(prefix))
            if batch:
                batches.append(batch)
        return batches


def _revision_of(state: tuple[int, Any]) -> int:
    return state[0]
