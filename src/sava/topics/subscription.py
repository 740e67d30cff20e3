"""Subscription: a reliable topic's messages to its consumers, until they are acked.

What goes to whom is decided by ``dispatch``, which knows neither time nor event loop. Here is the one task
that reads the log and fills the queues of consumers. It never waits for a consumer: a queue takes what
dispatch has found room for. When there is nothing to do it waits for one event, set by whatever could change
that: new data, acks, credits, consumers that come or go, or a timer at the earliest time at which something
is due. Without consumers there is no task.

**Dormant.** A topic may have ten thousand subscriptions, of which few have consumers. What only a
subscription in use needs (``dispatch``, readers, the event) is made when it is first used: some fifty objects
less for each of the others. Python's garbage collector looks through all objects in one piece, while
heartbeats wait. What is made later is as it would have been: nothing but its own use changes it, and the
cursor is there from the start.

A read that fails is tried again with growing pauses, and what it failed with is in ``stats``; acks continue
meanwhile. Messages that retention has removed are passed over and counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final

from sava.errors import SavaError
from sava.records import Message
from sava.storage.errors import OffsetOutOfRange
from sava.tasks import Backoff, cancelled
from sava.topics.consumer import ConsumerHandle, cut_out
from sava.topics.cursors import SubscriptionCursor
from sava.topics.dispatch.core import Counters, Dispatcher, Pace, SliceDispatch
from sava.topics.dispatch.key_shared import KeySharedDispatch
from sava.topics.dispatch.members import DispatchMember, Flight, KeyFilter
from sava.topics.dispatch.reading import Chunk, DeadLetters, LogReader, LogView
from sava.topics.errors import (
    ConsumerClosed,
    ConsumerReplaced,
    SubscriptionBusy,
    SubscriptionMismatch,
)
from sava.topics.names import TopicName
from sava.topics.ranges import IntervalSet, Range
from sava.topics.specs import CursorRecord, SubscriptionSpec, SubscriptionType

__all__ = ["Hooks", "LogView", "Subscription", "SubscriptionStats"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 30.0
_TURN_S: Final = 0.005
"""How long the task works without letting others run."""


_NONE: Final = Counters()
"""Of a dormant subscription. Never changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What a subscription asks of the broker around it."""

    dead_letter: Callable[[str, list[Message]], Awaitable[object]]
    """To the topic of this name. Returns when they are durable there."""
    dispatch_rate: Callable[[], int]
    """Messages a second; 0 for no limit. Asked again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionStats:
    """Counts of messages since the subscription was loaded, and how it is now."""

    delivered: int
    delivered_bytes: int
    """About: of a part of a batch its share by count."""
    redelivered: int
    """Of the delivered ones, those that were delivered before."""
    acked: int
    nacked: int
    timed_out: int
    dropped: int
    dead_lettered: int
    skipped_by_filter: int
    """No consumer accepted their key."""
    skipped_by_retention: int
    """Removed before they were acked."""
    unacked: int
    """Delivered and not acked."""
    in_flight: int
    """Of these, those that a consumer has now."""
    blocked: bool
    """A message failed too often, and the policy is to wait for an operator."""
    blocked_offsets: tuple[Range, ...]
    error: str
    """Why nothing can be read or handed on at the moment; empty if it can."""


