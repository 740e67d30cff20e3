"""The Raft port over gRPC: ``GrpcTransport`` reaches other brokers, ``RaftService`` is what they reach
here.

Two lanes lead to every peer, each on a TCP connection of its own, so that a snapshot that fills one pipe
cannot make the other late and start an election:

* control: votes, heartbeats, all replies, forwarded requests and answers that are small;
* bulk: appends and snapshot chunks, and requests or answers that are large.

Appends share one lane because their order matters: a leader sends them ahead without waiting, and one that
overtakes another is refused and sent again. Replies are small and each stands for itself, so they take the
fast lane.

The sender's cluster and node are in the call's metadata as well as in every envelope: a stream from another
cluster is refused once, at its beginning.
"""

# ruff: noqa: N802 (timeouts are part of the protocols; gRPC names the methods)

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpc import aio

from sava.config import Auth
from sava.errors import SavaError
from sava.metadata.errors import IdentityConflict
from sava.metadata.peer import (
    Answer,
    Ask,
    Bootstrap,
    Envelope,
    MalformedEnvelope,
    decode_envelope,
    encode_envelope,
)
from sava.metadata.transport import Inbound, NodeInfo
from sava.proto import raft_pb2 as pb
from sava.proto import raft_pb2_grpc as rpc
from sava.raft.messages import Append, SnapshotChunk
from sava.raft.types import Membership, NodeId
from sava.services import faults, security
from sava.services.lanes import Lane, LaneLimits

MAX_MESSAGE_BYTES = 64 << 20
SMALL_BYTES = 64 << 10
CONTROL_LIMITS = LaneLimits(frames=4096, size=8 << 20)
BULK_LIMITS = LaneLimits(frames=1024, size=32 << 20)
SWEEP_S = 0.5
CLUSTER_KEY = "sava-cluster"

CHANNEL_OPTIONS: security.Options = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Without its own pool, two channels to one address share one connection, and the lanes would be one
    # pipe again.
    ("grpc.use_local_subchannel_pool", 1),
    # A broker that is back must be found before it would start an election.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A peer that vanished without a reset is noticed within four seconds even when nothing is sent.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS: security.Options = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # Two processes on one port would each get half of the messages.
    ("grpc.so_reuseport", 0),
)


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
    channels: tuple[aio.Channel, aio.Channel]


