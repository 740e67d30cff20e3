"""Steering: changes of the membership and hand-over of leadership, asked of the leader.

Both answer when they are *complete*. A voter change is complete when the second, plain configuration is
committed: in between, every decision needs two majorities, and an operator who switches the old node off at
that moment may take the cluster with it. A transfer is complete when this node no longer leads.

Neither can be repeated blindly, so when leadership goes while a change is open, its outcome is unknown to
this node. So is that of a transfer which took longer than an election timeout: the request to campaign may
arrive yet.
"""

from __future__ import annotations

from sava.metadata.errors import OutcomeUnknown
from sava.metadata.peer import Changed, ChangeMembership, Failed, TransferLeadership, Transferred
from sava.metadata.replica.requests import Desk, Pending
from sava.raft.core import RaftCore, Role, Status
from sava.raft.errors import MembershipBusy, MembershipRefused, NotLeader, TransferRefused
from sava.raft.types import NO_NODE, NodeId


class Steering:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._changes: list[tuple[Pending, int, int]] = []
        """Index and term of the entry that began the change. More than one for a moment: the core takes the
        next as soon as the last is committed."""
        self._transfer: tuple[Pending, NodeId] | None = None

    def change(self, core: RaftCore, pending: Pending) -> None:
        assert isinstance(pending.request, ChangeMembership)
        try:
            index = core.change_membership(pending.request.change)
        except (MembershipBusy, MembershipRefused) as error:
            self._desk.refuse(pending, error)
        except NotLeader as error:
            self._desk.retry(pending, str(error))
        else:
            pending.open_attempts += 1
            pending.reason = "the change is not committed yet"
            self._changes.append((pending, index, core.term_at(index)))

    def transfer(self, core: RaftCore, pending: Pending) -> None:
        assert isinstance(pending.request, TransferLeadership)
        if self._transfer is not None:
            self._desk.refuse(pending, MembershipBusy("leadership is being transferred already"))
            return
        to = pending.request.to or _most_up_to_date(core.status())
        if to == NO_NODE:
            self._desk.refuse(pending, TransferRefused("no other voter is known to be alive"))
            return
        try:
            core.transfer_leadership(to)
        except TransferRefused as error:
            self._desk.refuse(pending, error)
        except NotLeader as error:
            self._desk.retry(pending, str(error))
        else:
            pending.open_attempts += 1
            pending.reason = f"node {to} has not taken over yet"
            self._transfer = pending, to

    @property
    def has_open(self) -> bool:
        return bool(self._changes) or self._transfer is not None

    def look(self, core: RaftCore) -> None:
        """Answer what is complete by now, and what can no longer be."""
        status = core.status()
        if self._changes:
            for pending, index, term in self._changes:
                self._look_at_change(pending, index, term, core, status)
            self._changes = [change for change in self._changes if not change[0].is_done]
        if self._transfer is not None:
            pending, to = self._transfer
            self._look_at_transfer(pending, to, status)
            if pending.is_done:
                self._transfer = None

    def _look_at_change(
        self, pending: Pending, index: int, term: int, core: RaftCore, status: Status
    ) -> None:
        is_complete = not status.membership.is_joint and index <= status.membership_index <= status.commit
        if is_complete and _holds(core, status, index, term):
            self._desk.answer(pending, Changed(status.membership_index))
        elif status.role is not Role.LEADER:
            message = "leadership was lost before the change was complete; look at the membership and decide"
            self._desk.answer(pending, Failed(OutcomeUnknown.code, message, 0, maybe_applied=True))

    def _look_at_transfer(self, pending: Pending, to: NodeId, status: Status) -> None:
        if status.role is not Role.LEADER:
            self._desk.answer(pending, Transferred(status.leader or to))
        elif status.transferring_to == NO_NODE:
            # The request to campaign may be on its way: a node that was slow, or cut off, takes over when it
            # arrives, although this leader has stopped waiting for it.
            message = f"node {to} has not taken over within an election timeout, and may do so yet"
            self._desk.answer(pending, Failed(OutcomeUnknown.code, message, 0, maybe_applied=True))


def _holds(core: RaftCore, status: Status, index: int, term: int) -> bool:
    """Whether the entry that began the change is the one in the log. Another leader may have put its own
    change in that place, unless this node has led ever since."""
    if status.role is Role.LEADER and status.term == term:
        return True
    return status.first_index <= index <= status.last_index and core.term_at(index) == term


def _most_up_to_date(status: Status) -> NodeId:
    voters = [
        peer
        for peer in status.peers
        if peer.node in status.membership.voters and peer.node != status.node and peer.recently_active
    ]
    return max(voters, key=lambda peer: (peer.match, -peer.node)).node if voters else NO_NODE
