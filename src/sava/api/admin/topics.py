"""The services ``Namespaces``, ``Topics`` and ``Subscriptions`` of the admin port.

A translation: what a call means is in ``sava.topics``. Any broker answers. An operator asks for a partitioned
topic by its own name, and the answer describes, or the call changes, all its partitions, wherever they are
(``descriptions``). Of a partitioned topic, a subscription is those of its partitions: numbers are sums, and a
change is made in each partition that has it, by the partition's owner. A change that has to be made in
several partitions and fails on the way can be repeated: what is done already is left as it is.

A move that an operator asks for (``Unloading``), of a topic or of all partitions of one, is done for the
operator when the new owner answers, and until then its downtime is counted: the controller knows when the new
owner had taken the topic, and what comes on top is the time that the owner took to describe it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

from sava.api.admin import descriptions as describe
from sava.api.admin.descriptions import Partitions
from sava.cluster.controller import Controller
from sava.cluster.records import NotController
from sava.config import PolicySettings
from sava.errors import CallerError, SavaError
from sava.metadata.store import MetadataStore
from sava.peers import error_mapping
from sava.peers.forwarding import is_forwarded, is_from_broker
from sava.peers.guard import may_see, may_see_namespace
from sava.proto import topics_admin_pb2 as pb
from sava.proto import topics_admin_pb2_grpc as rpc
from sava.storage.keys import is_replication_slot
from sava.tasks import cancelled
from sava.topics import specs
from sava.topics.errors import MessageInvalid, NamespaceExists, SubscriptionExists, TopicExists, TopicMismatch
from sava.topics.names import TopicName, check_name, check_unreserved
from sava.topics.non_reliable import NonReliableSubscription
from sava.topics.rules import TopicSchemas, combine, configured
from sava.topics.served import ServedTopics
from sava.topics.specs import AtOffset, NamespacePolicy, Position
from sava.topics.topic import SubscribeOptions, Topic

# ruff: noqa: N802 (gRPC names the methods)


class NamespacesService(rpc.NamespacesServicer):
    def __init__(self, topics: ServedTopics, policies: PolicySettings) -> None:
        self._topics = topics
        self._namespaces = topics.namespaces
        self._configured = configured(policies)

    async def CreateNamespace(
        self, request: pb.CreateNamespaceRequest, context: Any
    ) -> pb.CreateNamespaceResponse:
        try:
            await self._namespaces.create(request.namespace, describe.policy_from(request.policy))
        except NamespaceExists:
            return pb.CreateNamespaceResponse(already_existed=True)
        return pb.CreateNamespaceResponse()

    async def ListNamespaces(
        self, request: pb.ListNamespacesRequest, context: Any
    ) -> pb.ListNamespacesResponse:
        return pb.ListNamespacesResponse(namespaces=filter(may_see_namespace, await self._namespaces.list()))

    async def DescribeNamespace(
        self, request: pb.DescribeNamespaceRequest, context: Any
    ) -> pb.NamespaceDescription:
        return await self._describe(check_name(request.namespace, "namespace"))

    async def SetNamespacePolicy(
        self, request: pb.SetNamespacePolicyRequest, context: Any
    ) -> pb.NamespaceDescription:
        namespace = check_name(request.namespace, "namespace")
        await self._namespaces.change_policy(
            namespace, lambda policy: describe.changed_policy(policy, request.policy, request.clear)
        )
        with error_mapping.after_change(f"the policy of namespace {namespace} is changed"):
            return await self._describe(namespace)

    async def DeleteNamespace(
        self, request: pb.DeleteNamespaceRequest, context: Any
    ) -> pb.DeleteNamespaceResponse:
        await self._namespaces.delete(request.namespace)
        return pb.DeleteNamespaceResponse()

    async def _describe(self, namespace: str) -> pb.NamespaceDescription:
        policy = await self._namespaces.policy(namespace)
        topics = {
            name: spec
            for name, spec in (await self._topics.registry.list(namespace)).items()
            if may_see(name)
        }
        return pb.NamespaceDescription(
            namespace=namespace,
            policy=describe.policy_message(policy),
            effective_policy=describe.policy_message(combine((policy, self._configured))),
            topics=sum(_part_of(name, topics) is None for name in topics),
        )


class TopicsService(rpc.TopicsServicer):
    def __init__(self, parts: Partitions, unloading: Unloading, store: MetadataStore) -> None:
        self._parts = parts
        self._unloading = unloading
        self._topics = parts.topics
        self._registry = parts.topics.registry
        self._store = store
        self._schemas = TopicSchemas(store)

    async def CreateTopic(self, request: pb.CreateTopicRequest, context: Any) -> pb.TopicDescription:
        name = TopicName.parse(request.name)
        try:
            await self._topics.create(
                name,
                reliable=request.reliable,
                partitions=request.partitions,
                schema_subject=request.schema_subject,
            )
        except TopicExists:
            if not request.if_absent:
                raise
            await self._check_same(name, request)
        with error_mapping.after_change(f"topic {name} exists now"):
            return await self._describe_new(name)

    async def _check_same(self, name: TopicName, request: pb.CreateTopicRequest) -> None:
        """Raises TopicMismatch unless the topic that exists is what was to be created."""
        spec = (await self._registry.locate(name)).spec
        schema = await self._schemas.get(name) if request.schema_subject else None
        subject = schema.subject if schema is not None else ""
        asked = (request.reliable, request.partitions, request.schema_subject)
        if asked != (spec.reliable, spec.partitions, subject):
            spread = f"{spec.partitions} partitions" if spec.partitions else "no partitions"
            follows = f", schema {subject or 'none'}" if request.schema_subject else ""
            raise TopicMismatch(
                f"topic {name} exists already and is another: {describe.delivery(spec)}, {spread}{follows}"
            )

    async def ListTopics(self, request: pb.ListTopicsRequest, context: Any) -> pb.ListTopicsResponse:
        if request.namespace:
            await self._topics.namespaces.policy(check_name(request.namespace, "namespace"))
        topics = await self._registry.list(request.namespace or None)
        response = pb.ListTopicsResponse()
        for name in sorted(filter(may_see, topics), key=lambda name: name.partition_of or (name, -1)):
            spec, part = topics[name], _part_of(name, topics)
            records = [self._parts.view.held(each).record for each in describe.members(name, spec)]
            response.topics.add(
                name=str(name),
                broker_id=describe.common_owner(record.owner for record in records),
                delivery=describe.delivery(spec),
                partitions=spec.partitions,
                partition_of=str(part) if part is not None else "",
                state=describe.together(record.state.value for record in records),
                epoch=None if spec.partitions else records[0].epoch,
            )
        return response

    async def DescribeTopic(self, request: pb.DescribeTopicRequest, context: Any) -> pb.TopicDescription:
        """Asked by another broker it answers only for what it has itself, or what no broker has."""
        name = TopicName.parse(request.name)
        if is_forwarded() and not await self._parts.is_partitioned(name):
            return await self._complete(name, await self._parts.here(name))
        return await self._describe(name)

    async def DeleteTopic(self, request: pb.DeleteTopicRequest, context: Any) -> pb.DeleteTopicResponse:
        await self._topics.delete(TopicName.parse(request.name))
        return pb.DeleteTopicResponse()

    async def GrowTopic(self, request: pb.GrowTopicRequest, context: Any) -> pb.TopicDescription:
        name = TopicName.parse(request.name)
        await self._registry.grow(name, request.partitions)
        with error_mapping.after_change(f"topic {name} has {request.partitions} partitions now"):
            return await self._describe_new(name)

    async def SetTopicPolicy(self, request: pb.SetTopicPolicyRequest, context: Any) -> pb.TopicDescription:
        name = TopicName.parse(request.name)
        await self._registry.change_policy(
            name, lambda policy: describe.changed_policy(policy, request.policy, request.clear)
        )
        with error_mapping.after_change(f"the policy of topic {name} is changed"):
            return await self._describe(name)

    async def UnloadTopic(self, request: pb.UnloadTopicRequest, context: Any) -> AsyncIterator[pb.TopicMove]:
        moves = self._unloading.unload(
            TopicName.parse(request.name), target=request.to_broker_id, timeout_ms=request.timeout_ms
        )
        async with aclosing(moves):
            async for move in moves:
                yield move

    async def _describe_new(self, name: TopicName) -> pb.TopicDescription:
        await self._parts.settle(await self._parts.names(name))
        return await self._describe(name)

    async def _describe(self, name: TopicName) -> pb.TopicDescription:
        """By its owner, or owners."""
        spec = await self._registry.need(name)
        described = await self._parts.describe(describe.members(name, spec))
        whole = describe.whole_topic(name, spec, described) if spec.partitions else described[0]
        return await self._complete(name, whole)

    async def _complete(self, name: TopicName, described: pb.TopicDescription) -> pb.TopicDescription:
        """With what the metadata store knows besides."""
        schema = await self._schemas.get(name)
        if schema is not None:
            described.schema_subject = schema.subject
            described.validation_policy = schema.policy.value
        described.policy.CopyFrom(describe.policy_message(await self._policy(name)))
        described.effective_policy.CopyFrom(describe.policy_message(self._topics.limits.of(name)))
        return described

    async def _policy(self, name: TopicName) -> NamespacePolicy:
        """What was set for the topic itself."""
        kv = await self._store.get(specs.policy_key(name))
        return specs.decode(kv, NamespacePolicy) if kv is not None else NamespacePolicy()


def _part_of(name: TopicName, topics: dict[TopicName, specs.TopicSpec]) -> TopicName | None:
    """The partitioned topic that it is a part of."""
    part = name.partition_of
    return part[0] if part is not None and part[0] in topics else None


# -- unloading -------------------------------------------------------------------------------------


REASON: Final = "unload"
PARALLEL: Final = 8
"""Partitions of one topic that move at a time."""

_Result = tuple[TopicName, pb.TopicMove | SavaError]


class Unloading:
    """Holds nothing between calls. On the leader; raises NotController elsewhere."""

    def __init__(self, parts: Partitions, controller: Controller, *, timeout_ms: int) -> None:
        self._parts = parts
        self._controller = controller
        self._timeout_ms = timeout_ms

    async def unload(
        self, name: TopicName, *, target: int = 0, timeout_ms: int = 0
    ) -> AsyncGenerator[pb.TopicMove, None]:
        """One result for each topic as it is done. What is refused before anything has moved is raised
        (NotController, TopicUnknown, MoveRefused, WrongState): of several partitions if it is refused for all
        of them."""
        names = await self._parts.names(name)
        refused: list[_Result] = []
        has_moved = False
        async with aclosing(self._each(names, target, timeout_ms or self._timeout_ms)) as results:
            async for topic, result in results:
                if isinstance(result, NotController) and not has_moved:
                    raise result
                if isinstance(result, SavaError):
                    refused.append((topic, result))
                    continue
                has_moved = True
                yield result
        if not has_moved:
            raise _first(refused)
        for topic, error in refused:
            owner = self._parts.view.held(topic).record.owner
            yield pb.TopicMove(topic=str(topic), from_broker_id=owner, to_broker_id=owner, error=str(error))

    async def _each(
        self, names: list[TopicName], target: int, timeout_ms: int
    ) -> AsyncGenerator[_Result, None]:
        """As they are done."""
        waiting = iter(names)
        done: asyncio.Queue[_Result] = asyncio.Queue()

        async def take_turns() -> None:
            for name in waiting:
                try:
                    result: pb.TopicMove | SavaError = await self._move(name, target, timeout_ms)
                except SavaError as error:
                    result = error
                done.put_nowait((name, result))

        turns = [asyncio.create_task(take_turns()) for _ in range(min(PARALLEL, len(names)))]
        try:
            for _ in names:
                yield await done.get()
        finally:
            # The controller brings moves that have begun to their end, also without a caller that waits.
            await cancelled(*turns)

    async def _move(self, name: TopicName, target: int, timeout_ms: int) -> pb.TopicMove:
        move = await self._controller.move(name, target=target, reason=REASON, timeout_ms=timeout_ms)
        result = pb.TopicMove(
            topic=str(name),
            from_broker_id=move.from_broker,
            to_broker_id=move.to_broker,
            downtime_ms=move.downtime_ms,
            epoch=move.epoch,
            error=move.error,
        )
        await self._ask_owner(name, result)
        return result

    async def _ask_owner(self, name: TopicName, result: pb.TopicMove) -> None:
        """Whether the move succeeded or was taken back: it counts when a broker serves the topic again."""
        taken = time.monotonic()
        try:
            (described,) = await self._parts.describe([name])
            silence = described.reason
        except SavaError as error:
            silence = str(error)
        if silence:
            result.error = result.error or f"it has moved, and no broker answers for it yet: {silence}"
            return
        result.downtime_ms += round(1000 * (time.monotonic() - taken))
        if described.HasField("next_offset"):
            result.next_offset = described.next_offset


def _first(refused: list[_Result]) -> SavaError:
    """The refusal that says most: one that a repetition does not cure."""
    errors = [error for _, error in refused if isinstance(error, SavaError)]
    return next((error for error in errors if isinstance(error, CallerError)), errors[0])


# -- subscriptions ---------------------------------------------------------------------------------


SERVICE: Final = "/sava.admin.Subscriptions/"


class SubscriptionsService(rpc.SubscriptionsServicer):
    def __init__(self, parts: Partitions) -> None:
        self._parts = parts

    async def CreateSubscription(
        self, request: pb.CreateSubscriptionRequest, context: Any
    ) -> pb.SubscriptionDescription:
        name, subscription = (
            TopicName.parse(request.topic),
            check_name(request.subscription, "subscription"),
        )
        start = describe.position(request.start)
        if is_replication_slot(subscription) and is_from_broker():  # the leader's, who makes them
            topic = await self._parts.topics.get(name)
            await topic.reliable.hold_slot(subscription, start)
            return describe.subscription_description(topic, subscription)
        check_unreserved(subscription)
        if not await self._parts.is_partitioned(name):
            return await _create(await self._parts.topics.get(name), request)
        _check_anywhere(name, start)
        missing = [
            TopicName.parse(described.name)
            for described in await self._parts.describe(await self._parts.names(name))
            if subscription not in describe.subscription_names(described)
        ]
        if not missing:
            raise SubscriptionExists(f"topic {name} has a subscription {subscription} already")
        await self._parts.on_each(
            missing, f"{SERVICE}CreateSubscription", request, pb.SubscriptionDescription, _create
        )
        with error_mapping.after_change(f"subscription {subscription} of topic {name} exists now"):
            return await self._describe(name, subscription)

    async def DescribeSubscription(
        self, request: pb.DescribeSubscriptionRequest, context: Any
    ) -> pb.SubscriptionDescription:
        name = TopicName.parse(request.topic)
        if await self._parts.is_partitioned(name):
            return await self._describe(name, request.subscription)
        return describe.find_subscription(name, [await self._parts.here(name)], request.subscription)[0]

    async def DeleteSubscription(
        self, request: pb.DeleteSubscriptionRequest, context: Any
    ) -> pb.DeleteSubscriptionResponse:
        if is_replication_slot(request.subscription) and is_from_broker():
            topic = await self._parts.topics.get(TopicName.parse(request.topic))
            await topic.release_slot(request.subscription)
            return pb.DeleteSubscriptionResponse()
        check_unreserved(request.subscription)
        await self._parts.on_subscription(
            f"{SERVICE}DeleteSubscription", request, pb.DeleteSubscriptionResponse, _delete
        )
        return pb.DeleteSubscriptionResponse()

    async def SeekSubscription(
        self, request: pb.SeekSubscriptionRequest, context: Any
    ) -> pb.SubscriptionDescription:
        name, position = TopicName.parse(request.topic), describe.position(request.position)
        if is_replication_slot(request.subscription) and is_from_broker():  # the leader's: only back
            topic = await self._parts.topics.get(name)
            await topic.reliable.rewind(request.subscription, position)
            return describe.subscription_description(topic, request.subscription)
        check_unreserved(request.subscription)
        if await self._parts.is_partitioned(name):
            _check_anywhere(name, position)
        parts = await self._parts.on_subscription(
            f"{SERVICE}SeekSubscription", request, pb.SubscriptionDescription, _seek
        )
        with error_mapping.after_change(f"subscription {request.subscription} of topic {name} was moved"):
            return await self._together(name, parts)

    async def ConfigureSubscription(
        self, request: pb.ConfigureSubscriptionRequest, context: Any
    ) -> pb.SubscriptionDescription:
        parts = await self._parts.on_subscription(
            f"{SERVICE}ConfigureSubscription", request, pb.SubscriptionDescription, _configure
        )
        with error_mapping.after_change(
            f"subscription {request.subscription} of topic {request.topic} is configured"
        ):
            return await self._together(TopicName.parse(request.topic), parts)

    async def _describe(self, name: TopicName, subscription: str) -> pb.SubscriptionDescription:
        """Of a partitioned topic."""
        parts = await self._parts.describe(await self._parts.names(name))
        return await self._together(name, describe.find_subscription(name, parts, subscription))

    async def _together(
        self, name: TopicName, parts: list[pb.SubscriptionDescription]
    ) -> pb.SubscriptionDescription:
        """One description: of a topic's only one, or of its partitions'."""
        is_partitioned = await self._parts.is_partitioned(name)
        return describe.whole_subscriptions(name, parts)[0] if is_partitioned else parts[0]


# -- what is done to one topic, where it is served -------------------------------------------------


async def _create(topic: Topic, request: pb.CreateSubscriptionRequest) -> pb.SubscriptionDescription:
    await topic.create_subscription(
        SubscribeOptions(
            subscription=request.subscription,
            type=describe.subscription_type(request.type),
            consumer_name="",
            start=describe.position(request.start),
        )
    )
    return describe.subscription_description(topic, request.subscription)


async def _delete(topic: Topic, request: pb.DeleteSubscriptionRequest) -> pb.DeleteSubscriptionResponse:
    await topic.unsubscribe(request.subscription)
    return pb.DeleteSubscriptionResponse()


async def _seek(topic: Topic, request: pb.SeekSubscriptionRequest) -> pb.SubscriptionDescription:
    await topic.reliable.seek(request.subscription, describe.position(request.position))
    return describe.subscription_description(topic, request.subscription)


async def _configure(topic: Topic, request: pb.ConfigureSubscriptionRequest) -> pb.SubscriptionDescription:
    subscription = describe.subscription_of(topic, request.subscription)
    if isinstance(subscription, NonReliableSubscription):
        raise TopicMismatch(f"topic {topic.name} is not reliable: nothing is delivered twice")
    if request.failure_policy.ListFields():
        policy = describe.changed_failure_policy(subscription.spec.failure_policy, request.failure_policy)
        await topic.reliable.set_failure_policy(request.subscription, policy)
    if request.HasField("max_unacked_messages"):
        await topic.reliable.set_max_unacked(request.subscription, request.max_unacked_messages)
    return describe.subscription_description(topic, request.subscription)


def _check_anywhere(name: TopicName, position: Position) -> None:
    """Raise MessageInvalid unless the position is one in every partition."""
    if isinstance(position, AtOffset):
        raise MessageInvalid(
            f"topic {name} is partitioned, and each partition has offsets of its own: name one of them, "
            f"such as {name.partition(0)}, or give a time"
        )
