"""PartitionState: how far one partition is at the remote, what keeps it from going on, and when it is tried
again.

    held      by its topic: not there, other partitions, deleted, unreachable; nothing is tried
    failing   its last errand has failed; tried again after a delay, unless only an operator can help
    otherwise starting until the target has said its source position, then active, or idle when nothing comes

The position is the target's word. Until this driver has heard it, what was reported before, or
the beginning, is a belief to plan the first errand by, and no reason to take anything for lost.

**A source that was rewound** (restored from an older state) ends before where it was copied to, and then has
other messages at the same offsets:

    copied up to 100; it ends at 50; grows to 120      copying on from 100 leaves out the new 50..100 silently

So that it was seen once is reported, on record for the next run of the link, and holds until an operator
acts.

The first part is the pace of a link: the rate limit, the measured rate, and the age of the backlog.

Owned by the thread of the link. Clocks are parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from sava.pipeline.cluster import PartitionExtent
from sava.pipeline.replicate.target import CopyOutcome
from sava.proto import replication_pb2 as pb
from sava.replication.matrix import CONNECTED, LinkState
from sava.tasks import Backoff

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 60.0
RATE_S: Final = 10.0
ROUNDS: Final = 5
"""Rounds per second of a link at its rate limit: each round has a fixed cost."""
PORTIONS: Final = 20
"""The partitions that share the rate of one second. With more, some wait for a later round."""


class Throttle:
    """A token bucket for all partitions of a link: ``rate`` messages per second, one second of burst; 0 is no
    limit."""

    def __init__(self, rate: int, now: float) -> None:
        self.rate = rate
        self._room = float(rate)
        self._at = now

    def set(self, rate: int, now: float) -> None:
        if rate != self.rate:
            self.rate, self._room, self._at = rate, float(rate), now

    def portions(self, wanted: Sequence[int], now: float) -> list[int]:
        """The messages that each partition may copy, for those that want ``wanted``, the longest wait first.
        All get the same, or less if they want less. Where that would be too little, the last ones wait for a
        later round, and all wait while there is too little in total: a task for one message costs as much as
        for many."""
        if not self.rate:
            return list(wanted)
        self._fill(now)
        left, granted = int(self._room), [0] * len(wanted)
        if left < self._worth(sum(wanted)):
            return granted
        crumb = max(1, self.rate // PORTIONS)
        needed = accumulate(min(each, crumb) for each in wanted)
        turns = sum(each <= left for each in needed)
        for place, index in enumerate(sorted(range(turns), key=wanted.__getitem__)):
            granted[index] = min(wanted[index], left // (turns - place))
            left -= granted[index]
        return granted

    def due_in(self, wanted: int, now: float) -> float:
        """Seconds until ``portions`` grants messages to partitions that want ``wanted`` in total."""
        if not self.rate:
            return 0.0
        self._fill(now)
        return max(0.0, (self._worth(wanted) - self._room) / self.rate)

    def take(self, messages: int) -> None:
        self._room -= messages if self.rate else 0

    def give_back(self, messages: int) -> None:
        self._room = min(float(self.rate), self._room + messages)

    def _worth(self, wanted: int) -> int:
        return min(wanted, max(1, self.rate // ROUNDS))

    def _fill(self, now: float) -> None:
        self._room = min(float(self.rate), self._room + (now - self._at) * self.rate)
        self._at = now


class Rate:
    """Messages and bytes per second over the last RATE_S."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int, int]] = deque()

    def note(self, messages: int, size: int, now: float) -> None:
        self._recent.append((now, messages, size))

    def per_second(self, now: float) -> tuple[float, float]:
        while self._recent and self._recent[0][0] < now - RATE_S:
            self._recent.popleft()
        messages = sum(each for _, each, _ in self._recent)
        size = sum(each for _, _, each in self._recent)
        return messages / RATE_S, size / RATE_S


ASK_S: Final = 5.0
"""The interval between two requests for a publish time."""
MAX_ENDS: Final = 64


