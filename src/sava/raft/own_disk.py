"""The leader's own disk: a leader that cannot write stands in everybody's way.

An entry is applied where it is committed *and* durable, and callers are answered by whoever has applied it. A
leader whose disk is full, or hangs, answers nobody, however well the others are:

    leader   sends entry 7; its disk refuses it
    others   have 7: it is committed
    leader   cannot apply 7, takes no more proposals, and is heard by all, so that nobody campaigns

That the others can do without it stands in its own log: the commit is beyond what its disk has, so a quorum
of *other* disks has it. If that lasts, it hands leadership to one of them, which has shown that its disk
works. Without that proof it stays. Of two voters neither can be elected without the vote of the other, which
a full disk does not take: leaving would end the reads, and gain nothing.
"""

from __future__ import annotations

from sava.raft.state import CoreState
from sava.raft.types import NO_NODE, NodeId

__all__ = ["next_leader"]

PATIENCE = 2
"""Election timeouts. A sync that takes as long as one is no reason to leave; and the leases of those who
wait for an answer last longer than this and an election."""


def next_leader(state: CoreState) -> NodeId:
    """At each tick of a leader: who is to lead in its place; NO_NODE while it is fit to lead, or while nobody
    is known to be fitter."""
    durable = state.log.durable
    if durable != state.disk_end or durable >= state.log.commit:
        state.disk_end, state.disk_elapsed = durable, 0
        return NO_NODE
    state.disk_elapsed += 1
    turn, rest = divmod(state.disk_elapsed, PATIENCE * state.config.election_ticks)
    if rest:
        return NO_NODE
    fit = [
        node
        for node, progress in state.progress.items()
        if progress.match > durable and progress.recently_active and node in state.membership.voters
    ]
    # Another one each time: what has filled this disk may have filled the first one's since.
    return fit[turn % len(fit)] if fit else NO_NODE
