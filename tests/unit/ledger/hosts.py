"""Brokers without their upper half: journals that mirror each other over real connections and files.

async with Hosts(3, tmp_path) as hosts:
    await hosts.begin()
    await hosts[0].append(0)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, cast

from sava.ledger.endpoint import Generations
from sava.ledger.host import LedgerHost
from sava.ledger.protocol import Fragment, LedgerId, LedgerRecord, LedgerState, StorageId
from sava.ledger.recoverer import Recoverer
from sava.ledger.registry import LedgerRecords, LiveBroker, LiveBrokers
from sava.ledger.wire import LedgerSession
from sava.ledger.writer import LedgerCluster, MirrorOptions
from sava.peer_connection import GREETING, BadFrame, Dialer, FrameDecoder, PeerConnection, frame
from sava.records import RecordBatch
from sava.security.handshake import BadHandshake, ListenerHandshake, Purpose
from sava.storage.journal import Journal, JournalOptions
from sava.supervisor import Supervisor
from sava.wal import LocalDisk
from tests.support.memory_store import MemoryStore
from tests.support.peers import Named, credentials
from tests.support.waiting import PATIENCE_S, until

SMALL = JournalOptions(file_bytes=16 << 10)
OPTIONS = MirrorOptions(mirror_timeout_s=3.0)
"""Longer than a busy machine lets a mirror wait; tests of mirrors that fail have less."""


def batch(base: int, *, topic: int = 1, epoch: int = 1, size: int = 100) -> RecordBatch:
    encoded = RecordBatch.encode(
        [b"%d " % base + b"x" * size], publish_time=1, producer_id=9, base_sequence=base
    )
    return encoded.assigned(topic_id=topic, epoch=epoch, base_offset=base)


class Town(LiveBrokers):
    """The live brokers of all hosts, as a test wants them."""

    def __init__(self) -> None:
        self.there: dict[StorageId, LiveBroker] = {}
        self._waiting: list[Callable[[], None]] = []

    def all(self) -> Sequence[LiveBroker]:
        return list(self.there.values())

    def find(self, storage: StorageId) -> LiveBroker | None:
        return self.there.get(storage)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        self._waiting.append(listener)
        return lambda: self._waiting.remove(listener)

    def come(self, live: LiveBroker) -> None:
        self.there[live.storage] = live
        self._tell()

    def go(self, storage: StorageId) -> None:
        self.there.pop(storage, None)
        self._tell()

    def _tell(self) -> None:
        for listener in list(self._waiting):
            listener()


class Gate:
    """The way to one host, and its port. Closed: connections break, and no new ones are made."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._server: asyncio.Server | None = None
        self._open: set[_Accepted] = set()
        self.is_closed = False
        self.is_silent = False
        """What arrives is lost."""
        self.held: list[tuple[_Accepted, bytes]] = []
        """What has arrived on connections that are delayed."""
        self._delayed: set[_Accepted] = set()
        self.address = ""

    async def listen(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Accepted(self, self._host), "127.0.0.1", 0
        )
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def entered(self, connection: _Accepted) -> None:
        self._open.add(connection)

    def left(self, connection: _Accepted) -> None:
        self._open.discard(connection)

    def cut(self) -> None:
        self.is_closed = True
        self.drop()

    def drop(self) -> None:
        """Break what is there; new connections are welcome."""
        for connection in list(self._open):
            connection.abort()

    def heal(self) -> None:
        self.is_closed = self.is_silent = False

    def delay(self) -> None:
        """What arrives on the connections of this moment is on its way until ``arrive``."""
        self._delayed = set(self._open)

    def is_delaying(self, connection: _Accepted, data: bytes) -> bool:
        if connection in self._delayed:
            self.held.append((connection, data))
        return connection in self._delayed

    def arrive(self) -> None:
        self._delayed.clear()
        held, self.held = self.held, []
        for connection, data in held:
            connection.data_received(data)

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
        await until(lambda: not self._open, "all connections are gone")


class _Accepted(asyncio.Protocol):
    def __init__(self, gate: Gate, host: Host) -> None:
        self._gate = gate
        self._host = host
        self._reader = FrameDecoder(GREETING)
        self._handshake = ListenerHandshake(credentials(Named(host.broker)))
        self._session: LedgerSession | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._gate.entered(self)
        if self._gate.is_closed:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._gate.is_silent or self._transport is None or self._gate.is_delaying(self, data):
            return
        try:
            payloads = self._reader.feed(data)
            while payloads and self._session is None:
                reply = self._handshake.received(payloads.pop(0), None)
                if self._handshake.is_over:
                    assert self._handshake.purpose is Purpose.LEDGERS
                    reply = self._handshake.welcome()
                    write = self._transport.writelines
                    self._session = self._host.mirrored.session(write, self._handshake.node)
                assert reply is not None
                self._transport.write(frame(reply))
            if self._session is not None:
                self._session.receive(payloads)
        except (BadFrame, BadHandshake):
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._gate.left(self)
        if self._session is not None:
            self._session.closed()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class CuttableDialer(Dialer):
    """Connects to no one while its host is cut off."""

    def __init__(self, broker: int) -> None:
        super().__init__(credentials(Named(broker)))
        self.is_cut_off = False

    async def dial(self, address: str, connection: PeerConnection) -> None:
        if self.is_cut_off:
            raise ConnectionError("cut off")
        await super().dial(address, connection)


