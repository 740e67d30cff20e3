"""TcpTransport: how this node reaches the Raft ports of others (``raft_listener`` is the other end).

Plain TCP (or TLS) with the frames of ``raft_wire``, and not gRPC as on the other ports: a write waits for one
message to a follower and its answer. grpc.aio takes about 240 µs for such a pair on one machine, an asyncio
connection 20, and what it burns besides is taken from the same cores that serve the write (see
``docs/design/raft.md``).

Two lanes lead to every peer, each on a connection of its own, so that a snapshot that fills one pipe cannot
make the other late and start an election:

* control: votes, heartbeats, all replies, forwarded requests and answers that are small;
* bulk: appends and snapshot chunks, and requests or answers that are large.

Appends share one lane because their order matters: a leader sends them ahead without waiting, and one that
overtakes another is refused and sent again. Replies are small and each stands for itself, so they take the
fast lane.

The sender's cluster is in the opening of a connection as well as in every envelope: a stream from another
cluster is refused once, at its beginning.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from sava.config import Auth
from sava.framing import BadFrame, FrameReader
from sava.metadata.errors import Unavailable, Unfinished
from sava.metadata.peer import (
    Answer,
    Ask,
    Bootstrap,
    Envelope,
    Inbound,
    NodeInfo,
    encode_envelope,
    error_from,
)
from sava.peers import tls
from sava.peers.lanes import Lane, LaneLimits
from sava.peers.raft_wire import (
    GREETING,
    Bind,
    Identify,
    Introduction,
    Opening,
    Refusal,
    Response,
    decode_response,
    encode,
)
from sava.peers.sockets import connect, is_gone, settle
from sava.raft.messages import Append, SnapshotChunk
from sava.raft.types import NodeId

log = logging.getLogger(__name__)

SMALL_BYTES = 64 << 10
CONTROL_LIMITS = LaneLimits(frames=4096, size=8 << 20)
BULK_LIMITS = LaneLimits(frames=1024, size=32 << 20)
SWEEP_S = 0.5


def is_bulk(envelope: Envelope, size: int) -> bool:
    message = envelope.message
    return isinstance(message, (Append, SnapshotChunk)) or (
        size > SMALL_BYTES and isinstance(message, (Ask, Answer))
    )


@dataclass(slots=True)
class _Peer:
    """Both lanes to one address, and the node that was last written to there."""

    node: NodeId
    control: Lane
    bulk: Lane


class TcpTransport:
    """Implements ``metadata.peer.Transport``. Owned by the event loop."""

    def __init__(self, auth: Auth) -> None:
        self._tls = tls.client_context(auth)
        self._inbound: Inbound | None = None
        self._peers: dict[str, _Peer] = {}
        self._dropped: Counter[str] = Counter()
        self._sweep: asyncio.TimerHandle | None = None

    def attach(self, inbound: Inbound) -> None:
        self._inbound = inbound
        self._expire_stuck()

    def send(self, address: str, envelopes: Sequence[Envelope]) -> None:
        peer = self._peers.get(address) or self._new_peer(address, envelopes[0].dst)
        peer.node = envelopes[-1].dst
        control: list[bytes] = []
        bulk: list[bytes] = []
        for envelope in envelopes:
            payload = encode_envelope(envelope)
            (bulk if is_bulk(envelope, len(payload)) else control).append(payload)
        taken = (not control or peer.control.offer(control)) & (not bulk or peer.bulk.offer(bulk))
        if not taken:
            # Never from inside ``send``: the replica is in the middle of handing out messages.
            asyncio.get_running_loop().call_soon(self._report, address)

    async def identify(self, address: str, *, timeout: float) -> NodeInfo:
        response = await self._ask(address, Identify(), timeout)
        if not isinstance(response, Introduction):
            raise Unavailable(f"node {address} gave an answer to another question")
        return response.info

    async def bootstrap(self, address: str, bootstrap: Bootstrap, *, timeout: float) -> None:
        await self._ask(address, Bind(bootstrap), timeout)

    def dropped(self) -> dict[str, int]:
        return dict(self._dropped)

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        peers, self._peers = list(self._peers.values()), {}
        # Together: one that is slow to go must not add its wait to the others'.
        await asyncio.gather(*(lane.close() for peer in peers for lane in (peer.control, peer.bulk)))

    async def _ask(self, address: str, question: Opening, timeout: float) -> Response:
        """One question on a connection of its own. Raises what the other side refused with."""
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        caller = _Caller(question, answer)
        is_sent = False
        try:
            async with asyncio.timeout(timeout):
                await connect(address, lambda: caller, self._tls)
                is_sent = True
                response = await answer
        except (TimeoutError, OSError, BadFrame) as error:
            reason = f"node {address} cannot be reached: {error}"
            if isinstance(error, TimeoutError):
                reason = f"node {address} did not answer within {timeout:g} s"
            if is_sent and isinstance(question, Bind):
                raise Unfinished(f"{reason}; it may have bound itself") from error
            raise Unavailable(reason) from error
        finally:
            await caller.close()
        if isinstance(response, Refusal):
            raise error_from(response.code, response.message, response.detail)
        return response

    def _new_peer(self, address: str, node: NodeId) -> _Peer:
        peer = _Peer(node, self._lane(address, CONTROL_LIMITS), self._lane(address, BULK_LIMITS))
        self._peers[address] = peer
        return peer

    def _lane(self, address: str, limits: LaneLimits) -> Lane:
        assert self._inbound is not None
        inbound = self._inbound

        async def open_lane(protocol: Callable[[], asyncio.Protocol], /) -> None:
            await connect(address, protocol, self._tls)

        def failed(reason: str) -> None:
            log.debug("raft: connection lost peer=%s reason=%s", address, reason)
            peer = self._peers.get(address)
            if peer is not None:
                inbound.disconnected(peer.node, is_refused=lane.was_refused)
            self._report(address)

        def count(reason: str, messages: int) -> None:
            self._dropped[reason] += messages

        lane = Lane(open_lane, lambda: inbound.info().cluster, limits, failed, count)
        return lane

    def _report(self, address: str) -> None:
        peer = self._peers.get(address)
        if peer is not None and self._inbound is not None:
            self._inbound.unreachable(peer.node)

    def _expire_stuck(self) -> None:
        loop = asyncio.get_running_loop()
        for peer in self._peers.values():
            peer.control.expire(loop.time())
            peer.bulk.expire(loop.time())
        self._sweep = loop.call_later(SWEEP_S, self._expire_stuck)


class _Caller(asyncio.Protocol):
    """Asks one question and waits for one answer."""

    def __init__(self, question: Opening, answer: asyncio.Future[Response]) -> None:
        self._question = question
        self._answer = answer
        self._reader = FrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.WriteTransport, transport)
        self._transport = transport
        transport.write(GREETING + encode(self._question))

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                if not self._answer.done():
                    self._answer.set_result(decode_response(payload))
        except BadFrame as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._gone.set()
        self._fail(ConnectionResetError(str(error) if error else "it closed the connection"))

    def _fail(self, error: Exception) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)

    async def close(self) -> None:
        await settle()
        if self._transport is not None:
            self._transport.abort()
            await is_gone(self._gone)
        if self._answer.done() and not self._answer.cancelled():
            self._answer.exception()  # seen, even when the caller gave up before
