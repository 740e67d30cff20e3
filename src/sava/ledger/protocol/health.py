"""Health: how long an owner waits for a silent mirror, and which mirrors it avoids. Pure: times are given.

**Silence.** A mirror owes an answer from the moment it is behind. It is silent until it says something new:

    owner    append 100 ─▶          append 200 ─▶
    mirror           ◀─ durable 100             (nothing)
    silence             0           begins here ──────────▶ patience is over: the mirror fails

**Patience** has two lengths. A mirror that no acknowledgement needs has ``longest_s``: a message does not
wait for it, and each change of mirrors is a write to the metadata store and a copy. A mirror that *is* needed
blocks every producer, so it has ``FACTOR`` times the p99 of its own answers, but at least ``floor_s``. So a
line with 200 ms of delay and 2 % loss, or a disk that syncs slowly, sets its own measure: its answers were
slow before. A mirror without enough answers to judge by has ``UNMEASURED`` times the floor.

**Damping.** Each mirror that failed by the short patience doubles the floor for a minute, up to
``longest_s``. Without it, an owner on a slow machine would change its mirrors every second, to and fro.

**An owner that was stopped** (SIGSTOP, a suspended machine) wakes up with old times. Silence that it slept
through is not the mirrors': ``stood_still`` takes it away. Without it, the owner would leave all of its
healthy mirrors the moment it continues.

**Avoided.** A mirror that failed is not chosen for ``AVOID_S``. One that refused is not chosen for
``FIRST_REFUSED_S``, and for twice as long with each further refusal, up to ``LONGEST_REFUSED_S``:

    0 s   b's disk is full, b refuses           avoided for 1 s; the ledger has two copies
    1 s   b is tried again, and refuses         avoided for 2 s
    2 s   b has room again
    3 s   b is tried again, and takes it        three copies; with a fixed minute: not before 60 s

Without the doubling, an owner beside a disk that stays full would write its record twice a second. A mirror
that did not refuse for twice the longest pause begins with the first one again.

But an avoided mirror is better than none: when too few others are left for an acknowledgement, avoided ones
are taken again, the one that failed longest ago first. If they are more than there are places, the places go
round among them, with a pause that doubles from ``RETRY_S``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from sava.ledger.protocol.record import StorageId

FLOOR_S: Final = 1.0
FACTOR: Final = 5.0
UNMEASURED: Final = 2.0
ENOUGH_ANSWERS: Final = 16
KEPT_ANSWERS: Final = 256
DAMPED_S: Final = 60.0
AVOID_S: Final = 10.0
FIRST_REFUSED_S: Final = 1.0
LONGEST_REFUSED_S: Final = 60.0
RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 8.0


class Answers:
    """When one mirror answers: how long it takes as a rule, and since when it owes an answer."""

    def __init__(self, now: float) -> None:
        self._owed_since: float | None = now
        self._mark: tuple[int, float] | None = None
        """A position whose way is measured, and when it was appended."""
        self._delays: deque[float] = deque(maxlen=KEPT_ANSWERS)

    def expect(self, now: float, end: int) -> None:
        """The ledger has grown to ``end``, or the connection is lost: the mirror owes an answer."""
        if self._owed_since is None:
            self._owed_since = now
        if self._mark is None:
            self._mark = (end, now)

    def answered(self, now: float, durable: int, end: int) -> None:
        """The mirror has more than before, or has joined: ``durable`` of ``end``."""
        if self._mark is not None and durable >= self._mark[0]:
            self._delays.append(now - self._mark[1])
            self._mark = (end, now) if durable < end else None
        self._owed_since = now if durable < end else None

    def lost(self, now: float) -> None:
        """The connection is gone. What was under way is sent again, so its time would measure the break."""
        self._mark = None
        if self._owed_since is None:
            self._owed_since = now

    def stood_still(self, seconds: float) -> None:
        if self._owed_since is not None:
            self._owed_since += seconds
        self._mark = None

    def silence(self, now: float) -> float:
        """For how long the mirror owes an answer."""
        return 0.0 if self._owed_since is None else max(0.0, now - self._owed_since)

    @property
    def p99(self) -> float | None:
        """Of the time from an append to the mirror's answer; None: there are too few answers to tell."""
        if len(self._delays) < ENOUGH_ANSWERS:
            return None
        ordered = sorted(self._delays)
        return ordered[len(ordered) * 99 // 100]


class Health:
    """Of all mirrors of one ledger."""

    def __init__(self, *, longest_s: float, floor_s: float = FLOOR_S) -> None:
        self._longest_s = longest_s
        self._floor_s = floor_s
        self._trips: deque[float] = deque(maxlen=8)
        """When a mirror failed by the short patience."""
        self._avoided: dict[StorageId, tuple[float, float]] = {}
        """When each failed last, and until when it is avoided."""
        self._refusals: dict[StorageId, tuple[int, float]] = {}
        """How often each refused in succession, and when last."""
        self._retry_at = 0.0
        self._pause = RETRY_S

    def patience(self, answers: Answers, now: float, *, is_needed: bool) -> float:
        if not is_needed:
            return self._longest_s
        p99 = answers.p99
        wanted = UNMEASURED * self._floor_s if p99 is None else max(self._floor_s, FACTOR * p99)
        trips = sum(1 for at in self._trips if now - at < DAMPED_S)
        return min(max(wanted, self._floor_s * 2.0**trips), self._longest_s)

    def failed(self, storage: StorageId, now: float, *, has_refused: bool, is_needed: bool) -> bool:
        """Avoid a mirror; True if it was not avoided before."""
        is_new = storage not in self._avoided
        if is_new and is_needed and not has_refused:
            self._trips.append(now)
        pause = self._refused(storage, now, is_new=is_new) if has_refused else AVOID_S
        self._avoided[storage] = (now, now + pause)
        return is_new

    def _refused(self, storage: StorageId, now: float, *, is_new: bool) -> float:
        """For how long a mirror that refuses is avoided. A refusal that is seen again counts once."""
        recent = now - 2 * LONGEST_REFUSED_S
        self._refusals = {key: refusal for key, refusal in self._refusals.items() if refusal[1] > recent}
        count = self._refusals.get(storage, (0, now))[0]
        if is_new or not count:
            count = min(count + 1, 10)
        self._refusals[storage] = (count, now)
        return min(FIRST_REFUSED_S * 2.0 ** (count - 1), LONGEST_REFUSED_S)

    def recovered(self, storage: StorageId) -> None:
        """A mirror that was taken again for want of others does its work."""
        if self._avoided.pop(storage, None) is not None:
            self._pause = RETRY_S

    def avoided(self, members: Iterable[StorageId], now: float) -> tuple[StorageId, ...]:
        """In the order in which they would be taken again: the one that failed longest ago first, but not in
        place of a present member before ``retried`` is a pause ago."""
        self._avoided = {key: times for key, times in self._avoided.items() if times[1] > now}
        present = frozenset(members) if now < self._retry_at else frozenset()
        return tuple(
            sorted(self._avoided, key=lambda each: (each not in present, self._avoided[each][0], each))
        )

    def retried(self, now: float) -> None:
        """An avoided mirror became a member again."""
        self._retry_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_RETRY_S)
