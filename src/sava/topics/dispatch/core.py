"""Dispatch: what all types of subscriptions share, and those that are dispatched in ranges of offsets. No
event loop, no clock: its driver passes the time.

Every offset of the topic is, for a subscription, in one of these places:

    acked        below the cursor, or in its ranges beyond
    outstanding  sent at least once and not acked: in flight, waiting for its next delivery, ready for it,
                 blocked, or on its way to the dead-letter topic
    ahead        read and passed over, for its consumer cannot take it yet (key-shared only)
    new          everything else from ``position`` on

``outstanding`` is what the window bounds. An ack of something that is acked already changes nothing. An ack
of something new is of the life before: the broker was restarted, and a client repeats acks that were not
stored any more. It counts, unless the subscription was moved in this life: an ack from before a ``seek`` must
not take away what was to be read again.

The driver asks ``wanted`` which offset it should read, reads (which takes time, and anything may happen
meanwhile), and offers what it has read. ``offer`` decides by the state of that moment, so nothing has to be
undone if a consumer left or the subscription was moved while the read was under way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from sava.topics.cursors import SubscriptionCursor
from sava.topics.dispatch.members import DispatchMember, Failure, Failures, Flight, InFlight
from sava.topics.ranges import IntervalSet, Range
from sava.topics.specs import DeadLetterPolicy, FailurePolicy, SubscriptionSpec, SubscriptionType

MAX_FRAGMENTS: Final = 10_000
"""Ranges of unacked messages beyond which nothing new is sent: the cursor's record grows with them."""
MAX_SETTLED: Final = 4 * MAX_FRAGMENTS
"""The same of acks that come from elsewhere, where other messages lie between."""
ACK_TIMEOUT_REASON: Final = "no ack in time"


@dataclass(frozen=True, slots=True)
class Page:
    """A stretch of the topic that was read."""

    start: int
    end: int
    size: int
    """About how many bytes."""
    available: int = 0
    """How many messages there are from ``start`` on, this page among them."""
    keys: Callable[[int, int], Sequence[str]] = field(default=lambda start, end: [""] * (end - start))
    """The effective keys of a range of it."""

    def share(self, count: int) -> int:
        """About how many bytes of it ``count`` messages are."""
        return self.size * count // (self.end - self.start)


