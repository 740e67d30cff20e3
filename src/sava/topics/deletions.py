"""Deletions: how a topic goes, wherever its members are served.

    mark the topic's record          from now on it does not exist, and no broker can take it up
    mark each member's ownership     its owner finds its tenure over, and lets go
    wait until no broker has any
    remove storage, then records     see ``registry``

Any broker can do it, and any other can finish it after a crash: each step finds what the one before has left.
An owner only ever lets go of what is marked as being deleted; that a record is missing, or cannot be read, is
never a reason to remove anything.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from sava.errors import SavaError
from sava.metadata.commands import Put
from sava.metadata.records import unchanged
from sava.metadata.store import MetadataStore
from sava.storage.broker_storage import BrokerStorage
from sava.storage.types import TopicKey
from sava.tasks import SingleFlight
from sava.topics import ownership, specs
from sava.topics.errors import NotOwner, RegistryBusy
from sava.topics.names import TopicName
from sava.topics.registry import Family, Registry
from sava.topics.specs import OwnershipState, TopicSpec

log = logging.getLogger(__name__)

ATTEMPTS: Final = 16

Released = Callable[[Sequence[TopicName]], Awaitable[None]]


class Deletions:
    """Owned by the event loop. One at a time for each topic, which runs to its end for all callers."""

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
        self._storage = storage
        self._broker = broker
        self._close = close
        self._released = released
        self._running: SingleFlight[TopicName, None] = SingleFlight()

    async def stop(self, error: SavaError) -> None:
        await self._running.stop(error)

    async def unfinished(self) -> list[TopicName]:
        return [name for name, spec in (await self._registry.list_all()).items() if spec.deleting]

    async def run(self, name: TopicName) -> None:
        """Raises TopicUnknown, TopicMismatch (a partition), NotOwner (another broker has it, and there is no
        way to wait for it)."""
        await self._running.run(name, partial(self._run, name))

    async def _run(self, name: TopicName) -> None:
        if self._released is None:
            for member in await self._registry.partitions(name):
                self._check_released(member, ownership.known(self._store.local, member).record.owner)
        family = await self._registry.begin_delete(name)
        elsewhere: list[TopicName] = []
        for member, _ in family.members:
            owner = await self._mark(member, family)
            if owner == self._broker:
                await self._let_go(member)
            elif owner != ownership.NO_OWNER:
                self._check_released(member, owner)
                elsewhere.append(member)
        if elsewhere and self._released is not None:
            await self._released(elsewhere)
        for member, spec in family.members:
            if spec.reliable:
                await self._storage.delete_topic(topic_key(member, spec))
        await self._registry.finish_delete(family)

    def _check_released(self, member: TopicName, owner: int) -> None:
        if self._released is None and owner not in (ownership.NO_OWNER, self._broker):
            raise NotOwner(member, owner)

    async def _mark(self, member: TopicName, family: Family) -> int:
        """The broker that has it. A member that no broker has had gets a record too: one that is written a
        moment later, by a broker that has not seen the deletion, is refused then."""
        key = specs.ownership_key(member)
        for _ in range(ATTEMPTS):
            record, revision = ownership.held(await self._store.get(key))
            if record.state is OwnershipState.DELETING:
                return record.owner
            marked = ownership.after("delete", member, record)
            # The topic's record too: behind the end of another's deletion, this would be found by the next
            # topic of the name.
            compare = (unchanged(key, revision), family.unchanged)
            if (await self._store.txn(compare, (Put(key, specs.encode(marked)),))).succeeded:
                return marked.owner
        raise RegistryBusy(f"topic {member} changed under {ATTEMPTS} attempts to delete it")

    async def let_go(self, name: TopicName) -> None:
        """The owner's part, if the topic is being deleted and this broker has it; otherwise nothing."""
        kv = await self._store.get(specs.spec_key(name))
        if not await self._let_go(name) or kv is None:
            return
        spec = specs.decode(kv, TopicSpec)
        if spec.reliable:
            # The broker that deletes it does the same, but may not see this broker's objects, and not its
            # journal.
            await self._storage.delete_topic(topic_key(name, spec))

    async def _let_go(self, name: TopicName) -> bool:
        key = specs.ownership_key(name)
        for _ in range(ATTEMPTS):
            record, revision = ownership.held(await self._store.get(key))
            if record.state is not OwnershipState.DELETING or record.owner != self._broker:
                return False
            await self._close(name)
            put = Put(key, specs.encode(ownership.after("let_go", name, record)))
            if (await self._store.txn((unchanged(key, revision),), (put,))).succeeded:
                log.info("topics: let go of a topic that is being deleted topic=%s", name)
                return True
        raise RegistryBusy(f"topic {name} changed under {ATTEMPTS} attempts to let go of it")


def topic_key(name: TopicName, spec: TopicSpec) -> TopicKey:
    return TopicKey(name.namespace, name.topic, spec.topic_id)
