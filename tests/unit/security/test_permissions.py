"""What bindings allow, decided without a broker."""

from __future__ import annotations

import pytest

from sava.security.permissions import (
    CLUSTER,
    ROLES,
    Authorizer,
    Grant,
    GrantScope,
    Permission,
    PermissionDenied,
    Policies,
    Resource,
    subject_resource,
)
from sava.security.principal import Principal

ANN, BOB, ROOT = Principal("user", "ann"), Principal("user", "bob"), Principal("user", "root")
PRODUCE, LOOKUP = (Permission.PRODUCE,), (Permission.LOOKUP,)


def topic(name: str) -> Resource:
    return Resource(GrantScope.TOPIC, name)


def namespace(name: str) -> Resource:
    return Resource(GrantScope.NAMESPACE, name)


def authorizer(*grants: tuple[str, Resource]) -> Authorizer:
    """As ann's bindings have it."""
    policies = Policies()
    policies.grants[ANN] = {Grant(role, resource) for role, resource in grants}
    return Authorizer(policies, [ROOT])


def test_what_no_binding_allows_is_denied() -> None:
    found = authorizer()
    for permission in Permission:
        for resource in (CLUSTER, namespace("sales"), topic("/sales/orders")):
            assert not found.allows(ANN, (permission,), resource)
            assert found.allows(ROOT, (permission,), resource)
    assert not found.allows_within(ANN, LOOKUP, "")


@pytest.mark.parametrize(
    ("bound", "covered", "not_covered"),
    [
        (CLUSTER, ["/sales/orders", "/a/b"], []),
        (namespace("sales"), ["/sales/orders"], ["/sales2/orders", "/sale/orders", "/a/sales"]),
        (topic("/sales/orders"), ["/sales/orders"], ["/sales/orders2", "/sales/order", "/other/orders"]),
        (topic("/sales/or*"), ["/sales/orders", "/sales/or"], ["/sales/bills", "/sales/o", "/s/orders"]),
        (topic("/sales/*"), ["/sales/orders"], ["/sales2/orders"]),
    ],
)
def test_what_a_binding_covers(bound: Resource, covered: list[str], not_covered: list[str]) -> None:
    found = authorizer(("producer", bound))
    for name in covered:
        assert found.allows(ANN, PRODUCE, topic(name)), name
        assert not found.allows(ANN, (Permission.CONSUME,), topic(name))
        assert not found.allows(BOB, PRODUCE, topic(name))
    for name in not_covered:
        assert not found.allows(ANN, PRODUCE, topic(name)), name
    assert found.allows(ANN, PRODUCE, CLUSTER) is (bound == CLUSTER)


def test_an_administrator_of_a_namespace_is_none_of_the_cluster() -> None:
    found = authorizer(("admin", namespace("sales")))
    assert not any(found.allows(ANN, (permission,), CLUSTER) for permission in Permission)
    assert found.allows(ANN, (Permission.MANAGE_NAMESPACE,), namespace("sales"))
    assert not found.allows(ANN, (Permission.MANAGE_NAMESPACE,), namespace("other"))


def test_the_brokers_own_topics_need_the_administrator_of_the_cluster() -> None:
    audit = topic("/system/audit")
    for role in ROLES:
        for bound in (CLUSTER, namespace("system"), audit, topic("/system/*")):
            found = authorizer((role, bound))
            may = role == "admin" and bound == CLUSTER
            assert found.allows(ANN, (Permission.READ, Permission.CONSUME), audit) is may
            assert found.allows(ANN, LOOKUP, namespace("system")) is may
            assert found.allows_within(ANN, LOOKUP, "system") is may


def test_within_a_namespace_one_topic_is_enough() -> None:
    found = authorizer(("producer", topic("/sales/or*")))
    assert found.allows_within(ANN, LOOKUP, "sales")
    assert found.allows_within(ANN, LOOKUP, "")
    for namespace_name in ("other", "sale", "sales2", "s"):
        assert not found.allows_within(ANN, LOOKUP, namespace_name)
    assert not found.allows_within(ANN, (Permission.CONSUME,), "sales")


def test_a_change_of_roles_or_bindings_is_seen_at_once() -> None:
    policies = Policies()
    found = Authorizer(policies)
    assert not found.allows(ANN, PRODUCE, topic("/sales/orders"))
    policies.roles["shop"] = frozenset(PRODUCE)
    policies.grants[ANN] = {Grant("shop", namespace("sales")), Grant("gone", CLUSTER)}
    policies.changed()
    assert found.allows(ANN, PRODUCE, topic("/sales/orders"))
    policies.roles["shop"] = frozenset()
    policies.changed()
    assert not found.allows(ANN, PRODUCE, topic("/sales/orders"))


def test_a_denial_says_what_is_missing_and_how_it_is_granted() -> None:
    found = authorizer()
    with pytest.raises(PermissionDenied) as caught:
        found.check(ANN, PRODUCE, topic("/sales/orders"))
    assert str(caught.value) == (
        "user:ann has no permission produce on topic /sales/orders; an administrator grants it with "
        "`sava auth bindings create user:ann producer --topic /sales/orders`"
    )
    with pytest.raises(PermissionDenied, match=r"on the cluster.*create user:ann monitoring`"):
        found.check(ANN, (Permission.CLUSTER_READ,), CLUSTER)
    assert found.reason(ROOT, PRODUCE, CLUSTER) == "user:root is a super admin by the configuration"


@pytest.mark.parametrize(
    ("subject", "resource"),
    [
        ("sales.orders", namespace("sales")),
        ("sales.eu.orders", namespace("sales")),
        ("orders", CLUSTER),
        (".orders", CLUSTER),
        ("orders.", namespace("orders")),
    ],
)
def test_a_subject_is_in_the_namespace_that_its_name_begins_with(subject: str, resource: Resource) -> None:
    assert subject_resource(subject) == resource
