"""Ownership: which broker serves a topic, and the epoch that fences whoever served it before.

One record for each topic, changed by compare-and-swap only. Whoever begins to serve a topic raises the epoch,
a restart of the same broker included: what a former life still has under way (a cursor write that the network
delayed) carries the old epoch and is refused. The record's revision is remembered, and every later write of
the owner is conditional on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sava.broker import specs
from sava.broker.conditions import unchanged
from sava.broker.errors import NotOwner, RegistryBusy
from sava.broker.names import TopicName
from sava.broker.registry import Located, Registry
from sava.broker.specs import Ownership
from sava.metadata.commands import Compare, Operation, Put, TxnResult
from sava.metadata.store import MetadataStore

NOBODY: Final = 0
ATTEMPTS: Final = 16


@dataclass(frozen=True, slots=True)
class Tenure:
    """This broker's hold on a topic. Ends when anybody changes the record."""

    located: Located
    epoch: int
    holds: Compare
    """The condition that it has not ended."""
    store: MetadataStore
    lost: Callable[[TopicName], None]
    """Told when it turns out to have ended."""

    @property
    def name(self) -> TopicName:
        return self.located.name

    async def write(self, operations: Sequence[Operation], *conditions: Compare) -> TxnResult:
        """One transaction as the owner. Without effect if a condition does not hold; raises NotOwner if the
        tenure has ended."""
        result = await self.store.txn((self.holds, *conditions), operations)
        if not result.succeeded:
            await self.check()
        return result

    async def check(self) -> None:
        """Raise NotOwner if it has ended."""
        kv = await self.store.get(self.holds.key)
        if kv is None or kv.mod_revision != self.holds.operand:
            self.lost(self.name)
            raise NotOwner(self.name, specs.decode(kv, Ownership).owner if kv is not None else NOBODY)


async def take(
    registry: Registry,
    store: MetadataStore,
    name: TopicName,
    broker: int,
    *,
    lost: Callable[[TopicName], None] = lambda name: None,
) -> Tenure:
    """Become the owner under the next epoch. Raises TopicUnknown, NotOwner."""
    key = specs.ownership_key(name)
    for _ in range(ATTEMPTS):
        located = await registry.locate(name)
        kv = await store.get(key)
        held = specs.decode(kv, Ownership) if kv is not None else Ownership(owner=NOBODY, epoch=0)
        if held.owner not in (NOBODY, broker):
            raise NotOwner(name, held.owner)
        ours = Ownership(owner=broker, epoch=held.epoch + 1)
        # The topic's record too: an ownership written behind a deletion would be found by the next topic of
        # this name.
        compare = (unchanged(key, kv.mod_revision if kv is not None else 0), located.unchanged)
        result = await store.txn(compare, (Put(key, specs.encode(ours)),))
        if result.succeeded:
            return Tenure(located, ours.epoch, unchanged(key, result.revision), store, lost)
    raise RegistryBusy(f"topic {name} changed under {ATTEMPTS} attempts to own it")


def owner_of(store: MetadataStore, name: TopicName) -> int:
    """As this node knows it; 0 if nobody is."""
    kv = store.local.get(specs.ownership_key(name))
    return specs.decode(kv, Ownership).owner if kv is not None else NOBODY
