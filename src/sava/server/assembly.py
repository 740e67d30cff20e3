"""How a broker is assembled: topics, and this broker's place among the others.

``BrokerParts.open`` makes the parts in the order of its steps, each from those above it:

    storage      the disk, the journal, the object store
    ledgers      the registration, the own journal as a ledger, and this disk as a mirror of others
    guard        who may do what; before all that calls of others reach
    membership   who follows the registration and the view of the other brokers, the connections to them
    topics       the topics that are served here, and the calls about topics anywhere
    leadership   what the leader of the cluster does: controller, evictions, recovery of ledgers
    replication  what sends to other clusters

Some know each other in a circle: the registration, which ledgers renew, ends ledgers and topics; topics that
are released are reported to the agent that takes them up. The later part of a circle is reached through a
method of ``BrokerParts``; none of them is called before ``start``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

import sava
from sava.api.admin.brokers import PREPARE, Brokers, LoadReporter
from sava.api.admin.descriptions import Partitions
from sava.api.admin.topics import Unloading
from sava.api.danube.metrics import DanubeCollector, SendStats
from sava.api.http import readiness
from sava.api.metrics.broker import (
    BrokerMetrics,
    Disks,
    JournalCollector,
    JournalSources,
    SecurityCollector,
)
from sava.api.metrics.cluster import (
    ClusterSources,
    PipelinesCollector,
    ReplicationCollector,
    observe_cluster,
)
from sava.api.metrics.topics import TopicsCollector
from sava.api.writers import LocalStaged, RoutedStaged
from sava.cluster.agent import Agent
from sava.cluster.controller import Controller
from sava.cluster.pipelines import Pipelines
from sava.cluster.records import Registration, registration_key
from sava.cluster.registration import Evictor, Registrar
from sava.cluster.view import ClusterView, TopicRouter
from sava.cluster.writer_maintenance import WriterMaintenance
from sava.cluster.writers import Writers
from sava.config import Config, JournalSettings
from sava.errors import SavaError
from sava.ledger.endpoint import Generations
from sava.ledger.failover import Failover, UncleanRecovery
from sava.ledger.host import LedgerHost
from sava.ledger.registry import LedgerAccess, LedgerRecords, LiveBrokers
from sava.ledger.tail_recovery import TailRecovery
from sava.ledger.writer import LedgerCluster, MirrorOptions
from sava.metadata.errors import Unavailable
from sava.metadata.node import RaftNode
from sava.metadata.store import ClusterOperations, RaftStore
from sava.peer_connection import Dialer
from sava.peers.channels import PeerChannels
from sava.peers.forwarding import Forwarder
from sava.peers.guard import BrokerIdentity, Guard, Rules
from sava.peers.partition_calls import PartitionCalls
from sava.proto import brokers_pb2 as brokers_pb
from sava.raft.types import NO_NODE
from sava.records import Message
from sava.schemas.registry import SchemaRegistry
from sava.security import audit
from sava.security.audit import Audit, AuditEvent
from sava.security.permissions import Authorizer
from sava.security.principal import Principal
from sava.security.quotas import Quota, Quotas
from sava.security.store import SecurityPolicies
from sava.security.tokens import TokenVerifier
from sava.server.replication import open_replication
from sava.storage.broker_storage import BrokerStorage, StorageOptions
from sava.storage.journal import JournalOptions
from sava.storage.objectstore import ObjectStore, store_id
from sava.storage.uploader import UploadOptions
from sava.supervisor import Supervisor
from sava.tasks import STEP_S, Backoff, Stops, cancelled, stopped_within, until_success
from sava.topics.names import InvalidName, TopicName
from sava.topics.publishing import Stage
from sava.topics.registry import Registry
from sava.topics.rules import TopicSchemas
from sava.topics.served import OtherBrokers, ServedTopics
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


# -- where others reach a broker ---------------------------------------------------------------


def raft_address(config: Config) -> str:
    return f"{config.broker.reachable_host}:{config.broker.ports.raft}"


def client_address(config: Config) -> str:
    return f"{config.broker.reachable_host}:{config.broker.ports.client}"


def broker_url(config: Config) -> str:
    """As Danube's clients receive it."""
    return f"{'https' if config.auth.tls is not None else 'http'}://{client_address(config)}"


def registration(
    config: Config, *, broker: int, incarnation: int, store_id: str, storage_id: str
) -> Registration:
    host, ports = config.broker.reachable_host, config.broker.ports
    return Registration(
        broker=broker,
        incarnation=incarnation,
        client=client_address(config),
        admin=f"{host}:{ports.admin}",
        raft=raft_address(config),
        http=f"{host}:{ports.prometheus}",
        store_id=store_id,
        storage_id=storage_id,
        rack=config.broker.rack,
        is_tls=config.auth.tls is not None,
        version=sava.__version__,
        started_ms=time.time_ns() // 1_000_000,
    )


