"""Suspicion: early evidence that a member of the cluster is dead, stopped or cut off.

One of these runs on every node, without I/O and without a clock: inputs are method calls with the time in
milliseconds, outputs are messages to other nodes and notes for the driver. It answers one question, "what do
I know of X?", and on the leader it turns the answers of several nodes into a decision.

======== ========================================================= ===========================================
sign     what this node knows of X                                 what it says to a leader that asks
======== ========================================================= ===========================================
HEARD    a message came within half of the threshold               X is alive: do nothing
REFUSED  two connects were refused, 250 ms passed, and no message  the process of X is gone: its machine
         came since the first of them                              answers, and no socket listens
SILENT   no message within the threshold                           I confirm
UNKNOWN  the last message is older than that, the connection       I cannot say yet: ask again
         broke since, or this node has not heard from X at all
======== ========================================================= ===========================================

**Messages.** A leader and its followers exchange heartbeats. All other pairs send a ``Ping`` when they have
sent nothing else for 300 ms, so that any two members have heard from each other recently.

**The threshold adapts to the network.** It is twice the longest pause of the last ten minutes, at least 1.5 s
and at most the time of a registration's lease. TCP hides a lost segment behind a pause of one to three
seconds; a network that loses 2 % makes such pauses several times in ten minutes, and then they are
expected. The same rule damps flapping: a broker that was silent, was suspected and came back as the same
process has shown a pause, and gets twice that time for ten minutes. Three kinds of pause do not count:

* One that ended with another process was a restart.
* One of three seconds or more was an outage. A failover takes less, so its topics were better off elsewhere,
  and the next outage must be found as early as this one. Only a machine that has four of them in a minute is
  slow: from then on they count, unless they are longer than the lease, which would have ended too.
* One during most of which this node heard less than half of the members was its own outage. It knows nothing
  of them from that time. Counted, it would keep a broker whose cable was pulled for five seconds from
  confirming anything for ten minutes.

**A node that was asleep does not accuse others.** When its own tick is late, the others may have sent all the
while. A small delay is taken off every silence; after a long one, all silences and refusals start again.

**The leader asks before it acts.** It asks all members that it hears. One that has heard from the suspect
refutes the suspicion: the link is broken, not the broker, and the lease decides. Silence must be confirmed by
more than half of the members other than the suspect, the leader included; refused connects by one other node.
The leader does nothing when the members that it hears are not more than half of all: then the likelier cause
is its own network. So a cluster of two never ends a lease early.

A confirmed suspicion names the lease that the suspect had when the doubt began. A broker that registered
again since then has another one, and the write that ends the old one does not touch it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from sava.metadata.peer import Doubt, Opinion, PeerMessage, Ping
from sava.raft.types import NodeId

PING_MS: Final = 300
URGENT_MS: Final = 2_000
"""For this long after a broken connection, or after a leader's question, pings leave with every tick: each of
them tries to connect, and a refused connect is the fastest evidence that there is."""
FLOOR_MS: Final = 1_500
"""Above the pauses of a healthy process: garbage collection, a large topic taken up, a machine all of whose
cores are busy."""
FACTOR: Final = 2
MEMORY_MS: Final = 600_000
SLOTS: Final = 10
"""Pauses are remembered by their maximum in each tenth of the memory."""
OUTAGE_MS: Final = 3_000
FLAPS: Final = 4
FLAPPING_MS: Final = 60_000
"""``FLAPS`` outages within this time are a slow machine."""
NEAR_MS: Final = FLOOR_MS // FACTOR
"""A node that has heard less than half of the members for this long is alone. Shorter pauses are common, and
are not remembered."""
REFUSALS: Final = 2
REFUSED_MS: Final = 250
"""A live peer sends something in this time, also one whose port is being opened."""
LATE_MS: Final = 500
ANSWER_MS: Final = 600
"""For the answers of the other members; a round trip between data centres fits in it."""
INCONCLUSIVE_MS: Final = 100
"""Before the members are asked again when too few of them could say anything."""
REFUTED_MS: Final = 1_000
CONFIRMED_MS: Final = 2_000
"""How long before a confirmed suspicion is reported again, in case that the lease could not be ended."""


class Sign(IntEnum):
    """What a node knows of another; a number on the wire."""

    UNKNOWN = 0
    HEARD = 1
    SILENT = 2
    REFUSED = 3


_SIGNS: Final = frozenset(Sign)
"""What may come from the network; a node of a later version may know more."""


class Note(NamedTuple):
    """Something that operators should be able to read and count."""

    kind: str
    """doubted, confirmed, refuted, unconfirmed, or withheld"""
    node: NodeId
    sign: Sign
    lease: int
    term: int
    silent_ms: int
    threshold_ms: int
    opinions: tuple[tuple[NodeId, Sign], ...] = ()


class _Peer:
    __slots__ = (
        "alone_ms",
        "heard_at",
        "incarnation",
        "lost_at",
        "outages",
        "pauses",
        "refusals",
        "refused_at",
        "sent_at",
        "urgent_until",
    )

    def __init__(self, now: int, alone_ms: int) -> None:
        self.alone_ms = alone_ms
        """For how long this node had been alone, since it started, when it last heard this one."""
        self.incarnation = 0
        """How many times its process was started; 0: this node has not heard from it."""
        self.heard_at = now
        self.sent_at = now - PING_MS
        self.lost_at = -1
        """When the connection broke, if nothing was heard since."""
        self.refused_at = -1
        self.refusals = 0
        self.urgent_until = 0
        self.pauses: dict[int, int] = {}
        """The longest pause in each slot of time."""
        self.outages: list[int] = []
        """When the last ones ended, at most ``FLAPS``."""


class _Doubt:
    """A suspicion about which the leader has asked others."""

    __slots__ = ("answers", "asked", "asked_at", "lease", "next_at", "ticket")

    def __init__(self, lease: int) -> None:
        self.lease = lease
        self.ticket = 0
        self.asked: tuple[NodeId, ...] = ()
        self.asked_at = 0
        self.answers: dict[NodeId, Sign] = {}
        self.next_at = 0
        """Not before then the others are asked again."""


class Suspicion:
    """Owned by one thread. ``lease_of`` names the lease of a member's registration (0: it has none); only
    members that have one are suspected."""

    def __init__(self, node: NodeId, *, tick_ms: int) -> None:
        self._node = node
        self._tick_ms = tick_ms
        self._lease_of: Callable[[NodeId], int] = lambda _: 0
        self._lease_ms = FLOOR_MS
        self._ticked_at = 0
        self._alone_ms = 0
        """For how long this node has heard less than half of the members, since it began."""
        self._members: tuple[NodeId, ...] = ()
        self._peers: dict[NodeId, _Peer] = {}
        self._doubts: dict[NodeId, _Doubt] = {}
        self._ticket = 0
        self._term = 0
        self.outbox: list[tuple[NodeId, PeerMessage]] = []
        self.notes: list[Note] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        """Notes by kind and sign."""

    def watch(self, lease_of: Callable[[NodeId], int], *, lease_ms: int) -> None:
        """From now on suspect members that have a lease, which lasts ``lease_ms`` without renewal."""
        self._lease_of = lease_of
        self._lease_ms = lease_ms

    # -- what this node knows ------------------------------------------------------------------

    def sign(self, node: NodeId, now: int) -> Sign:
        peer = self._peers.get(node)
        if peer is None:
            return Sign.UNKNOWN
        if peer.refusals >= REFUSALS and now - peer.refused_at >= REFUSED_MS:
            return Sign.REFUSED
        silence, threshold = now - peer.heard_at, self.threshold(node, now)
        if silence >= threshold:
            return Sign.SILENT
        # Two nodes hear the last message of a third at different times. Without the half that is neither, the
        # one whose threshold passes later would refute what it is about to confirm.
        is_recent = 2 * silence < threshold
        return Sign.HEARD if is_recent and peer.incarnation and peer.lost_at < 0 else Sign.UNKNOWN

    def threshold(self, node: NodeId, now: int) -> int:
        """Milliseconds of silence after which this node confirms a suspicion of ``node``."""
        peer = self._peers.get(node)
        longest = 0
        if peer is not None and peer.pauses:
            oldest = _slot(now) - SLOTS
            longest = max((pause for slot, pause in peer.pauses.items() if slot > oldest), default=0)
        return min(max(FLOOR_MS, FACTOR * longest), max(self._lease_ms, FLOOR_MS))

    # -- evidence --------------------------------------------------------------------------------

    def heard(self, node: NodeId, incarnation: int, now: int) -> None:
        """A message of ``node`` arrived. Called for every message, so the common case is short."""
        peer = self._peers.get(node)
        if peer is None:
            return
        if now - peer.heard_at > NEAR_MS:
            self._paused(peer, incarnation, now)
        peer.heard_at = now
        peer.incarnation = incarnation
        peer.alone_ms = self._alone_ms
        if peer.lost_at >= 0 or peer.refusals:
            peer.lost_at = peer.refused_at = -1
            peer.refusals = 0

    def _paused(self, peer: _Peer, incarnation: int, now: int) -> None:
        """A pause ends that is long enough to be remembered."""
        self._discount(now)
        pause = now - peer.heard_at
        if pause <= NEAR_MS or pause >= self._lease_ms or incarnation != peer.incarnation:
            return
        if 2 * (self._alone_ms - peer.alone_ms) >= pause:
            return
        if pause >= OUTAGE_MS:
            recent = [at for at in peer.outages if now - at < FLAPPING_MS]
            peer.outages = [*recent, now][-FLAPS:]
            if len(peer.outages) < FLAPS:
                return
        slot = _slot(now)
        peer.pauses = {old: longest for old, longest in peer.pauses.items() if old > slot - SLOTS}
        peer.pauses[slot] = max(peer.pauses.get(slot, 0), pause)

    def lost(self, node: NodeId, now: int, *, is_refused: bool) -> None:
        """A connection to ``node`` broke, or could not be made."""
        peer = self._peers.get(node)
        if peer is None:
            return
        if peer.lost_at < 0:
            peer.lost_at = now
            peer.urgent_until = now + URGENT_MS
        if is_refused:
            if not peer.refusals:
                peer.refused_at = now
            peer.refusals += 1

    def sent(self, node: NodeId, now: int) -> None:
        peer = self._peers.get(node)
        if peer is not None:
            peer.sent_at = now

    # -- time ------------------------------------------------------------------------------------

    def tick(self, now: int, members: Iterable[NodeId], term: int) -> None:
        """``term`` in which this node leads, with everything applied that earlier leaders committed; 0: it
        does not lead."""
        self._follow(members, now)
        self._discount(now)
        self._ticked_at = now
        near = sum(now - peer.heard_at <= NEAR_MS for peer in self._peers.values())
        if 2 * (1 + near) <= len(self._members):
            self._alone_ms += self._tick_ms
        self._ping(now)
        if term != self._term:
            self._doubts.clear()
            self._term = term
        if term:
            self._suspect(now)

    def _follow(self, members: Iterable[NodeId], now: int) -> None:
        self._members = tuple(members)
        others = set(self._members) - {self._node}
        if others != self._peers.keys():
            self._peers = {
                node: self._peers.get(node) or _Peer(now, self._alone_ms) for node in sorted(others)
            }
            self._doubts = {node: doubt for node, doubt in self._doubts.items() if node in others}

    def _discount(self, now: int) -> None:
        """Take the time in which this node itself stood still off every silence."""
        late = now - self._ticked_at - self._tick_ms
        if late <= 0 or not self._ticked_at:
            return
        self._ticked_at += late
        for peer in self._peers.values():
            if late < LATE_MS:
                peer.heard_at = min(peer.heard_at + late, now)
            else:
                # The others may have closed their connections to this node, and connect again. Until one of
                # them is heard, this node knows nothing of it, and counts it neither as dead nor as alive.
                peer.heard_at = peer.lost_at = now
                peer.refused_at, peer.refusals = -1, 0
        if late >= LATE_MS:
            self._doubts.clear()

    def _ping(self, now: int) -> None:
        for node, peer in self._peers.items():
            due = peer.sent_at + (0 if now < peer.urgent_until else PING_MS)
            if now >= due:
                self.outbox.append((node, Ping()))

    # -- the leader's part -----------------------------------------------------------------------

    def _suspect(self, now: int) -> None:
        for node in self._peers:
            doubt, sign = self._doubts.get(node), self.sign(node, now)
            lease = self._lease_of(node)
            if sign not in (Sign.SILENT, Sign.REFUSED) or not lease:
                if doubt is not None and doubt.lease == lease:
                    self._note("refuted", node, doubt, now)
                self._doubts.pop(node, None)
                continue
            if doubt is None or doubt.lease != lease:
                doubt = self._doubts[node] = _Doubt(lease)
                self._note("doubted", node, doubt, now)
            if doubt.ticket:
                self._judge(node, doubt, now)
            if not doubt.ticket and now >= doubt.next_at:
                self._ask(node, doubt, now)

    def _ask(self, suspect: NodeId, doubt: _Doubt, now: int) -> None:
        heard = [node for node, peer in self._peers.items() if peer.incarnation and self._is_near(node, now)]
        if 2 * (1 + len(heard)) <= len(self._members):
            if not doubt.next_at:
                self._note("withheld", suspect, doubt, now)
            doubt.next_at = now + REFUTED_MS
            return
        self._ticket += 1
        doubt.ticket, doubt.asked, doubt.asked_at = self._ticket, tuple(heard), now
        doubt.answers = {}
        self.outbox += [(node, Doubt(self._ticket, suspect)) for node in heard]

    def _is_near(self, node: NodeId, now: int) -> bool:
        peer = self._peers[node]
        return peer.lost_at < 0 and now - peer.heard_at < self.threshold(node, now)

    def receive(self, src: NodeId, message: PeerMessage, now: int) -> None:
        match message:
            case Doubt(ticket, suspect):
                peer = self._peers.get(suspect)
                if peer is not None:
                    peer.urgent_until = now + URGENT_MS
                self.outbox.append((src, Opinion(ticket, suspect, self.sign(suspect, now))))
            case Opinion(ticket, suspect, sign):
                doubt = self._doubts.get(suspect)
                if doubt is not None and doubt.ticket == ticket and src in doubt.asked and sign in _SIGNS:
                    doubt.answers[src] = Sign(sign)
                    self._judge(suspect, doubt, now)

    def _judge(self, suspect: NodeId, doubt: _Doubt, now: int) -> None:
        """Decide as soon as all members have answered, or have had the time to."""
        is_accused = self.sign(suspect, now) in (Sign.SILENT, Sign.REFUSED)
        if not is_accused or Sign.HEARD in doubt.answers.values():
            self._end_round(doubt, now + REFUTED_MS)
            self._note("refuted", suspect, doubt, now)
            return
        is_over = now >= doubt.asked_at + ANSWER_MS
        if len(doubt.answers) < len(doubt.asked) and not is_over:
            return
        if self._is_confirmed(suspect, doubt, now):
            self._end_round(doubt, now + CONFIRMED_MS)
            self._note("confirmed", suspect, doubt, now)
        else:
            self._end_round(doubt, now + INCONCLUSIVE_MS)
            if is_over:
                self._note("unconfirmed", suspect, doubt, now)

    def _is_confirmed(self, suspect: NodeId, doubt: _Doubt, now: int) -> bool:
        answers = list(doubt.answers.values())
        if self.sign(suspect, now) is Sign.REFUSED and Sign.REFUSED in answers:
            return True
        confirming = 1 + sum(answer in (Sign.SILENT, Sign.REFUSED) for answer in answers)
        return 2 * confirming > len(self._members) - 1

    def _end_round(self, doubt: _Doubt, next_at: int) -> None:
        doubt.ticket, doubt.next_at = 0, next_at

    def _note(self, kind: str, node: NodeId, doubt: _Doubt, now: int) -> None:
        sign = self.sign(node, now)
        silent_ms = now - self._peers[node].heard_at
        opinions = tuple(sorted(doubt.answers.items()))
        note = Note(kind, node, sign, doubt.lease, self._term, silent_ms, self.threshold(node, now), opinions)
        self.notes.append(note)
        self.counts[kind, sign.name.lower()] += 1


def _slot(now: int) -> int:
    return now * SLOTS // MEMORY_MS
