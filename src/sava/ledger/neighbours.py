"""Neighbours: the disks of brokers that are there (``mirroring.ports.Neighbours``), by the view of this
node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from sava.cluster.view import ClusterView
from sava.ledger.ports import Neighbour
from sava.ledger.protocol import JournalState, StorageId
from sava.ledger.records import Records
from sava.topics.names import TopicName


class Registered:
    """Owned by the event loop."""

    def __init__(
        self,
        view: ClusterView,
        records: Records,
        addresses: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """``addresses`` of the members of the cluster: under these they are known to reach one another. A
        broker that is no member is reached where it says itself."""
        self._view = view
        self._records = records
        self._addresses = addresses
        self._listeners: dict[object, Callable[[], None]] = {}
        view.listen(self._changed)

    def all(self) -> Sequence[Neighbour]:
        mirrored, addresses = self._mirrored(), self._addresses()
        return [
            Neighbour(
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
        """How many open journals each disk mirrors."""
        counts: Counter[StorageId] = Counter()
        for record, _ in self._records.known().values():
            if record.state is JournalState.OPEN:
                counts.update(record.last.members[1:])
        return counts

    def find(self, storage: StorageId) -> Neighbour | None:
        for broker, each in self._view.brokers.items():
            if each.storage_id == storage:
                return Neighbour(storage, broker, self._addresses().get(broker, each.raft), each.rack)
        return None

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        key = object()
        self._listeners[key] = listener
        return lambda: self._listeners.pop(key, None) and None

    def _changed(self, topics: frozenset[TopicName] | None) -> None:
        if topics is None:  # about brokers, or everything
            for listener in list(self._listeners.values()):
                listener()
