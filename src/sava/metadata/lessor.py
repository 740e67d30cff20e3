"""Lessor: the leader's watch over lease deadlines. Volatile, leader-only, monotonic; the replicated half is
in ``tables.py``.

Nothing here is replicated and no wall clock is read. Deadlines by wall clock let one clock that jumps forward
expire every broker at once, a cluster-wide failover for nothing. A new leader does not know when a
holder was last heard, so it gives every lease its full TTL and a grace again: a lease may end late, never
early. The same holds after any time without a quorum: a leader cut off from the others must not conclude that
*they* are dead, so ``quorum_lost`` begins every TTL again.

A keep-alive is an update of leader memory, not a log entry: with thousands of holders the log would consist
of little else. Only a keep-alive that meets an expiry already proposed must go through the log
(``LeaseTouch``), where the order of the two decides.

Guard: when more than half of the leases (of three or more) fall due in one scan, the likelier cause is this
node (a pause, a cut cable), so they are given one more TTL and ``alarms`` counts it.

The clock is a parameter of every call, in milliseconds. One heap entry per lease; a keep-alive only moves the
true deadline, and the entry is moved when it surfaces.
"""

from __future__ import annotations

import heapq

from sava.metadata.commands import (
    Command,
    Done,
    LeaseExpire,
    LeaseGrant,
    LeaseResult,
    LeaseRevoke,
    LeaseTouch,
    Result,
)
from sava.metadata.errors import LeaseNotFound, Unavailable
from sava.metadata.machine.state_machine import StateMachine

GUARD_MIN_LEASES = 3


