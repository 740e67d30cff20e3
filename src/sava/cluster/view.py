"""ClusterView: brokers, topics and owners as this node knows them, kept up to date by one watch. TopicRouter:
the owner of a topic, as soon as it has one.

The view reads once what the store holds of topics and brokers, and then follows it event by event: a reader
that looks at ten thousand topics looks at dictionaries. The view is never ahead of the node and usually some
milliseconds behind the cluster; whatever is decided from it is written on the condition that the records are
still those that were seen. A watch that falls too far behind begins again with everything (``Compacted``).

Listeners get the topics whose records changed (None: any may have). They run in the watch's task, one after
another, and must return at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from sava.cluster import records
from sava.cluster.records import BrokerMode, Mode, Registration
from sava.errors import RetryableError
from sava.metadata.commands import KeyValue
from sava.metadata.errors import Compacted
from sava.metadata.records import RecordCorrupt
from sava.metadata.store import MetadataStore
from sava.metadata.watch import Watch
from sava.supervisor import Supervisor
from sava.tasks import Backoff, Reconciler, cancelled
from sava.topics import ownership, specs
from sava.topics.errors import TopicMismatch, TopicUnknown
from sava.topics.names import TopicName
from sava.topics.ownership import KnownOwnership
from sava.topics.registry import Registry
from sava.topics.specs import Ownership, OwnershipState, TopicSpec

log = logging.getLogger(__name__)

RETRY_S: Final = 0.2
UNASSIGNED: Final = KnownOwnership(ownership.UNASSIGNED, 0)
PREFIXES: Final = (specs.TOPICS, records.CLUSTER)
UNREADABLE: Final = BrokerMode(mode=Mode.DRAINED, reason="its record cannot be read")
"""A mode that is not known is not the default one: such a broker keeps what it has, and gets nothing."""

T = TypeVar("T")

Listener = Callable[[frozenset[TopicName] | None], None]


class TopicEntry(NamedTuple):
    """A topic that messages can be in: a plain one, or a partition."""

    name: TopicName
    spec: TopicSpec
    spec_revision: int
    record: Ownership
    revision: int
    """Of the ownership record; 0: there is none."""


class ClusterView:
    """Owned by the event loop."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._specs: dict[TopicName, tuple[TopicSpec, int]] = {}
        self._owned: dict[TopicName, KnownOwnership] = {}
        self._brokers: dict[int, Registration] = {}
        self._modes: dict[int, BrokerMode] = {}
        self._replicated: dict[TopicName, KeyValue] = {}
        """Topics with a replication policy of their own, and its record: what it says is not this one's."""
        self._listeners: list[Listener] = []
        self._by_owner: dict[int, set[TopicName]] = {}
        self._corrupt: dict[str, str] = {}
        """Keys whose records cannot be read, and why."""
        self._changed: dict[TopicName | None, asyncio.Event] = {}
        """What those who wait for a topic, or for anything (None), wait for."""
        self._passes = Reconciler(
            "cluster view", self._pass, period_s=RETRY_S, retry=Backoff(RETRY_S, RETRY_S, jitter=0)
        )
        self._task: asyncio.Task[None] | None = None
        self.is_ready = False
        """Whether it has seen the store at all: an empty view before that means nothing."""

    # -- running -----------------------------------------------------------------------------

    def start(self, supervisor: Supervisor) -> None:
        self._task = supervisor.essential(self._passes.run(), name="cluster view")

    async def close(self) -> None:
        await cancelled(self._task)

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    async def wait(
        self, condition: Callable[[], bool], *, timeout: float, about: TopicName | None = None
    ) -> None:
        """Until the condition holds; it is asked after every change, and of those of topics only after the
        ones ``about`` this one if it is given: a thousand callers that wait for a thousand topics are not to
        be asked a million times. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            while not condition():
                await self._changed.setdefault(about, asyncio.Event()).wait()

    async def _pass(self) -> None:
        """It ends, also without an error, when the store is being closed."""
        try:
            await self._follow()
        except Compacted:
            log.info("cluster: the view fell behind, reading everything again")
            self._passes.wake()

    async def _follow(self) -> None:
        """Without a wait between reading and watching, so that nothing is between them."""
        with ExitStack() as stack:
            revision = self._load()
            watches = []
            for prefix in PREFIXES:
                watches.append(self._store.watch(prefix, from_revision=revision + 1))
                stack.callback(watches[-1].close)
            self._tell(None)
            tasks = [asyncio.create_task(self._apply_all(watch)) for watch in watches]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancelled(*tasks)
        for task in done:
            task.result()

    async def _apply_all(self, watch: Watch) -> None:
        async for batch in watch:
            touched: set[TopicName] = set()
            about_brokers = False
            for event in batch.events:
                name = self._apply(event.key, event.kv)
                if name is not None:
                    touched.add(name)
                elif event.key.startswith(records.CLUSTER):
                    about_brokers = True
            if touched or about_brokers:
                self._tell(None if about_brokers else frozenset(touched))

    def _load(self) -> int:
        known: tuple[dict[Any, Any], ...] = (self._specs, self._owned, self._by_owner, self._brokers)
        for each in (*known, self._modes, self._replicated, self._corrupt):
            each.clear()
        local = self._store.local
        for prefix in PREFIXES:
            for kv in local.range(prefix).kvs:
                self._apply(kv.key, kv)
        self.is_ready = True
        return local.revision

    def _apply(self, key: str, kv: KeyValue | None) -> TopicName | None:
        """The topic that it is about, if it matters who has it."""
        match key.split("/"):
            case ["", "topics", namespace, topic, "spec"]:
                name = TopicName(namespace, topic)
                spec = self._decode(key, kv, TopicSpec)
                if spec is None or kv is None:
                    self._specs.pop(name, None)
                else:
                    self._specs[name] = spec, kv.mod_revision
                return name
            case ["", "topics", namespace, topic, "ownership"]:
                name = TopicName(namespace, topic)
                record = self._decode(key, kv, Ownership)
                self._own(
                    name, None if record is None or kv is None else KnownOwnership(record, kv.mod_revision)
                )
                return name
            case ["", "topics", namespace, topic, "replication"]:
                name = TopicName(namespace, topic)
                if kv is None:
                    self._replicated.pop(name, None)
                else:
                    self._replicated[name] = kv
                return name
            case ["", "cluster", "register", broker] if broker.isdecimal():
                registration = self._decode(key, kv, Registration)
                if registration is None:
                    self._brokers.pop(int(broker), None)
                else:
                    self._brokers[int(broker)] = registration
            case ["", "cluster", "state", broker] if broker.isdecimal():
                mode = self._decode(key, kv, BrokerMode)
                if kv is None:
                    self._modes.pop(int(broker), None)
                else:
                    self._modes[int(broker)] = mode or UNREADABLE
        return None

    def _decode(self, key: str, kv: KeyValue | None, kind: type[T]) -> T | None:
        """None: it is gone, or cannot be read, which is remembered. One record that cannot be read is no
        reason to know nothing of the others, and a topic's is not an absent one: it has no entry, and so
        no broker does anything with it."""
        if kv is None:
            self._corrupt.pop(key, None)
            return None
        try:
            record = specs.decode(kv, kind)
        except RecordCorrupt as error:
            log.error("cluster: %s", error)
            self._corrupt[key] = str(error)
            return None
        self._corrupt.pop(key, None)
        return record

    def _own(self, name: TopicName, held: KnownOwnership | None) -> None:
        older = self._owned.pop(name, None)
        if older is not None:
            names = self._by_owner[older.record.owner]
            names.discard(name)
            if not names:
                del self._by_owner[older.record.owner]
        if held is not None:
            self._owned[name] = held
            self._by_owner.setdefault(held.record.owner, set()).add(name)

    def _tell(self, topics: frozenset[TopicName] | None) -> None:
        for about in list(self._changed) if topics is None else (None, *topics):
            changed = self._changed.pop(about, None)
            if changed is not None:
                changed.set()
        for listener in self._listeners:
            listener(topics)

    # -- knowing -----------------------------------------------------------------------------

    @property
    def brokers(self) -> Mapping[int, Registration]:
        """Those that are registered."""
        return MappingProxyType(self._brokers)

    def mode(self, broker: int) -> BrokerMode:
        return self._modes.get(broker, BrokerMode())

    @property
    def active(self) -> list[Registration]:
        """Those that may get topics, by id."""
        return [
            each
            for key, each in sorted(self._brokers.items())
            if self.mode(key).mode is Mode.ACTIVE and not each.is_leaving
        ]

    def has(self, name: TopicName) -> bool:
        """Whether it is a topic that messages can be in, and not being deleted."""
        return self.entry(name) is not None and not self.is_deleting(name)

    def entries(self) -> Iterable[TopicEntry]:
        """All topics that messages can be in, those included that are being deleted. Copy before an await."""
        return (entry for name in self._specs if (entry := self.entry(name)) is not None)

    def names(self) -> list[TopicName]:
        """All topics, partitioned ones included."""
        return list(self._specs)

    def entry(self, name: TopicName) -> TopicEntry | None:
        """None: there is no such topic, or it is partitioned and its partitions have what it would have, or
        its record cannot be read (see ``fault``)."""
        known = self._specs.get(name)
        if known is None or known[0].partitions or (self._corrupt and self.fault(name)):
            return None
        record, revision = self._owned.get(name, UNASSIGNED)
        return TopicEntry(name, known[0], known[1], record, revision)

    def spec(self, name: TopicName) -> TopicSpec | None:
        """Also of a partitioned topic. None: there is none, it is being deleted, or its record cannot
        be read."""
        known = self._specs.get(name)
        return None if known is None or self.is_deleting(name) else known[0]

    @property
    def replicated(self) -> Mapping[TopicName, KeyValue]:
        """The replication policies of topics that have their own."""
        return MappingProxyType(self._replicated)

    def held(self, name: TopicName) -> KnownOwnership:
        """Who has it, whether or not there is such a topic."""
        return self._owned.get(name, UNASSIGNED)

    def fault(self, name: TopicName) -> str:
        """Why nothing can be said of the topic; empty: something can."""
        keys = (specs.spec_key(name), specs.ownership_key(name))
        return next((self._corrupt[key] for key in keys if key in self._corrupt), "")

    def is_deleting(self, name: TopicName) -> bool:
        """Of a partition its partitioned topic's record says so."""
        head = self._specs.get(name.head)
        return head is None or head[0].deleting

    def deleting(self) -> list[TopicName]:
        """Topics, partitioned ones included, whose deletion was begun and is not finished."""
        return [name for name, (spec, _) in self._specs.items() if spec.deleting]

    def names_of(self, broker: int) -> set[TopicName]:
        """As ``owned_by``, without looking at each."""
        return set(self._by_owner.get(broker, ()))

    def owned_by(self, broker: int) -> list[TopicEntry]:
        """What names it as the owner, in whatever state."""
        names = self._by_owner.get(broker, ())
        return [entry for name in names if (entry := self.entry(name)) is not None]

    def counts(self) -> dict[int, int]:
        """Topics of each broker that is registered or owns any."""
        owners = {broker: len(names) for broker, names in self._by_owner.items() if broker}
        return dict.fromkeys(self._brokers, 0) | owners


