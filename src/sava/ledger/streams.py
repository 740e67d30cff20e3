"""One broker's ledger on its way to one mirror, over one ordered connection.

    connect ── Join ─▶ ◀─ JoinAnswer ── LedgerAppend, LedgerAppend … ─▶ ◀─ Durable …

The ``Owner`` decides what to send; a ``LedgerStream`` carries it. The newest bytes come from memory
(``RecentBytes``); what is older is read back from the log, verified, in a worker thread. Nothing waits here:
a socket that takes no more, or a mirror that has a window of bytes to sync, stops the sending, and the mirror
is behind.

A stream makes a broken connection again, with pauses that grow until the mirror lets it in; so it does when
the mirror does not answer the Join. A mirror that lets the stream in and refuses the bytes (a full disk) does
not end the growing: otherwise it would be sent the same megabytes twenty times a second. Whether another disk
takes the place of a mirror that does not come forward is decided above (``writer``), by its ``answers``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

from sava.errors import SavaError
from sava.ledger.mirror_log import READ_BYTES, WalRangeReader
from sava.ledger.protocol import (
    Answers,
    Durable,
    JoinAnswer,
    LedgerRefused,
    Owner,
    Range,
    RefusalReason,
    StorageId,
)
from sava.ledger.registry import LiveBrokers
from sava.ledger.wire import (
    LedgerAnswer,
    LedgerConnection,
    LedgerRequest,
)
from sava.peer_connection import Dialer
from sava.tasks import Backoff, cancelled, spawn
from sava.wal import Buffers
from sava.wal.format import FRAME_BYTES

log = logging.getLogger(__name__)

JOIN_S: Final = 5.0
PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0


class LedgerStream:
    """Owned by the event loop, as the Owner is."""

    def __init__(
        self,
        storage: StorageId,
        owner: Owner,
        *,
        dialer: Dialer,
        live_brokers: LiveBrokers,
        recent: RecentBytes,
        older: WalRangeReader,
        heard: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """``heard`` is called after each answer of the mirror, which the Owner has taken."""
        self.storage = storage
        self._owner = owner
        self._dialer = dialer
        self._live_brokers = live_brokers
        self._recent = recent
        self._older = older
        self._heard = heard
        self._link: LedgerConnection | None = None
        self._joined = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._trimmed = 0
        self.refusal: RefusalReason | None = None
        """Why the mirror took nothing, until it does again."""
        self.answers = Answers(asyncio.get_running_loop().time())
        self.connects = 0
        self.reread_bytes = 0
        self._fail = fail
        self._task = spawn(self._run(), name=f"ledger stream to {storage}", failed=fail)

    @property
    def is_joined(self) -> bool:
        return self._joined.is_set()

    # -- connection --------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff, reason = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, jitter=0), ""
        while not self._owner.is_fenced:
            try:
                await self._connected()
            except (OSError, TimeoutError, SavaError) as error:
                if self.is_joined and self.refusal is None:
                    backoff.reset()
                    reason = ""
                if str(error) != reason:
                    reason = str(error)
                    log.info("ledgers: no stream disk=%s error=%s", self.storage, reason or "no answer")
            finally:
                self._joined.clear()
                self.answers.lost(asyncio.get_running_loop().time())
                self._owner.disconnected(self.storage)
                self._link = None
            await backoff.pause()

    async def _connected(self) -> None:
        """One connection, from its beginning to its end."""
        live = self._live_brokers.find(self.storage)
        if live is None:
            raise ConnectionError("its broker is not registered")
        link = LedgerConnection(self._received, self.pump)
        try:
            await link.open(self._dialer, live.address, live.broker)
            self._link = link
            self.connects += 1
            link.send(LedgerRequest(0, self._owner.own, self._owner.join(self.storage)))
            async with asyncio.timeout(JOIN_S):
                await self._until_joined(link)
            self.pump()
            raise ConnectionError(await link.is_gone)
        finally:
            link.connection.abort()

    async def _until_joined(self, link: LedgerConnection) -> None:
        joining: asyncio.Future[Any] = asyncio.create_task(self._joined.wait())
        gone: asyncio.Future[Any] = link.is_gone
        try:
            await asyncio.wait([joining, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            joining.cancel()

    def _received(self, answer: LedgerAnswer) -> None:
        message, owner = answer.message, self._owner
        if not isinstance(message, (JoinAnswer, Durable, LedgerRefused)):
            return
        before = owner.durable_end(self.storage)
        owner.receive(message)
        if isinstance(message, JoinAnswer):
            self._joined.set()
        elif isinstance(message, LedgerRefused):
            self.refusal = message.reason
            if message.reason is not RefusalReason.GAP and self._link is not None:
                self._link.connection.abort(f"refused: {message.reason.name}")
        durable = owner.durable_end(self.storage)
        if durable > before:
            self.refusal = None
        if durable > before or (isinstance(message, JoinAnswer) and durable >= owner.end):
            self.answers.answered(asyncio.get_running_loop().time(), durable, owner.end)
        self._heard()
        self.pump()

    # -- sending -----------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what is to be sent, as far as socket and window allow."""
        link = self._link
        while link is not None and not link.connection.paused_at and self._reading is None:
            part = self._owner.next_send(self.storage)
            if part is None:
                return
            data = self._recent.take(part.start)
            if data is None:
                self._reading = spawn(self._reread(link, part), name="rereading", failed=self._fail)
                return
            self._send(link, part.start, data)
            if part.start + len(data) >= self._owner.end:
                return

    def _send(self, link: LedgerConnection, position: int, data: bytes) -> None:
        link.send(LedgerRequest(0, self._owner.own, self._owner.append(self.storage, position, data)))

    async def _reread(self, link: LedgerConnection, part: Range) -> None:
        start, size = part.start, min(part.end - part.start, READ_BYTES)
        read = partial(self._older.read, start, self._owner.end, size)
        try:
            data = await asyncio.get_running_loop().run_in_executor(None, read)
        except SavaError as error:
            log.warning("ledgers: the own log cannot be read back position=%d error=%s", start, error)
            data = b""
        finally:
            self._reading = None
        if not data:
            # Trimmed meanwhile, or not intact. The next Join says from where on the mirror can be served.
            link.connection.abort(f"the ledger cannot be read back at {start}")
            return
        wanted = self._owner.next_send(self.storage)
        if self._link is link and wanted is not None and wanted.start == start:
            self.reread_bytes += len(data)
            self._send(link, start, data)
        self.pump()

    def trim(self) -> None:
        """Tell a mirror that has nothing else to hear."""
        if self._link is not None and self.is_joined and self._owner.floor > self._trimmed:
            self._trimmed = self._owner.floor
            self._link.send(LedgerRequest(0, self._owner.own, self._owner.trim(self.storage)))

    async def close(self) -> None:
        tasks = [self._task, *([self._reading] if self._reading is not None else [])]
        await cancelled(*tasks)


