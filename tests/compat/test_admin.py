"""What Danube's tools ask of the admin port."""

from __future__ import annotations

import json

import pytest
from grpc import StatusCode

from sava.doctor.observation import fetch, parsed
from sava.proto import danube_admin_pb2 as admin
from sava.proto import danube_api_pb2 as pb
from sava.proto import danube_schema_pb2 as schema
from tests.compat.raw import Producer, open_stream, refused, subscribe
from tests.compat.stubs import Stubs
from tests.support.brokers import Standalone

EMPTY = admin.Empty()


async def test_brokers_and_cluster(stubs: Stubs, broker: Standalone) -> None:
    (info,) = (await stubs.brokers.ListBrokers(EMPTY)).brokers
    status = await stubs.cluster.ClusterStatus(EMPTY)
    assert info.broker_id == str(status.self_node_id) == str(status.leader_id)
    assert (await stubs.brokers.GetLeaderBroker(EMPTY)).leader == info.broker_id
    assert (info.broker_role, info.broker_status) == ("Cluster_Leader", "active")
    assert info.broker_addr == broker.url
    assert list(status.voters) == [status.self_node_id]
    balance = await stubs.brokers.GetClusterBalance(admin.ClusterBalanceRequest())
    assert [each.broker_id for each in balance.brokers] == [status.self_node_id]


async def test_what_needs_another_broker_says_so(stubs: Stubs, topic: str) -> None:
    (broker,) = (await stubs.brokers.ListBrokers(EMPTY)).brokers
    drain = stubs.brokers.UnloadBroker(admin.UnloadBrokerRequest(broker_id=broker.broker_id))
    code, text = await refused(drain)
    assert (code, "no other broker" in text) == (StatusCode.FAILED_PRECONDITION, True)
    await stubs.topics.CreateTopic(admin.NewTopicRequest(name=topic, dispatch_strategy=admin.Reliable))
    await subscribe(stubs, topic)
    assert await refused(stubs.topics.UnloadTopic(admin.TopicRequest(name=topic))) == (
        StatusCode.FAILED_PRECONDITION,
        "Cannot unload topic: single broker cluster detected. Unload requires at least 2 brokers. "
        "Use delete if you want to remove the topic.",
    )
    missing = stubs.topics.UnloadTopic(admin.TopicRequest(name=f"{topic}-missing"))
    assert (await refused(missing))[0] is StatusCode.NOT_FOUND
    activated = await stubs.brokers.ActivateBroker(admin.ActivateBrokerRequest(broker_id=broker.broker_id))
    assert activated.success
    unknown = stubs.brokers.ActivateBroker(admin.ActivateBrokerRequest(broker_id="1"))
    assert (await refused(unknown))[0] is StatusCode.NOT_FOUND
    rebalanced = await stubs.brokers.TriggerRebalance(admin.RebalanceRequest())
    assert (rebalanced.success, rebalanced.moves_executed) == (True, 0)


async def test_roles_are_there_where_they_are_not_enforced(stubs: Stubs) -> None:
    """They take effect when the broker is configured to know its callers."""
    found = await stubs.security.ListRoles(EMPTY)
    assert {"admin", "producer", "consumer"} <= {role.name for role in found.roles}
    code, _ = await refused(stubs.security.CreateBinding(admin.CreateBindingRequest()))
    assert code is StatusCode.INVALID_ARGUMENT


async def test_nodes_that_cannot_be_added_or_removed(stubs: Stubs) -> None:
    add = stubs.cluster.AddNode(admin.AddNodeRequest(addr="not an address"))
    assert (await refused(add))[0] is StatusCode.INVALID_ARGUMENT
    promote = stubs.cluster.PromoteNode(admin.PromoteNodeRequest(node_id=4711))
    assert (await refused(promote))[0] is StatusCode.INVALID_ARGUMENT
    remove = stubs.cluster.RemoveNode(admin.RemoveNodeRequest(node_id=4711))
    assert (await refused(remove))[0] is StatusCode.INVALID_ARGUMENT


