"""What callers see and reach: lists, keys of the metadata store, dead letters, figures; and how a broker
starts when no caller could be let in, or every caller may do everything."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc import aio

from sava.api.admin_client import own_credentials
from sava.config import Auth
from sava.peers.error_mapping import CODE_KEY
from sava.proto import admin_pb2, danube_admin_pb2, danube_schema_pb2, security_pb2, streams_pb2
from sava.proto import topics_admin_pb2 as topics_pb
from sava.security.certificates import read_certificate
from sava.security.credentials import Credentials
from tests.security.secured import Issuer, Secured, secured, status_of
from tests.support.brokers import BrokerProcess, Brokers, Cluster
from tests.support.certificates import Authority, Issued

META = "/sava.admin.Meta/"


async def code_of(call: Any) -> str:
    """Sava's name of the error that a call ends with."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    trailing: Any = caught.value.trailing_metadata()
    return str(dict(trailing)[CODE_KEY])


async def test_lists_hold_what_the_caller_may_see(tmp_path: Path) -> None:
    async with secured(1, tmp_path) as cluster:
        for namespace in ("sales", "other"):
            await cluster.create_namespace(namespace)
            for topic in ("orders", "bills"):
                await cluster.create(f"/{namespace}/{topic}")
        await cluster.create("/sales/parted", partitions=2)
        (broker,) = cluster.brokers

        async def ask(who: str, path: str, request: Message) -> Any:
            return await cluster.call(broker, who, path, request)

        for subject in ("sales.orders", "other.orders", "orders"):
            schema = danube_schema_pb2.RegisterSchemaRequest(subject=subject, schema_type="string")
            await ask("user:root", "/danube_schema.SchemaRegistry/RegisterSchema", schema)
        await cluster.bind("ann", "reader", namespace="sales")
        await cluster.bind("bob", "producer", topic="/other/or*")
        seen = {
            "ann": (["sales"], ["/sales/bills", "/sales/orders", "/sales/parted"], ["sales.orders"]),
            "bob": (["other"], ["/other/orders"], []),
            "eve": ([], [], []),
        }
        for who, (namespaces, topics, subjects) in seen.items():
            found = await ask(who, "/sava.admin.Namespaces/ListNamespaces", topics_pb.ListNamespacesRequest())
            assert list(found.namespaces) == namespaces
            found = await ask(who, "/danube_admin.BrokerAdmin/ListNamespaces", danube_admin_pb2.Empty())
            assert list(found.namespaces) == namespaces
            found = await ask(who, "/sava.streams.Streams/ListTopics", streams_pb2.ListTopicsRequest())
            assert [each.topic for each in found.topics] == topics
            found = await ask(who, "/sava.admin.Topics/ListTopics", topics_pb.ListTopicsRequest())
            assert [each.name for each in found.topics if not each.partition_of] == topics
            path = "/danube_schema.SchemaRegistry/ListSubjects"
            found = await ask(who, path, danube_schema_pb2.ListSubjectsRequest())
            assert [each.subject for each in found.subjects] == subjects
            path = "/danube_admin.TopicAdmin/ListNamespaceTopics"
            listing = cluster.status(broker, who, path, danube_admin_pb2.NamespaceRequest(name="other"))
            assert await listing == ("OK" if who == "bob" else "PERMISSION_DENIED")
        found = await ask("bob", path, danube_admin_pb2.NamespaceRequest(name="other"))
        assert [each.name for each in found.topics] == ["/other/orders"]