class Lessor:
    """``grace_ms`` is added when a leader begins: one election timeout, in which holders find it.
    ``max_batch`` bounds the expiries of one scan, so that a mass expiry does not fill the log ahead of
    everything else."""

    def __init__(self, machine: StateMachine, *, grace_ms: int = 2_000, max_batch: int = 64) -> None:
        self._machine = machine
        self._grace_ms = grace_ms
        self._max_batch = max_batch
        self._leading = False
        self._deadlines: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._in_flight: set[int] = set()
        self._spared: set[int] = set()
        self.alarms = 0
        """Scans in which the guard held back a mass expiry."""

    @property
    def is_leading(self) -> bool:
        return self._leading

    @property
    def next_deadline_ms(self) -> int | None:
        """No scan before it can find anything. (It may be too early: keep-alives do not move it.)"""
        return self._heap[0][0] if self._heap else None

    # -- leadership ------------------------------------------------------------------------------------------

    def become_leader(self, now_ms: int, machine: StateMachine | None = None) -> None:
        """Call once everything that earlier leaders committed is applied. ``machine`` replaces the one of
        before a snapshot install."""
        if machine is not None:
            self._machine = machine
        self._forget_all()
        self._leading = True
        self._arm_all(now_ms)

    def step_down(self) -> None:
        self._forget_all()
        self._leading = False

    def quorum_lost(self, now_ms: int) -> None:
        """The leader cannot confirm that it still leads; call on every tick while that lasts. No lease ends
        before the leader has held its quorum for the lease's full TTL."""
        if self._leading:
            self._spared.clear()
            self._arm_all(now_ms)

    # -- one lease ------------------------------------------------------------------------------------------

    def keep_alive(self, lease: int, now_ms: int) -> int | None:
        """The TTL when renewed here; None when an expiry of this lease is already in the log: propose a
        ``LeaseTouch`` and answer with its result. Telling the holder 'alive' from memory while the log is
        about to end the lease would be a lie. Raises LeaseNotFound, and Unavailable on a node that does not
        lead."""
        if not self._leading:
            raise Unavailable("leases are kept alive by the leader")
        found = self._machine.leases.by_id.get(lease)
        if found is None:
            raise LeaseNotFound(lease)
        if lease in self._in_flight:
            return None
        self._renew(lease, found.ttl_ms, now_ms)
        return found.ttl_ms

    def observe(self, command: Command, result: Result, now_ms: int) -> None:
        """Call for each applied lease command (any command will do): one place that knows which hook it
        means."""
        match command, result:
            case (LeaseGrant(), LeaseResult(lease, ttl_ms)):
                self.granted(lease, ttl_ms, now_ms)
            case (LeaseTouch(), LeaseResult(lease, ttl_ms)):
                self.touched(lease, ttl_ms, now_ms)
            case (LeaseRevoke(lease), Done()) | (LeaseExpire(lease), Done(changed=True)):
                self.ended(lease)
            case (LeaseExpire(lease), _):
                self.survived(lease, now_ms)

    def granted(self, lease: int, ttl_ms: int, now_ms: int) -> None:
        self._renew(lease, ttl_ms, now_ms)

    def touched(self, lease: int, ttl_ms: int, now_ms: int) -> None:
        """A keep-alive came through the log: whatever expiry is still on its way is void by its
        generation."""
        self._in_flight.discard(lease)
        self._renew(lease, ttl_ms, now_ms)

    def survived(self, lease: int, now_ms: int) -> None:
        """A proposed expiry had no effect (a newer generation, a deposed proposer), or is certain never to
        have one: a whole TTL again. While it may still apply, say nothing; the next scan after a TTL
        repeats it."""
        self._in_flight.discard(lease)
        found = self._machine.leases.by_id.get(lease)
        if found is not None:
            self._renew(lease, found.ttl_ms, now_ms)

    def ended(self, lease: int) -> None:
        self._deadlines.pop(lease, None)
        self._in_flight.discard(lease)
        self._spared.discard(lease)

    # -- expiry ----------------------------------------------------------------------------------------------

    def due(self, now_ms: int) -> list[LeaseExpire]:
        """Expiries to propose now, at most ``max_batch``, earliest deadline first. A lease is not proposed
        again while its expiry may still be in the log; after one more TTL it is, harmlessly, in case the
        first was lost."""
        if not self._leading:
            return []
        overdue = self._pop_overdue(now_ms)
        if len(self._deadlines) >= GUARD_MIN_LEASES and len(overdue) * 2 > len(self._deadlines):
            overdue = self._spare(overdue, now_ms)
        expiries = []
        for _, lease in overdue[: self._max_batch]:
            found = self._machine.leases.by_id.get(lease)
            if found is None:
                self.ended(lease)
                continue
            self._in_flight.add(lease)
            self._set(lease, now_ms + found.ttl_ms)
            expiries.append(LeaseExpire(lease, found.generation))
        for entry in overdue[self._max_batch :]:
            heapq.heappush(self._heap, entry)
        return expiries

    def _pop_overdue(self, now_ms: int) -> list[tuple[int, int]]:
        overdue = []
        heap = self._heap
        while heap and heap[0][0] <= now_ms:
            _, lease = heapq.heappop(heap)
            deadline = self._deadlines.get(lease)
            if deadline is None:
                continue
            if deadline > now_ms:
                heapq.heappush(heap, (deadline, lease))
            else:
                overdue.append((deadline, lease))
        return sorted(overdue)

    def _spare(self, overdue: list[tuple[int, int]], now_ms: int) -> list[tuple[int, int]]:
        """One more TTL for those that did not have it yet; returns the others."""
        fresh = [lease for _, lease in overdue if lease not in self._spared and lease not in self._in_flight]
        if not fresh:
            return overdue
        self.alarms += 1
        for lease in fresh:
            found = self._machine.leases.by_id.get(lease)
            self._spared.add(lease)
            self._set(lease, now_ms + (found.ttl_ms if found is not None else 0))
        held_back = set(fresh)
        return [entry for entry in overdue if entry[1] not in held_back]

    # -- deadlines -------------------------------------------------------------------------------------------

    def _renew(self, lease: int, ttl_ms: int, now_ms: int) -> None:
        if not self._leading:
            return
        self._spared.discard(lease)
        known = lease in self._deadlines
        self._deadlines[lease] = now_ms + ttl_ms
        if not known:
            heapq.heappush(self._heap, (now_ms + ttl_ms, lease))

    def _set(self, lease: int, deadline: int) -> None:
        """For a lease whose heap entry was just popped."""
        self._deadlines[lease] = deadline
        heapq.heappush(self._heap, (deadline, lease))

    def _arm_all(self, now_ms: int) -> None:
        self._deadlines = {x.lease: now_ms + x.ttl_ms + self._grace_ms for x in self._machine.leases}
        self._heap = [(deadline, lease) for lease, deadline in self._deadlines.items()]
        heapq.heapify(self._heap)

    def _forget_all(self) -> None:
        self._deadlines.clear()
        self._heap.clear()
        self._in_flight.clear()
        self._spared.clear()
