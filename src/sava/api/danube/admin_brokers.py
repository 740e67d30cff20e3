"""``BrokerAdmin``: the brokers of the cluster, as Danube's tools ask for them. Sava's own ``Brokers`` service
knows more, and streams the progress of a drain.

``danube-admin`` sends no deadline, and gives up every call after five seconds. So a call that moves topics is
answered after ``ANSWER_S`` at the latest, as far as it has come by then, and the work continues.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

from sava.api.brokers_admin import (
    CONFIRM_S,
    Brokers,
    Seen,
    drain_mode,
)
from sava.api.danube.codes import required, told
from sava.cluster.controller import Controller
from sava.cluster.drains import DrainStatus
from sava.cluster.rebalancing import PlannedMove, Rebalanced
from sava.cluster.records import BrokerMode, Registration
from sava.metadata.errors import Unavailable, Unfinished
from sava.peers.deadlines import remaining
from sava.proto import danube_admin_pb2 as pb
from sava.proto import danube_admin_pb2_grpc as rpc
from sava.topics.errors import MessageInvalid
from sava.topics.registry import Namespaces

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

    @told
    async def GetLeaderBroker(self, request: pb.Empty, context: Any) -> pb.BrokerResponse:
        if not self._brokers.leader:
            raise Unavailable("the cluster has no leader at the moment")
        return pb.BrokerResponse(leader=str(self._brokers.leader))

    @told
    async def ListNamespaces(self, request: pb.Empty, context: Any) -> pb.NamespaceListResponse:
        return pb.NamespaceListResponse(namespaces=await self._namespaces.list())

    @told
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

    @told
    async def ActivateBroker(
        self, request: pb.ActivateBrokerRequest, context: Any
    ) -> pb.ActivateBrokerResponse:
        await self._controller.activate(broker_id(request.broker_id), request.reason)
        return pb.ActivateBrokerResponse(success=True)

    @told
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

    @told
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


def _info(seen: Seen, leader: int) -> pb.BrokerInfo:
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
