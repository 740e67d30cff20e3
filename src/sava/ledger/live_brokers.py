"""The live brokers, as the ledgers see them: which disks there are, how one is asked, and which of them
mirror.

A live broker is one that is registered now. Its disk is found at the broker's Raft port, which takes ledger
connections, too. ``LiveBrokers`` reads the cluster view of this node; it may be behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sava.cluster.view import ClusterView
from sava.errors import Outcome, RetryableError
from sava.ledger.protocol import LedgerState, Message, StorageId
from sava.ledger.records import LedgerRecords
from sava.topics.names import TopicName


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
