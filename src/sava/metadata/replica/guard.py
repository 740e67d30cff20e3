"""Guard: which messages may reach this node at all.

A message is meant for this node only when it names its cluster and its id, and speaks for a sender that
still exists:

* a lower incarnation than one already heard is an earlier life of the peer: what it promised may have been
  lost with it;
* the same incarnation with another nonce is a second process on a copy of the peer's directory. Two voters
  with one vote can elect two leaders.

In both cases the sender is told (``Conflict``, which names the nonce that is not listened to). A late
message of a life that is over leads to a complaint that nobody recognises. But a process that still runs,
while a copy of its directory was started later, learns that it is not heard, and stops with a message to its
operator instead of living on as a member that nobody hears (tests/sim seed 68).

A request is let through once: a copy that the network delivers again, after this node has refused the first
one and became leader since, would be carried out although its sender has been told that it was not.
"""

from __future__ import annotations

from collections import Counter

from sava.metadata.peer import Envelope
from sava.raft.types import NodeId

CONTESTED = frozenset({"earlier life", "conflict"})
"""Refusals that the sender should hear about."""
MAX_PEERS = 1024
WINDOW = 8192
"""Tickets of one peer that are remembered; older ones than that are refused unseen."""


class _Peer:
    __slots__ = ("address", "floor", "highest", "incarnation", "nonce", "seen")

    def __init__(self, incarnation: int, nonce: int) -> None:
        self.incarnation = incarnation
        self.nonce = nonce
        self.address = ""
        self.seen: set[int] = set()
        self.floor = 0
        self.highest = 0


class Guard:
    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._peers: dict[NodeId, _Peer] = {}
        self.dropped: Counter[str] = Counter()

    def address_of(self, node: NodeId) -> str | None:
        """Where the peer said it listens."""
        peer = self._peers.get(node)
        return peer.address or None if peer is not None else None

    def refusal(self, envelope: Envelope, cluster: str) -> str | None:
        """Why the message must be dropped; None lets it through."""
        if not cluster:
            return "uninitialized"
        if envelope.cluster != cluster:
            return "cluster"
        if envelope.dst != self._node:
            return "addressee"
        if envelope.src == self._node:
            return "self"
        if getattr(envelope.message, "src", envelope.src) != envelope.src:
            return "forged"
        return self._judge_sender(envelope)

    def _judge_sender(self, envelope: Envelope) -> str | None:
        peer = self._peers.get(envelope.src)
        if peer is None or envelope.incarnation > peer.incarnation:
            if peer is None and len(self._peers) >= MAX_PEERS:
                return "too many peers"
            peer = self._peers[envelope.src] = _Peer(envelope.incarnation, envelope.nonce)
        elif envelope.incarnation < peer.incarnation:
            return "earlier life"
        elif envelope.nonce != peer.nonce:
            return "conflict"
        if envelope.address:
            peer.address = envelope.address
        return None

    def is_repeated(self, src: NodeId, ticket: int) -> bool:
        peer = self._peers[src]
        if ticket <= peer.floor or ticket in peer.seen:
            return True
        peer.seen.add(ticket)
        peer.highest = max(peer.highest, ticket)
        if len(peer.seen) > 2 * WINDOW:
            peer.floor = peer.highest - WINDOW
            peer.seen = {seen for seen in peer.seen if seen > peer.floor}
        return False
