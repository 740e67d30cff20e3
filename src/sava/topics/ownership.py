"""Ownership: which broker serves a topic. One record for each, and one table of what may become of it.

=============  =======================  ==============  ===============================================
step           from                     to              by
=============  =======================  ==============  ===============================================
``assign``     unassigned, sealed       assigned, e+1   the controller: to a broker that is there, and active
``take``       assigned, orphan         assigned, e+1   the owner, each time that it begins to serve
``move``       assigned                 moving          the controller, on request
``seal``       moving                   sealed          the owner: everything is where any broker can read it
``roll_back``  moving                   assigned, e+1   the owner, or the controller after the deadline
``give_back``  assigned, not taken up   sealed          the owner, which could not begin to serve
``orphan``     assigned, moving         orphan          the controller: the owner's registration is gone
``recover``    orphan                   sealed          the controller: the owner kept nothing to itself
``delete``     any                      deleting, e+1   the broker that deletes the topic
``release``    deleting                 deleting        the owner: no broker has it any more
=============  =======================  ==============  ===============================================

A step is a compare-and-swap on the record, so of two that are tried at once one happens, and the other is
decided again. The epoch grows whenever a broker begins to serve, a restart of the same broker included: what
a former life still has under way (a cursor write that the network delayed) carries the old epoch and is
refused.

No broker acts on the absence of a record: a topic without one is *unassigned* as long as its spec exists,
which every step compares too, and only ``delete`` leads to anything being removed. Moving, failing over and
deleting are different states here and cannot be taken for one another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from sava.errors import RetryableError
from sava.metadata.commands import Compare, KeyValue, Operation, TxnResult
from sava.metadata.records import RecordBusy, RecordChange, RecordStore, Versioned, unchanged
from sava.metadata.store import LocalView, MetadataStore
from sava.storage.broker_storage import BrokerStorage
from sava.storage.types import TopicKey
from sava.tasks import SingleFlight
from sava.topics import specs
from sava.topics.errors import NotOwner, TopicUnknown
from sava.topics.names import TopicName
from sava.topics.registry import Family, Located, Registry
from sava.topics.specs import Ownership, OwnershipState, TopicSpec

log = logging.getLogger(__name__)

NO_OWNER: Final = 0
UNASSIGNED: Final = Ownership(state=OwnershipState.UNASSIGNED, epoch=0)

_S = OwnershipState


class Step(NamedTuple):
    """What a record must be, and what it becomes."""

    sources: frozenset[OwnershipState]
    target: OwnershipState
    raises_epoch: bool
    forgets: frozenset[str]
    """Fields that go back to their defaults unless the step sets them."""


def _step(
    *sources: OwnershipState, to: OwnershipState, raises_epoch: bool = False, forgets: str = ""
) -> Step:
    return Step(frozenset(sources), to, raises_epoch, frozenset(forgets.split()))


STEPS: Final[dict[str, Step]] = {
    "assign": _step(
        _S.UNASSIGNED, _S.SEALED, to=_S.ASSIGNED, raises_epoch=True, forgets="incarnation target timeout_ms"
    ),
    "take": _step(_S.ASSIGNED, _S.ORPHAN, to=_S.ASSIGNED, raises_epoch=True, forgets="failures"),
    "move": _step(_S.ASSIGNED, to=_S.MOVING, forgets="error"),
    "seal": _step(_S.MOVING, to=_S.SEALED, forgets="owner incarnation timeout_ms error"),
    "roll_back": _step(_S.MOVING, to=_S.ASSIGNED, raises_epoch=True, forgets="target timeout_ms"),
    "give_back": _step(_S.ASSIGNED, to=_S.SEALED, forgets="owner incarnation"),
    "orphan": _step(_S.ASSIGNED, _S.MOVING, to=_S.ORPHAN, forgets="target timeout_ms"),
    "recover": _step(_S.ORPHAN, to=_S.SEALED, forgets="owner incarnation"),
    "delete": _step(*_S, to=_S.DELETING, raises_epoch=True, forgets="target timeout_ms"),
    "release": _step(_S.DELETING, to=_S.DELETING, forgets="owner incarnation"),
}


class WrongState(RetryableError):
    """The topic's ownership does not allow the step at the moment."""

    def __init__(self, topic: object, step: str, state: OwnershipState) -> None:
        super().__init__(
            f"topic {topic} is {state.value}, from where there is no way to {step.replace('_', ' ')}"
        )
        self.topic, self.state = str(topic), state


