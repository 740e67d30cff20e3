"""The guard of one broker: what it refuses, what it tells, and what it costs nothing for."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from sava.errors import SavaError
from sava.peers import guard as guards
from sava.peers.guard import Delegations, Rules
from sava.proto import streams_pb2, topics_admin_pb2
from sava.security import calls, principal
from sava.security.audit import EACH_SECOND, Audit, AuditedCall
from sava.security.delegation import Delegation, issued
from sava.security.permissions import (
    Authorizer,
    Grant,
    GrantScope,
    PermissionDenied,
    Resource,
    Unauthenticated,
)
from sava.security.principal import Principal
from sava.security.store import SecurityPolicies
from sava.security.tokens import TokenIssuer, TokenVerifier, create_token, new_secret, write_private
from sava.topics.errors import MessageInvalid, OwnedByAnother
from tests.support.guards import SECRET, guard_of, identity
from tests.support.memory_store import MemoryStore

ANN = Principal("user", "ann")
LOOK_UP = "/sava.streams.Streams/LookUp"
DELETE = "/sava.admin.Topics/DeleteTopic"
ORDERS = streams_pb2.LookUpRequest(topic="/sales/orders-part-3")


class Context:
    """Of one call."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:10.0.0.7:1234"


async def raise_it(context: Any, error: SavaError) -> Any:
    raise error


async def who(request: Any, context: Any) -> tuple[Principal, int]:
    """A handler that says who calls, and which broker has passed the call on."""
    return principal.current.get(), calls.current.get().forwarder


class Told(Audit):
    """An audit that remembers what it was given."""

    def __init__(self) -> None:
        super().__init__("changes", broker="1")
        self.calls: list[tuple[AuditedCall, str]] = []
        """With the reason of a denial; empty: allowed."""

    def allowed(self, call: AuditedCall) -> None:
        self.calls.append((call, ""))
        super().allowed(call)

    def denied(self, call: AuditedCall, reason: str) -> None:
        self.calls.append((call, reason))
        super().denied(call, reason)


class Site:
    def __init__(self, directory: Path) -> None:
        secret = new_secret()
        write_private(directory / "key", secret)
        self.policies = SecurityPolicies(MemoryStore())
        verifier = TokenVerifier([TokenIssuer("tests", secret_file=directory / "key")])
        rules = Rules(
            Authorizer(self.policies.policies, [Principal("user", "root")]),
            self.policies,
            verifier,
            "test",
            allows_anonymous=False,
            has_certificates=False,
            delegations=Delegations(SECRET.verify, self._is_delegated),
        )
        self.guard = guard_of(1, rules)
        self.guard.audit = self.told = Told()
        self._secret = secret
        self.claims = {("user:ann", "copy", 7)}
        """By which pipelines of whom are held."""

    def _is_delegated(self, principal: str, pipeline: str, claim: int) -> bool:
        return (principal, pipeline, claim) in self.claims

    def delegated(self, pipeline: str = "copy", claim: int = 7) -> Context:
        """What a runner shows that acts for Ann."""
        token = issued(SECRET.mac, Delegation(ANN, pipeline, claim))
        return Context(("authorization", f"Bearer {token}"))

    def bind(self, role: str, resource: Resource) -> None:
        self.policies.policies.grants.setdefault(ANN, set()).add(Grant(role, resource))
        self.policies.policies.changed()

    def context(self, name: str) -> Context:
        token = create_token("tests", Principal("user", name), 60, self._secret)
        return Context(("authorization", f"Bearer {token}"))

    async def call(self, method: str, request: Any, context: Context) -> Any:
        return await self.guard.unary(method, who, raise_it)(request, context)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def test_the_handler_knows_who_calls(site: Site) -> None:
    site.bind("producer", Resource(GrantScope.TOPIC, "/sales/orders"))
    assert await site.call(LOOK_UP, ORDERS, site.context("ann")) == (ANN, 0)
    assert site.told.calls == []


