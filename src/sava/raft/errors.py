"""What the core refuses, by whose fault it is. A refusal happens before any state changes."""

from __future__ import annotations

from sava.errors import CallerError, Outcome, RetryableError, SavaError
from sava.raft.types import NO_NODE, NodeId


class NotLeader(RetryableError):
    """Only the leader takes this request. ``leader`` is who this node believes leads, or NO_NODE."""

    def __init__(self, leader: NodeId = NO_NODE) -> None:
        super().__init__(f"this node is not the leader; the leader is {leader or 'unknown'}")
        self.leader = leader


class Busy(RetryableError):
    """A limit is reached (uncommitted bytes, pending reads); try again after what is pending has been
    committed."""


class Transferring(RetryableError):
    """Leadership is being handed over; the next leader takes the request."""

    def __init__(self, target: NodeId) -> None:
        super().__init__(f"leadership is being transferred to node {target}")
        self.target = target


class MembershipBusy(RetryableError):
    """An earlier membership change is not committed yet, or this leader has not committed an entry of its
    term."""


class LearnerLagging(MembershipBusy):
    """The node to promote has not kept up with the log at two consecutive checks, or has not answered lately.
    Making it a voter now could cost the group its majority; it may well be ready a moment later."""

    def __init__(self, node: NodeId, lag: int) -> None:
        super().__init__(f"learner {node} misses {lag} entries or was not heard lately")
        self.node = node
        self.lag = lag


class MembershipRefused(CallerError):
    """The change would break the cluster, or names nodes that do not fit it."""


class TransferRefused(CallerError):
    """The target cannot lead: unknown, not a voter, or this node itself."""


class MalformedMessage(CallerError):
    """Bytes that no core has encoded: garbage, another version, or a peer gone wrong. Nothing was changed."""


class InvariantError(SavaError):
    """The core found a state that cannot be. The node stops: to continue could destroy what other nodes rely
    on."""

    outcome = Outcome.UNKNOWN
