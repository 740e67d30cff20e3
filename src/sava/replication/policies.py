"""Policies: which topics are copied where.

A namespace has a policy, or none; a topic may have one of its own, which holds instead of the namespace's, as
a whole. A policy without remotes switches replication off. So the answer for a topic is always in one record,
and no levels have to be added up to know it.

Setting a policy creates nothing anywhere. What it asks for follows from the records
(``links``).
"""

from __future__ import annotations

from typing import NamedTuple

from sava.errors import shown
from sava.metadata.commands import Compare
from sava.metadata.records import RecordChange, RecordStore, Versioned, decode, present
from sava.metadata.store import LocalView, MetadataStore
from sava.replication import records
from sava.replication.records import (
    EARLIEST,
    LATEST,
    PolicyInvalid,
    PolicyRecord,
    RemoteUnknown,
)
from sava.topics import specs
from sava.topics.errors import NamespaceUnknown
from sava.topics.names import TopicName, check_name, check_unreserved
from sava.topics.registry import Registry


class Scope(NamedTuple):
    """A namespace, or one topic of it."""

    namespace: str
    topic: TopicName | None = None

    @classmethod
    def parse(cls, text: str) -> Scope:
        """Raises InvalidName, PolicyInvalid unless the text is ``ns`` or ``/ns/topic``."""
        if not text.startswith("/"):
            return cls(check_name(text, "namespace"))
        topic = TopicName.parse(text)
        if topic.head != topic:
            raise PolicyInvalid(
                f"topic {topic} is a partition; partitions are replicated as their topic {topic.head} is"
            )
        return cls(topic.namespace, topic)

    @property
    def key(self) -> str:
        if self.topic is None:
            return records.namespace_policy_key(self.namespace)
        return records.topic_policy_key(self.topic)

    def __str__(self) -> str:
        return self.namespace if self.topic is None else str(self.topic)


class ScopedPolicy(NamedTuple):
    """A policy, where it is set, and since which revision of the store."""

    policy: PolicyRecord
    scope: Scope
    revision: int


def check(policy: PolicyRecord) -> PolicyRecord:
    """With what was left out. Raises PolicyInvalid, InvalidName."""
    for remote in policy.remotes:
        check_name(remote, "remote")
    if len(set(policy.remotes)) != len(policy.remotes):
        raise PolicyInvalid(f"remotes {', '.join(policy.remotes)}: one is named twice")
    for subscription in policy.subscriptions:
        check_unreserved(check_name(subscription, "subscription"))
    start = policy.start or EARLIEST
    if start not in (EARLIEST, LATEST) and not (start.isascii() and start.isdecimal()):
        raise PolicyInvalid(
            f"start {shown(policy.start)}: it can be {EARLIEST}, {LATEST}, or a time in microseconds since "
            "1970 UTC"
        )
    return PolicyRecord(
        remotes=policy.remotes,
        start=start,
        forward=policy.forward,
        subscriptions=policy.subscriptions,
    )


class ReplicationPolicies:
    """Holds nothing between calls."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._records = RecordStore(store)
        self._registry = Registry(store)

    async def set(self, scope: Scope, policy: PolicyRecord) -> None:
        """Raises NamespaceUnknown, TopicUnknown, RemoteUnknown, PolicyInvalid."""
        policy = check(policy)
        keys = {remote: records.remote_key(remote) for remote in policy.remotes}

        async def decide(found: Versioned[PolicyRecord]) -> RecordChange[PolicyRecord]:
            exists = await self.exists(scope)
            for remote, key in keys.items():
                if self._store.local.get(key) is None:
                    raise RemoteUnknown(remote)
            # Conditions, since a remote that is removed meanwhile would leave a policy that names no remote.
            return RecordChange(policy, conditions=(exists, *map(present, keys.values())))

        await self._records.update(scope.key, PolicyRecord, decide, what=_policy_of(scope), repairs=True)

    async def exists(self, scope: Scope) -> Compare:
        """The condition that it still does. Raises NamespaceUnknown, TopicUnknown, PolicyInvalid."""
        if scope.topic is None:
            key = specs.namespace_key(scope.namespace)
            kv = await self._store.get(key)
            if kv is None:
                raise NamespaceUnknown(scope.namespace)
            return present(key)
        located = await self._registry.locate(scope.topic)
        if not located.spec.reliable:
            raise PolicyInvalid(
                f"topic {scope.topic} is not reliable: its messages are not kept, so they cannot be copied"
            )
        return located.unchanged

    async def clear(self, scope: Scope) -> None:
        """What is set above it holds from now on. Raises NamespaceUnknown, TopicUnknown."""

        async def decide(found: Versioned[PolicyRecord]) -> RecordChange[PolicyRecord] | None:
            exists = await self.exists(scope)
            return RecordChange(None, conditions=(exists,)) if found.kv is not None else None

        await self._records.update(scope.key, PolicyRecord, decide, what=_policy_of(scope), repairs=True)

    async def get(self, scope: Scope) -> ScopedPolicy | None:
        """The one that holds. Raises NamespaceUnknown, TopicUnknown."""
        await self.exists(scope)  # linearizable: from here on this node knows as much
        if scope.topic is not None:
            return effective(self._store.local, scope.topic)
        return _held(self._store.local, scope)


def _policy_of(scope: Scope) -> str:
    return f"the replication policy of {scope}"


def effective(local: LocalView, topic: TopicName) -> ScopedPolicy | None:
    """The most specific policy, as this node knows it. Raises RecordCorrupt."""
    return _held(local, Scope(topic.namespace, topic)) or _held(local, Scope(topic.namespace))


def _held(local: LocalView, scope: Scope) -> ScopedPolicy | None:
    kv = local.get(scope.key)
    return None if kv is None else ScopedPolicy(decode(kv, PolicyRecord), scope, kv.mod_revision)


def of_namespaces(local: LocalView) -> dict[str, ScopedPolicy]:
    """Raises RecordCorrupt."""
    found = {}
    for kv in local.range(specs.NAMESPACES).kvs:
        match kv.key.split("/"):
            case ["", "namespaces", namespace, records.REPLICATION]:
                policy = decode(kv, PolicyRecord)
                found[namespace] = ScopedPolicy(policy, Scope(namespace), kv.mod_revision)
    return found


def naming(local: LocalView, remote: str) -> list[str]:
    """The scopes whose policies name the remote. Looks at everything that there is of topics; for questions
    that are rare. Raises RecordCorrupt."""
    found = [str(held.scope) for held in of_namespaces(local).values() if remote in held.policy.remotes]
    for kv in local.range(specs.TOPICS).kvs:
        match kv.key.split("/"):
            case ["", "topics", namespace, topic, records.REPLICATION]:
                if remote in decode(kv, PolicyRecord).remotes:
                    found.append(str(TopicName(namespace, topic)))
    return found
