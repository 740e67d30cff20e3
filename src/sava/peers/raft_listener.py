"""RaftListener: the Raft port of this node.

An accepted connection has a few seconds for its handshake (``security.handshake``), TLS included. One that a
broker of this cluster has opened, for Raft or for ledgers, then knows whose it is:

* an envelope that names another sender ends the connection, and is not handed on;
* a session about ledgers is that broker's: it may own none but its own (``ledger.wire``).

Everything else is one question and one answer, for strangers as well.

**Strangers and brokers have rooms of their own.** A connection is a stranger's until its handshake is over.
There are at most ``MAX_STRANGERS``, and ``STRANGERS_PER_HOST`` of one host; beyond that the oldest goes,
since a broker needs a few milliseconds for its handshake, and those who have none to offer stay longer. What
was proved is another room, in which strangers take no place.

**Memory.** A stranger's frame is short. Afterwards a frame that has begun must grow within ``STALLED_S``, and
all that are unfinished together hold at most ``UNFINISHED_BYTES``: beyond that, the connection that holds
most is ended.

A secret that is no longer valid ends the connections that were proved by it: what has leaked is worth nothing
once it is replaced.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from sava.config import ConfigInvalid
from sava.errors import SavaError
from sava.ledger.wire import LedgerSession, Write
from sava.metadata.errors import IdentityConflict, NotAuthenticated, Unavailable
from sava.metadata.peer import Inbound, MalformedEnvelope, code_of, decode_envelope, detail_of
from sava.peer_connection import (
    GREETING,
    MAX_FRAME_BYTES,
    Contexts,
    PeerConnection,
    frame,
    is_gone,
    settle,
    split_address,
)
from sava.raft.types import NodeId
from sava.security.handshake import (
    BrokerCredentials,
    HandshakeRefused,
    ListenerHandshake,
    Purpose,
    encode_refusal,
    host_of,
)
from sava.tasks import cancelled

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 5.0
MAX_STRANGERS: Final = 64
STRANGERS_PER_HOST: Final = 16
MAX_CONNECTIONS: Final = 1024
"""Of brokers: far more than a cluster needs."""
STALLED_S: Final = 10.0
UNFINISHED_BYTES: Final = 4 * MAX_FRAME_BYTES
SWEEP_S: Final = 1.0
COMPLAIN_S: Final = 60.0
MAX_COMPLAINTS: Final = 256


class Complaints:
    """What is wrong with connections, for the log: a line a minute for each host, with how many there were.
    Hosts beyond the first few share one line."""

    @dataclass(slots=True)
    class _Host:
        until: float
        untold: int = 0

    def __init__(self) -> None:
        self._hosts: dict[str, Complaints._Host] = {}

    def add(self, peer: str, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        host = _network_of(peer)
        if host not in self._hosts and len(self._hosts) >= MAX_COMPLAINTS:
            self._hosts = {key: each for key, each in self._hosts.items() if each.until > now}
            if len(self._hosts) >= MAX_COMPLAINTS:
                host = "others"
        known = self._hosts.get(host)
        if known is not None and now < known.until:
            known.untold += 1
            return
        count = 1 + (known.untold if known is not None else 0)
        self._hosts[host] = self._Host(now + COMPLAIN_S)
        log.warning("raft: connection dropped peer=%s reason=%s count=%d", peer, reason, count)


def _network_of(peer: str) -> str:
    """The host; of IPv6 the network, as a host there has as many addresses as it likes."""
    host = host_of(peer)
    return str(ipaddress.ip_network(f"{host}/64", strict=False)) if ":" in host else host


class RaftListener:
    """The server side: hands what arrives to the node."""

    def __init__(
        self,
        inbound: Inbound,
        address: str,
        credentials: BrokerCredentials,
        contexts: Contexts = lambda: None,
    ) -> None:
        self._inbound = inbound
        self._address = address
        self._credentials = credentials
        self._contexts = contexts
        self._server: asyncio.Server | None = None
        self._connections: set[PeerConnection] = set()
        self._strangers: dict[PeerConnection, str] = {}
        """The hosts of those whose handshake is not over, oldest first."""
        self._hosts: Counter[str] = Counter()
        self._proved_by: dict[PeerConnection, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._complaints = Complaints()
        self._empty = asyncio.Event()
        self._empty.set()
        self._is_stopping = False
        self.ledgers: Callable[[Write, NodeId], LedgerSession] | None = None
        """Begins a broker's session about ledgers; None while this broker's disk is not open."""
        self.malformed = 0
        self.forged = 0
        """Envelopes that named another sender than the broker that has sent them."""

    async def start(self) -> None:
        """Raises ConfigInvalid when the port is taken."""
        host, port = split_address(self._address)
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._accept, host, port)
        except OSError as error:
            raise ConfigInvalid(
                f"cannot listen on {self._address}: the address is in use or not of this machine"
            ) from error
        self._sweeping = loop.call_later(SWEEP_S, self._sweep)

    async def stop(self) -> None:
        """At once: connections carry nothing that could be finished."""
        self._is_stopping = True
        if self._sweeping is not None:
            self._sweeping.cancel()
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
        handshake = ListenerHandshake(self._credentials)
        return PeerConnection(
            handshake=partial(self._shake, handshake),
            opened=self._opened,
            lost=self._lost,
            greeting=GREETING,
            tls=self._contexts(),
            handshake_timeout_s=HANDSHAKE_TIMEOUT_S,
        )

    def _opened(self, connection: PeerConnection) -> None:
        self._connections.add(connection)
        self._empty.clear()
        # A connection that was accepted just before ``stop`` may get here after it; a peer's stream would
        # then stay open, and ``stop`` would wait for it.
        if self._is_stopping:
            connection.abort()
            return
        host = host_of(connection.peer)
        if self._hosts[host] >= STRANGERS_PER_HOST:
            self._turn_away(next(each for each, its in self._strangers.items() if its == host))
        elif len(self._strangers) >= MAX_STRANGERS:
            self._turn_away(next(iter(self._strangers)))
        self._strangers[connection] = host
        self._hosts[host] += 1

    def _turn_away(self, connection: PeerConnection) -> None:
        self._complaints.add(connection.peer, "too many connections without a handshake")
        self._forget_stranger(connection)
        connection.abort("another connection needs its place")

    def _forget_stranger(self, connection: PeerConnection) -> None:
        host = self._strangers.pop(connection, None)
        if host is not None:
            self._hosts[host] -= 1
            if not self._hosts[host]:
                del self._hosts[host]

    def _lost(self, connection: PeerConnection) -> None:
        if connection.is_malformed:
            self.malformed += 1
            self._complaints.add(connection.peer, connection.reason)
        self._forget_stranger(connection)
        self._proved_by.pop(connection, None)
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    # -- its handshake -----------------------------------------------------------------------

    def _shake(self, handshake: ListenerHandshake, connection: PeerConnection, payload: bytes) -> None:
        """Raises BadHandshake."""
        try:
            reply = handshake.received(payload, connection.certificate)
        except (NotAuthenticated, IdentityConflict) as error:
            self._refuse(connection, error)
            return
        if reply is not None:
            connection.write((frame(reply),))
        if not handshake.is_over:
            return
        match handshake.purpose:
            case Purpose.RAFT:
                self._establish(connection, handshake)
                connection.received = partial(self._receive, connection, handshake.node)
                connection.write((frame(handshake.welcome()),))
            case Purpose.LEDGERS if self.ledgers is None:
                _end(connection, Unavailable("this broker's disk is not open yet"))
            case Purpose.LEDGERS:
                assert self.ledgers is not None
                self._establish(connection, handshake)
                session = self.ledgers(connection.write, handshake.node)
                connection.received = session.receive
                connection.lost = partial(self._lost_session, session)
                connection.write((frame(handshake.welcome()),))
            case Purpose.IDENTIFY:
                connection.end((frame(handshake.introduction()),))
            case Purpose.BIND:
                connection.answer_later()
                task = asyncio.get_running_loop().create_task(self._bind(connection, handshake))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _establish(self, connection: PeerConnection, handshake: ListenerHandshake) -> None:
        self._forget_stranger(connection)
        if len(self._proved_by) >= MAX_CONNECTIONS:
            connection.abort("too many connections of brokers")
            return
        self._proved_by[connection] = handshake.proved_by
        connection.establish()

    def _refuse(self, connection: PeerConnection, error: SavaError) -> None:
        self.malformed += 1
        self._complaints.add(connection.peer, str(error))
        _end(connection, error)

    async def _bind(self, connection: PeerConnection, handshake: ListenerHandshake) -> None:
        secret, order = self._credentials.secret, handshake.order
        made = ""

        async def prepare() -> None:
            """Before this node says, or writes, that it belongs to the cluster, it has the secret."""
            nonlocal made
            if not secret.is_known:
                await asyncio.to_thread(_keep_secret, self._credentials, order.secret)
                made = "" if order.secret else secret.shown()

        try:
            await self._inbound.bind(order.bootstrap, prepare)
        except SavaError as error:
            self._complaints.add(connection.peer, str(error))
            _end(connection, error)
        except Exception:
            # The asker cannot know whether this node is bound now; it asks again.
            log.exception("raft: binding to a cluster failed cluster=%s", order.bootstrap.cluster)
            connection.abort()
        else:
            connection.end((frame(handshake.bound(made)),))

    # -- what it brings ----------------------------------------------------------------------

    def _lost_session(self, session: LedgerSession, connection: PeerConnection) -> None:
        session.closed()
        self._lost(connection)

    def _receive(self, connection: PeerConnection, node: NodeId, payloads: Sequence[bytes]) -> None:
        envelopes = []
        for payload in payloads:
            try:
                envelope = decode_envelope(payload)
            except MalformedEnvelope as error:
                self.malformed += 1
                self._complaints.add(connection.peer, str(error))
                continue
            if envelope.src != node:
                self.forged += 1
                self._complaints.add(connection.peer, f"node {node} speaks as node {envelope.src}")
                connection.abort("it speaks as another node")
                break
            envelopes.append(envelope)
        self._inbound.receive(envelopes)

    # -- what stays too long -----------------------------------------------------------------

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeping = loop.call_later(SWEEP_S, self._sweep)
        now = loop.time()
        held = []
        for connection in tuple(self._connections):
            if not connection.unfinished:
                continue
            if connection.is_established and now - connection.heard_at > STALLED_S:
                self._complaints.add(connection.peer, f"a frame did not grow for {STALLED_S:g} s")
                connection.abort("an unfinished frame")
            else:
                held.append(connection)
        held.sort(key=lambda each: each.unfinished)
        while held and sum(each.unfinished for each in held) > UNFINISHED_BYTES:
            largest = held.pop()
            self._complaints.add(largest.peer, "too many bytes of unfinished frames")
            largest.abort("too many bytes of unfinished frames")
        for connection, proved_by in tuple(self._proved_by.items()):
            if not self._credentials.secret.is_valid(proved_by):
                log.info("raft: connection ended, its secret was replaced peer=%s", connection.peer)
                connection.abort("the secret was replaced")


def _keep_secret(credentials: BrokerCredentials, secret: str) -> None:
    """(On a thread.)"""
    if secret:
        credentials.secret.store(secret)
    else:
        credentials.secret.create()


def _end(connection: PeerConnection, error: SavaError) -> None:
    refused = HandshakeRefused(code_of(error), str(error), detail_of(error))
    connection.end((frame(encode_refusal(refused)),))
