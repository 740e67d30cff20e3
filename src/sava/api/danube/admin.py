"""``BrokerAdmin``, ``ClusterAdmin`` and ``SecurityAdmin``: the brokers and the Raft cluster, as Danube's
tools ask for them. Sava's own services know more, and stream the progress of a drain.

``danube-admin`` sends no deadline, and gives up every call after five seconds. So a call that moves topics is
answered after ``ANSWER_S`` at the latest, as far as it has come by then, and the work continues.

This version has no roles and bindings. A tool that asks gets that as an error, instead of an empty list that
looks like "no client may do anything" or "every client may".
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any, Final

from sava.api.admin.brokers import (
    CONFIRM_S,
    Brokers,
    ListedBroker,
    drain_mode,
)
from sava.api.admin.cluster import check_leaving
from sava.api.danube.wire import required, unimplemented
from sava.cluster.controller import Controller
from sava.cluster.drains import DrainStatus
from sava.cluster.rebalancer import PlannedMove, Rebalanced
from sava.cluster.records import BrokerMode, Registration
from sava.cluster.view import ClusterView
from sava.metadata.errors import InvalidRequest, Unavailable, Unfinished
from sava.metadata.node import RaftNode
from sava.metadata.store import OPERATION_TIMEOUT_S, ClusterOperations
from sava.peers.error_mapping import remaining
from sava.proto import danube_admin_pb2 as pb
from sava.proto import danube_admin_pb2_grpc as rpc
from sava.raft.types import NodeId
from sava.topics.errors import MessageInvalid
from sava.topics.registry import Namespaces

# ruff: noqa: N802 (gRPC names the methods)


LEADER: Final = "Cluster_Leader"
FOLLOWER: Final = "Cluster_Follower"
NO_ROLE: Final = "None"
ANSWER_S: Final = 4.0
"""For a call without a deadline."""


class BrokerAdmin(rpc.BrokerAdminServicer):
    def __init__(self, brokers: Brokers, controller: Controller, namespaces: Namespaces) -> None:
        self._brokers = brokers
        self._controller = controller
        self._namespaces = namespaces

    async def ListBrokers(self, request: pb.Empty, context: Any) -> pb.BrokerListResponse:
        found, reason = await self._brokers.listed(timeout=remaining(context, CONFIRM_S))
        leader = 0 if reason else self._brokers.leader
        return pb.BrokerListResponse(brokers=[_info(seen, leader) for seen in found])

    async def GetLeaderBroker(self, request: pb.Empty, context: Any) -> pb.BrokerResponse:
        if not self._brokers.leader:
            raise Unavailable("the cluster has no leader at the moment")
        return pb.BrokerResponse(leader=str(self._brokers.leader))

    async def ListNamespaces(self, request: pb.Empty, context: Any) -> pb.NamespaceListResponse:
        return pb.NamespaceListResponse(namespaces=await self._namespaces.list())

    async def UnloadBroker(self, request: pb.UnloadBrokerRequest, context: Any) -> pb.UnloadBrokerResponse:
        """Answers when the drain is done, or as far as it has come when the caller has no time left. The
        drain continues then, and the same call again tells how far it is."""
        broker = broker_id(request.broker_id)
        mode = drain_mode(
            parallel=request.max_parallel,
            timeout_s=request.timeout_seconds,
            include=tuple(request.namespaces_include),
            exclude=tuple(request.namespaces_exclude),
        )
        if request.dry_run:
            return _unloaded(self._controller.plan_drain(broker, mode), started=False)
        return _unloaded(await self._drain(broker, mode, context), started=True)

    async def _drain(self, broker: int, mode: BrokerMode, context: Any) -> DrainStatus:
        latest: DrainStatus | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(remaining(context, ANSWER_S)):
                async for status in self._controller.drain(broker, mode):
                    latest = status
        if latest is None:
            raise Unfinished(f"broker {broker}: the drain was not seen to begin in time; repeat the call")
        return latest

    async def ActivateBroker(
        self, request: pb.ActivateBrokerRequest, context: Any
    ) -> pb.ActivateBrokerResponse:
        await self._controller.activate(broker_id(request.broker_id), request.reason)
        return pb.ActivateBrokerResponse(success=True)

    async def GetClusterBalance(
        self, request: pb.ClusterBalanceRequest, context: Any
    ) -> pb.ClusterBalanceResponse:
        balance = self._controller.balance()
        return pb.ClusterBalanceResponse(
            coefficient_of_variation=balance.coefficient_of_variation,
            mean_load=balance.mean_load,
            max_load=balance.max_load,
            min_load=balance.min_load,
            std_deviation=balance.std_deviation,
            broker_count=len(balance.brokers),
            brokers=[
                pb.BrokerLoadInfo(
                    broker_id=each.broker,
                    load=each.load,
                    topic_count=each.topics,
                    is_overloaded=each.is_overloaded,
                    is_underloaded=each.is_underloaded,
                )
                for each in balance.brokers
            ],
            assignment_strategy=balance.strategy,
        )

    async def TriggerRebalance(self, request: pb.RebalanceRequest, context: Any) -> pb.RebalanceResponse:
        """One round. A move that failed stays in the list, with why as its reason. A round that takes longer
        than the caller waits is answered with its plan, and continues."""
        max_moves = request.max_moves if request.HasField("max_moves") else 0
        done = await self._controller.rebalance(dry_run=True, max_moves=max_moves)
        if not request.dry_run:
            begun = self._controller.begin_rebalance(max_moves=max_moves)
            try:
                async with asyncio.timeout(remaining(context, ANSWER_S)):
                    done = await asyncio.shield(begun)
            except TimeoutError:
                return pb.RebalanceResponse(
                    success=True,
                    proposed_moves=map(_proposed, done.moves),
                    error_message=f"{len(done.moves)} moves have begun and continue; `danube-admin brokers "
                    "balance` shows the result",
                )
        executed = 0 if request.dry_run else sum(1 for move in done.moves if not move.error)
        return pb.RebalanceResponse(
            success=not any(move.error for move in done.moves),
            moves_executed=executed,
            proposed_moves=map(_proposed, done.moves),
            error_message=_outcome(request.dry_run, done),
        )


def _proposed(move: PlannedMove) -> pb.ProposedMove:
    return pb.ProposedMove(
        topic_name=str(move.topic),
        from_broker=move.from_broker,
        to_broker=move.to_broker,
        estimated_load=move.load,
        reason=move.error or "rebalance",
    )


def broker_id(text: str) -> int:
    """Raises MessageInvalid."""
    if not required(text, "broker_id").isdecimal():
        raise MessageInvalid(f"broker_id {text[:40]!a} is not a number; ListBrokers has them")
    return int(text)


def _info(seen: ListedBroker, leader: int) -> pb.BrokerInfo:
    info = pb.BrokerInfo(
        broker_id=str(seen.broker),
        broker_role=NO_ROLE if not leader else LEADER if seen.is_leader else FOLLOWER,
        broker_status=seen.status,
    )
    registration = seen.registration
    if registration is not None:
        info.broker_addr = _url(registration, registration.client)
        info.admin_addr = _url(registration, registration.admin)
        info.metrics_addr = f"http://{registration.http}"
    return info


def _url(registration: Registration, address: str) -> str:
    return f"{'https' if registration.is_tls else 'http'}://{address}"


def _unloaded(status: DrainStatus, *, started: bool) -> pb.UnloadBrokerResponse:
    return pb.UnloadBrokerResponse(
        started=started,
        total=status.total,
        succeeded=status.succeeded,
        failed=status.failed,
        pending=status.pending,
        failed_topics=map(str, status.failed_topics),
    )


def _outcome(dry_run: bool, done: Rebalanced) -> str:
    """In words: the field is for people, also when nothing went wrong."""
    failed: list[PlannedMove] = [move for move in done.moves if move.error]
    if failed:
        return f"{len(failed)} of {len(done.moves)} moves failed; {failed[0].topic}: {failed[0].error}"
    if not done.moves and done.before.coefficient_of_variation <= done.before.threshold:
        return "the cluster is balanced: nothing to move"
    if not done.moves:
        return (
            f"loads are uneven ({done.before.coefficient_of_variation:.2f}, balanced up to "
            f"{done.before.threshold:.2f}), and no topic may move: excluded, too young, or nowhere to go "
            "(see load_manager.rebalancing)"
        )
    return f"{len(done.moves)} topics {'would move' if dry_run else 'moved'}"


# -- the Raft cluster ------------------------------------------------------------------------------


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

    async def PromoteNode(self, request: pb.PromoteNodeRequest, context: Any) -> pb.PromoteNodeResponse:
        timeout = remaining(context, OPERATION_TIMEOUT_S)
        node, already = await self._operations.promote(NodeId(request.node_id), "", timeout=timeout)
        message = "was a voter already" if already else "is a voter now"
        return pb.PromoteNodeResponse(success=True, message=f"node {node} {message}")

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


# -- roles and bindings ----------------------------------------------------------------------------


TEXT: Final = (
    "roles and bindings are not part of this version; access is by mutual TLS (auth.mode: tls) or open"
)


class SecurityAdmin(rpc.SecurityAdminServicer):
    async def CreateRole(self, request: pb.CreateRoleRequest, context: Any) -> pb.CreateRoleResponse:
        await unimplemented(context, TEXT)

    async def GetRole(self, request: pb.GetRoleRequest, context: Any) -> pb.GetRoleResponse:
        await unimplemented(context, TEXT)

    async def ListRoles(self, request: pb.Empty, context: Any) -> pb.ListRolesResponse:
        await unimplemented(context, TEXT)

    async def DeleteRole(self, request: pb.DeleteRoleRequest, context: Any) -> pb.DeleteRoleResponse:
        await unimplemented(context, TEXT)

    async def CreateBinding(self, request: pb.CreateBindingRequest, context: Any) -> pb.CreateBindingResponse:
        await unimplemented(context, TEXT)

    async def GetBinding(self, request: pb.GetBindingRequest, context: Any) -> pb.GetBindingResponse:
        await unimplemented(context, TEXT)

    async def ListBindings(self, request: pb.ListBindingsRequest, context: Any) -> pb.ListBindingsResponse:
        await unimplemented(context, TEXT)

    async def ListAllBindings(self, request: pb.Empty, context: Any) -> pb.ListBindingsResponse:
        await unimplemented(context, TEXT)

    async def DeleteBinding(self, request: pb.DeleteBindingRequest, context: Any) -> pb.DeleteBindingResponse:
        await unimplemented(context, TEXT)
