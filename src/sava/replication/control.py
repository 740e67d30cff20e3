"""Control: what people and runners ask of replication, the checks before a policy is accepted, and the loop
on the leader that keeps the links settled.

**Asking.** The leader answers whatever changes what is copied, and settles the links before it answers: when
a policy is set, its pipeline is there. Settling first as well, while the former policy still holds, has a
reason. With a policy that starts at the latest, topics that were created after it are copied from their first
message, and whether that is so of a topic is decided when its record is written:

    policy set ── topic created ── policy changed ── settled         the topic looks older than the policy

**Checks.** Each difference between a remote and what a policy needs says what replication will do about it,
by the same table that it will do it by (``matrix``). A difference that would keep messages from being copied
*blocks*: the policy is refused, unless the operator says that it is meant so. A topic that is merely not
there yet does not block; it is created, or waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from sava.cluster.controller import Leadership
from sava.cluster.records import NotController
from sava.cluster.view import ClusterView
from sava.errors import SavaError
from sava.metadata.errors import Deposed, Unavailable
from sava.metadata.records import RecordCorrupt
from sava.metadata.store import MetadataStore
from sava.replication import matrix, policies, records
from sava.replication.links import LinkName, Links, LinkTopic
from sava.replication.matrix import Here, KnownThere, Settings, TopicRelation
from sava.replication.policies import ReplicationPolicies, Scope
from sava.replication.records import (
    LinkUnknown,
    PolicyRecord,
    RemoteDenied,
    RemoteRecord,
    RemoteRefused,
    RemoteUnknown,
    RemoteUnreachable,
    ReplicationBusy,
    ReportRecord,
)
from sava.replication.remotes import ClusterIdentity, Remotes, Shape
from sava.replication.status import Reports, Statuses, TopicReport, TopicStatus
from sava.schemas.types import TopicSchema
from sava.supervisor import Supervisor
from sava.tasks import Backoff, Reconciler, cancelled
from sava.topics import specs
from sava.topics.names import TopicName, check_name
from sava.topics.registry import Registry
from sava.topics.specs import TopicSpec

PROBE: Final = "replication-check"
"""The topic by which a namespace without topics is asked about; it does not matter whether it exists."""
PAGE: Final = 500
"""Topics in one question."""


class Difference(NamedTuple):
    topic: str
    """Or the namespace, or nothing: it is about the remote as a whole."""
    what: str
    """unreachable, cluster, permission, namespace, missing, deleted, kind, partitions, schema"""
    local: str
    remote: str
    consequence: str
    blocks: bool


class LocalTopic(NamedTuple):
    here: Here
    schema_subject: str = ""


async def compare(
    remotes: Remotes,
    name: str,
    record: RemoteRecord,
    topics: Sequence[LocalTopic],
    namespaces: Sequence[str],
    settings: Settings,
    known: Mapping[str, KnownThere],
) -> list[Difference]:
    """Everything in which the remote differs; empty: nothing keeps replication from copying all of it.
    ``known``: what is remembered of topics there."""
    try:
        identity = (await remotes.ask(record)).identity
        shapes = await _describe(remotes, name, record, topics, namespaces)
    except RemoteDenied as error:
        return [_of_remote(name, "permission", f"{error}; nothing is copied until it is allowed")]
    except (RemoteUnreachable, RemoteRefused) as error:
        return [_of_remote(name, "unreachable", f"{error}; nothing is copied until it answers")]
    found = identity_differences(name, record, identity)
    for namespace in namespaces:
        if not _namespace_exists(namespace, shapes):
            create = (
                f"create it at {name} with `sava namespaces create {namespace}`; nothing is copied before"
            )
            found.append(Difference(namespace, "namespace", "exists", "missing", create, blocks=True))
    by_topic = {shape.topic: shape for shape in shapes}
    for local in topics:
        shape = by_topic[local.here.topic]
        if shape.there.namespace_exists:
            found += topic_differences(local, shape, settings, known.get(shape.topic, KnownThere()))
    return found


def identity_differences(name: str, record: RemoteRecord, identity: ClusterIdentity) -> list[Difference]:
    """Since it was added."""
    anew = f"nothing is copied until it is removed and added again: `sava remotes remove {name}`"
    pairs = ((record.cluster_id, identity.cluster_id), (record.cluster_name, identity.cluster_name))
    return [
        Difference("", "cluster", f"added as {known}", f"now {answered}", anew, blocks=True)
        for known, answered in pairs
        if known != answered
    ]


async def _describe(
    remotes: Remotes, name: str, record: RemoteRecord, topics: Sequence[LocalTopic], namespaces: Sequence[str]
) -> list[Shape]:
    asked = [local.here.topic for local in topics]
    asked += [f"/{namespace}/{PROBE}" for namespace in namespaces]
    found: list[Shape] = []
    for start in range(0, len(asked), PAGE):
        found += await remotes.calls.describe(name, record, asked[start : start + PAGE])
    return found


def _namespace_exists(namespace: str, shapes: Sequence[Shape]) -> bool:
    return all(shape.there.namespace_exists for shape in shapes if shape.topic.startswith(f"/{namespace}/"))


def topic_differences(
    local: LocalTopic, shape: Shape, settings: Settings, known: KnownThere
) -> list[Difference]:
    """Of one topic, whose namespace is there."""
    here, there = local.here, shape.there
    relation = matrix.relate(here, there, settings, known)
    verdict = matrix.decide(here, there, settings, known)
    blocks = bool(verdict.disconnected)
    counts = matrix.spread(here.partitions), matrix.spread(there.partitions)
    found = []
    match relation:
        case TopicRelation.SAME:
            pass
        case TopicRelation.ABSENT:
            plan = f"it will be created at {there.remote} with {counts[0]}"
            found.append(Difference(here.topic, "missing", counts[0], "none", plan, blocks=False))
        case TopicRelation.AWAITED:
            found.append(Difference(here.topic, "missing", counts[0], "none", verdict.reason, blocks=False))
        case TopicRelation.DELETED:
            other = "another topic" if there.exists else "none"
            found.append(Difference(here.topic, "deleted", counts[0], other, verdict.reason, blocks))
        case TopicRelation.GROWN:
            plan = f"partitions will be added at {there.remote}, as they were here"
            found.append(Difference(here.topic, "partitions", *counts, plan, blocks))
        case TopicRelation.OTHER_KIND:
            kinds = matrix.kind(here.reliable), matrix.kind(there.reliable)
            found.append(Difference(here.topic, "kind", kinds[0], kinds[1], verdict.reason, blocks))
        case _:
            surplus = f"all are copied; at {there.remote} partitions from {here.partitions} on get nothing"
            why = verdict.reason or surplus
            found.append(Difference(here.topic, "partitions", counts[0], counts[1], why, blocks))
    if there.exists and local.schema_subject != shape.schema_subject:
        found.append(_schema_difference(local, shape))
    return found


def _schema_difference(local: LocalTopic, shape: Shape) -> Difference:
    here, there, remote = local.schema_subject, shape.schema_subject, shape.there.remote
    consequence = f"the schemas are registered at {remote}; the topic there does not check them"
    if there:
        consequence = f"{remote} may refuse messages; nothing is copied beyond the first that it refuses"
    return Difference(
        local.here.topic, "schema", here or "none", there or "none", consequence, blocks=bool(here and there)
    )


def _of_remote(name: str, what: str, consequence: str) -> Difference:
    return Difference("", what, "", name, consequence, blocks=True)


# -- control -----------------------------------------------------------------------------------

UNPINNED_S: Final = 3.0
"""For the cursors of links to go after their policy."""
POLL_S: Final = 0.05
SHOWN_S: Final = 1.0
"""For the view to show what was just written."""


class Compared(NamedTuple):
    differences: dict[str, list[Difference]]
    """By remote."""
    is_set: bool


class Tested(NamedTuple):
    identity: ClusterIdentity | None
    """None: it did not answer."""
    round_trip_ms: float
    error: str
    differences: list[Difference]


class ReplicationLink(NamedTuple):
    """All that a runner needs to know."""

    remote: RemoteRecord
    topics: list[tuple[LinkTopic, ReportRecord | None]]


class Control:
    """Owned by the event loop."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        view: ClusterView,
        remotes: Remotes,
        links: Links,
        reports: Reports,
        statuses: Statuses,
        settings: Settings,
    ) -> None:
        self._store = store
        self._view = view
        self._registry = Registry(store)
        self.remotes = remotes
        self.policies = ReplicationPolicies(store)
        self._links = links
        self._reports = reports
        self._statuses = statuses
        self.settings = settings

    # -- remotes -----------------------------------------------------------------------------

    async def remove_remote(self, name: str) -> None:
        """Raises RemoteUnknown, RemoteInUse; ReplicationBusy while topics still keep messages for it, which
        nothing could end any more when it is forgotten."""

        def naming() -> list[str]:
            return policies.naming(self._store.local, name)

        deadline = time.monotonic() + UNPINNED_S
        while not naming() and (kept := self._links.kept_for(name)):
            if time.monotonic() >= deadline:
                raise ReplicationBusy(
                    f"topic {kept[0]} and perhaps others still keep messages for remote {name}: no policy "
                    "asks for it, but the broker that serves the topic has not answered; try again later"
                )
            await asyncio.sleep(POLL_S)
        await self.remotes.remove(name, naming)

    async def test_remote(self, name: str) -> Tested:
        """Raises RemoteUnknown."""
        record = await self.remotes.get(name)
        if not self._view.is_ready:
            raise Unavailable("this broker does not know yet which topics there are")
        try:
            answer = await self.remotes.ask(record)
        except (RemoteUnreachable, RemoteDenied, RemoteRefused) as error:
            return Tested(None, 0.0, str(error), [])
        wanted = {link.topic: each for link, each in self._links.wanted().items() if link.remote == name}
        topics = [self._local(topic, each.spec) for topic, each in sorted(wanted.items())]
        namespaces = sorted({topic.namespace for topic in wanted})
        found = await self._differences(name, record, topics, namespaces)
        return Tested(answer.identity, answer.round_trip_ms, "", found)

    # -- policies ----------------------------------------------------------------------------

    async def set(
        self, scope: Scope, policy: PolicyRecord, *, skip_checks: bool = False, dry_run: bool = False
    ) -> Compared:
        """Not set if a difference blocks it, unless checks are skipped. Raises NotController,
        NamespaceUnknown, TopicUnknown, RemoteUnknown, PolicyInvalid."""
        _ = self._links.term
        policy = policies.check(policy)
        await self.policies.exists(scope)
        self._links.check_pipelines(policy.remotes)
        found = await self._compare(scope, policy) if dry_run or not skip_checks else {}
        blocks = any(each.blocks for differences in found.values() for each in differences)
        if blocks or dry_run:
            return Compared(found, is_set=False)
        await self._settle_first()
        await self.policies.set(scope, policy)
        await self._settle(scope)
        return Compared(found, is_set=True)

    async def clear(self, scope: Scope) -> None:
        """Raises NotController, NamespaceUnknown, TopicUnknown."""
        await self._settle_first()
        await self.policies.clear(scope)
        await self._settle(scope)

    async def _compare(self, scope: Scope, policy: PolicyRecord) -> dict[str, list[Difference]]:
        topics = await self._locals(scope)
        known = {remote: await self.remotes.get(remote) for remote in policy.remotes}
        found = await asyncio.gather(
            *(
                self._differences(remote, record, topics, [scope.namespace])
                for remote, record in known.items()
            )
        )
        return dict(zip(known, found, strict=True))

    async def _differences(
        self, remote: str, record: RemoteRecord, topics: Sequence[LocalTopic], namespaces: Sequence[str]
    ) -> list[Difference]:
        known = {str(topic): each for topic, each in self._links.known(remote).items()}
        return await compare(self.remotes, remote, record, topics, namespaces, self.settings, known)

    async def _locals(self, scope: Scope) -> list[LocalTopic]:
        """The topics that the policy would be about, as they are here."""
        found = await self._registry.list(scope.namespace)
        heads = {name: spec for name, spec in found.items() if name.head == name and spec.reliable}
        if scope.topic is not None:
            heads = {scope.topic: heads[scope.topic]}
        else:
            local = self._store.local
            heads = {n: spec for n, spec in heads.items() if local.get(records.topic_policy_key(n)) is None}
        return [self._local(name, spec) for name, spec in sorted(heads.items())]

    def _local(self, name: TopicName, spec: TopicSpec) -> LocalTopic:
        kv = self._store.local.get(specs.schema_key(name))
        subject = specs.decode(kv, TopicSchema).subject if kv is not None else ""
        return LocalTopic(Here(topic=str(name), partitions=spec.partitions, reliable=spec.reliable), subject)

    async def _settle_first(self) -> None:
        with suppress(RecordCorrupt):  # it may be the record that is to be changed
            await self._links.settle()

    async def _settle(self, scope: Scope) -> None:
        """As soon as the view shows what the store has. If it is behind, the next pass does the rest."""
        topic = scope.topic
        if topic is not None:
            kv = self._store.local.get(scope.key)
            with suppress(TimeoutError):
                await self._view.wait(
                    lambda: self._view.replicated.get(topic) == kv, timeout=SHOWN_S, about=topic
                )
        await self._links.settle()

    # -- links -------------------------------------------------------------------------------

    def status(self, *, topic: str = "", remote: str = "") -> list[TopicStatus]:
        """Empty: all. Raises NotController, RemoteUnknown, LinkUnknown."""
        _ = self._links.term
        wanted = TopicName.parse(topic).head if topic else None
        if remote and remote not in self._links.remotes():
            raise RemoteUnknown(remote)
        found = [
            each
            for each in self._statuses.list()
            if wanted in (None, each.topic.name.topic) and remote in ("", each.topic.name.remote)
        ]
        if wanted is not None and not found:
            raise LinkUnknown(wanted, remote)
        return found

    def link(self, remote: str) -> ReplicationLink:
        """Raises NotController, RemoteUnknown."""
        _ = self._links.term
        record = self._links.remotes().get(check_name(remote, "remote"))
        if record is None:
            raise RemoteUnknown(remote)
        topics = [each for each in self._links.topics() if each.name.remote == remote and each.is_ready]
        return ReplicationLink(record, [(each, self._reports.get(each.name)) for each in topics])

    async def report(self, remote: str, runner: str, told: Mapping[TopicName, TopicReport]) -> None:
        """Raises NotController."""
        _ = self._links.term
        topics = {each.name: each for each in self._links.topics() if each.name.remote == remote}
        named = {LinkName(remote, topic): each for topic, each in told.items()}
        for name, each in named.items():
            self._links.hear(name, each.generation)
        await self._reports.take(runner, named, topics)

    async def recreate(self, topic: TopicName, remote: str) -> None:
        """Let a topic that was deleted at the remote be created and copied again; also if its policy is to be
        set after that, which is refused before. Raises NotController, LinkUnknown."""
        _ = self._links.term
        await self._reports.recreate(LinkName(check_name(remote, "remote"), topic.head))
        await self._links.settle()

    def schema_subject(self, topic: TopicName) -> str:
        spec = self._view.spec(topic)
        return self._local(topic, spec).schema_subject if spec is not None else ""


