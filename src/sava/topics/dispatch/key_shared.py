"""Key-shared dispatch: the messages of a key in order, to one consumer at a time.

A key's messages are sent without waiting for each other's acks. Three things make it wait:

* **A failure.** When one of its messages was nacked or timed out, those never sent wait until it is resolved.
* **A move.** When members come or go, the ring may give the key to another member. If messages of it are in
  flight, those never sent wait until they are answered; only then the key moves:

      k1, k2 in flight at A ─▶ B joins, k is B's ─▶ k3 sent to B while A still works on k2: k3 overtakes k2

* **No credits** of its member.

Meanwhile other keys continue: the key's messages are passed over (``ahead``), up to a bound, and are sent
from there. Of messages passed over only offsets are kept. They are forgotten whenever members change, and
read again.

There is work for each message here and not only for each range, for every message has a key to be asked
about. Keys without a message under way have no state."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from sava.topics.cursors import SubscriptionCursor
from sava.topics.dispatch.core import Dispatcher, Pace, Page
from sava.topics.dispatch.members import DispatchMember, Flight, HashRing
from sava.topics.ranges import IntervalSet, Range, runs
from sava.topics.specs import SubscriptionSpec

LOOK_AHEAD: Final = 16_384
"""Messages passed over. With that many, the subscription waits for the members that they belong
to."""


class _Key:
    __slots__ = ("failing", "home", "home_version", "in_flight", "name", "owner", "queue", "staged")

    def __init__(self, name: str) -> None:
        self.name = name
        self.owner: DispatchMember | None = None
        """Where its messages in flight are, and the next ones go."""
        self.home: DispatchMember | None = None
        self.home_version = -1
        self.in_flight = 0
        self.failing: set[int] = set()
        """Outstanding offsets that have failed."""
        self.queue: list[int] = []
        """Offsets that must wait, ascending."""
        self.staged: list[int] = []
        """Offsets in the owner's ``again`` or ``ahead``."""

    @property
    def is_idle(self) -> bool:
        return not (self.in_flight or self.failing or self.queue or self.staged)


