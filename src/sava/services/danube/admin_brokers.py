"""``BrokerAdmin``: the brokers of the cluster, as Danube's tools ask for them. So far a cluster serves
topics from one broker, which is the one that answers; moving topics away needs another."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sava.broker.topics import Topics
from sava.metadata.errors import Unavailable
from sava.metadata.node import RaftNode
from sava.proto import danube_admin_pb2 as pb
from sava.proto import danube_admin_pb2_grpc as rpc
from sava.services.danube.codes import told, unimplemented

LEADER: Final = "Cluster_Leader"
FOLLOWER: Final = "Cluster_Follower"
NO_ROLE: Final = "None"
ACTIVE: Final = "active"
NEEDS_ANOTHER: Final = "this needs another broker that serves topics, and this version runs with one"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where this broker is reached: URLs of its ports for clients, for administration and for metrics."""

    client: str
    admin: str
    metrics: str


class BrokerAdmin(rpc.BrokerAdminServicer):
    def __init__(self, node: RaftNode, topics: Topics, addresses: Addresses) -> None:
        self._node = node
        self._topics = topics
        self._addresses = addresses

    async def ListBrokers(self, request: pb.Empty, context: Any) -> pb.BrokerListResponse:
        this = pb.BrokerInfo(
            broker_id=str(self._node.info().node),
            broker_addr=self._addresses.client,
            broker_role=_role(self._node),
            admin_addr=self._addresses.admin,
            metrics_addr=self._addresses.metrics,
            broker_status=ACTIVE,
        )
        return pb.BrokerListResponse(brokers=[this])

    @told
    async def GetLeaderBroker(self, request: pb.Empty, context: Any) -> pb.BrokerResponse:
        core = self._node.core_status
        if core is None or not core.leader:
            raise Unavailable("the cluster has no leader at the moment")
        return pb.BrokerResponse(leader=str(core.leader))

    @told
    async def ListNamespaces(self, request: pb.Empty, context: Any) -> pb.NamespaceListResponse:
        return pb.NamespaceListResponse(namespaces=await self._topics.namespaces.list())

    async def GetClusterBalance(
        self, request: pb.ClusterBalanceRequest, context: Any
    ) -> pb.ClusterBalanceResponse:
        """Of one broker: all there is, perfectly even. Load is the number of topics."""
        count = len(self._topics.loaded)
        return pb.ClusterBalanceResponse(
            mean_load=count,
            max_load=count,
            min_load=count,
            broker_count=1,
            brokers=[pb.BrokerLoadInfo(broker_id=self._node.info().node, load=count, topic_count=count)],
            assignment_strategy="fair",
        )

    async def UnloadBroker(self, request: pb.UnloadBrokerRequest, context: Any) -> pb.UnloadBrokerResponse:
        await unimplemented(context, f"UnloadBroker: {NEEDS_ANOTHER}")

    async def ActivateBroker(
        self, request: pb.ActivateBrokerRequest, context: Any
    ) -> pb.ActivateBrokerResponse:
        await unimplemented(context, f"ActivateBroker: {NEEDS_ANOTHER}")

    async def TriggerRebalance(self, request: pb.RebalanceRequest, context: Any) -> pb.RebalanceResponse:
        await unimplemented(context, f"TriggerRebalance: {NEEDS_ANOTHER}")


def _role(node: RaftNode) -> str:
    core = node.core_status
    if core is None or not core.leader:
        return NO_ROLE
    return LEADER if core.leader == core.node else FOLLOWER
