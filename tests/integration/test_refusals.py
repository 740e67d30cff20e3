"""Requests that cannot be meant are refused as the caller's fault, by name; none of them is taken, and none
fails inside."""

from __future__ import annotations

from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from sava.peers.error_mapping import CODE_KEY
from sava.proto import admin_pb2 as admin
from sava.proto import brokers_pb2 as brokers
from sava.proto import replica_pb2 as replica
from sava.proto import streams_pb2 as streams
from sava.proto import topics_admin_pb2 as topics
from tests.support.brokers import Standalone
from tests.support.waiting import PATIENCE_S

ORDERS = "/default/orders"
SOURCE = replica.Source(cluster_name="eu", cluster_id="e", topic=ORDERS, topic_id=7)
HUGE = (1 << 64) - 1


def acks(*ranges: int) -> replica.ApplyAcksRequest:
    told = [replica.OriginAcks(cluster_name="eu", topic=ORDERS, cursor=3, ranges=ranges)]
    return replica.ApplyAcksRequest(topic=ORDERS, subscription="s", source=SOURCE, acks=told)


def load(broker: int = 1, cpu: float = 1.0, **topic: Any) -> brokers.LoadReport:
    busy = [brokers.TopicLoad(topic=ORDERS, **topic)]
    return brokers.LoadReport(broker_id=broker, cpu_percent=cpu, topics=busy)


def compared(**fields: Any) -> admin.TxnRequest:
    return admin.TxnRequest(compare=[admin.Compare(key="/x", **fields)])


class Case(NamedTuple):
    method: str
    request: Any
    code: str
    says: str


CASES = {
    "acks: half a range": Case("replica.Replica/ApplyAcks", acks(3, 5, 7), "message_invalid", "in pairs"),
    "acks: empty": Case("replica.Replica/ApplyAcks", acks(5, 5), "message_invalid", "5..5 is empty"),
    "acks: reversed": Case("replica.Replica/ApplyAcks", acks(4, 5, 9, 7), "message_invalid", "9..7 is"),
    "known acks: reversed": Case(
        "replica.Replica/ReadAcks",
        replica.ReadAcksRequest(topic=ORDERS, subscription="s", known=[9, 7]),
        "message_invalid",
        "9..7 is",
    ),
    "source: nobody": Case(
        "replica.Replica/ApplyAcks",
        replica.ApplyAcksRequest(topic=ORDERS, subscription="s"),
        "message_invalid",
        "a source is named",
    ),
    "partitions: absurd": Case(
        "replica.Replica/EnsureTopic",
        replica.EnsureTopicRequest(topic="/default/new", partition_count=1 << 31, reliable=True),
        "",
        "partitions",
    ),
    "partitions: absurdly more": Case(
        "admin.Topics/GrowTopic",
        topics.GrowTopicRequest(name="/default/parts", partitions=1 << 31),
        "",
        "partitions",
    ),
    "comparison: of nothing known": Case("admin.Meta/Txn", compared(target=99), "invalid", "comparison"),
    "comparison: in no known way": Case("admin.Meta/Txn", compared(relation=99), "invalid", "comparison"),
    "lease: endless": Case("admin.Meta/GrantLease", admin.GrantLeaseRequest(ttl_ms=HUGE), "invalid", "ttl"),
    "ids: all of them": Case(
        "admin.Meta/AllocateId", admin.AllocateIdRequest(key="/ids", count=HUGE), "invalid", "/ids"
    ),
    # Whether its numbers can be is looked at in tests/unit/api; no client may report them at all.
    "load: of no broker": Case("admin.Brokers/ReportLoad", load(cpu=nan), "permission_denied", "for brokers"),
    "subscription: no name": Case(
        "admin.Subscriptions/CreateSubscription",
        topics.CreateSubscriptionRequest(topic=ORDERS, type="shared"),
        "invalid_name",
        "subscription",
    ),
    "namespace: no name": Case(
        "admin.Namespaces/CreateNamespace", topics.CreateNamespaceRequest(), "invalid_name", "namespace"
    ),
    "topic: no name": Case(
        "streams.Streams/LookUp", streams.LookUpRequest(create=True), "invalid_name", "topic"
    ),
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    directory: Path = tmp_path_factory.mktemp("refusals")
    with Standalone(directory) as broker:
        broker.ready()
        call(broker, "admin.Topics/CreateTopic", topics.CreateTopicRequest(name=ORDERS, reliable=True))
        parted = topics.CreateTopicRequest(name="/default/parts", reliable=True, partitions=2)
        call(broker, "admin.Topics/CreateTopic", parted)
        start = topics.StartPosition(latest=True)
        subscribe = topics.CreateSubscriptionRequest(
            topic=ORDERS, subscription="s", type="shared", start=start
        )
        call(broker, "admin.Subscriptions/CreateSubscription", subscribe)
        yield broker


def call(broker: Standalone, method: str, request: Any) -> None:
    address = broker.admin if method.startswith("admin.") else broker.address
    with grpc.insecure_channel(address) as channel:
        # What is answered does not matter, and a stream of answers is one that may have none.
        ask = channel.unary_stream(
            f"/sava.{method}", request_serializer=type(request).SerializeToString, response_deserializer=bytes
        )
        list(ask(request, timeout=PATIENCE_S))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_is_refused_as_the_callers_fault(broker: Standalone, case: Case) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        call(broker, case.method, case.request)
    answer: Any = refused.value
    is_denied = case.code == "permission_denied"
    status = grpc.StatusCode.PERMISSION_DENIED if is_denied else grpc.StatusCode.FAILED_PRECONDITION
    assert answer.code() is status, answer.details()
    code = dict(answer.trailing_metadata())[CODE_KEY]
    assert case.code in ("", code), code
    assert case.says in answer.details()
