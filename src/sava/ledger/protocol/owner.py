"""Owner: which bytes go to which mirror, and how far the ledger is committed.

The owner appends to its own disk first (a full disk takes bytes back, so no other disk may have seen them),
then streams the same bytes to every mirror, each at its own pace. All of them sync for themselves and say how
far. The commit position is where enough of them are (``quorum``); it only grows; what lies before it is
acknowledged and delivered, nothing else is.

        own disk  ████████████████████░░░░      ░ written, not yet durable
        mirror a  ██████████████████            ◀ commit: two of three, the own disk among them
        mirror b  ███████████

**Changing mirrors.** A mirror that is dead, slow or full is replaced by a step on the ledger's record: from
the commit position on, these are the members. Between sending that step and knowing its outcome, either
record may be the one that a recovery finds:

    owner        change {o, a, b} to {o, b, c} at 100; no answer yet
    owner        acknowledges 120: durable on o and a
    (the change has happened)
    recoverer  hears b and c, which is enough of {o, b, c}; neither has 120       → lost

So until the outcome is known, a position is committed only if it is by the old members *and* by the new ones,
and by those of every other change that was tried meanwhile. A write whose answer was lost may still take
effect later: reading the old record proves nothing. The way to know is to repeat it: one of the two happens,
and the one that is refused finds the other's record.

**A new mirror begins where the one that left ended**, not at the commit position. What was acknowledged in
between, without the mirror that left, only the other members have.

    {o, a, b}    b dies with 95; o and a acknowledge 100; change to {o, a, c} at 100, to {o, c, d} when a dies
    c from 100   o dies; b is back: it has up to 95, c and d have it from 100 on  → 95..100 wait for o or a
    c from 95    the same; c has what b lacks                                     → closed without o and a

Further back than a window it does not begin: while it catches up, it is of no use to an acknowledgement.

**Degraded.** A change to the own disk alone, with one copy being enough, is the degraded mode. By the rule
above nothing is acknowledged under it before the record says so. Back to normal is one more change.

**FenceAnswer.** A record that the owner did not write, or one member that refuses because of a greater epoch,
means that a recovery ends this ledger. It is final: nothing more is committed, and the broker continues in a
new ledger.

**Trimming** must not outrun the record. If a whole fragment were trimmed while the record still names it, and
the disks of this fragment were then lost, a recovery would wait for bytes that no topic needs. So fragments
are dropped from the record before the last of their bytes is trimmed (``floor``).

The host's part: append to the own disk and call ``appended``; own syncs come as ``Durable`` of the own disk;
one ordered connection for each of ``mirrors``, begun with ``join``; for each, send what ``next_send`` says,
cut between records and verified (if the own log was trimmed over it, connect again: the mirror begins behind
the gap); store ``wanted`` by compare-and-swap on ``revision`` and tell the outcome. Memory is
bounded by ``window``: nothing is kept here, and what is not yet on a mirror is read back from the own log.
Owned by one task.

``Health`` says how long an owner waits for a silent mirror, and which mirrors it avoids; times are given.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sava.ledger.protocol import record as steps
from sava.ledger.protocol.member import (
    Durable,
    Join,
    JoinAnswer,
    LedgerAppend,
    LedgerRefused,
    RefusalReason,
    Trim,
)
from sava.ledger.protocol.record import (
    Fragment,
    LedgerFenced,
    LedgerId,
    LedgerRecord,
    LedgerState,
    Range,
    StorageId,
    committed,
)


@dataclass(slots=True)
class _Stream:
    sent: int
    """Where the next LedgerAppend begins."""
    joined: int
    """Where this connection began."""


class Owner:
    def __init__(
        self, ledger: LedgerId, record: LedgerRecord, revision: int, *, window: int = 8 << 20
    ) -> None:
        self.ledger = ledger
        self.own = record.last.members[0]
        self.record = record
        self.revision = revision
        self._window = window
        self._tried: list[LedgerRecord] = []
        """Changes that may have happened, or may yet happen, on top of ``record``; the last is wanted."""
        self._in_force = [record.last]
        """The last fragment of every record that may be the ledger's."""
        self.is_degraded = record.is_degraded
        """Whether fewer copies are enough at the moment than were asked for, by the record that is stored."""
        self._durable: dict[StorageId, int] = {}
        """What each disk has said; true from then on, so it outlives connections."""
        self._streams: dict[StorageId, _Stream] = {}
        self.end = record.fragments[0].start
        """Of what was appended."""
        self.commit = record.last.start
        self._covered = record.fragments[0].start
        """What lies before it is in registered segments."""
        self.is_fenced = False

    # -- writing -----------------------------------------------------------------------------

    def appended(self, end: int) -> None:
        """The own disk has taken bytes up to ``end`` (not yet durable). Raises LedgerFenced."""
        if self.is_fenced:
            raise LedgerFenced(self.ledger)
        self.end = end

    @property
    def mirrors(self) -> tuple[StorageId, ...]:
        """To whom the ledger is to be streamed, those that are only perhaps members included."""
        every = dict.fromkeys(member for fragment in self._in_force for member in fragment.members)
        every.pop(self.own)
        return tuple(every)

    def join(self, storage: StorageId) -> Join:
        """The first message of a new connection to a mirror."""
        self._streams.pop(storage, None)
        parts = [part for part in self._in_force if storage in part.members]
        start = min([part.start for part in parts], default=self.commit)
        left = [end for end in self._ends_of_former(parts) if start - self._window <= end < start]
        return Join(self.ledger, storage, 0, max(self.floor, min([start, *left])), self.floor)

    def _ends_of_former(self, parts: Sequence[Fragment]) -> Iterator[int]:
        """How far the copies go of those that are no members of ``parts``, and were."""
        members = {member for part in parts for member in part.members}
        for record in (self.record, *self._tried):
            for fragment in record.fragments:
                for member in fragment.members:
                    if member not in members:
                        yield self._durable.get(member, 0)

    def disconnected(self, storage: StorageId) -> None:
        self._streams.pop(storage, None)

    def next_send(self, storage: StorageId) -> Range | None:
        """What to send next: whole records from ``start``, not beyond ``end``, but at least one. None: not
        joined, nothing to send, or enough is under way."""
        stream = self._streams.get(storage)
        if stream is None or self.is_fenced or stream.sent >= self.end:
            return None
        limit = max(self._durable.get(storage, 0), stream.joined) + self._window
        return Range(stream.sent, min(self.end, limit)) if stream.sent < limit else None

    def append(self, storage: StorageId, position: int, data: bytes) -> LedgerAppend:
        """The message for these bytes, which are sent now."""
        self._streams[storage].sent = position + len(data)
        return LedgerAppend(self.ledger, storage, 0, position, data, self.commit, self.floor)

    def trim(self, storage: StorageId) -> Trim:
        """For a mirror that gets no LedgerAppend for a while, and for the own disk."""
        return Trim(self.ledger, storage, 0, self.floor)

    # -- hearing from disks ------------------------------------------------------------------

    def receive(self, message: JoinAnswer | Durable | LedgerRefused) -> None:
        """From a mirror."""
        if isinstance(message, LedgerRefused):
            self._refused(message)
        elif isinstance(message, Durable):
            self.advance(message.storage, message.end)
        else:
            self._streams[message.storage] = _Stream(message.end, message.end)
            self.advance(message.storage, message.durable)

    def _refused(self, message: LedgerRefused) -> None:
        if message.reason is RefusalReason.FENCED:
            self.is_fenced = True
        elif (
            message.reason is RefusalReason.GAP
            and message.end >= self.floor
            and message.storage in self._streams
        ):
            self._streams[message.storage].sent = message.end
        else:
            self._streams.pop(message.storage, None)

    def advance(self, storage: StorageId, end: int) -> None:
        """The disk, a mirror's or the own one, has everything before ``end``."""
        if end > self._durable.get(storage, 0):
            self._durable[storage] = end
            self._recount()

    def _recount(self) -> None:
        if not self.is_fenced:
            reached = min([committed(fragment, self._durable) for fragment in self._in_force])
            self.commit = max(self.commit, reached)

    def durable_end(self, storage: StorageId) -> int:
        """As far as it is known; for figures."""
        return self._durable.get(storage, 0)

    @property
    def own_durable(self) -> int:
        """What the own disk has: all that is committed, also before the first sync. For figures."""
        return max(self.durable_end(self.own), self.commit)

    # -- changing the record -----------------------------------------------------------------

    @property
    def wanted(self) -> LedgerRecord | None:
        """To be stored in place of ``revision``, again and again until the outcome is known."""
        return self._tried[-1] if self._tried and not self.is_fenced else None

    def change(self, members: tuple[StorageId, ...], *, qa: int, asked: tuple[int, int] = (0, 0)) -> None:
        """Want other members from the commit position on; supersedes what was wanted before, which may
        happen all the same. The own disk alone with ``qa`` 1 is the degraded mode. ``asked``: see
        ``record.changed``. Raises LedgerFenced, WrongStep."""
        other = steps.changed(self.record, self.commit, members, qa=qa, asked=asked)
        # What is in segments needs no owner on record any more; if nothing is written for long, nothing else
        # would say so.
        self._want(steps.dropped(other, self._covered))

    def covered(self, floor: int) -> None:
        """Everything before ``floor`` is in registered segments. Wants fragments to be dropped from the
        record if they hold the trimming up."""
        self._covered = max(self._covered, min(floor, self.commit))
        if not self._tried and not self.is_fenced:
            self._want(steps.dropped(self.record, self._covered))

    @property
    def floor(self) -> int:
        """How far the disks may be trimmed now."""
        borders = [part.start for record in (self.record, *self._tried) for part in record.fragments[1:2]]
        return min([self._covered, *borders])

    def _want(self, record: LedgerRecord) -> None:
        if self.is_fenced:
            raise LedgerFenced(self.ledger)
        if record != self.record and record not in self._tried:
            self._tried.append(record)
            self._in_force.append(record.last)

    def stored(self, record: LedgerRecord, revision: int) -> None:
        """The record is this one, by our own hand: no other try on the former revision can happen any
        more."""
        self.record, self.revision = record, revision
        self.is_degraded = record.is_degraded
        self._tried.clear()
        self._in_force = [record.last]
        self._recount()

    def found(self, record: LedgerRecord | None, revision: int) -> None:
        """A try was refused, and this is there instead; None: the record is gone."""
        if record is not None and record.state is LedgerState.OPEN and record in self._tried:
            self.stored(record, revision)
        elif revision != self.revision:
            self.is_fenced = True


# -- health --------------------------------------------------------------------------------------------------


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
    """Of all mirrors of one ledger: how long to wait for one, and which to avoid."""

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
