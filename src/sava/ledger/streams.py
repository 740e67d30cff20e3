"""Stream: the own journal on its way to one mirror, over one ordered connection.

    connect ── Join ─▶ ◀─ Joined ── Append, Append … ─▶ ◀─ Durable …

What to send is the ``Owner``'s decision; here it is carried. The newest bytes come from memory (``recent``);
what is older is read back from the log, verified, in a worker thread. Nothing waits here: a socket that takes
no more, or a mirror that has a window of bytes to sync, stops the sending, and the mirror is behind.

A connection that breaks is made anew, with pauses that grow until the mirror lets us in again; so is one
whose mirror does not answer the Join. A mirror that lets us in and refuses the bytes (a full disk) does not
end the growing: otherwise it would be sent the same megabytes twenty times a second. Whether a mirror that
does not come forward is to be replaced is decided above (``owner_host``), by its ``answers``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from sava.errors import SavaError
from sava.ledger.ports import Neighbours
from sava.ledger.protocol import (
    Answers,
    Durable,
    Joined,
    Owner,
    Range,
    Refusal,
    Refused,
    StorageId,
)
from sava.ledger.recent import RecentBytes
from sava.ledger.stretches import READ_BYTES
from sava.ledger.wire import (
    LedgerAnswer,
    LedgerConnection,
    LedgerRequest,
)
from sava.peer_connection import Dialer
from sava.tasks import cancelled, spawn

log = logging.getLogger(__name__)

JOIN_S: Final = 5.0
PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0


class OlderBytes(Protocol):
    """Reads back from the own log; see ``Stretches.read``."""

    def read(self, start: int, end: int, max_bytes: int = ...) -> bytes: ...


class Stream:
    """Owned by the event loop, as the Owner is."""

    def __init__(
        self,
        storage: StorageId,
        owner: Owner,
        *,
        dialer: Dialer,
        neighbours: Neighbours,
        recent: RecentBytes,
        older: OlderBytes,
        heard: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """``heard`` is called after each answer of the mirror, which the Owner has taken."""
        self.storage = storage
        self._owner = owner
        self._dialer = dialer
        self._neighbours = neighbours
        self._recent = recent
        self._older = older
        self._heard = heard
        self._link: LedgerConnection | None = None
        self._joined = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._trimmed = 0
        self.refusal: Refusal | None = None
        """Why the mirror took nothing, until it does again."""
        self.answers = Answers(asyncio.get_running_loop().time())
        self.connects = 0
        self.reread_bytes = 0
        self._fail = fail
        self._task = spawn(self._run(), name=f"journal stream to {storage}", failed=fail)

    @property
    def is_joined(self) -> bool:
        return self._joined.is_set()

    # -- connection --------------------------------------------------------------------------

    async def _run(self) -> None:
        pause, reason = PAUSE_MIN_S, ""
        while not self._owner.is_fenced:
            try:
                await self._connected()
            except (OSError, TimeoutError, SavaError) as error:
                if self.is_joined and self.refusal is None:
                    pause, reason = PAUSE_MIN_S, ""
                if str(error) != reason:
                    reason = str(error)
                    log.info("journals: no stream disk=%s error=%s", self.storage, reason or "no answer")
            finally:
                self._joined.clear()
                self.answers.lost(asyncio.get_running_loop().time())
                self._owner.disconnected(self.storage)
                self._link = None
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_MAX_S)

    async def _connected(self) -> None:
        """One connection, from its beginning to its end."""
        neighbour = self._neighbours.find(self.storage)
        if neighbour is None:
            raise ConnectionError("its broker is not registered")
        link = LedgerConnection(self._received, self.pump)
        try:
            await link.open(self._dialer, neighbour.address)
            self._link = link
            self.connects += 1
            link.send(LedgerRequest(0, self._owner.own, self._owner.join(self.storage)))
            async with asyncio.timeout(JOIN_S):
                await self._until_joined(link)
            self.pump()
            raise ConnectionError(await link.is_gone)
        finally:
            link.abort()

    async def _until_joined(self, link: LedgerConnection) -> None:
        joining: asyncio.Future[Any] = asyncio.create_task(self._joined.wait())
        gone: asyncio.Future[Any] = link.is_gone
        try:
            await asyncio.wait([joining, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            joining.cancel()

    def _received(self, answer: LedgerAnswer) -> None:
        message = answer.message
        if isinstance(message, (Joined, Durable, Refused)):
            self._took(message)
            self._heard()
            self.pump()

    def _took(self, message: Joined | Durable | Refused) -> None:
        before = self._owner.durable_end(self.storage)
        self._owner.receive(message)
        if isinstance(message, Joined):
            self._joined.set()
        elif isinstance(message, Refused):
            self.refusal = message.reason
            if message.reason is not Refusal.GAP and self._link is not None:
                self._link.abort(f"refused: {message.reason.name}")
        durable = self._owner.durable_end(self.storage)
        if durable > before:
            self.refusal = None
        if durable > before or (isinstance(message, Joined) and durable >= self._owner.end):
            self.answers.answered(asyncio.get_running_loop().time(), durable, self._owner.end)

    # -- sending -----------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what is to be sent, as far as socket and window allow."""
        link = self._link
        while link is not None and not link.is_paused and self._reading is None:
            part = self._owner.next_send(self.storage)
            if part is None:
                return
            data = self._recent.take(part.start)
            if data is None:
                self._reading = spawn(self._reread(link, part), name="rereading", failed=self._fail)
                return
            self._send(link, part.start, data)

    def _send(self, link: LedgerConnection, position: int, data: bytes) -> None:
        link.send(LedgerRequest(0, self._owner.own, self._owner.append(self.storage, position, data)))

    async def _reread(self, link: LedgerConnection, part: Range) -> None:
        start, size = part.start, min(part.end - part.start, READ_BYTES)
        read = partial(self._older.read, start, self._owner.end, size)
        try:
            data = await asyncio.get_running_loop().run_in_executor(None, read)
        except SavaError as error:
            log.warning("journals: the own log cannot be read back position=%d error=%s", start, error)
            data = b""
        finally:
            self._reading = None
        if not data:
            # Trimmed meanwhile, or not intact. The next Join says from where on the mirror can be served.
            link.abort(f"the journal cannot be read back at {start}")
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
