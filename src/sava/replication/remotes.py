"""Remotes: the clusters that this one sends to.

A remote is added by its address, and says itself who it is. Two things about that are remembered and not
taken from another cluster. Its *name* travels with messages, as the list of clusters that they have been in,
by which loops are found: two clusters of one name would each take the other's messages for its own and drop
them, so they are refused here, before anything is copied. Its *id* tells a cluster from one that was
initialised in its place, with none of what was copied before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from sava.metadata.commands import DeletePrefix
from sava.metadata.records import RecordChange, RecordStore, Versioned, absent, decode
from sava.metadata.store import LocalView, MetadataStore
from sava.replication import records
from sava.replication.matrix import There
from sava.replication.records import (
    RemoteDenied,
    RemoteInUse,
    RemoteRecord,
    RemoteRefused,
    RemoteUnknown,
    RemoteUnreachable,
)
from sava.topics.names import InvalidName, check_name

MAX_NAME_BYTES: Final = 100
"""Leaves room for what pipelines are called after it."""


class ClusterIdentity(NamedTuple):
    """Who a cluster is, by its own word."""

    cluster_name: str
    cluster_id: str
    version: str = ""


class Shape(NamedTuple):
    """What there is of a topic at a remote."""

    topic: str
    there: There
    schema_subject: str = ""


class RemoteCalls(Protocol):
    """What is asked of a remote (``sava.api.remotes``). All raise RemoteUnreachable, RemoteDenied,
    RemoteRefused."""

    async def hello(self, remote: RemoteRecord) -> ClusterIdentity: ...

    async def describe(self, name: str, remote: RemoteRecord, topics: Sequence[str]) -> list[Shape]:
        """In the order of ``topics``; ``name`` is what the remote is called here."""
        ...


class RemoteAnswer(NamedTuple):
    identity: ClusterIdentity
    round_trip_ms: float


class Remotes:
    """Holds nothing between calls. ``own`` says who this cluster is."""

    def __init__(self, store: MetadataStore, calls: RemoteCalls, own: Callable[[], ClusterIdentity]) -> None:
        self._store = store
        self._records = RecordStore(store)
        self.calls = calls
        self.own = own

    # -- knowing -----------------------------------------------------------------------------

    async def list(self) -> dict[str, RemoteRecord]:
        await self._store.get(records.REMOTES)  # from here on this node knows as much as the cluster
        return known(self._store.local)

    async def get(self, name: str) -> RemoteRecord:
        """Raises RemoteUnknown, InvalidName."""
        found = await self._records.get(records.remote_key(check_name(name, "remote")), RemoteRecord)
        if found.value is None:
            raise RemoteUnknown(name)
        return found.value

    async def ask(self, remote: RemoteRecord) -> RemoteAnswer:
        began = time.monotonic()
        identity = await self.calls.hello(remote)
        return RemoteAnswer(identity, (time.monotonic() - began) * 1000)

    # -- changing ----------------------------------------------------------------------------

    async def add(self, name: str, remote: RemoteRecord) -> RemoteRecord:
        """As it is remembered. One that is known gets the new addresses, token, files and rate.
        Raises RemoteRefused, RemoteUnreachable, RemoteDenied, InvalidName."""
        key = records.remote_key(check_name(name, "remote"))
        if len(name.encode()) > MAX_NAME_BYTES:
            raise InvalidName(f"remote name {name[:20]!a}… is longer than {MAX_NAME_BYTES} bytes")
        try:
            identity = (await self.ask(remote)).identity
        except (RemoteUnreachable, RemoteDenied, RemoteRefused) as error:
            raise type(error)(f"remote {name} was not added: {error}") from error
        self._check_names(name, identity)

        def decide(found: Versioned[RemoteRecord]) -> RecordChange[RemoteRecord]:
            _check_other(name, identity, known(self._store.local))
            since = found.value.added_ms if found.value is not None else records.now_ms()
            added = msgspec.structs.replace(
                remote, cluster_name=identity.cluster_name, cluster_id=identity.cluster_id, added_ms=since
            )
            return RecordChange(added)

        updated = await self._records.update(key, RemoteRecord, decide, what=f"remote {name}")
        assert updated.value is not None
        return updated.value

    def _check_names(self, name: str, identity: ClusterIdentity) -> None:
        own = self.own()
        if identity.cluster_id == own.cluster_id:
            raise RemoteRefused(f"remote {name}: the addresses are those of this cluster itself")
        if identity.cluster_name == own.cluster_name:
            raise RemoteRefused(
                f"remote {name}: both clusters are called {own.cluster_name}, and messages would look the "
                "same; set another cluster_name in the configuration of one of them and restart its brokers"
            )
        for cluster, where in (
            (own.cluster_name, "this cluster"),
            (identity.cluster_name, "the cluster there"),
        ):
            try:
                check_name(cluster, "cluster")
            except InvalidName as error:
                raise RemoteRefused(
                    f"remote {name}: {where} has a cluster_name that cannot travel with messages: {error}"
                ) from None

    async def remove(self, name: str, in_use: Callable[[], Sequence[str]]) -> None:
        """With what is remembered of its topics. ``in_use`` tells the policies that name it. Raises
        RemoteUnknown, RemoteInUse.

        A policy may be set between the look at the policies and the removal. It is set on the condition that
        the remote is there, so looking again afterwards finds it, and the remote is put back."""
        key, what = records.remote_key(check_name(name, "remote")), f"remote {name}"
        removed: list[RemoteRecord] = []

        def remove(found: Versioned[RemoteRecord]) -> RecordChange[RemoteRecord]:
            if found.value is None:
                raise RemoteUnknown(name)
            if scopes := in_use():
                raise RemoteInUse(name, scopes)
            removed[:] = [found.value]
            return RecordChange(None)

        await self._records.update(key, RemoteRecord, remove, what=what)
        await self._store.get(key)  # from here on this node knows what was set before the removal
        if scopes := in_use():
            back = RecordChange(removed[0])
            await self._records.update(
                key, RemoteRecord, lambda found: back if found.value is None else None, what=what
            )
            raise RemoteInUse(name, scopes)
        await self._store.txn((absent(key),), (DeletePrefix(f"{records.LINKS}{name}/"),))


def known(local: LocalView) -> dict[str, RemoteRecord]:
    """As this node knows it. Raises RecordCorrupt."""
    found = local.range(records.REMOTES).kvs
    return {kv.key.removeprefix(records.REMOTES): decode(kv, RemoteRecord) for kv in found}


def _check_other(name: str, identity: ClusterIdentity, others: dict[str, RemoteRecord]) -> None:
    """Raises RemoteRefused if the cluster is known under another name, or another under this one."""
    for other, record in others.items():
        is_same_cluster = record.cluster_id == identity.cluster_id
        if other == name and not is_same_cluster:
            raise RemoteRefused(
                f"remote {name} is another cluster (id {record.cluster_id}) than the one at these addresses "
                f"(id {identity.cluster_id}); remove it first with `sava remotes remove {name}`"
            )
        if other != name and is_same_cluster:
            raise RemoteRefused(f"remote {name}: this cluster is known already, as remote {other}")
        if other != name and record.cluster_name == identity.cluster_name:
            raise RemoteRefused(
                f"remote {name}: its cluster_name {identity.cluster_name} is also that of remote {other}, "
                "which is another cluster; set another cluster_name in the configuration of one of them"
            )
