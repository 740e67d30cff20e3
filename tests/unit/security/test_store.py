"""Records of roles, bindings and revocations: how they change, and how a broker's copy follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sava.security.permissions import Authorizer, GrantScope, Permission, Resource
from sava.security.principal import Principal
from sava.security.store import (
    BINDING_KEYS,
    ROLE_KEYS,
    BindingRecord,
    BindingUnknown,
    BuiltInRole,
    QuotaRecord,
    RevocationRecord,
    RoleInUse,
    RoleUnknown,
    SecurityPolicies,
    SecurityPolicyInvalid,
    is_reserved,
)
from sava.supervisor import Supervisor
from tests.support.memory_store import MemoryStore
from tests.support.waiting import PATIENCE_S

ANN, ROOT = Principal("user", "ann"), Principal("user", "root")
ORDERS = Resource(GrantScope.TOPIC, "/sales/orders")
BINDING = BindingRecord(principal="ann", role="producer", scope="topic", resource="/sales/orders")


class Places:
    """Two brokers over one store."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.first, self.second = SecurityPolicies(store), SecurityPolicies(store)
        self.changed = asyncio.Event()
        self.second.listen(self.changed.set)

    async def follows(self) -> None:
        """Until the second broker has heard of a change."""
        async with asyncio.timeout(PATIENCE_S):
            await self.changed.wait()
        self.changed.clear()

    def may(
        self, permission: Permission = Permission.PRODUCE, resource: Resource = ORDERS
    ) -> tuple[bool, bool]:
        first, second = (
            Authorizer(each.policies).allows(ANN, (permission,), resource)
            for each in (self.first, self.second)
        )
        return first, second


@pytest.fixture
async def places() -> AsyncIterator[Places]:
    found = Places(MemoryStore())
    supervisor = Supervisor()
    for each in (found.first, found.second):
        each.start(supervisor)
    await found.follows()
    yield found
    for each in (found.first, found.second):
        await each.close()


async def test_a_binding_is_made_once_and_holds_on_every_broker(places: Places) -> None:
    made = await places.first.create_binding(BINDING, by=ROOT)
    await places.follows()
    assert places.may() == (True, True)
    assert (made.principal, made.created_by) == ("user:ann", "user:root")
    revision = places.store.local.revision
    assert await places.second.create_binding(BINDING, by=ANN) == made
    assert places.store.local.revision == revision
    await places.second.delete_binding(made.id)
    assert places.may()[1] is False
    with pytest.raises(BindingUnknown):
        await places.first.delete_binding(made.id)
    with pytest.raises(BindingUnknown):
        await places.first.delete_binding("../roles/x")


async def test_two_bindings_that_grant_the_same_are_two(places: Places) -> None:
    ours = await places.first.create_binding(BINDING, by=ROOT)
    danubes = BindingRecord(
        principal="ann", role="producer", scope="topic", resource="/sales/orders", name="danubes"
    )
    await places.first.create_binding(danubes, by=ROOT)
    await places.first.delete_binding(ours.id)
    assert places.may()[0] is True


async def test_a_role_changes_and_goes_when_no_binding_gives_it(places: Places) -> None:
    shop = BindingRecord(principal="ann", role="shop", scope="namespace", resource="sales")
    with pytest.raises(RoleUnknown, match="there are admin, consumer"):
        await places.first.create_binding(shop, by=ROOT)
    await places.first.set_role("shop", ("produce",), by=ROOT)
    made = await places.first.create_binding(shop, by=ROOT)
    assert places.may()[0]
    with pytest.raises(RoleInUse, match=made.id):
        await places.first.delete_role("shop")
    await places.first.set_role("shop", ("lookup",), by=ROOT)
    assert not places.may()[0]
    await places.first.delete_binding(made.id)
    await places.first.delete_role("shop")
    with pytest.raises(RoleUnknown):
        await places.first.delete_role("shop")


@pytest.mark.parametrize("name", ["admin", "producer"])
async def test_built_in_roles_stay(places: Places, name: str) -> None:
    with pytest.raises(BuiltInRole):
        await places.first.set_role(name, (), by=ROOT)
    with pytest.raises(BuiltInRole):
        await places.first.delete_role(name)


@pytest.mark.parametrize(
    ("scope", "resource"),
    [
        ("cluster", "x"),
        ("namespace", ""),
        ("namespace", "/sales"),
        ("namespace", "sa*"),
        ("topic", ""),
        ("topic", "orders"),
        ("topic", "/sa*"),
        ("topic", "/sales/o*s"),
        ("topic", "/sales/orders-part-3"),
        ("topic", "/sales/orders\n"),
        ("planet", ""),
    ],
)
async def test_bindings_that_cannot_be(places: Places, scope: str, resource: str) -> None:
    wanted = BindingRecord(principal="ann", role="producer", scope=scope, resource=resource)
    with pytest.raises(SecurityPolicyInvalid):
        await places.first.create_binding(wanted, by=ROOT)


async def test_what_cannot_be_read_gives_nothing(places: Places) -> None:
    """Also a role of a newer version: the permissions that this one knows count."""
    await places.store.put(f"{ROLE_KEYS}newer", b'{"permissions":["produce","fly"]}')
    await places.store.put(f"{ROLE_KEYS}admin", b'{"permissions":[]}')
    await places.store.put(f"{BINDING_KEYS}bad", b"{")
    binding = b'{"principal":"user:ann","role":"newer","scope":"namespace","resource":"sales"}'
    await places.store.put(f"{BINDING_KEYS}good", binding)
    async with asyncio.timeout(PATIENCE_S):
        while not places.may()[1]:
            await places.follows()
    assert "bad" not in places.second.bindings
    assert Permission.META in places.second.policies.roles["admin"]


async def test_a_revocation_is_known_until_it_is_taken_back(places: Places) -> None:
    strange = "a token/with\u00e4 strange id"
    await places.first.revoke(RevocationRecord(kind="token", id=strange, reason="stolen"), by=ROOT)
    await places.follows()
    assert places.second.is_revoked("token", strange)
    assert not places.second.is_revoked("certificate", strange)
    await places.first.delete_revocation("token", strange)
    assert not places.first.is_revoked("token", strange)
    with pytest.raises(SecurityPolicyInvalid):
        await places.first.revoke(RevocationRecord(kind="user", id="ann"), by=ROOT)
    old = RevocationRecord(kind="token", id="old", until_ms=1)
    await places.first.revoke(old, by=ROOT)
    await places.first.revoke(RevocationRecord(kind="token", id="new"), by=ROOT)
    assert not places.first.is_revoked("token", "old")
    assert places.first.is_revoked("token", "new")


async def test_quotas_are_of_a_principal_or_of_all(places: Places) -> None:
    for principal in ("ann", "*"):
        await places.first.set_quota(QuotaRecord(principal=principal, max_topics=3))
    assert set(places.first.quotas) == {"user:ann", "*"}
    await places.first.delete_quota("user:ann")
    assert set(places.first.quotas) == {"*"}


@pytest.mark.parametrize(
    ("text", "is_range", "reserved"),
    [
        ("/security/roles/x", False, True),
        ("/security/", True, True),
        ("/security/bindings/", True, True),
        ("/", True, True),
        ("", True, True),
        ("/security", True, True),
        ("/securityx/", True, False),
        ("/topics/", True, False),
        ("/", False, False),
    ],
)
def test_which_keys_meta_must_not_reach(text: str, is_range: bool, reserved: bool) -> None:
    assert is_reserved(text, is_range=is_range) is reserved
