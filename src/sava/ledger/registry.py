"""What the cluster says about ledgers: their records, and which disks there are.

**Records** are in the metadata store:

    /ledgers/{broker}/{incarnation}    LedgerRecord, as JSON

Every change is one compare-and-swap on the revision that was read. What a change may be is not decided here
(``protocol.record``), nor when. A claim has one condition more: that the owner is not registered under the
very number that its ledger has. A leader that claims has only *seen* that the owner is gone, and may be
behind.

``known`` is this node's own view, without waiting, for those who only look whether there is something to do.

**A live broker** is one that is registered now. Its disk is found at the broker's Raft port, which takes
ledger connections, too. ``LiveBrokers`` reads the cluster view of this node; it may be behind.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from sava.cluster.view import ClusterView
from sava.errors import Outcome, RetryableError
from sava.ledger.protocol import LedgerId, LedgerRecord, LedgerState, Message, StorageId
from sava.metadata.commands import Compare, Delete, KeyValue, Operation, Put
from sava.metadata.errors import Compacted
from sava.metadata.records import decode, encode, unchanged
from sava.metadata.store import MetadataStore
from sava.supervisor import Supervisor
from sava.tasks import Backoff, Reconciler, cancelled
from sava.topics.names import TopicName

LEDGERS: Final = "/ledgers/"
RETRY_S: Final = 0.2
PAGE: Final = 500


class Stored(NamedTuple):
    """A record as it is in the metadata store."""

    record: LedgerRecord
    revision: int


class LedgerRecordChanged(RetryableError):
    """The record is not the one that was to be replaced; ``found`` is there instead (None: nothing)."""

    def __init__(self, ledger: LedgerId, found: Stored | None) -> None:
        state = found.record.state.value if found is not None else "gone"
        super().__init__(f"the record of ledger {ledger} was changed meanwhile: it is {state}")
        self.ledger = ledger
        self.found = found


def record_key(ledger: LedgerId) -> str:
    return f"{LEDGERS}{ledger.broker}/{ledger.incarnation}"


def ledger_of_key(key: str) -> LedgerId | None:
    """None: not a key of a record."""
    match key.split("/"):
        case ["", "ledgers", broker, incarnation] if broker.isdecimal() and incarnation.isdecimal():
            return LedgerId(int(broker), int(incarnation))
    return None


def stored(kv: KeyValue) -> Stored:
    """Raises RecordCorrupt. No broker may act as if there were none."""
    return Stored(decode(kv, LedgerRecord), kv.mod_revision)


class LedgerRecords:
    """The records in the metadata store. Reads are linearizable, but for ``known``. Every call may raise what
    the metadata store raises (Unavailable, OutcomeUnknown, TimeoutError): it is unknown then whether the call
    had an effect. Owned by the event loop."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._listeners: list[tuple[LedgerId | None, Callable[[], None]]] = []
        self._follower = Reconciler(
            "ledger records", self._follow, period_s=RETRY_S, retry=Backoff(RETRY_S, RETRY_S, jitter=0)
        )
        self._task: asyncio.Task[None] | None = None

    # -- reading -----------------------------------------------------------------------------

    async def get(self, ledger: LedgerId) -> Stored | None:
        kv = await self._store.get(record_key(ledger))
        return stored(kv) if kv is not None else None

    async def is_claimed(self, ledger: LedgerId, epoch: int, origin: StorageId) -> bool:
        """Whether a recovery has claimed the ledger of this disk under this epoch, or under a later one. A
        record that shows it is proof enough, however old; only one that does not is read from the
        majority."""
        known = self._store.local.get(record_key(ledger))
        if known is not None and _is_claimed(stored(known).record, epoch, origin):
            return True
        found = await self.get(ledger)
        return found is not None and _is_claimed(found.record, epoch, origin)

    async def of(self, broker: int) -> Mapping[LedgerId, Stored]:
        """Of one broker, oldest first."""
        return await self._range(f"{LEDGERS}{broker}/")

    async def all(self) -> Mapping[LedgerId, Stored]:
        """Of all brokers, oldest first for each."""
        return await self._range(LEDGERS)

    async def _range(self, prefix: str) -> Mapping[LedgerId, Stored]:
        found: list[KeyValue] = []
        more = True
        while more:
            after = found[-1].key if found else ""
            page = await self._store.range(prefix, limit=PAGE, start_after=after)
            found += page.kvs
            more = page.more
        return _by_ledger(found)

    def known(self) -> Mapping[LedgerId, Stored]:
        """All of them as this node knows them, oldest first for each broker. Raises RecordCorrupt."""
        return _by_ledger(self._store.local.range(LEDGERS).kvs)

    # -- changing ----------------------------------------------------------------------------

    async def open(self, ledger: LedgerId, record: LedgerRecord) -> int:
        """Store the first record under an unused number; its revision. Raises LedgerRecordChanged if it is
        used."""
        return await self._write(ledger, Put(record_key(ledger), encode(record)), 0)

    async def change(
        self,
        ledger: LedgerId,
        record: LedgerRecord,
        *,
        revision: int,
        conditions: Sequence[Compare] = (),
        fence_term: int = 0,
    ) -> int:
        """Compare-and-swap; the new revision. Raises LedgerRecordChanged."""
        put = Put(record_key(ledger), encode(record))
        return await self._write(ledger, put, revision, conditions, fence_term)

    async def remove(self, ledger: LedgerId, *, revision: int) -> None:
        """Compare-and-delete. Raises LedgerRecordChanged."""
        await self._write(ledger, Delete(record_key(ledger)), revision)

    async def _write(
        self,
        ledger: LedgerId,
        operation: Operation,
        revision: int,
        conditions: Sequence[Compare] = (),
        fence_term: int = 0,
    ) -> int:
        key = record_key(ledger)
        compare = (unchanged(key, revision), *conditions)
        result = await self._store.txn(compare, (operation,), fence_term=fence_term)
        if not result.succeeded:
            raise LedgerRecordChanged(ledger, await self.get(ledger))
        return result.revision

    # -- following ---------------------------------------------------------------------------

    def listen(self, ledger: LedgerId | None, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` (on the event loop, it must return at once) whenever the record of this ledger,
        or any, may have changed in this broker's view. Returns what ends the listening."""
        entry = (ledger, listener)
        self._listeners.append(entry)

        def end() -> None:
            with suppress(ValueError):
                self._listeners.remove(entry)

        return end

    def start(self, supervisor: Supervisor) -> None:
        self._task = supervisor.essential(self._follower.run(), name="ledger records")

    async def close(self) -> None:
        await cancelled(self._task)

    async def _follow(self) -> None:
        """Listeners are called too often rather than too seldom: they look for themselves. It ends, also
        without an error, when the store is being closed."""
        watch = self._store.watch(LEDGERS)
        try:
            self._tell(None)
            async for batch in watch:
                for event in batch.events:
                    self._tell(ledger_of_key(event.key))
        except Compacted:
            self._follower.wake()
        finally:
            watch.close()

    def _tell(self, changed: LedgerId | None) -> None:
        """None: any may have changed."""
        for ledger, listener in list(self._listeners):
            if changed is None or ledger is None or ledger == changed:
                listener()


def _is_claimed(record: LedgerRecord, epoch: int, origin: StorageId) -> bool:
    return record.state is not LedgerState.OPEN and 1 <= epoch <= record.epoch and record.origin == origin


def _by_ledger(kvs: Sequence[KeyValue]) -> Mapping[LedgerId, Stored]:
    found = {ledger: stored(kv) for kv in kvs if (ledger := ledger_of_key(kv.key)) is not None}
    return dict(sorted(found.items()))


# -- live brokers --------------------------------------------------------------------------------------------


class LiveBroker(NamedTuple):
    """The disk of a broker that is registered now."""

    storage: StorageId
    broker: int
    address: str
    """The broker's Raft port."""
    rack: str = ""
    mirrored: int = 0
    """How many open ledgers name this disk, the broker's own not counted."""
    is_leaving: bool = False
    """The broker is about to stop."""


class LiveBrokers:
    """The disks of the live brokers, this one included. Owned by the event loop."""

    def __init__(
        self,
        view: ClusterView,
        records: LedgerRecords,
        addresses: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """``addresses``: where the members of the cluster reach one another. A broker that is no member is
        reached at the address of its registration."""
        self._view = view
        self._records = records
        self._addresses = addresses
        self._listeners: dict[object, Callable[[], None]] = {}
        view.listen(self._changed)

    def all(self) -> Sequence[LiveBroker]:
        mirrored, addresses = self._mirrored(), self._addresses()
        return [
            LiveBroker(
                storage=StorageId(each.storage_id),
                broker=broker,
                address=addresses.get(broker, each.raft),
                rack=each.rack,
                mirrored=mirrored[StorageId(each.storage_id)],
                is_leaving=each.is_leaving,
            )
            for broker, each in sorted(self._view.brokers.items())
            if each.storage_id
        ]

    def _mirrored(self) -> Counter[StorageId]:
        """How many open ledgers each disk mirrors."""
        counts: Counter[StorageId] = Counter()
        for record, _ in self._records.known().values():
            if record.state is LedgerState.OPEN:
                counts.update(record.last.members[1:])
        return counts

    def find(self, storage: StorageId) -> LiveBroker | None:
        for broker, each in self._view.brokers.items():
            if each.storage_id == storage:
                return LiveBroker(storage, broker, self._addresses().get(broker, each.raft), each.rack)
        return None

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` when a broker registers, or its registration ends. Returns what ends the
        listening."""
        key = object()
        self._listeners[key] = listener
        return lambda: self._listeners.pop(key, None) and None

    def _changed(self, topics: frozenset[TopicName] | None) -> None:
        if topics is None:  # about brokers, or everything
            for listener in list(self._listeners.values()):
                listener()


# -- asking one --------------------------------------------------------------------------------


class PeerUnreachable(RetryableError):
    """The disk was not reached, or did not answer in time. It may have done what it was asked."""

    outcome = Outcome.UNKNOWN


class LedgerPeers(Protocol):
    """The client of every disk, this broker's own included. The connections are made above this package."""

    async def ask(
        self, storage: StorageId, message: Message, *, origin: StorageId, timeout: float
    ) -> Message:
        """The answer to Fence, Check, Read, WriteBack or Trim (a Trim is answered by itself). Raises
        PeerUnreachable."""
        ...


@dataclass(frozen=True, slots=True)
class LedgerAccess:
    """The ledgers of all brokers, as this broker reaches them."""

    records: LedgerRecords
    live_brokers: LiveBrokers
    peers: LedgerPeers
    own: StorageId
    """This broker's disk."""


# -- choosing mirrors --------------------------------------------------------------------------


def choose(
    candidates: Sequence[LiveBroker],
    *,
    own: StorageId,
    keep: Sequence[StorageId],
    avoid: Collection[StorageId],
    count: int,
    needed: int = 0,
) -> tuple[StorageId, ...]:
    """Which disks mirror a ledger: up to ``count``, never ``own``. Pure.

    First come those of ``keep`` that are still candidates. A mirror that does its work stays: each change of
    mirrors is a write to the metadata store and a copy of what is not yet committed. Only if it shares a
    rack, and a candidate is in a rack that has no copy, that candidate takes its place: racks may have come
    after the ledger was opened. The others follow in this order:

    * a rack that neither the owner nor a mirror chosen before is in: what takes a rack away (a switch, a
    power
      supply) must not take every copy. A broker without a label is in a rack of its own, unknown to be
      shared.
    * fewest ledgers mirrored: each one is a stream of bytes and syncs.
    * the next greater broker id, around in a circle from the owner's: brokers that start together see the
    same
      counts, and would otherwise all choose the same mirror.

    A mirror to avoid (it refused, or was silent) is left out, as long as ``needed`` others are there: two
    members that both have everything survive the loss of either, while three of which one is gone need both
    others to recover. With fewer than ``needed`` nothing can be acknowledged, so those to avoid are taken as
    well, in their order and up to ``count``: whichever of them is well again first completes the quorum.
    Without that, an owner would wait out its avoidance beside a healthy mirror.
    """
    by_storage = {each.storage: each for each in candidates if each.storage != own}
    owner = next((each for each in candidates if each.storage == own), None)
    kept = [by_storage[storage] for storage in dict.fromkeys(keep) if storage in by_storage]
    chosen = [each for each in kept if each.storage not in avoid][:count]
    fresh = [each for each in by_storage.values() if each not in kept and each.storage not in avoid]
    if len(chosen) == count:
        _spread(chosen, fresh, owner)
    while len(chosen) < count and fresh:
        best = min(fresh, key=lambda each: _rank(each, owner, chosen))
        fresh.remove(best)
        chosen.append(best)
    if len(chosen) < needed:
        chosen += [by_storage[storage] for storage in avoid if storage in by_storage]
    return tuple(each.storage for each in chosen[:count])


def _spread(chosen: list[LiveBroker], fresh: Sequence[LiveBroker], owner: LiveBroker | None) -> None:
    """Leave out one that shares its rack, if a candidate is in another one."""
    racks = {each.rack for each in (*chosen, *([owner] if owner is not None else []))}
    if not any(each.rack and each.rack not in racks for each in fresh):
        return
    for each in reversed(chosen):
        others = [other for other in chosen if other is not each]
        if _is_shared(each, owner, others):
            chosen.remove(each)
            return


def _is_shared(each: LiveBroker, owner: LiveBroker | None, chosen: Sequence[LiveBroker]) -> bool:
    others = [*([owner] if owner is not None else []), *chosen]
    return bool(each.rack) and any(each.rack == other.rack for other in others)


def _rank(
    each: LiveBroker, owner: LiveBroker | None, chosen: Sequence[LiveBroker]
) -> tuple[bool, int, bool, int]:
    own_id = owner.broker if owner is not None else 0
    return _is_shared(each, owner, chosen), each.mirrored, each.broker < own_id, each.broker