async def test_a_method_without_a_row_is_denied(site: Site) -> None:
    """Also to those who may do everything that there is."""
    for name in ("ann", "root"):
        with pytest.raises(PermissionDenied, match="not in the table"):
            await site.call("/sava.streams.Streams/New", ORDERS, site.context(name))


async def test_denials_and_changes_are_told(site: Site) -> None:
    request = topics_admin_pb2.DeleteTopicRequest(name="/sales/orders")
    with pytest.raises(PermissionDenied):
        await site.call(DELETE, request, site.context("ann"))
    await site.call(DELETE, request, site.context("root"))
    with pytest.raises(Unauthenticated):
        await site.call(DELETE, request, Context())
    (denied, reason), (allowed, no_reason), (unknown, _) = site.told.calls
    assert (denied.principal, denied.method, denied.resource) == (ANN, DELETE, "topic /sales/orders")
    assert (denied.peer, denied.permission) == ("ipv4:10.0.0.7:1234", "manage-topic")
    assert denied.credential == "token"
    assert denied.token_id
    assert "user:ann has no permission manage-topic" in reason
    assert (allowed.principal.name, allowed.is_change, no_reason) == ("root", True, "")
    assert (unknown.principal, unknown.credential) == (principal.ANONYMOUS, "none")


async def test_a_call_keeps_the_id_that_its_caller_gave(site: Site) -> None:
    context = Context(*site.context("ann").invocation_metadata(), ("x-request-id", "r-17"))
    with pytest.raises(PermissionDenied):
        await site.call(LOOK_UP, ORDERS, context)
    assert site.told.calls[0][0].request_id == "r-17"


async def test_what_a_handler_denies_is_told_once(site: Site) -> None:
    """The guard has told what it denied itself: the same error passes by once more when the call ends."""
    site.bind("producer", Resource(GrantScope.CLUSTER, ""))
    owned = OwnedByAnother("the producer name p of topic /sales/orders", "user:bob", ANN, "use another")

    async def handler(request: Any, context: Any) -> None:
        site.guard.refused(MessageInvalid("no denial"))
        site.guard.refused(owned)
        site.guard.refused(owned)

    await site.guard.unary(LOOK_UP, handler, raise_it)(ORDERS, site.context("ann"))
    ((call, reason),) = site.told.calls
    assert (call.principal, call.method) == (ANN, LOOK_UP)
    assert "belongs to user:bob" in reason


async def test_a_flood_of_denials_does_not_fill_the_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(1000):
            with pytest.raises(PermissionDenied):
                await site.call(LOOK_UP, ORDERS, site.context("ann"))
    assert EACH_SECOND <= len(caplog.records) <= 40 * EACH_SECOND
    assert site.guard.denials == site.told.denials == 1000


