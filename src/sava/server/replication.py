"""Replication as a broker has it: what sends to other clusters, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sava.api.admin.descriptions import Partitions, start_message
from sava.api.admin.topics import SERVICE
from sava.api.remotes import AllowedAddresses, RemoteClusters
from sava.cluster.controller import Leadership
from sava.cluster.pipelines import Pipelines
from sava.config import Config
from sava.errors import SavaError
from sava.metadata.node import RaftNode
from sava.metadata.store import MetadataStore
from sava.peers.partition_calls import PARALLEL
from sava.proto import topics_admin_pb2 as pb
from sava.replication.control import Control, ReplicationMaintenance
from sava.replication.links import Extent, Links
from sava.replication.matrix import Mismatch, Settings
from sava.replication.remotes import ClusterIdentity, Remotes
from sava.replication.slots import ReplicationSlots
from sava.replication.status import Reports, Statuses
from sava.security.secret_files import SecretFiles
from sava.tasks import spread
from sava.topics.names import TopicName
from sava.topics.specs import Position
from sava.topics.topic import Topic


def open_replication(
    config: Config,
    node: RaftNode,
    store: MetadataStore,
    topics: Partitions,
    pipelines: Pipelines,
    leadership: Leadership,
) -> tuple[Control, ReplicationMaintenance]:
    async def extents(names: Sequence[TopicName]) -> Mapping[TopicName, Extent]:
        return await _extents(topics, names)

    def own() -> ClusterIdentity:
        return ClusterIdentity(config.cluster_name, node.status.cluster)

    view = topics.view
    pins = OwnersPins(topics)
    cursors = ReplicationSlots(store, pin=pins.pin, rewind=pins.rewind, unpin=pins.unpin)
    links = Links(view, store, pipelines, leadership, extents, cursors)
    reports = Reports(store)
    statuses = Statuses(links, reports, pipelines, extents)
    control = Control(
        store=store,
        view=view,
        remotes=Remotes(store, _remote_clusters(config), own),
        links=links,
        reports=reports,
        statuses=statuses,
        settings=Settings(
            may_create=config.replication.create_topic_to_remote_cluster,
            mismatch=Mismatch(config.replication.partition_mismatch_policy),
        ),
    )
    return control, ReplicationMaintenance(view, links, reports, statuses, leadership)


def _remote_clusters(config: Config) -> RemoteClusters:
    settings = config.replication
    directory = settings.secrets_dir or config.meta_store.data_dir / "secrets"
    host = config.broker.reachable_host
    is_local = host in ("localhost", "::1") or host.startswith("127.")
    return RemoteClusters(
        SecretFiles(directory, "replication.secrets_dir"),
        AllowedAddresses(settings.allowed_remotes, is_loopback_allowed=is_local),
    )


class OwnersPins:
    """Replication slots of topics, by calls to the topics' owners."""

    def __init__(self, topics: Partitions) -> None:
        self._topics = topics

    async def pin(self, topic: TopicName, cursor: str, start: Position) -> None:
        async def pin(here: Topic, _: pb.CreateSubscriptionRequest) -> pb.SubscriptionDescription:
            await here.reliable.hold_slot(cursor, start)
            return pb.SubscriptionDescription()

        request = pb.CreateSubscriptionRequest(subscription=cursor, type="shared", start=start_message(start))
        await self._topics.on_each(
            [topic], f"{SERVICE}CreateSubscription", request, pb.SubscriptionDescription, pin
        )

    async def rewind(self, topic: TopicName, cursor: str, start: Position) -> None:
        async def rewind(here: Topic, _: pb.SeekSubscriptionRequest) -> pb.SubscriptionDescription:
            await here.reliable.rewind(cursor, start)
            return pb.SubscriptionDescription()

        request = pb.SeekSubscriptionRequest(subscription=cursor, position=start_message(start))
        await self._topics.on_each(
            [topic], f"{SERVICE}SeekSubscription", request, pb.SubscriptionDescription, rewind
        )

    async def unpin(self, topic: TopicName, cursor: str) -> None:
        async def unpin(here: Topic, _: pb.DeleteSubscriptionRequest) -> pb.DeleteSubscriptionResponse:
            await here.release_slot(cursor)
            return pb.DeleteSubscriptionResponse()

        request = pb.DeleteSubscriptionRequest(subscription=cursor)
        await self._topics.on_each(
            [topic], f"{SERVICE}DeleteSubscription", request, pb.DeleteSubscriptionResponse, unpin
        )


async def _extents(topics: Partitions, names: Sequence[TopicName]) -> dict[TopicName, Extent]:
    """Of those whose end their owners know for certain: of the others it is asked again later."""

    async def extent(name: TopicName) -> Extent | None:
        try:
            (described,) = await topics.describe([name])
        except SavaError:
            return None  # deleted meanwhile, or no broker can say anything of it
        if not described.HasField("next_offset"):
            return None
        return Extent(described.start_offset, described.next_offset)

    found = zip(names, await spread(names, extent, parallel=PARALLEL), strict=True)
    return {name: extent for name, extent in found if extent is not None}
