"""``ClusterAdmin``: the Raft cluster, as Danube's tools ask for it. Sava's own ``Cluster`` service knows
more."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from functools import partial
from typing import Any

from sava.api.cluster_admin import check_leaving
from sava.api.danube.codes import told
from sava.cluster.view import ClusterView
from sava.metadata.errors import InvalidRequest
from sava.metadata.node import RaftNode
from sava.metadata.store import OPERATION_TIMEOUT_S, ClusterOperations
from sava.peers.deadlines import remaining
from sava.proto import danube_admin_pb2 as pb
from sava.proto import danube_admin_pb2_grpc as rpc
from sava.raft.types import NodeId


class ClusterAdmin(rpc.ClusterAdminServicer):
    def __init__(self, node: RaftNode, view: ClusterView) -> None:
        self._node = node
        self._view = view
        self._operations = ClusterOperations(node)

    async def ClusterStatus(self, request: pb.Empty, context: Any) -> pb.ClusterStatusResponse:
        response = pb.ClusterStatusResponse(
            self_node_id=self._node.info().node, raft_addr=self._node.info().address
        )
        core = self._node.core_status
        if core is not None:
            response.leader_id = core.leader
            response.current_term = core.term
            response.last_applied = core.applied
            response.voters.extend(core.membership.voters)
            response.learners.extend(core.membership.learners)
        return response

    @told
    async def AddNode(self, request: pb.AddNodeRequest, context: Any) -> pb.AddNodeResponse:
        """A node draws its id itself; one that the caller names is compared with it."""
        timeout = remaining(context, OPERATION_TIMEOUT_S)
        address = request.addr.removeprefix("http://").removeprefix("https://")
        if request.node_id:
            found = await self._node.transport.identify(address, timeout=timeout)
            if found.node != request.node_id:
                raise InvalidRequest(f"the node at {address} is {found.node}, not {request.node_id}")
        added = await self._operations.add(address, timeout=timeout)
        message = "was a member already" if added.already else "added as a learner; promote it to vote"
        return pb.AddNodeResponse(
            success=True, node_id=added.node, message=f"node {added.node} at {added.address} {message}"
        )

    @told
    async def PromoteNode(self, request: pb.PromoteNodeRequest, context: Any) -> pb.PromoteNodeResponse:
        timeout = remaining(context, OPERATION_TIMEOUT_S)
        node, already = await self._operations.promote(NodeId(request.node_id), "", timeout=timeout)
        message = "was a voter already" if already else "is a voter now"
        return pb.PromoteNodeResponse(success=True, message=f"node {node} {message}")

    @told
    async def RemoveNode(self, request: pb.RemoveNodeRequest, context: Any) -> pb.RemoveNodeResponse:
        timeout = remaining(context, OPERATION_TIMEOUT_S)
        node = await self._operations.remove(
            NodeId(request.node_id),
            "",
            force=False,
            check=partial(check_leaving, self._view),
            timeout=timeout,
        )
        return pb.RemoveNodeResponse(success=True, message=f"node {node} is not a member any more")
