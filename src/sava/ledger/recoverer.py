"""How a ledger whose owner is gone is closed, and how a closed one is read.

A ``Recoverer`` carries out one recovery (``protocol.Recovery``) with the metadata store and the disks. The
state machine says what to store and whom to ask; here are the tasks, the deadlines, and the patience:

* a question that is under way is not asked a second time: a check of a long copy takes its seconds;
* a disk that did not answer is asked again, as long as the recovery lasts and whatever others are at: a
  broker may come back in a minute or in a week, and its answer may be the one that is missing; and a broker
  that has joined the cluster meanwhile may take a copy;
* a write whose outcome is not known is repeated: one of the two happens, and the other finds its record.

A recovery waits without limit if too few answer. What that means for the messages, and for an operator who
cannot wait, is said by ``loss``, once every disk was asked: a disk that is about to answer has lost nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from sava.errors import RetryableError, SavaError
from sava.ledger.protocol import (
    Check,
    CheckAnswer,
    CopyState,
    Fence,
    FenceAnswer,
    LedgerId,
    LedgerRecord,
    LedgerState,
    Loss,
    Message,
    Phase,
    Range,
    Read,
    ReadAnswer,
    Recovery,
    StorageId,
)
from sava.ledger.protocol.record import without
from sava.ledger.registry import LedgerPeers, LedgerRecordChanged, LedgerRecords, PeerUnreachable
from sava.metadata.commands import Compare
from sava.metadata.errors import Deposed, OutcomeUnknown, Unavailable
from sava.tasks import cancelled, spawn
from sava.wal import Record
from sava.wal.errors import LogCorrupt
from sava.wal.format import HEADER, KINDS, read_frame, read_frames, seed_of

log = logging.getLogger(__name__)

FENCE_S: Final = 3.0
"""A disk stores a few bytes and syncs."""
CHECK_S: Final = 120.0
"""A disk reads all that it has of the ledger."""
COPY_S: Final = 15.0
"""Of one piece."""
RETRY_S: Final = 0.5
STORE_RETRY_S: Final = 0.2
TOLD_AFTER_S: Final = 10.0
"""A recovery that lasts longer is logged, and again whenever it waits for others."""


class Recoverer:
    """One recovery of one ledger. Owned by the event loop; ``run`` is one task."""

    def __init__(
        self,
        ledger: LedgerId,
        records: LedgerRecords,
        peers: LedgerPeers,
        *,
        name: str,
        conditions: Sequence[Compare] = (),
        term: int = 0,
        spares: Callable[[], Sequence[StorageId]] = tuple,
    ) -> None:
        """``name`` is the recoverer's, for people. ``conditions`` must hold when the claim is written,
        ``term`` (if any) when anything is. ``spares`` (at the time) may hold a copy if too few members are
        left."""
        self.ledger = ledger
        self._records = records
        self._peers = peers
        self._by = f"{name}-{uuid.uuid4().hex[:12]}"
        self._conditions = tuple(conditions)
        self._term = term
        self._spares = spares
        self._recovery: Recovery | None = None
        self._asking: dict[Message, asyncio.Task[None]] = {}
        self._asked: set[Message] = set()
        """Fences and checks that had their answer or their deadline."""
        self._accepted: Loss | None = None
        self._changed = asyncio.Event()
        self._began = time.monotonic()
        self._told: tuple[StorageId, ...] = ()

    # -- knowing -----------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self._recovery.phase if self._recovery is not None else Phase.CLAIM

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def answers_needed(self) -> int:
        return self._recovery.answers_needed if self._recovery is not None else 0

    def loss(self) -> Loss | None:
        """What closing the ledger with what is there would cost; None: it continues by itself."""
        is_asking = any(
            message not in self._asked for message in self._asking if isinstance(message, (Fence, Check))
        )
        return self._recovery.loss() if self._recovery is not None and not is_asking else None

    def accept_loss(self, loss: Loss, *, why: str) -> bool:
        """Accept exactly this loss; False if it is no longer what would be lost. A loss that was accepted
        before wakes no one: who accepts it more often than every RETRY_S would keep the recovery from trying
        again."""
        if self._recovery is None or loss != self.loss():
            return False
        if loss == self._accepted:
            return True
        if not self._recovery.accept_loss(loss):
            return False
        self._accepted = loss
        log.warning("ledgers: a loss is accepted, %s ledger=%s loss=%s", why, self.ledger, loss)
        self._changed.set()
        return True

    # -- running -----------------------------------------------------------------------------

    async def run(self) -> LedgerRecord | None:
        """Until the ledger is closed; None: it has no record, or another broker recovers it. Raises Deposed,
        and what keeps the record from being read."""
        found = await self._records.get(self.ledger)
        if found is None or found.record.state is LedgerState.CLOSED:
            return found.record if found is not None else None
        recovery = self._recovery = Recovery(
            self.ledger, found.record, found.revision, by=self._by, spares=self._spares()
        )
        try:
            while recovery.phase not in (Phase.CLOSED, Phase.OVERTAKEN):
                await self._advance(recovery)
        finally:
            await cancelled(*self._asking.values())
        return recovery.record if recovery.phase is Phase.CLOSED else None

    async def _advance(self, recovery: Recovery) -> None:
        if recovery.wanted is not None:
            await self._store(recovery)
            return
        self._send(recovery)
        try:
            async with asyncio.timeout(RETRY_S):
                await self._changed.wait()
        except TimeoutError:
            recovery.offer(self._spares())
            if self._is_busy:
                recovery.ask_again()
            else:
                recovery.retry()
            self._tell(recovery)
        self._changed.clear()

    @property
    def _is_busy(self) -> bool:
        """Whether a disk is at work, and not only to be heard of."""
        return any(not isinstance(message, Fence) for message in self._asking)

    async def _store(self, recovery: Recovery) -> None:
        wanted = recovery.wanted
        assert wanted is not None
        is_claim = wanted.state is LedgerState.RECOVERING
        try:
            revision = await self._records.change(
                self.ledger,
                wanted,
                revision=recovery.revision,
                conditions=self._conditions if is_claim else (),
                fence_term=self._term,
            )
        except LedgerRecordChanged as changed:
            found = changed.found
            if found is not None and found.revision == recovery.revision:
                # As it was: it is a condition that does not hold. The owner is there.
                found = None
            recovery.found(*(found or (None, 0)))
        except Deposed:
            raise
        except (Unavailable, OutcomeUnknown, TimeoutError) as error:
            log.info("ledgers: writing the record again ledger=%s error=%s", self.ledger, error)
            await asyncio.sleep(STORE_RETRY_S)
        else:
            recovery.stored(revision)

    # -- asking ------------------------------------------------------------------------------

    def _send(self, recovery: Recovery) -> None:
        for message in recovery.poll():
            if message not in self._asking:
                task = spawn(self._ask(recovery, message), name=f"recovery of {self.ledger}")
                self._asking[message] = task

    async def _ask(self, recovery: Recovery, message: Message) -> None:
        timeout = FENCE_S if isinstance(message, Fence) else CHECK_S if isinstance(message, Check) else COPY_S
        origin = recovery.record.origin
        try:
            answer = await self._peers.ask(message.storage, message, origin=origin, timeout=timeout)
        except PeerUnreachable as error:
            log.debug("ledgers: no answer ledger=%s error=%s", self.ledger, error)
        except (SavaError, TimeoutError) as error:
            log.warning("ledgers: no answer ledger=%s error=%s", self.ledger, error)
        else:
            recovery.receive(answer)
            self._changed.set()
        finally:
            del self._asking[message]
            if isinstance(message, (Fence, Check)):
                self._asked.add(message)

    def _tell(self, recovery: Recovery) -> None:
        """Log once for each set of disks that is waited for."""
        loss = self.loss()
        if loss is None or self.seconds < TOLD_AFTER_S or loss.silent == self._told:
            return
        self._told = loss.silent
        log.warning(
            "ledgers: a recovery waits for disks ledger=%s phase=%s needed=%d disks=%s; "
            "`sava ledgers recover %s` shows what it would cost to close it without them",
            self.ledger,
            recovery.phase.value,
            recovery.answers_needed,
            ",".join(loss.silent),
            self.ledger,
        )


READ_BYTES: Final = 1 << 20
ASK_S: Final = 5.0
READ_S: Final = 15.0
VERIFY_S: Final = 90.0
"""All of a copy is read."""


class BytesMissing(RetryableError):
    """No disk that answers has this part of a ledger."""


class LedgerReader:
    """Reads the records of a ledger that no broker writes any more, from whichever disks hold them.

    A ledger's bytes are at the same positions on every disk, so the reader continues with another disk
    wherever one has nothing, or nothing intact. Each disk says what it has when it is fenced once more under
    the epoch that the record has anyway. What lies before the greatest floor that any of them names is in
    registered segments.

        disk a   base 0    floor 400 ──────────── end 900
        disk b   base 600              600 ────── end 1000 (written back)
        read                   400 ──── a ──── 900 ─ b ─ 1000

    Works for a ledger that is being recovered as well: with what is there, up to whatever end the caller
    wants. Owned by one task.
    """

    def __init__(self, ledger: LedgerId, record: LedgerRecord, peers: LedgerPeers, *, own: StorageId) -> None:
        """``own`` is this broker's disk, which is asked first."""
        self.ledger = ledger
        self.record = record
        self._peers = peers
        self._own = own
        self._copies: dict[StorageId, CopyState] = {}
        self.silent: tuple[StorageId, ...] = ()
        """Disks that may have a part, and did not answer."""

    async def locate(self) -> None:
        """Find out who has what. Who does not answer has nothing for now."""
        storages = sorted(self.record.storages, key=lambda storage: storage != self._own)
        holders = list(dict.fromkeys((*storages, *self.record.holders)))
        answers = await asyncio.gather(*map(self._fence, holders))
        self.silent = tuple(
            storage for storage, answer in zip(holders, answers, strict=True) if answer is None
        )
        self._copies = {
            answer.storage: answer.copy
            for answer in answers
            if answer is not None and answer.copy is not None
        }

    async def _fence(self, storage: StorageId) -> FenceAnswer | None:
        try:
            answer = await self._ask(storage, Fence(self.ledger, storage, self.record.epoch), ASK_S)
        except (SavaError, TimeoutError):
            return None
        return answer if isinstance(answer, FenceAnswer) else None

    @property
    def start(self) -> int:
        """What lies before it is in registered segments, or was never part of the ledger."""
        floors = [copy.floor for copy in self._copies.values()]
        return max([self.record.fragments[0].start, self.record.floor, *floors])

    @property
    def known_end(self) -> int:
        """The greatest that any disk has named."""
        return max((copy.end for copy in self._copies.values()), default=self.start)

    async def missing(self) -> tuple[Range, ...]:
        """What is to be read, and no disk that answers has intact."""
        held = [part for parts in await asyncio.gather(*map(self._intact, self._copies)) for part in parts]
        whole = Range(self.start, max(self.start, self.record.end))
        return tuple(without(whole, [*held, *self.record.lost]))

    async def _intact(self, storage: StorageId) -> list[Range]:
        copy = self._copies[storage]
        part = Range(max(copy.base, copy.floor), copy.end)
        try:
            answer = await self._ask(storage, Check(self.ledger, storage, *part), VERIFY_S)
        except (SavaError, TimeoutError):
            return []
        return without(part, list(answer.bad)) if isinstance(answer, CheckAnswer) else []

    async def records(self, start: int, end: int) -> AsyncIterator[Sequence[Record]]:
        """Of callers' kinds, a few at a time; what was given up (``record.lost``) is passed over. Raises
        BytesMissing."""
        for part in without(Range(start, end), list(self.record.lost)):
            at = part.start
            while at < part.end:
                data = await self._read(Range(at, part.end))
                found, at = await asyncio.to_thread(parse, data, at, self.record.origin)
                yield found

    async def _read(self, wanted: Range) -> bytes:
        for storage, copy in self._copies.items():
            end = min(wanted.end, copy.end)
            if not max(copy.base, copy.floor) <= wanted.start < end:
                continue
            try:
                answer = await self._ask(
                    storage, Read(self.ledger, storage, wanted.start, end, READ_BYTES), READ_S
                )
            except (SavaError, TimeoutError):
                continue
            if isinstance(answer, ReadAnswer) and answer.data and answer.position == wanted.start:
                return answer.data
        raise BytesMissing(
            f"no disk that answers has ledger {self.ledger} from {wanted.start} on; asked: "
            f"{', '.join(self._copies) or 'none'}"
        )

    async def _ask(self, storage: StorageId, message: Fence | Check | Read, timeout: float) -> object:
        async with asyncio.timeout(timeout + 1):  # whatever the other side of this port does
            return await self._peers.ask(storage, message, origin=self.record.origin, timeout=timeout)


class _Received:
    """Bytes as ``wal`` reads them."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length] if offset or length < len(self._data) else self._data


def parse(data: bytes, position: int, origin: StorageId) -> tuple[list[Record], int]:
    """The callers' records in these bytes, which begin with a record at ``position`` and hold whole ones, and
    where the next one begins. Raises LogCorrupt."""
    file, seed, records = _Received(data), seed_of(origin), []
    at = 0
    while at < len(data):
        before = at
        frames = read_frames(file, base=position, offset=at, end=len(data), seed=seed, chunk=len(data))
        for where, kind, _, _, payload, following in frames:
            at = following - position
            if kind < KINDS:
                records.append(Record(where, kind, payload))
        if at < len(data):
            # A file of the log begins here, with a header that has the seed.
            header = read_frame(file, base=position, offset=at, end=len(data), seed=0)
            if header is None or header[1] != HEADER:
                raise LogCorrupt("ledger", "received bytes", position + at, "no intact record")
            at = header[5] - position
        assert at > before
    return records, position + at
