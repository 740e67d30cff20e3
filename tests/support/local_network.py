"""LocalNetwork: nodes of one process, one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sava.metadata.errors import Unavailable
from sava.metadata.peer import Bootstrap, Envelope, Inbound, NodeInfo, decode_envelope, encode_envelope
from sava.raft.types import NodeId


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
