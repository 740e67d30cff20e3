"""The service ``Brokers`` of the admin port: who is there, what they have, and how topics are spread over
them.

Any broker can list them: everything that is said of a broker is in its own view. But a view says what was so
when it was last fed: without a majority it shows brokers as active that have long been killed. So the view is
read behind a linearizable read, and a state that no majority has confirmed in time is ``unknown``. What
decides who serves what is the leader's (NotController, and the call is passed on to it).
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from collections.abc import AsyncIterator
from math import inf
from typing import Any, Final, NamedTuple

from sava.cluster import rebalancing
from sava.cluster.controller import Controller
from sava.cluster.drains import DrainStatus
from sava.cluster.loads import LoadReport, TopicLoad
from sava.cluster.records import BrokerMode, Mode, Registration
from sava.cluster.view import ClusterView
from sava.errors import SavaError
from sava.metadata.node import RaftNode
from sava.peers import faults
from sava.peers.deadlines import remaining
from sava.proto import brokers_pb2 as pb
from sava.proto import brokers_pb2_grpc as rpc
from sava.raft.types import NO_NODE
from sava.topics.errors import MessageInvalid
from sava.topics.names import TopicName, check_name
from sava.topics.topics import ServedTopics

PREPARE: Final = "/sava.admin.Brokers/PrepareMove"
UNREACHABLE: Final = "unreachable"
"""A member of the cluster that is not registered."""
GONE: Final = "gone"
"""No member any more (removed, or given up with a lost majority), and still the owner of topics."""
UNKNOWN: Final = "unknown"
"""No majority has confirmed what this broker knows."""
CONFIRM_S: Final = 1.5
"""For a majority to confirm a list. A leader answers in milliseconds; an election takes about a second."""
LEAVING: Final = "leaving"
PARALLEL: Final = 8
MAX_PARALLEL: Final = 64
TIMEOUT_S: Final = 300
MAX_PREPARE_S: Final = 600.0
"""For one topic before a move, whatever the caller asks for."""


class Seen(NamedTuple):
    """A broker as this one sees it."""

    broker: int
    registration: Registration | None
    """None: it is a member of the cluster, or owns topics, and is not there."""
    mode: BrokerMode
    raft_address: str
    topics: int
    is_leader: bool
    is_member: bool
    is_confirmed: bool

    @property
    def status(self) -> str:
        if not self.is_confirmed:
            return UNKNOWN
        if not self.is_member:
            return GONE
        if self.registration is None:
            return UNREACHABLE
        return LEAVING if self.registration.is_leaving else self.mode.mode.value


async def unconfirmed(node: RaftNode, timeout: float) -> str:
    """Why no majority confirms that this node is up to date; empty: one does."""
    try:
        await node.barrier.wait(min(timeout, CONFIRM_S))
    except SavaError as error:
        return str(error)
    return ""


class Brokers:
    """Who there is: the members of the cluster, and owners of topics that are none any more."""

    def __init__(self, node: RaftNode, view: ClusterView) -> None:
        self._node = node
        self._view = view

    @property
    def leader(self) -> int:
        """0: not known."""
        core = self._node.core_status
        return core.leader if core is not None else NO_NODE

    async def listed(self, *, timeout: float, local: bool = False) -> tuple[list[Seen], str]:
        """All brokers, and why no majority has confirmed that; with ``local`` none is asked."""
        core = self._node.core_status
        if local or core is None:
            return self._seen(is_confirmed=local), ""
        reason = await unconfirmed(self._node, timeout)
        return self._seen(is_confirmed=not reason), reason

    def _seen(self, *, is_confirmed: bool) -> list[Seen]:
        counts, leader = self._view.counts(), self.leader if is_confirmed else NO_NODE
        core = self._node.core_status
        addresses: dict[int, str] = dict(core.membership.addresses) if core is not None else {}
        return [
            Seen(
                broker=broker,
                registration=(registration := self._view.brokers.get(broker)),
                mode=self._view.mode(broker),
                raft_address=registration.raft if registration is not None else addresses.get(broker, ""),
                topics=counts.get(broker, 0),
                is_leader=broker == leader,
                is_member=broker in addresses,
                is_confirmed=is_confirmed,
            )
            # A registration outlives its broker by seconds, and a given-up broker's by a snapshot: whoever is
            # no member and has no topics is of no interest, and would stand beside its successor.
            for broker in sorted(addresses.keys() | {each for each in counts if counts[each]})
        ]


class BrokersService(rpc.BrokersServicer):
    def __init__(self, brokers: Brokers, controller: Controller, topics: ServedTopics) -> None:
        self._brokers = brokers
        self._controller = controller
        self._topics = topics

    async def ListBrokers(self, request: pb.ListBrokersRequest, context: Any) -> pb.ListBrokersResponse:
        timeout = remaining(context, CONFIRM_S)
        found, reason = await self._brokers.listed(timeout=timeout, local=request.local)
        return pb.ListBrokersResponse(brokers=map(_broker, found), unconfirmed=reason)

    async def DrainBroker(
        self, request: pb.DrainBrokerRequest, context: Any
    ) -> AsyncIterator[pb.DrainProgress]:
        async with faults.told(context):
            mode = drain_mode(
                parallel=request.parallel,
                timeout_s=request.timeout_seconds,
                include=tuple(request.namespaces_include),
                exclude=tuple(request.namespaces_exclude),
            )
            if request.dry_run:
                yield _progress(self._controller.plan_drain(request.broker_id, mode))
                return
            async for status in self._controller.drain(request.broker_id, mode):
                yield _progress(status)

    async def ActivateBroker(
        self, request: pb.ActivateBrokerRequest, context: Any
    ) -> pb.ActivateBrokerResponse:
        async with faults.told(context):
            was_active = await self._controller.activate(request.broker_id, request.reason)
        return pb.ActivateBrokerResponse(was_active=was_active)

    async def GetBalance(self, request: pb.GetBalanceRequest, context: Any) -> pb.Balance:
        async with faults.told(context):
            return _balance(self._controller.balance())

    async def Rebalance(self, request: pb.RebalanceRequest, context: Any) -> pb.RebalanceResponse:
        async with faults.told(context):
            done = await self._controller.rebalance(dry_run=request.dry_run, max_moves=request.max_moves)
        return pb.RebalanceResponse(
            moves=[
                pb.PlannedMove(
                    topic=str(move.topic),
                    from_broker_id=move.from_broker,
                    to_broker_id=move.to_broker,
                    load=move.load,
                    error=move.error,
                )
                for move in done.moves
            ],
            before=_balance(done.before),
            after=_balance(done.after),
        )

    async def ReportLoad(self, request: pb.LoadReport, context: Any) -> pb.ReportLoadResponse:
        """Taken by whoever is asked: a broker that does not lead any more does nothing with it, and the next
        report goes to the one that does."""
        async with faults.told(context):
            self._controller.loads.record(load_report(request))
        return pb.ReportLoadResponse()

    async def PrepareMove(self, request: pb.PrepareMoveRequest, context: Any) -> pb.PrepareMoveResponse:
        async with faults.told(context):
            timeout = min(request.timeout_ms / 1000, MAX_PREPARE_S)
            await self._topics.prepare_move(TopicName.parse(request.topic), timeout=timeout)
        return pb.PrepareMoveResponse()


def drain_mode(
    *, parallel: int, timeout_s: int, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()
) -> BrokerMode:
    """Raises InvalidName. 0: as by default."""
    for namespace in (*include, *exclude):
        check_name(namespace, "namespace")
    return BrokerMode(
        mode=Mode.DRAINING,
        reason="drain",
        parallel=min(parallel or PARALLEL, MAX_PARALLEL),
        timeout_ms=(timeout_s or TIMEOUT_S) * 1000,
        include=include,
        exclude=exclude,
    )


def load_report(message: pb.LoadReport) -> LoadReport:
    """Raises MessageInvalid: one load that is no number would make sums of all of them that are none."""
    loads = [message.cpu_percent, message.memory_percent]
    for each in message.topics:
        loads += (each.messages_per_second, each.megabytes_per_second)
    if not message.broker_id or not all(0 <= load < inf for load in loads):
        raise MessageInvalid(
            f"the load of broker {message.broker_id} is not told in numbers from 0 on, or is nobody's"
        )
    return LoadReport(
        broker_id=message.broker_id,
        cpu_percent=message.cpu_percent,
        memory_percent=message.memory_percent,
        topics=tuple(
            TopicLoad(
                topic=each.topic,
                messages_per_second=each.messages_per_second,
                megabytes_per_second=each.megabytes_per_second,
                producers=each.producers,
                consumers=each.consumers,
                backlog=each.backlog,
            )
            for each in message.topics
        ),
    )


def _broker(seen: Seen) -> pb.Broker:
    described = pb.Broker(
        broker_id=seen.broker,
        status=seen.status,
        is_leader=seen.is_leader,
        raft_addr=seen.raft_address,
        topics=seen.topics,
        mode_reason=seen.mode.reason,
    )
    registration = seen.registration
    if registration is not None:
        described.client_addr = registration.client
        described.admin_addr = registration.admin
        described.http_addr = registration.http
        described.incarnation = registration.incarnation
        described.version = registration.version
        described.started_ms = registration.started_ms
    return described


def _progress(status: DrainStatus) -> pb.DrainProgress:
    return pb.DrainProgress(
        total=status.total,
        succeeded=status.succeeded,
        failed=status.failed,
        pending=status.pending,
        failed_topics=map(str, status.failed_topics),
        topics=map(str, status.topics),
        status=status.mode.value,
        done=status.is_done,
        waiting=status.waiting,
    )


def _balance(balance: rebalancing.Balance) -> pb.Balance:
    return pb.Balance(
        strategy=balance.strategy,
        coefficient_of_variation=balance.coefficient_of_variation,
        threshold=balance.threshold,
        mean_load=balance.mean_load,
        max_load=balance.max_load,
        min_load=balance.min_load,
        std_deviation=balance.std_deviation,
        brokers=[
            pb.BrokerLoad(
                broker_id=each.broker,
                load=each.load,
                topics=each.topics,
                overloaded=each.is_overloaded,
                underloaded=each.is_underloaded,
                cpu_percent=each.cpu_percent,
                memory_percent=each.memory_percent,
                megabytes_per_second=each.megabytes_per_second,
            )
            for each in balance.brokers
        ],
        rebalancing_enabled=balance.is_enabled,
        moves_last_hour=balance.moves_last_hour,
    )
