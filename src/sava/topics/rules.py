"""Rules: what is asked of a topic's producers, consumers and messages: limits, a rate, and a schema.

Limits are what the policies of a topic, its namespace and the configuration come to. Policies and schemas are
looked up in this node's view of the metadata store at the moment of the check, so that a change takes effect
at once and everywhere, for producers and consumers that are already there as well. The decoded result is kept
for as long as none of the records has changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from sava.config import PolicySettings
from sava.errors import cut, shown
from sava.metadata.commands import KeyValue, Put
from sava.metadata.records import RecordChange, RecordStore, Versioned, present
from sava.metadata.store import MetadataStore
from sava.records import RecordBatch
from sava.schemas import records
from sava.schemas.errors import SchemaError
from sava.schemas.registry import SchemaRegistry
from sava.schemas.types import Policy, TopicSchema
from sava.security.principal import ANONYMOUS, BROKER, Principal, current, is_admin
from sava.storage.maintenance import RetentionPolicy
from sava.topics import specs
from sava.topics.errors import LimitReached, OwnedByAnother, SchemaRefused, TopicUnknown
from sava.topics.names import TopicName
from sava.topics.registry import Registry
from sava.topics.specs import NamespacePolicy

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_KNOWN: Final = 10_000
"""Topics whose records are kept decoded, and topics that were warned of."""
MAX_WAIT_S: Final = 10.0
"""Longer than this a publisher gets an error instead, and comes back: its call has a deadline too."""


class EffectiveLimits(NamedTuple):
    """0: no limit."""

    max_producers_per_topic: int
    max_subscriptions_per_topic: int
    max_consumers_per_topic: int
    max_consumers_per_subscription: int
    max_publish_rate: int
    max_subscription_dispatch_rate: int
    max_message_size: int
    retention_time_minutes: int
    retention_size_mb: int

    @property
    def retention(self) -> RetentionPolicy | None:
        """None: everything is kept."""
        if not self.retention_time_minutes and not self.retention_size_mb:
            return None
        return RetentionPolicy(
            max_age_ms=self.retention_time_minutes * 60_000 or None,
            max_bytes=self.retention_size_mb << 20 or None,
        )


def configured(policies: PolicySettings) -> NamespacePolicy:
    """The configuration's policies, whose keys are Danube's, in the terms of a namespace's."""
    return NamespacePolicy(
        max_producers_per_topic=policies.max_producers,
        max_subscriptions_per_topic=policies.max_subscriptions,
        max_consumers_per_topic=policies.max_consumers,
        max_consumers_per_subscription=policies.max_consumers_per_subscription,
        max_publish_rate=policies.max_publish_rate,
        max_subscription_dispatch_rate=policies.max_subscription_dispatch_rate,
        max_message_size=policies.max_message_size,
        retention_time_minutes=policies.retention_time_minutes,
        retention_size_mb=policies.retention_size_mb,
    )


class LocalRecords(Generic[T]):
    """What records of a topic come to, as this node knows them; worked out again when one has changed."""

    def __init__(
        self,
        store: MetadataStore,
        keys: Callable[[TopicName], tuple[str, ...]],
        read: Callable[[list[KeyValue]], T],
    ) -> None:
        """``keys`` of a topic's records; ``read`` gets those that are there, in the same order."""
        self.store = store
        self._keys = keys
        self._read = read
        self._known: dict[TopicName, _Known[T]] = {}

    def of(self, topic: TopicName) -> T:
        local = self.store.local
        known = self._known.get(topic)
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = self._known[topic] = _Known(self._keys(topic), self._read([]))
        elif known.looked_at == local.revision:
            return known.value
        revision = local.revision
        records = [local.get(key) for key in known.keys]
        revisions = [kv.mod_revision if kv is not None else 0 for kv in records]
        if known.revisions != revisions:
            known.value = self._read([kv for kv in records if kv is not None])
            known.revisions = revisions
        known.looked_at = revision  # last: a record that cannot be read is an error each time
        return known.value


