"""Registry: which topics and namespaces exist, and how they come, grow and go.

A topic is its spec record. A partitioned topic has one too, and one for each partition; the number in its
record is, at every revision, the number of partitions that exist, because both change in one transaction on
the condition that the record is still the one that was read. So one record stands for the whole family: two
clients that create partitions 2 and 0 at the same time (Danube's clients create theirs one by one, in any
order) cannot leave a gap, and ``orders`` cannot be created beside ``orders-part-0``. More partitions than one
transaction takes are added in several, each of which leaves a topic that is complete, only smaller.

**Deleting.** The record is marked first, after which the topic does not exist for any client; then everything
that it had is removed, storage before records and the marked record last. A crash on the way leaves the mark,
by which a repeated deletion, or the next start, finds what is left. Removing the record first would free the
name while old subscriptions and segments still carry it.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from sava.metadata.commands import Compare, Delete, DeletePrefix, KeyValue, Put
from sava.metadata.records import (
    Decide,
    RecordChange,
    RecordStore,
    Versioned,
    absent,
    present,
    unchanged,
)
from sava.metadata.store import MetadataStore
from sava.security.quotas import Countable, Quotas
from sava.tasks import Slices
from sava.topics import specs
from sava.topics.errors import (
    LimitReached,
    NamespaceExists,
    NamespaceNotEmpty,
    NamespaceUnknown,
    TopicBeingDeleted,
    TopicExists,
    TopicMismatch,
    TopicUnknown,
)
from sava.topics.names import InvalidName, TopicName, check_name
from sava.topics.specs import NamespacePolicy, SubscriptionSpec, TopicSpec

MAX_PARTITIONS: Final = 1000
STEP: Final = 400
"""Operations in one transaction, below the store's limit."""
PAGE: Final = 1000
RECOUNT_S: Final = 2.0


class Located(NamedTuple):
    """A topic as it was read, and the condition that it is still so."""

    name: TopicName
    spec: TopicSpec
    unchanged: Compare


class Family(NamedTuple):
    """A topic to be removed: its name and those of its partitions, with their ids."""

    name: TopicName
    members: tuple[tuple[TopicName, TopicSpec], ...]
    """Those that have storage: the partitions, or the plain topic itself."""
    unchanged: Compare


class NamespaceRoom:
    """How many topics a namespace may have. Counted on this node, now and then, and what this node creates in
    between is added: with several brokers that create at the same time the limit is passed by a little."""

    def __init__(self, store: MetadataStore, limit: int) -> None:
        """``limit``: 0 for none."""
        self._store = store
        self._limit = limit
        self._counts: dict[str, tuple[float, int]] = {}
        """When topics were counted, and how many there are about."""

    async def take(self, namespace: str, count: int) -> None:
        """Before ``count`` topics are created. Raises LimitReached."""
        if not self._limit:
            return
        at, found = self._counts.get(namespace, (float("-inf"), 0))
        if time.monotonic() - at > RECOUNT_S:
            found = await self._count(namespace)
            if len(self._counts) >= PAGE:
                self._counts.clear()
            at = time.monotonic()
        if found + count > self._limit:
            self._counts[namespace] = at, found
            raise LimitReached(
                f"namespace {namespace} has {found} topics and partitions; the limit is {self._limit} "
                "(limits.topics_per_namespace)"
            )
        self._counts[namespace] = at, found + count

    async def _count(self, namespace: str) -> int:
        """In slices: a namespace with all that its topics have may be a hundred thousand records."""
        slices, local = Slices(), self._store.local
        found, after, more = 0, "", True
        while more:
            page = local.range(specs.namespace_topics_prefix(namespace), limit=PAGE, start_after=after)
            more = page.more
            found += sum(specs.topic_of_spec_key(kv.key) is not None for kv in page.kvs)
            after = page.kvs[-1].key if page.kvs else after
            await slices.next()
        return found