def after(step: str, topic: TopicName, record: Ownership, **changes: Any) -> Ownership:
    """The record after a step. Raises WrongState."""
    rule = STEPS[step]
    if record.state not in rule.sources:
        raise WrongState(topic, step, record.state)
    forgotten = {name: _DEFAULTS[name] for name in rule.forgets}
    return msgspec.structs.replace(
        record,
        **forgotten
        | {
            "state": rule.target,
            "epoch": record.epoch + rule.raises_epoch,
            "since_ms": time.time_ns() // 1_000_000,
        }
        | changes,
    )


_DEFAULTS: Final = {
    field.name: field.default
    for field in msgspec.structs.fields(Ownership)
    if field.default is not msgspec.NODEFAULT
}


class KnownOwnership(NamedTuple):
    """A record as it was read; revision 0: there is none, which means unassigned."""

    record: Ownership
    revision: int


def held(kv: KeyValue | None) -> KnownOwnership:
    return (
        KnownOwnership(UNASSIGNED, 0)
        if kv is None
        else KnownOwnership(specs.decode(kv, Ownership), kv.mod_revision)
    )


def known(local: LocalView, topic: TopicName) -> KnownOwnership:
    """As this node knows it."""
    return held(local.get(specs.ownership_key(topic)))


# -- tenure --------------------------------------------------------------------------------------------------


ATTEMPTS: Final = 16

_HELD: Final = (OwnershipState.ASSIGNED, OwnershipState.MOVING)


class Tenure:
    """The fencing token of a broker that serves a topic, from the moment that it takes the topic up until
    another broker may have it.

    Every write of the owner is conditional on the ownership record's revision, which is the one thing that a
    transaction can compare. The record may be written again while the tenure lasts (the topic is to be moved:
    it is *moving*, and its owner has cursors to write and a log to seal first). So a write that was refused
    reads the record: the same owner under the same epoch continues with the new revision, and only another
    epoch is the end.
    """

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
        raise RecordBusy(f"topic {self.name}: its ownership changed under {ATTEMPTS} attempts to write")

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
        record, revision = held(await self.store.get(self._key))
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
    lost: Callable[[Tenure], None] = lambda tenure: None,
) -> Tenure:
    """Begin to serve a topic that is this broker's, under the next epoch. Raises TopicUnknown,
    NotOwner."""
    located: Located

    async def begin(found: Versioned[Ownership]) -> RecordChange[Ownership]:
        nonlocal located
        located = await registry.locate(name)
        ours = _taken(name, found.value or UNASSIGNED, broker, incarnation)
        # The topic's record too: an ownership written behind a deletion would be found by the next topic of
        # this name.
        return RecordChange(ours, conditions=(located.unchanged,))

    taken = await RecordStore(store).update(
        specs.ownership_key(name),
        Ownership,
        begin,
        what=f"the ownership of topic {name}",
        conclusive=(NotOwner, TopicUnknown),
        batched=True,
    )
    assert taken.value is not None
    return Tenure(located, taken.value.epoch, taken.revision, store, lost)


def _taken(name: TopicName, record: Ownership, broker: int, incarnation: int) -> Ownership:
    if record.owner != broker or record.state not in STEPS["take"].sources:
        raise NotOwner(name, _server(record))
    return after("take", name, record, incarnation=incarnation)


async def resume(registry: Registry, store: MetadataStore, name: TopicName, broker: int) -> Tenure:
    """The tenure of a move that a former life of this broker has not finished. It keeps its epoch, so it is
    for handing over what is there, and not for serving. Raises TopicUnknown, NotOwner."""
    located = await registry.locate(name)
    record, revision = held(await store.get(specs.ownership_key(name)))
    if record.owner != broker or record.state is not OwnershipState.MOVING:
        raise NotOwner(name, _server(record))
    return Tenure(located, record.epoch, revision, store, lambda tenure: None)


def _server(record: Ownership) -> int:
    """Who can be asked for the topic: an owner that is handing it over, or is gone, cannot."""
    return record.owner if record.state is OwnershipState.ASSIGNED else NO_OWNER


# -- deletions -----------------------------------------------------------------------------------------------


