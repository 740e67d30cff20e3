"""Control: what people and runners ask of replication.

Whatever changes what is copied is answered by the leader, which settles the links before it answers: when a
policy is set, its pipeline is there. Settling first as well, while the former policy still holds, has a
reason. With a policy that starts at the latest, topics that were created after it are copied from their first
message, and whether that is so of a topic is decided when its record is written:

    policy set ── topic created ── policy changed ── settled         the topic looks older than the policy
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from sava.cluster.view import ClusterView
from sava.metadata.errors import Unavailable
from sava.metadata.store import MetadataStore
from sava.replication import checks, policies, records
from sava.replication.checks import Difference, LocalTopic
from sava.replication.errors import (
    LinkUnknown,
    RemoteDenied,
    RemoteRefused,
    RemoteUnknown,
    RemoteUnreachable,
    ReplicationBusy,
)
from sava.replication.links import LinkName, Links, LinkTopic
from sava.replication.matrix import Here, Settings
from sava.replication.policies import ReplicationPolicies, Scope, ScopedPolicy
from sava.replication.records import PolicyRecord, RemoteRecord, ReportRecord
from sava.replication.remotes import ClusterIdentity, Remotes
from sava.replication.reports import Reports, TopicReport
from sava.replication.status import Statuses, TopicStatus
from sava.schemas.types import TopicSchema
from sava.topics import specs
from sava.topics.names import TopicName, check_name
from sava.topics.registry import Registry
from sava.topics.specs import RecordCorrupt, TopicSpec

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
        nobody could end any more when it is forgotten."""

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

    async def get(self, scope: Scope) -> ScopedPolicy | None:
        return await self.policies.get(scope)

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
        return await checks.compare(self.remotes, remote, record, topics, namespaces, self.settings, known)

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