@dataclass(slots=True)
class _Known(Generic[T]):
    """What was found for a topic when the store was at revision ``looked_at``."""

    keys: tuple[str, ...]
    value: T
    looked_at: int = -1
    revisions: list[int] = field(default_factory=list)


class TopicLimits(LocalRecords[EffectiveLimits]):
    """A partition has what its partitioned topic has, unless it has a policy of its own."""

    def __init__(self, store: MetadataStore, policies: PolicySettings) -> None:
        last = configured(policies)

        def read(kvs: list[KeyValue]) -> EffectiveLimits:
            return combine((*(specs.decode(kv, NamespacePolicy) for kv in kvs), last))

        super().__init__(store, _levels, read)


def _levels(topic: TopicName) -> tuple[str, ...]:
    """Where its policies are, the nearest first."""
    topics = dict.fromkeys((topic, topic.head))
    return *map(specs.policy_key, topics), specs.namespace_key(topic.namespace)


def combine(levels: tuple[NamespacePolicy, ...]) -> EffectiveLimits:
    """Of each limit what the first level says that says anything."""
    return EffectiveLimits(
        *(
            next((value for level in levels if (value := getattr(level, name)) is not None), 0)
            for name in EffectiveLimits._fields
        )
    )


@dataclass(frozen=True, slots=True)
class OwnerRules:
    """Whose subscriptions, names of producers and names of consumers are: those of the principal that made
    them. What an administrator makes ahead is for all who may use the topic, and so is everything that was
    made while calls needed no permissions. ``docs/design/owners.md`` gives the reasons."""

    is_enforced: bool = False
    """Whether calls need permissions. Without, all callers are one."""

    def of_new(self) -> str:
        """Whom what the running call makes belongs to; empty: open to all."""
        principal = current.get()
        if not self.is_enforced or principal == ANONYMOUS or self._is_free(principal):
            return ""
        return str(principal)

    def may_use(self, owner: str) -> bool:
        if not owner or not self.is_enforced:
            return True
        principal = current.get()
        return str(principal) == owner or self._is_free(principal)

    def check_subscription(self, owner: str, name: str, topic: TopicName) -> None:
        """Raises OwnedByAnother."""
        if not self.may_use(owner):
            raise OwnedByAnother(
                f"subscription {name} of topic {topic}",
                owner,
                current.get(),
                "use another name, or one that an administrator has made for all: "
                f"`sava subscriptions create {topic} NAME`",
            )

    def check_name(self, owner: str, name: str, topic: TopicName, what: str) -> None:
        """``what``: ``producer`` or ``consumer``. Raises OwnedByAnother."""
        if not self.may_use(owner):
            raise OwnedByAnother(
                f"the {what} name {cut(name)} of topic {topic}",
                owner,
                current.get(),
                "use another name; an administrator of the topic who opens it frees it",
            )

    @property
    def frees(self) -> bool:
        """Whether the running call, which opens a name, makes it free for all."""
        return not self.is_enforced or self._is_free(current.get())

    def _is_free(self, principal: Principal) -> bool:
        return is_admin.get() or principal.kind == BROKER


def check_room(count: int, limit: int, what: str) -> None:
    """Raise LimitReached unless one more fits."""
    if limit and count >= limit:
        raise LimitReached(f"{what}: the limit of {limit} is reached")


