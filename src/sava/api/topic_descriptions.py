"""Descriptions: what the admin port says about topics and subscriptions, and how those of the partitions of
one topic are put together.

Counts add up over partitions. Offsets and cursors do not: offset 7 of one partition and offset 7 of another
are different messages, so a description of the whole has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sava.cluster.view import TopicEntry
from sava.metadata.store import LocalView
from sava.proto import topics_admin_pb2 as pb
from sava.storage.catalog import known_state
from sava.storage.source_positions import is_replication_slot
from sava.storage.types import TopicKey
from sava.tasks import Slices
from sava.topics.errors import MessageInvalid, SubscriptionUnknown
from sava.topics.limits import EffectiveLimits
from sava.topics.names import TopicName
from sava.topics.non_reliable import NonReliableSubscription
from sava.topics.position import (
    EARLIEST,
    LATEST,
    AtOffset,
    AtTime,
    End,
    Position,
)
from sava.topics.specs import (
    CursorRecord,
    DeadLetterPolicy,
    FailurePolicy,
    NamespacePolicy,
    Ownership,
    OwnershipState,
    RedeliveryBackoff,
    SubscriptionSpec,
    SubscriptionType,
    TopicSpec,
    decode,
    subscriptions_prefix,
)
from sava.topics.subscribing import AnySubscription
from sava.topics.topic import Topic

LIMITS = tuple(field.name for field in pb.Policy.DESCRIPTOR.fields)
MAX_MS = 1 << 40
"""Times that somebody can mean; longer ones would not fit where they are added up."""

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
            raise MessageInvalid(f"{name!a} is no limit; those are {', '.join(LIMITS)}")
        limits[name] = None
    return msgspec.structs.replace(policy, **limits)


def failure_policy_message(policy: FailurePolicy) -> pb.FailurePolicy:
    return pb.FailurePolicy(**msgspec.structs.asdict(policy))


def changed_failure_policy(policy: FailurePolicy, change: pb.FailurePolicy) -> FailurePolicy:
    """Raises MessageInvalid."""
    fields = {field.name: value for field, value in change.ListFields()}
    for name, value in fields.items():
        if name.endswith("_ms") and value > MAX_MS:
            raise MessageInvalid(f"{name} {value} is too long")
    try:
        if "backoff" in fields:
            fields["backoff"] = RedeliveryBackoff(fields["backoff"])
        if "poison" in fields:
            fields["poison"] = DeadLetterPolicy(fields["poison"])
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
        raise MessageInvalid(f"subscription type {text!a} does not exist; known are {known}") from None


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
    """Who serves all of them; 0 if nobody does, or several."""
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
                f"broker {record.owner} is gone and did not hand it over; `sava journals list` shows what "
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
                    failure_policy=failure_policy_message(spec.failure_policy),
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
    described = pb.SubscriptionDescription(
        topic=str(topic),
        subscription=subscription.name,
        type=_type(subscription.name, subscription.type),
        consumers=sorted(subscription.consumers),
    )
    if subscription.type is SubscriptionType.FAILOVER:
        active = (name for name, consumer in subscription.consumers.items() if consumer.is_active)
        described.active_consumer = next(active, "")
    if isinstance(subscription, NonReliableSubscription):
        described.delivered = subscription.delivered
        described.dropped = subscription.dropped
        return described
    stats, spec = subscription.stats, subscription.spec
    described.MergeFrom(
        pb.SubscriptionDescription(
            cursor=subscription.cursor_offset,
            backlog=subscription.backlog,
            unacked=stats.unacked,
            in_flight=stats.in_flight,
            blocked=stats.blocked,
            blocked_offsets=[offset for stretch in stats.blocked_offsets for offset in stretch],
            error=stats.error,
            delivered=stats.delivered,
            acked=stats.acked,
            nacked=stats.nacked,
            redelivered=stats.redelivered,
            timed_out=stats.timed_out,
            dropped=stats.dropped,
            dead_lettered=stats.dead_lettered,
            skipped_by_filter=stats.skipped_by_filter,
            skipped_by_retention=stats.skipped_by_retention,
            failure_policy=failure_policy_message(spec.failure_policy),
            max_unacked_messages=spec.max_unacked_messages,
        )
    )
    return described


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
