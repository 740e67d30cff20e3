"""Topics as the admin port sees them, whichever brokers have their partitions: finding and asking the owners,
and the descriptions of topics and subscriptions.

A topic that a broker serves is described by that broker. An offline topic (its owner is gone, or it is on its
way from one broker to another), or one whose broker does not answer, is described by any, with what the
metadata store knows: an operator asks about a topic most urgently when it is not served.

What is done to one topic raises NotOwner if another broker has it, and the call is forwarded as a whole. What
is done to a partitioned topic is done to its partitions, each by its owner.

Counts add up over partitions. Offsets and cursors do not: offset 7 of one partition and offset 7 of another
are different messages, so a description of the whole has none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import grpc
import msgspec
from google.protobuf.message import Message

from sava.api.messages import to_message
from sava.cluster.view import ClusterView, TopicEntry
from sava.errors import RetryableError, SavaError, shown
from sava.metadata.store import LocalView, MetadataStore
from sava.peers.error_mapping import Relayed
from sava.peers.partition_calls import (
    PARALLEL,
    PartitionCall,
    PartitionCalls,
    Reply,
)
from sava.proto import topics_admin_pb2 as pb
from sava.storage.catalog import known_state
from sava.storage.keys import is_replication_slot
from sava.storage.types import TopicKey
from sava.tasks import Slices, spread
from sava.topics.errors import MessageInvalid, SubscriptionUnknown, TopicUnknown
from sava.topics.names import TopicName
from sava.topics.non_reliable import NonReliableSubscription
from sava.topics.rules import EffectiveLimits
from sava.topics.served import ServedTopics
from sava.topics.specs import (
    EARLIEST,
    LATEST,
    AtOffset,
    AtTime,
    CursorRecord,
    DeadLetterPolicy,
    End,
    FailurePolicy,
    NamespacePolicy,
    Ownership,
    OwnershipState,
    Position,
    RedeliveryBackoff,
    SubscriptionSpec,
    SubscriptionType,
    TopicSpec,
    decode,
    subscriptions_prefix,
)
from sava.topics.topic import AnySubscription, Topic

Request = TypeVar("Request", bound=Message)

DESCRIBE: Final = "/sava.admin.Topics/DescribeTopic"
DESCRIBE_S: Final = 4.0
SETTLE_S: Final = 5.0
"""How long a topic that was just created is waited for before it is said to be unassigned."""


class Partitions:
    """Holds nothing between calls."""

    def __init__(
        self, topics: ServedTopics, store: MetadataStore, view: ClusterView, owners: PartitionCalls
    ) -> None:
        self.topics = topics
        self.view = view
        self._store = store
        self._owners = owners

    async def names(self, name: TopicName) -> list[TopicName]:
        """The partitions; the topic itself if it has none. Raises TopicUnknown."""
        partitions = await self.topics.registry.partitions(name)
        if not partitions:
            raise TopicUnknown(name)
        return partitions

    async def is_partitioned(self, name: TopicName) -> bool:
        """Raises TopicUnknown."""
        return bool((await self.topics.registry.need(name)).partitions)

    # -- describing --------------------------------------------------------------------------

    async def here(self, name: TopicName) -> pb.TopicDescription:
        """Of a topic that has no partitions. Raises NotOwner if another broker serves it."""
        topic = self.topics.loaded.get(name)
        if topic is None or not topic.is_serving:
            entry = self.view.entry(name)
            if entry is not None and not self._is_served(entry):
                return await unserved_topic(entry, self._store.local)
            topic = await self.topics.get(name)
        return await topic_description(topic, self.topics.broker)

    def _is_served(self, entry: TopicEntry) -> bool:
        return entry.record.state is OwnershipState.ASSIGNED and entry.record.owner in self.view.brokers

    async def describe(self, names: Sequence[TopicName]) -> list[pb.TopicDescription]:
        """Each by its owner. Of one whose owner does not answer, what the metadata store knows."""
        return await spread(names, self._describe, parallel=PARALLEL)

    async def _describe(self, name: TopicName) -> pb.TopicDescription:
        part = PartitionCall(
            topic=name,
            method=DESCRIBE,
            request=pb.DescribeTopicRequest(name=str(name)),
            reply=pb.TopicDescription,
            here=partial(self.here, name),
        )
        try:
            return await self._owners.do(part, timeout=DESCRIBE_S)
        except SavaError as error:
            entry = self.view.entry(name)
            if entry is None or not _is_silence(error):
                raise
            described = await unserved_topic(entry, self._store.local)
            if self._is_served(entry):
                described.reason = f"broker {entry.record.owner} does not answer: {error}"
            return described

    async def settle(self, names: Sequence[TopicName]) -> None:
        """Until new topics have owners; they are described as they are after a while."""
        await self._owners.settled(names, timeout=SETTLE_S)

    # -- subscriptions -----------------------------------------------------------------------

    async def having(self, name: TopicName, subscription: str) -> list[TopicName]:
        """Those that have the subscription: a partition that was added later has it when the first consumer
        comes. Raises SubscriptionUnknown if none has."""
        found = [
            TopicName.parse(described.name)
            for described in await self.describe(await self.names(name))
            if subscription in subscription_names(described)
        ]
        if not found:
            raise SubscriptionUnknown(name, subscription)
        return found

    async def on_subscription(
        self,
        method: str,
        request: Any,
        reply: type[Reply],
        work: Callable[[Topic, Any], Awaitable[Reply]],
        *,
        or_all: bool = False,
    ) -> list[Reply]:
        """``work`` on the topic that the request names, or on those of its partitions that have the
        subscription that it names: one answer for each. ``or_all``: on all partitions if none has it."""
        name = TopicName.parse(request.topic)
        if not await self.is_partitioned(name):
            return [await work(await self.topics.get(name), request)]
        try:
            names = await self.having(name, request.subscription)
        except SubscriptionUnknown:
            if not or_all:
                raise
            names = await self.names(name)
        return await self.on_each(names, method, request, reply, work)

    async def on_all(
        self,
        method: str,
        request: Any,
        reply: type[Reply],
        work: Callable[[Topic, Any], Awaitable[Reply]],
    ) -> list[Reply]:
        """``work`` on the topic that the request names, or on all of its partitions: one answer for each."""
        name = TopicName.parse(request.topic)
        if not await self.is_partitioned(name):
            return [await work(await self.topics.get(name), request)]
        return await self.on_each(await self.names(name), method, request, reply, work)

    async def on_each(
        self,
        names: Sequence[TopicName],
        method: str,
        request: Request,
        reply: type[Reply],
        work: Callable[[Topic, Request], Awaitable[Reply]],
    ) -> list[Reply]:
        """``work`` on each topic by its owner; ``request`` with the topic's name in its ``topic`` is what
        others are asked."""

        async def here(name: TopicName, asked: Request) -> Reply:
            return await work(await self.topics.get(name), asked)

        parts = []
        for name in names:
            asked = _about(request, name)
            parts.append(
                PartitionCall(
                    topic=name, method=method, request=asked, reply=reply, here=partial(here, name, asked)
                )
            )
        return await self._owners.each(parts)


def _is_silence(error: SavaError) -> bool:
    """Whether no broker answered, as opposed to one that refused."""
    if isinstance(error, Relayed):
        return error.status is grpc.StatusCode.UNAVAILABLE
    return isinstance(error, RetryableError)


def _about(request: Request, name: TopicName) -> Request:
    copy: Any = type(request)()
    copy.CopyFrom(request)
    copy.topic = str(name)
    asked: Request = copy
    return asked


# -- policies --------------------------------------------------------------------------------------


LIMITS = tuple(field.name for field in pb.Policy.DESCRIPTOR.fields)
MAX_MS = 1 << 40
"""The longest time that is taken; longer ones would not fit where they are added up."""

_SUMS = (
    "backlog",
    "unacked",
    "in_flight",
    "delivered",
    "acked",
    "nacked",
    "redelivered",
    "timed_out",
    "dropped",
    "dead_lettered",
    "skipped_by_filter",
    "skipped_by_retention",
)


# -- policies ------------------------------------------------------------------------------------


def policy_message(policy: NamespacePolicy | EffectiveLimits) -> pb.Policy:
    limits = ((name, getattr(policy, name)) for name in LIMITS)
    return pb.Policy(**{name: limit for name, limit in limits if limit is not None})


def policy_from(message: pb.Policy) -> NamespacePolicy:
    return NamespacePolicy(**{field.name: limit for field, limit in message.ListFields()})


def changed_policy(policy: NamespacePolicy, change: pb.Policy, clear: Iterable[str]) -> NamespacePolicy:
    """Raises MessageInvalid for a name that no limit has."""
    limits: dict[str, int | None] = {field.name: limit for field, limit in change.ListFields()}
    for name in clear:
        if name not in LIMITS:
            raise MessageInvalid(f"{shown(name)} is no limit; those are {', '.join(LIMITS)}")
        limits[name] = None
    return msgspec.structs.replace(policy, **limits)


def changed_failure_policy(policy: FailurePolicy, change: pb.FailurePolicy) -> FailurePolicy:
    """Raises MessageInvalid."""
    fields = {field.name: value for field, value in change.ListFields()}
    for name, value in fields.items():
        if name.endswith("_ms") and value > MAX_MS:
            raise MessageInvalid(f"{name} {value} is too long")
    try:
        if "backoff" in fields:
            fields["backoff"] = RedeliveryBackoff(fields["backoff"])
        if "dead_letter" in fields:
            fields["dead_letter"] = DeadLetterPolicy(fields["dead_letter"])
    except ValueError as error:
        raise MessageInvalid(f"failure policy: {error}") from None
    if fields.get("dead_letter_topic"):
        TopicName.parse(fields["dead_letter_topic"])
    return msgspec.structs.replace(policy, **fields)


# -- words ---------------------------------------------------------------------------------------


def delivery(spec: TopicSpec) -> str:
    return "Reliable" if spec.reliable else "NonReliable"


def subscription_type(text: str) -> SubscriptionType:
    try:
        return SubscriptionType[text.upper()]
    except KeyError:
        known = ", ".join(kind.name.lower() for kind in SubscriptionType)
        raise MessageInvalid(f"subscription type {shown(text)} does not exist; known are {known}") from None


def _type(subscription: str, kind: SubscriptionType) -> str:
    """Of a link's cursor it means nothing: it has no consumers."""
    return "link" if is_replication_slot(subscription) else kind.name.lower()


