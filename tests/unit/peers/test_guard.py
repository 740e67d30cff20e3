"""The guard of one broker: what it refuses, what it tells, and what it costs nothing for."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from sava.errors import SavaError
from sava.peers import guard as guards
from sava.peers.guard import AuditEvent, Rules
from sava.proto import streams_pb2, topics_admin_pb2
from sava.security import calls, principal
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
from tests.support.guards import guard_of, identity
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
        )
        self.guard = guard_of(1, rules)
        self.told: list[AuditEvent] = []
        self.guard.audit = self.told.append
        self._secret = secret

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
    assert denied[:5] == (ANN, "ipv4:10.0.0.7:1234", DELETE, ("topic /sales/orders",), False)
    assert "user:ann has no permission manage-topic" in denied.reason
    assert (allowed.principal.name, allowed.is_allowed, allowed.reason) == ("root", True, "")
    assert (unknown.principal, unknown.is_allowed) == (principal.ANONYMOUS, False)


async def test_a_flood_of_denials_does_not_fill_the_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=guards.__name__):
        for _ in range(1000):
            with pytest.raises(PermissionDenied):
                await site.call(LOOK_UP, ORDERS, site.context("ann"))
    assert guards.DENIALS_PER_S <= len(caplog.records) <= 20 * guards.DENIALS_PER_S
    assert site.guard.denials == len(site.told) == 1000


async def test_another_broker_says_whose_call_it_is(site: Site) -> None:
    """That broker has told of it already, if it is to be told of."""
    site.bind("admin", Resource(GrantScope.CLUSTER, ""))
    request = topics_admin_pb2.DeleteTopicRequest(name="/sales/orders")
    header = identity(2).pass_on(DELETE, calls.Call(ANN))
    assert await site.call(DELETE, request, Context(header)) == (ANN, 2)
    assert site.told == []
    own = identity(2).own(DELETE)
    assert await site.call(DELETE, request, Context(own)) == (Principal("broker", "2"), 2)


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