class RateLimiter:
    """Lets ``rate`` messages through in a second, in the order of asking; a second's worth may come at once.

    Asking takes the room at once and waits until it is there: who asks later cannot get in before. A batch
    larger than a second's worth passes too, and those behind it wait the longer.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free_at = float("-inf")
        """When everything that was let through until now is paid for."""

    async def acquire(self, count: int, rate: int, what: str) -> None:
        """``count`` of ``what``; ``rate`` is a second's, 0 for none. Raises LimitReached, without effect,
        when it would take too long."""
        if not rate:
            return
        now = self._clock()
        # A limiter that was idle has at most one second of room.
        start = max(self._free_at, now - 1.0)
        wait = start + min(count, rate) / rate - now
        if wait > MAX_WAIT_S:
            raise LimitReached(f"{what}: the rate of {rate} a second is exhausted")
        self._free_at = start + count / rate
        if wait > 0:
            await asyncio.sleep(wait)


# -- schemas -------------------------------------------------------------------------------------------------


class TopicSchemas:
    """Holds nothing between calls."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def get(self, topic: TopicName) -> TopicSchema | None:
        kv = await self._store.get(specs.schema_key(topic.head))
        return specs.decode(kv, TopicSchema) if kv is not None else None

    async def enforcing(self, subject: str) -> list[TopicName]:
        """The topics that refuse what does not follow the subject. Those that are being deleted do not
        count."""
        found = await Registry(self._store).list()  # linearizable, so this node's view behind it is as new
        local = self._store.local
        records = ((name, local.get(specs.schema_key(name))) for name in found if name.head == name)
        schemas = ((name, specs.decode(kv, TopicSchema)) for name, kv in records if kv is not None)
        return sorted(
            name for name, schema in schemas if schema.subject == subject and schema.policy is Policy.ENFORCE
        )

    async def set(self, topic: TopicName, schema: TopicSchema) -> None:
        """Takes effect at once. Raises TopicUnknown."""
        head = topic.head
        put = Put(specs.schema_key(head), specs.encode(schema))
        if not (await self._store.txn((present(specs.spec_key(head)),), (put,))).succeeded:
            raise TopicUnknown(topic)


WARN_EVERY_S: Final = 10.0


