"""Who gets in: bad tokens on both ports, callers without one, and headers that make no broker."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from grpc import aio

from sava.config import Auth
from sava.peers.guard import BrokerIdentity
from sava.proto import admin_pb2, danube_api_pb2, security_pb2, streams_pb2, writers_pb2
from sava.security.calls import Call
from sava.security.cluster_secret import FILE, ClusterSecret
from sava.security.credentials import Credentials
from sava.security.principal import Principal
from tests.security.secured import ISSUER, Issuer, Secured, secured, status_of
from tests.support.brokers import Brokers

LOOK_UP = "/sava.streams.Streams/LookUp"
STATUS = "/sava.admin.Cluster/Status"
APPEND = "/sava.streams.Streams/Append"
STAGED = "/sava.writers.Writers/PublishStaged"
WHO_AM_I = "/sava.admin.Security/WhoAmI"
HEALTH = "/danube.HealthCheck/HealthCheck"
ORDERS = "/default/orders"

CALLS = (
    (LOOK_UP, streams_pb2.LookUpRequest(topic=ORDERS)),
    (STATUS, admin_pb2.StatusRequest()),
    (
        "/sava.streams.Streams/Publish",
        streams_pb2.PublishRequest(open=streams_pb2.OpenProducer(topic=ORDERS, producer_name="p")),
    ),
    ("/sava.streams.Streams/Read", streams_pb2.ReadRequest(topic=ORDERS, end=0)),
    ("/danube.Discovery/TopicLookup", danube_api_pb2.TopicLookupRequest(topic=ORDERS)),
)
"""One of each kind, on both ports, in both manners."""


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured(2, tmp_path) as cluster:
        await cluster.create(ORDERS)
        yield cluster


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def claims(**changes: Any) -> dict[str, Any]:
    now = int(time.time())
    return {
        "iss": ISSUER,
        "sub": "root",
        "principal_type": "user",
        "principal_name": "root",
        "exp": now + 600,
        **changes,
    }


def unsigned(body: dict[str, Any]) -> str:
    """``alg: none``."""
    parts = ({"alg": "none", "typ": "JWT"}, body)
    texts = [base64.urlsafe_b64encode(json.dumps(each).encode()).decode().rstrip("=") for each in parts]
    return f"{texts[0]}.{texts[1]}."


async def test_no_token_and_no_good_token_is_let_in(pair: Secured, tmp_path: Path) -> None:
    good = pair.issuer.token("user:root")
    secret = pair.issuer.secret
    head, body, signature = good.split(".")
    bad = {
        "none": (),
        "of the administrator, unsigned": bearer(unsigned(claims())),
        "broken": bearer("a.b.c"),
        "empty": bearer(""),
        "of another scheme": (("authorization", f"Basic {good}"),),
        "with another's signature": bearer(f"{head}.{body}.{signature[::-1]}"),
        "expired": bearer(jwt.encode(claims(exp=int(time.time()) - 3600), secret, "HS256")),
        "without an end": bearer(
            jwt.encode({k: v for k, v in claims().items() if k != "exp"}, secret, "HS256")
        ),
        "not valid yet": bearer(jwt.encode(claims(nbf=int(time.time()) + 3600), secret, "HS256")),
        "of an unknown issuer": bearer(Issuer(tmp_path, "stranger").token("user:root")),
        "of another algorithm": bearer(jwt.encode(claims(), secret * 2, "HS512")),
        "of a broker": bearer(jwt.encode(claims(principal_type="broker"), secret, "HS256")),
        "of Danube's brokers": bearer(jwt.encode(claims(principal_type="broker_internal"), secret, "HS256")),
        "as Danube's brokers call": (("x-danube-internal-broker", "1"),),
        "forwarded": (("sava-forwarded", "1"),),
    }
    for path, request in CALLS:
        for broker in pair.brokers:
            assert await status_of(pair.call_with(broker, bearer(good), path, request)) == "OK", path
            for what, metadata in bad.items():
                status = await status_of(pair.call_with(broker, metadata, path, request))
                assert status == "UNAUTHENTICATED", (path, what)


async def test_a_token_for_another_audience_is_refused(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path)
    issuer.settings = issuer.settings.model_copy(update={"audience": "orders"})
    auth = Auth(tokens=(issuer.settings,), super_admins=("user:root",))
    credentials = Credentials(token=issuer.token("user:root", audience="orders"))
    cluster = Secured(1, tmp_path, auth=auth, credentials=credentials)
    cluster.issuer = issuer
    async with cluster:
        for audience, expected in (("orders", "OK"), ("billing", "UNAUTHENTICATED"), ("", "UNAUTHENTICATED")):
            token = issuer.token("user:root", audience=audience)
            call = cluster.call_with(cluster.brokers[0], bearer(token), STATUS, admin_pb2.StatusRequest())
            assert await status_of(call) == expected


async def test_anonymous_callers_have_what_is_granted_to_them(tmp_path: Path) -> None:
    """Where they are let in; a bad token is refused also there."""
    issuer = Issuer(tmp_path)
    auth = Auth(tokens=(issuer.settings,), super_admins=("user:root",), anonymous=True)
    cluster = Secured(1, tmp_path, auth=auth, credentials=Credentials(token=issuer.token("user:root")))
    cluster.issuer = issuer
    async with cluster:
        await cluster.create(ORDERS)
        (broker,) = cluster.brokers
        request = streams_pb2.LookUpRequest(topic=ORDERS)
        assert await cluster.status(broker, None, LOOK_UP, request) == "PERMISSION_DENIED"
        await cluster.bind("anonymous:anonymous", "reader", topic=ORDERS)
        assert await cluster.status(broker, None, LOOK_UP, request) == "OK"
        for header in (bearer("a.b.c"), (("authorization", "Basic x"),)):
            assert await status_of(cluster.call_with(broker, header, LOOK_UP, request)) == "UNAUTHENTICATED"
        status = admin_pb2.StatusRequest()
        assert await cluster.status(broker, None, STATUS, status) == "PERMISSION_DENIED"


async def test_some_questions_are_open_but_not_with_a_bad_token(pair: Secured) -> None:
    broker = pair.brokers[0]
    found = await pair.call(broker, None, WHO_AM_I, security_pb2.WhoAmIRequest())
    assert (found.principal, found.credential, found.is_enforced) == ("anonymous:anonymous", "none", True)
    assert await pair.status(broker, None, HEALTH, danube_api_pb2.HealthCheckRequest()) == "OK"
    for path, request in (
        (WHO_AM_I, security_pb2.WhoAmIRequest()),
        (HEALTH, danube_api_pb2.HealthCheckRequest()),
    ):
        call = pair.call_with(broker, bearer("a.b.c"), path, request)
        assert await status_of(call) == "UNAUTHENTICATED"


async def test_who_am_i_and_what_may_i(pair: Secured) -> None:
    binding = await pair.bind("ann", "producer", topic="/default/or*")
    for broker in pair.brokers:
        found = await pair.call(broker, "ann", WHO_AM_I, security_pb2.WhoAmIRequest())
        assert (found.principal, found.credential) == ("user:ann", "token")
        assert [each.id for each in found.bindings] == [binding.id]
        for permission, topic, allowed in (
            ("produce", ORDERS, True),
            ("produce", f"{ORDERS}-part-3", True),
            ("consume", ORDERS, False),
            ("produce", "/default/bills", False),
            ("produce", "/other/orders", False),
        ):
            question = security_pb2.CanIRequest(permission=permission, scope="topic", resource=topic)
            answer = await pair.call(broker, "ann", "/sava.admin.Security/CanI", question)
            assert answer.allowed is allowed, (permission, topic)
            assert ("role producer on topic /default/or*" in answer.reason) is allowed
    about_root = security_pb2.CanIRequest(permission="meta", scope="cluster", principal="root")
    assert await pair.status(broker, "ann", "/sava.admin.Security/CanI", about_root) == "PERMISSION_DENIED"


# -- nothing but the cluster's secret makes a broker -------------------------------------------------


async def test_no_header_makes_a_broker(tmp_path: Path) -> None:
    """Where every caller may do everything, too: Append goes around producers and schemas (H1)."""
    async with Brokers(1, tmp_path) as cluster:
        await cluster.create(ORDERS)
        (broker,) = cluster.brokers
        stranger = ClusterSecret(tmp_path / "stranger")
        stranger.create()
        own = ClusterSecret(broker.data_dir / FILE)
        identity = BrokerIdentity(7, own)
        forged = {
            "1": ("sava-forwarded", "1"),
            "another secret": BrokerIdentity(7, stranger).own(APPEND),
            "another method": identity.own("/sava.streams.Streams/LookUp"),
            "a client's": identity.pass_on(APPEND, Call(Principal("broker", "7"))),
            "Danube's": ("x-danube-internal-broker", "1"),
        }
        request = streams_pb2.AppendRequest(topic=ORDERS, batch=b"no batch")
        async with aio.insecure_channel(broker.client_url.partition("//")[2]) as channel:
            unary: Any = channel.unary_unary
            call = unary(APPEND, streams_pb2.AppendRequest.SerializeToString)
            for what, header in forged.items():
                assert await status_of(call(request, metadata=(header,))) == "PERMISSION_DENIED", what
            assert await status_of(call(request, metadata=(identity.own(APPEND),))) == "FAILED_PRECONDITION"
            staged = unary(STAGED, writers_pb2.PublishStagedRequest.SerializeToString)
            refused = staged(writers_pb2.PublishStagedRequest(topic=ORDERS), metadata=(forged["1"],))
            assert await status_of(refused) == "PERMISSION_DENIED"


async def test_a_broker_says_for_a_short_time_whose_call_it_passes_on(
    pair: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is then decided by that principal, and not by the token beside it."""
    identity = BrokerIdentity(7, ClusterSecret(pair.brokers[0].data_dir / FILE))
    await pair.bind("ann", "producer", topic=ORDERS)
    request = streams_pb2.LookUpRequest(topic=ORDERS)
    broker = pair.brokers[0]

    async def status(who: str) -> str:
        header = identity.pass_on(LOOK_UP, Call(Principal.parse(who)))
        return await status_of(pair.call_with(broker, (header, *pair.headers("user:root")), LOOK_UP, request))

    assert await status("ann") == "OK"
    assert await status("bob") == "PERMISSION_DENIED"
    now = time.time()
    for minutes in (-1, 1):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda at=now + 60 * minutes: at)
            header = identity.pass_on(LOOK_UP, Call(Principal.parse("ann")))
        assert await status_of(pair.call_with(broker, (header,), LOOK_UP, request)) == "UNAVAILABLE"
