"""RaftListener: the Raft port of this node.

An accepted connection has a few seconds for its handshake (``peer_connection``). A stream of Raft then
delivers envelopes to the node until it breaks, a connection about ledgers is a session of this broker's
disk, everything else is one question and one answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from sava.config import Auth, ConfigInvalid
from sava.errors import SavaError
from sava.ledger.wire import LedgerSession, Write
from sava.metadata.errors import IdentityConflict, Unavailable
from sava.metadata.peer import Bootstrap, Inbound, MalformedEnvelope, code_of, decode_envelope, detail_of
from sava.peer_connection import (
    GREETING,
    Bind,
    Bound,
    HandshakeRefused,
    HandshakeReply,
    Identify,
    Introduction,
    OpenLedgers,
    OpenRaft,
    PeerConnection,
    Welcome,
    decode_handshake,
    encode_handshake,
    is_gone,
    settle,
    split_address,
)
from sava.peers import tls
from sava.tasks import cancelled

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 5.0
MAX_CONNECTIONS: Final = 1024
"""Far more than a cluster needs; a stranger that opens more is turned away."""


class RaftListener:
    """The server side: hands what arrives to the node."""

    def __init__(self, inbound: Inbound, address: str, auth: Auth) -> None:
        self._inbound = inbound
        self._address = address
        self._tls = tls.server_context(auth)
        self._server: asyncio.Server | None = None
        self._connections: set[PeerConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._is_stopping = False
        self.ledgers: Callable[[Write], LedgerSession] | None = None
        """Begins a session about ledgers; None while this broker's disk is not open."""
        self.malformed = 0

    async def start(self) -> None:
        """Raises ConfigInvalid when the port is taken."""
        host, port = split_address(self._address)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._accept,
                host,
                port,
                ssl=self._tls,
                # A stranger that connects and says nothing holds its socket for no longer than without TLS.
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if self._tls else None,
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

    # -- one connection ----------------------------------------------------------------------

    def _accept(self) -> PeerConnection:
        return PeerConnection(
            self._handshake,
            opened=self._opened,
            lost=self._lost,
            greeting=GREETING,
            handshake_timeout_s=HANDSHAKE_TIMEOUT_S,
        )

    def _opened(self, connection: PeerConnection) -> None:
        self._connections.add(connection)
        self._empty.clear()
        # A connection that was accepted just before ``stop`` may get here after it; a peer's stream would
        # then stay open, and ``stop`` would wait for it.
        if self._is_stopping or len(self._connections) > MAX_CONNECTIONS:
            connection.abort()

    def _lost(self, connection: PeerConnection) -> None:
        if connection.is_malformed:
            self.malformed += 1
            log.warning("raft: connection dropped reason=%s", connection.reason)
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def _handshake(self, connection: PeerConnection, payload: bytes) -> None:
        """Raises BadFrame."""
        ours = self._inbound.info().cluster
        match decode_handshake(payload):
            case OpenRaft(cluster=theirs):
                if ours and theirs and ours != theirs:
                    _end(connection, _refusal(_stranger(ours, theirs)))
                else:
                    connection.received = self._receive
                    connection.write((encode_handshake(Welcome()),))
            case OpenLedgers(cluster=theirs):
                if not ours or ours != theirs:
                    _end(connection, _refusal(_stranger(ours, theirs)))
                elif self.ledgers is None:
                    _end(connection, _refusal(Unavailable("this broker's disk is not open yet")))
                else:
                    session = self.ledgers(connection.write)
                    connection.received = session.receive
                    connection.lost = partial(self._lost_session, session)
                    connection.write((encode_handshake(Welcome()),))
            case Identify():
                _end(connection, Introduction(self._inbound.info()))
            case Bind(bootstrap=bootstrap):
                task = asyncio.get_running_loop().create_task(self._bind(connection, bootstrap))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _lost_session(self, session: LedgerSession, connection: PeerConnection) -> None:
        session.closed()
        self._lost(connection)

    async def _bind(self, connection: PeerConnection, bootstrap: Bootstrap) -> None:
        try:
            await self._inbound.bind(bootstrap)
        except SavaError as error:
            _end(connection, _refusal(error))
        except Exception:
            # The asker cannot know whether this node is bound now; it asks again.
            log.exception("raft: binding to a cluster failed cluster=%s", bootstrap.cluster)
            connection.abort()
        else:
            _end(connection, Bound())

    def _receive(self, payloads: Sequence[bytes]) -> None:
        envelopes = []
        for payload in payloads:
            try:
                envelopes.append(decode_envelope(payload))
            except MalformedEnvelope as error:
                self.malformed += 1
                log.warning("raft: message dropped reason=%s", error)
        self._inbound.receive(envelopes)


def _end(connection: PeerConnection, reply: HandshakeReply) -> None:
    connection.end((encode_handshake(reply),))


def _stranger(ours: str, theirs: str) -> IdentityConflict:
    return IdentityConflict(f"this node belongs to cluster {ours or '(none)'}, not to {theirs or '(none)'}")


def _refusal(error: SavaError) -> HandshakeRefused:
    return HandshakeRefused(code_of(error), str(error), detail_of(error))