async def test_meta_does_not_reach_roles_and_bindings(tmp_path: Path) -> None:
    async with secured(1, tmp_path) as cluster:
        made = await cluster.bind("ann", "producer", topic="/default/orders")
        (broker,) = cluster.brokers
        key = f"/security/bindings/{made.id}"
        put = admin_pb2.Operation(put=admin_pb2.Operation.Put(key=key, value=b"{}"))
        prefix = admin_pb2.Operation(delete_prefix=admin_pb2.Operation.DeletePrefix(prefix="/security/"))
        whole = admin_pb2.Operation(delete_prefix=admin_pb2.Operation.DeletePrefix(prefix="/"))
        calls: list[tuple[str, Message]] = [
            ("Get", admin_pb2.GetRequest(key=key)),
            ("Range", admin_pb2.RangeRequest(prefix="/security/")),
            ("Range", admin_pb2.RangeRequest(prefix="/")),
            ("Put", admin_pb2.PutRequest(key=key, value=b"{}")),
            ("Delete", admin_pb2.DeleteRequest(key=key)),
            ("Delete", admin_pb2.DeleteRequest(key="/security/", prefix=True)),
            ("Delete", admin_pb2.DeleteRequest(key="/", prefix=True)),
            ("Txn", admin_pb2.TxnRequest(then=[put])),
            ("Txn", admin_pb2.TxnRequest(otherwise=[put])),
            ("Txn", admin_pb2.TxnRequest(then=[prefix])),
            ("Txn", admin_pb2.TxnRequest(then=[whole])),
            ("Txn", admin_pb2.TxnRequest(compare=[admin_pb2.Compare(key=key)])),
            ("AllocateId", admin_pb2.AllocateIdRequest(key="/security/roles/x")),
            ("Watch", admin_pb2.WatchRequest(prefix="/security/")),
            ("Watch", admin_pb2.WatchRequest(prefix="/")),
        ]
        for method, request in calls:
            call = cluster.call(broker, "user:root", f"{META}{method}", request)
            assert await code_of(call) == "key_reserved", (method, request)
        topics = admin_pb2.RangeRequest(prefix="/topics/")
        assert await cluster.status(broker, "user:root", f"{META}Range", topics) == "OK"
        listed = await cluster.call(
            broker, "user:root", "/sava.admin.Security/ListBindings", security_pb2.ListBindingsRequest()
        )
        assert [each.id for each in listed.bindings] == [made.id]


async def test_a_consumer_does_not_write_by_dead_letters(tmp_path: Path) -> None:
    """What a subscription gives up, the broker publishes to the topic that its policy names."""
    async with secured(1, tmp_path) as cluster:
        for topic in ("orders", "bills"):
            await cluster.create(f"/default/{topic}")
        await cluster.bind("ann", "consumer", namespace="default")
        (broker,) = cluster.brokers
        create = topics_pb.CreateSubscriptionRequest(
            topic="/default/orders",
            subscription="s",
            type="shared",
            start=topics_pb.StartPosition(latest=True),
        )
        path = "/sava.admin.Subscriptions/CreateSubscription"
        assert await cluster.status(broker, "ann", path, create) == "OK"

        async def status(dead_letters: str) -> tuple[str, str]:
            policy = topics_pb.FailurePolicy(dead_letter_topic=dead_letters, max_redelivery_count=1)
            ours = topics_pb.ConfigureSubscriptionRequest(
                topic="/default/orders", subscription="s", failure_policy=policy
            )
            danubes = danube_admin_pb2.SetSubscriptionFailurePolicyRequest(
                topic="/default/orders",
                subscription="s",
                failure_policy=danube_admin_pb2.SubscriptionFailurePolicy(dead_letter_topic=dead_letters),
            )
            path = "/danube_admin.TopicAdmin/SetSubscriptionFailurePolicy"
            return (
                await cluster.status(broker, "ann", "/sava.admin.Subscriptions/ConfigureSubscription", ours),
                await cluster.status(broker, "ann", path, danubes),
            )

        assert await status("") == ("OK", "OK")
        assert await status("/default/bills") == ("PERMISSION_DENIED", "PERMISSION_DENIED")
        await cluster.bind("ann", "producer", topic="/default/bills")
        assert await status("/default/bills") == ("OK", "OK")


# -- certificates ------------------------------------------------------------------------------------


