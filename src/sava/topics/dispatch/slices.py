"""Slices: dispatch of exclusive, failover and shared subscriptions, in ranges of offsets.

Exclusive and failover have one active member, the one that attached first, which gets everything in order.
Shared ones cut what is there into slices and give them out in turn. What has to be sent again goes first, in
the order of offsets."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from sava.topics.cursors import SubscriptionCursor
from sava.topics.dispatch.core import Dispatcher, Pace, Page
from sava.topics.dispatch.members import DispatchMember
from sava.topics.dispatch.outstanding import Flight
from sava.topics.ranges import IntervalSet, Range
from sava.topics.specs import SubscriptionSpec, SubscriptionType


class SliceDispatch(Dispatcher):
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
