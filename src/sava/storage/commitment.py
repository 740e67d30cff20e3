"""Commitment: from when on a frame that is durable here may be acknowledged.

Without others, that is at once. A journal that others mirror waits until enough of them have it, too; who
they are and how many is decided above (``mirroring``). The order of answers does not change: what the disk
refused is told behind what was written before it, and not sooner:

    a  10..20  durable here, not yet elsewhere
    b  20..21  refused: the disk is full
    told b     the topic takes everything in flight for failed, and gives out 10 again → a and its successor
               are two messages at one offset

A journal has *lives*: within one, what is written is one stream that the same disks hold. It ends when
somebody else has ended it (a fence), with the broker's registration, or with the process; what was in flight
then is not acknowledged, and whoever ended it decides whether it happened. Topics that were opened in a life
end with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from sava.errors import RetryableError


class NotCommittable(RetryableError):
    """The journal accepts nothing at the moment, since nothing could be acknowledged."""


class Commitment(Protocol):
    """Of one life. Called on the event loop."""

    @property
    def is_degraded(self) -> bool:
        """What is told to be committed now is on fewer disks than it should be."""
        ...

    def check(self) -> None:
        """Raises NotCommittable when too few disks are there to ever commit what would be appended now."""
        ...

    def durable(self, end: int) -> int:
        """This disk has everything before ``end``; how far all is committed."""
        ...

    def trimmable(self, floor: int) -> int:
        """Everything before ``floor`` is in registered segments; how much of it this disk may let go."""
        ...


class Waiting(NamedTuple):
    end: int
    """Where the commitment must be. Of something refused: where what was before it ends."""
    finish: Callable[[BaseException | None], None]
    outcome: BaseException | None


class Uncommitted:
    """Answers of the disk, in order, until they may be told."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()
        self._end = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self, end: int, finish: Callable[[BaseException | None], None], outcome: BaseException | None
    ) -> None:
        self._end = max(self._end, end)
        self._waiting.append(Waiting(self._end, finish, outcome))

    def tell(self, position: int) -> None:
        """What lies before the position is committed."""
        waiting = self._waiting
        while waiting and waiting[0].end <= position:
            _, finish, outcome = waiting.popleft()
            finish(outcome)

    def fail(self, error: BaseException) -> None:
        """Nothing of it will be acknowledged. What the disk refused was refused for that reason."""
        while self._waiting:
            _, finish, outcome = self._waiting.popleft()
            finish(outcome or error)
