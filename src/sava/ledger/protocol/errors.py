"""What can be wrong with a journal's record or with what its disks say of it."""

from __future__ import annotations

from sava.errors import HostError, Outcome, RetryableError
from sava.ledger.protocol.types import JournalId


class JournalFenced(RetryableError):
    """Somebody else ends this journal: its owner acknowledges nothing more. What was under way may have
    happened."""

    outcome = Outcome.UNKNOWN

    def __init__(self, journal: JournalId) -> None:
        super().__init__(f"journal {journal} was fenced; its topics go on elsewhere, or in the next journal")
        self.journal = journal


class WrongStep(RetryableError):
    """The journal's record does not allow this step."""

    def __init__(self, step: str, why: str) -> None:
        super().__init__(f"a journal's record does not allow to {step}: {why}")
        self.step = step


class TailBroken(HostError):
    """A closed journal does not hold what it must hold of a topic."""
