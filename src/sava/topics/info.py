"""TopicInfo: what there is to say about a topic that this broker serves."""

from __future__ import annotations

from dataclasses import dataclass

from sava.topics.names import TopicName
from sava.topics.specs import SubscriptionType


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
