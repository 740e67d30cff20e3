"""What the metadata store holds of replication.

    /cluster/remotes/{remote}                    RemoteRecord
    /namespaces/{ns}/replication                 PolicyRecord
    /topics/{ns}/{topic}/replication             PolicyRecord, in place of the namespace's
    /replication/{remote}/{ns}/{topic}           LinkRecord: what must be remembered of a topic and a remote
    /replication/{remote}/{ns}/{topic}/report    ReportRecord: what a runner said last, not of every time

A topic's policy lies below the topic and goes with it; a namespace's below the namespace. A link's record
outlives the policy: that a topic was deleted at the remote must not be forgotten because replication was
switched off and on again. It goes with the topic, and with the remote.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from sava.errors import CallerError, RetryableError, cut
from sava.topics import specs
from sava.topics.names import TopicName

REMOTES: Final = "/cluster/remotes/"
LINKS: Final = "/replication/"
REPLICATION: Final = "replication"
REPORT: Final = "report"

EARLIEST: Final = "earliest"
LATEST: Final = "latest"


def remote_key(remote: str) -> str:
    return f"{REMOTES}{remote}"


def namespace_policy_key(namespace: str) -> str:
    return f"{specs.NAMESPACES}{namespace}/{REPLICATION}"


def topic_policy_key(topic: TopicName) -> str:
    return f"{specs.topic_prefix(topic)}{REPLICATION}"


def link_key(remote: str, topic: TopicName) -> str:
    return f"{LINKS}{remote}/{topic.namespace}/{topic.topic}"


def report_key(remote: str, topic: TopicName) -> str:
    return f"{link_key(remote, topic)}/{REPORT}"


class RemoteRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Another cluster, under the name by which this one calls it."""

    service: str
    """Client addresses, with commas between."""
    token: str = ""
    tls_ca: str = ""
    """Files on the machines of brokers and runners."""
    tls_cert: str = ""
    tls_key: str = ""
    max_rate: int = 0
    """Messages a second, of all topics together; 0: no limit."""
    cluster_name: str
    """By its own word when it was added. Messages carry the names of the clusters that they have been in."""
    cluster_id: str
    """A cluster that was initialised again has another, and knows nothing of what was copied before."""
    added_ms: int = 0


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    remotes: tuple[str, ...] = ()
    """None: not replicated, whatever the namespace says."""
    start: str = EARLIEST
    """``earliest``, ``latest``, or microseconds since 1970 UTC; for what was never copied."""
    forward: bool = False
    """Pass on what came from other clusters."""
    subscriptions: tuple[str, ...] = ()
    """Those whose positions are copied."""


class LinkRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One topic and one remote."""

    topic_id: int
    """Of the topic here: one of the same name that was created later has nothing to do with this record."""
    is_wanted: bool = True
    """False: no policy asks for it at present."""
    since_ms: int = 0
    """When it came under a policy."""
    base_partitions: int = 0
    """Partitions here when it came under a policy, or when the remote was last seen to have as many. More
    than that now: some were added, and they are to be added there too."""
    start_offsets: tuple[int, ...] = ()
    """Of a policy that starts at the latest: the ends of the partitions when it came into force."""
    remote_topic_ids: tuple[int, ...] = ()
    """Of the topic there, by partition, when it was last seen."""
    begins: tuple[int, ...] = ()
    """Where the copy of each partition begins, in offsets here; 0 also while that is not known. Policies may
    say something else by now: they are about what was never copied."""
    is_tombstone: bool = False
    """It was deleted there: neither created nor copied until an operator asks for it."""
    generation: int = 0
    """Grows when an operator has asked for that. What a runner says that has not heard of it yet does not
    count."""
    rewound: int = 0
    """The generation for which everything that is to be copied again is kept again."""


class PartitionReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """As in ``replication.proto``."""

    partition: int
    state: str
    reason: str = ""
    next_retry_ms: int = 0
    position: int = 0
    end: int = 0
    oldest_us: int = 0
    rate: float = 0.0
    bytes_rate: float = 0.0
    messages: int = 0
    duplicates: int = 0
    skipped: int = 0
    disconnects: int = 0
    restarts: int = 0
    was_seen: bool = False
    rewound_to: int = 0
    rewound_from: int = 0
    unsynced_subscriptions: tuple[str, ...] = ()
    end_ms: int = 0


class ReportRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    runner: str
    reported_ms: int
    """When it came, by the clock of the leader that got it."""
    partitions: tuple[PartitionReport, ...] = ()


def link_of_key(key: str) -> tuple[str, TopicName, bool] | None:
    """Remote, topic, and whether it is the key of a report; None: neither's."""
    match key.split("/"):
        case ["", "replication", remote, namespace, topic]:
            return remote, TopicName(namespace, topic), False
        case ["", "replication", remote, namespace, topic, "report"]:
            return remote, TopicName(namespace, topic), True
    return None


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# -- what replication refuses, by whose fault it is -------------------------------------------


class RemoteUnknown(CallerError):
    def __init__(self, remote: str) -> None:
        super().__init__(
            f"there is no remote {cut(remote)}; `sava remotes list` shows those that are known, `sava "
            "remotes add` adds one"
        )
        self.remote = remote


class RemoteRefused(CallerError):
    """A cluster that cannot be a remote of this one; says why."""


class RemoteInUse(CallerError):
    def __init__(self, remote: str, scopes: Sequence[str]) -> None:
        shown = ", ".join(scopes[:5]) + (", …" if len(scopes) > 5 else "")
        super().__init__(
            f"remote {remote} is used by the policy of {shown}; set another with `sava replication set`, or "
            "`sava replication clear` it"
        )
        self.remote = remote


class RemoteUnreachable(RetryableError):
    """The remote gave no answer."""


class RemoteDenied(CallerError):
    """The remote does not let this cluster in, or not do that."""


class PolicyInvalid(CallerError):
    """A policy that cannot be one; says which part of it, and why."""


class LinkUnknown(CallerError):
    def __init__(self, topic: object, remote: str = "") -> None:
        """Without a remote: to none."""
        where = f"replicated to {cut(remote)}" if remote else "replicated"
        super().__init__(
            f"topic {topic} is not {where}, or does not exist; `sava replication status` shows what is "
            "replicated"
        )


class ReplicationBusy(RetryableError):
    """Topics still keep messages for the remote; their cursors go before it does."""