class Age:
    """The publish time of the oldest message of a partition that is not copied.

    A message that arrives while the partition is watched was published when its end was first seen that far,
    or shortly before. For older messages the source is asked now and then for the time of the next message to
    copy.
    """

    def __init__(self, now: float) -> None:
        self._ends: deque[tuple[int, int]] = deque()
        """Ends, and the time (µs) when each was first seen."""
        self._first_end = 0
        """The end at the first look."""
        self._answer: tuple[int, int] | None = None
        """An offset below that, and its publish time (µs), as the source answered."""
        self._asked_at = now - ASK_S

    def learn(self, offset: int, publish_us: int) -> None:
        self._answer = (offset, publish_us)

    def forget(self) -> None:
        """Discard the answer: it concerns another message than the next one."""
        self._answer = None

    def see(self, end: int, position: int | None, now_us: int) -> None:
        """Note the partition's end and its copied position, if known."""
        if not self._ends:
            self._first_end = end
        if not self._ends or end > self._ends[-1][0]:
            self._ends.append((end, now_us))
        while len(self._ends) > 1 and position is not None and self._ends[0][0] <= position:
            self._ends.popleft()
        if len(self._ends) > MAX_ENDS:
            # Drop every other one, except the first and the last.
            kept = list(self._ends)
            self._ends = deque([*kept[:-1:2], kept[-1]])

    @property
    def answered_us(self) -> int:
        """The last answer of the source; 0 for none."""
        return self._answer[1] if self._answer is not None else 0

    def oldest_us(self, position: int) -> int:
        """The publish time of the existing message at ``position``; 0 if unknown."""
        if position < self._first_end:
            return self.answered_us
        return next((at for end, at in self._ends if end > position), 0)

    def wants(self, position: int, now: float) -> bool:
        """Whether to ask the source now for the publish time of this message. A True answer starts a new
        interval."""
        is_answered = self._answer is not None and self._answer[0] == position
        if position >= self._first_end or is_answered or now - self._asked_at < ASK_S:
            return False
        self._asked_at = now
        return True


IDLE_S: Final = 5.0
"""How long nothing must come until a partition is idle. With less, a partition with a message now and then
would change its state, which is written down, with each."""
ROUND_BYTES: Final = 32 << 20
"""Of one partition in one round."""
LIGHT_BYTES: Final = 1 << 20
MESSAGE_BYTES: Final = 256.0
"""Of messages that nothing is known of."""
BELIEVED_AFTER_S: Final = 15.0
"""A partition that ends before where it was copied to has lost messages, or its former owner, which has not
noticed yet that it is one, has answered. Such an owner notices within this time."""
GROWS_AFTER_S: Final = 3.0
"""It appends nothing any more either: an end that grows, and is still too early, is no former owner's. What
was under way from the owner when the target said how far the copy is has come by then."""

STATES: Final = {
    "unavailable": LinkState.UNREACHABLE,
    "source_unavailable": LinkState.SOURCE_UNREACHABLE,
    "denied": LinkState.DENIED,
    "schema_refused": LinkState.SCHEMA_REFUSED,
    "source_gone": LinkState.DATA_LOSS,
    "target_replaced": LinkState.STARTING,
    "topic_unknown": LinkState.STARTING,
}
"""By the code of an outcome; all others are failures."""
LOOK_AGAIN: Final = frozenset(("target_replaced", "topic_unknown"))
"""There is another topic, or none: it has its state from a look at both ends."""


NEEDS_OPERATOR: Final = frozenset(("source_gone", "source_position_missing"))


class CopyStep(NamedTuple):
    """What to copy of a partition next."""

    start: int
    end: int
    """Equal to the start: only ask for the source position."""
    message_bytes: float
    is_heavy: bool
    """So much that others would notice if they had to wait for it."""
    skips: bool = False
    """Leave out what is lost from there on, and nothing else."""

    @property
    def messages(self) -> int:
        return self.end - self.start

    @property
    def weight(self) -> float:
        return self.messages * self.message_bytes

    def cut(self, count: int) -> CopyStep:
        """The first ``count`` of it."""
        return self._replace(end=self.start + count, is_heavy=count * self.message_bytes > LIGHT_BYTES)


class Rewound(NamedTuple):
    """Offsets that were copied once, and stand for other messages by now."""

    start: int
    end: int


class _Failure(NamedTuple):
    state: LinkState
    reason: str
    retry_at: float | None
    """None: when an operator has done something about it."""
    retry_ms: int