class PrincipalRoom:
    """How many topics and subscriptions one principal may have in the cluster, by its quota. Counted on this
    node for each one that is created, and only where there is such a quota: callers that create at the same
    time pass it by a little."""

    def __init__(self, store: MetadataStore, quotas: Quotas) -> None:
        self._store = store
        self._quotas = quotas

    async def check(self, what: Countable, owner: str) -> None:
        """Before one is created that will be the principal's; ``owner`` empty: no principal's. Raises
        QuotaExceeded."""
        if owner and self._quotas.counts(what, owner):
            self._quotas.check(owner, what, await self._count(what, owner))

    async def _count(self, what: Countable, owner: str) -> int:
        """In slices, and without decoding what cannot be of this owner."""
        slices, local, found = Slices(), self._store.local, 0
        marker, after, more = msgspec.json.encode(owner), "", True
        while more:
            page = local.range(_prefix(None), limit=PAGE, start_after=after)
            more = page.more
            for kv in page.kvs:
                found += marker in kv.value and _is_of(kv, what, owner)
                after = kv.key
            await slices.next()
        return found


def _is_of(kv: KeyValue, what: Countable, owner: str) -> bool:
    if what == "topics":
        name = specs.topic_of_spec_key(kv.key)
        return name is not None and name.head == name and specs.decode(kv, TopicSpec).owner == owner
    return specs.is_subscription_key(kv.key) and specs.decode(kv, SubscriptionSpec).owner == owner


