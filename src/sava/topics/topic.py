"""Topic: one topic on the broker that serves it: its log, who publishes, and who consumes.

It ends in one order, whatever the reason: no producer may publish any more, what was accepted resolves,
consumers end, positions are written, the log closes. Positions are written before the log closes because
after it another broker may take the topic and begin at what it finds.

Handing over is the same with a seal: before the log closes, everything that was acknowledged is put where any
broker reads it, and the end is written down. Publishers are held meanwhile, not refused (see ``publishing``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from sava.errors import SavaError
from sava.records import RecordBatch
from sava.storage.producers import ProducerEpochs
from sava.storage.source_positions import Origin
from sava.storage.staging import Section
from sava.storage.topic_log import LogStatus, TopicLog
from sava.storage.types import Segment
from sava.topics.consumer import ConsumerHandle, KnownConsumer
from sava.topics.dispatch.core import Counters
from sava.topics.errors import (
    NotHandedOver,
    SubscriptionUnknown,
    TopicMismatch,
    TopicMoved,
)
from sava.topics.names import TopicName, check_unreserved
from sava.topics.non_reliable import NonReliableSubscription, TransientSubscriptions
from sava.topics.origin_acks import (
    OriginAcks,
    Places,
    by_origin,
    left_over,
    translate,
)
from sava.topics.ownership import Tenure
from sava.topics.producers import TopicProducers
from sava.topics.publishing import Publisher, Stage, StagedWrites
from sava.topics.ranges import IntervalSet, Range, difference
from sava.topics.source_copier import CopyCounts, Source, SourceCopier
from sava.topics.specs import (
    Position,
    SettingsAhead,
    SubscriptionType,
    TopicSpec,
)
from sava.topics.subscription import Subscription
from sava.topics.subscriptions import (
    FLUSH_S,
    SubscribeOptions,
    Subscriptions,
    TopicDependencies,
    resolve,
)

__all__ = ["SubscribeOptions", "Topic"]

_log = logging.getLogger(__name__)

AnySubscription = Subscription | NonReliableSubscription

HOLD_S: Final = 2.0
"""Publishers wait this long for a hand-over at most; then the old owner continues. Without this limit a store
that stalls after the check holds them for as long as an upload may take."""
LAST_FLUSH_S: Final = 1.0
"""For positions, where the time for them is over already or may not be needed."""


class AppliedAcks(NamedTuple):
    """What became of acks that came from elsewhere."""

    position: int
    """How far their source is copied into this topic."""
    left: Sequence[OriginAcks]
    """Those of messages that are not here yet."""
    notified: int
    """On record: see ``CursorRecord``."""


class ReadAcks(NamedTuple):
    type: SubscriptionType
    acks: Sequence[OriginAcks]
    covered: Sequence[Range]
    """The offsets here that the acks are about."""
    more: bool
    """There are others."""
    owner: str
    """Of the subscription."""


class Topic:
    """Owned by the event loop. Made by ``Topics``."""

    def __init__(self, tenure: Tenure, log: TopicLog | None, parts: TopicDependencies) -> None:
        self.name: TopicName = tenure.name
        self.spec: TopicSpec = tenure.located.spec
        self.epoch = tenure.epoch
        self.log = log
        self._limits = parts.limits
        self._gate = parts.gate
        self._is_closed = False
        self._has_closed = asyncio.Event()
        self._reliable = Subscriptions(tenure, log, parts) if log is not None else None
        self._transient = TransientSubscriptions(tenure, parts) if log is None else None
        self._publisher = Publisher(
            self.name,
            log if log is not None else self._need_transient(),
            parts.limits,
            parts.gate,
            parts.budget,
        )
        self.staged = StagedWrites(self._publisher, log)
        self._cluster = parts.cluster
        self._places = Places()
        self._max_link_backlog = parts.max_link_backlog
        self.copies = CopyCounts()
        """From other clusters."""
        self.producers = TopicProducers(
            self.spec,
            self.epoch,
            self._publisher,
            log.epochs if log is not None else ProducerEpochs.in_memory(),
            owners=parts.owners,
        )
        if log is not None:
            log.producers_in_use = lambda: self.producers.ids

    @property
    def topic_id(self) -> int:
        return self.spec.topic_id

    @property
    def is_serving(self) -> bool:
        if self._is_closed:
            return False
        return self.log is None or self.log.status in (LogStatus.OPEN, LogStatus.SEALING)

    @property
    def subscription_set(self) -> Subscriptions | TransientSubscriptions:
        return self._reliable if self._reliable is not None else self._need_transient()

    @property
    def next_offset(self) -> int:
        return self.log.next_offset if self.log is not None else self._need_transient().next_offset

    @property
    def subscriptions(self) -> Mapping[str, AnySubscription]:
        return self.subscription_set.live

    # -- publishing --------------------------------------------------------------------------

    async def append(self, batch: RecordBatch) -> int:
        """For brokers' own messages: the base offset when durable."""
        await self._publisher.verify(batch, lambda _: None)
        return await asyncio.shield(await self._publisher.begin(batch, is_measured=True))

    async def check_staged(self, stage: Stage, writer: str, sections: Sequence[Section]) -> None:
        """Raise unless the topic takes these messages of the writer: ProducerBusy, and as
        ``StagedWrites.check``."""
        self.producers.check_shared(writer)
        await self.staged.check(stage, sections)

    async def open_source(self, source: Source) -> SourceCopier:
        """To copy a source into this topic. Raises TopicMismatch, ProducerBusy, and what keeps it from being
        known how much of it is here."""
        if self.log is None:
            raise TopicMismatch(
                f"topic {self.name} is not reliable: what it does not keep cannot be there exactly once; "
                "copy into a reliable topic"
            )
        check = partial(self.producers.check_shared, str(source))
        check()
        copier = SourceCopier(
            source, self._publisher, self.log, self.copies, cluster=self._cluster, check=check
        )
        await copier.progress()
        return copier

    # -- subscribing -------------------------------------------------------------------------

    async def subscribe(self, options: SubscribeOptions) -> ConsumerHandle:
        """Raises SubscriptionMismatch, SubscriptionBusy, LimitReached, OffsetOutOfRange."""
        return await self.subscription_set.subscribe(options)

    async def create_subscription(self, options: SubscribeOptions) -> None:
        """Ahead of its consumers, so ``consumer_name`` means nothing. Raises SubscriptionExists,
        TopicMismatch, LimitReached, OffsetOutOfRange."""
        if self._reliable is None:
            raise TopicMismatch(
                f"topic {self.name} is not reliable: its subscriptions last as long as their consumers"
            )
        await self._reliable.create(options)

    def ack(self, subscription: str, ranges: Sequence[Range]) -> None:
        """For protocols whose acks name no consumer. Raises SubscriptionUnknown, InvalidName."""
        self.subscription_set.need_own(check_unreserved(subscription)).ack(ranges)

    def nack(
        self, subscription: str, ranges: Sequence[Range], *, delay_ms: int = 0, reason: str = ""
    ) -> None:
        self.subscription_set.need_own(subscription).nack(ranges, delay_ms=delay_ms, reason=reason)

    async def unsubscribe(self, name: str) -> None:
        await self.subscription_set.unsubscribe(check_unreserved(name))

    async def release_slot(self, name: str) -> None:
        """The replication slot of a link that is gone."""
        with suppress(SubscriptionUnknown):
            await self.subscription_set.unsubscribe(name)

    async def settings_ahead(self, subscription: str) -> SettingsAhead:
        """Of a subscription that does not exist yet. Raises SubscriptionUnknown if none were set."""
        if self._reliable is None:
            raise SubscriptionUnknown(self.name, subscription)
        return await self._reliable.settings_ahead(subscription)

    async def apply_acks(
        self,
        subscription: str,
        kind: SubscriptionType,
        acks: Sequence[OriginAcks],
        *,
        source: Source,
        own: Origin,
        notified: int = 0,
        since: int = 0,
        owner: str = "",
    ) -> AppliedAcks:
        """Ack here what was acked elsewhere; what is acked already stays so. The subscription is created if
        it is missing, and belongs to ``owner``, as it does there. Stored when this returns. ``own``: as
        others call this topic. ``notified``: with these acks, everything was said that is acked at the source
        before this offset there, if everything before ``since`` was said already."""
        subscriptions = self.reliable
        assert self.log is not None
        sources = self.log.sources
        await sources.learned()
        # First: what comes while the log is looked through is for the next time.
        position = sources.positions.settled(source.key).position
        arrived = {each.origin: sources.positions.arrived(each.origin) for each in acks}
        await subscriptions.ensure(check_unreserved(subscription), kind, owner=owner)
        found = subscriptions.need(subscription)
        ranges = await translate(self.log, found.cursor_offset, own, acks, self._places)
        left = left_over(acks, own, arrived)
        if found.cursor.notified(source.key) < since or any(each.origin != source.origin for each in left):
            # Where the source has those is not known: a caller that forgets them must look again.
            notified = 0
        elif left:
            notified = min(notified, 0 if left[0].cursor else left[0].ranges[0][0])
        found = subscriptions.need(subscription)
        found.settle(ranges, source.key, notified)
        await subscriptions.acks_stored(subscription)
        return AppliedAcks(position, left, found.cursor.notified(source.key))

    async def read_acks(self, subscription: str, known: Sequence[Range], own: Origin) -> ReadAcks:
        """What is acked here, as others understand it, apart from what they know. ``known``: offsets here.
        Raises SubscriptionUnknown."""
        found = self.reliable.need(check_unreserved(subscription))
        assert self.log is not None
        acked = IntervalSet(difference(found.acked(), IntervalSet(known)))
        said = await by_origin(self.log, acked, own)
        covered = IntervalSet([(0, found.spec.first), *said.covered])  # of what was before, there is nothing
        more = said.covered.count < acked.count
        return ReadAcks(found.type, said.acks, tuple(covered), more, found.owner)

    async def acks_stored(self, subscription: str) -> None:
        """Until everything that is acked now is in the metadata store; at once if the topic keeps nothing."""
        if self._reliable is not None:
            await self._reliable.acks_stored(subscription)

    async def resolve(self, position: Position) -> int:
        """The offset of a position at this moment. Raises OffsetOutOfRange."""
        return await resolve(self.reliable.log, position)

    def known_consumer(self, consumer_id: int) -> KnownConsumer | None:
        """Whom the id stands for, if it was given to a consumer that comes back with it."""
        return self.subscription_set.ids.get(consumer_id)

    @property
    def reliable(self) -> Subscriptions:
        """What is asked of subscriptions with a position. Raises TopicMismatch."""
        if self._reliable is None:
            raise TopicMismatch(f"topic {self.name} is not reliable: it has no offsets to go back to")
        return self._reliable

    def _need_transient(self) -> TransientSubscriptions:
        assert self._transient is not None
        return self._transient

    # -- knowing -----------------------------------------------------------------------------

    @property
    def published(self) -> tuple[int, int]:
        """Messages, and their bytes, since this broker began to serve the topic."""
        return self._publisher.messages, self._publisher.bytes

    @property
    def retired(self) -> Counters:
        """What subscriptions that were removed had counted since this broker began to serve the topic; of a
        topic that is not reliable nothing is kept of them."""
        return self._reliable.retired if self._reliable is not None else Counters()

    @property
    def state(self) -> str:
        """In a word, for operators."""
        return "closed" if self._is_closed else self.log.status.value if self.log is not None else "open"

    def describe(self) -> TopicInfo:
        """Takes time in proportion to the subscriptions."""
        log = self.log
        return TopicInfo(
            name=self.name,
            topic_id=self.topic_id,
            reliable=self.spec.reliable,
            partitions=self.spec.partitions,
            epoch=self.epoch,
            state=self.state,
            start_offset=log.start_offset if log is not None else 0,
            next_offset=self.next_offset,
            stored_offset=log.stored_offset if log is not None else 0,
            producers=tuple(producer.name for producer in self.producers),
            subscriptions=tuple(map(_describe, self.subscriptions.values())),
            schema_subject=self._gate.subject(self.name),
        )

    # -- maintenance -------------------------------------------------------------------------

    async def prepare_move(self, *, timeout: float) -> None:
        """Upload what a move would have to upload, while the topic is served. Raises what keeps it from
        being uploaded."""
        if self.log is not None:
            await self.log.upload_ahead(timeout=timeout)

    async def maintain(self) -> None:
        """Release what has been left behind: idle producers, absent consumers, idle subscriptions."""
        self.producers.drop_idle()
        await self.subscription_set.maintain()

    async def enforce_retention(self, now_ms: int) -> int:
        """Drop old segments; returns how many went. What a subscription has not acked stays, and what was
        not copied to where it is to be, up to a limit if there is one."""
        policy = self._limits.of(self.name).retention
        if self.log is None or self._reliable is None or policy is None:
            return 0
        links = self._reliable.link_cursors
        keep_from = kept_from(
            self._reliable.lowest_cursor,
            links.values(),
            await self.log.segments() if links else (),
            self._max_link_backlog,
        )
        dropped = await self.log.enforce_retention(policy, now_ms=now_ms, keep_from=keep_from)
        for remote, offset in links.items():
            lost = self.log.start_offset - max(offset, dropped[0].start) if dropped else 0
            if lost > 0:
                _log.error(
                    "retention: messages are gone that were not copied, for the link keeps more than "
                    "replication.max_backlog_gb topic=%s remote=%s first=%d count=%d",
                    self.name,
                    remote,
                    max(offset, dropped[0].start),
                    lost,
                )
        return len(dropped)

    async def merge_segments(self) -> int:
        """Make few of many small segments; returns how many went into larger ones."""
        if self.log is None:
            return 0
        return await self.log.maintenance.merge_segments(self._limits.of(self.name).retention)

    async def hand_over(self, *, timeout: float) -> int:
        """Let go of the topic so that any broker can continue: returns the exclusive end (0 if nothing is
        kept), below which everything is in segments. All clients of the topic here get TopicMoved.

        What is much is uploaded first, while the topic is served. Then publishers are held, for ``HOLD_S`` at
        most. The topic is closed afterwards, also by a failure: NotHandedOver when the time is up, and
        whatever stands in the way of the seal. Positions that cannot be written do not: messages are then
        delivered again."""
        moved = TopicMoved(self.name)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        doing = "waiting for what was accepted"
        hold_s = 0.0
        try:
            if self.log is not None and not self.log.is_almost_stored:
                await self.log.upload_ahead(timeout=timeout)
            hold_s = min(HOLD_S, deadline - loop.time())
            until = loop.time() + hold_s
            async with asyncio.timeout_at(until):
                await self._publisher.hold()
                doing = "writing the positions of its subscriptions"
                await self.subscription_set.close(moved, timeout=min(FLUSH_S, hold_s / 2))
                doing = "uploading and sealing its log"
                return (await self.log.seal(timeout=until - loop.time())).end if self.log else 0
        except TimeoutError:
            raise NotHandedOver(
                f"topic {self.name} was not handed over within {hold_s:g} s of holding its publishers; it "
                f"was still {doing}"
            ) from None
        finally:
            await self.close(for_producers=moved, for_consumers=moved, timeout=LAST_FLUSH_S)

    async def close(
        self, *, for_producers: SavaError, for_consumers: SavaError, timeout: float = FLUSH_S
    ) -> None:
        """What was accepted resolves; positions are written if that is possible in time. A second
        call waits for the first."""
        if self._is_closed:
            await self._has_closed.wait()
            return
        self._is_closed = True
        try:
            self.producers.end(for_producers)
            await self._publisher.close(for_producers)
            await self.staged.runs.stop(for_producers)
            await self.subscription_set.close(for_consumers, timeout=timeout)
            if self.log is not None:
                await self.log.close()
        finally:
            self._has_closed.set()