class Host:
    """One broker."""

    def __init__(self, hosts: Hosts, broker: int, path: Path) -> None:
        self._hosts = hosts
        self.broker = broker
        self.path = path
        self.gate = Gate(self)
        self.dialer = CuttableDialer(broker)
        self.failures: list[BaseException] = []
        self.renewals: list[str] = []
        self.journal: Journal
        self.mirrored: LedgerHost
        self.incarnation = 0

    @property
    def storage(self) -> StorageId:
        return self.mirrored.storage

    @property
    def id(self) -> LedgerId:
        return LedgerId(self.broker, self.incarnation)

    async def open(self) -> None:
        disk = LocalDisk(self.path)
        generations = Generations(disk)
        self.journal = await Journal.open(
            disk,
            broker=str(self.broker),
            options=SMALL,
            uncommitted_tails=generations.uncommitted_tails,
            fail=self.failures.append,
        )
        self.mirrored = LedgerHost(
            self.broker,
            disk,
            self.journal,
            generations,
            cluster=LedgerCluster(
                records=self._hosts.records,
                live_brokers=self._hosts.town,
                dialer=self.dialer,
                brokers=lambda: self._hosts.size,
            ),
            options=self._hosts.options,
            renew=self.renewals.append,
            fail=self.failures.append,
        )
        await self.mirrored.open()
        if not self.gate.address:
            await self.gate.listen()
        self.gate.heal()
        self.come()

    def cut_off(self) -> None:
        """From all others, in both directions."""
        self.dialer.is_cut_off = True
        self.gate.cut()
        for host in self._hosts.hosts:
            host.gate.drop()

    def back(self) -> None:
        self.dialer.is_cut_off = False
        self.gate.heal()

    def come(self) -> None:
        self._hosts.town.come(LiveBroker(self.storage, self.broker, self.gate.address))

    def register(self) -> None:
        """Under a number that was never used."""
        self.incarnation = self._hosts.next_number()
        self.mirrored.registered(self.incarnation)

    async def begin(self) -> None:
        self.register()
        async with asyncio.timeout(PATIENCE_S):
            await self.journal.queue.wait_for_generation()

    def append(self, base: int, *, topic: int = 1, epoch: int = 1, size: int = 100) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(outcome: BaseException | None) -> None:
            if outcome is None:
                future.set_result(None)
            else:
                future.set_exception(outcome)
                future.exception()  # seen: not every test waits for it

        self.journal.append(batch(base, topic=topic, epoch=epoch, size=size), done)
        return future

    def bytes_of(self, host: Host) -> bytes:
        """What this host's copy of another's journal has, from its files."""
        directory = self.path / "mirrors" / f"{host.broker}-{host.incarnation}"
        return b"".join(path.read_bytes() for path in sorted(directory.glob("copy-*")))

    async def stop(self) -> None:
        """As a process that ends: whatever was not acknowledged is nobody's."""
        self._hosts.town.go(self.storage)
        self.gate.cut()
        await self.mirrored.close()
        await self.journal.close()

    async def close(self) -> None:
        await self.stop()
        await self.gate.close()


class Hosts:
    def __init__(self, size: int, path: Path, *, options: MirrorOptions = OPTIONS) -> None:
        self.size = size
        self.options = options
        self.store = MemoryStore()
        self.records = LedgerRecords(self.store)
        self.town = Town()
        self.hosts = [Host(self, number, path / str(number)) for number in range(1, size + 1)]
        self._number = 0

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    async def claim(self, *ledgers: LedgerId, origin: StorageId, epoch: int = 9) -> None:
        """As a recovery does it, of ledgers that no host has opened."""
        whole = Fragment(0, (origin,), 1)
        for ledger in ledgers:
            record = LedgerRecord(state=LedgerState.RECOVERING, epoch=epoch, fragments=(whole,), qw=1, qa=1)
            await self.records.open(ledger, record)

    def next_number(self) -> int:
        self._number += 1
        return self._number

    async def __aenter__(self) -> Self:
        self.records.start(Supervisor())
        for host in self.hosts:
            await host.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        for host in self.hosts:
            await host.close()
        await self.records.close()
        self.store.close()
        assert not [failure for host in self.hosts for failure in host.failures]

    async def begin(self) -> None:
        for host in self.hosts:
            await host.begin()

    async def record(self, host: Host) -> LedgerRecord:
        stored = await self.records.get(host.id)
        assert stored is not None
        return stored.record

    async def recover(self, journal: LedgerId, *, through: Host) -> LedgerRecord:
        """As the leader does when the owner is not registered under this number any more."""
        async with asyncio.timeout(PATIENCE_S):
            closed = await Recoverer(journal, self.records, through.mirrored.peers, name="test").run()
        assert closed is not None
        return closed
