"""World: brokers, network, metadata store, segments, and the oracle that watches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from sava.ledger.protocol.member import Message
from sava.ledger.protocol.record import StorageId
from tests.mirror_sim.broker import Broker
from tests.mirror_sim.controller import Controller
from tests.mirror_sim.copies import Batch
from tests.mirror_sim.knobs import Knobs
from tests.mirror_sim.net import Net
from tests.mirror_sim.oracle import Oracle
from tests.mirror_sim.records import TopicRecord, topic_key
from tests.mirror_sim.store import Store
from tests.sim.disk import SimDisk
from tests.sim.schedule import Schedule

MS = 1000
LEAD_US = 150 * MS


class World:
    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.schedule = Schedule()
        self.counts: Counter[str] = Counter()
        self.oracle = Oracle(self)
        self.net = Net(self.schedule, knobs, self.rng("net"), self._deliver, self.count)
        self.store = Store(self.schedule, self.net, self.rng("store"), self.oracle.changed)
        self.disks: dict[StorageId, SimDisk] = {}
        """Those that still exist."""
        self.located: dict[StorageId, int] = {}
        """Which broker has, or had, a disk."""
        self.leases: dict[int, int] = {}
        self.leaving: set[int] = set()
        """Brokers that say in their registration that they are about to stop."""
        self.objects: dict[str, tuple[tuple[int, int], ...]] = {}
        self.is_healing = False
        self._rng = self.rng("world")
        self.brokers = {number: Broker(self, number) for number in range(1, knobs.brokers + 1)}

    def begin(self) -> None:
        for topic in range(self.knobs.topics):
            self.store._apply({}, {topic_key(topic): TopicRecord()})
        for broker in self.brokers.values():
            broker.start()
        self._lead()

    # -- small tools -------------------------------------------------------------------------

    @property
    def now(self) -> int:
        return self.schedule.now

    def after(self, delay_us: int, action: Callable[..., Any], *args: Any) -> None:
        self.schedule.after(delay_us, action, *args)

    def note(self, what: str, *details: Any) -> None:
        self.schedule.note(what, *details)

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.knobs.seed}/{name}")

    def _deliver(self, source: int, destination: int, channel: int, message: Message) -> None:
        if self.schedule.trace is not None:
            self.note("message", f"{source}->{destination}#{channel}", str(message))
        self.brokers[destination].deliver(source, channel, message)

    # -- the cluster -------------------------------------------------------------------------

    def is_present(self, broker: int) -> bool:
        """Whether its lease lives."""
        return broker in self.leases and self.now - self.leases[broker] <= self.knobs.lease_ms * MS

    def spares(self, taken: Sequence[StorageId]) -> list[StorageId]:
        """Disks of brokers that are there, and not among these."""
        return [
            held.value.storage
            for key, held in self.store.items("broker")
            if self.is_present(key[1]) and key[1] not in self.leaving and held.value.storage not in taken
        ]

    def is_leaving(self, storage: StorageId) -> bool:
        return self.located[storage] in self.leaving

    def _lead(self) -> None:
        able = [
            each
            for each in self.brokers.values()
            if each.is_up and not each.is_paused and self.store.is_reachable(each.id)
        ]
        if able and not any(each.controller is not None for each in able):
            self.lead(self._rng.choice(able))
        self.after(LEAD_US, self._lead)

    def lead(self, broker: Broker) -> None:
        """Whoever led before does not know that it does no longer."""
        self.note("leads", broker.id)
        broker.controller = Controller(broker)

    # -- segments ----------------------------------------------------------------------------

    def with_segment(self, topic: int, record: TopicRecord, batches: Sequence[Batch]) -> TopicRecord:
        """Put an object; the record that names it is yet to be stored."""
        if not batches:
            return record
        key = f"{topic}-{record.end}-{len(self.objects)}"
        self.objects[key] = tuple((batch.frame.start, batch.hash) for batch in batches)
        return record._replace(end=batches[-1].frame.end, segments=(*record.segments, key))

    def read(self, segments: Sequence[str]) -> list[tuple[int, int]]:
        return [each for key in segments for each in self.objects[key]]

    def describe(self) -> str:
        lines = [
            f"  {key[1]}: {held.value}"
            for kind in ("ledger", "topic")
            for key, held in self.store.items(kind)
        ]
        for broker in self.brokers.values():
            attempts = broker.controller.attempts if broker.controller is not None else {}
            lines.append(
                f"  broker {broker.id}: {broker.storage} up={broker.is_up} ledger="
                f"{broker.ledger.id if broker.ledger else None} present={self.is_present(broker.id)} "
                + str({str(j): (a.core.phase.value, a.core.waiting_for) for j, a in attempts.items()})
            )
            if broker.ledger is not None:
                core = broker.ledger.core
                lines.append(
                    f"    end {core.end} commit {core.commit} floor {core.floor} fenced {core.is_fenced} "
                    f"durable {core._durable} wanted {core.wanted} served {broker.ledger.served}"
                )
        return "\n".join(lines)
