"""Namespaces come, have a policy, and go when they are empty."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from sava.metadata.records import RecordBusy
from sava.metadata.store import RangeResult
from sava.topics.errors import (
    NamespaceExists,
    NamespaceNotEmpty,
    NamespaceUnknown,
)
from sava.topics.names import InvalidName, TopicName
from sava.topics.registry import Namespaces, Registry
from sava.topics.specs import NamespacePolicy
from tests.support.memory_store import MemoryStore


@pytest.fixture
def namespaces() -> Namespaces:
    return Namespaces(MemoryStore())


async def test_a_namespace_is_created_once_and_listed(namespaces: Namespaces) -> None:
    await namespaces.create("shop", NamespacePolicy(max_publish_rate=10))
    await namespaces.ensure(("default", "shop"))
    assert await namespaces.list() == ["default", "shop"]
    assert (await namespaces.policy("shop")).max_publish_rate == 10
    with pytest.raises(NamespaceExists):
        await namespaces.create("shop")
    with pytest.raises(InvalidName):
        await namespaces.create("a/b")


async def test_a_policy_needs_its_namespace(namespaces: Namespaces) -> None:
    with pytest.raises(NamespaceUnknown):
        await namespaces.change_policy("shop", lambda _: NamespacePolicy())
    with pytest.raises(NamespaceUnknown):
        await namespaces.policy("shop")
    await namespaces.create("shop")
    await namespaces.change_policy("shop", lambda _: NamespacePolicy(retention_size_mb=3))
    assert (await namespaces.policy("shop")).retention_size_mb == 3


async def test_a_namespace_with_topics_stays() -> None:
    store = MemoryStore()
    namespaces, registry = Namespaces(store), Registry(store)
    await namespaces.ensure(("shop", "sho"))
    await registry.create(TopicName("shop", "orders"), reliable=True)
    with pytest.raises(NamespaceNotEmpty):
        await namespaces.delete("shop")
    await namespaces.delete("sho")
    assert await namespaces.list() == ["shop"]
    with pytest.raises(NamespaceUnknown):
        await namespaces.delete("sho")


class _SlowLook(MemoryStore):
    """The first look at a namespace's topics is followed by what somebody else does."""

    looks = 0

    async def range(self, prefix: str, **options: object) -> RangeResult:
        found = await super().range(prefix, **options)  # type: ignore[arg-type]  # only forwards
        if prefix == "/topics/shop/":
            self.looks += 1
            if self.looks == 1:
                await Registry(self).create(TopicName("shop", "orders"), reliable=True)
        return found


async def test_a_topic_that_comes_while_its_namespace_goes_keeps_it() -> None:
    store = _SlowLook()
    namespaces = Namespaces(store)
    await namespaces.create("shop", NamespacePolicy(max_publish_rate=10))
    with pytest.raises(NamespaceNotEmpty):
        await namespaces.delete("shop")
    assert store.looks == 2
    assert (await namespaces.policy("shop")).max_publish_rate == 10


async def test_two_who_change_different_limits_at_once_both_have_their_way(namespaces: Namespaces) -> None:
    await namespaces.create("shop")

    await asyncio.gather(
        namespaces.change_policy("shop", lambda old: msgspec.structs.replace(old, max_message_size=1)),
        namespaces.change_policy("shop", lambda old: msgspec.structs.replace(old, max_publish_rate=2)),
    )

    assert await namespaces.policy("shop") == NamespacePolicy(max_message_size=1, max_publish_rate=2)


class _Restless(MemoryStore):
    """After each look at a namespace's topics somebody sets its policy."""

    async def range(self, prefix: str, **options: object) -> RangeResult:
        found = await super().range(prefix, **options)  # type: ignore[arg-type]  # only forwards
        await Namespaces(self).change_policy("shop", lambda policy: policy)
        return found


async def test_a_namespace_whose_policy_never_rests_is_not_deleted_for_ever() -> None:
    """It was tried again from within itself, until Python had enough of it."""
    namespaces = Namespaces(_Restless())
    await namespaces.create("shop")
    with pytest.raises(RecordBusy):
        await namespaces.delete("shop")
    assert (await namespaces.policy("shop")) == NamespacePolicy()