@dataclass(slots=True)
class Counters:
    """Messages, and bytes of those delivered, since the subscription was loaded."""

    delivered: int = 0
    delivered_bytes: int = 0
    redelivered: int = 0
    acked: int = 0
    nacked: int = 0
    timed_out: int = 0
    dropped: int = 0
    dead_lettered: int = 0
    skipped_by_filter: int = 0
    skipped_by_retention: int = 0

    def add(self, other: Counters) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Dispatcher(ABC):
    def __init__(self, spec: SubscriptionSpec, cursor: SubscriptionCursor, pace: Pace) -> None:
        self.spec = spec
        self.cursor = cursor
        self.position = cursor.next_offset
        """Everything below was looked at: acked, outstanding, or ahead."""
        self.members: dict[str, DispatchMember] = {}
        """In order of attachment."""
        self.outstanding = IntervalSet()
        self.counters = Counters()
        self.failures = Failures()
        self._in_flight = InFlight()
        self._pace = pace
        self._was_moved = False

    # -- what the types decide -----------------------------------------------------------------

    @abstractmethod
    def wanted(self, end: int, now: float) -> int | None:
        """The offset to read, of a topic that ends at ``end``; None if nothing could be sent."""

    @abstractmethod
    def offer(self, page: Page, now: float) -> list[Flight]:
        """What of the page goes to whom, now."""

    @abstractmethod
    def _members_changed(self) -> None: ...

    @abstractmethod
    def _make_ready(self, ranges: Iterable[Range]) -> None:
        """Outstanding messages that are not in flight are to be sent again, at once."""

    @abstractmethod
    def _delay(self, ranges: Iterable[Range]) -> None:
        """Outstanding messages will be ready later; ``failures`` knows when."""

    @abstractmethod
    def _returned(self, start: int, end: int, *, has_failed: bool) -> None:
        """Messages are in flight no more, and still outstanding."""

    @abstractmethod
    def _resolved(self, start: int, end: int, flown: list[tuple[int, int, Flight]]) -> None:
        """Messages are outstanding no more; ``flown`` of them were in flight."""

    @abstractmethod
    def _forget_all(self) -> None: ...

    # -- members -------------------------------------------------------------------------------

    def attach(self, member: DispatchMember) -> DispatchMember | None:
        """Join, in the place of the member of the same name if there is one, which is returned: what it had
        goes out again."""
        replaced = self.members.get(member.name)
        if replaced is not None:
            self._release_flights(replaced)
        self.members[member.name] = member
        self._members_changed()
        return replaced

    def detach(self, member: DispatchMember) -> None:
        """What the member had goes to others at once, in order, before anything newer."""
        if self.members.get(member.name) is member:
            self._release_flights(member)
            del self.members[member.name]
            self._members_changed()

    def _release_flights(self, member: DispatchMember) -> None:
        for flight in self._in_flight.of(member):
            self._void(flight)
            self._return(flight)

    def _void(self, flight: Flight) -> None:
        """What of the flight is still in the consumer's queue was never sent."""
        flight.is_void = True
        flight.member.credits += flight.unfetched
        flight.member.queued_bytes -= flight.queued_bytes
        flight.unfetched = flight.queued_bytes = 0

    def _return(self, flight: Flight) -> None:
        """What is left of the flight is to be sent again, as if it had never been sent."""
        ranges = self._in_flight.take(flight)
        for start, end in ranges:
            self._returned(start, end, has_failed=False)
        self._make_ready(ranges)

    def fetched(self, flight: Flight, count: int, now: float) -> None:
        """The consumer has taken ``count`` messages of the flight from its queue."""
        member = flight.member
        member.is_stalled = False
        flight.unfetched -= count
        if not flight.unfetched:
            member.queued_bytes -= flight.queued_bytes
            flight.queued_bytes = 0
        self._in_flight.restart(flight, now)

    # -- answers -------------------------------------------------------------------------------

    def ack(self, ranges: Sequence[Range], log_end: int = 0) -> int:
        """How many messages it was that were not acked before. Below ``log_end`` what was never sent counts
        too."""
        count = sum(self._resolve(start, end) for start, end in ranges)
        if not self._was_moved:
            count += sum(self._ack_unsent(start, min(end, log_end)) for start, end in ranges)
        self.counters.acked += count
        return count

    def _ack_unsent(self, start: int, end: int) -> int:
        start = max(start, self.position)
        if start >= end or self.cursor.fragments > MAX_FRAGMENTS:
            return 0
        return self.cursor.ack(start, end)

    def _resolve(self, start: int, end: int) -> int:
        count = 0
        for first, last in self.outstanding.remove(start, end):
            flown = self._in_flight.remove(first, last)
            self.failures.forget(first, last)
            self.cursor.ack(first, last)
            self._resolved(first, last, flown)
            count += last - first
        return count

    def nack(self, ranges: Iterable[Range], now: float, *, delay_s: float = 0.0, reason: str = "") -> int:
        """How many messages it was that were in flight."""
        hit = [part for start, end in ranges for part in self._in_flight.remove(start, end)]
        count = self._fail([(start, end, flight.attempt) for start, end, flight in hit], now, delay_s, reason)
        self.counters.nacked += count
        return count

    def _fail(self, parts: Sequence[tuple[int, int, int]], now: float, delay_s: float, reason: str) -> int:
        """``parts`` (start, end, attempt) came back."""
        policy = self.spec.failure_policy
        ready: list[Range] = []
        delayed: list[Range] = []
        for start, end, _ in parts:
            self._returned(start, end, has_failed=True)
        for start, end, attempt in parts:
            if policy.is_exhausted(attempt):
                self._give_up(start, end, Failure(attempt, reason))
                continue
            self.failures.attempts.set(start, end, attempt + 1)
            wait_s = max(policy.delay_ms(attempt) / 1000, delay_s)
            wait_s = min(wait_s, policy.max_redelivery_delay_ms / 1000)
            if wait_s > 0:
                self.failures.wait(start, end, now + wait_s)
            (delayed if wait_s > 0 else ready).append((start, end))
        self._delay(delayed)
        self._make_ready(ready)
        return sum(end - start for start, end, _ in parts)

    def _give_up(self, start: int, end: int, failure: Failure) -> None:
        match self.spec.failure_policy.dead_letter:
            case DeadLetterPolicy.DROP:
                self.counters.dropped += self._resolve(start, end)
            case DeadLetterPolicy.BLOCK:
                self.failures.blocked.set(start, end, failure)
            case DeadLetterPolicy.DEAD_LETTER:
                self.failures.dead.set(start, end, failure)

    def dead_lettered(self, ranges: Iterable[Range]) -> None:
        """The messages are safe in the dead-letter topic."""
        for start, end in ranges:
            for first, last, _ in self.failures.dead.within(start, end):
                self.counters.dead_lettered += self._resolve(first, last)

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Do what is due."""
        for flight in self._timed_out(now):
            if not flight.is_fetched:
                self._take_back(flight.member)
            elif not flight.is_void:
                parts = [(start, end, flight.attempt) for start, end in self._in_flight.take(flight)]
                self.counters.timed_out += self._fail(parts, now, 0.0, ACK_TIMEOUT_REASON)
        due = self.failures.pop_due(now)
        if due:
            self._make_ready(due)

    def _take_back(self, member: DispatchMember) -> None:
        """From a consumer that does not read. Nothing has failed, but others may do better. All of its queue
        is taken, for what stayed there would come before what was taken."""
        member.is_stalled = True
        for flight in self._in_flight.of(member):
            if not flight.is_fetched:
                self._void(flight)
                self._return(flight)

    def _timed_out(self, now: float) -> list[Flight]:
        timeout = self.spec.failure_policy.ack_timeout_ms / 1000
        found: list[Flight] = []
        if timeout:
            for flight in self._in_flight:
                if flight.since + timeout > now:
                    break
                found.append(flight)
        return found

    def wake_at(self, now: float) -> float | None:
        """When ``tick`` has something to do, or more may be sent, without anything else happening."""
        times = [self.failures.next_due, self._pace.ready_at(now)]
        timeout = self.spec.failure_policy.ack_timeout_ms / 1000
        oldest = self._in_flight.oldest
        if timeout and oldest is not None:
            times.append(oldest.since + timeout)
        return min((time for time in times if time is not None), default=None)

    # -- changes from outside --------------------------------------------------------------------

    def configure(self, spec: SubscriptionSpec, now: float) -> None:
        self.spec = spec
        policy = spec.failure_policy
        self.failures.shorten(now + policy.max_redelivery_delay_ms / 1000)
        for start, end, failure in list(self.failures.blocked):
            if policy.dead_letter is not DeadLetterPolicy.BLOCK or not policy.is_exhausted(failure.attempt):
                self.failures.blocked.remove(start, end)
                self._release(start, end, failure, policy)

    def _release(self, start: int, end: int, failure: Failure, policy: FailurePolicy) -> None:
        if policy.is_exhausted(failure.attempt):
            self._give_up(start, end, failure)
            return
        self.failures.attempts.set(start, end, failure.attempt + 1)
        self._make_ready([(start, end)])

    def seek(self, offset: int) -> None:
        """Continue there, forward or back. Everything that is under way is forgotten."""
        for flight in self._in_flight:
            self._void(flight)
        self._in_flight.clear()
        self.outstanding.clear()
        self.failures.clear()
        self._forget_all()
        self.cursor.seek(offset)
        self.position = offset
        self._was_moved = True

    def skip_to(self, start: int) -> int:
        """Retention has removed what was below: how many messages that were not acked."""
        lost = self._pass(start)
        self.counters.skipped_by_retention += lost
        return lost

    def advance(self, offset: int) -> int:
        """What is below is done, sent or not, and wherever it was sought to: how many messages that were not
        acked."""
        count = self._pass(offset)
        self.counters.acked += count
        return count

    def settle(self, ranges: Iterable[Range]) -> int:
        """These were done elsewhere, sent here or not, and wherever it was sought to: how many messages that
        were not acked. Beyond ``MAX_SETTLED`` pieces they are not remembered, and delivered again."""
        count = 0
        for start, end in ranges:
            for first, last in self.cursor.unacked(start, end):
                self._resolve(first, last)
                if first == self.cursor.next_offset or self.cursor.fragments < MAX_SETTLED:
                    self.cursor.ack(first, last)
                    count += last - first
        self.counters.acked += count
        return count

    def _pass(self, offset: int) -> int:
        unacked = self.cursor.unacked(self.cursor.next_offset, offset)
        for begin, end in unacked:
            self._resolve(begin, end)
            self.cursor.ack(begin, end)
        self.position = max(self.position, offset)
        return sum(end - begin for begin, end in unacked)

    # -- knowing -------------------------------------------------------------------------------

    @property
    def is_blocked(self) -> bool:
        return bool(self.failures.blocked)

    @property
    @abstractmethod
    def is_behind(self) -> bool:
        """Whether something below ``position`` is to be sent."""

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def _window(self) -> int:
        """How many messages may be sent that were never sent before."""
        if self.outstanding.fragments > MAX_FRAGMENTS:
            return 0
        return self.spec.max_unacked_messages - self.outstanding.count

    def _send(
        self, member: DispatchMember, ranges: tuple[Range, ...], attempt: int, size: int, now: float
    ) -> Flight:
        count = sum(end - start for start, end in ranges)
        added = sum(self.outstanding.add(start, end) for start, end in ranges)
        flight = Flight(member, ranges, attempt, now, count, count, size)
        self._in_flight.add(flight)
        member.credits -= count
        member.queued_bytes += size
        self._pace.spend(count)
        self.counters.delivered += count
        self.counters.delivered_bytes += size
        self.counters.redelivered += count - added
        return flight


UNLIMITED: Final = 1 << 62
_BURST_S: Final = 0.1
_TURN_S: Final = 0.02
"""Worth waking up for."""


class Pace:
    """The dispatch rate: at most ``rate`` messages a second, by waiting. A token bucket that holds a tenth of
    a second's worth."""

    def __init__(self, rate: Callable[[], int]) -> None:
        """``rate`` is asked each time, so a change takes effect at once; 0 is no limit."""
        self._rate = rate
        self._tokens: float | None = None
        self._at = 0.0

    def allowance(self, now: float) -> int:
        """How many messages may go now."""
        rate = self._rate()
        if rate <= 0:
            self._tokens = None
            return UNLIMITED
        most = max(1.0, rate * _BURST_S)
        tokens = most if self._tokens is None else self._tokens + (now - self._at) * rate
        self._tokens, self._at = min(most, tokens), now
        return int(self._tokens)

    def spend(self, count: int) -> None:
        if self._tokens is not None:
            self._tokens -= count

    def ready_at(self, now: float) -> float | None:
        """When to look again, if nothing may go now."""
        if self.allowance(now) > 0 or self._tokens is None:
            return None
        rate = self._rate()
        return now + (max(1.0, rate * _TURN_S) - self._tokens) / rate


