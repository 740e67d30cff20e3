"""Subscriptions: those of one reliable topic, and their records; and what is asked of a subscription and
checked on any kind of topic.

A subscription and its cursor are written before its first consumer gets anything, and are made again from
these records when the topic is loaded: what was published while no consumer was connected, or between two
runs of the broker, is there for the next consumer.

Records are read and changed under the topic's tenure (see ``ownership``): each transaction is conditional on
it, so a broker that has lost the topic changes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sava.errors import SavaError
from sava.metadata.commands import Compare, Delete, DeletePrefix, Put, Relation, Target
from sava.metadata.records import (
    Decide,
    RecordBusy,
    RecordChange,
    RecordCorrupt,
    RecordStore,
    Updated,
    Versioned,
    absent,
)
from sava.records import Message
from sava.storage.errors import OffsetOutOfRange
from sava.storage.keys import is_replication_slot, slot_remote
from sava.storage.topic_log import TopicLog
from sava.tasks import SingleFlight, Slices
from sava.topics import specs
from sava.topics.consumer import ConsumerHandle, ConsumerIds, ConsumerRecords, KnownConsumer
from sava.topics.cursors import CursorKeeper, KeptCursor
from sava.topics.dispatch.core import Counters
from sava.topics.errors import (
    ConsumerClosed,
    MessageInvalid,
    SubscriptionExists,
    SubscriptionMismatch,
    SubscriptionUnknown,
)
from sava.topics.names import MAX_NAME_BYTES, InvalidName, TopicName, check_name, check_unreserved
from sava.topics.ownership import Tenure
from sava.topics.publishing import DecodeBudget
from sava.topics.registry import PrincipalRoom
from sava.topics.rules import OwnerRules, SchemaChecks, TopicLimits, check_room
from sava.topics.specs import (
    LATEST,
    MAX_UNACKED_MESSAGES,
    AtOffset,
    CursorRecord,
    End,
    FailurePolicy,
    Position,
    SettingsAhead,
    SubscriptionSpec,
    SubscriptionType,
)
from sava.topics.subscription import Hooks, Subscription

if TYPE_CHECKING:  # it imports this module
    from sava.topics.non_reliable import NonReliableSubscription


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeOptions:
    subscription: str
    type: SubscriptionType
    consumer_name: str
    key_filters: Sequence[str] = ()
    start: Position = LATEST
    """Where a subscription begins that does not exist yet."""
    credits: int = 0
    ack_timeout_ms: int = 0
    """Of a subscription that does not exist yet. None by default: a consumer that is alive may have thousands
    of messages in its queue and take its time; one that is gone is noticed by its stream."""
    durable_id: bool = False
    """Whether the consumer may come back with nothing but its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDependencies:
    """What the topics of one broker share."""

    limits: TopicLimits
    gate: SchemaChecks
    keeper: CursorKeeper
    dead_letter: Callable[[str, Sequence[Message]], Awaitable[None]]
    """Publish to the topic of this name, which is created if it is missing; returns when durable."""
    max_unacked_messages: int
    """Of a new subscription."""
    cluster: str
    """The name of this one."""
    max_link_backlog: int | None
    """Bytes of one topic that links may keep from retention; None: any number."""
    budget: DecodeBudget | None = None
    """Of compressed batches; None: one for each topic."""
    owners: OwnerRules = OwnerRules()  # noqa: RUF009 (frozen)
    room: PrincipalRoom | None = None
    """For what principals may have in the cluster; None: any number."""


def check_names(options: SubscribeOptions) -> None:
    """Raises InvalidName."""
    check_unreserved(check_name(options.subscription, "subscription"))
    if not 0 < len(options.consumer_name.encode()) <= MAX_NAME_BYTES:
        raise InvalidName(f"consumer name {options.consumer_name[:20]!a}: 1 to {MAX_NAME_BYTES} bytes")


def check_new(topic: TopicName, count: int, limits: TopicLimits) -> None:
    """Raise LimitReached if the topic cannot have one subscription more."""
    limit = limits.of(topic).max_subscriptions_per_topic
    check_room(count, limit, f"subscriptions of topic {topic}")


