"""RaftListener: the Raft port of this node.

An accepted connection has a few seconds to say what it is for (``raft_wire``); a lane then delivers envelopes
to the node until it breaks, one for journals is handed to whoever keeps copies, everything else is one
question and one answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import cast

from sava.config import Auth, ConfigInvalid
from sava.errors import SavaError
from sava.framing import BadFrame, FrameReader
from sava.ledger.server import Session, Write
from sava.metadata.errors import IdentityConflict, Unavailable
from sava.metadata.peer import Bootstrap, Inbound, MalformedEnvelope, code_of, decode_envelope, detail_of
from sava.peers import tls
from sava.peers.raft_wire import (
    GREETING,
    Bind,
    Bound,
    Identify,
    Introduction,
    Opening,
    OpenJournals,
    OpenLane,
    Refusal,
    Response,
    Welcome,
    decode_opening,
    encode,
)
from sava.peers.sockets import (
    is_gone,
    notice_vanishing,
    settle,
    split_address,
)
from sava.tasks import cancelled

log = logging.getLogger(__name__)

OPENING_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 1024
"""Far more than a cluster needs; a stranger that opens more is turned away."""


class RaftListener:
    """The server side: hands what arrives to the node."""

    def __init__(self, inbound: Inbound, address: str, auth: Auth) -> None:
        self._inbound = inbound
        self._address = address
        self._tls = tls.server_context(auth)
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._is_stopping = False
        self.journals: Callable[[Write], Session] | None = None
        """Begins a session about journals; None while there is nobody to keep copies."""
        self.malformed = 0

    async def start(self) -> None:
        """Raises ConfigInvalid when the port is taken."""
        host, port = split_address(self._address)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _Connection(self),
                host,
                port,
                ssl=self._tls,
                # A stranger that connects and says nothing holds its socket for no longer than without TLS.
                ssl_handshake_timeout=OPENING_TIMEOUT_S if self._tls else None,
            )
        except OSError as error:
            raise ConfigInvalid(
                f"cannot listen on {self._address}: the address is in use or not of this machine"
            ) from error

    async def stop(self) -> None:
        """At once: connections carry nothing that could be finished."""
        self._is_stopping = True
        if self._server is not None:
            self._server.close()
        await settle()
        for connection in tuple(self._connections):
            connection.abort()
        await cancelled(*self._tasks)
        if not await is_gone(self._empty):
            log.warning("raft: connections did not end connections=%d", len(self._connections))

    def joined(self, connection: _Connection) -> bool:
        self._connections.add(connection)
        self._empty.clear()
        # A connection that was accepted just before ``stop`` may get here after it; a peer's lane would then
        # stay open, and ``stop`` would wait for it.
        return not self._is_stopping and len(self._connections) <= MAX_CONNECTIONS

    def left(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def open(self, connection: _Connection, opening: Opening) -> None:
        match opening:
            case OpenLane(cluster=theirs):
                ours = self._inbound.info().cluster
                if ours and theirs and ours != theirs:
                    connection.end(_refusal(_stranger(ours, theirs)))
                else:
                    connection.welcome()
            case OpenJournals(cluster=theirs):
                ours = self._inbound.info().cluster
                if not ours or ours != theirs:
                    connection.end(_refusal(_stranger(ours, theirs)))
                elif self.journals is None:
                    connection.end(_refusal(Unavailable("this broker's disk is not open yet")))
                else:
                    connection.welcome(self.journals)
            case Identify():
                connection.end(Introduction(self._inbound.info()))
            case Bind(bootstrap=bootstrap):
                task = asyncio.get_running_loop().create_task(self._bind(connection, bootstrap))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _bind(self, connection: _Connection, bootstrap: Bootstrap) -> None:
        try:
            await self._inbound.bind(bootstrap)
        except SavaError as error:
            connection.end(_refusal(error))
        except Exception:
            # The asker cannot know whether this node is bound now; it asks again.
            log.exception("raft: binding to a cluster failed cluster=%s", bootstrap.cluster)
            connection.abort()
        else:
            connection.end(Bound())

    def receive(self, payloads: Sequence[bytes]) -> None:
        envelopes = []
        for payload in payloads:
            try:
                envelopes.append(decode_envelope(payload))
            except MalformedEnvelope as error:
                self.malformed += 1
                log.warning("raft: message dropped reason=%s", error)
        self._inbound.receive(envelopes)


class _Connection(asyncio.Protocol):
    """One accepted connection: first its opening, then, if it is a lane, envelopes."""

    def __init__(self, listener: RaftListener) -> None:
        self._listener = listener
        self._reader = FrameReader(GREETING)
        self._transport: asyncio.WriteTransport | None = None
        self._impatience: asyncio.TimerHandle | None = None
        self._is_opened = False
        self._is_lane = False
        self._session: Session | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.WriteTransport, transport)
        self._transport = transport
        if not self._listener.joined(self):
            transport.abort()
            return
        notice_vanishing(transport)
        self._impatience = asyncio.get_running_loop().call_later(OPENING_TIMEOUT_S, self._expect_opening)

    def data_received(self, data: bytes) -> None:
        try:
            payloads = self._reader.feed(data)
            if payloads and not self._is_opened:
                self._is_opened = True
                self._listener.open(self, decode_opening(payloads.pop(0)))
            if payloads and self._session is not None:
                self._session.receive(payloads)
                return
        except BadFrame as error:
            self._listener.malformed += 1
            log.warning("raft: connection dropped reason=%s", error)
            self.abort()
            return
        if payloads and self._is_lane:
            self._listener.receive(payloads)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._impatience is not None:
            self._impatience.cancel()
        if self._session is not None:
            self._session.closed()
        self._listener.left(self)

    def welcome(self, journals: Callable[[Write], Session] | None = None) -> None:
        """``journals``: it is for a session, and not a lane."""
        if self._transport is None:
            return
        self._write((encode(Welcome()),))
        if journals is None:
            self._is_lane = True
        else:
            self._session = journals(self._write)

    def end(self, response: Response) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._write((encode(response),))
            self._transport.close()

    def _write(self, parts: Sequence[bytes]) -> None:
        """No error of this connection leaves it: a disk answers from the middle of a sync, and an error there
        would end the broker."""
        if self._transport is None:
            return
        try:
            self._transport.writelines(parts)
        except Exception as error:  # noqa: BLE001 (uvloop raises RuntimeError for a handle that is closed)
            log.warning("raft: connection dropped reason=writing failed: %s", error)
            self.abort()
            # The loop may not tell of a handle that it has closed itself; telling twice does no harm. Not at
            # once: the disk that answers is in the middle of something.
            asyncio.get_running_loop().call_soon(self.connection_lost, None)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _expect_opening(self) -> None:
        if not self._is_opened:
            self.abort()


def _stranger(ours: str, theirs: str) -> IdentityConflict:
    return IdentityConflict(f"this node belongs to cluster {ours or '(none)'}, not to {theirs or '(none)'}")


def _refusal(error: SavaError) -> Refusal:
    return Refusal(code_of(error), str(error), detail_of(error))
