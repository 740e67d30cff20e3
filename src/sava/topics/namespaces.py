"""Namespaces: where topics live, and the policy that holds for those without one of their own.

A namespace exists when it has a policy record, which may be empty. Creating a topic is conditional on that
record, so a namespace whose record is gone gets no new topics:

    delete   looks: no topics                     create   looks: the namespace is there
    delete   removes the record, looks again ◀─── create   adds a topic just before
    delete   finds the topic, puts the record back: refused

Looking once, before, would leave a topic in a namespace that does not exist.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from typing import Final

from sava.metadata.commands import Delete, DeletePrefix, Put
from sava.metadata.records import absent, unchanged
from sava.metadata.store import MetadataStore
from sava.topics import specs
from sava.topics.errors import (
    NamespaceExists,
    NamespaceNotEmpty,
    NamespaceUnknown,
    RegistryBusy,
)
from sava.topics.names import check_name
from sava.topics.specs import NamespacePolicy

PAGE: Final = 1000
ATTEMPTS: Final = 16


class Namespaces:
    """Holds nothing between calls."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def create(self, namespace: str, policy: NamespacePolicy = NamespacePolicy()) -> None:  # noqa: B008 (frozen)
        """Raises NamespaceExists, InvalidName."""
        if not await self._add(namespace, policy):
            raise NamespaceExists(f"namespace {namespace} exists already")

    async def ensure(self, namespaces: Iterable[str]) -> None:
        """Create those that are missing. A policy that somebody has set stays."""
        for namespace in namespaces:
            await self._add(namespace, NamespacePolicy())

    async def _add(self, namespace: str, policy: NamespacePolicy) -> bool:
        """Unless it is there. What an earlier one of the same name may have left is not the new one's."""
        key = specs.namespace_key(check_name(namespace, "namespace"))
        operations = (DeletePrefix(specs.namespace_prefix(namespace)), Put(key, specs.encode(policy)))
        return (await self._store.txn((absent(key),), operations)).succeeded

    async def delete(self, namespace: str) -> None:
        """Raises NamespaceUnknown, NamespaceNotEmpty."""
        key = specs.namespace_key(check_name(namespace, "namespace"))
        removed = await self._remove_record(namespace, key)
        try:
            await self._check_empty(namespace)
        except NamespaceNotEmpty:
            await self._store.txn((absent(key),), (Put(key, removed),))
            raise
        await self._store.txn((absent(key),), (DeletePrefix(specs.namespace_prefix(namespace)),))

    async def _remove_record(self, namespace: str, key: str) -> bytes:
        """If there are no topics. What it was."""
        for _ in range(ATTEMPTS):
            kv = await self._store.get(key)
            if kv is None:
                raise NamespaceUnknown(namespace)
            await self._check_empty(namespace)
            if (await self._store.txn((unchanged(key, kv.mod_revision),), (Delete(key),))).succeeded:
                return kv.value
        raise RegistryBusy(f"namespace {namespace} changed under {ATTEMPTS} attempts to delete it")

    async def _check_empty(self, namespace: str) -> None:
        found = await self._store.range(specs.namespace_topics_prefix(namespace), limit=1)
        if found.kvs:
            raise NamespaceNotEmpty(f"namespace {namespace} has topics; delete them first")

    async def list(self) -> list[str]:
        found: builtins.list[str] = []
        after, more = "", True
        while more:
            page = await self._store.range(specs.NAMESPACES, limit=PAGE, start_after=after)
            more = page.more
            for kv in page.kvs:
                after = kv.key
                if (namespace := specs.namespace_of_key(kv.key)) is not None:
                    found.append(namespace)
        return found

    async def policy(self, namespace: str) -> NamespacePolicy:
        """What was set for it. Raises NamespaceUnknown."""
        kv = await self._store.get(specs.namespace_key(namespace))
        if kv is None:
            raise NamespaceUnknown(namespace)
        return specs.decode(kv, NamespacePolicy)

    async def change_policy(
        self, namespace: str, change: Callable[[NamespacePolicy], NamespacePolicy]
    ) -> None:
        """Takes effect at once, on every broker. Two who change different limits at the same time both have
        their way. Raises NamespaceUnknown."""
        key = specs.namespace_key(check_name(namespace, "namespace"))
        for _ in range(ATTEMPTS):
            kv = await self._store.get(key)
            if kv is None:
                raise NamespaceUnknown(namespace)
            put = Put(key, specs.encode(change(specs.decode(kv, NamespacePolicy))))
            if (await self._store.txn((unchanged(key, kv.mod_revision),), (put,))).succeeded:
                return
        raise RegistryBusy(f"namespace {namespace} changed under {ATTEMPTS} attempts to change its policy")
