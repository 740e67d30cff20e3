"""TcpTransport: how this node reaches the Raft ports of others (``raft_listener`` is the other end).

Plain TCP (or TLS) with the frames of ``peer_connection``, and not gRPC as on the other ports: a write waits
for one message to a follower and its answer. grpc.aio takes about 240 µs for such a pair on one machine, an
asyncio connection 20, and what it burns besides is taken from the same cores that serve the write (see
``docs/design/raft.md``).

Two streams lead to every peer, each on a connection of its own, so that a snapshot that fills one pipe cannot
make the other late and start an election:

* control: votes, heartbeats, all replies, forwarded requests and answers that are small;
* bulk: appends and snapshot chunks, and requests or answers that are large.

Appends share one stream because their order matters: a leader sends them ahead without waiting, and one that
overtakes another is refused and sent again. Replies are small and each stands for itself, so they take the
control stream.

A connection begins with a handshake (``security.handshake``) in which both ends prove that they are brokers
of one cluster: a stream from another cluster, or to another node than was meant, is refused once, at its
beginning."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from sava.metadata.errors import NotAuthenticated
from sava.metadata.peer import (
    Ask,
    Bootstrap,
    Envelope,
    Inbound,
    LeaderAnswer,
    NodeInfo,
    encode_envelope,
)
from sava.peer_connection import BadFrame, Dialer, PeerConnection, frame, is_refused, settle
from sava.raft.messages import Append, SnapshotChunk
from sava.raft.types import NodeId
from sava.tasks import Backoff, cancelled

log = logging.getLogger(__name__)

SMALL_BYTES: Final = 64 << 10
SWEEP_S: Final = 0.5
PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0
CONNECT_TIMEOUT_S = 2.0
STUCK_S: Final = 5.0
"""Longer than any pause of a healthy peer, shorter than an operator's patience."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    frames: int
    size: int


CONTROL_LIMITS: Final = QueueLimits(frames=4096, size=8 << 20)
BULK_LIMITS: Final = QueueLimits(frames=1024, size=32 << 20)


def is_bulk(envelope: Envelope, size: int) -> bool:
    message = envelope.message
    return isinstance(message, (Append, SnapshotChunk)) or (
        size > SMALL_BYTES and isinstance(message, (Ask, LeaderAnswer))
    )


_Key = tuple[str, NodeId]
"""An address, and the node that is meant to be there."""


@dataclass(slots=True)
class _Peer:
    """Both streams to one node at one address."""

    control: RaftStream
    bulk: RaftStream


