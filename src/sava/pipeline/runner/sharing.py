"""Sharing: which pipelines a runner takes. There is no arbiter: each decides for itself, by what all can see,
and the claim decides between two that want the same.

Runners that take everything have equal shares, rounded up. A runner takes what is free up to its share at
once, and beyond it only what nobody else has taken for a while: so nothing is left undone because somebody
who should take it does not. One that has more than its share gives one away at a time, to a runner that has
less, so that a runner that joins later gets its part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from sava.pipeline.runner.control import Listed, Peer

LEFT_S: Final = 3.0
"""So long a free pipeline is left to runners that have less."""


class Free:
    """Since when pipelines are free, as this runner has seen it."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def look(self, listed: Sequence[Listed], now: float) -> None:
        free = {each.name for each in listed if each.is_wanted and not each.holder}
        self._since = {name: self._since.get(name, now) for name in free}

    def is_left(self, name: str, now: float) -> bool:
        return now - self._since.get(name, now) >= LEFT_S


def to_claim(
    me: Peer, peers: Sequence[Peer], listed: Sequence[Listed], free: Free, now: float
) -> list[Listed]:
    """What to claim now, in this order."""
    wanted = [each for each in listed if each.is_wanted and me.takes(each)]
    # What is said to be this runner's, and is not known here, is a claim whose answer was lost.
    chosen = [each for each in wanted if each.holder == me.name]
    room = (len(wanted) if me.only else _share(me, peers, listed)) - me.claims
    for each in wanted:
        if not each.holder and (room > 0 or free.is_left(each.name, now)):
            chosen.append(each)
            room -= 1
    return chosen


def to_give(
    me: Peer, peers: Sequence[Peer], listed: Sequence[Listed], claims: Mapping[str, int]
) -> str | None:
    """Which of the claims (by name, with their numbers) to give away: the youngest that another can take."""
    if me.only:
        return None
    share = _share(me, peers, listed)
    if len(claims) <= share:
        return None
    takers = [peer for peer in _general(peers) if peer.name != me.name and peer.claims < share]
    by_name = {each.name: each for each in listed}
    for name in sorted(claims, key=lambda name: -claims[name]):
        each = by_name.get(name)
        if each is not None and any(peer.takes(each) for peer in takers):
            return name
    return None


def _share(me: Peer, peers: Sequence[Peer], listed: Sequence[Listed]) -> int:
    runners = len({peer.name for peer in _general(peers)} | {me.name})
    wanted = sum(each.is_wanted and not _is_reserved(each, peers) for each in listed)
    return -(-wanted // runners)


def _general(peers: Collection[Peer]) -> list[Peer]:
    return [peer for peer in peers if not peer.only]


def _is_reserved(listed: Listed, peers: Sequence[Peer]) -> bool:
    """By a runner that is there for it alone, and has it."""
    return any(peer.only and peer.name == listed.holder for peer in peers)