# -- who may do what ---------------------------------------------------------------------------


def token_verifier(config: Config) -> TokenVerifier | None:
    """None: no issuer is configured. Raises KeysInvalid."""
    issuers = [each.as_issuer() for each in config.auth.tokens]
    return TokenVerifier(issuers, config.auth.clock_skew_seconds) if issuers else None


def rules(config: Config, policies: SecurityPolicies) -> Rules | None:
    """By which calls are decided; None: every caller may do everything. Raises KeysInvalid."""
    auth = config.auth
    if not auth.is_enforced:
        return None
    return Rules(
        authorizer=Authorizer(policies.policies, map(Principal.parse, auth.super_admins)),
        policies=policies,
        verifier=token_verifier(config),
        cluster_name=config.cluster_name,
        allows_anonymous=bool(auth.anonymous),
        has_certificates=auth.tls is not None and auth.client_certificates != "none",
    )


# -- options -----------------------------------------------------------------------------------


def mirror_options(journal: JournalSettings) -> MirrorOptions:
    return MirrorOptions(
        write_quorum=journal.write_quorum,
        ack_quorum=journal.ack_quorum,
        may_degrade=journal.degraded == "allow",
        mirror_timeout_s=journal.mirror_timeout_seconds,
    )


def storage_options(config: Config, metrics: BrokerMetrics) -> StorageOptions:
    return StorageOptions(
        journal=JournalOptions(observe=metrics.journal_sync),
        upload=UploadOptions(segment_age_s=config.storage.upload_interval_seconds),
    )


class Leading:
    """Whether this node leads: ``controller.Leadership``."""

    def __init__(self, node: RaftNode) -> None:
        self._node = node

    def term(self) -> int:
        replica = self._node.replica
        return replica.term if replica.is_leader else 0

    def leader(self) -> int:
        """As far as this node knows; 0: no broker."""
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