async def test_namespaces(stubs: Stubs, topic: str) -> None:
    name = topic.removeprefix("/default/")
    namespace = admin.NamespaceRequest(name=name)
    await stubs.namespaces.CreateNamespace(namespace)
    assert (await refused(stubs.namespaces.CreateNamespace(namespace)))[0] is StatusCode.ALREADY_EXISTS
    listed = list((await stubs.brokers.ListNamespaces(EMPTY)).namespaces)
    assert {"default", "system", name} <= set(listed)
    policies = json.loads((await stubs.namespaces.GetNamespacePolicies(namespace)).policies)
    assert (policies["max_producers_per_topic"], policies["max_message_size"]) == (10_000, 8 << 20)
    await Producer.create(stubs, f"/{name}/topic")
    assert list((await stubs.namespaces.GetNamespaceTopics(namespace)).topics) == [f"/{name}/topic"]
    code, _ = await refused(stubs.namespaces.DeleteNamespace(namespace))
    assert code is StatusCode.FAILED_PRECONDITION
    await stubs.topics.DeleteTopic(admin.TopicRequest(name=f"/{name}/topic"))
    await stubs.namespaces.DeleteNamespace(namespace)
    assert (await refused(stubs.namespaces.DeleteNamespace(namespace)))[0] is StatusCode.NOT_FOUND
    longer = admin.NamespaceRequest(name="defaul")
    assert (await refused(stubs.namespaces.GetNamespaceTopics(longer)))[0] is StatusCode.NOT_FOUND
    for bad in ("", "a/b", "a b"):
        call = stubs.namespaces.CreateNamespace(admin.NamespaceRequest(name=bad))
        assert (await refused(call))[0] is StatusCode.INVALID_ARGUMENT


async def test_topics(stubs: Stubs, topic: str) -> None:
    create = stubs.topics.CreateTopic
    request = admin.NewTopicRequest(name=topic, dispatch_strategy=admin.Reliable)
    await create(request)
    assert (await refused(create(request)))[0] is StatusCode.ALREADY_EXISTS
    await create(admin.NewTopicRequest(name=f"{topic}-longer"))
    await stubs.topics.CreatePartitionedTopic(
        admin.PartitionedTopicRequest(base_name=f"{topic}-p", partitions=3, dispatch_strategy=admin.Reliable)
    )
    await subscribe(stubs, topic)
    described = await stubs.topics.DescribeTopic(admin.DescribeTopicRequest(name=topic))
    assert (described.name, described.delivery) == (topic, "Reliable")
    assert list(described.subscriptions) == ["subscription"]
    assert not described.HasField("schema_subject")
    listed = (await stubs.topics.ListNamespaceTopics(admin.NamespaceRequest(name="default"))).topics
    ours = {each.name: each.delivery for each in listed if each.name.startswith(topic)}
    partitions = {f"{topic}-p-part-{index}": "Reliable" for index in range(3)}
    assert ours == {topic: "Reliable", f"{topic}-longer": "NonReliable", **partitions}
    on_broker = await stubs.topics.ListBrokerTopics(admin.BrokerRequest(broker_id=described.broker_id))
    assert topic in [each.name for each in on_broker.topics]
    await stubs.topics.DeleteTopic(admin.TopicRequest(name=topic))
    look_up = stubs.discovery.TopicLookup(pb.TopicLookupRequest(topic=topic))
    assert (await refused(look_up))[0] is StatusCode.NOT_FOUND
    longer = stubs.discovery.TopicPartitions(pb.TopicLookupRequest(topic=f"{topic}-longer"))
    assert list((await longer).partitions) == [f"{topic}-longer"]
    assert (await refused(stubs.topics.DeleteTopic(admin.TopicRequest(name=topic))))[
        0
    ] is StatusCode.NOT_FOUND


async def test_a_topic_that_is_deleted_and_made_again_is_new(stubs: Stubs, topic: str) -> None:
    producer = await Producer.create(stubs, topic)
    stream = await open_stream(stubs, topic)
    await producer.send("old")
    assert await stream.texts(1, ack=False) == ["old"]
    await stubs.topics.DeleteTopic(admin.TopicRequest(name=topic))
    assert await stream.end() is StatusCode.UNAVAILABLE
    code, _ = await refused(producer.send("lost"))
    assert code is StatusCode.NOT_FOUND
    again = await Producer.create(stubs, topic)
    assert again.producer_id != producer.producer_id
    assert (await refused(producer.send("lost")))[0] is StatusCode.UNAVAILABLE
    stream = await open_stream(stubs, topic)
    await again.send("new")
    message = await stream.next()
    assert (message.payload, message.msg_id.topic_offset) == (b"new", 0)