class PartitionState:
    def __init__(
        self, name: str, number: int, topic_id: int, *, remedy: str, throttle: Throttle, now: float
    ) -> None:
        """``remedy``: the command that continues when messages are lost. ``throttle``: of the link."""
        self.name = name
        """As brokers call it."""
        self.number = number
        self.topic_id = topic_id
        """Here."""
        self._remedy = remedy
        self.target_topic_id = 0
        self._throttle = throttle
        self.is_under_way = False
        self.began_at = 0.0
        """When it was last in a round."""
        self.is_suspect = False
        """The last errand failed: others should not have to wait for the next."""
        self.is_alone = False
        """A round that it was part of broke down: whose fault it was is seen when each has its own."""
        self.extent: PartitionExtent | None = None
        self.begin: int | None = None
        """Where the copy begins if it has not."""
        self.recorded_begin = 0
        """On record here: where it has begun, or is about to."""
        self.was_seen = False
        """The target has had a source position: if it has none any more, something is wrong."""
        self.is_answered = False
        self.position: int | None = None
        self._held: _Failure | None = _Failure(LinkState.STARTING, "", None, 0)
        self._failure: _Failure | None = None
        self._backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S, jitter=0.25)
        self.rate = Rate()
        self._state = LinkState.STARTING
        self._moved_at = now - IDLE_S
        self._message_bytes = MESSAGE_BYTES
        self._planned = 0
        self._generation = self._planned_in = 0
        """How often it was begun again; what was planned before that is of no interest."""
        self._early: tuple[float, int] | None = None
        """Since when it ends before where it was copied to, and the first of these ends."""
        self._rewound: Rewound | None = None
        self._may_leave_out = False
        """An operator has agreed to continue without what was rewound."""
        self._may_skip = self._is_short = False
        """An operator has agreed to continue without what is lost, until something is copied; and more was
        lost since it was last looked at."""
        self._last_end = self._last_end_ms = 0
        """Of the source, and when that was so if the link has not looked since (0: it has)."""
        self.age = Age(now)
        self.unsynced: Mapping[str, str] = {}
        """Subscriptions whose positions are not copied, and why."""
        self.messages = self.duplicates = self.skipped = self.disconnects = self.restarts = 0

    def seed(self, last: pb.LinkPartition, *, is_same_target: bool) -> None:
        """What was reported before, by this runner or another. ``is_same_target``: of the topic that is there
        still, as far as is known."""
        self.disconnects, self.restarts = last.disconnects, last.restarts
        self._last_end, self._last_end_ms = last.end, last.end_ms or last.reported_ms
        if is_same_target:
            self.messages, self.duplicates, self.skipped = last.messages, last.duplicates, last.skipped
            self.was_seen = last.was_seen
            self.position = last.position if self.was_seen else None
            if last.oldest_us:
                self.age.learn(last.position, last.oldest_us)
            if last.rewound_from:
                self._rewind(Rewound(last.rewound_to, last.rewound_from))
        else:
            self._may_leave_out = last.rewound_from > 0  # an operator has acted since

    def renew(self) -> None:
        """An operator has asked for it to be begun again, with what there is here and there."""
        self._generation += 1
        self.was_seen = self.is_answered = False
        self.begin = self.position = None
        self.messages = self.duplicates = self.skipped = 0
        self._may_skip, self._is_short = self.is_lost, False
        self._may_leave_out, self._rewound, self._early = self._rewound is not None, None, None
        self._failure = None
        self.age.forget()
        self._backoff.reset()

    # -- what is known -------------------------------------------------------------------------

    def see(self, extent: PartitionExtent, now: float, now_us: int) -> None:
        known, self.extent, self._last_end_ms = self.extent, extent, 0
        self._last_end = max(self._last_end, extent.end)
        if known is not None and extent.end > known.end:
            self._moved_at = now
        self.age.see(extent.end, self.position, now_us)

    def start_at(self, offset: int) -> None:
        """Where the copy begins, unless it has."""
        if self.begin is None and not self.was_seen:
            self.begin = offset
            if self.position is None:
                self.position = offset

    @property
    def needs_begin(self) -> bool:
        return self.begin is None and not self.was_seen

    @property
    def due_begin(self) -> int:
        """What is to be on record of where the copy begins. Before it does, since it could not be known
        afterwards: the target knows only how far it is."""
        if self.begin is None or self.was_seen or not self.is_answered:
            return self.recorded_begin
        return self.begin

    @property
    def is_recorded(self) -> bool:
        return self.recorded_begin == self.due_begin

    @property
    def backlog(self) -> int | None:
        """None: not known."""
        if self.extent is None or self.position is None or self._is_early or self._rewound is not None:
            return None
        return self.extent.end - self.position

    @property
    def _is_early(self) -> bool:
        """It ends before where it was copied to."""
        return self.extent is not None and self.position is not None and self.position > self.extent.end

    # -- what keeps it -------------------------------------------------------------------------

    def hold(self, state: LinkState, reason: str, *, retry_ms: int = 0) -> None:
        self._held = _Failure(state, reason, None, retry_ms)

    def admit(self, target_topic_id: int) -> None:
        """It may be copied, into this topic."""
        if self._held is None and target_topic_id == self.target_topic_id:
            return
        self._held = None
        self.target_topic_id = target_topic_id
        # Whatever kept it before is worth another look, except what needs an operator.
        if self._failure is not None and self._failure.retry_at is not None:
            self._failure = None
            self._backoff.reset()

    @property
    def is_held(self) -> bool:
        return self._held is not None

    @property
    def is_paired(self) -> bool:
        """It is copied into a topic there, also if that cannot be reached at present."""
        passes = (LinkState.UNREACHABLE, LinkState.DENIED)
        return self._held is None or (bool(self.target_topic_id) and self._held.state in passes)

    @property
    def is_lost(self) -> bool:
        """Messages are gone that were not copied."""
        return self._failure is not None and self._failure.state is LinkState.DATA_LOSS

    def fail(self, code: str, reason: str, now: float, now_ms: int) -> None:
        self.is_suspect = True
        if code in NEEDS_OPERATOR:
            reason = f"{reason}; {self._remedy} continues with what there is"
        state = STATES.get(code, LinkState.FAILED)
        if state is LinkState.DATA_LOSS and not self._may_skip:
            self._failure = _Failure(state, reason, None, 0)
            return
        delay = self._backoff.next()
        self._failure = _Failure(state, reason, now + delay, now_ms + round(delay * 1000))

    # -- going on ------------------------------------------------------------------------------

    def plan(self, now: float, now_ms: int) -> CopyStep | None:
        """What to copy now; None: nothing, or not now."""
        if self.is_under_way or self.is_held or self.position is None or self.extent is None:
            return None
        if self._failure is not None and (self._failure.retry_at is None or now < self._failure.retry_at):
            return None
        ask = CopyStep(self.position, self.position, self._message_bytes, is_heavy=False)
        if not self.is_answered:
            return ask
        if self._may_skip and (self.position < self.extent.start or self._is_short):
            return ask._replace(skips=True)
        if not self.is_recorded:
            return None
        if self.position < self.extent.start:
            self._lose(now, now_ms)
            return None
        if self._ends_too_early(now, now_ms):
            return None
        if self.position >= self.extent.end:
            return ask if self._failure is not None else None
        wanted = min(self.extent.end - self.position, max(1, int(ROUND_BYTES / self._message_bytes)))
        return ask.cut(wanted)

    def due_in(self, now: float) -> float | None:
        """Seconds until it is tried again although nothing else happens; None: it is not."""
        if self.is_under_way or self.is_held or self.position is None or self.extent is None:
            return None
        if self._failure is None or self._failure.retry_at is None:
            return None
        return max(0.0, self._failure.retry_at - now)

    @property
    def ready(self) -> int:
        """Messages that could be copied now."""
        return self.backlog or 0 if self.is_wanting and not self.is_under_way and self.is_recorded else 0

    def begin_step(self, step: CopyStep, now: float) -> None:
        self.began_at = now
        self.is_under_way, self._planned_in = True, self._generation
        self._planned = step.messages
        self._throttle.take(self._planned)
        if self._failure is not None:
            self.restarts += 1

    def note(self, outcome: CopyOutcome, now: float, now_ms: int) -> bool:
        """What became of the step; whether it counts: it was not begun again meanwhile."""
        self.is_under_way = False
        if self._planned_in != self._generation:
            return False
        advanced = self._advance(outcome, now)
        self._throttle.give_back(max(0, self._planned - advanced))
        self.is_suspect = self.is_alone = False
        self._is_short = outcome.code == "source_gone"
        if outcome.code:
            self.fail(outcome.code, outcome.reason, now, now_ms)
            return True
        if self._planned and advanced > 0:
            self._may_skip = self._may_leave_out = False
        self._failure = None
        self._backoff.reset()
        return True

    def break_down(self, reason: str, now: float, now_ms: int) -> None:
        """The round did not come to an end, or said nothing of it."""
        self.is_under_way = False
        self._throttle.give_back(self._planned)
        self.fail("failed", reason, now, now_ms)
        self.is_alone = True

    def _advance(self, outcome: CopyOutcome, now: float) -> int:
        """By how much it has come on."""
        before = self.position or 0
        if outcome.is_known:
            self.was_seen = self.is_answered = True
            self.position = outcome.position
        elif not outcome.code:
            self.is_answered = True  # that there is no source position
            if outcome.position and not self._planned:
                self.begin = self.position = outcome.position  # behind what is lost
        self.messages += outcome.messages
        self.duplicates += outcome.duplicates
        self.skipped += outcome.skipped
        self.rate.note(outcome.messages, outcome.bytes, now)
        if outcome.messages and outcome.bytes:
            self._message_bytes = max(1.0, outcome.bytes / outcome.messages)
        advanced = (self.position or 0) - before
        if advanced > 0 and outcome.messages + outcome.duplicates + outcome.skipped:
            self._moved_at = now
        return advanced

    def _lose(self, now: float, now_ms: int) -> None:
        assert self.extent is not None
        reason = (
            f"the messages from offset {self.position} to {self.extent.start} of {self.name} are not kept "
            "any more and were not copied"
        )
        self.fail("source_gone", reason, now, now_ms)

    def _ends_too_early(self, now: float, now_ms: int) -> bool:
        if not self._is_early:
            self._early = None
            return False
        assert self.extent is not None
        assert self.position is not None
        since, first_end = self._early = self._early or (now, self.extent.end)
        grows = self.extent.end > first_end and now - since >= GROWS_AFTER_S
        if now - since < BELIEVED_AFTER_S and not grows:
            return True
        if self._may_leave_out:
            reason = (
                f"{self.name} ends at offset {self.extent.end}, and is copied again from {self.position} on"
            )
            self.fail("failed", reason, now, now_ms)
        else:
            self._rewind(Rewound(first_end, self.position))
        return True

    def _rewind(self, rewound: Rewound) -> None:
        self._rewound = rewound
        reason = (
            f"{self.name} ended at offset {rewound.start} here when it was copied up to {rewound.end}: it "
            f"has lost messages, or was restored from an older state. {self._remedy} continues at offset "
            f"{rewound.end} and leaves out what is published here before that; if the copy is deleted first, "
            "it copies all that there is here again"
        )
        self._failure = _Failure(LinkState.FAILED, reason, None, 0)

    # -- what is said --------------------------------------------------------------------------

    def look(self, now: float) -> bool:
        """Whether the state is another one than at the last look."""
        before, self._state = self._state, self._now(now)
        if before in CONNECTED and self._state not in (*CONNECTED, LinkState.SOURCE_UNREACHABLE):
            self.disconnects += 1
        return self._state is not before

    def _now(self, now: float) -> LinkState:
        for kept in (self._held, self._failure):
            if kept is not None:
                return kept.state
        if not self.is_answered:
            return LinkState.STARTING
        is_quiet = not self.backlog and now - self._moved_at >= IDLE_S
        return LinkState.IDLE if is_quiet else LinkState.ACTIVE

    @property
    def state(self) -> LinkState:
        """At the last look."""
        return self._state

    @property
    def reason(self) -> str:
        kept = self._held or self._failure
        return kept.reason if kept is not None else self._unsynced_reason

    @property
    def _unsynced_reason(self) -> str:
        """Messages are copied all the same."""
        whys = [f"subscription {name} is not copied: {why}" for name, why in sorted(self.unsynced.items())]
        return "; ".join([*whys, "messages are kept here for it meanwhile"]) if whys else ""

    @property
    def is_wanting(self) -> bool:
        """There is something to be copied, and nothing that keeps it."""
        return not self.is_held and self._failure is None and bool(self.backlog)

    @property
    def oldest_us(self) -> int:
        """When the oldest message was published that is not copied; 0: all are, or it is not known."""
        if self.extent is None:
            return self.age.answered_us
        return self.age.oldest_us(self.position) if self.backlog and self.position is not None else 0

    def wants_time(self, now: float) -> int | None:
        """The offset whose publish time is wanted: of what was there before the first look."""
        if not self.backlog or self.position is None or self.extent is None:
            return None
        if self.position < self.extent.start:
            return None
        return self.position if self.age.wants(self.position, now) else None

    def report(self, now: float) -> pb.LinkPartition | None:
        """None: its end is not known yet, and a backlog that is not known must not look like none."""
        if self.extent is None and not self._last_end:
            return None
        rate, bytes_rate = self.rate.per_second(now)
        kept = self._held or self._failure
        first = self.extent.start if self.extent is not None else 0
        return pb.LinkPartition(
            partition=self.number,
            state=self._state.value,
            reason=self.reason,
            next_retry_ms=kept.retry_ms if kept is not None else 0,
            position=self.position if self.position is not None else first,
            end=self.extent.end if self.extent is not None and self._is_early else self._last_end,
            oldest_us=self.oldest_us,
            rate=rate,
            bytes_rate=bytes_rate,
            messages=self.messages,
            duplicates=self.duplicates,
            skipped=self.skipped,
            disconnects=self.disconnects,
            restarts=self.restarts,
            was_seen=self.was_seen,
            rewound_to=self._rewound.start if self._rewound is not None else 0,
            rewound_from=self._rewound.end if self._rewound is not None else 0,
            unsynced_subscriptions=sorted(self.unsynced),
            end_ms=self._last_end_ms,
        )