class SchemaChecks:
    """Which subject a topic's messages follow, how strictly, and whether they do. Owned by the event loop.

    A topic without a schema takes anything; the first producer that names a subject gives it one. From then
    on a producer may name the same subject or none, and each message is measured by what the topic's record
    says at that moment: whether it names the subject and a version that exists, and, if the record wants
    that, whether its payload is one of that version. ``enforce`` refuses what does not follow, ``warn`` lets
    it pass and says so in the log, once in a while.

    Batches are looked at by column: the versions that a batch names are few, and each is looked up once.

    A partition follows what its partitioned topic says.
    """

    def __init__(self, store: MetadataStore, registry: SchemaRegistry) -> None:
        self._store = store
        self._registry = registry
        self._schemas = LocalRecords(
            store,
            lambda topic: (specs.schema_key(topic.head),),
            lambda kvs: specs.decode(kvs[0], TopicSchema) if kvs else None,
        )
        self._warned: dict[TopicName, float] = {}

    def subject(self, topic: TopicName) -> str:
        """That the topic's messages follow, as this node knows; empty for none."""
        schema = self._schemas.of(topic)
        return schema.subject if schema is not None else ""

    async def check_subject(self, subject: str) -> None:
        """Raise SchemaRefused unless it is registered."""
        try:
            await self._registry.subject(subject)
        except SchemaError as error:
            raise SchemaRefused(str(error)) from error

    async def check_producer(self, topic: TopicName, subject: str) -> None:
        """Raises SchemaRefused: the subject (empty for none) is not what the topic takes. A topic without one
        takes it from now on."""
        if not subject:
            return
        found = self.subject(topic)
        if not found:
            await self.check_subject(subject)
            found = await self._assign(topic, subject)
        if found != subject:
            raise SchemaRefused(f"topic {topic} follows the subject {found!r}, and not {shown(subject)}")

    async def _assign(self, topic: TopicName, subject: str) -> str:
        """The topic's subject: this one, unless it has one already."""

        def assign(found: Versioned[TopicSchema]) -> RecordChange[TopicSchema] | None:
            if found.value is not None:
                return None
            return RecordChange(
                TopicSchema(subject=subject), conditions=(present(specs.spec_key(topic.head)),)
            )

        async def refused() -> None:
            raise TopicUnknown(topic)

        key = specs.schema_key(topic.head)
        assigned = await RecordStore(self._store).update(key, TopicSchema, assign, on_refused=refused)
        assert assigned.value is not None
        return assigned.value.subject

    def batch_check(self, topic: TopicName) -> TopicCheck | None:
        """None: the topic takes any message. Asked for every batch, so that a change takes effect at once."""
        schema = self._schemas.of(topic)
        return None if schema is None or schema.policy is Policy.NONE else TopicCheck(self, topic, schema)

    async def check(self, topic: TopicName, schema: TopicSchema, batch: RecordBatch) -> None:
        """Raises SchemaRefused; under ``warn`` it goes to the log instead."""
        try:
            await self._check(schema, batch)
        except SchemaError as error:
            if schema.policy is Policy.ENFORCE:
                raise SchemaRefused(f"topic {topic}: {error}") from error
            self._warn(topic, error)

    async def _check(self, schema: TopicSchema, batch: RecordBatch) -> None:
        schema_id = await self._id_of(schema.subject)
        named = batch.to_arrow(("schema_id", "schema_version"))
        distinct = pa.Table.from_batches([named]).group_by(named.schema.names).aggregate([]).to_pylist()
        for pair in distinct:
            given, version = pair["schema_id"], pair["schema_version"]
            if given != schema_id:
                what = "no schema" if given is None else f"the schema id {given}"
                raise SubjectMissed(
                    f"a message names {what}, and the subject {schema.subject!r} has {schema_id}"
                )
            if version is not None:
                await self._check_version(schema.subject, version)
        if schema.validate_payload:
            mixed = named if len(distinct) > 1 else None
            for pair in distinct:
                await self._validate(schema, schema_id, pair["schema_version"], batch, mixed)

    async def _id_of(self, subject: str) -> int:
        kv = self._store.local.get(records.subject_key(subject))
        if kv is not None:
            return specs.decode(kv, records.SubjectRecord).schema_id
        return (await self._registry.subject(subject)).schema_id

    async def _check_version(self, subject: str, version: int) -> None:
        """A version that this node does not know may be new: the registry knows."""
        if self._store.local.get(records.version_key(subject, version)) is None:
            await self._registry.get_version(subject, version)

    async def _validate(
        self, schema: TopicSchema, schema_id: int, version: int | None, batch: RecordBatch, named: Any
    ) -> None:
        """The payloads of one version (None: the latest); ``named`` tells which they are, None: all."""
        if named is None:
            payloads = batch.payloads()
        else:
            versions = named.column(1)
            chosen = pc.is_null(versions) if version is None else pc.equal(versions, version)
            payloads = batch.to_arrow(("payload",)).column(0).filter(chosen).to_pylist()
        if version is None:
            version = (await self._registry.latest(schema.subject)).version
        validator = await self._registry.validator(schema_id, version)
        refusal = await self._registry.check_payloads(validator, payloads)
        if refusal is not None:
            raise SubjectMissed(
                f"a payload is not of version {version} of {schema.subject!r}: {refusal.reason}"
            )

    def _warn(self, topic: TopicName, error: SchemaError) -> None:
        now = time.monotonic()
        if now - self._warned.get(topic, float("-inf")) >= WARN_EVERY_S:
            if len(self._warned) >= MAX_KNOWN:
                self._warned.clear()
            self._warned[topic] = now
            log.warning("schema: messages do not follow it topic=%s error=%s", topic, error)


class SubjectMissed(SchemaError):
    """A message that does not follow its topic's subject."""


@dataclass(frozen=True, slots=True)
class TopicCheck:
    """How the messages of one topic are to be measured at this moment."""

    checks: SchemaChecks
    topic: TopicName
    schema: TopicSchema

    async def check(self, batch: RecordBatch) -> None:
        await self.checks.check(self.topic, self.schema, batch)