RUN_BYTES: Final = 256 << 10
"""Small records are sent together up to this size."""
MAX_RUNS: Final = 4096
"""At most this many groups of the log, however small, wait here."""


class _Run:
    """Whole records that follow each other."""

    __slots__ = ("parts", "size", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.size = 0
        self.parts: list[bytes | memoryview] = []

    def joined(self) -> bytes:
        """Once for all mirrors."""
        if len(self.parts) > 1 or type(self.parts[0]) is not bytes:
            self.parts = [b"".join(self.parts)]
        only = self.parts[0]
        assert type(only) is bytes
        return only


class RecentBytes:
    """The newest bytes of the own log, on their way from the log's writer to the mirrors.

    The log's writer hands over what it has written before it syncs (``wal.log``: the tap). The event loop
    takes it from here and sends it, so that mirrors write and sync while the own disk does. What a mirror
    needs and is not here any more is read back from the log's files: memory is bounded, whatever mirrors do.

    Filled by the writer's thread, read by the event loop; ``_lock`` guards the runs and is held for moments
    only.
    """

    def __init__(self, max_bytes: int, grown: Callable[[], object]) -> None:
        """``grown`` is called on the writer's thread when there is something to send."""
        self._max_bytes = max_bytes
        self._grown = grown
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._runs: list[_Run] = []
        self._starts: list[int] = []
        self._held = 0
        self._end = 0

    @property
    def end(self) -> int:
        """Of what was written."""
        return self._end

    def begin(self, position: int) -> None:
        """The tap is at this position: what comes is handed over, what lies before it never was."""
        with self._lock:
            self._end = max(self._end, position)

    def clear(self) -> None:
        """The tap was taken away: what comes after the next one does not continue this."""
        with self._lock:
            self._runs, self._starts, self._held = [], [], 0

    def tap(self, position: int, records: Sequence[tuple[int, Buffers]]) -> None:
        """(On the writer's thread.)"""
        runs: list[_Run] = []
        at = position
        for size, parts in records:
            if not runs or runs[-1].size + size > RUN_BYTES:
                runs.append(_Run(at))
            runs[-1].parts += parts
            runs[-1].size += size
            at += size
        with self._lock:
            self._runs += runs
            self._starts += [run.start for run in runs]
            self._held += at - position
            self._end = at
            while len(self._runs) > 1 and (self._held > self._max_bytes or len(self._runs) > MAX_RUNS):
                self._held -= self._runs.pop(0).size
                del self._starts[0]
        if at - position > FRAME_BYTES:
            # Else it is a mark, which the log leaves when it is idle; it goes with what comes next.
            self._grown()

    def take(self, position: int) -> bytes | None:
        """Whole records from ``position``, a border, on; None when they are not here."""
        with self._lock:
            index = bisect_right(self._starts, position) - 1
            run = self._runs[index] if index >= 0 else None
            if run is None or run.start + run.size <= position:
                return None
            data = run.joined()
            if position > run.start:
                data = data[position - run.start :]
            is_newest = index + 1 == len(self._runs)
            following = [] if is_newest else self._small_behind(index, len(data))
        return b"".join([data, *following]) if following else data

    def _small_behind(self, index: int, size: int) -> list[bytes]:
        """(The lock is held.) What may go along with a run of this size."""
        found: list[bytes] = []
        for run in islice(self._runs, index + 1, None):
            size += run.size
            if size > RUN_BYTES:
                break
            found.append(run.joined())
        return found