class TcpTransport:
    """Implements ``metadata.peer.Transport``. Owned by the event loop."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._inbound: Inbound | None = None
        self._peers: dict[_Key, _Peer] = {}
        self._troubles: dict[_Key, str] = {}
        """Of peers that are not taken for brokers of this cluster: what was logged."""
        self._dropped: Counter[str] = Counter()
        self._sweep: asyncio.TimerHandle | None = None

    def attach(self, inbound: Inbound) -> None:
        self._inbound = self._dialer.credentials.inbound = inbound
        self._expire_stuck()

    def send(self, address: str, envelopes: Sequence[Envelope]) -> None:
        by_node: dict[NodeId, list[Envelope]] = {}
        for envelope in envelopes:
            by_node.setdefault(envelope.dst, []).append(envelope)
        for node, group in by_node.items():
            self._send((address, node), group)

    def _send(self, key: _Key, envelopes: Sequence[Envelope]) -> None:
        peer = self._peers.get(key) or self._new_peer(key)
        control: list[bytes] = []
        bulk: list[bytes] = []
        for envelope in envelopes:
            payload = encode_envelope(envelope)
            (bulk if is_bulk(envelope, len(payload)) else control).append(payload)
        taken = (not control or peer.control.offer(control)) & (not bulk or peer.bulk.offer(bulk))
        if not taken:
            # Never from inside ``send``: the replica is in the middle of handing out messages.
            asyncio.get_running_loop().call_soon(self._report, key)

    async def identify(self, address: str, *, timeout: float) -> NodeInfo:
        return await self._dialer.identify(address, timeout=timeout)

    async def bootstrap(self, address: str, bootstrap: Bootstrap, *, timeout: float) -> None:
        own, credentials = self._dialer.credentials.own, self._dialer.credentials
        if not credentials.secret.is_known and own.node == min(bootstrap.membership.voters, default=own.node):
            # The first voter makes it: here, or where it is bound.
            await asyncio.to_thread(credentials.secret.create)
        await self._dialer.bind(address, bootstrap, timeout=timeout)

    def dropped(self) -> dict[str, int]:
        return dict(self._dropped)

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        peers, self._peers = list(self._peers.values()), {}
        # Together: one that is slow to go must not add its wait to the others'.
        await asyncio.gather(*(stream.close() for peer in peers for stream in (peer.control, peer.bulk)))

    def _new_peer(self, key: _Key) -> _Peer:
        control, bulk = (
            RaftStream(partial(self._connect, key), limits, partial(self._failed, key), self._count)
            for limits in (CONTROL_LIMITS, BULK_LIMITS)
        )
        peer = self._peers[key] = _Peer(control, bulk)
        return peer

    async def _connect(self, key: _Key, connection: PeerConnection) -> None:
        try:
            await self._dialer.open_raft(*key, connection)
        except NotAuthenticated as error:
            # An operator must act: without this line the cluster only seems to be without a leader.
            if self._troubles.get(key) != str(error):
                self._troubles[key] = str(error)
                log.warning("raft: no connection peer=%s node=%d reason=%s", *key, error)
            raise
        self._troubles.pop(key, None)

    def _failed(self, key: _Key, reason: str, is_refused: bool) -> None:
        log.debug("raft: connection lost peer=%s reason=%s", key[0], reason)
        if self._inbound is not None:
            self._inbound.disconnected(key[1], is_refused=is_refused)
        self._report(key)

    def _count(self, reason: str, messages: int) -> None:
        self._dropped[reason] += messages

    def _report(self, key: _Key) -> None:
        if self._inbound is not None:
            self._inbound.unreachable(key[1])

    def _expire_stuck(self) -> None:
        loop = asyncio.get_running_loop()
        for peer in self._peers.values():
            peer.control.expire(loop.time())
            peer.bulk.expire(loop.time())
        self._sweep = loop.call_later(SWEEP_S, self._expire_stuck)


class RaftStream:
    """An ordered, lossy, bounded stream of frames to one peer, over one connection at a time. Owned by the
    event loop.

    Frames are handed to the socket at once; only while the peer does not keep up do they wait here, and
    then go out together. Nothing is kept for later: Raft repeats what matters, and a message that waited
    out an outage is stale. Hence the states:

    * connected or connecting: frames queue up to the limits, the newest is dropped beyond them;
    * pausing: after a connection broke or could not be made, frames are dropped at once; the first frame
      after the pause connects again. The pause grows until a connection was welcomed.

    A peer that is stopped or cut off without a reset shows as a socket that takes no more: ``expire`` (called
    by the transport's sweep, cheaper than a timer per write) breaks the connection then.
    """

    def __init__(
        self,
        connect: Callable[[PeerConnection], Awaitable[None]],
        limits: QueueLimits,
        failed: Callable[[str, bool], None],
        dropped: Callable[[str, int], None],
    ) -> None:
        """``connect`` opens the connection, and returns when the other end is known; ``failed`` is called
        each time it breaks, with the reason and whether the peer's machine answered that no process listens;
        ``dropped`` counts by reason."""
        self._connect = connect
        self._limits = limits
        self._failed = failed
        self._dropped = dropped
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._connection: PeerConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, jitter=0)
        self._resume_at = 0.0
        self._is_closing = False

    def offer(self, payloads: Sequence[bytes]) -> bool:
        """Send, or queue, or drop and count. Says whether all were taken."""
        if self._connection is not None and not self._connection.paused_at:
            return self._write(self._connection, payloads)
        if self._resume_at and self._loop.time() < self._resume_at:
            self._dropped("unreachable", len(payloads))
            return False
        taken = 0
        for payload in payloads:
            if (
                len(self._queue) >= self._limits.frames
                or self._queued_bytes + len(payload) > self._limits.size
            ):
                self._dropped("queue_full", len(payloads) - taken)
                break
            self._queue.append(payload)
            self._queued_bytes += len(payload)
            taken += 1
        if self._connection is None and self._connecting is None and not self._is_closing:
            self._connecting = self._loop.create_task(self._open())
        return taken == len(payloads)

    def expire(self, now: float) -> None:
        connection = self._connection
        if connection is not None and connection.paused_at and now - connection.paused_at > STUCK_S:
            connection.abort(f"it took nothing for {STUCK_S:g} s")

    async def close(self) -> None:
        self._is_closing = True
        if self._connecting is not None:
            await cancelled(self._connecting)
            await settle()
        if self._connection is not None:
            await self._connection.close()

    async def _open(self) -> None:
        connection = PeerConnection(lost=self._lost)
        connection.received, connection.writable = self._refuse, self._flush
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._connect(connection)
        except Exception as error:  # noqa: BLE001 (a name that cannot be one is no OSError)
            self._broke(str(error) or "no answer", is_refused(error))
        else:
            self._connection = connection  # not before it stands: see ``peer_connection``
            self._backoff.reset()
            self._flush()
        finally:
            self._connecting = None

    def _refuse(self, _: list[bytes]) -> None:
        raise BadFrame("an answer to no question")

    def _flush(self) -> None:
        if self._queue and self._connection is not None:
            waiting, self._queue, self._queued_bytes = self._queue, deque(), 0
            self._write(self._connection, waiting)

    def _write(self, connection: PeerConnection, payloads: Collection[bytes]) -> bool:
        if connection.write(map(frame, payloads)):
            return True
        self._dropped("unreachable", len(payloads))
        return False

    def _lost(self, connection: PeerConnection) -> None:
        self._connection = None
        self._broke(connection.reason, is_refused=False)

    def _broke(self, reason: str, is_refused: bool) -> None:
        if self._is_closing:
            return
        self._resume_at = self._loop.time() + self._backoff.next()
        if self._queue:
            self._dropped("unreachable", len(self._queue))
            self._queue.clear()
            self._queued_bytes = 0
        self._failed(reason, is_refused)
