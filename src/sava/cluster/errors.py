"""What the controller refuses, by whose fault it is."""

from __future__ import annotations

from sava.errors import CallerError, HostError, Outcome, RetryableError
from sava.topics.ownership import WrongState
from sava.topics.specs import Ownership


class NotController(RetryableError):
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


class MovePostponed(RetryableError):
    """The owner cannot hand the topic over at present, and serves it. Move it when the reason is gone."""

    def __init__(self, topic: object, broker: int, reason: str) -> None:
        super().__init__(f"topic {topic} stays with broker {broker} for now: {reason}")
        self.topic, self.broker, self.reason = str(topic), broker, reason


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


class JournalUnknown(CallerError):
    def __init__(self, journal: object) -> None:
        super().__init__(f"there is no journal {journal}; `sava journals list` shows those that are known")
        self.journal = str(journal)


class NothingToGiveUp(CallerError):
    """The journal does not wait for anybody, so that nothing has to be given up."""

    def __init__(self, journal: object, why: str) -> None:
        super().__init__(f"nothing of journal {journal} has to be given up: {why}")
        self.journal = str(journal)


class WriterUnknown(CallerError):
    def __init__(self, writer: str) -> None:
        super().__init__(f"there is no writer {writer}; `sava writers list` shows those that are known")
        self.writer = writer


class WriterFenced(CallerError):
    """Another run of the same writer has taken over."""

    def __init__(self, writer: str, run: str, current: str) -> None:
        super().__init__(
            f"writer {writer}: run {run} is fenced, run {current} has followed it; two programs write as the "
            "same writer, and the earlier one must stop"
        )
        self.writer, self.run, self.current = writer, run, current


class WriterReused(CallerError):
    """The writer has published further in the name of another query."""

    def __init__(self, writer: str, *, query: str, batch: int, known_query: str, known_batch: int) -> None:
        super().__init__(
            f"writer {writer} has published up to batch {known_batch} of query {known_query or 'none'}, and "
            f"this is batch {batch} of query {query or 'none'}: taken for a repeated one, it would be lost. "
            "If the query was begun anew, choose another writer id, or forget this one with "
            f"`sava writers forget {writer}`"
        )
        self.writer = writer


class BatchOutOfOrder(CallerError):
    """A batch that was never decided comes behind one with a greater number."""

    def __init__(self, writer: str, batch: int, last: int) -> None:
        super().__init__(
            f"writer {writer}: batch {batch} is not one of those that are remembered as published, and batch "
            f"{last} is: taken for a repeated one, it might be lost. The numbers of a writer's batches must "
            "grow; write it as another writer"
        )
        self.writer, self.batch, self.last = writer, batch, last


class WriterBusy(RetryableError):
    """A batch of the writer is decided and not published yet."""

    def __init__(self, writer: str, batch: int, error: str) -> None:
        why = f" ({error})" if error else ""
        super().__init__(
            f"batch {batch} of writer {writer} is being published{why}; with --force the writer is forgotten "
            "all the same, and what is not published of the batch by then never will be"
        )
        self.writer, self.batch = writer, batch


class WriterContended(RetryableError):
    """The writer's record changed under every attempt to change it."""

    def __init__(self, writer: str) -> None:
        super().__init__(
            f"several programs write as writer {writer} at once, or its record cannot be changed"
        )
        self.writer = writer


class StagedLost(HostError):
    """A batch was decided, and what it consists of is not there any more: somebody has removed it."""

    outcome = Outcome.PARTLY
