"""What the controller refuses, by whose fault it is."""

from __future__ import annotations

from sava.broker.ownership import WrongState
from sava.broker.specs import Ownership
from sava.errors import CallerError, RetryableError


class NotLeader(RetryableError):
    """Only the leader decides who serves what. ``leader`` is its node id, 0 if not known."""

    def __init__(self, leader: int = 0) -> None:
        where = f"broker {leader} leads" if leader else "it is not known who leads at the moment"
        super().__init__(f"this broker does not lead the cluster; {where}")
        self.leader = leader


class BrokerUnknown(CallerError):
    def __init__(self, broker: int) -> None:
        super().__init__(f"broker {broker} is not registered; `sava brokers list` shows those that are")
        self.broker = broker


class MoveRefused(CallerError):
    """The topic cannot go there, or not anywhere; says why."""


class AlreadyMoving(WrongState):
    """The topic is on its way already; says from where to where, and why."""

    def __init__(self, topic: object, record: Ownership) -> None:
        super().__init__(topic, "move", record.state)
        target = f"broker {record.target}" if record.target else "any other"
        self.args = (
            f"topic {topic} is moving already, from broker {record.owner} to {target} ({record.reason})",
        )


class RebalanceRunning(RetryableError):
    def __init__(self) -> None:
        super().__init__("a round of rebalancing is under way; ask again when it is over")
