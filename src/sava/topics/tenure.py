"""Tenure: the fencing token of a broker that serves a topic, from the moment that it takes the topic up until
another broker may have it.

Every write of the owner is conditional on the ownership record's revision, which is the one thing that a
transaction can compare. The record may be written again while the tenure lasts (the topic is to be moved: it
is *moving*, and its owner has cursors to write and a log to seal first). So a write that was refused reads
the record: the same owner under the same epoch continues with the new revision, and only another epoch is the
end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from sava.metadata.commands import Compare, Operation, Put, TxnResult
from sava.metadata.records import unchanged
from sava.metadata.store import MetadataStore
from sava.topics import ownership, specs
from sava.topics.errors import NotOwner, RegistryBusy
from sava.topics.names import TopicName
from sava.topics.registry import Located, Registry
from sava.topics.specs import Ownership, OwnershipState

ATTEMPTS: Final = 16

_HELD: Final = (OwnershipState.ASSIGNED, OwnershipState.MOVING)


class Tenure:
    """Owned by the event loop."""

    def __init__(
        self,
        located: Located,
        epoch: int,
        revision: int,
        store: MetadataStore,
        lost: Callable[[Tenure], None],
    ) -> None:
        self.located = located
        self.epoch = epoch
        self.store = store
        self._key = specs.ownership_key(located.name)
        self._revision = revision
        self._lost = lost

    @property
    def name(self) -> TopicName:
        return self.located.name

    @property
    def holds(self) -> Compare:
        """The condition that it has not ended; ask again for each write."""
        return unchanged(self._key, self._revision)

    async def write(self, operations: Sequence[Operation], *conditions: Compare) -> TxnResult:
        """One transaction as the owner. Without effect if a condition does not hold; raises NotOwner if the
        tenure has ended."""
        for _ in range(ATTEMPTS):
            compared = self.holds
            result = await self.store.txn((compared, *conditions), operations)
            if result.succeeded:
                return result
            await self.check()
            if compared == self.holds:
                return result
        raise RegistryBusy(f"topic {self.name}: its ownership changed under {ATTEMPTS} attempts to write")

    async def still_holds(self) -> bool:
        """For a caller whose write was refused: False means that the tenure is over for good, True that
        ``holds`` is the condition to try again with, if it is another one now. Raises what keeps the record
        from being read."""
        try:
            await self.check()
        except NotOwner:
            return False
        return True

    async def check(self) -> None:
        """Continue with the record as it is now. Raises NotOwner if the tenure has ended."""
        record, revision = ownership.held(await self.store.get(self._key))
        if record.epoch != self.epoch or record.state not in _HELD:
            self._lost(self)
            raise NotOwner(self.name, _server(record))
        # Answers may overtake one another; an older revision would be refused once more for nothing.
        self._revision = max(self._revision, revision)


async def take(
    registry: Registry,
    store: MetadataStore,
    name: TopicName,
    broker: int,
    *,
    incarnation: int = 0,
    claims_unassigned: bool = True,
    lost: Callable[[Tenure], None] = lambda tenure: None,
) -> Tenure:
    """Begin to serve a topic that is this broker's, under the next epoch; with ``claims_unassigned`` also one
    that no broker has. Raises TopicUnknown, NotOwner."""
    key = specs.ownership_key(name)
    for _ in range(ATTEMPTS):
        located = await registry.locate(name)
        record, revision = ownership.held(await store.get(key))
        ours = _taken(name, record, broker, incarnation, claims_unassigned)
        # The topic's record too: an ownership written behind a deletion would be found by the next topic of
        # this name.
        compare = (unchanged(key, revision), located.unchanged)
        result = await store.txn(compare, (Put(key, specs.encode(ours)),), batched=True)
        if result.succeeded:
            return Tenure(located, ours.epoch, result.revision, store, lost)
    raise RegistryBusy(f"topic {name} changed under {ATTEMPTS} attempts to own it")


def _taken(
    name: TopicName, record: Ownership, broker: int, incarnation: int, claims_unassigned: bool
) -> Ownership:
    if claims_unassigned and record.state in ownership.STEPS["assign"].sources:
        return ownership.after("assign", name, record, owner=broker, incarnation=incarnation)
    if record.owner != broker or record.state not in ownership.STEPS["take"].sources:
        raise NotOwner(name, _server(record))
    return ownership.after("take", name, record, incarnation=incarnation)


async def resume(registry: Registry, store: MetadataStore, name: TopicName, broker: int) -> Tenure:
    """The tenure of a move that a former life of this broker has not finished. It keeps its epoch, so it is
    for handing over what is there, and not for serving. Raises TopicUnknown, NotOwner."""
    located = await registry.locate(name)
    record, revision = ownership.held(await store.get(specs.ownership_key(name)))
    if record.owner != broker or record.state is not OwnershipState.MOVING:
        raise NotOwner(name, _server(record))
    return Tenure(located, record.epoch, revision, store, lambda tenure: None)


def _server(record: Ownership) -> int:
    """Who can be asked for the topic: an owner that is handing it over, or is gone, cannot."""
    return record.owner if record.state is OwnershipState.ASSIGNED else ownership.NO_OWNER