class GrpcTransport:
    """Implements ``metadata.transport.Transport``. Owned by the event loop."""

    def __init__(self, auth: Auth) -> None:
        self._auth = auth
        self._inbound: Inbound | None = None
        self._peers: dict[str, _Peer] = {}
        self._dropped: Counter[str] = Counter()
        self._sweep: asyncio.TimerHandle | None = None

    def attach(self, inbound: Inbound) -> None:
        self._inbound = inbound
        self._expire_writes()

    def send(self, address: str, envelopes: Sequence[Envelope]) -> None:
        peer = self._peers.get(address) or self._connect(address, envelopes[0].dst)
        lost = False
        for envelope in envelopes:
            frame = encode_envelope(envelope)
            peer.node = envelope.dst
            lane = peer.bulk if is_bulk(envelope, len(frame)) else peer.control
            lost |= not lane.offer(frame)
        if lost:
            # Never from inside ``send``: the replica is in the middle of handing out messages.
            asyncio.get_running_loop().call_soon(self._report, address)

    async def identify(self, address: str, *, timeout: float) -> NodeInfo:
        async with security.open_channel(address, self._auth, CHANNEL_OPTIONS) as channel:
            stub: Any = rpc.RaftTransportStub(channel)
            try:
                reply = await stub.Identify(pb.IdentifyRequest(), timeout=timeout)
            except aio.AioRpcError as error:
                raise faults.raised_by(error, target=f"node {address}") from error
        founders = tuple(NodeId(node) for node in reply.founders)
        return NodeInfo(NodeId(reply.node_id), reply.cluster_id, reply.raft_addr, founders, reply.version)

    async def bootstrap(self, address: str, bootstrap: Bootstrap, *, timeout: float) -> None:
        membership = bootstrap.membership
        founders = [
            pb.Member(node_id=node, raft_addr=membership.address(node) or "") for node in membership.voters
        ]
        async with security.open_channel(address, self._auth, CHANNEL_OPTIONS) as channel:
            stub: Any = rpc.RaftTransportStub(channel)
            request = pb.BootstrapRequest(cluster_id=bootstrap.cluster, founders=founders)
            try:
                await stub.Bootstrap(request, timeout=timeout)
            except aio.AioRpcError as error:
                raise faults.raised_by(error, target=f"node {address}") from error

    def dropped(self) -> dict[str, int]:
        return dict(self._dropped)

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            await peer.control.close()
            await peer.bulk.close()
            for channel in peer.channels:
                await channel.close(None)

    def _connect(self, address: str, node: NodeId) -> _Peer:
        control, bulk = (security.open_channel(address, self._auth, CHANNEL_OPTIONS) for _ in range(2))
        peer = _Peer(
            node,
            self._lane(address, control, CONTROL_LIMITS),
            self._lane(address, bulk, BULK_LIMITS),
            (control, bulk),
        )
        self._peers[address] = peer
        return peer

    def _lane(self, address: str, channel: aio.Channel, limits: LaneLimits) -> Lane:
        stub: Any = rpc.RaftTransportStub(channel)

        def start_call() -> Any:
            assert self._inbound is not None
            return stub.Deliver(metadata=((CLUSTER_KEY, self._inbound.info().cluster),))

        def count(reason: str, messages: int) -> None:
            self._dropped[reason] += messages

        return Lane(start_call, limits, lambda: self._report(address), count)

    def _report(self, address: str) -> None:
        peer = self._peers.get(address)
        if peer is not None and self._inbound is not None:
            self._inbound.unreachable(peer.node)

    def _expire_writes(self) -> None:
        loop = asyncio.get_running_loop()
        for peer in self._peers.values():
            peer.control.expire(loop.time())
            peer.bulk.expire(loop.time())
        self._sweep = loop.call_later(SWEEP_S, self._expire_writes)


class RaftService(rpc.RaftTransportServicer):
    """The server side: hands what arrives to the node."""

    def __init__(self, inbound: Inbound) -> None:
        self._inbound = inbound
        self.malformed = 0

    async def Deliver(self, request_iterator: AsyncIterator[pb.Frames], context: Any) -> pb.DeliverSummary:
        await self._check_cluster(context)
        received = 0
        async for frames in request_iterator:
            envelopes = []
            for frame in frames.envelopes:
                try:
                    envelopes.append(decode_envelope(frame))
                except MalformedEnvelope:
                    self.malformed += 1
            received += len(envelopes)
            self._inbound.receive(envelopes)
        return pb.DeliverSummary(received=received)

    async def Identify(self, request: pb.IdentifyRequest, context: Any) -> pb.IdentifyResponse:
        info = self._inbound.info()
        return pb.IdentifyResponse(
            node_id=info.node,
            cluster_id=info.cluster,
            raft_addr=info.address,
            founders=info.founders,
            version=info.version,
        )

    async def Bootstrap(self, request: pb.BootstrapRequest, context: Any) -> pb.BootstrapResponse:
        members = sorted((NodeId(member.node_id), member.raft_addr) for member in request.founders)
        membership = Membership(voters=tuple(node for node, _ in members), addresses=tuple(members))
        try:
            await self._inbound.bind(Bootstrap(request.cluster_id, membership))
        except SavaError as error:
            await faults.refuse(context, error)
        return pb.BootstrapResponse()

    async def _check_cluster(self, context: Any) -> None:
        theirs = dict(context.invocation_metadata() or ()).get(CLUSTER_KEY, "")
        ours = self._inbound.info().cluster
        if ours and theirs and ours != theirs:
            await faults.refuse(
                context, IdentityConflict(f"this node belongs to cluster {ours}, not to {theirs}")
            )


def raft_server(inbound: Inbound, address: str, auth: Auth) -> aio.Server:
    """A server for the Raft port, bound but not started."""
    server = aio.server(options=SERVER_OPTIONS)
    rpc.add_RaftTransportServicer_to_server(RaftService(inbound), server)
    security.listen(server, address, auth)
    return server
