"""The service ``Brokers`` of the admin port: which brokers there are, what they have, and how topics are
spread over them; and the load reports of this broker.

Any broker can list them: everything that is said of a broker is in its own view. But a view says what was so
when it was last fed: without a majority it shows brokers as active that have long been killed. So the view is
read behind a linearizable read, and a state that no majority has confirmed in time is ``unknown``. What
decides who serves what is the leader's (NotController, and the call is passed on to it).

A load report is worth something for a while and nothing after that, so one that could not be delivered is not
repeated: the next one follows. A new leader knows nothing, and gets a report as soon as it is known.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple

from sava.api.history import LastHour, Sample, as_message, of_message, together
from sava.api.messages import from_message, to_message
from sava.cluster import rebalancer
from sava.cluster.controller import Controller
from sava.cluster.drains import DrainStatus
from sava.cluster.loads import LoadReport, Loads, TopicLoad
from sava.cluster.records import BrokerMode, Mode, Registration
from sava.cluster.view import ClusterView
from sava.errors import SavaError
from sava.metadata.node import RaftNode
from sava.peers.error_mapping import remaining
from sava.peers.forwarding import Forwarder
from sava.proto import brokers_pb2 as pb
from sava.proto import brokers_pb2_grpc as rpc
from sava.raft.types import NO_NODE
from sava.storage.keys import is_replication_slot
from sava.supervisor import Supervisor
from sava.tasks import cancelled
from sava.topics.errors import MessageInvalid
from sava.topics.names import TopicName, check_name
from sava.topics.served import ServedTopics
from sava.topics.subscription import Subscription
from sava.topics.topic import Topic

# ruff: noqa: N802 (gRPC names the methods)


PREPARE: Final = "/sava.admin.Brokers/PrepareMove"
HISTORY: Final = "/sava.admin.Brokers/GetHistory"
HISTORY_S: Final = 3.0
"""For the other brokers to answer."""
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
DRAIN_TIMEOUT_S: Final = 300
MAX_PREPARE_S: Final = 600.0
"""For one topic before a move, whatever the caller asks for."""


class ListedBroker(NamedTuple):
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


def _added(parts: Iterable[list[Sample]]) -> pb.History:
    return as_message(together(parts))


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

    async def listed(self, *, timeout: float, local: bool = False) -> tuple[list[ListedBroker], str]:
        """All brokers, and why no majority has confirmed that; with ``local`` none is asked."""
        core = self._node.core_status
        if local or core is None:
            return self._seen(is_confirmed=local), ""
        reason = await unconfirmed(self._node, timeout)
        return self._seen(is_confirmed=not reason), reason

    def _seen(self, *, is_confirmed: bool) -> list[ListedBroker]:
        counts, leader = self._view.counts(), self.leader if is_confirmed else NO_NODE
        core = self._node.core_status
        addresses: dict[int, str] = dict(core.membership.addresses) if core is not None else {}
        return [
            ListedBroker(
                broker=broker,
                registration=(registration := self._view.brokers.get(broker)),
                mode=self._view.mode(broker),
                raft_address=registration.raft if registration is not None else addresses.get(broker, ""),
                topics=counts.get(broker, 0),
                is_leader=broker == leader,
                is_member=broker in addresses,
                is_confirmed=is_confirmed,
            )
            # A registration outlives its broker by seconds, and a given-up broker's by a snapshot: a broker
            # that is no member and has no topics is left out: it would stand beside its successor.
            for broker in sorted(addresses.keys() | {each for each in counts if counts[each]})
        ]


class BrokersService(rpc.BrokersServicer):
    def __init__(
        self,
        brokers: Brokers,
        controller: Controller,
        topics: ServedTopics,
        history: LastHour,
        forwarder: Forwarder,
    ) -> None:
        self._brokers = brokers
        self._history = history
        self._forwarder = forwarder
        self._controller = controller
        self._topics = topics

    async def ListBrokers(self, request: pb.ListBrokersRequest, context: Any) -> pb.ListBrokersResponse:
        timeout = remaining(context, CONFIRM_S)
        found, reason = await self._brokers.listed(timeout=timeout, local=request.local)
        return pb.ListBrokersResponse(brokers=map(_broker, found), unconfirmed=reason)

    async def DrainBroker(
        self, request: pb.DrainBrokerRequest, context: Any
    ) -> AsyncIterator[pb.DrainProgress]:
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
        was_active = await self._controller.activate(request.broker_id, request.reason)
        return pb.ActivateBrokerResponse(was_active=was_active)

    async def GetBalance(self, request: pb.GetBalanceRequest, context: Any) -> pb.Balance:
        return _balance(self._controller.balance())

    async def GetHistory(self, request: pb.GetHistoryRequest, context: Any) -> pb.History:
        timeout = remaining(context, HISTORY_S)
        if not request.topic:
            return await self._history_of_brokers(request.broker_id, timeout)
        name = TopicName.parse(request.topic)
        partitions = await self._topics.registry.partitions(name)
        if partitions == [name]:
            await self._topics.get(name)  # raises NotOwner: its owner has the history
            return as_message(self._history.of_topic(name))
        # A partition that is not heard of fails the call: a sum without it would look like less traffic.
        return _added(
            await asyncio.gather(*(self._history_of_partition(each, timeout) for each in partitions))
        )

    async def _history_of_partition(self, name: TopicName, timeout: float) -> list[Sample]:
        if name in self._topics.loaded:
            return self._history.of_topic(name)
        request = pb.GetHistoryRequest(topic=str(name))
        return of_message(
            await self._forwarder.ask("admin", HISTORY, request, pb.History, topic=name, timeout=timeout)
        )

    async def _history_of_brokers(self, broker: int, timeout: float) -> pb.History:
        """Of one, or of all that are registered; one that does not answer is named."""
        listed, _ = await self._brokers.listed(timeout=timeout, local=True)
        there = [each.broker for each in listed if each.registration is not None]
        wanted = [broker] if broker else there
        parts = await asyncio.gather(
            *(self._history_of_broker(each, timeout) for each in wanted), return_exceptions=True
        )
        added = _added(each for each in parts if isinstance(each, list))
        silent = [each for each, part in zip(wanted, parts, strict=True) if not isinstance(part, list)]
        added.silent_broker_ids.extend(silent)
        return added

    async def _history_of_broker(self, broker: int, timeout: float) -> list[Sample]:
        if broker == self._topics.broker:
            return self._history.of_broker()
        request = pb.GetHistoryRequest(broker_id=broker)
        return of_message(
            await self._forwarder.ask("admin", HISTORY, request, pb.History, broker=broker, timeout=timeout)
        )

    async def Rebalance(self, request: pb.RebalanceRequest, context: Any) -> pb.RebalanceResponse:
        done = await self._controller.rebalance(dry_run=request.dry_run, max_moves=request.max_moves)
        return pb.RebalanceResponse(
            moves=[
                to_message(
                    pb.PlannedMove,
                    move,
                    topic=str(move.topic),
                    from_broker_id=move.from_broker,
                    to_broker_id=move.to_broker,
                )
                for move in done.moves
            ],
            before=_balance(done.before),
            after=_balance(done.after),
        )

    async def ReportLoad(self, request: pb.LoadReport, context: Any) -> pb.ReportLoadResponse:
        """Any broker takes it: one that does not lead any more does nothing with it, and the next
        report goes to the leader."""
        self._controller.loads.record(load_report(request))
        return pb.ReportLoadResponse()

    async def PrepareMove(self, request: pb.PrepareMoveRequest, context: Any) -> pb.PrepareMoveResponse:
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
        timeout_ms=(timeout_s or DRAIN_TIMEOUT_S) * 1000,
        include=include,
        exclude=exclude,
    )


def load_report(message: pb.LoadReport) -> LoadReport:
    """Raises MessageInvalid: one load that is no number would make sums of all of them that are none."""
    loads = [message.cpu_percent, message.memory_percent]
    for each in message.topics:
        loads += (each.messages_per_second, each.megabytes_per_second)
    if not message.broker_id or not all(0 <= load < inf for load in loads):
        raise MessageInvalid(f"invalid load report from broker {message.broker_id}")
    return from_message(
        LoadReport, message, topics=tuple(from_message(TopicLoad, each) for each in message.topics)
    )


def _broker(seen: ListedBroker) -> pb.Broker:
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
    return to_message(
        pb.DrainProgress,
        status,
        topics=map(str, status.topics),
        failed_topics=map(str, status.failed_topics),
        status=status.mode.value,
        done=status.is_done,
    )


def _balance(balance: rebalancer.Balance) -> pb.Balance:
    return to_message(
        pb.Balance,
        balance,
        rebalancing_enabled=balance.is_enabled,
        brokers=[
            to_message(
                pb.BrokerLoad,
                each,
                broker_id=each.broker,
                overloaded=each.is_overloaded,
                underloaded=each.is_underloaded,
            )
            for each in balance.brokers
        ],
    )


# -- load reports ----------------------------------------------------------------------------------


log = logging.getLogger(__name__)

REPORT: Final = "/sava.admin.Brokers/ReportLoad"
REPORT_TIMEOUT_S: Final = 5.0
LOOK_S: Final = 1.0
"""Between two looks at which broker leads."""
STATM: Final = Path("/proc/self/statm")


class LoadReporter:
    """Owned by the event loop."""

    def __init__(
        self,
        topics: ServedTopics,
        loads: Loads,
        forwarder: Forwarder,
        leader: Callable[[], int],
        *,
        interval_s: float,
    ) -> None:
        self._loads = loads
        self._forwarder = forwarder
        self._leader = leader
        self._broker = topics.broker
        self._interval_s = interval_s
        self._measure = LoadMeter(topics)
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None

    def start(self, supervisor: Supervisor) -> None:
        self._task = supervisor.repeated(self._run, name="load reports")

    async def close(self) -> None:
        await cancelled(self._task)

    async def _run(self) -> None:
        reported_to, reported_at = 0, float("-inf")
        while True:
            leader, now = self._leader(), time.monotonic()
            if leader and (leader != reported_to or now - reported_at >= self._interval_s):
                if await self._report(leader):
                    reported_to = leader
                reported_at = now
            await asyncio.sleep(min(LOOK_S, self._interval_s))

    async def _report(self, leader: int) -> bool:
        report = self._measure.report()
        if leader == self._broker:
            self._loads.record(load_report(report))
            return True
        try:
            await self._forwarder.ask(
                "admin", REPORT, report, pb.ReportLoadResponse, broker=leader, timeout=REPORT_TIMEOUT_S
            )
        except (SavaError, TimeoutError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.info("load: not reported leader=%d error=%s: %s", leader, type(error).__name__, error)
            return False
        self._trouble = ""
        return True


class _Counted(NamedTuple):
    topic_id: int
    """A topic that was deleted and created again has the name and the first epoch of the former one."""
    epoch: int
    messages: int
    bytes: int


class LoadMeter:
    """What this broker does, since it was last asked."""

    def __init__(self, topics: ServedTopics) -> None:
        self._topics = topics
        self._at = time.monotonic()
        self._cpu_s = time.process_time()
        self._counted: dict[TopicName, _Counted] = {}
        self._trouble = ""

    def report(self) -> pb.LoadReport:
        at, cpu_s = time.monotonic(), time.process_time()
        elapsed = max(at - self._at, 1e-3)
        cores = len(os.sched_getaffinity(0))
        report = pb.LoadReport(
            broker_id=self._topics.broker,
            cpu_percent=min(100 * (cpu_s - self._cpu_s) / elapsed / cores, 100.0),
            memory_percent=_memory_percent(),
        )
        counted: dict[TopicName, _Counted] = {}
        for name, topic in self._topics.loaded.items():
            try:
                now = _Counted(topic.topic_id, topic.epoch, *topic.published)
                report.topics.append(_topic_load(name, topic, self._before(name, now), now, elapsed))
            except Exception as error:  # noqa: BLE001
                # One topic with a bad value would keep the load of all the others from the leader.
                self._leave_out(name, error)
            else:
                counted[name] = now
        self._at, self._cpu_s, self._counted = at, cpu_s, counted
        return report

    def _before(self, name: TopicName, now: _Counted) -> _Counted:
        before = self._counted.get(name)
        if before is not None and (before.topic_id, before.epoch) == (now.topic_id, now.epoch):
            return before
        return _Counted(now.topic_id, now.epoch, 0, 0)  # taken up since: what it counts is since then too

    def _leave_out(self, name: TopicName, error: Exception) -> None:
        if str(error) != self._trouble:
            self._trouble = str(error)
            log.error("load: not measured topic=%s", name, exc_info=error)


def _topic_load(
    name: TopicName, topic: Topic, before: _Counted, now: _Counted, elapsed: float
) -> pb.TopicLoad:
    subscriptions = topic.subscriptions.values()
    return pb.TopicLoad(
        topic=str(name),
        messages_per_second=max(now.messages - before.messages, 0) / elapsed,
        megabytes_per_second=max(now.bytes - before.bytes, 0) / elapsed / 1e6,
        producers=sum(1 for _ in topic.producers),
        consumers=sum(len(each.consumers) for each in subscriptions),
        # The backlog of a link waits for no consumer.
        backlog=sum(
            each.backlog
            for each in subscriptions
            if isinstance(each, Subscription) and not is_replication_slot(each.name)
        ),
    )


def _memory_percent() -> float:
    """Of the machine's, by this process; 0 where the system does not say."""
    try:
        resident = int(STATM.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return 100 * resident / os.sysconf("SC_PHYS_PAGES")