async def test_subscriptions_and_their_settings(stubs: Stubs, topic: str) -> None:
    await Producer.create(stubs, topic)
    await subscribe(stubs, topic, subscription="s")
    names = {"topic": topic, "subscription": "s"}
    topic_request = admin.TopicRequest(name=topic)
    assert list((await stubs.topics.ListSubscriptions(topic_request)).subscriptions) == ["s"]
    policy = admin.SubscriptionFailurePolicy(
        max_redelivery_count=3,
        ack_timeout_ms=1000,
        base_redelivery_delay_ms=10,
        max_redelivery_delay_ms=100,
        backoff_strategy=admin.Exponential,
        dead_letter_topic=f"{topic}-dead",
        poison_policy=admin.DeadLetter,
    )
    await stubs.topics.SetSubscriptionFailurePolicy(
        admin.SetSubscriptionFailurePolicyRequest(**names, failure_policy=policy)
    )
    found = await stubs.topics.GetSubscriptionFailurePolicy(
        admin.GetSubscriptionFailurePolicyRequest(**names)
    )
    assert found.failure_policy == policy
    assert found.subscription_type == pb.ConsumerRequest.Exclusive
    config = admin.SubscriptionDispatchConfig(max_unacked_messages=17)
    await stubs.topics.SetSubscriptionDispatchConfig(
        admin.SetSubscriptionDispatchConfigRequest(**names, dispatch_config=config)
    )
    await subscribe(stubs, topic, subscription="s")  # does not change what was set
    got = await stubs.topics.GetSubscriptionDispatchConfig(
        admin.GetSubscriptionDispatchConfigRequest(**names)
    )
    assert got.dispatch_config == config
    await stubs.topics.Unsubscribe(admin.SubscriptionRequest(**names))
    assert list((await stubs.topics.ListSubscriptions(topic_request)).subscriptions) == []
    again = stubs.topics.Unsubscribe(admin.SubscriptionRequest(**names))
    assert (await refused(again))[0] is StatusCode.NOT_FOUND


async def test_wrong_settings_are_refused(stubs: Stubs, topic: str) -> None:
    await Producer.create(stubs, topic)
    await subscribe(stubs, topic, subscription="s")
    names = {"topic": topic, "subscription": "s"}
    policy = stubs.topics.SetSubscriptionFailurePolicy
    dispatch = stubs.topics.SetSubscriptionDispatchConfig
    wrong_policies = [
        None,
        admin.SubscriptionFailurePolicy(backoff_strategy=9),  # type: ignore[arg-type]
        admin.SubscriptionFailurePolicy(poison_policy=9),  # type: ignore[arg-type]
        admin.SubscriptionFailurePolicy(ack_timeout_ms=1 << 63),
        admin.SubscriptionFailurePolicy(dead_letter_topic="bad name"),
    ]
    for wrong in wrong_policies:
        request = admin.SetSubscriptionFailurePolicyRequest(**names, failure_policy=wrong)
        assert (await refused(policy(request)))[0] is StatusCode.INVALID_ARGUMENT
    for config in (None, admin.SubscriptionDispatchConfig(max_unacked_messages=0)):
        asked = admin.SetSubscriptionDispatchConfigRequest(**names, dispatch_config=config)
        assert (await refused(dispatch(asked)))[0] is StatusCode.INVALID_ARGUMENT
    names["subscription"] = "bad name"
    request = admin.SetSubscriptionFailurePolicyRequest(
        **names, failure_policy=admin.SubscriptionFailurePolicy()
    )
    assert (await refused(policy(request)))[0] is StatusCode.INVALID_ARGUMENT
    names["topic"] = f"{topic}-missing"
    request = admin.SetSubscriptionFailurePolicyRequest(
        **names, failure_policy=admin.SubscriptionFailurePolicy()
    )
    assert (await refused(policy(request)))[0] is StatusCode.NOT_FOUND


