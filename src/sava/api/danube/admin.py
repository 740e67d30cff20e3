"""Danube's admin port: ``BrokerAdmin`` and ``ClusterAdmin``, the brokers and the Raft cluster as Danube's
tools ask for them; ``NamespaceAdmin`` and ``TopicAdmin``, namespaces, topics and subscriptions, whichever
brokers have them. Sava's own services know more, and stream the progress of a drain.

``danube-admin`` sends no deadline, and gives up every call after five seconds. So a call that moves topics is
answered after ``ANSWER_S`` at the latest, as far as it has come by then, and the work continues.

Settings take effect when the call returns. Failure policy and dispatch configuration can be set before their
subscription exists, as Danube's tools do right after they have created a topic: the settings wait in the
metadata store and are applied when the first consumer creates the subscription.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from sava.api.admin.brokers import (
    CONFIRM_S,
    Brokers,
    ListedBroker,
    drain_mode,
)
from sava.api.admin.cluster import check_leaving
from sava.api.admin.descriptions import (
    MAX_MS,
    Partitions,
    common_owner,
    delivery,
    subscription_names,
)
from sava.api.admin.topics import Unloading
from sava.api.danube.wire import required, topic_name
from sava.api.messages import from_message, to_message
from sava.cluster.controller import Controller
from sava.cluster.drains import DrainStatus
from sava.cluster.rebalancer import PlannedMove, Rebalanced
from sava.cluster.records import BrokerMode, Registration
from sava.cluster.view import ClusterView
from sava.errors import HostError
from sava.metadata.errors import InvalidRequest, Unavailable, Unfinished
from sava.metadata.node import RaftNode
from sava.metadata.store import OPERATION_TIMEOUT_S, ClusterOperations
from sava.peers.error_mapping import remaining
from sava.peers.guard import may_see, may_see_namespace
from sava.proto import danube_admin_pb2 as pb
from sava.proto import danube_admin_pb2_grpc as rpc
from sava.proto.topics_admin_pb2 import TopicDescription
from sava.raft.types import NodeId
from sava.schemas.registry import SchemaRegistry
from sava.topics.errors import MessageInvalid
from sava.topics.names import TopicName
from sava.topics.registry import Namespaces
from sava.topics.rules import TopicSchemas
from sava.topics.served import ServedTopics
from sava.topics.specs import (
    DeadLetterPolicy,
    FailurePolicy,
    RedeliveryBackoff,
    TopicSpec,
)
from sava.topics.subscription import Subscription
from sava.topics.topic import Topic

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
        return pb.NamespaceListResponse(namespaces=filter(may_see_namespace, await self._namespaces.list()))

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
        brokers = [
            to_message(pb.BrokerLoadInfo, each, broker_id=each.broker, topic_count=each.topics)
            for each in balance.brokers
        ]
        return to_message(
            pb.ClusterBalanceResponse,
            balance,
            broker_count=len(brokers),
            brokers=brokers,
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
    failed = map(str, status.failed_topics)
    return to_message(pb.UnloadBrokerResponse, status, started=started, failed_topics=failed)


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


# -- namespaces -------------------------------------------------------------------------------------


NO_TOPIC: Final = "."
"""A name that no topic can have, hence one that has no policy of its own."""


class NamespaceAdmin(rpc.NamespaceAdminServicer):
    def __init__(self, topics: ServedTopics) -> None:
        self._namespaces = topics.namespaces
        self._registry = topics.registry
        self._limits = topics.limits

    async def GetNamespaceTopics(self, request: pb.NamespaceRequest, context: Any) -> pb.TopicListResponse:
        """As Danube counts them: the partitions, not the topic that they are of."""
        await self._namespaces.policy(required(request.name, "name"))
        topics = await self._registry.list(request.name)
        return pb.TopicListResponse(
            topics=[str(name) for name, spec in topics.items() if not spec.partitions and may_see(name)]
        )

    async def GetNamespacePolicies(self, request: pb.NamespaceRequest, context: Any) -> pb.PolicyResponse:
        """What holds for topics that have no policy of their own; 0: no limit."""
        await self._namespaces.policy(required(request.name, "name"))
        effective = self._limits.of(TopicName(request.name, NO_TOPIC))
        return pb.PolicyResponse(policies=msgspec.json.encode(effective._asdict()).decode())

    async def CreateNamespace(self, request: pb.NamespaceRequest, context: Any) -> pb.NamespaceResponse:
        await self._namespaces.create(required(request.name, "name"))
        return pb.NamespaceResponse(success=True)

    async def DeleteNamespace(self, request: pb.NamespaceRequest, context: Any) -> pb.NamespaceResponse:
        await self._namespaces.delete(required(request.name, "name"))
        return pb.NamespaceResponse(success=True)


# -- topics ----------------------------------------------------------------------------------------


SERVICE: Final = "/danube_admin.TopicAdmin/"

_BACKOFF: Final = {pb.Fixed: RedeliveryBackoff.FIXED, pb.Exponential: RedeliveryBackoff.EXPONENTIAL}
_DEAD_LETTER: Final = {
    pb.DeadLetter: DeadLetterPolicy.DEAD_LETTER,
    pb.Block: DeadLetterPolicy.BLOCK,
    pb.Drop: DeadLetterPolicy.DROP,
}
_BACKOFF_NUMBERS: Final = {backoff: number for number, backoff in _BACKOFF.items()}
_DEAD_LETTER_NUMBERS: Final = {policy: number for number, policy in _DEAD_LETTER.items()}


class UnloadFailed(HostError):
    """The topic could not be handed over; its owner keeps it. Says why."""


class TopicAdmin(rpc.TopicAdminServicer):
    def __init__(
        self, parts: Partitions, unloading: Unloading, schemas: SchemaRegistry, topic_schemas: TopicSchemas
    ) -> None:
        self._parts = parts
        self._unloading = unloading
        self._topics = parts.topics
        self._view = parts.view
        self._schemas = schemas
        self._topic_schemas = topic_schemas

    # -- topics --------------------------------------------------------------------------------
    async def ListNamespaceTopics(
        self, request: pb.NamespaceRequest, context: Any
    ) -> pb.TopicInfoListResponse:
        """As Danube counts them: the partitions, not the topic that they are of."""
        await self._topics.namespaces.policy(required(request.name, "name"))
        topics = await self._topics.registry.list(request.name)
        return _listed(
            (name, spec, self._view.held(name).record.owner)
            for name, spec in topics.items()
            if not spec.partitions
        )

    async def ListBrokerTopics(self, request: pb.BrokerRequest, context: Any) -> pb.TopicInfoListResponse:
        broker = broker_id(request.broker_id)
        return _listed((entry.name, entry.spec, broker) for entry in self._view.owned_by(broker))

    async def CreateTopic(self, request: pb.NewTopicRequest, context: Any) -> pb.TopicResponse:
        subject = request.schema_subject if request.HasField("schema_subject") else ""
        await self._create(request.name, 0, request.dispatch_strategy, subject)
        return pb.TopicResponse(success=True)

    async def CreatePartitionedTopic(
        self, request: pb.PartitionedTopicRequest, context: Any
    ) -> pb.TopicResponse:
        if not request.partitions:
            raise MessageInvalid("partitions is missing: a partitioned topic has at least one")
        subject = request.schema_subject if request.HasField("schema_subject") else ""
        await self._create(request.base_name, request.partitions, request.dispatch_strategy, subject)
        return pb.TopicResponse(success=True)

    async def _create(self, text: str, partitions: int, strategy: int, subject: str) -> None:
        if strategy not in (pb.NonReliable, pb.Reliable):
            raise MessageInvalid(f"dispatch_strategy {strategy} is not one of NonReliable (0), Reliable (1)")
        await self._topics.create(
            topic_name(text),
            reliable=strategy == pb.Reliable,
            partitions=partitions,
            schema_subject=subject,
        )

    async def DeleteTopic(self, request: pb.TopicRequest, context: Any) -> pb.TopicResponse:
        await self._topics.delete(topic_name(request.name))
        return pb.TopicResponse(success=True)

    async def UnloadTopic(self, request: pb.TopicRequest, context: Any) -> pb.TopicResponse:
        """To whichever broker suits best; of a partitioned topic all partitions. Answers when the new owner
        does."""
        async for move in self._unloading.unload(topic_name(request.name)):
            if move.error:
                raise UnloadFailed(f"topic {move.topic} was not moved: {move.error}")
        return pb.TopicResponse(success=True)

    async def DescribeTopic(self, request: pb.DescribeTopicRequest, context: Any) -> pb.DescribeTopicResponse:
        name = topic_name(request.name)
        spec = await self._topics.registry.need(name)
        parts = await self._parts.describe(await self._parts.names(name))
        response = pb.DescribeTopicResponse(
            name=str(name),
            broker_id=_owner_text(common_owner(part.broker_id for part in parts)),
            delivery=delivery(spec),
            subscriptions=_subscriptions_in(parts),
        )
        await self._describe_schema(name, response)
        return response

    async def _describe_schema(self, name: TopicName, response: pb.DescribeTopicResponse) -> None:
        schema = await self._topic_schemas.get(name)
        if schema is not None:
            subject = await self._schemas.subject(schema.subject)
            response.schema_subject = subject.subject
            response.schema_id = subject.schema_id
            response.schema_version = subject.latest
            response.schema_type = subject.type
            response.compatibility_mode = subject.mode.upper()

    # -- subscriptions -------------------------------------------------------------------------
    async def ListSubscriptions(self, request: pb.TopicRequest, context: Any) -> pb.SubscriptionListResponse:
        parts = await self._parts.describe(await self._parts.names(topic_name(request.name)))
        return pb.SubscriptionListResponse(subscriptions=_subscriptions_in(parts))

    async def Unsubscribe(self, request: pb.SubscriptionRequest, context: Any) -> pb.SubscriptionResponse:
        await self._parts.on_subscription(
            f"{SERVICE}Unsubscribe", request, pb.SubscriptionResponse, _unsubscribe
        )
        return pb.SubscriptionResponse(success=True)

    async def SetSubscriptionFailurePolicy(
        self, request: pb.SetSubscriptionFailurePolicyRequest, context: Any
    ) -> pb.SubscriptionResponse:
        if not request.HasField("failure_policy"):
            raise MessageInvalid("failure_policy is missing")
        policy_from(request.failure_policy)
        await self._parts.on_all(
            f"{SERVICE}SetSubscriptionFailurePolicy", request, pb.SubscriptionResponse, _set_failure_policy
        )
        return pb.SubscriptionResponse(success=True)

    async def GetSubscriptionFailurePolicy(
        self, request: pb.GetSubscriptionFailurePolicyRequest, context: Any
    ) -> pb.GetSubscriptionFailurePolicyResponse:
        """Of a partitioned topic, that of one partition: settings are made for all of them, also before the
        subscription exists."""
        found = await self._parts.on_subscription(
            f"{SERVICE}GetSubscriptionFailurePolicy",
            request,
            pb.GetSubscriptionFailurePolicyResponse,
            _get_failure_policy,
            or_all=True,
        )
        return found[0]

    async def SetSubscriptionDispatchConfig(
        self, request: pb.SetSubscriptionDispatchConfigRequest, context: Any
    ) -> pb.SubscriptionResponse:
        if not request.HasField("dispatch_config"):
            raise MessageInvalid("dispatch_config is missing")
        await self._parts.on_all(
            f"{SERVICE}SetSubscriptionDispatchConfig", request, pb.SubscriptionResponse, _set_dispatch_config
        )
        return pb.SubscriptionResponse(success=True)

    async def GetSubscriptionDispatchConfig(
        self, request: pb.GetSubscriptionDispatchConfigRequest, context: Any
    ) -> pb.GetSubscriptionDispatchConfigResponse:
        found = await self._parts.on_subscription(
            f"{SERVICE}GetSubscriptionDispatchConfig",
            request,
            pb.GetSubscriptionDispatchConfigResponse,
            _get_dispatch_config,
            or_all=True,
        )
        return found[0]


# -- what is done to one topic, where it is served -------------------------------------------------


async def _unsubscribe(topic: Topic, request: pb.SubscriptionRequest) -> pb.SubscriptionResponse:
    await topic.unsubscribe(request.subscription)
    return pb.SubscriptionResponse(success=True)


async def _set_failure_policy(
    topic: Topic, request: pb.SetSubscriptionFailurePolicyRequest
) -> pb.SubscriptionResponse:
    policy = policy_from(request.failure_policy)
    await topic.reliable.set_failure_policy(request.subscription, policy, ahead=True)
    return pb.SubscriptionResponse(success=True)


async def _get_failure_policy(
    topic: Topic, request: pb.GetSubscriptionFailurePolicyRequest
) -> pb.GetSubscriptionFailurePolicyResponse:
    response = pb.GetSubscriptionFailurePolicyResponse()
    subscription = topic.subscriptions.get(request.subscription)
    if subscription is None:
        policy = (await topic.settings_ahead(request.subscription)).failure_policy
    else:
        response.subscription_type = subscription.type
        policy = subscription.spec.failure_policy if isinstance(subscription, Subscription) else None
    if policy is not None:
        response.failure_policy.CopyFrom(policy_to(policy))
    return response


async def _set_dispatch_config(
    topic: Topic, request: pb.SetSubscriptionDispatchConfigRequest
) -> pb.SubscriptionResponse:
    count = request.dispatch_config.max_unacked_messages
    await topic.reliable.set_max_unacked(request.subscription, count, ahead=True)
    return pb.SubscriptionResponse(success=True)


async def _get_dispatch_config(
    topic: Topic, request: pb.GetSubscriptionDispatchConfigRequest
) -> pb.GetSubscriptionDispatchConfigResponse:
    response = pb.GetSubscriptionDispatchConfigResponse()
    subscription = topic.subscriptions.get(request.subscription)
    if subscription is None:
        count = (await topic.settings_ahead(request.subscription)).max_unacked_messages
    else:
        count = subscription.spec.max_unacked_messages if isinstance(subscription, Subscription) else None
    if count is not None:
        response.dispatch_config.max_unacked_messages = count
    return response


def _subscriptions_in(parts: Iterable[TopicDescription]) -> list[str]:
    """Those that any of them has."""
    return sorted({each for part in parts for each in subscription_names(part)})


def _listed(topics: Iterable[tuple[TopicName, TopicSpec, int]]) -> pb.TopicInfoListResponse:
    return pb.TopicInfoListResponse(
        topics=[
            pb.TopicInfo(name=str(name), broker_id=_owner_text(owner), delivery=delivery(spec))
            for name, spec, owner in sorted(topics, key=lambda item: item[0])
            if may_see(name)
        ]
    )


def _owner_text(broker: int) -> str:
    return str(broker) if broker else ""


def policy_from(message: pb.SubscriptionFailurePolicy) -> FailurePolicy:
    """Raises MessageInvalid."""
    backoff = _BACKOFF.get(message.backoff_strategy)
    dead_letter = _DEAD_LETTER.get(message.poison_policy)
    if backoff is None or dead_letter is None:
        raise MessageInvalid(
            "failure_policy: backoff_strategy or poison_policy has a number that is not known"
        )
    for field in ("ack_timeout_ms", "base_redelivery_delay_ms", "max_redelivery_delay_ms"):
        if getattr(message, field) > MAX_MS:
            raise MessageInvalid(f"failure_policy: {field} {getattr(message, field)} is too long")
    dead_letter_topic = message.dead_letter_topic if message.HasField("dead_letter_topic") else ""
    if dead_letter_topic:
        topic_name(dead_letter_topic)
    return from_message(
        FailurePolicy, message, backoff=backoff, dead_letter=dead_letter, dead_letter_topic=dead_letter_topic
    )


def policy_to(policy: FailurePolicy) -> pb.SubscriptionFailurePolicy:
    return to_message(
        pb.SubscriptionFailurePolicy,
        policy,
        backoff_strategy=_BACKOFF_NUMBERS[policy.backoff],
        poison_policy=_DEAD_LETTER_NUMBERS[policy.dead_letter],
        dead_letter_topic=policy.dead_letter_topic or None,
    )
