"""Specs: what the metadata store holds of namespaces, topics and subscriptions, and under which keys.

    /namespaces/{ns}/policy                                  NamespacePolicy
    /namespaces/{ns}/replication                             sava.replication.records.PolicyRecord
    /topics/{ns}/{topic}/spec                                TopicSpec
    /topics/{ns}/{topic}/policy                              NamespacePolicy (what a topic overrides)
    /topics/{ns}/{topic}/replication                         sava.replication.records.PolicyRecord
    /topics/{ns}/{topic}/schema                              sava.schemas.TopicSchema
    /topics/{ns}/{topic}/ownership                           Ownership
    /topics/{ns}/{topic}/subscriptions/{sub}                 SubscriptionSpec
    /topics/{ns}/{topic}/subscriptions/{sub}/cursor          CursorRecord
    /topics/{ns}/{topic}/subscriptions/{sub}/consumers/{c}   ConsumerRecord
    /topics/{ns}/{topic}/settings/{sub}                      SettingsAhead

A subscription and its cursor are written together when it is created: a start position that only memory knows
would be another one after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from typing import Final, TypeVar
from urllib.parse import quote, unquote

import msgspec

from sava.metadata.commands import KeyValue
from sava.metadata.records import RecordCorrupt
from sava.metadata.records import encode as encode
from sava.topics.names import TopicName

T = TypeVar("T")

NAMESPACES: Final = "/namespaces/"
TOPICS: Final = "/topics/"
TOPIC_IDS: Final = "/topics-next-id"
DEFAULT_NAMESPACES: Final = ("default", "system")

MAX_UNACKED_MESSAGES: Final = 1_000_000


def namespace_prefix(namespace: str) -> str:
    """Everything that the store holds of a namespace besides its topics."""
    return f"{NAMESPACES}{namespace}/"


def namespace_key(namespace: str) -> str:
    return f"{namespace_prefix(namespace)}policy"


def namespace_of_key(key: str) -> str | None:
    """The namespace whose policy the key holds; None if it holds something else."""
    parts = key.split("/")
    return parts[2] if len(parts) == 4 and parts[3] == "policy" else None


def namespace_topics_prefix(namespace: str) -> str:
    return f"{TOPICS}{namespace}/"


def topic_prefix(topic: TopicName) -> str:
    """Everything that the store holds of a topic besides its storage."""
    return f"{TOPICS}{topic.namespace}/{topic.topic}/"


def spec_key(topic: TopicName) -> str:
    return f"{topic_prefix(topic)}spec"


def policy_key(topic: TopicName) -> str:
    return f"{topic_prefix(topic)}policy"


def schema_key(topic: TopicName) -> str:
    return f"{topic_prefix(topic)}schema"


def ownership_key(topic: TopicName) -> str:
    return f"{topic_prefix(topic)}ownership"


def subscriptions_prefix(topic: TopicName) -> str:
    return f"{topic_prefix(topic)}subscriptions/"


def subscription_key(topic: TopicName, subscription: str) -> str:
    return f"{subscriptions_prefix(topic)}{subscription}"


def cursor_key(topic: TopicName, subscription: str) -> str:
    return f"{subscription_key(topic, subscription)}/cursor"


def settings_prefix(topic: TopicName) -> str:
    return f"{topic_prefix(topic)}settings/"


def settings_key(topic: TopicName, subscription: str) -> str:
    return f"{settings_prefix(topic)}{subscription}"


def consumers_prefix(topic: TopicName, subscription: str) -> str:
    return f"{subscription_key(topic, subscription)}/consumers/"


def consumer_key(topic: TopicName, subscription: str, consumer: str) -> str:
    """A consumer is called what its client likes, so the name is quoted."""
    return f"{consumers_prefix(topic, subscription)}{quote(consumer, safe='')}"


def consumer_of_key(key: str) -> str:
    return unquote(key.rpartition("/")[2])


def topic_of_spec_key(key: str) -> TopicName | None:
    """The topic whose spec the key holds; None if it holds something else."""
    parts = key.split("/")
    return TopicName(parts[2], parts[3]) if len(parts) == 5 and parts[4] == "spec" else None


def is_subscription_key(key: str) -> bool:
    """Whether it holds the spec of a subscription."""
    parts = key.split("/")
    return len(parts) == 6 and parts[4] == "subscriptions"


def decode(kv: KeyValue, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(kv.value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordCorrupt(f"the record {kv.key} cannot be read: {error}") from error


class TopicSpec(msgspec.Struct, frozen=True, kw_only=True):
    topic_id: int
    """New for each creation, growing. A partitioned topic has one as well."""
    reliable: bool
    partitions: int = 0
    """0: a plain topic, or a partition. Otherwise the number of partitions; it only grows."""
    created_ms: int = 0
    deleting: bool = False
    """The topic is gone for all clients; what it had is being removed. Of a partition its partitioned topic's
    record says so. The name is free again when the record is gone."""
    owner: str = ""
    """The principal whose quota counts it; empty: of none, as what administrators create."""


class NamespacePolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits; None: as the level above says (topic → namespace → configuration), 0: no limit."""

    max_producers_per_topic: int | None = None
    max_subscriptions_per_topic: int | None = None
    max_consumers_per_topic: int | None = None
    max_consumers_per_subscription: int | None = None
    max_publish_rate: int | None = None
    """Messages a second into a topic. Publishing waits; nothing is dropped."""
    max_subscription_dispatch_rate: int | None = None
    """Messages a second out of a subscription. Dispatch waits; nothing is dropped."""
    max_message_size: int | None = None
    retention_time_minutes: int | None = None
    retention_size_mb: int | None = None