@pytest.mark.parametrize("partitions", [0, 3])
async def test_settings_made_before_the_subscription_apply_to_it(
    stubs: Stubs, topic: str, partitions: int
) -> None:
    """`topics create`, `topics set-failure-policy`, and only then the first consumer: the order in which
    Danube's users do it. The settings used to be refused with NOT_FOUND."""
    if partitions:
        created = admin.PartitionedTopicRequest(
            base_name=topic, partitions=partitions, dispatch_strategy=admin.Reliable
        )
        await stubs.topics.CreatePartitionedTopic(created)
    else:
        await stubs.topics.CreateTopic(admin.NewTopicRequest(name=topic, dispatch_strategy=admin.Reliable))
    names = {"topic": topic, "subscription": "s"}
    get_policy = stubs.topics.GetSubscriptionFailurePolicy
    get_config = stubs.topics.GetSubscriptionDispatchConfig
    unset = get_policy(admin.GetSubscriptionFailurePolicyRequest(**names))
    assert (await refused(unset))[0] is StatusCode.NOT_FOUND
    policy = admin.SubscriptionFailurePolicy(
        max_redelivery_count=1,
        ack_timeout_ms=777,
        base_redelivery_delay_ms=1,
        max_redelivery_delay_ms=1,
        dead_letter_topic=f"{topic}-dead",
        poison_policy=admin.DeadLetter,
    )
    config = admin.SubscriptionDispatchConfig(max_unacked_messages=17)
    await stubs.topics.SetSubscriptionFailurePolicy(
        admin.SetSubscriptionFailurePolicyRequest(**names, failure_policy=policy)
    )
    await stubs.topics.SetSubscriptionDispatchConfig(
        admin.SetSubscriptionDispatchConfigRequest(**names, dispatch_config=config)
    )
    for is_there in (False, True):
        if is_there:
            for each in [f"{topic}-part-{number}" for number in range(partitions)] or [topic]:
                await subscribe(stubs, each, subscription="s")
        found = await get_policy(admin.GetSubscriptionFailurePolicyRequest(**names))
        assert found.failure_policy == policy
        got = await get_config(admin.GetSubscriptionDispatchConfigRequest(**names))
        assert got.dispatch_config == config
    await stubs.topics.Unsubscribe(admin.SubscriptionRequest(**names))
    gone = get_policy(admin.GetSubscriptionFailurePolicyRequest(**names))
    assert (await refused(gone))[0] is StatusCode.NOT_FOUND, "the settings went with the subscription"


async def test_schemas_on_both_ports(stubs: Stubs, topic: str) -> None:
    subject = f"{topic}-subject"
    definition = b'{"type": "object"}'
    registered = await stubs.admin_schemas.RegisterSchema(
        schema.RegisterSchemaRequest(
            subject=subject,
            schema_type="JSON",
            schema_definition=definition,
            description="d",
            created_by="me",
            tags=["a"],
        )
    )
    assert (registered.version, registered.is_new_version) == (1, True)
    found = await stubs.schemas.GetSchema(schema.GetSchemaRequest(schema_id=registered.schema_id))
    assert (found.subject, found.schema_definition, found.schema_type) == (subject, definition, "json_schema")
    assert (found.description, found.created_by, list(found.tags)) == ("d", "me", ["a"])
    assert (found.compatibility_mode, found.fingerprint) == ("backward", registered.fingerprint)
    subjects = (await stubs.schemas.ListSubjects(schema.ListSubjectsRequest())).subjects
    (ours,) = (each for each in subjects if each.subject == subject)
    assert (ours.latest_version, ours.schema_id, ours.schema_type) == (1, found.schema_id, "json_schema")
    await Producer.create(stubs, topic, schema_ref=pb.SchemaReference(subject=subject, use_latest=True))
    described = await stubs.topics.DescribeTopic(admin.DescribeTopicRequest(name=topic))
    assert (described.schema_subject, described.schema_id) == (subject, found.schema_id)
    assert (described.schema_version, described.compatibility_mode) == (1, "BACKWARD")


