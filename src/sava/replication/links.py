"""Links: what has to be copied where, made from policies, on the leader.

A pass compares what policies ask for with what is written down, and writes down the difference: a record for
each topic and remote, and one pipeline for each remote that any topic needs. It acts on states and not on
events, so a policy that is set while no broker leads, a topic that is created by a client, and a remote that
is removed all come to the same. Nothing of it touches the remote: the runner that copies creates what is
missing there, after comparing.

**Where copying starts.** By default with the oldest message. A policy that starts at the latest means the
ends of the partitions at the moment when it came into force, which are asked for once and written down: a
runner that started later and took the ends then would leave out what came in between. A topic or partition
that was created after the policy is copied from its first message.

**Growth.** The record has the number of partitions with which the topic came under the policy. More than that
now means that partitions were added here, which is to be done there as well; fewer there from the beginning
means that the two are different, which is for people to decide.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from sava.cluster.controller import Leadership
from sava.cluster.pipelines import PipelineForeign, Pipelines, PipelineStopping, PipelineUnknown
from sava.cluster.records import NotController
from sava.cluster.view import ClusterView
from sava.metadata.commands import Compare, Delete, Operation, Put
from sava.metadata.records import unchanged
from sava.metadata.store import MetadataStore
from sava.replication import policies, records, remotes
from sava.replication.matrix import KnownThere
from sava.replication.policies import Scope, ScopedPolicy
from sava.replication.records import LATEST, LinkRecord, PolicyRecord, RemoteRecord
from sava.replication.slots import ReplicationSlot, ReplicationSlots, first_position
from sava.topics import specs
from sava.topics.names import TopicName
from sava.topics.specs import EARLIEST, Position, TopicSpec

log = logging.getLogger(__name__)

KIND: Final = "replicate"
MADE_BY: Final = "replication"
BATCH: Final = 100
"""Records in one transaction; with their conditions and reports that is below the store's limit."""


class Extent(NamedTuple):
    """What a partition has: offsets from ``start`` up to ``end``."""

    start: int
    end: int


Extents = Callable[[Sequence[TopicName]], Awaitable[Mapping[TopicName, Extent]]]
"""Of those topics without partitions of which it is certain at present."""


class LinkName(NamedTuple):
    remote: str
    topic: TopicName


class WantedTopic(NamedTuple):
    """A topic that a policy asks to copy to a remote."""

    spec: TopicSpec
    policy: PolicyRecord
    revision: int
    """Of the store, when the policy was set."""
    topic_ids: tuple[int, ...]
    """By partition."""

    @property
    def width(self) -> int:
        """Partitions; a plain topic is one."""
        return max(1, self.spec.partitions)


class WrittenLink(NamedTuple):
    record: LinkRecord
    revision: int


class LinkTopic(NamedTuple):
    """A topic that is copied to a remote, as it is written down."""

    name: LinkName
    wanted: WantedTopic
    record: LinkRecord

    @property
    def is_ready(self) -> bool:
        """Whether it is known where to start."""
        return self.wanted.policy.start != LATEST or bool(self.record.start_offsets)

    @property
    def start_offsets(self) -> tuple[int, ...]:
        """Of a policy that starts at the latest. Partitions that were added since are copied from their first
        message."""
        known = self.record.start_offsets
        return known + (0,) * (self.wanted.width - len(known)) if known else ()

    def first(self, number: int) -> Position:
        """Before what is not copied of the partition of this number. If some of it was copied before, it
        continues where it was, which the remote knows."""
        if self.record.remote_topic_ids:
            return EARLIEST
        offsets = self.start_offsets
        return first_position(self.wanted.policy.start, offsets[number] if offsets else None)

    @property
    def cursors(self) -> list[tuple[ReplicationSlot, Position]]:
        """What keeps messages for it, and from where on if none of it is copied."""
        return [
            (ReplicationSlot(self.name.remote, member), self.first(number))
            for number, member in enumerate(self.members)
        ]

    @property
    def grow_to(self) -> int:
        partitions = self.wanted.spec.partitions
        return partitions if partitions > self.record.base_partitions else 0

    @property
    def members(self) -> list[TopicName]:
        return members(self.name.topic, self.wanted.spec)


def members(name: TopicName, spec: TopicSpec) -> list[TopicName]:
    """The partitions; the topic itself if it has none."""
    return [name.partition(index) for index in range(spec.partitions)] or [name]


