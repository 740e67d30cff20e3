"""Transport: how envelopes reach other nodes. ``services`` implements it over TCP; ``LocalNetwork`` is its
in-memory twin.

The two directions are two protocols. A node calls ``Transport`` to reach others; the transport calls
``Inbound`` (the node) with what others sent. ``attach`` joins them once both exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec

from sava.metadata.errors import Unavailable
from sava.metadata.peer import Bootstrap, Envelope, decode_envelope, encode_envelope
from sava.raft.types import NodeId


class NodeInfo(msgspec.Struct, frozen=True):
    """What a node tells about itself to whoever asks on its Raft port."""

    node: NodeId
    cluster: str
    """Empty: waiting for initialization."""
    address: str
    founders: tuple[NodeId, ...]
    """The voters named at ``init`` (empty when pristine or joined later)."""
    version: str
    seeds: tuple[str, ...] = ()
    """Addresses of the nodes that are to form a cluster by themselves, this one among them or not."""
    cluster_name: str = ""
    """As configured, for people; seeds compare it before they become one cluster."""


class Inbound(Protocol):
    """What a transport needs from the node it serves. All of it is called on the node's event loop."""

    def info(self) -> NodeInfo: ...

    def receive(self, envelopes: Sequence[Envelope]) -> None: ...

    def unreachable(self, peer: NodeId) -> None:
        """Something sent to ``peer`` was certainly not delivered."""
        ...

    def disconnected(self, peer: NodeId, *, is_refused: bool) -> None:
        """A connection to ``peer`` broke, or could not be made; ``is_refused``: its machine answered that no
        process listens."""
        ...

    async def bind(self, bootstrap: Bootstrap) -> None:
        """Raises IdentityConflict."""
        ...


class Transport(Protocol):
    def attach(self, inbound: Inbound) -> None:
        """Called once, before anything is sent or received."""
        ...

    def send(self, address: str, envelopes: Sequence[Envelope]) -> None:
        """Queue for delivery, in order; never blocks. A bounded queue per peer drops the newest when full.
        Votes and heartbeats travel apart from appends and snapshot chunks, so that bulk cannot starve
        them."""
        ...

    async def identify(self, address: str, *, timeout: float) -> NodeInfo:
        """Raises Unavailable naming the address."""
        ...

    async def bootstrap(self, address: str, bootstrap: Bootstrap, *, timeout: float) -> None:
        """Raises IdentityConflict or Unavailable."""
        ...

    def dropped(self) -> dict[str, int]:
        """Messages not sent, by reason."""
        ...

    async def close(self) -> None: ...


class LocalNetwork:
    """Nodes of one process, one event loop. Envelopes still go through their encoding, so that a test which
    passes here has shown that they survive it; links can be cut in one direction."""

    def __init__(self) -> None:
        self._nodes: dict[str, Inbound] = {}
        self.cut: set[tuple[str, str]] = set()

    def transport(self, address: str) -> LocalTransport:
        return LocalTransport(self, address)

    def reach(self, source: str, target: str) -> Inbound | None:
        return None if (source, target) in self.cut else self._nodes.get(target)

    def join(self, address: str, inbound: Inbound) -> None:
        self._nodes[address] = inbound

    def leave(self, address: str) -> None:
        self._nodes.pop(address, None)


class LocalTransport:
    """One node's edge of a ``LocalNetwork``."""

    def __init__(self, network: LocalNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._inbound: Inbound | None = None
        self._unreachable = 0

    def attach(self, inbound: Inbound) -> None:
        self._inbound = inbound
        self._network.join(self._address, inbound)

    def send(self, address: str, envelopes: Sequence[Envelope]) -> None:
        frames = [encode_envelope(envelope) for envelope in envelopes]
        asyncio.get_running_loop().call_soon(self._deliver, address, frames, [e.dst for e in envelopes])

    def _deliver(self, address: str, frames: list[bytes], peers: list[NodeId]) -> None:
        target = self._network.reach(self._address, address)
        if target is not None:
            target.receive([decode_envelope(frame) for frame in frames])
            return
        self._unreachable += len(frames)
        if self._inbound is not None:
            for peer in dict.fromkeys(peers):
                self._inbound.unreachable(peer)

    def _require(self, address: str) -> Inbound:
        target = self._network.reach(self._address, address)
        if target is None:
            raise Unavailable(f"node {address} does not answer: no such node on this network")
        return target

    async def identify(self, address: str, *, timeout: float) -> NodeInfo:
        return self._require(address).info()

    async def bootstrap(self, address: str, bootstrap: Bootstrap, *, timeout: float) -> None:
        await self._require(address).bind(bootstrap)

    def dropped(self) -> dict[str, int]:
        return {"unreachable": self._unreachable} if self._unreachable else {}

    async def close(self) -> None:
        self._network.leave(self._address)
