"""Nemesis: does to brokers, disks, network and metadata store what the seed allows."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from sava.ledger.protocol.record import LedgerId, StorageId, recovery_quorum
from tests.mirror_sim.copies import directory_of, durable_bytes, durable_note
from tests.mirror_sim.net import RAFT, Link
from tests.sim.disk import CrashPolicy

if TYPE_CHECKING:
    from tests.mirror_sim.broker import Broker
    from tests.mirror_sim.world import World

MS = 1000
MAX_WIPES = 2
PASSIVE = ("loss", "delay", "duplicate", "churn")
"""Applied where they happen, not by decision."""


class Nemesis:
    def __init__(self, world: World) -> None:
        self._world = world
        self.is_stopped = False
        self._wipes = 0

    def start(self) -> None:
        for fault in sorted(self._world.knobs.faults.difference(PASSIVE)):
            self._plan(fault)

    def _plan(self, fault: str) -> None:
        rng = self._world.rng(f"nemesis/{fault}")
        mean = self._world.knobs.tempo_ms * MS * (4 if fault in ("wipe", "allpower") else 1)

        def strike() -> None:
            if not self.is_stopped:
                target = rng.choice(list(self._world.brokers.values()))
                getattr(self, f"_{fault}")(rng, target)
                self._world.after(int(rng.expovariate(1 / mean)), strike)

        self._world.after(int(rng.expovariate(1 / mean)), strike)

    def _did(self, fault: str, *details: object) -> None:
        self._world.count(fault)
        self._world.note(fault, *details)

    def _block(self, rng: Random, links: list[Link], fault: str) -> None:
        self._did(fault, links)
        self._world.net.block(links)
        self._world.after(rng.randrange(100, 2500) * MS, self._unblock, links)

    def _unblock(self, links: list[Link]) -> None:
        if not self._world.is_healing:
            self._world.net.unblock(links)

    # -- network and metadata store ----------------------------------------------------------

    def _cut(self, rng: Random, target: Broker) -> None:
        other = rng.choice(list(self._world.brokers))
        links = [(target.id, other), (other, target.id)]
        self._block(rng, links if rng.random() < 0.7 else links[:1], "cut")

    def _isolate(self, rng: Random, target: Broker) -> None:
        others = [RAFT, *self._world.brokers]
        links = [link for other in others for link in ((target.id, other), (other, target.id))]
        self._block(rng, links, "isolate")

    def _raftcut(self, rng: Random, target: Broker) -> None:
        self._block(rng, [(target.id, RAFT), (RAFT, target.id)], "raftcut")

    def _evict(self, rng: Random, target: Broker) -> None:
        """The others agree, wrongly, that a broker is gone: it loses its lease under load, and renews it, as
        it does in the product by registering again."""
        self._did("evict", target.id)
        self._world.leases.pop(target.id, None)

    def _leave(self, rng: Random, target: Broker) -> None:
        """SIGTERM: the broker says that it leaves, gives its topics away, and stops a moment later, whether
        or not they are gone and whether or not its mirrors' owners have found another disk."""
        if not target.is_up or target.id in self._world.leaving:
            return
        self._did("leave", target.id)
        self._world.leaving.add(target.id)
        if target.ledger is not None:
            for topic in target.ledger.served:
                target.ledger.leave(topic)
        self._world.after(rng.randrange(50, 1500) * MS, self._left, rng, target, target.life)

    def _left(self, rng: Random, target: Broker, life: int) -> None:
        if target.is_life(life) and target.id in self._world.leaving:
            self._world.note("left", target.id)
            target.stop(None)
            self._world.leases.pop(target.id, None)
            self._world.after(rng.randrange(50, 2500) * MS, target.start)

    def _leaderloss(self, rng: Random, target: Broker) -> None:
        self._did("leaderloss")
        self._world.store.leaderless_until = self._world.now + rng.randrange(50, 900) * MS

    def _secondcoordinator(self, rng: Random, target: Broker) -> None:
        if target.is_up:
            self._did("secondcoordinator", target.id)
            self._world.lead(target)

    def _move(self, rng: Random, target: Broker) -> None:
        if target.ledger is not None and target.ledger.served:
            self._did("move", target.id)
            target.ledger.leave(rng.choice(sorted(target.ledger.served)))

    # -- processes ---------------------------------------------------------------------------

    def _crash(self, rng: Random, target: Broker) -> None:
        self._stop(rng, target, None, "crash")

    def _powercut(self, rng: Random, target: Broker) -> None:
        self._stop(rng, target, CrashPolicy.ANY, "powercut")

    def _allpower(self, rng: Random, target: Broker) -> None:
        for broker in self._world.brokers.values():
            self._stop(rng, broker, CrashPolicy.ANY, "allpower")

    def _stop(self, rng: Random, target: Broker, policy: CrashPolicy | None, fault: str) -> None:
        if target.is_up:
            self._did(fault, target.id)
            target.stop(policy)
            self._world.after(rng.randrange(50, 2500) * MS, target.start)

    def _pause(self, rng: Random, target: Broker) -> None:
        self._did("pause", target.id)
        target.paused_until = self._world.now + rng.randrange(100, 2500) * MS

    # -- disks -------------------------------------------------------------------------------

    def _syncerror(self, rng: Random, target: Broker) -> None:
        if target.is_up:
            self._did("syncerror", target.id)
            target.disk.fail_next("sync")

    def _diskfull(self, rng: Random, target: Broker) -> None:
        self._did("diskfull", target.id)
        target.disk.set_capacity(target.disk.used + rng.choice([0, 300, 2000]))
        self._world.after(rng.randrange(200, 2000) * MS, self._make_room, target)

    def _make_room(self, target: Broker) -> None:
        target.disk.set_capacity(None)

    def _slowdisk(self, rng: Random, target: Broker) -> None:
        self._did("slowdisk", target.id)
        target.is_slow = not target.is_slow

    def _wipe(self, rng: Random, target: Broker) -> None:
        if self._wipes < MAX_WIPES and self._world.knobs.brokers > 1:
            self._wipes += 1
            self._did("wipe", target.id)
            self._world.oracle.lost_disk()
            target.wipe()
            self._world.after(rng.randrange(50, 1500) * MS, target.start)

    def _copies(self, target: Broker) -> list[LedgerId]:
        found = []
        for name in sorted(target.disk._directory.subdirectories):
            ledger = LedgerId(*map(int, name.split("-")))
            note = durable_note(target.disk, ledger)
            if note is not None and note.base is not None:
                found.append(ledger)
        return found

    def _rot(self, rng: Random, target: Broker) -> None:
        """Below the watermark: seen for what it is, whenever it is looked at."""
        if not (copies := self._copies(target)):
            return
        ledger = rng.choice(copies)
        note = durable_note(target.disk, ledger)
        assert note is not None
        assert note.base is not None
        low, high = max(note.base, note.floor), note.watermark
        if low < high:
            self._flip(rng, target, ledger, note.base, rng.randrange(low, high))
            self._did("rot", target.id, ledger)

    def _rottail(self, rng: Random, target: Broker) -> None:
        """Above the watermark a bad record looks like a torn write. So this disk has lost what it held there,
        and that may only happen to as many disks as an acknowledgement can do without."""
        for ledger in self._copies(target):
            note = durable_note(target.disk, ledger)
            record = self._world.store.get(("ledger", ledger)).value
            assert note is not None
            assert note.base is not None
            low = max(note.base, note.watermark)
            held = len(durable_bytes(target.disk, ledger, low, 1 << 62))
            if record is None or held == 0 or target.storage not in record.last.members:
                continue
            others = [
                each
                for each in record.last.members
                if each != target.storage and self._has(each, ledger, low, low + held)
            ]
            if len(others) + recovery_quorum(record.last) > len(record.last.members):
                self._stop(rng, target, None, "rottail")
                self._flip(rng, target, ledger, note.base, rng.randrange(low, low + held))
                return

    def _has(self, storage: StorageId, ledger: LedgerId, start: int, end: int) -> bool:
        world = self._world
        if storage not in world.disks or (storage, ledger) in world.oracle.rotten:
            return False
        return world.oracle.holds(storage, ledger, start, end)

    def _flip(self, rng: Random, target: Broker, ledger: LedgerId, base: int, position: int) -> None:
        self._world.oracle.rotted(target.storage, ledger, position)
        directory = target.disk.directory(directory_of(ledger))
        directory.flip_bit(f"data-{base}", position - base, rng.randrange(8))
