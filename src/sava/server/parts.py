"""Parts: topics, and this broker's place among the others.

They know each other in a circle (the agent takes topics up, a topic that is deleted waits for other brokers'
agents, its dead letters go to brokers that the router finds), so they are made in one place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from sava.api.brokers_admin import PREPARE, Brokers
from sava.api.cluster_metrics import ClusterParts
from sava.api.danube.figures import DanubeCollector, Sends
from sava.api.disks import Disks
from sava.api.http import readiness
from sava.api.journal_metrics import JournalParts
from sava.api.load_reports import LoadReports
from sava.api.metrics import Metrics
from sava.api.topic_parts import TopicParts
from sava.api.unloading import Unloading
from sava.api.writers import StagedAnywhere, StagedHere
from sava.cluster.agent import Agent
from sava.cluster.controller import Controller
from sava.cluster.eviction import Evictor
from sava.cluster.pipelines import Pipelines
from sava.cluster.records import Registration, registration_key
from sava.cluster.registration import Registrar
from sava.cluster.router import TopicRouter
from sava.cluster.view import ClusterView
from sava.cluster.writer_tending import WriterMaintenance
from sava.cluster.writers import Writers
from sava.config import Config, Journal
from sava.errors import SavaError
from sava.ledger.choice import choose
from sava.ledger.failover import Failover
from sava.ledger.lives import Lives
from sava.ledger.losses import Losses
from sava.ledger.mirrored import MirroredJournal
from sava.ledger.neighbours import Registered
from sava.ledger.owner_host import MirrorOptions
from sava.ledger.records import Records
from sava.ledger.salvage import Salvage
from sava.metadata.errors import Unavailable
from sava.metadata.node import RaftNode
from sava.metadata.operations import ClusterOperations
from sava.metadata.raft_store import RaftStore
from sava.peers.brokers import Peers
from sava.peers.forwarding import Forwarder
from sava.peers.journal_door import JournalDoor
from sava.peers.owners import Owners
from sava.proto import brokers_pb2 as brokers_pb
from sava.raft.types import NO_NODE
from sava.replication.control import Control
from sava.replication.tending import ReplicationMaintenance
from sava.schemas.registry import SchemaRegistry
from sava.server.addresses import registration
from sava.server.replication import open_replication
from sava.storage.broker_storage import BrokerStorage, StorageOptions
from sava.storage.journal import JournalOptions
from sava.storage.objectstore import ObjectStore, store_id
from sava.storage.uploader import UploadOptions
from sava.supervisor import Supervisor
from sava.tasks import STEP_S, Stops, cancelled, stopped_within
from sava.topics.names import InvalidName, TopicName
from sava.topics.registry import Registry
from sava.topics.staged import Stage
from sava.topics.topic_schemas import TopicSchemas
from sava.topics.topics import ServedTopics
from sava.wal import LocalDisk

log = logging.getLogger(__name__)

RETRY_S: Final = 1.0
AHEAD_S: Final = 3.0
"""For uploads before a broker says that it leaves. What is more is uploaded when its topic is moved."""
LEADERLESS_S: Final = 3.0
"""Longer than an election takes."""
LOOK_S: Final = 0.25
ANSWER_S: Final = 1.0
"""For an answer to arrive, beyond the time that the other broker has for its work."""
HANDOVER_S: Final = 3.0
IN_FLIGHT_S: Final = 3.0
"""For appends that are under way when the broker stops."""


class Leading:
    """Whether this node leads: ``controller.Leadership``."""

    def __init__(self, node: RaftNode) -> None:
        self._node = node

    def term(self) -> int:
        replica = self._node.replica
        return replica.term if replica.is_leader else 0

    def leader(self) -> int:
        """As far as this node knows; 0: nobody."""
        core = self._node.core_status
        return core.leader if core is not None else NO_NODE

    async def hand_over(self) -> None:
        """Let another one lead, if this node does and there is one. When it stops, that leaves no gap: the
        others notice a stopped leader only by its silence."""
        core = self._node.core_status
        if core is None or core.leader != core.node or len(core.membership.voters) < 2:
            return
        if self._node.failed.done():
            return
        try:
            leader = await ClusterOperations(self._node).transfer(NO_NODE, "", timeout=HANDOVER_S)
            log.info("raft: leadership handed over to=%d", leader)
        except SavaError as error:
            log.warning("raft: leadership not handed over error=%s", error)


@dataclass(kw_only=True)
class Parts:
    """Closed by the stops that it was opened with, in the reverse of the order in which it says so."""

    config: Config
    supervisor: Supervisor
    node: RaftNode
    leading: Leading
    store: RaftStore
    objects: ObjectStore
    disks: Disks
    storage: BrokerStorage
    schemas: SchemaRegistry
    topic_schemas: TopicSchemas
    topics: ServedTopics
    view: ClusterView
    registrar: Registrar
    agent: Agent
    controller: Controller
    brokers: Brokers
    topic_parts: TopicParts
    unloading: Unloading
    forwarder: Forwarder
    danube_sends: Sends
    reports: LoadReports
    staged: StagedHere
    writers: Writers
    storage_id: str
    journals: Records
    neighbours: Registered
    mirrored: MirroredJournal
    failover: Failover
    evictor: Evictor
    losses: Losses
    pipelines: Pipelines
    replication: Control
    replicating: ReplicationMaintenance
    _joining: asyncio.Task[None] | None = None
    _store_id: str = ""

    def describe(self, incarnation: int) -> Registration:
        broker = self.topics.broker
        return registration(
            self.config,
            broker=broker,
            incarnation=incarnation,
            store_id=self._store_id,
            storage_id=self.storage_id,
        )

    def readiness(self) -> tuple[bool, str]:
        return readiness(self.node, self.view, self.registrar, self.supervisor)

    async def locate(self, topic: TopicName) -> tuple[int, str]:
        """Who has a topic, and where clients reach it. A broker that is not there in the eyes of the others
        may be cut off from them, and what it knows is old: it would send its clients in a circle, while any
        other could tell them. Raises Unavailable."""
        if not self.registrar.is_registered:
            raise Unavailable("this broker is not registered at the moment; ask another one")
        return await self.forwarder.locate(topic)

    def epoch_of(self, topic: str) -> int | None:
        """For lines of the log: as the topic is served here, else as the view has it."""
        try:
            name = TopicName.parse(topic)
        except InvalidName:
            return None
        loaded = self.topics.loaded.get(name)
        if loaded is not None:
            return loaded.epoch
        held, revision = self.view.held(name)
        return held.epoch if revision else None

    async def start(self) -> None:
        """When the ports are open: from now on others may send something."""
        supervisor, resign = self.supervisor, self.leading.hand_over
        self.view.start(supervisor)
        self.journals.start(supervisor)
        await self.topics.start(supervisor)
        self.agent.start(supervisor)
        self.controller.start(supervisor, resign)
        self.failover.start(supervisor, resign)
        self.evictor.start(supervisor)
        self.replicating.start(supervisor)
        self.reports.start(supervisor)
        self._joining = supervisor.essential(self._join(), name="joining")

    async def _join(self) -> None:
        """Be there for others, once it is known which segments this broker can read. Until then it has no
        topics, and forwards."""
        reason = ""
        while not self._store_id:
            try:
                self._store_id = await store_id(self.objects)
            except (SavaError, TimeoutError) as error:
                if str(error) != reason:
                    reason = str(error)
                    log.warning("broker: waiting for the object store error=%s", reason)
                await asyncio.sleep(RETRY_S)
        self.registrar.start(self.supervisor)

    async def leave(self) -> None:
        """Before a stop that somebody asked for: let others have the topics, and the leadership, while
        everything works. Bounded; what is left when it returns goes to others as after a failure."""
        timeout = self.config.cluster.leave_timeout_seconds
        if not timeout or not self._can_leave() or not await self._is_store_writable():
            return
        began = time.monotonic()
        await self.topics.upload_all(timeout=min(AHEAD_S, timeout / 2))
        if not await self.registrar.leave():
            return
        # First, so that the drain is the next leader's: this broker's ends when its controller does.
        await self.leading.hand_over()
        await self._until_left(began + timeout)
        log.info(
            "broker: topics handed over left=%d seconds=%.2f", self._topic_count, time.monotonic() - began
        )

    async def _until_left(self, deadline: float) -> None:
        """Until this broker has no topics, or nobody can take them: no other broker is active, or none leads,
        as when all are stopped together."""

        def is_over() -> bool:
            return not self._topic_count or not self._can_leave()

        led_at = time.monotonic()
        while not is_over() and (now := time.monotonic()) < min(deadline, led_at + LEADERLESS_S):
            with suppress(TimeoutError):
                await self.view.wait(is_over, timeout=min(LOOK_S, deadline - now))
            if self.leading.leader():
                led_at = time.monotonic()

    @property
    def _topic_count(self) -> int:
        return self.view.counts().get(self.topics.broker, 0)

    def _can_leave(self) -> bool:
        """Whether there is another broker that may have the topics."""
        own = self.topics.broker
        return self.registrar.is_registered and any(each.broker != own for each in self.view.active)

    async def _is_store_writable(self) -> bool:
        """Without it no topic can go to another broker, and waiting for that is of no use."""
        try:
            await self.storage.uploader.check_store()
        except SavaError as error:
            log.warning("broker: topics are not handed over error=%s", error)
            return False
        return True

    async def stop(self) -> bool:
        """Clients are turned away and positions written down while the metadata store still works; then
        others may have the topics. Says whether all of it was possible. Each step has a limit: the
        registration is given up also when the agent or a topic hangs, so that others need not wait for it to
        expire."""
        steps: tuple[tuple[str, Callable[[], Awaitable[object]]], ...] = (
            ("joining", lambda: cancelled(self._joining)),
            ("load reports", self.reports.close),
            ("evictions", self.evictor.close),
            ("failover", self.failover.close),
            ("replication", self.replicating.close),
            ("controller", self.controller.close),
            ("writers", self.writers.close),
            ("agent", self.agent.close),
            ("topics", self._close_topics),
            ("registration", self.registrar.close),
            ("journal", self.mirrored.lost),
            ("journal records", self.journals.close),
            ("cluster view", self.view.close),
        )
        is_in_order = True
        for what, stop in steps:
            limit_s = IN_FLIGHT_S + STEP_S if what == "topics" else STEP_S
            is_in_order &= await stopped_within(limit_s, stop, what=what)
        return is_in_order

    async def _close_topics(self) -> None:
        """What is in flight may wait for mirrors that do not come back; it is not waited for long."""
        closing = asyncio.create_task(self.topics.close())
        await asyncio.wait([closing], timeout=IN_FLIGHT_S)
        if not closing.done():
            await self.mirrored.lost()
        await closing


def mirror_options(journal: Journal) -> MirrorOptions:
    return MirrorOptions(
        write_quorum=journal.write_quorum,
        ack_quorum=journal.ack_quorum,
        may_degrade=journal.degraded == "allow",
        mirror_timeout_s=journal.mirror_timeout_seconds,
    )


def storage_options(config: Config, metrics: Metrics) -> StorageOptions:
    return StorageOptions(
        journal=JournalOptions(observe=metrics.journal_sync),
        upload=UploadOptions(segment_age_s=config.storage.upload_interval_seconds),
    )


def _members(node: RaftNode) -> int:
    """How many brokers the cluster has, registered or not, those included that do not vote yet."""
    core = node.core_status
    return len(core.membership.members) if core is not None else 0


def _is_member(node: RaftNode, broker: int) -> bool:
    """Of the cluster, registered or not; everybody is while that is not known."""
    core = node.core_status
    return core is None or broker in core.membership.members


def _addresses(node: RaftNode) -> Mapping[int, str]:
    """Under which the members of the cluster know one another."""
    core = node.core_status
    return dict(core.membership.addresses) if core is not None else {}


def _lease_of(store: RaftStore, broker: int) -> int:
    """The lease of a broker's registration, by this node's copy; 0: it is not registered."""
    kv = store.local.get(registration_key(broker))
    return kv.lease if kv is not None else 0


async def open_parts(
    config: Config,
    node: RaftNode,
    store: RaftStore,
    metrics: Metrics,
    stops: Stops,
    supervisor: Supervisor,
) -> Parts:
    broker = node.info().node
    objects = ObjectStore.open(config.storage.url)
    disk = LocalDisk(config.storage.journal_dir)
    lives = Lives(disk)
    storage = await BrokerStorage.open(
        disk,
        broker=str(broker),
        store=objects,
        metadata=store,
        options=storage_options(config, metrics),
        void=lives.void,
        is_mirrored=True,
        fail=node.fail,
        supervisor=supervisor,
    )
    stops.add("storage", storage.close)
    leading = Leading(node)
    view = ClusterView(store)
    journals = Records(store)
    neighbours = Registered(view, journals, lambda: _addresses(node))
    mirrored = MirroredJournal(
        broker,
        disk,
        storage.journal,
        lives,
        records=journals,
        neighbours=neighbours,
        choose=choose,
        door=JournalDoor(config.auth, lambda: node.info().cluster),
        brokers=lambda: _members(node),
        options=mirror_options(config.journal),
        renew=lambda reason: registrar.renew(reason),
        fail=node.fail,
    )
    stops.add("mirrors", mirrored.close)
    await mirrored.open()

    async def released(names: Sequence[TopicName]) -> None:
        await parts.agent.released(names)

    async def fence() -> None:
        await mirrored.lost()
        await topics.drop_all("this broker is not registered any more")

    registrar = Registrar(
        store,
        lambda incarnation: parts.describe(incarnation),
        broker=broker,
        ttl_ms=config.cluster.registration_ttl_ms,
        on_lost=fence,
    )
    registrar.listen(lambda: mirrored.registered(registrar.incarnation))
    view.listen(lambda topics: registrar.look() if topics is None else None)
    evictor = Evictor(store)
    if config.cluster.suspicion == "auto":
        node.suspicion.watch(lambda each: _lease_of(store, each), lease_ms=config.cluster.registration_ttl_ms)
        node.confirmed = evictor.confirmed
    router = TopicRouter(view, Registry(store))
    peers = Peers(router, config.auth)
    view.listen(lambda _: peers.look())
    stops.add("connections to peers", peers.close)
    forwarder = Forwarder(router, peers, leading.leader, broker=broker)
    topics = ServedTopics(
        store,
        storage,
        config,
        broker=broker,
        claims_unassigned=False,
        incarnation=lambda: registrar.incarnation,
        released=released,
        publish_elsewhere=forwarder.publish_elsewhere,
    )

    async def prepare_move(owner: int, topic: TopicName, timeout: float) -> None:
        if owner == broker:
            await topics.prepare_move(topic, timeout=timeout)
            return
        request = brokers_pb.PrepareMoveRequest(topic=str(topic), timeout_ms=round(timeout * 1000))
        await forwarder.ask(
            "admin",
            PREPARE,
            request,
            brokers_pb.PrepareMoveResponse,
            broker=owner,
            timeout=timeout + ANSWER_S,
        )

    owners = Owners(router, forwarder)
    staged = StagedHere(topics, Stage(objects))
    expiry_s = config.storage.staging_expiry_seconds
    writers = Writers(store, objects, StagedAnywhere(staged, owners), expiry_s=expiry_s)
    tending = WriterMaintenance(writers, store, objects, expiry_s=expiry_s)
    controller = Controller(
        view,
        store,
        config,
        leading,
        broker=broker,
        finish_deletions=topics.finish_deletions,
        tend_writers=tending.run,
        prepare_move=prepare_move,
    )
    failover = Failover(
        view,
        store,
        journals,
        neighbours,
        mirrored.peers,
        Salvage(journals, mirrored.peers, store, objects, own=mirrored.storage),
        leading,
        is_member=lambda each: _is_member(node, each),
        may_degrade=config.journal.degraded == "allow",
        broker=broker,
        own=mirrored.storage,
    )
    topic_parts = TopicParts(topics, store, view, owners)
    pipelines = Pipelines(store)
    replication, replicating = open_replication(config, node, store, topic_parts, pipelines, leading)
    parts = Parts(
        config=config,
        supervisor=supervisor,
        node=node,
        leading=leading,
        store=store,
        objects=objects,
        disks=Disks(config),
        storage=storage,
        schemas=SchemaRegistry(store),
        topic_schemas=TopicSchemas(store),
        topics=topics,
        view=view,
        registrar=registrar,
        agent=Agent(view, store, topics, broker=broker, registrar=registrar),
        controller=controller,
        brokers=Brokers(node, view),
        topic_parts=topic_parts,
        unloading=Unloading(topic_parts, controller, timeout_ms=config.cluster.move_timeout_seconds * 1000),
        forwarder=forwarder,
        danube_sends=Sends(),
        reports=LoadReports(
            topics,
            controller.loads,
            forwarder,
            leading.leader,
            interval_s=config.load_manager.load_report_interval_seconds,
        ),
        staged=staged,
        writers=writers,
        storage_id=storage.identity.storage_id,
        journals=journals,
        neighbours=neighbours,
        mirrored=mirrored,
        failover=failover,
        evictor=evictor,
        losses=Losses(failover, store, journals, neighbours, mirrored.peers, leading, own=mirrored.storage),
        pipelines=pipelines,
        replication=replication,
        replicating=replicating,
    )
    _observe(metrics, parts, tending)
    return parts


def _observe(metrics: Metrics, parts: Parts, tending: WriterMaintenance) -> None:
    controller, mirrored = parts.controller, parts.mirrored
    metrics.observe_disks(parts.disks)
    metrics.observe_topics(parts.topics, parts.storage)
    metrics.observe_replication(parts.replication)
    if parts.config.metrics.danube_names:
        forwarder = parts.forwarder
        metrics.observe_danube(
            DanubeCollector(parts.topics, controller, parts.danube_sends, lambda: forwarder.calls)
        )
    metrics.observe_pipelines(parts.pipelines, lambda: controller.is_leading)
    metrics.observe_journals(
        JournalParts(
            own=lambda: mirrored.owned,
            fences=lambda: mirrored.own_disk.fences,
            degraded_s=lambda: mirrored.degraded_s,
            copies=lambda: mirrored.copies.count,
            failover=parts.failover,
            neighbours=parts.neighbours,
        )
    )
    metrics.observe_cluster(
        ClusterParts(
            broker=parts.topics.broker,
            view=parts.view,
            registrar=parts.registrar,
            controller=controller,
            forwards=parts.forwarder.forwards,
            writers=parts.writers,
            tending=tending,
            suspicion=parts.node.suspicion,
            evictor=parts.evictor,
        )
    )