def pipeline_name(remote: str) -> str:
    return f"{KIND}-{remote}"


class Links:
    """Owned by the event loop."""

    def __init__(
        self,
        view: ClusterView,
        store: MetadataStore,
        pipelines: Pipelines,
        leadership: Leadership,
        extents: Extents,
        cursors: ReplicationSlots,
    ) -> None:
        self._view = view
        self._store = store
        self._pipelines = pipelines
        self._leadership = leadership
        self._extents = extents
        self._cursors = cursors
        self._passing = asyncio.Lock()
        self._heard: dict[LinkName, int] = {}
        """The generations that runners have reported."""

    # -- knowing -----------------------------------------------------------------------------

    @property
    def term(self) -> int:
        """Raises NotController."""
        term = self._leadership.term()
        if not term or not self._view.is_ready:
            raise NotController
        return term

    def remotes(self) -> dict[str, RemoteRecord]:
        return remotes.known(self._store.local)

    def wanted(self) -> dict[LinkName, WantedTopic]:
        """Raises RecordCorrupt: of a policy that cannot be read it is not known what it wants, so everything
        stays as it is."""
        of_namespaces, of_topics = policies.of_namespaces(self._store.local), self._of_topics()
        if not of_namespaces and not of_topics:
            return {}
        known = self.remotes()
        found: dict[LinkName, WantedTopic] = {}
        for name in self._view.names():
            held = of_topics.get(name) or of_namespaces.get(name.namespace)
            if held is None or not held.policy.remotes or name.head != name:
                continue
            wanted = self._wanted(name, held)
            if wanted is not None:
                found |= {LinkName(each, name): wanted for each in held.policy.remotes if each in known}
        return found

    def topics(self) -> list[LinkTopic]:
        """What is wanted and written down, in order."""
        written = self.written()
        return [
            LinkTopic(name, wanted, written[name].record)
            for name, wanted in sorted(self.wanted().items())
            if name in written and _is_of(written[name].record, wanted)
        ]

    def written(self) -> dict[LinkName, WrittenLink]:
        """Raises RecordCorrupt."""
        found = {}
        for kv in self._store.local.range(records.LINKS).kvs:
            match records.link_of_key(kv.key):
                case (remote, topic, False):
                    record = specs.decode(kv, LinkRecord)
                    found[LinkName(remote, topic)] = WrittenLink(record, kv.mod_revision)
        return found

    def known(self, remote: str) -> dict[TopicName, KnownThere]:
        """What is remembered of topics at a remote, also of those that no policy asks for at present. Raises
        RecordCorrupt."""
        found = {}
        for name, (record, _) in self.written().items():
            spec = self._view.spec(name.topic)
            if name.remote == remote and spec is not None and spec.topic_id == record.topic_id:
                found[name.topic] = KnownThere(
                    topic_ids=record.remote_topic_ids,
                    is_tombstone=record.is_tombstone,
                    is_grown=record.is_wanted and spec.partitions > record.base_partitions,
                )
        return found

    def _of_topics(self) -> dict[TopicName, ScopedPolicy]:
        return {
            name: ScopedPolicy(specs.decode(kv, PolicyRecord), Scope(name.namespace, name), kv.mod_revision)
            for name, kv in self._view.replicated.items()
            if self._view.spec(name) is not None
        }

    def _wanted(self, name: TopicName, held: ScopedPolicy) -> WantedTopic | None:
        """None: it is not there, or keeps no messages that could be copied."""
        spec = self._view.spec(name)
        if spec is None or not spec.reliable:
            return None
        parts = [self._view.spec(each) for each in members(name, spec)]
        if any(part is None for part in parts):
            return None  # its record cannot be read
        ids = tuple(part.topic_id for part in parts if part is not None)
        return WantedTopic(spec, held.policy, held.revision, ids)

    def _is_uncertain(self, name: TopicName) -> bool:
        """Whether there is a record of it that cannot be read. Then it is not known to be gone, either."""
        spec = self._view.spec(name)
        names = [name, *(members(name, spec) if spec is not None else ())]
        return any(self._view.fault(each) for each in names)

    # -- writing down ------------------------------------------------------------------------

    async def settle(self) -> bool:
        """One pass; whether there is nothing left to do. Raises NotController, and what keeps it from going
        on."""
        async with self._passing:
            term = self.term
            wanted, written = self.wanted(), self.written()
            is_done = await self._remove_cursors(wanted, written)
            changes, is_ready = await self._changes(wanted, written)
            is_done &= is_ready
            for start in range(0, len(changes), BATCH):
                is_done &= await self._write(changes[start : start + BATCH], term)
            is_done &= await self._make_cursors()
            await self._rewind_cursors(term)
            return await self._keep_pipelines({name.remote for name in wanted}) and is_done

    async def _make_cursors(self) -> bool:
        """Of what is written down by now: a pass that has just begun to want something knows where it starts.
        Whether all are there."""
        return await self._cursors.make(
            cursor for topic in self.topics() if topic.is_ready for cursor in topic.cursors
        )

    async def _rewind_cursors(self, term: int) -> None:
        """Of what is to be copied again. A runner that has not heard of that may still move them on, so they
        are moved back in every pass until it has."""

        async def rewind(topic: LinkTopic, revision: int) -> None:
            name, record = topic.name, topic.record
            is_heard = self._heard.get(name, 0) >= record.generation
            if await self._cursors.rewind(topic.cursors) and is_heard:
                done = msgspec.structs.replace(record, rewound=record.generation)
                await self._write([_put(name, done, WrittenLink(record, revision))], term)

        written = self.written()
        self._heard = {name: each for name, each in self._heard.items() if name in written}
        await asyncio.gather(
            *(
                rewind(topic, written[topic.name].revision)
                for topic in self.topics()
                if topic.is_ready and topic.record.rewound < topic.record.generation
            )
        )

    def hear(self, name: LinkName, generation: int) -> None:
        """A runner has reported the topic, in this generation."""
        self._heard[name] = generation

    async def _remove_cursors(
        self, wanted: Mapping[LinkName, WantedTopic], written: Mapping[LinkName, WrittenLink]
    ) -> bool:
        return await self._cursors.remove(
            cursor for name in written if name not in wanted for cursor in self._cursors_of(name)
        )

    def kept_for(self, remote: str) -> list[TopicName]:
        """Topics that have cursors for the remote. Raises RecordCorrupt."""
        return [
            name.topic
            for name in self.written()
            if name.remote == remote and any(map(self._cursors.exists, self._cursors_of(name)))
        ]

    def _cursors_of(self, name: LinkName) -> list[ReplicationSlot]:
        spec = self._view.spec(name.topic)
        return (
            [ReplicationSlot(name.remote, each) for each in members(name.topic, spec)]
            if spec is not None
            else []
        )

    async def _changes(
        self, wanted: Mapping[LinkName, WantedTopic], written: Mapping[LinkName, WrittenLink]
    ) -> tuple[list[tuple[Compare, tuple[Operation, ...]]], bool]:
        changes: list[tuple[Compare, tuple[Operation, ...]]] = []
        is_done = True
        ends = await self._ends(wanted, written)
        for name, each in wanted.items():
            before = written.get(name)
            record = self._renewed(name, each, before, ends)
            if before is None or record != before.record:
                changes.append(_put(name, record, before))
                log.info("replication: topic=%s remote=%s record=%s", name.topic, name.remote, _told(record))
            is_done &= LinkTopic(name, each, record).is_ready
        known = self.remotes()
        for name, left in written.items():
            if name in wanted or self._is_uncertain(name.topic):
                continue
            spec = self._view.spec(name.topic)
            # Without a record no pass would find the cursors that are left, and they would keep messages.
            is_forgotten = name.remote not in known and not any(
                map(self._cursors.exists, self._cursors_of(name))
            )
            if spec is None or spec.topic_id != left.record.topic_id or is_forgotten:
                log.info("replication: forgotten topic=%s remote=%s", name.topic, name.remote)
                changes.append(_delete(name, left))
            elif left.record.is_wanted:
                log.info("replication: no longer wanted topic=%s remote=%s", name.topic, name.remote)
                record = msgspec.structs.replace(left.record, is_wanted=False, start_offsets=())
                changes.append(_put(name, record, left))
        return changes, is_done

    async def _ends(
        self, wanted: Mapping[LinkName, WantedTopic], written: Mapping[LinkName, WrittenLink]
    ) -> Mapping[TopicName, Extent]:
        """Of the topics whose ends are needed, all asked for at once."""

        def has_offsets(name: LinkName, each: WantedTopic) -> bool:
            before = written.get(name)
            return before is not None and _is_of(before.record, each) and bool(before.record.start_offsets)

        topics = {
            name.topic: each.spec
            for name, each in wanted.items()
            if each.policy.start == LATEST and not has_offsets(name, each)
        }
        names = [each for topic, spec in topics.items() for each in members(topic, spec)]
        return await self._extents(names) if names else {}

    def _renewed(
        self,
        name: LinkName,
        wanted: WantedTopic,
        before: WrittenLink | None,
        ends: Mapping[TopicName, Extent],
    ) -> LinkRecord:
        record = LinkRecord(topic_id=wanted.spec.topic_id, is_wanted=False)
        if before is not None and _is_of(before.record, wanted):
            record = before.record
        is_new = not record.is_wanted
        if is_new:
            partitions = wanted.spec.partitions
            record = msgspec.structs.replace(
                record, is_wanted=True, since_ms=records.now_ms(), base_partitions=partitions
            )
        offsets: tuple[int, ...] = ()
        if wanted.policy.start == LATEST:
            offsets = record.start_offsets or self._latest(name.topic, wanted, ends, is_new=is_new)
        return msgspec.structs.replace(record, start_offsets=offsets)

    def _latest(
        self, name: TopicName, wanted: WantedTopic, ends: Mapping[TopicName, Extent], *, is_new: bool
    ) -> tuple[int, ...]:
        """Nothing: it is not known at present."""
        kv = self._store.local.get(specs.spec_key(name))
        if is_new and kv is not None and kv.create_revision > wanted.revision:
            return (0,) * wanted.width
        names = members(name, wanted.spec)
        return tuple(ends[each].end for each in names) if all(each in ends for each in names) else ()

    async def _write(self, changes: Sequence[tuple[Compare, tuple[Operation, ...]]], term: int) -> bool:
        compare = [condition for condition, _ in changes]
        operations = [operation for _, each in changes for operation in each]
        return (await self._store.txn(compare, operations, fence_term=term)).succeeded

    async def _keep_pipelines(self, needed: Iterable[str]) -> bool:
        """Whether all are as they should be."""
        names = {pipeline_name(remote): remote for remote in needed}
        for pipeline in self._pipelines.known():
            if pipeline.record.made_by != MADE_BY or pipeline.record.is_deleting:
                continue
            if pipeline.name not in names:
                await self._delete_pipeline(pipeline.name)
            elif pipeline.record.settings == {"remote": names[pipeline.name]}:
                del names[pipeline.name]
        is_done = True
        for name, remote in names.items():
            try:
                await self._pipelines.apply(name, KIND, {"remote": remote}, made_by=MADE_BY)
            except (PipelineStopping, PipelineForeign) as error:
                log.warning("replication: no pipeline for now remote=%s error=%s", remote, error)
                is_done = False
        return is_done

    def check_pipelines(self, needed: Iterable[str]) -> None:
        """Raises PipelineForeign if a person or another policy has a pipeline of a name that is needed."""
        names = set(map(pipeline_name, needed))
        for pipeline in self._pipelines.known():
            if pipeline.name in names and pipeline.record.made_by != MADE_BY:
                raise PipelineForeign(pipeline.name, pipeline.record.made_by)

    async def _delete_pipeline(self, name: str) -> None:
        try:
            await self._pipelines.delete(name, made_by=MADE_BY)
        except PipelineUnknown:
            return  # another broker was faster


def _is_of(record: LinkRecord, wanted: WantedTopic) -> bool:
    return record.topic_id == wanted.spec.topic_id


def _put(
    name: LinkName, record: LinkRecord, before: WrittenLink | None
) -> tuple[Compare, tuple[Operation, ...]]:
    key = records.link_key(*name)
    operations: tuple[Operation, ...] = (Put(key, specs.encode(record)),)
    if before is not None and before.record.topic_id != record.topic_id:
        operations = (Delete(records.report_key(*name)), *operations)
    return unchanged(key, before.revision if before is not None else 0), operations


def _delete(name: LinkName, before: WrittenLink) -> tuple[Compare, tuple[Operation, ...]]:
    key = records.link_key(*name)
    return unchanged(key, before.revision), (Delete(key), Delete(records.report_key(*name)))


def _told(record: LinkRecord) -> str:
    start = f" from={','.join(map(str, record.start_offsets))}" if record.start_offsets else ""
    return f"wanted partitions={record.base_partitions}{start}"