class BrokerParts:
    """The parts of one broker between its consensus node and its ports. Closed by the stops that it was
    opened with, in the reverse of the order in which ``open`` adds them."""

    def __init__(
        self,
        config: Config,
        node: RaftNode,
        dialer: Dialer,
        metrics: BrokerMetrics,
        supervisor: Supervisor,
        stops: Stops,
    ) -> None:
        """``dialer`` opens connections to the Raft ports of others; it has this broker's credentials."""
        self.config = config
        self.node = node
        self._dialer = dialer
        self.secret = dialer.credentials.secret
        self.supervisor = supervisor
        self.broker = node.info().node
        self.store = RaftStore(node)
        self.leading = Leading(node)
        self.audit = Audit(config.auth.audit_level, broker=str(self.broker))
        self.quotas = Quotas()
        self._known_quotas: list[Quota] = []
        self._metrics = metrics
        self._stops = stops
        self._store_id = ""
        self._joining: asyncio.Task[None] | None = None
        self._auditing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self._open_storage()
        await self._open_ledgers()
        self._make_guard()
        self._make_membership()
        self._make_topics()
        self._make_leadership()
        self.pipelines = Pipelines(self.store)
        self.replication, self.replicating = open_replication(
            self.config, self.node, self.store, self.topic_parts, self.pipelines, self.leading
        )
        self._observe(self._metrics)

    # -- the steps of open -------------------------------------------------------------------

    async def _open_storage(self) -> None:
        self.objects = ObjectStore.open(self.config.storage.url)
        self._disk = LocalDisk(self.config.storage.journal_dir)
        self._generations = Generations(self._disk)
        self.storage = await BrokerStorage.open(
            self._disk,
            broker=str(self.broker),
            store=self.objects,
            metadata=self.store,
            options=storage_options(self.config, self._metrics),
            uncommitted_tails=self._generations.uncommitted_tails,
            fail=self.node.fail,
            supervisor=self.supervisor,
        )
        self.disks = Disks(self.config)
        self._stops.add("storage", self.storage.close)

    async def _open_ledgers(self) -> None:
        ttl_ms = self.config.cluster.registration_ttl_ms
        self.registrar = Registrar(
            self.store, self._describe, broker=self.broker, ttl_ms=ttl_ms, on_lost=self._fence
        )
        self.view = ClusterView(self.store)
        self.journals = LedgerRecords(self.store)
        self.live_brokers = LiveBrokers(self.view, self.journals, self._addresses)
        self.mirrored = LedgerHost(
            self.broker,
            self._disk,
            self.storage.journal,
            self._generations,
            cluster=LedgerCluster(
                records=self.journals,
                live_brokers=self.live_brokers,
                dialer=self._dialer,
                brokers=self._members,
            ),
            options=mirror_options(self.config.journal),
            # A ledger of this broker was fenced: its number is used, and the broker needs another.
            renew=self.registrar.renew,
            fail=self.node.fail,
        )
        self._stops.add("mirrors", self.mirrored.close)
        await self.mirrored.open()

    def _make_guard(self) -> None:
        self.security = SecurityPolicies(self.store)
        self.security.load()
        identity = BrokerIdentity(self.broker, self.secret)
        self.guard = Guard(identity, rules(self.config, self.security), self.audit)
        self.security.listen(self._quotas_changed)
        self._quotas_changed()

    def _make_membership(self) -> None:
        self.registrar.listen(lambda: self.mirrored.registered(self.registrar.incarnation))
        self.view.listen(lambda topics: self.registrar.look() if topics is None else None)
        self.evictor = Evictor(self.store)
        if self.config.cluster.suspicion == "auto":
            self.node.suspicion.watch(self._lease_of, lease_ms=self.config.cluster.registration_ttl_ms)
            self.node.confirmed = self.evictor.confirmed
        self._router = TopicRouter(self.view, Registry(self.store))
        peers = PeerChannels(self._router, self.config.auth)
        self.view.listen(lambda _: peers.look())
        self._stops.add("connections to peers", peers.close)
        self.forwarder = Forwarder(self._router, peers, self.leading.leader, guard=self.guard)

    def _make_topics(self) -> None:
        config, store = self.config, self.store
        self.topics = ServedTopics(
            store,
            self.storage,
            config,
            broker=self.broker,
            incarnation=lambda: self.registrar.incarnation,
            others=OtherBrokers(released=self._released, publish=self.forwarder.publish_elsewhere),
            quotas=self.quotas,
        )
        self.agent = Agent(self.view, store, self.topics, broker=self.broker, registrar=self.registrar)
        self.schemas = SchemaRegistry(store)
        self.topic_schemas = TopicSchemas(store)
        calls = PartitionCalls(self._router, self.forwarder)
        self.topic_parts = Partitions(self.topics, store, self.view, calls)
        self.staged = LocalStaged(self.topics, Stage(self.objects))
        expiry_s = config.storage.staging_expiry_seconds
        self.writers = Writers(store, self.objects, RoutedStaged(self.staged, calls), expiry_s=expiry_s)
        self._writer_maintenance = WriterMaintenance(self.writers, store, self.objects, expiry_s=expiry_s)
        self.danube_sends = SendStats()

    def _make_leadership(self) -> None:
        config, store, mirrored = self.config, self.store, self.mirrored
        self.brokers = Brokers(self.node, self.view)
        self.controller = Controller(
            self.view,
            store,
            config,
            self.leading,
            broker=self.broker,
            finish_deletions=self.topics.finish_deletions,
            maintain_writers=self._writer_maintenance.run,
            prepare_move=self._prepare_move,
        )
        move_timeout_ms = config.cluster.move_timeout_seconds * 1000
        self.unloading = Unloading(self.topic_parts, self.controller, timeout_ms=move_timeout_ms)
        self.reports = LoadReporter(
            self.topics,
            self.controller.loads,
            self.forwarder,
            self.leading.leader,
            interval_s=config.load_manager.load_report_interval_seconds,
        )
        access = LedgerAccess(self.journals, self.live_brokers, mirrored.peers, mirrored.storage)
        self.failover = Failover(
            self.view,
            store,
            access,
            TailRecovery(self.journals, mirrored.peers, store, self.objects, own=mirrored.storage),
            self.leading,
            is_member=self._is_member,
            may_degrade=config.journal.degraded == "allow",
            broker=self.broker,
        )
        self.losses = UncleanRecovery(self.failover, store, access, self.leading)

    def _observe(self, metrics: BrokerMetrics) -> None:
        controller, mirrored = self.controller, self.mirrored
        metrics.add(
            self.disks,
            TopicsCollector(self.topics, self.storage),
            ReplicationCollector(self.replication),
            PipelinesCollector(self.pipelines, lambda: controller.is_leading),
            SecurityCollector(self.audit, self.quotas),
        )
        if self.config.metrics.danube_names:
            forwarder = self.forwarder
            metrics.add(DanubeCollector(self.topics, controller, self.danube_sends, lambda: forwarder.calls))
        journals = JournalSources(
            own=lambda: mirrored.owned,
            fences=lambda: mirrored.own_disk.fences,
            degraded_s=lambda: mirrored.degraded_s,
            copies=lambda: mirrored.copies.count,
            failover=self.failover,
            live_brokers=self.live_brokers,
        )
        metrics.add(JournalCollector(journals))
        cluster = ClusterSources(
            broker=self.broker,
            view=self.view,
            registrar=self.registrar,
            controller=controller,
            forwards=self.forwarder.forwards,
            refusals=self.forwarder.refusals,
            writers=self.writers,
            writer_maintenance=self._writer_maintenance,
            suspicion=self.node.suspicion,
            evictor=self.evictor,
        )
        observe_cluster(metrics.registry, cluster)

    # -- what the parts ask of one another ---------------------------------------------------

    def _describe(self, incarnation: int) -> Registration:
        return registration(
            self.config,
            broker=self.broker,
            incarnation=incarnation,
            store_id=self._store_id,
            storage_id=self.storage.identity.storage_id,
        )

    async def _fence(self) -> None:
        """The registration is lost: others may have the topics."""
        await self.mirrored.lost()
        await self.topics.drop_all("this broker is not registered any more")

    async def _released(self, names: Sequence[TopicName]) -> None:
        await self.agent.released(names)

    async def _prepare_move(self, owner: int, topic: TopicName, timeout: float) -> None:
        if owner == self.broker:
            await self.topics.prepare_move(topic, timeout=timeout)
            return
        request = brokers_pb.PrepareMoveRequest(topic=str(topic), timeout_ms=round(timeout * 1000))
        reply = brokers_pb.PrepareMoveResponse
        await self.forwarder.ask("admin", PREPARE, request, reply, broker=owner, timeout=timeout + ANSWER_S)

    def _members(self) -> int:
        """How many brokers the cluster has, registered or not, those included that do not vote yet."""
        core = self.node.core_status
        return len(core.membership.members) if core is not None else 0

    def _is_member(self, broker: int) -> bool:
        """Of the cluster, registered or not; every broker is while that is not known."""
        core = self.node.core_status
        return core is None or broker in core.membership.members

    def _addresses(self) -> Mapping[int, str]:
        """Under which the members of the cluster know one another."""
        core = self.node.core_status
        return dict(core.membership.addresses) if core is not None else {}

    def _lease_of(self, broker: int) -> int:
        """The lease of a broker's registration, by this node's copy; 0: it is not registered."""
        kv = self.store.local.get(registration_key(broker))
        return kv.lease if kv is not None else 0

    def _quotas_changed(self) -> None:
        known = [Quota(*msgspec.structs.astuple(record)) for record in self.security.quotas.values()]
        if known != self._known_quotas:
            self._known_quotas = known
            self.quotas.set(known)

    async def _publish_audit(self, events: Sequence[AuditEvent]) -> None:
        """The topic is created when there is something to say."""
        await self.topics.ready()
        name = TopicName.parse(audit.TOPIC)
        await self.topics.registry.ensure(name, reliable=True)
        await self.topics.publish(
            name,
            [
                Message(
                    event.as_json(), attributes=event.attributes, publish_time=round(event.time_s * 1_000_000)
                )
                for event in events
            ],
        )

    async def _stop_audit(self) -> None:
        await cancelled(self._auditing)
        await self.audit.flush(self._publish_audit)

    # -- for the ports -----------------------------------------------------------------------

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

    # -- start and stop ----------------------------------------------------------------------

    async def start(self) -> None:
        """When the ports are open: from now on others may send something."""
        supervisor, resign = self.supervisor, self.leading.hand_over
        self.security.start(supervisor)
        self.view.start(supervisor)
        self.journals.start(supervisor)
        await self.topics.start(supervisor)
        self.agent.start(supervisor)
        self.controller.start(supervisor, resign)
        self.failover.start(supervisor, resign)
        self.evictor.start(supervisor)
        self.replicating.start(supervisor)
        self.reports.start(supervisor)
        self._auditing = supervisor.repeated(lambda: self.audit.run(self._publish_audit), name="audit")
        self._joining = supervisor.essential(self._join(), name="joining")

    async def _join(self) -> None:
        """Be there for others, once it is known which segments this broker can read. Until then it has no
        topics, and forwards."""

        def failed(error: BaseException) -> None:
            log.warning("broker: waiting for the object store error=%s", error)

        if not self._store_id:
            pauses = Backoff(RETRY_S, RETRY_S, jitter=0.0)
            self._store_id = await until_success(lambda: store_id(self.objects), failed, pauses=pauses)
        self.registrar.start(self.supervisor)

    async def leave(self) -> None:
        """Before a stop on request: let others have the topics, and the leadership, while
        everything works. Bounded, and may be cancelled at any point; what is left then goes to others as
        after a failure."""
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
        """Until this broker has no topics, or no other can take them: no other broker is active, or none
        leads, as when all are stopped together."""

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
            ("audit", self._stop_audit),
            ("topics", self._close_topics),
            ("registration", self.registrar.close),
            ("journal", self.mirrored.lost),
            ("ledger records", self.journals.close),
            ("cluster view", self.view.close),
            ("security policies", self.security.close),
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