class KeySharedDispatch(Dispatcher):
    def __init__(self, spec: SubscriptionSpec, cursor: SubscriptionCursor, pace: Pace) -> None:
        super().__init__(spec, cursor, pace)
        self._ring = HashRing()
        self._keys: dict[str, _Key] = {}
        self._key_of: dict[int, _Key] = {}
        """Of every offset that is outstanding or ahead."""
        self._ahead = 0
        """How many offsets are passed over and were never sent."""

    # -- sending -------------------------------------------------------------------------------

    def wanted(self, end: int, now: float) -> int | None:
        members = [member for member in self.members.values() if member.has_room]
        if not members or not self._pace.allowance(now):
            return None
        window = self._window()
        staged = [
            member.again or member.ahead
            for member in members
            if member.again or (window > 0 and member.ahead)
        ]
        if staged:
            return min(each.first for each in staged)
        if window <= 0 or self._ahead >= LOOK_AHEAD or self.position >= end:
            return None
        fresh = self._fresh(self.position, end)
        self.position = fresh[0][0] if fresh else end
        return self.position if fresh else None

    def _fresh(self, start: int, end: int) -> list[Range]:
        """What was never sent. After the messages passed over were forgotten, there are others between."""
        return [
            each
            for first, last in self.cursor.unacked(start, end)
            for each in self.outstanding.gaps(first, last)
        ]

    def offer(self, page: Page, now: float) -> list[Flight]:
        sent: list[Flight] = []
        for member in self.members.values():
            # Never something later first: the lowest may have become ready while the page was read.
            if member.again and page.start <= member.again.first < page.end:
                self._offer_staged(page, member, member.again, now, sent)
            if member.ahead and page.start <= member.ahead.first < page.end and not member.again:
                self._offer_staged(page, member, member.ahead, now, sent)
        if page.start <= self.position < page.end:
            self._offer_new(page, now, sent)
        return sent

    def _offer_staged(
        self, page: Page, member: DispatchMember, staged: IntervalSet, now: float, sent: list[Flight]
    ) -> None:
        room = min(member.credits if member.has_room else 0, self._pace.allowance(now))
        if staged is member.ahead:
            room = min(room, self._window())
        if room <= 0:
            return
        offsets = [o for start, end in staged.within(page.start, page.end) for o in range(start, end)][:room]
        for offset in offsets:
            key = self._key_of[offset]
            key.staged.remove(offset)
            key.in_flight += 1
            staged.remove(offset, offset + 1)
        if staged is member.ahead:
            self._ahead -= len(offsets)
        # A delivery has one attempt. Messages with another between them stay apart, or they would overtake.
        for attempt, group in groupby(offsets, self.failures.attempt):
            ranges = runs(group)
            size = page.share(sum(end - start for start, end in ranges))
            sent.append(self._send(member, ranges, attempt, size, now))

    def _offer_new(self, page: Page, now: float, sent: list[Flight]) -> None:
        if not any(member.has_room for member in self.members.values()):
            return
        limit = min(self._window(), self._pace.allowance(now), LOOK_AHEAD - self._ahead)
        rooms = {member: member.credits for member in self.members.values() if member.has_room}
        chosen: dict[DispatchMember, list[int]] = {member: [] for member in rooms}
        held: dict[_Key, None] = {}
        for start, last in self._fresh(self.position, page.end):
            end = min(last, start + limit)
            limit -= end - start
            self._sort_out(page, start, end, rooms, chosen, held)
            self.position = end
            if end < last:
                break
        else:
            self.position = page.end
        for member, offsets in chosen.items():
            if offsets:
                sent.append(self._send(member, runs(offsets), 1, page.share(len(offsets)), now))
        for key in held:
            self._settle(key)

    def _sort_out(
        self,
        page: Page,
        start: int,
        end: int,
        rooms: dict[DispatchMember, int],
        chosen: dict[DispatchMember, list[int]],
        held: dict[_Key, None],
    ) -> None:
        """Each message of the range: to a member that has room, to the queue of its key, or to no
        consumer."""
        keys, key_of = self._keys, self._key_of
        for offset, name in zip(range(start, end), page.keys(start, end), strict=True):
            key = keys.get(name)
            if key is None:
                key = keys[name] = _Key(name)
                key.owner = self._home(key)
            elif not key.in_flight and not key.staged:
                key.owner = self._home(key)
            owner = key.owner
            if owner is None:
                self._skip(offset)
                if key.is_idle:
                    del keys[name]
                continue
            key_of[offset] = key
            is_free = not key.queue and not key.staged and not key.failing and self._home(key) is owner
            if is_free and rooms.get(owner, 0) > 0:
                rooms[owner] -= 1
                chosen[owner].append(offset)
                key.in_flight += 1
            else:
                key.queue.append(offset)
                self._ahead += 1
                held[key] = None

    def _skip(self, offset: int) -> None:
        """No member accepts the key."""
        self.cursor.ack(offset, offset + 1)
        self.counters.skipped_by_filter += 1

    # -- keys ----------------------------------------------------------------------------------

    def _home(self, key: _Key) -> DispatchMember | None:
        """The member that the ring gives the key to."""
        if key.home_version != self._ring.version:
            name = self._ring.home(key.name)
            key.home = None if name is None else self.members[name]
            key.home_version = self._ring.version
        return key.home

    def _settle(self, key: _Key) -> None:
        """Give the key its owner, and the owner what may go to it now."""
        home = self._home(key)
        if key.owner is not home and not key.in_flight:
            self._unstage(key)
            key.owner = home
        owner = key.owner
        may_go_on = owner is home and not key.failing
        done = 0
        for offset in key.queue:
            if offset in self.outstanding:
                if owner is None or self.failures.waiting.get(offset) is not None:
                    break
                owner.again.add(offset, offset + 1)
                key.staged.append(offset)
            elif owner is None:
                del self._key_of[offset]
                self._ahead -= 1
                self._skip(offset)
            elif may_go_on:
                owner.ahead.add(offset, offset + 1)
                key.staged.append(offset)
            else:
                break
            done += 1
        del key.queue[:done]
        if key.is_idle:
            self._keys.pop(key.name, None)

    def _unstage(self, key: _Key) -> None:
        if key.staged:
            owner = key.owner
            for offset in key.staged:
                if owner is not None:
                    owner.again.remove(offset, offset + 1)
                    owner.ahead.remove(offset, offset + 1)
            key.queue = sorted(key.queue + key.staged)
            key.staged = []

    def _members_changed(self) -> None:
        self._forget_ahead()
        self._ring.set(self.members.values())
        for key in list(self._keys.values()):
            self._settle(key)

    def _forget_ahead(self) -> None:
        """What was passed over is new again."""
        lowest = self.position
        for key in self._keys.values():
            self._unstage(key)
            sent = [offset for offset in key.queue if offset in self.outstanding]
            if len(sent) < len(key.queue):
                for offset in set(key.queue).difference(sent):
                    del self._key_of[offset]
                    lowest = min(lowest, offset)
                key.queue = sent
        self.position = lowest
        self._ahead = 0

    # -- what became of messages -----------------------------------------------------------------

    def _pass(self, offset: int) -> int:
        """What was passed over is among them: kept ahead, it would be read again and again after it is gone,
        or sent after it is acked."""
        self._forget_ahead()
        count = super()._pass(offset)
        for key in list(self._keys.values()):
            self._settle(key)
        return count

    def settle(self, ranges: Iterable[Range]) -> int:
        self._forget_ahead()
        count = super().settle(ranges)
        for key in list(self._keys.values()):
            self._settle(key)
        return count

    def _returned(self, start: int, end: int, *, has_failed: bool) -> None:
        for offset in range(start, end):
            key = self._key_of[offset]
            key.in_flight -= 1
            if has_failed:
                key.failing.add(offset)
                self._unstage(key)

    def _delay(self, ranges: Iterable[Range]) -> None:
        self._make_ready(ranges)  # with its place in the order of its key, and not before its time

    def _make_ready(self, ranges: Iterable[Range]) -> None:
        by_key: dict[_Key, list[int]] = {}
        for start, end in ranges:
            for offset in range(start, end):
                by_key.setdefault(self._key_of[offset], []).append(offset)
        for key, offsets in by_key.items():
            self._unstage(key)
            key.queue = sorted({*key.queue, *offsets})
            self._settle(key)

    def _resolved(self, start: int, end: int, flown: list[tuple[int, int, Flight]]) -> None:
        flying = IntervalSet((first, last) for first, last, _ in flown)
        by_key: dict[_Key, set[int]] = {}
        for offset in range(start, end):
            key = self._key_of.pop(offset)
            grounded = by_key.setdefault(key, set())
            key.failing.discard(offset)
            if offset in flying:
                key.in_flight -= 1
            else:
                grounded.add(offset)
        for key, grounded in by_key.items():
            if grounded:
                self._unstage(key)
                key.queue = [offset for offset in key.queue if offset not in grounded]
            if key.queue or key.staged:
                self._settle(key)
            elif key.is_idle:
                self._keys.pop(key.name, None)

    def _forget_all(self) -> None:
        self._keys.clear()
        self._key_of.clear()
        self._ahead = 0
        for member in self.members.values():
            member.again.clear()
            member.ahead.clear()

    @property
    def is_behind(self) -> bool:
        return self._ahead > 0 or any(member.again for member in self.members.values())
