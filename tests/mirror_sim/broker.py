"""Broker: one process with one disk: it hosts copies of ledgers, owns one, and perhaps coordinates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sava.ledger.protocol import record as steps
from sava.ledger.protocol.member import (
    Check,
    Durable,
    Fence,
    Join,
    JoinAnswer,
    LedgerAppend,
    LedgerRefused,
    Message,
    Read,
    ReadAnswer,
    Trim,
    WriteBack,
)
from sava.ledger.protocol.record import LedgerId, LedgerRecord, LedgerState, StorageId
from sava.wal.errors import DiskFailed, DiskFull
from tests.mirror_sim.controller import Controller
from tests.mirror_sim.hosting import Host
from tests.mirror_sim.ledgers import OwnJournal
from tests.mirror_sim.net import NO_CHANNEL
from tests.mirror_sim.records import Registration, broker_key, journal_key
from tests.mirror_sim.salvager import Salvager
from tests.mirror_sim.store import Key, Outcome
from tests.sim.disk import CrashPolicy, SimDisk

if TYPE_CHECKING:
    from tests.mirror_sim.world import World

MS = 1000
RENEW_US = 100 * MS
OPEN_US = 60 * MS


class Broker:
    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.id = number
        self.rng = world.rng(f"broker{number}")
        self.disks = 0
        self.disk, self.storage = self._new_disk()
        self.life = 0
        self.is_up = False
        self.is_slow = False
        self.paused_until = 0
        self.has_failed = False
        """A write or sync failed in this life: nobody may hear from it any more."""
        self.hosts: dict[LedgerId, Host] = {}
        self.ledger: OwnJournal | None = None
        self.controller: Controller | None = None
        self.salvager: Salvager | None = None
        self._is_opening = False
        self._attempt = 0

    def _new_disk(self) -> tuple[SimDisk, StorageId]:
        self.disks += 1
        storage = StorageId(f"s{self.id}.{self.disks}")
        disk = SimDisk(self.world.rng(f"disk{storage}"), path=f"sim:{storage}")
        self.world.located[storage] = self.id
        self.world.disks[storage] = disk
        return disk, storage

    # -- life --------------------------------------------------------------------------------

    def start(self) -> None:
        if self.is_up:
            return
        self.life += 1
        self.is_up, self.has_failed = True, False
        self.paused_until = 0
        self.hosts, self.ledger, self.controller = {}, None, None
        self.salvager = Salvager(self)
        self._is_opening = False
        self.world.leaving.discard(self.id)
        self.world.note("start", self.id)
        self._every(RENEW_US, self._renew)
        self._every(OPEN_US, self._open_journal)
        try:
            self._restore()
        except (DiskFailed, DiskFull):
            self.die("the disk failed at the start")

    def _restore(self) -> None:
        """What the disk holds, before anybody is answered."""
        for name in sorted(self.disk._directory.subdirectories):
            broker, incarnation = map(int, name.split("-"))
            ledger = LedgerId(broker, incarnation)
            self.hosts[ledger] = Host(self, ledger)

    def stop(self, policy: CrashPolicy | None) -> None:
        """None: the process alone dies."""
        if not self.is_up:
            return
        self.world.note("stop", self.id, policy)
        self.is_up = False
        if self.ledger is not None:
            self.ledger.stopped()
        self.hosts, self.ledger, self.controller, self.salvager = {}, None, None, None
        self.disk = self.disk.kill() if policy is None else self.disk.crash(policy)
        self.world.disks[self.storage] = self.disk

    def die(self, why: str) -> None:
        self.world.count("processes that ended themselves")
        self.world.note("die", self.id, why)
        self.has_failed = True
        self.stop(CrashPolicy.ANY if self.rng.random() < 0.5 else None)
        self.world.after(self.rng.randrange(100, 1500) * MS, self.start)

    def wipe(self) -> None:
        """The machine returns with an empty disk."""
        self.stop(None)
        self.world.disks.pop(self.storage)
        self.world.note("wipe", self.id, self.storage)
        self.disk, self.storage = self._new_disk()

    def is_life(self, life: int) -> bool:
        return self.is_up and self.life == life

    @property
    def is_paused(self) -> bool:
        return self.world.now < self.paused_until

    def sync_us(self) -> int:
        base = self.world.knobs.sync_us
        return base // 2 + self.rng.randrange(base) + (200_000 if self.is_slow else 0)

    def _every(self, period: int, action: object) -> None:
        life = self.life

        def again() -> None:
            if self.is_life(life):
                if not self.is_paused:
                    action()  # type: ignore[operator]
                self.world.after(period + self.rng.randrange(period // 4), again)

        self.world.after(self.rng.randrange(period), again)

    # -- messages ----------------------------------------------------------------------------

    def send(self, destination: int, message: Message, channel: int = NO_CHANNEL) -> None:
        self.world.oracle.sent(self)
        self.world.net.send(self.id, destination, message, channel)

    def deliver(self, source: int, channel: int, message: Message) -> None:
        if not self.is_up:
            return
        if self.is_paused:
            self.world.after(self.paused_until - self.world.now, self.deliver, source, channel, message)
            return
        if isinstance(message, Join | LedgerAppend | Fence | WriteBack | Trim):
            self._host(message.ledger).receive(source, channel, message)
        elif isinstance(message, Check | Read):
            self._host(message.ledger).answer(source, message)
        elif isinstance(message, JoinAnswer | Durable | LedgerRefused) and channel != NO_CHANNEL:
            if self.ledger is not None and self.ledger.id == message.ledger:
                self.ledger.receive(source, channel, message)
        else:
            if self.salvager is not None and isinstance(message, ReadAnswer):
                self.salvager.receive(message)
            if self.controller is not None:
                self.controller.receive(message)

    def _host(self, ledger: LedgerId) -> Host:
        if ledger not in self.hosts:
            self.hosts[ledger] = Host(self, ledger)
        return self.hosts[ledger]

    # -- being there, and having a ledger ---------------------------------------------------

    def _renew(self) -> None:
        if self.world.store.is_reachable(self.id):
            self.world.leases[self.id] = self.world.now
        elif self.world.knobs.self_fences and not self.world.is_present(self.id):
            self._leave_journal()

    def _leave_journal(self) -> None:
        if self.ledger is not None:
            self.ledger.stopped()
            self.ledger = None

    def _open_journal(self) -> None:
        """Register, end what is open of this broker's earlier ledgers, and open a new one: one
        transaction, so that a broker never has two."""
        if self.ledger is not None and self.ledger.core.is_fenced:
            self._leave_journal()
        if self.ledger is None and not self._is_opening:
            self.world.store.read(self.id, lambda life=self.life: self._try_open(life))  # type: ignore[misc]

    def _try_open(self, life: int) -> None:
        if not self.is_life(life) or self.ledger is not None or self._is_opening:
            return
        store, knobs = self.world.store, self.world.knobs
        self._attempt += 1
        by = f"{self.id}.{self.life}.{self._attempt}"
        key = broker_key(self.id)
        compares: dict[Key, int] = {key: store.get(key).revision}
        registered: Registration = store.get(key).value or Registration(self.storage, 0, 0)
        if (registered.storage, registered.life) != (self.storage, self.life):
            this = registered._replace(storage=self.storage, life=self.life)
            store.txn(self.id, compares, {key: this}, lambda _: None)
            return
        incarnation = registered.incarnation + 1
        puts: dict[Key, object] = {key: registered._replace(incarnation=incarnation)}
        for other, held in store.items("ledger"):
            if other[1].broker == self.id and held.value.state is LedgerState.OPEN:
                compares[other] = held.revision
                puts[other] = steps.claimed(held.value, by)
        mirrors = self.world.spares((self.storage,))
        self.rng.shuffle(mirrors)
        members = (self.storage, *mirrors[: knobs.qw - 1])
        is_degraded = len(members) < knobs.qa
        if is_degraded and not knobs.allows_degraded:
            return
        if is_degraded:
            members = members[:1]
        ledger = LedgerId(self.id, incarnation)
        record = steps.opened(0, members, qw=knobs.qw, qa=knobs.qa, by=by, is_degraded=is_degraded)
        compares[journal_key(ledger)] = 0
        puts[journal_key(ledger)] = record
        self._is_opening = True
        store.txn(self.id, compares, puts, lambda outcome: self._opened(life, ledger, record, outcome))

    def _opened(self, life: int, ledger: LedgerId, record: LedgerRecord, outcome: Outcome) -> None:
        """When the outcome is unknown, the ledger is nobody's: the next opening ends it."""
        if self.is_life(life):
            self._is_opening = False
            if outcome.succeeded:
                host = self._host(ledger)
                self.ledger = OwnJournal(self, ledger, record, outcome.revision, host)
