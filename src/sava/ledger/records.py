"""Records: the ledgers' records in the metadata store.

/ledgers/{broker}/{incarnation}    LedgerRecord, as JSON

Every change is one compare-and-swap on the revision that was read. What a change may be is not decided here
(``protocol.record``), nor when. A claim has one condition more: that the owner is not registered under the
very number that its ledger has. A leader that claims has only *seen* that the owner is gone, and may be
behind.

``known`` is this node's own view, without waiting, for those who only look whether there is something to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from sava.errors import RetryableError
from sava.ledger.protocol import LedgerId, LedgerRecord
from sava.metadata.commands import Compare, Delete, KeyValue, Operation, Put
from sava.metadata.errors import Compacted
from sava.metadata.records import decode, encode, unchanged
from sava.metadata.store import MetadataStore
from sava.supervisor import Supervisor
from sava.tasks import Backoff, Reconciler, cancelled

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


def _by_ledger(kvs: Sequence[KeyValue]) -> Mapping[LedgerId, Stored]:
    found = {ledger: stored(kv) for kv in kvs if (ledger := ledger_of_key(kv.key)) is not None}
    return dict(sorted(found.items()))