class Registry:
    """Holds nothing between calls. Reads are this node's view where being a little behind is harmless."""

    def __init__(self, store: MetadataStore, room: NamespaceRoom | None = None) -> None:
        """``room``: None: of any number of topics."""
        self._store = store
        self._room = room or NamespaceRoom(store, 0)
        self._records = RecordStore(store)

    # -- reading -----------------------------------------------------------------------------

    async def get(self, name: TopicName) -> TopicSpec | None:
        """What this node knows; of a topic that it does not know, what the cluster knows."""
        spec = self.get_local(name)
        if spec is None:
            await self._store.get(specs.spec_key(name))
            spec = self.get_local(name)
        return spec

    def get_local(self, name: TopicName) -> TopicSpec | None:
        local = self._store.local
        kv = local.get(specs.spec_key(name))
        if kv is None:
            return None
        head = kv if name.head == name else local.get(specs.spec_key(name.head))
        if head is None or specs.decode(head, TopicSpec).deleting:
            return None
        return specs.decode(kv, TopicSpec)

    async def need(self, name: TopicName) -> TopicSpec:
        spec = await self.get(name)
        if spec is None:
            raise TopicUnknown(name)
        return spec

    async def locate(self, name: TopicName) -> Located:
        """Linearizable. Raises TopicUnknown."""
        head = await self._read(name.head)
        spec = head.value
        if spec is not None and not spec.deleting and name.head != name:
            spec = (await self._read(name)).value
        if spec is None or spec.deleting:
            raise TopicUnknown(name)
        return Located(name, spec, head.unchanged)

    async def list(self, namespace: str | None = None) -> dict[TopicName, TopicSpec]:
        """All topics, partitioned ones and their partitions included."""
        found = await self._read_all(namespace)
        return {name: spec for name, spec in found.items() if _exists(name, found)}

    def list_local(self, namespace: str | None = None) -> dict[TopicName, TopicSpec]:
        """As ``list``, as far as this node knows."""
        found = _specs_in(self._store.local.range(_prefix(namespace)).kvs)
        return {name: spec for name, spec in found.items() if _exists(name, found)}

    async def list_all(self) -> dict[TopicName, TopicSpec]:
        """Those included whose deletion was begun and not finished."""
        return await self._read_all(None)

    async def last_id(self) -> int:
        """The highest topic id that was given out; 0 if none was."""
        kv = await self._store.get(specs.TOPIC_IDS)
        return int(kv.value) if kv is not None else 0

    async def partitions(self, name: TopicName) -> builtins.list[TopicName]:
        """The partitions in order, the topic itself if it has none, and nothing if it does not exist."""
        spec = await self.get(name)
        if spec is None:
            return []
        return [name.partition(index) for index in range(spec.partitions)] or [name]

    async def _read_all(self, namespace: str | None) -> dict[TopicName, TopicSpec]:
        prefix = _prefix(namespace)
        found: dict[TopicName, TopicSpec] = {}
        after, more = "", True
        while more:
            page = await self._store.range(prefix, limit=PAGE, start_after=after)
            more = page.more
            found.update(_specs_in(page.kvs))
            after = page.kvs[-1].key if page.kvs else after
        return found

    async def _read(self, name: TopicName) -> Versioned[TopicSpec]:
        return await self._records.get(specs.spec_key(name), TopicSpec)

    # -- creating ----------------------------------------------------------------------------

    async def create(
        self, name: TopicName, *, reliable: bool, partitions: int = 0, owner: str = ""
    ) -> TopicSpec:
        """A new topic; with ``partitions`` a partitioned one. A partition's name creates the partitioned
        topic if it is missing, and all partitions up to this one. ``owner``: see ``TopicSpec``.

        Raises TopicExists, TopicMismatch, NamespaceUnknown, InvalidName."""
        if not 0 <= partitions <= MAX_PARTITIONS:
            raise InvalidName(f"topic {name}: {partitions} partitions; it can have {MAX_PARTITIONS}")
        part = name.partition_of
        if part is not None:
            if partitions:
                raise InvalidName(f"topic {name}: this is the name of a partition, which has none itself")
            if await self.get(name) is not None:
                raise TopicExists(f"topic {name} exists already")
            await self._extend(part[0], part[1] + 1, reliable, owner)
            return await self.need(name)
        if partitions:
            if (older := (await self._read(name)).value) is not None:
                raise self._taken(name, older)
            return await self._extend(name, partitions, reliable, owner)

        async def create(found: Versioned[TopicSpec]) -> RecordChange[TopicSpec]:
            if found.value is not None:
                raise self._taken(name, found.value)
            await self._room.take(name.namespace, 1)
            topic_id = await self._store.allocate_id(specs.TOPIC_IDS)
            spec = TopicSpec(topic_id=topic_id, reliable=reliable, created_ms=_now_ms(), owner=owner)
            return RecordChange(spec, conditions=(present(specs.namespace_key(name.namespace)),))

        return await self._update(name, create)

    async def ensure(self, name: TopicName, *, reliable: bool | None, owner: str = "") -> TopicSpec:
        """The topic, created if it is missing (reliable unless said otherwise). Raises TopicMismatch if it is
        another kind of topic, TopicExists if the name cannot be created beside what exists."""
        spec = await self.get(name)
        if spec is None:
            try:
                spec = await self.create(name, reliable=reliable is not False, owner=owner)
            except TopicExists:
                spec = await self.get(name)  # another caller was faster, unless the name cannot be
                if spec is None:
                    raise
        check_kind(name, spec, reliable)
        return spec

    async def grow(self, name: TopicName, partitions: int) -> TopicSpec:
        """Add partitions. Raises TopicUnknown, TopicMismatch: it has none, or more than that."""
        spec = (await self.locate(name)).spec
        if not spec.partitions:
            raise TopicMismatch(f"topic {name} is not partitioned")
        if partitions < spec.partitions:
            raise TopicMismatch(f"topic {name} has {spec.partitions} partitions; it can only get more")
        return await self._extend(name, partitions, spec.reliable)

    async def _extend(self, head: TopicName, partitions: int, reliable: bool, owner: str = "") -> TopicSpec:
        """Create or grow the partitioned topic until it has this many."""
        if partitions > MAX_PARTITIONS:
            raise InvalidName(f"topic {head}: {partitions} partitions; it can have {MAX_PARTITIONS}")
        if head.partition_of is not None:
            raise InvalidName(f"topic {head}: this is the name of a partition, which has none itself")

        async def extend(found: Versioned[TopicSpec]) -> RecordChange[TopicSpec] | None:
            spec = found.value
            if spec is not None:
                if spec.deleting or not spec.partitions:
                    raise self._taken(head, spec)
                check_kind(head, spec, reliable)
                if spec.partitions >= partitions:
                    return None
            return await self._more_partitions(head, spec, partitions, reliable, owner)

        while (spec := await self._update(head, extend)).partitions < partitions:
            pass  # a step was done
        return spec

    async def _more_partitions(
        self, head: TopicName, spec: TopicSpec | None, partitions: int, reliable: bool, owner: str
    ) -> RecordChange[TopicSpec]:
        start = spec.partitions if spec is not None else 0
        end = min(partitions, start + STEP)
        await self._room.take(head.namespace, end - start + (spec is None))
        first_id = await self._store.allocate_id(specs.TOPIC_IDS, count=end - start + 1)
        now = _now_ms()
        if spec is None:
            spec = TopicSpec(topic_id=first_id, reliable=reliable, created_ms=now, owner=owner)
        puts = []
        for index in range(start, end):
            partition = TopicSpec(topic_id=first_id + 1 + index - start, reliable=reliable, created_ms=now)
            puts.append(Put(specs.spec_key(head.partition(index)), specs.encode(partition)))
        namespace = present(specs.namespace_key(head.namespace))
        return RecordChange(msgspec.structs.replace(spec, partitions=end), puts, (namespace,))

    async def _update(self, name: TopicName, decide: Decide[TopicSpec]) -> TopicSpec:
        """Raises NamespaceUnknown, and as ``RecordStore.update``."""

        async def check_namespace() -> None:
            if await self._store.get(specs.namespace_key(name.namespace)) is None:
                raise NamespaceUnknown(name.namespace)

        updated = await self._records.update(
            specs.spec_key(name), TopicSpec, decide, what=f"topic {name}", on_refused=check_namespace
        )
        assert updated.value is not None
        return updated.value

    def _taken(self, name: TopicName, spec: TopicSpec | None) -> TopicExists | TopicBeingDeleted:
        if spec is not None and spec.deleting:
            return TopicBeingDeleted(name)
        kind = f" with {spec.partitions} partitions" if spec is not None and spec.partitions else ""
        return TopicExists(f"topic {name} exists already{kind}")

    async def change_policy(
        self, name: TopicName, change: Callable[[NamespacePolicy], NamespacePolicy]
    ) -> None:
        """What the topic, and its partitions, have different from their namespace. Takes effect at once, on
        every broker. Raises TopicUnknown."""

        async def decide(found: Versioned[NamespacePolicy]) -> RecordChange[NamespacePolicy]:
            located = await self.locate(name)
            return RecordChange(change(found.value or NamespacePolicy()), conditions=(located.unchanged,))

        what = f"the policy of topic {name}"
        await self._records.update(specs.policy_key(name), NamespacePolicy, decide, what=what)

    # -- deleting ----------------------------------------------------------------------------

    async def begin_delete(self, name: TopicName) -> Family:
        """From now on the topic does not exist. Repeating is fine until ``finish_delete``. Raises
        TopicUnknown, TopicMismatch."""
        if name.partition_of is not None and await self.get(name) is not None:
            raise TopicMismatch(f"topic {name} is a partition; delete the topic that it is a part of")

        def mark(found: Versioned[TopicSpec]) -> RecordChange[TopicSpec] | None:
            if found.value is None:
                raise TopicUnknown(name)
            if found.value.deleting:
                return None
            return RecordChange(msgspec.structs.replace(found.value, deleting=True))

        key = specs.spec_key(name)
        marked = await self._records.update(key, TopicSpec, mark, what=f"topic {name}")
        spec = marked.value
        assert spec is not None
        members = await self._partitions_of(name, spec) if spec.partitions else [(name, spec)]
        return Family(name, tuple(members), unchanged(key, marked.revision))

    async def _partitions_of(
        self, head: TopicName, spec: TopicSpec
    ) -> builtins.list[tuple[TopicName, TopicSpec]]:
        """Those whose records are still there: the others are removed already."""
        found: builtins.list[tuple[TopicName, TopicSpec]] = []
        for index in range(spec.partitions):
            partition = head.partition(index)
            spec_of = (await self._read(partition)).value
            if spec_of is not None:
                found.append((partition, spec_of))
        return found

    async def finish_delete(self, family: Family) -> None:
        """Remove the records, after all that they speak of is gone."""
        for name in [name for name, _ in family.members if name != family.name] + [family.name]:
            last = specs.spec_key(family.name)
            prefix = specs.topic_prefix(name)
            while keys := [
                kv.key for kv in (await self._store.range(prefix, limit=STEP)).kvs if kv.key != last
            ]:
                deletes = tuple(Delete(key) for key in keys)
                if not (await self._store.txn((family.unchanged,), deletes)).succeeded:
                    return  # another broker has finished it
        # The prefix, and not the record alone: what another broker has added since must not be the next
        # topic's.
        await self._store.txn((family.unchanged,), (DeletePrefix(specs.topic_prefix(family.name)),))