def _describe(subscription: AnySubscription) -> SubscriptionInfo:
    consumers = tuple(subscription.consumers)
    if isinstance(subscription, NonReliableSubscription):
        return SubscriptionInfo(name=subscription.name, type=subscription.type, consumers=consumers)
    stats = subscription.stats
    return SubscriptionInfo(
        name=subscription.name,
        type=subscription.type,
        consumers=consumers,
        cursor=subscription.cursor_offset,
        backlog=subscription.backlog,
        unacked=stats.unacked,
        is_blocked=stats.blocked,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionInfo:
    name: str
    type: SubscriptionType
    consumers: tuple[str, ...]
    cursor: int = 0
    """The first offset that is not acked."""
    backlog: int = 0
    """Messages that are not acked."""
    unacked: int = 0
    """Of these, delivered."""
    is_blocked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicInfo:
    name: TopicName
    topic_id: int
    reliable: bool
    partitions: int
    epoch: int
    state: str
    start_offset: int
    next_offset: int
    stored_offset: int
    """End of what is in segments."""
    producers: tuple[str, ...]
    subscriptions: tuple[SubscriptionInfo, ...]
    schema_subject: str


def kept_from(
    consumers: int | None, links: Iterable[int], segments: Sequence[Segment], max_bytes: int | None
) -> int | None:
    """The first offset that must stay: of ``consumers`` without limit, of ``links`` (their cursors) as far as
    the segments from there on have at most ``max_bytes``. None: nothing must."""
    lowest = min(links, default=None)
    if lowest is not None and max_bytes is not None:
        lowest = max(lowest, _first_within(segments, max_bytes))
    return min((each for each in (consumers, lowest) if each is not None), default=None)


def _first_within(segments: Sequence[Segment], max_bytes: int) -> int:
    """Where the last segments begin that have ``max_bytes`` together."""
    first, size = segments[-1].end if segments else 0, 0
    for segment in reversed(segments):
        size += segment.size
        if size > max_bytes:
            break
        first = segment.start
    return first