# -- maintenance, on the leader ----------------------------------------------------------------

TICK_S: Final = 0.5
IDLE_S: Final = 10.0
"""How often it settles when nothing is known to have changed."""
RETRY_S: Final = 2.0
LOOK_S: Final = 5.0


class ReplicationMaintenance:
    """Settles the links when something has changed, and every few seconds in any case; asks for the ends of
    partitions that no runner copies. Owned by the event loop."""

    def __init__(
        self,
        view: ClusterView,
        links: Links,
        reports: Reports,
        statuses: Statuses,
        leadership: Leadership,
    ) -> None:
        self._view = view
        self._links = links
        self._reports = reports
        self._statuses = statuses
        self._leadership = leadership
        self._term = 0
        self._is_changed = True
        self._settle_at = self._look_at = 0.0
        # By its tick, not woken: a thousand topics that are created at once are one reason to settle.
        self._passes = Reconciler(
            "replication", self._pass, period_s=TICK_S, retry=Backoff(RETRY_S, RETRY_S, jitter=0)
        )
        self._task: asyncio.Task[None] | None = None
        view.listen(self._on_change)

    def start(self, supervisor: Supervisor) -> None:
        self._task = supervisor.repeated(self._passes.run, name="replication")

    async def close(self) -> None:
        await cancelled(self._task)

    def _on_change(self, topics: frozenset[TopicName] | None) -> None:
        self._is_changed = True

    async def _pass(self) -> None:
        term = self._leadership.term()
        if term and term != self._term:
            self._reports.begin()
            self._is_changed, self._look_at = True, 0.0
        self._term = term
        if not term or not self._view.is_ready:
            return
        failure: SavaError | TimeoutError | None = None
        try:
            await self._settle(time.monotonic())
        except (Deposed, NotController):
            return
        except (SavaError, TimeoutError) as error:
            failure = error  # ends are asked for all the same: brokers may answer while the store does not
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            await self._statuses.look()
        if failure is not None:
            raise failure

    async def _settle(self, now: float) -> None:
        if not self._is_changed and now < self._settle_at:
            return
        self._is_changed, self._settle_at = False, now
        is_done = await self._links.settle()
        self._reports.forget(topic.name for topic in self._links.topics())
        self._settle_at = now + (IDLE_S if is_done else RETRY_S)