def _prefix(namespace: str | None) -> str:
    return specs.TOPICS if namespace is None else specs.namespace_topics_prefix(namespace)


def _specs_in(kvs: Iterable[KeyValue]) -> dict[TopicName, TopicSpec]:
    named = ((specs.topic_of_spec_key(kv.key), kv) for kv in kvs)
    return {name: specs.decode(kv, TopicSpec) for name, kv in named if name is not None}


def _exists(name: TopicName, found: dict[TopicName, TopicSpec]) -> bool:
    """A partition exists as long as its partitioned topic does."""
    return name.head in found and not found[name.head].deleting


def check_kind(name: TopicName, spec: TopicSpec, reliable: bool | None) -> None:
    """Raise TopicMismatch unless the topic is reliable, or not, as is expected of it."""
    if reliable is not None and spec.reliable != reliable:
        kinds = ("not reliable", "reliable")
        raise TopicMismatch(f"topic {name} is {kinds[spec.reliable]}, and was to be {kinds[reliable]}")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Namespaces:
    """Where topics live, and the policy that holds for those without one of their own. Holds nothing between
    calls.

    A namespace exists when it has a policy record, which may be empty. Creating a topic is conditional on
    that record, so a namespace whose record is gone gets no new topics:

        delete   looks: no topics                     create   looks: the namespace is there
        delete   removes the record, looks again ◀─── create   adds a topic just before
        delete   finds the topic, puts the record back: refused

    Looking once, before, would leave a topic in a namespace that does not exist.
    """

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._records = RecordStore(store)

    async def create(self, namespace: str, policy: NamespacePolicy = NamespacePolicy()) -> None:  # noqa: B008 (frozen)
        """Raises NamespaceExists, InvalidName."""
        if not await self._add(namespace, policy):
            raise NamespaceExists(f"namespace {namespace} exists already")

    async def ensure(self, namespaces: Iterable[str]) -> None:
        """Create those that are missing. A policy that an operator has set stays."""
        for namespace in namespaces:
            await self._add(namespace, NamespacePolicy())

    async def _add(self, namespace: str, policy: NamespacePolicy) -> bool:
        """Unless it is there. What an earlier one of the same name may have left is not the new one's."""
        key = specs.namespace_key(check_name(namespace, "namespace"))
        operations = (DeletePrefix(specs.namespace_prefix(namespace)), Put(key, specs.encode(policy)))
        return (await self._store.txn((absent(key),), operations)).succeeded

    async def delete(self, namespace: str) -> None:
        """Raises NamespaceUnknown, NamespaceNotEmpty."""
        key = specs.namespace_key(check_name(namespace, "namespace"))
        removed = await self._remove_record(namespace, key)
        try:
            await self._check_empty(namespace)
        except NamespaceNotEmpty:
            await self._store.txn((absent(key),), (Put(key, specs.encode(removed)),))
            raise
        await self._store.txn((absent(key),), (DeletePrefix(specs.namespace_prefix(namespace)),))

    async def _remove_record(self, namespace: str, key: str) -> NamespacePolicy:
        """If there are no topics. What it was."""
        removed = NamespacePolicy()

        async def remove(found: Versioned[NamespacePolicy]) -> RecordChange[NamespacePolicy]:
            nonlocal removed
            if found.value is None:
                raise NamespaceUnknown(namespace)
            removed = found.value
            await self._check_empty(namespace)
            return RecordChange(None)

        await self._records.update(key, NamespacePolicy, remove, what=f"namespace {namespace}")
        return removed

    async def _check_empty(self, namespace: str) -> None:
        found = await self._store.range(specs.namespace_topics_prefix(namespace), limit=1)
        if found.kvs:
            raise NamespaceNotEmpty(f"namespace {namespace} has topics; delete them first")

    async def list(self) -> list[str]:
        found: builtins.list[str] = []
        after, more = "", True
        while more:
            page = await self._store.range(specs.NAMESPACES, limit=PAGE, start_after=after)
            more = page.more
            for kv in page.kvs:
                after = kv.key
                if (namespace := specs.namespace_of_key(kv.key)) is not None:
                    found.append(namespace)
        return found

    async def policy(self, namespace: str) -> NamespacePolicy:
        """What was set for it. Raises NamespaceUnknown."""
        kv = await self._store.get(specs.namespace_key(namespace))
        if kv is None:
            raise NamespaceUnknown(namespace)
        return specs.decode(kv, NamespacePolicy)

    async def change_policy(
        self, namespace: str, change: Callable[[NamespacePolicy], NamespacePolicy]
    ) -> None:
        """Takes effect at once, on every broker. Two who change different limits at the same time both have
        their way. Raises NamespaceUnknown."""
        key = specs.namespace_key(check_name(namespace, "namespace"))

        def decide(found: Versioned[NamespacePolicy]) -> RecordChange[NamespacePolicy]:
            if found.value is None:
                raise NamespaceUnknown(namespace)
            return RecordChange(change(found.value))

        what = f"the policy of namespace {namespace}"
        await self._records.update(key, NamespacePolicy, decide, what=what)