async def test_wrong_schema_requests_are_refused(stubs: Stubs, topic: str) -> None:
    register, ask = stubs.schemas.RegisterSchema, stubs.schemas
    subject = f"{topic}-subject"
    invalid = [
        register(schema.RegisterSchemaRequest()),
        register(schema.RegisterSchemaRequest(subject=subject, schema_definition=b"{}")),
        register(
            schema.RegisterSchemaRequest(subject=subject, schema_type="nothing", schema_definition=b"{}")
        ),
        register(schema.RegisterSchemaRequest(subject=subject, schema_type="avro", schema_definition=b"{")),
        ask.SetCompatibilityMode(schema.SetCompatibilityModeRequest(subject=subject, compatibility_mode="x")),
        ask.ConfigureTopicSchema(
            schema.ConfigureTopicSchemaRequest(topic_name="bad", schema_subject=subject)
        ),
    ]
    for call in invalid:
        assert (await refused(call))[0] is StatusCode.INVALID_ARGUMENT
    unknown = [
        ask.GetSchema(schema.GetSchemaRequest(schema_id=1 << 40)),
        ask.GetLatestSchema(schema.GetLatestSchemaRequest(subject=subject)),
        ask.ListVersions(schema.ListVersionsRequest(subject=subject)),
        ask.DeleteSchemaVersion(schema.DeleteSchemaVersionRequest(subject=subject, version=1)),
        ask.GetTopicSchemaConfig(schema.GetTopicSchemaConfigRequest(topic_name=topic)),
        ask.ConfigureTopicSchema(
            schema.ConfigureTopicSchemaRequest(topic_name=topic, schema_subject=subject)
        ),
    ]
    for call in unknown[:-2]:
        code, text = await refused(call)
        assert (code, "not found" in text) == (StatusCode.NOT_FOUND, True), "as Danube's clients look for it"
    for call in unknown[-2:]:
        assert (await refused(call))[0] is StatusCode.NOT_FOUND
    reference = pb.SchemaReference(subject=subject, use_latest=True)
    code, text = await refused(Producer.create(stubs, topic, schema_ref=reference))
    assert (code, "not found" in text) == (StatusCode.FAILED_PRECONDITION, True)


BY_TOPIC = (
    *("danube_topic_messages_in_total", "danube_topic_bytes_in_total", "danube_topic_active_producers"),
    *("danube_topic_active_consumers", "danube_topic_active_subscriptions", "danube_wal_append_total"),
    *("danube_wal_append_bytes_total", "danube_cloud_upload_bytes_total"),
    *("danube_cloud_upload_objects_total", "danube_topic_message_size_bytes_sum"),
    *("danube_topic_message_size_bytes_count", "danube_consumer_messages_out_total"),
    *("danube_consumer_bytes_out_total", "danube_subscription_lag_messages", "danube_producer_send_total"),
    "danube_producer_send_latency_ms",
)
OF_BROKER = (
    *("danube_broker_topics_owned", "danube_leader_election_state", "danube_broker_rpc_total"),
    "danube_cluster_imbalance_cv",
)


async def test_figures_have_the_names_that_danubes_tools_query(
    stubs: Stubs, broker: Standalone, topic: str
) -> None:
    """Every series that its web UI and its MCP server ask Prometheus for, with Danube's labels, beside what
    was really sent and received."""
    producer = await Producer.create(stubs, topic)
    stream = await open_stream(stubs, topic)
    for number in range(5):
        await producer.send(f"message {number}")
    await stream.texts(3)
    unknown = producer.message("x")
    unknown.msg_id.producer_id += 1
    await refused(stubs.producer.SendMessage(unknown))
    too_large = producer.send(b"x" * (4 << 20))
    await refused(too_large)
    told = parsed(await fetch(f"127.0.0.1:{broker.http_port}", "/metrics"))
    (info,) = (await stubs.brokers.ListBrokers(EMPTY)).brokers

    def value(name: str, **labels: str) -> float:
        wanted = {"broker": info.broker_id, **labels}
        return sum(number for found, number in told[name] if wanted.items() <= found.items())

    missing = [
        name
        for name in BY_TOPIC
        if not any(found.get("topic") == topic and found["broker"] for found, _ in told.get(name, []))
    ]
    assert missing == []
    assert [name for name in OF_BROKER if name not in told] == []
    assert value("danube_topic_messages_in_total", topic=topic) == 5
    assert value("danube_topic_bytes_in_total", topic=topic) >= 5 * len("message 0")
    assert value("danube_consumer_messages_out_total", topic=topic) == 5
    assert value("danube_consumer_bytes_out_total", topic=topic) >= 5 * len("message 0")
    assert value("danube_subscription_lag_messages", topic=topic) == 2
    assert value("danube_topic_active_producers", topic=topic) == 1
    assert value("danube_topic_active_consumers", topic=topic) == 1
    assert value("danube_producer_send_total", topic=topic, result="ok") == 5
    assert value("danube_producer_send_total", topic=topic, result="error") == 1
    assert 0 < value("danube_producer_send_latency_ms", topic=topic, quantile="0.5") < 60_000
    assert value("danube_leader_election_state") == 1
    assert value("danube_broker_rpc_total") > 10