def position(message: pb.StartPosition) -> Position:
    match message.WhichOneof("kind"):
        case "earliest":
            return EARLIEST
        case "latest":
            return LATEST
        case "offset":
            return AtOffset(message.offset)
        case "publish_time":
            return AtTime(message.publish_time)
        case _:
            raise MessageInvalid("the position is missing")


def start_message(start: Position) -> pb.StartPosition:
    match start:
        case AtOffset(offset):
            return pb.StartPosition(offset=offset)
        case AtTime(publish_time):
            return pb.StartPosition(publish_time=publish_time)
        case End.EARLIEST:
            return pb.StartPosition(earliest=True)
        case _:
            return pb.StartPosition(latest=True)


# -- topics and subscriptions --------------------------------------------------------------------


def members(name: TopicName, spec: TopicSpec) -> list[TopicName]:
    """The partitions; the topic itself if it has none."""
    return [name.partition(index) for index in range(spec.partitions)] or [name]


def common_owner(brokers: Iterable[int]) -> int:
    """The broker that serves all of them; 0 if none does, or several."""
    owners = set(brokers)
    return owners.pop() if len(owners) == 1 else 0


async def topic_description(topic: Topic, broker: int) -> pb.TopicDescription:
    """Of a topic that has no partitions, without what it does not know itself: policies and schema."""
    described = pb.TopicDescription(
        name=str(topic.name),
        topic_id=topic.topic_id,
        broker_id=broker,
        delivery=delivery(topic.spec),
        state=topic.state,
        epoch=topic.epoch,
        producers=sorted(producer.name for producer in topic.producers),
        created_ms=topic.spec.created_ms,
    )
    if topic.log is not None:
        described.start_offset = topic.log.start_offset
        described.next_offset = topic.next_offset
        described.stored_offset = topic.log.stored_offset
    # In slices: of ten thousand subscriptions this takes half a second, and heartbeats wait behind it.
    slices = Slices()
    for name in sorted(topic.subscriptions):
        if (subscription := topic.subscriptions.get(name)) is not None:  # not removed meanwhile
            described.subscriptions.append(_subscription(topic.name, subscription))
        await slices.next()
    return described