async def test_a_certificate_names_its_caller(tmp_path: Path) -> None:
    """And may be revoked by its serial number. That of a broker is not an administrator's."""
    authority = Authority(tmp_path / "certificates")
    hosts = ("127.0.0.1", "localhost")
    node = authority.issue("node", uris=[f"sava://test/broker/{host}" for host in hosts])
    root, ann = authority.issue("root", hosts=()), authority.issue("x", uris=["sava://test/user/ann"])
    foreign = authority.issue("y", uris=["sava://elsewhere/user/root"], common_name="root")
    auth = node.auth(authority.path).model_copy(update={"super_admins": ("user:root",)})
    credentials = own_credentials(root.auth(authority.path))
    async with Brokers(2, tmp_path, auth=auth, credentials=credentials) as cluster:
        await cluster.create("/default/orders")
        broker = cluster.brokers[0]

        async def who_am_i(shown: Issued) -> security_pb2.WhoAmIResponse:
            async with _channel(broker, authority, shown) as channel:
                call: Any = channel.unary_unary(
                    "/sava.admin.Security/WhoAmI",
                    security_pb2.WhoAmIRequest.SerializeToString,
                    security_pb2.WhoAmIResponse.FromString,
                )
                found: security_pb2.WhoAmIResponse = await call(security_pb2.WhoAmIRequest())
                return found

        found = await who_am_i(ann)
        assert (found.principal, found.credential, found.is_super_admin) == ("user:ann", "certificate", False)
        assert found.expires_ms > 0
        assert (await who_am_i(root)).is_super_admin
        assert (await who_am_i(node)).principal == "broker:127.0.0.1"
        assert not (await who_am_i(node)).is_super_admin
        assert (await who_am_i(foreign)).principal == "anonymous:anonymous"
        revocation = security_pb2.Revocation(kind="certificate", id=str(_serial(ann)))
        await broker.client.call(broker.client.security.Revoke, revocation)
        assert await status_of(who_am_i(ann)) == "UNAUTHENTICATED"


def _channel(broker: BrokerProcess, authority: Authority, shown: Issued) -> aio.Channel:
    files = (authority.path, shown.key, shown.cert)
    credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
    return aio.secure_channel(broker.admin, credentials)


def _serial(issued: Issued) -> int:
    return read_certificate(issued.cert.read_bytes()).serial


# -- starting, and the HTTP port ---------------------------------------------------------------------


async def test_a_broker_without_an_administrator_does_not_start(tmp_path: Path) -> None:
    auth = Auth(tokens=(Issuer(tmp_path).settings,))
    cluster = Cluster(1, tmp_path, auth=auth)
    broker = await cluster.prepare()
    await broker.start(wait=False)
    assert await broker.ended() != 0
    assert any("set auth.super_admins" in line for line in broker.lines)
    await cluster.close()


async def test_a_broker_on_the_network_without_authentication_says_so(tmp_path: Path) -> None:
    async with Cluster(1, tmp_path) as quiet:
        assert not any("EVERY CALLER" in line for line in quiet.brokers[0].lines)
    cluster = Cluster(1, tmp_path)
    broker = await cluster.prepare()
    broker.add_arguments("--host", "0.0.0.0")
    await broker.start()
    warned = [line for line in broker.lines if "EVERY CALLER MAY DO EVERYTHING" in line]
    await cluster.close()
    assert len(warned) == 1


@pytest.mark.parametrize("metrics", ["open", "token"])
async def test_figures_are_for_those_who_may_read_them(tmp_path: Path, metrics: str) -> None:
    issuer = Issuer(tmp_path)
    auth = Auth(tokens=(issuer.settings,), super_admins=("user:root",), metrics=metrics)  # type: ignore[arg-type]
    cluster = Secured(1, tmp_path, auth=auth, credentials=Credentials(token=issuer.token("user:root")))
    cluster.issuer = issuer
    async with cluster:
        (broker,) = cluster.brokers
        await cluster.bind("prometheus", "monitoring")
        await cluster.bind("ann", "producer")

        async def status(path: str, who: str = "") -> int:
            shown = f"Authorization: Bearer {issuer.token(who)}\r\n" if who else ""
            reader, writer = await asyncio.open_connection("127.0.0.1", broker.http_port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{shown}\r\n".encode())
            head = (await reader.read()).decode()
            writer.close()
            return int(head.split(" ")[1])

        assert [await status("/healthz"), await status("/readyz")] == [200, 200]
        expected = [200, 200, 200, 200] if metrics == "open" else [401, 200, 403, 401]
        found = [
            await status("/metrics"),
            await status("/metrics", "prometheus"),
            await status("/metrics", "ann"),
        ]
        issuer.secret = b"x" * 32
        assert [*found, await status("/metrics", "prometheus")] == expected