def check_consumer(
    topic: TopicName,
    options: SubscribeOptions,
    live: Mapping[str, Subscription] | Mapping[str, NonReliableSubscription],
    limits: TopicLimits,
    owners: OwnerRules,
) -> None:
    """Raise OwnedByAnother, SubscriptionMismatch or LimitReached if the consumer cannot be attached. One that
    takes its own place always can."""
    name = options.subscription
    subscription = live.get(name)
    consumers: Mapping[str, ConsumerHandle] = subscription.consumers if subscription is not None else {}
    if subscription is not None:
        owners.check_subscription(subscription.owner, name, topic)
    if (older := consumers.get(options.consumer_name)) is not None:
        owners.check_name(older.principal, options.consumer_name, topic, "consumer")
    if subscription is not None and subscription.type is not options.type:
        raise SubscriptionMismatch(
            f"subscription {name} of topic {topic} is {subscription.type.name.lower()}, and not "
            f"{options.type.name.lower()}"
        )
    if options.consumer_name in consumers:
        return
    effective = limits.of(topic)
    limit = effective.max_consumers_per_subscription
    check_room(len(consumers), limit, f"consumers of subscription {name} of topic {topic}")
    limit = effective.max_consumers_per_topic
    if limit:
        check_room(sum(len(each.consumers) for each in live.values()), limit, f"consumers of topic {topic}")


log = logging.getLogger(__name__)

PAGE: Final = 1000
MAX_AHEAD: Final = 1000
"""Subscriptions of one topic that have settings and do not exist yet."""
FLUSH_S: Final = 5.0
"""How long the end of a topic waits for positions to be written."""