async def unserved_topic(entry: TopicEntry, local: LocalView) -> pb.TopicDescription:
    """Of a topic that no broker serves: what the metadata store knows. It has more messages than that if its
    owner is gone with some that only its disk holds, so the end is said only where it is certain."""
    name, spec, record = entry.name, entry.spec, entry.record
    described = pb.TopicDescription(
        name=str(name),
        topic_id=spec.topic_id,
        broker_id=record.owner,
        delivery=delivery(spec),
        state=record.state.value,
        epoch=record.epoch,
        subscriptions=await _stored_subscriptions(name, local),
        created_ms=spec.created_ms,
        reason=_why_unserved(record),
    )
    stored = (
        known_state(local, TopicKey(name.namespace, name.topic, spec.topic_id)) if spec.reliable else None
    )
    if stored is not None:
        described.start_offset = stored.start
        described.stored_offset = stored.end
        if stored.sealed or stored.is_clean:
            described.next_offset = stored.end
    return described


def _why_unserved(record: Ownership) -> str:
    match record.state:
        case OwnershipState.ORPHAN:
            why = (
                f"broker {record.owner} is gone and did not hand it over; `sava ledgers list` shows what "
                "its journals wait for"
            )
        case OwnershipState.MOVING:
            why = f"broker {record.owner} hands it over"
        case OwnershipState.ASSIGNED:
            why = f"broker {record.owner} has it and is not there"
        case OwnershipState.DELETING:
            why = "it is being deleted"
        case _:
            why = "no broker has taken it yet"
    return f"{why}; {record.error}" if record.error else why