# -- the owner of a topic ---------------------------------------------------------------------
#
# The answer for a topic that is served is two dictionary lookups. While no broker has it (it moves, its
# broker has just died, it was created a moment ago) the caller waits, bounded, instead of being sent away:
# moves end in less time than clients take to come back.

WAIT_S: Final = 3600.0
"""The caller's own bound is what ends a wait."""


class NotServed(RetryableError):
    """No broker has the topic; says why."""

    def __init__(self, topic: object, reason: str) -> None:
        super().__init__(f"topic {topic} is not served: {reason}")
        self.topic, self.reason = str(topic), reason


class TopicRouter:
    """Owned by the event loop."""

    def __init__(self, view: ClusterView, registry: Registry) -> None:
        self._view = view
        self._registry = registry

    def registration(self, broker: int) -> Registration | None:
        return self._view.brokers.get(broker)

    def current(self, name: TopicName) -> int:
        """The broker that has the topic, without waiting; 0: none."""
        record, _ = self._view.held(name)
        is_served = record.state is OwnershipState.ASSIGNED and record.owner in self._view.brokers
        return record.owner if is_served else 0

    async def owner(self, name: TopicName, *, timeout: float = 5.0, but_not: int = 0) -> int:
        """The broker that has the topic, which may be this one; waits for it.

        ``but_not`` is one that was asked and does not have it, or could not be reached: it is the answer
        again as soon as its record or registration has changed, or else when the time is over (for then it
        has it, as far as this broker knows; a caller that only met a view behind its own gives little time).

        Raises TopicUnknown, TopicMismatch (partitioned: ask for its partitions), NotServed."""
        found = self.current(name)
        if found and found != but_not:
            return found
        refused = self._mark(name, but_not)
        try:
            async with asyncio.timeout(timeout):
                while not self._answers(name, but_not, refused):
                    await self._wait(name, lambda: self._answers(name, but_not, refused))
        except TimeoutError:
            if not self.current(name):
                raise NotServed(name, self._reason(name)) from None
        return self.current(name)

    async def _wait(self, name: TopicName, condition: Callable[[], bool]) -> None:
        """For an answer, or for the topic to come or go."""
        await self._check_exists(name)
        was_seen = self._view.has(name)
        await self._view.wait(
            lambda: condition() or self._view.has(name) != was_seen, timeout=WAIT_S, about=name
        )

    def _answers(self, name: TopicName, but_not: int, refused: tuple[int, int]) -> bool:
        found = self.current(name)
        return found != 0 and (found != but_not or self._mark(name, but_not) != refused)

    def _mark(self, name: TopicName, broker: int) -> tuple[int, int]:
        """What must change before this broker is asked again."""
        registration = self.registration(broker)
        return self._view.held(name).revision, registration.incarnation if registration is not None else 0

    async def _check_exists(self, name: TopicName) -> None:
        """What the view does not know may be new: the store is asked, so that only what does not exist is
        called unknown."""
        if self._view.has(name):
            return
        spec = await self._registry.get(name)
        if spec is None:
            raise TopicUnknown(name)
        if spec.partitions:
            raise TopicMismatch(
                f"topic {name} is partitioned; use one of its partitions, for example {name.partition(0)}"
            )

    def _reason(self, name: TopicName) -> str:
        record = self._view.held(name).record
        if fault := self._view.fault(name):
            return fault
        match record.state:
            case OwnershipState.ASSIGNED:
                return f"its broker {record.owner} is gone"
            case OwnershipState.MOVING:
                return f"broker {record.owner} is handing it over"
            case OwnershipState.ORPHAN:
                return (
                    f"its broker {record.owner} is gone, and its journal is not recovered yet; if that "
                    "lasts, `sava ledgers list` tells for what it waits"
                )
            case OwnershipState.DELETING:
                return "it is being deleted"
        if not self._view.active:
            return "no broker is active"
        return f"no broker has taken it up yet{f' ({record.error})' if record.error else ''}"
