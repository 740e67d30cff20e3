"""The ``Cluster`` service of the admin port: membership, leadership, snapshots, status."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from functools import partial
from typing import Any

import sava
from sava.api.brokers_admin import CONFIRM_S, unconfirmed
from sava.cluster.records import Mode
from sava.cluster.view import ClusterView
from sava.metadata.errors import Unavailable
from sava.metadata.node import RaftNode
from sava.metadata.replica.replica import ReplicaStatus
from sava.metadata.store import OPERATION_TIMEOUT_S, ClusterOperations
from sava.peers import faults
from sava.peers.deadlines import remaining
from sava.proto import admin_pb2 as pb
from sava.proto import admin_pb2_grpc as rpc
from sava.raft.core import PeerStatus, Status
from sava.raft.types import MembershipRefused, NodeId


class ClusterService(rpc.ClusterServicer):
    def __init__(self, node: RaftNode, view: ClusterView, cluster_name: str) -> None:
        self._node = node
        self._view = view
        self._cluster_name = cluster_name
        self._operations = ClusterOperations(node)

    async def Init(self, request: pb.InitRequest, context: Any) -> pb.InitResponse:
        async with faults.told(context):
            founded = await self._operations.init(
                tuple(request.nodes), timeout=remaining(context, OPERATION_TIMEOUT_S)
            )
        return pb.InitResponse(
            already_initialized=founded.already,
            cluster_id=founded.cluster,
            leader_id=founded.leader,
            voters=founded.voters,
        )

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        status = self._node.status
        response = pb.StatusResponse(
            self_node_id=status.node,
            raft_addr=self._node.info().address,
            cluster_id=status.cluster,
            cluster_name=self._cluster_name,
            role="waiting",
            membership_state=membership_state(status),
            revision=status.revision,
            keys=status.keys,
            total_bytes=status.total_bytes,
            snapshot_index=status.snapshot_index,
            version=sava.__version__,
        )
        if status.core is None:
            return response
        if request.confirm:
            response.unconfirmed = await unconfirmed(self._node, remaining(context, CONFIRM_S))
        # After the question: the answer to it may have changed who leads.
        response.MergeFrom(core_status(self._node.status.core or status.core))
        return response

    async def AddNode(self, request: pb.AddNodeRequest, context: Any) -> pb.AddNodeResponse:
        async with faults.told(context):
            added = await self._operations.add(request.addr, timeout=remaining(context, OPERATION_TIMEOUT_S))
        return pb.AddNodeResponse(node_id=added.node, raft_addr=added.address, already_member=added.already)

    async def PromoteNode(self, request: pb.PromoteNodeRequest, context: Any) -> pb.PromoteNodeResponse:
        async with faults.told(context):
            node, already = await self._operations.promote(
                NodeId(request.node_id), request.addr, timeout=remaining(context, OPERATION_TIMEOUT_S)
            )
        return pb.PromoteNodeResponse(node_id=node, already_voter=already)

    async def RemoveNode(self, request: pb.RemoveNodeRequest, context: Any) -> pb.RemoveNodeResponse:
        async with faults.told(context):
            node = await self._operations.remove(
                NodeId(request.node_id),
                request.addr,
                force=request.force,
                check=partial(check_leaving, self._view),
                timeout=remaining(context, OPERATION_TIMEOUT_S),
            )
        return pb.RemoveNodeResponse(node_id=node)

    async def TransferLeader(
        self, request: pb.TransferLeaderRequest, context: Any
    ) -> pb.TransferLeaderResponse:
        async with faults.told(context):
            leader = await self._operations.transfer(
                NodeId(request.node_id), request.addr, timeout=remaining(context, OPERATION_TIMEOUT_S)
            )
        return pb.TransferLeaderResponse(leader_id=leader)

    async def Snapshot(self, request: pb.SnapshotRequest, context: Any) -> pb.SnapshotResponse:
        async with faults.told(context):
            meta = await self._operations.snapshot(timeout=remaining(context, OPERATION_TIMEOUT_S))
        return pb.SnapshotResponse(
            node_id=self._node.info().node, index=meta.index, term=meta.term, size=meta.size
        )


def check_leaving(view: ClusterView, node: NodeId) -> None:
    """Raise MembershipRefused while the node serves topics, or may get some: what it alone knows of them
    would go with it."""
    if not view.is_ready:
        raise Unavailable("this broker does not know yet which topics the node has")
    owned = sorted(entry.name for entry in view.owned_by(node))
    way_out = f"run `sava brokers drain {node}` first, or use --force"
    if owned:
        raise MembershipRefused(
            f"node {node} still has {len(owned)} topic(s), such as {owned[0]}; {way_out} and lose what only "
            "this node knows of them"
        )
    if node in view.brokers and view.mode(node).mode is not Mode.DRAINED:
        raise MembershipRefused(
            f"node {node} is a broker that is {view.mode(node).mode.value} and may get topics; {way_out}"
        )


def membership_state(status: ReplicaStatus) -> str:
    if status.removed:
        return "removed"
    if status.core is None:
        return "waiting"
    return "joint" if status.core.membership.is_joint else "stable"


def core_status(core: Status) -> pb.StatusResponse:
    membership = core.membership
    progress = {peer.node: peer for peer in core.peers}
    return pb.StatusResponse(
        leader_id=core.leader,
        current_term=core.term,
        last_applied=core.applied,
        voters=membership.voters,
        learners=membership.learners,
        role=core.role.value,
        commit=core.commit,
        last_index=core.last_index,
        first_index=core.first_index,
        transferring_to_id=core.transferring_to,
        members=[
            member_status(node, membership.address(node) or "", _role(core, node), progress.get(node))
            for node in membership.members
        ],
    )


def member_status(node: NodeId, address: str, role: str, peer: PeerStatus | None) -> pb.MemberStatus:
    member = pb.MemberStatus(node_id=node, raft_addr=address, role=role)
    if peer is not None:
        member.match = peer.match
        member.progress = peer.state
        member.recently_active = peer.recently_active
    return member


def _role(core: Status, node: NodeId) -> str:
    if node in core.membership.voters:
        return "voter"
    return "learner" if node in core.membership.learners else "outgoing"