async def _stored_subscriptions(name: TopicName, local: LocalView) -> list[pb.SubscriptionDescription]:
    found: dict[str, pb.SubscriptionDescription] = {}
    slices = Slices()
    for kv in local.range(subscriptions_prefix(name)).kvs:
        await slices.next()
        match kv.key.split("/")[5:]:
            case [subscription]:
                spec = decode(kv, SubscriptionSpec)
                found[subscription] = pb.SubscriptionDescription(
                    topic=str(name),
                    subscription=subscription,
                    type=_type(subscription, spec.type),
                    failure_policy=to_message(pb.FailurePolicy, spec.failure_policy),
                    max_unacked_messages=spec.max_unacked_messages,
                )
            case [subscription, "cursor"] if subscription in found:
                found[subscription].cursor = decode(kv, CursorRecord).next_offset
    return [found[subscription] for subscription in sorted(found)]


def subscription_names(described: pb.TopicDescription) -> set[str]:
    return {each.subscription for each in described.subscriptions}


def find_subscription(
    name: TopicName, parts: Iterable[pb.TopicDescription], subscription: str
) -> list[pb.SubscriptionDescription]:
    """In those parts that have it. Raises SubscriptionUnknown if none has."""
    found = [each for part in parts for each in part.subscriptions if each.subscription == subscription]
    if not found:
        raise SubscriptionUnknown(name, subscription)
    return found