Released = Callable[[Sequence[TopicName]], Awaitable[None]]


class Deletions:
    """How a topic goes, wherever its members are served.

        mark the topic's record          from now on it does not exist, and no broker can take it up
        mark each member's ownership     its owner finds its tenure over, and lets go
        wait until no broker has any
        remove storage, then records     see ``registry``

    Any broker can do it, and any other can finish it after a crash: each step finds what the one before has
    left. An owner only ever lets go of what is marked as being deleted; that a record is missing, or cannot
    be read, is never a reason to remove anything.

    One at a time for each topic, which runs to its end for all callers.
    """

    def __init__(
        self,
        registry: Registry,
        store: MetadataStore,
        storage: BrokerStorage,
        *,
        broker: int,
        close: Callable[[TopicName], Awaitable[None]],
        released: Released | None,
    ) -> None:
        """``close`` ends a topic here; ``released`` waits until no broker has these topics any more."""
        self._registry = registry
        self._store = store
        self._records = RecordStore(store)
        self._storage = storage
        self._broker = broker
        self._close = close
        self._released = released
        self.running: SingleFlight[TopicName, None] = SingleFlight()

    async def unfinished(self) -> list[TopicName]:
        return [name for name, spec in (await self._registry.list_all()).items() if spec.deleting]

    async def run(self, name: TopicName) -> None:
        """Raises TopicUnknown, TopicMismatch (a partition), NotOwner (another broker has it, and there is no
        way to wait for it)."""
        await self.running.run(name, partial(self._run, name))

    async def _run(self, name: TopicName) -> None:
        if self._released is None:
            for member in await self._registry.partitions(name):
                self._check_released(member, known(self._store.local, member).record.owner)
        family = await self._registry.begin_delete(name)
        elsewhere: list[TopicName] = []
        for member, _ in family.members:
            owner = await self._mark(member, family)
            if owner == self._broker:
                await self._release_member(member)
            elif owner != NO_OWNER:
                self._check_released(member, owner)
                elsewhere.append(member)
        if elsewhere and self._released is not None:
            await self._released(elsewhere)
        for member, spec in family.members:
            if spec.reliable:
                await self._storage.delete_topic(topic_key(member, spec))
        await self._registry.finish_delete(family)

    def _check_released(self, member: TopicName, owner: int) -> None:
        if self._released is None and owner not in (NO_OWNER, self._broker):
            raise NotOwner(member, owner)

    async def _mark(self, member: TopicName, family: Family) -> int:
        """The broker that has it. A member that no broker has had gets a record too: one that is written a
        moment later, by a broker that has not seen the deletion, is refused then."""

        def mark(found: Versioned[Ownership]) -> RecordChange[Ownership] | None:
            record = found.value or UNASSIGNED
            if record.state is OwnershipState.DELETING:
                return None
            # The topic's record too: behind the end of another's deletion, this would be found by the next
            # topic of the name.
            return RecordChange(after("delete", member, record), conditions=(family.unchanged,))

        marked = await self._records.update(
            specs.ownership_key(member), Ownership, mark, what=f"the ownership of topic {member}"
        )
        assert marked.value is not None
        return marked.value.owner

    async def release(self, name: TopicName) -> None:
        """The owner's part, if the topic is being deleted and this broker has it; otherwise nothing."""
        kv = await self._store.get(specs.spec_key(name))
        if not await self._release_member(name) or kv is None:
            return
        spec = specs.decode(kv, TopicSpec)
        if spec.reliable:
            # The broker that deletes it does the same, but may not see this broker's objects, and not its
            # journal.
            await self._storage.delete_topic(topic_key(name, spec))

    async def _release_member(self, name: TopicName) -> bool:
        async def release(found: Versioned[Ownership]) -> RecordChange[Ownership] | None:
            record = found.value
            if record is None or record.state is not OwnershipState.DELETING or record.owner != self._broker:
                return None
            await self._close(name)
            return RecordChange(after("release", name, record))

        updated = await self._records.update(
            specs.ownership_key(name), Ownership, release, what=f"the ownership of topic {name}"
        )
        if updated.is_changed:
            log.info("topics: released a topic that is being deleted topic=%s", name)
        return updated.is_changed


def topic_key(name: TopicName, spec: TopicSpec) -> TopicKey:
    return TopicKey(name.namespace, name.topic, spec.topic_id)