# -- exclusive, failover, shared -----------------------------------------------------------------------------


class SliceDispatch(Dispatcher):
    """Dispatch of exclusive, failover and shared subscriptions, in ranges of offsets.

    Exclusive and failover have one active member, the one that attached first, which gets everything in
    order. Shared ones cut what is there into slices and give them out in turn. What has to be sent again goes
    first, in the order of offsets."""

    def __init__(self, spec: SubscriptionSpec, cursor: SubscriptionCursor, pace: Pace) -> None:
        super().__init__(spec, cursor, pace)
        self._ready = IntervalSet()
        """To be sent again, now."""
        self._last = ""
        """Who got the last slice."""

    def wanted(self, end: int, now: float) -> int | None:
        if not any(member.has_room for member in self._candidates()) or not self._pace.allowance(now):
            return None
        if self._ready:
            return self._ready.first
        if self.is_blocked or self._window() <= 0:
            return None
        if self.position >= end:
            return None
        gaps = self.cursor.unacked(self.position, end)
        self.position = gaps[0][0] if gaps else end
        return self.position if gaps else None

    def offer(self, page: Page, now: float) -> list[Flight]:
        sent: list[Flight] = []
        if self._ready and not page.start <= self._ready.first < page.end:
            return sent  # something that comes first became ready while the page was read
        for start, end in self._ready.within(page.start, page.end):
            for first, last, attempt in self.failures.by_attempt(start, end):
                done = self._spread(page, first, last, attempt, self._ready.count, now, sent)
                self._ready.remove(first, done)
                if done < last:
                    return sent
        if page.start <= self.position < page.end and not self._ready and not self.is_blocked:
            self._offer_new(page, now, sent)
        return sent

    def _offer_new(self, page: Page, now: float, sent: list[Flight]) -> None:
        for start, end in self.cursor.unacked(self.position, page.end):
            last = min(end, start + self._window())
            there = page.available - (start - page.start)
            self.position = self._spread(page, start, last, 1, there, now, sent)
            if self.position < end:
                return
        self.position = page.end

    def _spread(
        self, page: Page, start: int, end: int, attempt: int, there: int, now: float, sent: list[Flight]
    ) -> int:
        """Send the range, as far as members and pace allow; where it stopped. ``there`` is how many messages
        could be sent if it were up to the members: a member's share of them is a slice."""
        share = 0
        while start < end:
            allowed = self._pace.allowance(now)
            members = [member for member in self._candidates() if member.has_room]
            if not members or allowed <= 0:
                break
            member = self._next(members)
            share = share or -(-max(there, end - start) // len(members))
            count = min(end - start, share, member.credits, allowed)
            sent.append(self._send(member, ((start, start + count),), attempt, page.share(count), now))
            start += count
        return start

    def _candidates(self) -> Iterable[DispatchMember]:
        if self.spec.type is SubscriptionType.SHARED:
            return self.members.values()
        return islice(self.members.values(), 1)

    def serves(self, name: str) -> bool:
        """Whether the member of this name is one that gets messages."""
        return any(member.name == name for member in self._candidates())

    @property
    def is_behind(self) -> bool:
        return bool(self._ready)

    def _next(self, members: list[DispatchMember]) -> DispatchMember:
        """Whose turn it is: the next one after the last in order of attachment."""
        if len(members) > 1:
            order = list(self.members)
            last = order.index(self._last) if self._last in self.members else -1
            rank = {name: (place - last - 1) % len(order) for place, name in enumerate(order)}
            member = min(members, key=lambda each: rank[each.name])
        else:
            member = members[0]
        self._last = member.name
        return member

    def _members_changed(self) -> None:
        pass

    def _make_ready(self, ranges: Iterable[Range]) -> None:
        for start, end in ranges:
            self._ready.add(start, end)

    def _delay(self, ranges: Iterable[Range]) -> None:
        pass

    def _returned(self, start: int, end: int, *, has_failed: bool) -> None:
        pass

    def _resolved(self, start: int, end: int, flown: list[tuple[int, int, Flight]]) -> None:
        if self._ready:
            self._ready.remove(start, end)

    def _forget_all(self) -> None:
        self._ready.clear()