def subscription_of(topic: Topic, name: str) -> AnySubscription:
    """Raises SubscriptionUnknown."""
    found = topic.subscriptions.get(name)
    if found is None:
        raise SubscriptionUnknown(topic.name, name)
    return found


def subscription_description(topic: Topic, subscription: str) -> pb.SubscriptionDescription:
    """Raises SubscriptionUnknown."""
    return _subscription(topic.name, subscription_of(topic, subscription))


def _subscription(topic: TopicName, subscription: AnySubscription) -> pb.SubscriptionDescription:
    active = ""
    if subscription.type is SubscriptionType.FAILOVER:
        served = (name for name, consumer in subscription.consumers.items() if consumer.is_active)
        active = next(served, "")
    common: dict[str, Any] = {
        "topic": str(topic),
        "subscription": subscription.name,
        "type": _type(subscription.name, subscription.type),
        "consumers": sorted(subscription.consumers),
        "active_consumer": active,
    }
    if isinstance(subscription, NonReliableSubscription):
        delivered, dropped = subscription.delivered, subscription.dropped
        return pb.SubscriptionDescription(**common, delivered=delivered, dropped=dropped)
    stats, spec = subscription.stats, subscription.spec
    return to_message(
        pb.SubscriptionDescription,
        stats,
        **common,
        cursor=subscription.cursor_offset,
        backlog=subscription.backlog,
        blocked_offsets=[offset for blocked in stats.blocked_offsets for offset in blocked],
        failure_policy=to_message(pb.FailurePolicy, spec.failure_policy),
        max_unacked_messages=spec.max_unacked_messages,
    )


def whole_topic(
    name: TopicName, spec: TopicSpec, parts: Sequence[pb.TopicDescription]
) -> pb.TopicDescription:
    """A partitioned topic, from the descriptions of its partitions."""
    return pb.TopicDescription(
        name=str(name),
        topic_id=spec.topic_id,
        broker_id=common_owner(part.broker_id for part in parts),
        delivery=delivery(spec),
        partitions=[part.name for part in parts],
        state=together(part.state for part in parts),
        reason=together(part.reason for part in parts),
        producers=sorted({producer for part in parts for producer in part.producers}),
        subscriptions=whole_subscriptions(name, [each for part in parts for each in part.subscriptions]),
        created_ms=spec.created_ms,
    )


def whole_subscriptions(
    name: TopicName, parts: Iterable[pb.SubscriptionDescription]
) -> list[pb.SubscriptionDescription]:
    by_name: dict[str, list[pb.SubscriptionDescription]] = {}
    for part in parts:
        by_name.setdefault(part.subscription, []).append(part)
    return [_whole_subscription(name, by_name[each]) for each in sorted(by_name)]


def _whole_subscription(
    name: TopicName, parts: Sequence[pb.SubscriptionDescription]
) -> pb.SubscriptionDescription:
    first = parts[0]
    return pb.SubscriptionDescription(
        topic=str(name),
        subscription=first.subscription,
        type=together(part.type for part in parts),
        consumers=sorted({consumer for part in parts for consumer in part.consumers}),
        active_consumer=together(part.active_consumer for part in parts),
        blocked=any(part.blocked for part in parts),
        error=together(part.error for part in parts),
        failure_policy=first.failure_policy if first.HasField("failure_policy") else None,
        max_unacked_messages=first.max_unacked_messages,
        **{field: sum(getattr(part, field) for part in parts) for field in _SUMS},
    )


def together(texts: Iterable[str]) -> str:
    """What all say, or the different things that they say."""
    return ", ".join(sorted({text for text in texts if text}))
