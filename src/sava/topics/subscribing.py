"""Subscribing: what is asked for, and what is checked, on any kind of topic."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from sava.records import Message
from sava.topics.consumer import ConsumerHandle
from sava.topics.cursors import CursorKeeper
from sava.topics.errors import SubscriptionMismatch
from sava.topics.limits import TopicLimits, check_room
from sava.topics.names import (
    MAX_NAME_BYTES,
    InvalidName,
    TopicName,
    check_name,
    check_unreserved,
)
from sava.topics.non_reliable import NonReliableSubscription
from sava.topics.position import LATEST, Position
from sava.topics.publishing import SchemaGate
from sava.topics.specs import SubscriptionType
from sava.topics.subscription import Subscription

AnySubscription = Subscription | NonReliableSubscription


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
    gate: SchemaGate
    keeper: CursorKeeper
    dead_letter: Callable[[str, Sequence[Message]], Awaitable[None]]
    """Publish to the topic of this name, which is created if it is missing; returns when durable."""
    max_unacked_messages: int
    """Of a new subscription."""
    cluster: str
    """The name of this one."""
    max_link_backlog: int | None
    """Bytes of one topic that links may keep from retention; None: any number."""


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
    topic: TopicName, options: SubscribeOptions, live: Mapping[str, AnySubscription], limits: TopicLimits
) -> None:
    """Raise SubscriptionMismatch or LimitReached if the consumer cannot be attached. One that takes its own
    place always can."""
    name = options.subscription
    subscription = live.get(name)
    consumers: Mapping[str, ConsumerHandle] = subscription.consumers if subscription is not None else {}
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
