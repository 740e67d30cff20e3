"""Dispatch against a naive model that looks at every single message.

Consumers come, fetch, ack, nack, fall silent and go, in any order that hypothesis thinks of. The model knows
of each message who has it, since when, how often it failed, and what became of it; whatever dispatch sends
must be allowed by the model at that moment. In the end everybody behaves, and everything must be acked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sava.topics.cursors import SubscriptionCursor
from sava.topics.dispatch.core import Dispatcher, Pace, Page, SliceDispatch
from sava.topics.dispatch.key_shared import KeySharedDispatch
from sava.topics.dispatch.members import DispatchMember, Flight, KeyFilter
from sava.topics.ranges import runs
from sava.topics.specs import (
    CursorRecord,
    DeadLetterPolicy,
    FailurePolicy,
    RedeliveryBackoff,
    SubscriptionSpec,
    SubscriptionType,
)

NAMES = st.sampled_from(["a", "b", "c"])
PICK = st.integers(0, 2**32)
POLICY = FailurePolicy(
    max_redelivery_count=1,
    ack_timeout_ms=10_000,
    base_redelivery_delay_ms=1_000,
    max_redelivery_delay_ms=4_000,
    backoff=RedeliveryBackoff.FIXED,
)


@dataclass
class Info:
    """What the model knows of one message."""

    holder: DispatchMember | None = None
    since: float = 0.0
    is_fetched: bool = False
    was_sent: bool = False
    was_seen: bool = False
    """Fetched by a consumer."""
    attempt: int = 1
    due: float = 0.0
    fate: str = ""
    """acked, blocked, dead, or empty."""

    @property
    def is_open(self) -> bool:
        return self.was_sent and self.fate != "acked"

    @property
    def is_failing(self) -> bool:
        return self.is_open and (self.attempt > 1 or bool(self.fate))


class DispatchMachine(RuleBasedStateMachine):
    type = SubscriptionType.EXCLUSIVE
    filters: tuple[str, ...] = ()
    is_lazy = True

    @initialize(window=st.sampled_from([3, 20, 100]), dead_letter=st.sampled_from(list(DeadLetterPolicy)))
    def begin(self, window: int, dead_letter: DeadLetterPolicy) -> None:
        policy = msgspec.structs.replace(POLICY, dead_letter=dead_letter)
        spec = SubscriptionSpec(type=self.type, failure_policy=policy, max_unacked_messages=window)
        self.cursor = SubscriptionCursor(CursorRecord(0))
        kind = KeySharedDispatch if self.type is SubscriptionType.KEY_SHARED else SliceDispatch
        self.core: Dispatcher = kind(spec, self.cursor, Pace(lambda: 0))
        self.now = 0.0
        self.infos: list[Info] = []
        self.keys: list[str] = []
        self.queues: dict[DispatchMember, list[Flight]] = {}

    # -- what happens --------------------------------------------------------------------------

    @rule(count=st.integers(1, 8), key=st.integers(0, 4))
    def publish(self, count: int, key: int) -> None:
        for step in range(count):
            self.infos.append(Info())
            self.keys.append(f"k{(key + step * key) % 5}")

    @rule(name=NAMES, credit=st.sampled_from([0, 2, 5, 50]))
    def attach(self, name: str, credit: int) -> None:
        if self.type is SubscriptionType.EXCLUSIVE and self.core.members.keys() - {name}:
            return
        member = DispatchMember(name, KeyFilter(self.filters if name == "a" else ()), credit)
        replaced = self.core.attach(member)
        if replaced is not None:
            self.gone(replaced)
        self.queues[member] = []

    @precondition(lambda self: self.core.members)
    @rule(pick=PICK)
    def detach(self, pick: int) -> None:
        member = self.a_member(pick)
        self.core.detach(member)
        self.gone(member)

    @precondition(lambda self: self.core.members)
    @rule(pick=PICK, count=st.integers(1, 10))
    def grant(self, pick: int, count: int) -> None:
        self.a_member(pick).credits += count

    @rule(is_lazy=st.booleans())
    def be_lazy(self, is_lazy: bool) -> None:
        """Whether things pile up before anything is sent."""
        self.is_lazy = is_lazy

    @invariant()
    def send_at_once(self) -> None:
        if not self.is_lazy:
            self.pump()

    @rule()
    def pump(self) -> None:
        for _ in range(2 * len(self.infos) + 2):
            self.core.tick(self.now)
            wanted = self.core.wanted(len(self.infos), self.now)
            if wanted is None:
                return
            self.offer(wanted, size=7)
        raise AssertionError("reads again and again, and sends nothing")

    @precondition(lambda self: self.core.members)
    @rule(start=st.integers(0, 40), size=st.integers(1, 9))
    def stray_page(self, start: int, size: int) -> None:
        """A read that was under way while everything changed."""
        if start < len(self.infos):
            self.offer(start, size)

    def offer(self, start: int, size: int) -> None:
        end = min(start + size, len(self.infos))
        there = len(self.infos) - start
        page = Page(start, end, end - start, there, lambda first, last: self.keys[first:last])
        for flight in self.core.offer(page, self.now):
            self.check_and_take(flight)

    @precondition(lambda self: self.core.members)
    @rule(pick=PICK)
    def fetch(self, pick: int) -> None:
        member = self.a_member(pick)
        for flight in self.queues[member]:
            if flight.is_void:
                continue
            self.core.fetched(flight, flight.unfetched, self.now)
            self.check_seen_in_order(flight)
            for offset in self.held_by(flight):
                info = self.infos[offset]
                info.is_fetched, info.since = True, self.now
        self.queues[member] = []

    @rule(picks=st.lists(PICK, min_size=1, max_size=8))
    def ack(self, picks: list[int]) -> None:
        offsets = self.some(picks)
        expected = [offset for offset in offsets if self.infos[offset].is_open]
        assert self.core.ack(runs(offsets)) == len(expected)
        for offset in expected:
            self.resolve(offset)

    @rule(picks=st.lists(PICK, min_size=1, max_size=8), delay=st.sampled_from([0.0, 2.0, 9.0]))
    def nack(self, picks: list[int], delay: float) -> None:
        offsets = self.some(picks)
        expected = [offset for offset in offsets if self.infos[offset].holder is not None]
        assert self.core.nack(runs(offsets), self.now, delay_s=delay) == len(expected)
        for offset in expected:
            self.fail(offset, delay)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        timeout = self.core.spec.failure_policy.ack_timeout_ms / 1000
        # Also for what was answered before it was fetched: it shows as well that nobody reads.
        stalled = [
            member
            for member, queue in self.queues.items()
            if any(flight.since + timeout <= self.now for flight in queue if not flight.is_void)
        ]
        self.core.tick(self.now)
        for member in stalled:
            self.take_back(member)
        for offset, info in enumerate(self.infos):
            if info.holder is not None and info.since + timeout <= self.now:
                if info.is_fetched:
                    self.fail(offset, 0.0)
                else:
                    self.take_back(info.holder)

    @rule(dead_letter=st.sampled_from(list(DeadLetterPolicy)), count=st.integers(0, 3))
    def configure(self, dead_letter: DeadLetterPolicy, count: int) -> None:
        policy = msgspec.structs.replace(POLICY, dead_letter=dead_letter, max_redelivery_count=count)
        self.core.configure(msgspec.structs.replace(self.core.spec, failure_policy=policy), self.now)
        for offset, info in enumerate(self.infos):
            if info.fate == "blocked" and not policy.is_exhausted(info.attempt):
                info.fate, info.attempt, info.due = "", info.attempt + 1, 0.0
            elif info.fate == "blocked" and dead_letter is not DeadLetterPolicy.BLOCK:
                self.give_up(offset)

    @rule()
    def hand_letters_on(self) -> None:
        dead = [(start, end) for start, end, _ in self.core.failures.dead]
        assert [o for start, end in dead for o in range(start, end)] == [
            offset for offset, info in enumerate(self.infos) if info.fate == "dead"
        ]
        self.core.dead_lettered(dead)
        for start, end in dead:
            for offset in range(start, end):
                self.resolve(offset)

    @rule(pick=PICK)
    def seek(self, pick: int) -> None:
        if pick % 5:
            return
        offset = pick % (len(self.infos) + 1)
        self.core.seek(offset)
        self.infos = [
            Info(fate="acked", was_sent=True) if place < offset else Info()
            for place in range(len(self.infos))
        ]

    @rule(pick=PICK)
    def advance(self, pick: int) -> None:
        """By somebody who keeps its own position; what was never sent is done as well."""
        offset = pick % (len(self.infos) + 1)
        if pick % 3 or offset <= self.cursor.next_offset:
            return
        unacked = [place for place in range(offset) if not self.cursor.is_acked(place)]
        assert self.core.advance(offset) == len(unacked)
        assert self.cursor.next_offset >= offset
        for place in range(offset):
            self.infos[place].was_sent = True
            self.resolve(place)

    # -- what must be true ---------------------------------------------------------------------

    @invariant()
    def everything_is_accounted_for(self) -> None:
        open_ones = [offset for offset, info in enumerate(self.infos) if info.is_open]
        assert [o for start, end in self.core.outstanding for o in range(start, end)] == open_ones
        assert len(open_ones) <= self.core.spec.max_unacked_messages
        assert self.core.in_flight == sum(info.holder is not None for info in self.infos)
        assert self.core.is_blocked == any(info.fate == "blocked" for info in self.infos)
        acked = [offset for offset, info in enumerate(self.infos) if info.fate == "acked"]
        assert all(self.cursor.is_acked(offset) for offset in acked)
        assert not any(self.cursor.is_acked(offset) for offset in open_ones)
        for member in self.core.members.values():
            queued = [flight for flight in self.queues[member] if not flight.is_void]
            assert member.credits >= 0
            assert member.queued_bytes == sum(flight.queued_bytes for flight in queued)

    def check_and_take(self, flight: Flight) -> None:
        member = flight.member
        assert self.core.members[member.name] is member
        offsets = [offset for start, end in flight.ranges for offset in range(start, end)]
        assert offsets == sorted(offsets)
        for offset in offsets:
            info = self.infos[offset]
            assert info.holder is None, f"{offset} is at {info.holder} and goes to {member}"
            assert not info.fate
            assert info.due <= self.now
            assert flight.attempt == info.attempt
            self.check_order(offset, member)
            info.holder, info.since, info.is_fetched, info.was_sent = member, self.now, False, True
        self.queues[member].append(flight)

    def check_order(self, offset: int, member: DispatchMember) -> None:
        info = self.infos[offset]
        if self.type is not SubscriptionType.SHARED and self.type is not SubscriptionType.KEY_SHARED:
            assert member is next(iter(self.core.members.values()))
        if not info.was_sent and self.type is not SubscriptionType.KEY_SHARED:
            # First deliveries are in order, after everything that is ready to be sent again, unless blocked.
            for other in self.infos[:offset]:
                assert other.was_sent
                assert not other.is_open or other.holder or other.fate or other.due > self.now
                assert other.fate != "blocked"
        elif self.type is SubscriptionType.KEY_SHARED:
            self.check_key_order(offset, member)

    def check_key_order(self, offset: int, member: DispatchMember) -> None:
        same = [o for o, key in enumerate(self.keys) if key == self.keys[offset] and o != offset]
        assert all(self.infos[o].holder in (None, member) for o in same), "one key at two consumers"
        for other in (self.infos[o] for o in same if o < offset):
            assert other.fate or other.holder is member, "overtook an earlier message of its key"
            if not self.infos[offset].was_sent:
                assert not other.is_failing, "a new message of a key with a failure"
        assert member.key_filter.accepts(self.keys[offset])

    def check_seen_in_order(self, flight: Flight) -> None:
        """What nobody has seen yet is seen in order."""
        for offset in (o for start, end in flight.ranges for o in range(start, end)):
            for other, info in enumerate(self.infos[:offset]):
                is_related = self.type is not SubscriptionType.SHARED
                if self.type is SubscriptionType.KEY_SHARED:
                    is_related = self.keys[other] == self.keys[offset]
                if is_related and not self.infos[offset].was_seen:
                    assert info.was_seen or info.fate, f"{offset} was seen before {other}"
            self.infos[offset].was_seen = True

    # -- the model -----------------------------------------------------------------------------

    def a_member(self, pick: int) -> DispatchMember:
        members = list(self.core.members.values())
        return members[pick % len(members)]

    def some(self, picks: list[int]) -> list[int]:
        """Most of them such that somebody has them."""
        held = [offset for offset, info in enumerate(self.infos) if info.holder is not None]
        chosen = {held[pick % len(held)] for pick in picks[1:] if held}
        if self.infos and picks[0] % 3 == 0:
            chosen.add(picks[0] % len(self.infos))
        return sorted(chosen)

    def held_by(self, flight: Flight) -> Sequence[int]:
        return [
            offset
            for start, end in flight.ranges
            for offset in range(start, end)
            if self.infos[offset].holder is flight.member
        ]

    def take_back(self, member: DispatchMember) -> None:
        for info in self.infos:
            if info.holder is member and not info.is_fetched:
                info.holder = None

    def gone(self, member: DispatchMember) -> None:
        del self.queues[member]
        for info in self.infos:
            if info.holder is member:
                info.holder = None

    def resolve(self, offset: int) -> None:
        self.infos[offset].fate, self.infos[offset].holder = "acked", None

    def fail(self, offset: int, delay: float) -> None:
        info, policy = self.infos[offset], self.core.spec.failure_policy
        info.holder, info.was_seen = None, True
        if policy.is_exhausted(info.attempt):
            self.give_up(offset)
        else:
            info.due = self.now + min(max(1.0, delay), 4.0)
            info.attempt += 1

    def give_up(self, offset: int) -> None:
        fates = {
            DeadLetterPolicy.BLOCK: "blocked",
            DeadLetterPolicy.DROP: "acked",
            DeadLetterPolicy.DEAD_LETTER: "dead",
        }
        self.infos[offset].fate = fates[self.core.spec.failure_policy.dead_letter]

    def teardown(self) -> None:
        """Then everybody behaves, and everything is acked."""
        if not hasattr(self, "core"):
            return
        for member in list(self.core.members.values()):
            self.core.detach(member)
            self.gone(member)
        policy = msgspec.structs.replace(POLICY, max_redelivery_count=1000)
        self.core.configure(msgspec.structs.replace(self.core.spec, failure_policy=policy), self.now)
        for info in self.infos:
            if info.fate == "blocked":
                info.fate, info.attempt, info.due = "", info.attempt + 1, 0.0
        for name in ("x", "y") if self.type is not SubscriptionType.EXCLUSIVE else ("x",):
            member = DispatchMember(name, credits=1_000)
            self.core.attach(member)
            self.queues[member] = []
        for _ in range(2 * len(self.infos) + 2):
            self.now += 5.0
            self.hand_letters_on()
            self.pump()
            for place in range(len(self.core.members)):
                self.fetch(place)
            held = [offset for offset, info in enumerate(self.infos) if info.holder is not None]
            self.core.ack(runs(held))
            for offset in held:
                self.resolve(offset)
        assert self.cursor.next_offset == len(self.infos)
        assert not self.core.outstanding


class FailoverMachine(DispatchMachine):
    type = SubscriptionType.FAILOVER


class SharedMachine(DispatchMachine):
    type = SubscriptionType.SHARED


class KeySharedMachine(DispatchMachine):
    type = SubscriptionType.KEY_SHARED


CHOICE = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
for machine in (DispatchMachine, FailoverMachine, SharedMachine, KeySharedMachine):
    machine.TestCase.settings = CHOICE

TestExclusive = DispatchMachine.TestCase
TestFailover = FailoverMachine.TestCase
TestShared = SharedMachine.TestCase
TestKeyShared = KeySharedMachine.TestCase
