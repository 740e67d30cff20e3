"""The guard of one broker: what it refuses, what it tells, and what it costs nothing for."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from sava.errors import SavaError
from sava.peers.guard import Delegations, Rules
from sava.proto import streams_pb2, topics_admin_pb2
from sava.security import calls, principal
from sava.security.audit import Audit, AuditedCall
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


class RecordingAudit(Audit):
    """Keeps what the guard tells it, of changes and denials."""

    def __init__(self) -> None:
        super().__init__("changes", broker="1")
        self.told: list[tuple[AuditedCall, str]] = []
        """Each with why it was denied; empty: it was allowed."""

    def allowed(self, call: AuditedCall) -> None:
        self.told.append((call, ""))

    def denied(self, call: AuditedCall, reason: str) -> None:
        self.told.append((call, reason))


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
        self.guard.audit = audit = RecordingAudit()
        self.told = audit.told
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
    assert site.told == []


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
    denied, allowed, unknown = site.told
    call, reason = denied
    assert (call.principal, call.peer, call.method) == (ANN, "ipv4:10.0.0.7:1234", DELETE)
    assert "/sales/orders" in call.resource
    assert "user:ann has no permission manage-topic" in reason
    assert (allowed[0].principal.name, allowed[0].is_change, allowed[1]) == ("root", True, "")
    assert unknown[0].principal == principal.ANONYMOUS
    assert unknown[1]


async def test_a_flood_of_denials_does_not_fill_the_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.guard.audit = audit = Audit("denied", broker="1")
    with caplog.at_level(logging.INFO, logger="sava.audit"):
        for _ in range(1000):
            with pytest.raises(PermissionDenied):
                await site.call(LOOK_UP, ORDERS, site.context("ann"))
    assert 0 < len(caplog.records) <= 200
    assert site.guard.denials == audit.denials == 1000


async def test_another_broker_says_whose_call_it_is(site: Site) -> None:
    """That broker has told of it already, if it is to be told of."""
    site.bind("admin", Resource(GrantScope.CLUSTER, ""))
    request = topics_admin_pb2.DeleteTopicRequest(name="/sales/orders")
    header = identity(2).pass_on(DELETE, calls.Call(ANN))
    assert await site.call(DELETE, request, Context(header)) == (ANN, 2)
    assert site.told == []
    own = identity(2).own(DELETE)
    assert await site.call(DELETE, request, Context(own)) == (Principal("broker", "2"), 2)


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