class Subscriptions:
    """The subscriptions of one reliable topic. Owned by the event loop."""

    def __init__(self, tenure: Tenure, log: TopicLog, parts: TopicDependencies) -> None:
        self._topic = tenure.name
        self._tenure = tenure
        self.log = log
        self._parts = parts
        self._store = tenure.store
        self._live: dict[str, Subscription] = {}
        self._cursors: dict[str, KeptCursor] = {}
        self._creating: SingleFlight[str, None] = SingleFlight()
        self._consumer_records = ConsumerRecords(tenure)
        self._records = RecordStore(tenure.store)
        self._closed: SavaError | None = None
        self._hooks = Hooks(dead_letter=self._parts.dead_letter, dispatch_rate=self._dispatch_rate)
        self.retired = Counters()
        """What subscriptions that were removed had counted here."""

    @property
    def live(self) -> Mapping[str, Subscription]:
        return MappingProxyType(self._live)

    @property
    def ids(self) -> ConsumerIds:
        return self._consumer_records.ids

    @property
    def lowest_cursor(self) -> int | None:
        """The first offset that some consumer's subscription has still to ack; None without."""
        offsets = (each.cursor_offset for name, each in self._live.items() if not is_replication_slot(name))
        return min(offsets, default=None)

    @property
    def link_cursors(self) -> dict[str, int]:
        """By remote."""
        return {
            remote: each.cursor_offset
            for name, each in self._live.items()
            if (remote := slot_remote(name)) is not None
        }

    def need(self, name: str) -> Subscription:
        self._check_open()
        subscription = self._live.get(name)
        if subscription is None:
            raise SubscriptionUnknown(self._topic, name)
        return subscription

    def need_own(self, name: str) -> Subscription:
        """One that the principal of the running call may use. Raises SubscriptionUnknown, OwnedByAnother."""
        subscription = self.need(name)
        if not is_replication_slot(name):
            self._parts.owners.check_subscription(subscription.owner, name, self._topic)
        return subscription

    async def load(self) -> None:
        """Make the subscriptions that the records speak of. In slices: there may be ten thousand, and while
        they are made in one piece this broker renews no lease and answers no heartbeat."""
        slices = Slices()
        found: dict[str, tuple[SubscriptionSpec, int]] = {}
        cursors: dict[str, CursorRecord] = {}
        after, more = "", True
        while more:
            page = await self._store.range(
                specs.subscriptions_prefix(self._topic), limit=PAGE, start_after=after
            )
            more = page.more
            for kv in page.kvs:
                after = kv.key
                await slices.next()
                match kv.key.split("/")[5:]:
                    case [name]:
                        found[name] = specs.decode(kv, SubscriptionSpec), kv.create_revision
                    case [name, "cursor"]:
                        cursors[name] = specs.decode(kv, CursorRecord)
                    case [name, "consumers", _]:
                        self.ids.load(kv, name)
        for name, (spec, created) in found.items():
            if name not in cursors:
                raise RecordCorrupt(f"topic {self._topic}: subscription {name} has no cursor")
            self._add(name, spec, cursors[name], created)
            await slices.next()

    def _add(self, name: str, spec: SubscriptionSpec, cursor: CursorRecord, created: int) -> None:
        subscription = Subscription(self._topic, name, spec, cursor, self.log, self._hooks)
        exists = Compare(
            specs.subscription_key(self._topic, name), Target.CREATE_REVISION, Relation.EQUAL, created
        )
        kept = KeptCursor(
            specs.cursor_key(self._topic, name),
            subscription.cursor,
            self._tenure,
            exists,
        )
        self._live[name], self._cursors[name] = subscription, kept
        self._parts.keeper.add(kept)
        subscription.start()

    # -- subscribing -------------------------------------------------------------------------

    async def subscribe(self, options: SubscribeOptions) -> ConsumerHandle:
        check_names(options)
        name = options.subscription
        self._check_open()
        if name not in self._live:
            await self._creating.run(name, partial(self._create, name, options))
        consumer_id = self.ids.id_of(name, options.consumer_name)
        owners = self._parts.owners
        check_consumer(self._topic, options, self.live, self._parts.limits, owners)
        if options.durable_id:
            consumer = owned(known(self._topic, options, consumer_id), self.ids, owners)
            await self._consumer_records.remember(consumer)
            check_consumer(self._topic, options, self.live, self._parts.limits, owners)
        self._check_open()
        return self.need(name).attach(
            options.consumer_name,
            consumer_id=consumer_id,
            key_filters=tuple(options.key_filters),
            credits=options.credits,
            principal=owners.of_new(),
        )

    async def create(self, options: SubscribeOptions) -> None:
        """Ahead of its consumers. Raises SubscriptionExists, LimitReached, OffsetOutOfRange."""
        name = check_unreserved(check_name(options.subscription, "subscription"))
        self._check_open()
        if name in self._live:
            raise SubscriptionExists(f"topic {self._topic} has a subscription {name} already")
        await self._creating.run(name, partial(self._create, name, options))

    async def hold_slot(self, name: str, start: Position) -> None:
        """A link's replication slot: keep what is there from this position on, or the nearest one, until
        ``advance`` says that it is copied. One that is there stays as it is."""
        options = SubscribeOptions(
            subscription=name, type=SubscriptionType.SHARED, consumer_name="", start=self._nearest(start)
        )
        self._check_open()
        if name not in self._live:
            await self._creating.run(name, partial(self._create, name, options))

    async def rewind(self, name: str, start: Position) -> None:
        """A link's replication slot: keep what is there from this position on, or the nearest one, because
        it is to be copied again. One that is not beyond stays as it is. Raises SubscriptionUnknown."""
        subscription = self.need(name)
        offset = await resolve(self.log, self._nearest(start))
        if offset < subscription.cursor_offset:
            await subscription.seek(offset)
            await self.acks_stored(name)

    def _nearest(self, start: Position) -> Position:
        if isinstance(start, AtOffset):
            return AtOffset(min(max(start.offset, self.log.start_offset), self.log.next_offset))
        return start

    async def _create(
        self, name: str, options: SubscribeOptions, *, is_chosen: bool = True, owner: str | None = None
    ) -> None:
        """The subscription and its start, in one transaction. One that is there already stays as it is: it is
        of an attempt whose outcome was not known. ``is_chosen``: a caller wanted it to begin there.
        ``owner``: None: the principal of the running call."""
        if owner is None:
            owner = "" if is_replication_slot(name) else self._parts.owners.of_new()
        if self._parts.room is not None:
            await self._parts.room.check("subscriptions", owner)
        if not is_replication_slot(name):
            users = sum(not is_replication_slot(each) for each in self._live)
            check_new(self._topic, users + len(self._creating) - 1, self._parts.limits)
        start = await resolve(self.log, options.start)
        cursor = CursorRecord(start, (), self._tenure.epoch)

        async def create(found: Versioned[SubscriptionSpec]) -> RecordChange[SubscriptionSpec] | None:
            if found.value is not None:
                return None
            ahead = await self._set_ahead(name)
            settings = ahead.value or SettingsAhead()
            spec = SubscriptionSpec(
                type=options.type,
                failure_policy=settings.failure_policy
                or FailurePolicy(ack_timeout_ms=options.ack_timeout_ms),
                max_unacked_messages=settings.max_unacked_messages or self._parts.max_unacked_messages,
                created_ms=time.time_ns() // 1_000_000,
                first=0 if is_chosen else start,
                owner=owner,
            )
            writes: list[Put | Delete] = [Put(specs.cursor_key(self._topic, name), specs.encode(cursor))]
            if ahead.value is not None:
                writes.append(Delete(ahead.key))
            return RecordChange(spec, writes, (self._tenure.holds, ahead.unchanged))

        created = await self._update(name, create)
        self._check_open()
        if created.is_changed:
            assert created.value is not None
            self._add(name, created.value, cursor, created.revision)
        else:
            await self._adopt(name)

    async def _update(self, name: str, decide: Decide[SubscriptionSpec]) -> Updated[SubscriptionSpec]:
        """Of the subscription's record, if the tenure holds. Raises NotOwner."""
        key = specs.subscription_key(self._topic, name)
        what = f"subscription {name} of topic {self._topic}"
        return await self._records.update(
            key, SubscriptionSpec, decide, what=what, on_refused=self._tenure.check
        )

    async def _set_ahead(self, name: str) -> Versioned[SettingsAhead]:
        """What was set for a subscription that does not exist yet."""
        return await self._records.get(specs.settings_key(self._topic, name), SettingsAhead)

    async def _adopt(self, name: str) -> None:
        """Take the records of an attempt whose outcome was not known."""
        kv = await self._store.get(specs.subscription_key(self._topic, name))
        cursor = await self._store.get(specs.cursor_key(self._topic, name))
        self._check_open()
        if kv is None or cursor is None:
            raise RecordBusy(f"subscription {name} of topic {self._topic} is being removed")
        spec = specs.decode(kv, SubscriptionSpec)
        self._add(name, spec, specs.decode(cursor, CursorRecord), kv.create_revision)

    # -- changing ----------------------------------------------------------------------------

    async def unsubscribe(self, name: str) -> None:
        """Its consumers end, and its position is forgotten. Raises SubscriptionUnknown, OwnedByAnother."""
        self.need_own(name)
        others = (
            Delete(specs.cursor_key(self._topic, name)),
            DeletePrefix(specs.consumers_prefix(self._topic, name)),
        )

        def remove(found: Versioned[SubscriptionSpec]) -> RecordChange[SubscriptionSpec] | None:
            return RecordChange(None, others, (self._tenure.holds,)) if found.value is not None else None

        await self._update(name, remove)
        subscription = self._live.pop(name, None)
        if subscription is not None:
            if (cursor := self._cursors.pop(name, None)) is not None:  # not if the topic closes meanwhile
                self._parts.keeper.remove(cursor)
            self.ids.forget_subscription(name)
            self.retired.add(subscription.counters)
            await subscription.close(
                ConsumerClosed(f"subscription {name} of topic {self._topic} was removed")
            )

    async def set_failure_policy(self, name: str, policy: FailurePolicy, *, ahead: bool = False) -> None:
        """``ahead``: of a subscription that does not exist yet, too; its creation applies it. Raises
        SubscriptionUnknown, LimitReached."""
        await self._configure(name, ahead=ahead, failure_policy=policy)

    async def set_max_unacked(self, name: str, count: int, *, ahead: bool = False) -> None:
        """Raises MessageInvalid, and as ``set_failure_policy``."""
        if not 1 <= count <= MAX_UNACKED_MESSAGES:
            raise MessageInvalid(f"{count} unacked messages; 1 to {MAX_UNACKED_MESSAGES} can be allowed")
        await self._configure(name, ahead=ahead, max_unacked_messages=count)

    async def settings_ahead(self, name: str) -> SettingsAhead:
        """What was set for a subscription that does not exist yet. Raises SubscriptionUnknown without."""
        settings = (await self._set_ahead(name)).value
        if settings is None:
            raise SubscriptionUnknown(self._topic, name)
        return settings

    async def _configure(self, name: str, *, ahead: bool, **changes: Any) -> None:
        self._check_open()
        if name not in self._live and ahead:
            try:
                await self._configure_ahead(name, changes)
                return
            except SubscriptionExists:
                pass  # it was created meanwhile
        subscription = self.need_own(name)

        def configure(found: Versioned[SubscriptionSpec]) -> RecordChange[SubscriptionSpec]:
            if found.value is None:
                raise SubscriptionUnknown(self._topic, name)
            spec = msgspec.structs.replace(found.value, **changes)
            return RecordChange(spec, conditions=(self._tenure.holds,))

        updated = await self._update(name, configure)
        assert updated.value is not None
        subscription.configure(updated.value)

    async def _configure_ahead(self, name: str, changes: dict[str, Any]) -> None:
        """That the subscription is absent is a condition of the write, and that the settings are unchanged
        one of its creation: one of the two sees the other, whichever comes first. Raises
        SubscriptionExists."""
        check_unreserved(check_name(name, "subscription"))

        async def configure(found: Versioned[SettingsAhead]) -> RecordChange[SettingsAhead]:
            if found.value is None:
                page = await self._store.range(specs.settings_prefix(self._topic), limit=MAX_AHEAD)
                what = f"settings of topic {self._topic} without a subscription"
                check_room(len(page.kvs), MAX_AHEAD, what)
            settings = msgspec.structs.replace(found.value or SettingsAhead(), **changes)
            is_absent = absent(specs.subscription_key(self._topic, name))
            return RecordChange(settings, conditions=(self._tenure.holds, is_absent))

        async def refused() -> None:
            await self._tenure.check()
            if name in self._live:
                raise SubscriptionExists(f"topic {self._topic} has a subscription {name} already")

        await self._records.update(
            specs.settings_key(self._topic, name), SettingsAhead, configure, on_refused=refused
        )

    async def seek(self, name: str, position: Position) -> int:
        """The offset that it is at now; stored when this returns. Raises SubscriptionUnknown,
        OffsetOutOfRange."""
        subscription = self.need_own(check_unreserved(name))
        offset = await resolve(self.log, position)
        await subscription.seek(offset)
        await self.acks_stored(name)
        return offset

    async def advance(self, name: str, offset: int) -> None:
        """For a reader that keeps its own position: ack what is below, in a subscription of whichever type,
        which is created if it is missing; not so a link's. Raises OffsetOutOfRange, LimitReached,
        SubscriptionUnknown."""
        if offset > self.log.next_offset:
            raise OffsetOutOfRange(offset, self.log.start_offset, self.log.next_offset)
        if not is_replication_slot(name):  # which a caller that has not heard of its end must not bring back
            await self.ensure(name, SubscriptionType.SHARED)
        self.need_own(name).advance(offset)

    async def ensure(self, name: str, kind: SubscriptionType, *, owner: str | None = None) -> None:
        """Create it at the beginning of the topic, if it is missing. ``owner``: None: the principal of the
        running call. Raises LimitReached."""
        self._check_open()
        if name not in self._live:
            options = SubscribeOptions(
                subscription=check_name(name, "subscription"),
                type=kind,
                consumer_name="",
                start=End.EARLIEST,
            )
            create = partial(self._create, name, options, is_chosen=False, owner=owner)
            await self._creating.run(name, create)

    async def acks_stored(self, name: str) -> None:
        """Until everything that is acked now is in the metadata store."""
        stored = self.need(name).cursor.acks_stored()
        self._parts.keeper.wake()
        await asyncio.shield(stored)  # others wait for the same

    async def maintain(self) -> None:
        """Forget consumers that stay away."""
        await self._consumer_records.forget_absent(
            (name, consumer) for name, each in self._live.items() for consumer in each.consumers
        )

    async def close(self, error: SavaError, *, timeout: float = FLUSH_S) -> None:
        """Every consumer ends with the error; positions are written, as far as that is possible in time. Can
        be repeated."""
        self._closed = error
        await self._creating.stop(error)
        slices = Slices()
        for subscription in list(self._live.values()):
            await subscription.close(error)
            await slices.next()
        if any(kept.cursor.is_dirty for kept in self._cursors.values()):
            await self._parts.keeper.flush(timeout=timeout)
        while self._cursors:
            name, kept = self._cursors.popitem()
            self._parts.keeper.remove(kept)
            await slices.next()
            if kept.cursor.is_dirty:
                log.warning(
                    "subscriptions: the last acks are not stored, and will be delivered again "
                    "topic=%s subscription=%s",
                    self._topic,
                    name,
                )

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    # -- what a subscription asks of its topic -----------------------------------------------

    def _dispatch_rate(self) -> int:
        return self._parts.limits.of(self._topic).max_subscription_dispatch_rate


def known(topic: TopicName, options: SubscribeOptions, consumer_id: int) -> KnownConsumer:
    return KnownConsumer(
        consumer_id,
        topic,
        options.subscription,
        options.consumer_name,
        options.type,
        tuple(options.key_filters),
    )


def owned(consumer: KnownConsumer, ids: ConsumerIds, owners: OwnerRules) -> KnownConsumer:
    """As it is to be remembered: of the principal that came first. Raises OwnedByAnother."""
    older = ids.get(consumer.consumer_id)
    if older is not None and older.owner:
        owners.check_name(older.owner, consumer.name, consumer.topic, "consumer")
        return dataclasses.replace(consumer, owner="" if owners.frees else older.owner)
    return dataclasses.replace(consumer, owner=owners.of_new())


async def resolve(log: TopicLog, position: Position) -> int:
    """The offset that the position is at this moment. Raises OffsetOutOfRange."""
    match position:
        case End.EARLIEST:
            return log.start_offset
        case End.LATEST:
            return log.next_offset
        case AtOffset(offset):
            if not log.start_offset <= offset <= log.next_offset:
                raise OffsetOutOfRange(offset, log.start_offset, log.next_offset)
            return offset
        case _:
            return await log.offset_at(position.publish_time)
