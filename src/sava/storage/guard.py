"""Guard: the right to write as a topic's owner, which is given and taken outside of storage."""

from __future__ import annotations

from typing import Protocol

from sava.metadata.commands import Compare


class Guard(Protocol):
    """Of one owner's time with a topic."""

    @property
    def holds(self) -> Compare:
        """The condition that it has not ended; asked anew for each transaction."""
        ...

    async def still_holds(self) -> bool:
        """Asked when a transaction was refused: False if it has ended for good; True if it goes on, under
        whatever ``holds`` is now. Raises what keeps it from being known."""
        ...
