"""Writer maintenance, on the leader: finishes batches that their brokers left, removes what no batch needs.

It acts on records, not on events, and two leaders can do everything that it does at once; so it needs no
term. It may join a batch that is merely slow while the broker that decided it is still at work, which costs a
question to each topic.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from sava.cluster.writer_records import SWEEP, WRITERS, WriterRecord, now_ms, swept_until, writer_key
from sava.cluster.writers import Writers
from sava.errors import SavaError
from sava.metadata.commands import Delete, Put
from sava.metadata.records import RecordCorrupt, unchanged
from sava.metadata.store import MetadataStore
from sava.storage import staging
from sava.storage.errors import ObjectMissing
from sava.storage.objectstore import ObjectStore
from sava.topics import specs

log = logging.getLogger(__name__)

LEFT_MS: Final = 10_000
"""A batch that was decided longer ago is taken for one whose broker has died."""
SINGLE_MS: Final = 24 * 3_600_000
"""No program asks again for a writer without a query after that. A query's is kept for its checkpoint, which
may be taken up after a year."""
SWEEP_S: Final = 300.0
FINISHED_AT_A_TIME: Final = 4
STEP: Final = 200


class KnownWriter(NamedTuple):
    writer: str
    record: WriterRecord
    revision: int


class WriterMaintenance:
    """Owned by the event loop."""

    def __init__(
        self, writers: Writers, store: MetadataStore, objects: ObjectStore, *, expiry_s: float
    ) -> None:
        self._writers = writers
        self._store = store
        self._objects = objects
        self._expiry_s = expiry_s
        self._sweep_at = 0.0

    async def run(self) -> None:
        """Once. Raises what keeps it from going on."""
        await self._finish_left()
        await self._forget_single()
        now = time.monotonic()
        if now >= self._sweep_at:
            self._sweep_at = now + min(SWEEP_S, self._expiry_s / 4)
            await self.sweep()

    @property
    def unpublished(self) -> int:
        """Batches that are decided and not published, as this node knows it."""
        return sum(not known.record.is_published for known in self._known())

    def _known(self) -> Iterator[KnownWriter]:
        """One record that cannot be read is no reason to leave the others alone."""
        for kv in self._store.local.range(WRITERS).kvs:
            try:
                yield KnownWriter(
                    kv.key.removeprefix(WRITERS), specs.decode(kv, WriterRecord), kv.mod_revision
                )
            except RecordCorrupt as error:
                log.error("writers: %s", error)

    async def _finish_left(self) -> None:
        now = now_ms()
        left = [
            known
            for known in self._known()
            # By another broker's clock; a difference must not make this wait without end.
            if not known.record.is_published and abs(now - known.record.decided_ms) >= LEFT_MS
        ]
        slots = asyncio.Semaphore(FINISHED_AT_A_TIME)

        async def finish(known: KnownWriter) -> None:
            async with slots:
                writer, batch = known.writer, known.record.batch
                try:
                    if await self._writers.finish(writer, known.record.manifest):
                        log.info("writers: finished what was left writer=%s batch=%d", writer, batch)
                except (SavaError, TimeoutError) as error:
                    kind = type(error).__name__
                    log.warning(
                        "writers: not finished writer=%s batch=%d error=%s: %s", writer, batch, kind, error
                    )

        await asyncio.gather(*map(finish, left))

    async def _forget_single(self) -> None:
        before = now_ms() - SINGLE_MS
        for known in list(self._known()):
            record = known.record
            if not record.query and record.is_published and record.decided_ms < before:
                key = writer_key(known.writer)
                await self._store.txn((unchanged(key, known.revision),), (Delete(key),))

    async def sweep(self) -> list[str]:
        """Remove staged objects that are old and that no undone decision names; the keys of those that went.
        The order is the argument (see ``writers``). Raises RecordCorrupt: what such a record names is not
        known."""
        staged = await staging.list_staged(self._objects)
        if not staged:
            return []
        moment_ms = await staging.store_time_ms(self._objects) - round(self._expiry_s * 1000)
        old = [info for info in staged if info.modified_ms < moment_ms]
        if not old:
            return []
        before = swept_until(await self._store.get(SWEEP))
        # Never back: a leader that was deposed may still be removing what is older than it has said.
        put = Put(SWEEP, str(max(moment_ms, before.moment_ms)).encode())
        if not (await self._store.txn((unchanged(SWEEP, before.revision),), (put,))).succeeded:
            return []  # another broker sweeps
        named: set[str] = set()
        for kv in (await self._store.range(WRITERS)).kvs:
            record = specs.decode(kv, WriterRecord)
            if not record.is_published:
                named.add(record.manifest)
                with suppress(ObjectMissing):  # published meanwhile; or lost, and with it what it named
                    named.update((await staging.get_manifest(self._objects, record.manifest)).keys)
        swept = [info.key for info in old if info.key not in named]
        for start in range(0, len(swept), STEP):
            await self._objects.delete(swept[start : start + STEP])
        if swept:
            log.info("writers: removed what was staged and not committed objects=%d", len(swept))
        return swept