class SubscriptionType(IntEnum):
    """With Danube's numbers."""

    EXCLUSIVE = 0
    SHARED = 1
    FAILOVER = 2
    KEY_SHARED = 3


class RedeliveryBackoff(StrEnum):
    FIXED = "fixed"
    EXPONENTIAL = "exponential"


class DeadLetterPolicy(StrEnum):
    """What happens to a message that was delivered too often without an ack."""

    BLOCK = "block"
    """The subscription (of key-shared ones: the key) waits for an operator."""
    DROP = "drop"
    DEAD_LETTER = "dead_letter"


class FailurePolicy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    max_redelivery_count: int = 5
    ack_timeout_ms: int = 30_000
    """0: none."""
    base_redelivery_delay_ms: int = 1_000
    max_redelivery_delay_ms: int = 60_000
    backoff: RedeliveryBackoff = RedeliveryBackoff.EXPONENTIAL
    dead_letter: DeadLetterPolicy = DeadLetterPolicy.BLOCK
    dead_letter_topic: str = ""
    """Empty: ``{topic}-{subscription}-dlq`` in the same namespace."""

    def delay_ms(self, attempt: int) -> int:
        """Before the delivery that follows delivery number ``attempt`` (from 1)."""
        base = self.base_redelivery_delay_ms
        if self.backoff is RedeliveryBackoff.EXPONENTIAL:
            base <<= min(attempt - 1, 32)
        return min(base, self.max_redelivery_delay_ms)

    def is_exhausted(self, attempt: int) -> bool:
        """Whether delivery number ``attempt`` was the last one."""
        return attempt > self.max_redelivery_count


class SubscriptionSpec(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    type: SubscriptionType
    failure_policy: FailurePolicy = FailurePolicy()
    max_unacked_messages: int = 65_536
    """Delivered and not acked, over all consumers of the subscription."""
    created_ms: int = 0
    first: int = 0
    """Where it began, if no caller had chosen that: that it has acked nothing below says nothing of messages
    there."""
    owner: str = ""
    """The principal that made it, which alone may use it; empty: all who may consume from the topic."""


class SettingsAhead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an operator has set for a subscription that does not exist yet: its creation applies this and
    removes the record in the same transaction. None: the default."""

    failure_policy: FailurePolicy | None = None
    max_unacked_messages: int | None = None


class CursorRecord(msgspec.Struct, frozen=True, array_like=True):
    """Everything below ``next_offset`` is acked, and so are ``acked`` (start, end, start, end, …) beyond."""

    next_offset: int
    acked: tuple[int, ...] = ()
    epoch: int = 0
    """Of the topic's owner that wrote it, for people: that no older owner writes over a newer one's is a
    condition of the write (``ownership.Tenure``)."""
    notified: tuple[int, ...] = ()
    """Of subscriptions of the same name in other clusters: source key, offset, … Everything that is
    acked there below the offset is on record here."""


class ConsumerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer that subscribed through Danube's protocol. Its client may come back after a restart with
    nothing but its id."""

    consumer_id: int
    type: SubscriptionType
    """Of its subscription, which on a topic that is not reliable has no record of its own."""
    key_filters: tuple[str, ...] = ()
    owner: str = ""
    """The principal that subscribed; empty: any may come back with the id."""


class OwnershipState(StrEnum):
    """See ``ownership`` for what each becomes, and by whom."""

    UNASSIGNED = "unassigned"
    """No broker has served it yet."""
    ASSIGNED = "assigned"
    """``owner`` serves it, or is about to."""
    MOVING = "moving"
    """``owner`` still has it and is handing it over."""
    SEALED = "sealed"
    """No broker has it; any broker can read everything below ``end``, and the next owner continues there."""
    ORPHAN = "orphan"
    """``owner`` is gone without having handed it over; what it knows alone is on its disk."""
    DELETING = "deleting"
    """``owner`` lets go of it, and then it is removed."""


class Ownership(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who serves a topic. The epoch is the fencing token of every append, segment and cursor write."""

    state: OwnershipState = OwnershipState.ASSIGNED
    epoch: int
    owner: int = 0
    """Node id; 0: none."""
    incarnation: int = 0
    """Which life of the owner: the lease of its registration. 0: it has not taken the topic up yet."""
    target: int = 0
    """Of a move: where to. A preference by the time that it is sealed, for the target may be gone. 0: any."""
    from_broker: int = 0
    """Who had it before, and gave it up: not the first choice for the next owner."""
    end: int = 0
    """Once sealed: the next owner's first offset."""
    store_id: str = ""
    """Which object store its segments are in: that of the broker that it was last assigned to, kept here
    because a broker that is gone cannot be asked. Empty: not known."""
    reason: str = ""
    """Of the last assignment or move: create, unload, drain, rebalance, failover."""
    timeout_ms: int = 0
    """Of a move: how long its owner may take to hand the topic over."""
    failures: int = 0
    """Assignments in a row that did not come to serving."""
    error: str = ""
    """Why the last move was taken back or the last assignment failed."""
    since_ms: int = 0
    """When the record was written, by its writer's clock; for people."""


class End(Enum):
    """One of the two ends of a topic."""

    EARLIEST = "earliest"
    """The first message that is kept."""
    LATEST = "latest"
    """What comes from now on."""


@dataclass(frozen=True, slots=True)
class AtOffset:
    offset: int


@dataclass(frozen=True, slots=True)
class AtTime:
    publish_time: int
    """µs: the first message that was not published before."""


Position = End | AtOffset | AtTime
"""Where a subscription or a reader begins."""

EARLIEST: Final = End.EARLIEST
LATEST: Final = End.LATEST