class Subscription:
    """Owned by the event loop."""

    def __init__(
        self,
        topic: TopicName,
        name: str,
        spec: SubscriptionSpec,
        cursor: CursorRecord,
        log: LogView,
        hooks: Hooks,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topic = topic
        self.name = name
        self._log = log
        self._clock = clock
        self.cursor = SubscriptionCursor(cursor)
        self._spec = spec
        self._hooks = hooks
        self._is_dormant = True
        self._consumers: dict[str, ConsumerHandle] = {}
        self._task: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._is_started = False
        self._closed: SavaError | None = None
        self._error = ""
        self._retry_at = 0.0

    # -- made when first used ------------------------------------------------------------------

    @cached_property
    def _core(self) -> Dispatcher:
        self._is_dormant = False
        dispatch = KeySharedDispatch if self.type is SubscriptionType.KEY_SHARED else SliceDispatch
        return dispatch(self._spec, self.cursor, Pace(self._hooks.dispatch_rate))

    @cached_property
    def _letters(self) -> DeadLetters:
        hand_on = self._hooks.dead_letter
        return DeadLetters(self.topic, self.name, self._log, self._core, hand_on=hand_on, done=self._wake.set)

    @cached_property
    def _backoff(self) -> Backoff:
        return Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    @cached_property
    def _wake(self) -> asyncio.Event:
        return asyncio.Event()

    @cached_property
    def _reader(self) -> LogReader:
        """At the end of what was read."""
        return LogReader(self._log)

    @cached_property
    def _again(self) -> LogReader:
        """Anywhere before it."""
        return LogReader(self._log)

    # -- knowing -------------------------------------------------------------------------------

    @property
    def spec(self) -> SubscriptionSpec:
        return self._spec

    @property
    def owner(self) -> str:
        """The principal that alone may use it; empty: all."""
        return self._spec.owner

    @property
    def type(self) -> SubscriptionType:
        return self._spec.type

    @property
    def consumers(self) -> Mapping[str, ConsumerHandle]:
        return MappingProxyType(self._consumers)

    @property
    def cursor_offset(self) -> int:
        """The first offset that is not acked."""
        return self.cursor.next_offset

    def acked(self) -> IntervalSet:
        """All that is: also what was below where it was created, unless no caller had chosen that place."""
        return IntervalSet([(self.spec.first, self.cursor.next_offset), *self.cursor.acked()])

    @property
    def backlog(self) -> int:
        """Messages that are not acked."""
        first = max(self.cursor.next_offset, self._log.start_offset)
        return max(0, self._log.next_offset - first - self.cursor.acked_beyond)

    @property
    def counters(self) -> Counters:
        """Since the subscription was loaded. Not to be changed by the caller."""
        return _NONE if self._is_dormant else self._core.counters

    @property
    def unacked(self) -> int:
        """Messages that are delivered and not acked."""
        return 0 if self._is_dormant else self._core.outstanding.count

    @property
    def is_blocked(self) -> bool:
        """A message failed too often, and the policy is to wait for an operator."""
        return not self._is_dormant and self._core.is_blocked

    @property
    def error(self) -> str:
        """Why nothing can be read or handed on at the moment; empty if it can."""
        return self._error or ("" if self._is_dormant else self._letters.error)

    @property
    def stats(self) -> SubscriptionStats:
        counters = self.counters
        core = None if self._is_dormant else self._core
        return SubscriptionStats(
            delivered=counters.delivered,
            delivered_bytes=counters.delivered_bytes,
            redelivered=counters.redelivered,
            acked=counters.acked,
            nacked=counters.nacked,
            timed_out=counters.timed_out,
            dropped=counters.dropped,
            dead_lettered=counters.dead_lettered,
            skipped_by_filter=counters.skipped_by_filter,
            skipped_by_retention=counters.skipped_by_retention,
            unacked=self.unacked,
            in_flight=core.in_flight if core else 0,
            blocked=self.is_blocked,
            blocked_offsets=tuple((start, end) for start, end, _ in core.failures.blocked) if core else (),
            error=self.error,
        )

    # -- consumers -----------------------------------------------------------------------------

    def start(self) -> None:
        self._is_started = True
        self._run_if_needed()

    def attach(
        self,
        consumer_name: str,
        *,
        consumer_id: int,
        key_filters: Sequence[str] = (),
        credits: int = 0,  # noqa: A002 (the protocol's word)
        principal: str = "",
    ) -> ConsumerHandle:
        """A consumer of the same name is replaced: it ends, and what it had goes to the new one at once, in
        order. Raises SubscriptionBusy if the subscription is exclusive and another one's."""
        if self._closed is not None:
            raise self._closed
        replaced = self._consumers.get(consumer_name)
        if self.type is SubscriptionType.EXCLUSIVE and self._consumers and replaced is None:
            raise SubscriptionBusy(
                f"subscription {self.name} of topic {self.topic} is exclusive, and consumer "
                f"{next(iter(self._consumers))} is connected"
            )
        consumer = ConsumerHandle(consumer_name, consumer_id, self, principal=principal)
        member = DispatchMember(consumer_name, KeyFilter(key_filters), credits)
        self._consumers[consumer_name] = consumer
        self._core.attach(member)
        if replaced is not None:
            replaced.end(ConsumerReplaced(f"consumer {consumer_name} has connected again elsewhere"))
        self._run_if_needed()
        return consumer

    def detach(self, consumer: ConsumerHandle) -> None:
        """For the consumer itself: see ``ConsumerHandle.close``."""
        if self._consumers.get(consumer.name) is consumer:
            del self._consumers[consumer.name]
            self._core.detach(self._core.members[consumer.name])
            self._wake.set()

    def is_active(self, consumer: ConsumerHandle) -> bool:
        if self._consumers.get(consumer.name) is not consumer:
            return False
        return not isinstance(self._core, SliceDispatch) or self._core.serves(consumer.name)

    def limit(self, consumer: ConsumerHandle) -> int | None:
        return None  # credits were taken when the messages were queued

    def fetched(self, consumer: ConsumerHandle, flight: Flight, count: int) -> None:
        self._core.fetched(flight, count, self._clock())
        self._wake.set()

    def waits(self, consumer: ConsumerHandle) -> None:
        member = self._core.members[consumer.name]
        if member.is_stalled:
            member.is_stalled = False
            self._wake.set()

    def granted(self, consumer: ConsumerHandle, count: int) -> None:
        if self._consumers.get(consumer.name) is consumer:
            self._core.members[consumer.name].credits += count
            self._wake.set()

    def ack(self, ranges: Sequence[Range]) -> None:
        """What is acked already changes nothing."""
        if self._core.ack(ranges, self._log.next_offset):
            self._wake.set()

    def advance(self, offset: int) -> None:
        """Ack whatever is below, also if no consumer ever got it. Going back changes nothing."""
        if offset > self.cursor.next_offset and self._core.advance(offset):
            self._wake.set()

    def settle(self, ranges: Sequence[Range], source_key: int, notified: int) -> None:
        """Acked elsewhere, whether sent here or not; with it everything was said that was acked there before
        ``notified``."""
        if self._core.settle(ranges):
            self._wake.set()
        self.cursor.notify(source_key, notified)

    def nack(self, ranges: Sequence[Range], *, delay_ms: int = 0, reason: str = "") -> None:
        if self._core.nack(ranges, self._clock(), delay_s=delay_ms / 1000, reason=reason):
            self._letters.look()
            self._wake.set()

    # -- changes -------------------------------------------------------------------------------

    def configure(self, spec: SubscriptionSpec) -> None:
        """Takes effect at once, for what is under way as well. Raises SubscriptionMismatch for another
        type."""
        if spec.type is not self.type:
            raise SubscriptionMismatch(
                f"subscription {self.name} is {self.type.name}, and cannot become another"
            )
        self._spec = spec
        if self._is_dormant:
            return
        self._core.configure(spec, self._clock())
        self._letters.look()
        self._letters.retry_now()
        self._wake.set()

    async def seek(self, offset: int) -> None:
        """Continue at the offset (or as near to it as the log reaches). What is under way is forgotten."""
        self._core.seek(min(max(offset, self._log.start_offset), self._log.next_offset))
        self._wake.set()

    async def close(self, error: SavaError) -> None:
        """Every consumer ends with the error. Idempotent."""
        if self._closed is None:
            self._closed = error
            self._end_consumers(error)
        await cancelled(self._task, self._follower)
        if not self._is_dormant:
            await self._letters.close()
        self.cursor.give_up(error)

    def _end_consumers(self, error: SavaError) -> None:
        for consumer in list(self._consumers.values()):
            consumer.end(error)
            self.detach(consumer)

    # -- the task ------------------------------------------------------------------------------

    def _run_if_needed(self) -> None:
        if self._is_dormant:
            return
        self._wake.set()
        if self._is_started and self._consumers and self._task is None and self._closed is None:
            self._task = asyncio.create_task(self._run(), name=f"subscription {self.name} of {self.topic}")
            self._task.add_done_callback(self._ran)

    def _ran(self, task: asyncio.Task[None]) -> None:
        self._task = None
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            # Not foreseen. Clients that get an error come back; one that stands still gives none.
            _log.error("subscription failed topic=%s name=%s", self.topic, self.name, exc_info=failure)
            self._error = f"{type(failure).__name__}: {failure}"
            self._end_consumers(ConsumerClosed(f"subscription {self.name} of {self.topic} failed: {failure}"))
        self._run_if_needed()  # a consumer attached while the task was ending

    async def _run(self) -> None:
        try:
            while self._consumers:
                self._wake.clear()
                began = self._clock()
                while await self._turn():
                    if self._clock() - began > _TURN_S:
                        await asyncio.sleep(0)
                        began = self._clock()
                await self._rest()
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._follower is not None:
                self._follower.cancel()
            await self._reader.close()
            await self._again.close()

    async def _turn(self) -> bool:
        """Send what one read brings; whether there may be more to send."""
        now = self._clock()
        self._core.tick(now)
        self._letters.look()
        if now < self._retry_at:
            return False
        offset = self._core.wanted(self._log.next_offset, now)
        if offset is None:
            return False
        try:
            chunk = await (self._reader if offset >= self._core.position else self._again).at(offset)
        except OffsetOutOfRange as error:
            return self._skip_removed(error)
        except (SavaError, OSError) as error:
            self._failed(error)
            return False
        if self._error:
            self._error = ""
            self._backoff.reset()
        self._send(chunk, offset)
        return True

    def _send(self, chunk: Chunk, offset: int) -> None:
        page = chunk.page(offset, self._log.next_offset)
        for flight in self._core.offer(page, self._clock()):
            delivery = cut_out(chunk.batch, flight.ranges, flight.attempt)
            self._consumers[flight.member.name].put(delivery, flight)

    def _skip_removed(self, error: OffsetOutOfRange) -> bool:
        start = self._log.start_offset
        if error.offset >= start:
            self._failed(error)
            return False
        count = self._core.skip_to(start)
        _log.warning(
            "retention removed messages before they were acked topic=%s subscription=%s count=%d next=%d",
            self.topic,
            self.name,
            count,
            start,
        )
        return True

    def _failed(self, error: Exception) -> None:
        self._error = f"{type(error).__name__}: {error}"
        pause = self._backoff.next()
        self._retry_at = self._clock() + pause
        _log.warning(
            "cannot read topic=%s subscription=%s retry_in=%.1fs error=%s",
            self.topic,
            self.name,
            pause,
            self._error,
        )

    async def _rest(self) -> None:
        """Until something has changed."""
        position = self._core.position
        self._reader.forget_below(position)
        if not self._core.is_behind:
            await self._again.close()
        now = self._clock()
        if self._follower is None and now >= self._retry_at and self._log.next_offset <= position:
            self._follower = asyncio.create_task(self._log.wait_beyond(position))
            self._follower.add_done_callback(self._followed)
        self._set_timer(now)
        await self._wake.wait()

    def _followed(self, follower: asyncio.Task[None]) -> None:
        self._follower = None
        if follower.cancelled():
            return
        failure = follower.exception()
        if isinstance(failure, Exception):
            self._failed(failure)
        self._wake.set()

    def _set_timer(self, now: float) -> None:
        at = self._core.wake_at(now)
        if now < self._retry_at:
            at = self._retry_at if at is None else min(at, self._retry_at)
        if at is None:
            return
        if self._timer is not None:
            if self._timer_at <= at:
                return  # it comes, finds nothing due, and sets the next one
            self._timer.cancel()
        # Rounded up: a loop's clock is coarse, and a timer that comes early is a turn for nothing.
        delay = max(0.0, at - now) + 0.001
        self._timer, self._timer_at = asyncio.get_running_loop().call_later(delay, self._timer_rang), at

    def _timer_rang(self) -> None:
        self._timer = None
        self._wake.set()
