"""Danube's published client, unchanged: over the server's TLS with a token of Danube's claims and without a
certificate of its own; and Danube's SecurityAdmin, by which its tools manage roles."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from google.protobuf.message import Message
from grpc import aio

from sava.api.admin_client import AdminClient
from sava.config import Auth
from sava.proto import danube_admin_pb2 as pb
from sava.proto import security_pb2
from sava.security.credentials import Credentials, Tls
from tests.compat.programs import run
from tests.security.secured import ISSUER, Issuer, Secured, secured, status_of
from tests.support.brokers import Brokers
from tests.support.certificates import Authority

TOPIC = "/default/topic"
SERVICE = "/danube_admin.SecurityAdmin/"


def danubes_token(issuer: Issuer, name: str, kind: str = "service_account") -> str:
    """As ``danube-admin security tokens create`` makes it."""
    claims = {
        "iss": ISSUER,
        "exp": int(time.time()) + 600,
        "sub": name,
        "principal_type": kind,
        "principal_name": name,
    }
    return jwt.encode(claims, issuer.secret, algorithm="HS256")


async def test_danubes_client_with_a_token_and_no_certificate(tmp_path: Path) -> None:
    """Through the owner of the topic, and through the other broker."""
    authority, issuer = Authority(tmp_path / "certificates"), Issuer(tmp_path)
    uris = [f"sava://test/broker/{host}" for host in ("127.0.0.1", "localhost")]
    tls = authority.issue("node", uris=uris).auth(authority.path).tls
    auth = Auth(tls=tls, tokens=(issuer.settings,), super_admins=("user:root",))
    assert auth.client_certificates == "optional"
    ca = str(authority.path)
    credentials = Credentials(tls=Tls(ca=ca), token=issuer.token("user:root"))
    async with Brokers(2, tmp_path, auth=auth, credentials=credentials) as cluster:
        client = cluster.brokers[0].client
        for role in ("producer", "consumer"):
            await client.call(
                client.security.CreateBinding,
                security_pb2.Binding(
                    principal="service_account:shop", role=role, scope="topic", resource="/default/topic*"
                ),
            )
        tokens = [danubes_token(issuer, "shop") for _ in range(3)]
        for broker in cluster.brokers:
            url = broker.client_url
            result = await run("secure", "hello", url, topic=TOPIC, ca=ca, tokens=tokens)
            assert (result["payload"], result["several_tokens"]) == ("hello", True)
            assert result["broker"] in [each.client_url for each in cluster.brokers]
        url = cluster.brokers[0].client_url
        for token, topic, expected in (
            (tokens[0], "/default/bills", "PERMISSION_DENIED"),
            (danubes_token(issuer, "shop", "user"), TOPIC, "PERMISSION_DENIED"),
            (danubes_token(issuer, "shop", "broker_internal"), TOPIC, "UNAUTHENTICATED"),
            ("", TOPIC, "UNAUTHENTICATED"),
        ):
            found = await run("secure", "refused", url, topic=topic, ca=ca, token=token)
            assert found == [expected, expected]


# -- roles and bindings as Danube's tools change them ------------------------------------------------


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured(1, tmp_path) as cluster:
        yield cluster


async def ask(cluster: Secured, method: str, request: Message, who: str = "user:root") -> Any:
    return await cluster.call(cluster.brokers[0], who, f"{SERVICE}{method}", request)


async def test_danubes_tools_manage_roles(one: Secured) -> None:
    role = pb.RoleDefinition(name="shop", permissions=["Produce", "Lookup", "ManageBroker", "read"])
    for _ in range(2):
        assert (await ask(one, "CreateRole", pb.CreateRoleRequest(role=role))).success
    found = (await ask(one, "GetRole", pb.GetRoleRequest(name="shop"))).role
    assert (list(found.permissions), found.system) == (["Lookup", "Produce", "read", "ManageBroker"], False)
    listed = {each.name: each for each in (await ask(one, "ListRoles", pb.Empty())).roles}
    assert {"admin", "producer", "shop"} <= listed.keys()
    assert listed["admin"].system
    assert list(listed["producer"].permissions) == ["Lookup", "Produce"]
    client: AdminClient = one.brokers[0].client
    roles = await client.call(client.security.ListRoles, security_pb2.ListRolesRequest())
    (same,) = [each for each in roles.roles if each.name == "shop"]
    assert list(same.permissions) == ["lookup", "produce", "read", "cluster-read"]

    async def refused(method: str, request: Message, who: str = "user:root") -> str:
        return await status_of(ask(one, method, request, who))

    unknown = pb.RoleDefinition(name="bad", permissions=["Fly"])
    assert await refused("CreateRole", pb.CreateRoleRequest(role=unknown)) == "INVALID_ARGUMENT"
    assert await refused("DeleteRole", pb.DeleteRoleRequest(name="admin")) == "FAILED_PRECONDITION"
    assert await refused("GetRole", pb.GetRoleRequest(name="none")) == "NOT_FOUND"
    assert await refused("DeleteRole", pb.DeleteRoleRequest(name="none")) == "NOT_FOUND"
    assert await refused("ListRoles", pb.Empty(), "ann") == "PERMISSION_DENIED"


async def test_danubes_tools_bind_principals(one: Secured) -> None:
    await one.create(TOPIC)
    wanted = pb.BindingDefinition(
        id="shop-writes",
        principal_type="service_account",
        principal_name="shop",
        role_names=["producer", "reader"],
        scope="topic",
        resource_name=TOPIC,
    )
    for _ in range(2):
        assert (await ask(one, "CreateBinding", pb.CreateBindingRequest(binding=wanted))).success
    named = {"scope": "topic", "resource_name": TOPIC, "binding_id": "shop-writes"}
    assert (await ask(one, "GetBinding", pb.GetBindingRequest(**named))).binding == wanted
    assert list((await ask(one, "ListAllBindings", pb.Empty())).bindings) == [wanted]
    about = pb.ListBindingsRequest(scope="topic", resource_name=TOPIC)
    assert list((await ask(one, "ListBindings", about)).bindings) == [wanted]
    elsewhere = pb.ListBindingsRequest(scope="namespace", resource_name="default")
    assert not (await ask(one, "ListBindings", elsewhere)).bindings
    who_am_i = security_pb2.WhoAmIRequest()
    path = "/sava.admin.Security/WhoAmI"
    bound = (await one.call(one.brokers[0], "service_account:shop", path, who_am_i)).bindings
    assert [each.role for each in bound] == ["producer", "reader"]

    fewer = pb.BindingDefinition()
    fewer.CopyFrom(wanted)
    fewer.role_names[:] = ["reader"]
    await ask(one, "CreateBinding", pb.CreateBindingRequest(binding=fewer))
    assert (await ask(one, "GetBinding", pb.GetBindingRequest(**named))).binding == fewer
    await ask(one, "DeleteBinding", pb.DeleteBindingRequest(**named))
    with pytest.raises(aio.AioRpcError) as caught:
        await ask(one, "DeleteBinding", pb.DeleteBindingRequest(**named))
    assert caught.value.code().name == "NOT_FOUND"
    ours = await one.bind("ann", "producer", namespace="default")
    (shown,) = (await ask(one, "ListAllBindings", pb.Empty())).bindings
    assert (shown.id, shown.principal_type, shown.principal_name) == (ours.id, "user", "ann")
    assert (shown.scope, shown.resource_name, list(shown.role_names)) == (
        "namespace",
        "default",
        ["producer"],
    )