async def test_without_an_audit_the_log_has_a_few_denials(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.guard.audit = None
    with caplog.at_level(logging.WARNING, logger=guards.__name__):
        for _ in range(1000):
            with pytest.raises(PermissionDenied):
                await site.call(LOOK_UP, ORDERS, site.context("ann"))
    assert guards.DENIALS_PER_S <= len(caplog.records) <= 20 * guards.DENIALS_PER_S


async def test_another_broker_says_whose_call_it_is(site: Site) -> None:
    """That broker has told of it already, if it is to be told of."""
    site.bind("admin", Resource(GrantScope.CLUSTER, ""))
    request = topics_admin_pb2.DeleteTopicRequest(name="/sales/orders")
    header = identity(2).pass_on(DELETE, calls.Call(ANN))
    assert await site.call(DELETE, request, Context(header)) == (ANN, 2)
    assert site.told.calls == []
    own = identity(2).own(DELETE)
    assert await site.call(DELETE, request, Context(own)) == (Principal("broker", "2"), 2)


async def test_the_handler_knows_whether_the_caller_manages_the_topic(site: Site) -> None:
    """What others own is then open to the caller (``OwnerRules``)."""

    async def is_admin(request: Any, context: Any) -> bool:
        return principal.is_admin.get()

    guarded = site.guard.unary(LOOK_UP, is_admin, raise_it)
    site.bind("producer", Resource(GrantScope.TOPIC, "/sales/orders"))
    assert await guarded(ORDERS, site.context("ann")) is False
    assert await guarded(ORDERS, site.context("root")) is True
    assert await guarded(ORDERS, site.context("ann")) is False
    site.bind("operator", Resource(GrantScope.NAMESPACE, "sales"))
    assert await guarded(ORDERS, site.context("ann")) is True


async def test_a_runner_acts_for_the_creator_while_it_holds_the_claim(site: Site) -> None:
    site.bind("producer", Resource(GrantScope.TOPIC, "/sales/orders"))
    assert await site.call(LOOK_UP, ORDERS, site.delegated()) == (ANN, 0)
    with pytest.raises(Unauthenticated, match="claim"):
        await site.call(LOOK_UP, ORDERS, site.delegated(claim=8))
    site.claims.clear()
    with pytest.raises(Unauthenticated, match="claim"):
        await site.call(LOOK_UP, ORDERS, site.delegated())


async def test_a_delegation_administers_nothing(site: Site) -> None:
    """However much the creator of the pipeline may do."""
    site.bind("admin", Resource(GrantScope.CLUSTER, ""))
    request = topics_admin_pb2.DeleteTopicRequest(name="/sales/orders")
    assert await site.call(DELETE, request, site.context("ann")) == (ANN, 0)
    with pytest.raises(PermissionDenied):
        await site.call(DELETE, request, site.delegated())
    passed_on = identity(2).pass_on(DELETE, calls.Call(ANN, calls.Credential(calls.DELEGATION, "copy/7")))
    with pytest.raises(PermissionDenied):
        await site.call(DELETE, request, Context(passed_on))


async def test_a_stream_ends_with_the_claim_that_opened_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sava.peers.guard.CLAIM_LOOK_S", 0.01)
    site.bind("reader", Resource(GrantScope.TOPIC, "/sales/orders"))
    begun = asyncio.Event()

    async def endless(request: Any, context: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    read = "/sava.streams.Streams/Read"
    guarded = site.guard.server_stream(read, endless, raise_it)
    stream = asyncio.ensure_future(guarded(streams_pb2.ReadRequest(topic="/sales/orders"), site.delegated()))
    await begun.wait()
    site.claims.clear()
    with pytest.raises(Unauthenticated, match="claim"):
        async with asyncio.timeout(30):
            await stream


async def test_without_roles_every_caller_may_do_everything() -> None:
    """And a header that no broker has made is not looked at."""
    guarded: Any = guard_of(1).unary(LOOK_UP, who, raise_it)

    async def call(*metadata: tuple[str, str]) -> Any:
        """As gRPC does: each call in a task of its own."""
        return await asyncio.create_task(guarded(ORDERS, Context(*metadata)))

    assert await call() == (principal.ANONYMOUS, 0)
    name, header = identity(2).pass_on(LOOK_UP, calls.EVERYTHING)
    assert await call((name, header)) == (principal.ANONYMOUS, 2)
    for bad in ("1", header[:-2], header.upper(), f"x{header}", "x" * 10_000, ".", "\u00e9.00"):
        assert await call((name, bad)) == (principal.ANONYMOUS, 0)


async def test_figures_that_were_refused_are_told(site: Site) -> None:
    token = create_token("tests", ANN, 60, site._secret)
    with pytest.raises(Unauthenticated):
        await site.guard.check_metrics("")
    with pytest.raises(PermissionDenied):
        await site.guard.check_metrics(f"Bearer {token}")
    first, second = (call for call, _ in site.told.calls)
    assert (first.principal, first.method) == (principal.ANONYMOUS, "/metrics")
    assert (second.principal, second.method) == (ANN, "/metrics")
