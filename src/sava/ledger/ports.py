"""What the two halves of mirroring need of each other and of the cluster.

The half that serves (``copies``, ``owner_host``, ``streams``) knows nothing of how records are stored, who is
registered, or when a journal is to be ended; the half that decides (``records``, ``choice``, ``coordinator``,
``salvage``) knows nothing of files and sockets.

**Numbers.** The incarnation of a ``JournalId`` is the broker's registration (its lease) under which the
journal was opened. Leases are given out once, in order, by the metadata store, so a broker that lost its disk
does not use a number twice; and a journal whose broker is not registered under that very number is one that
nobody continues: to be recovered.

**Origin.** Records of the log verify only for those who know whose log it is (the storage id seeds their
checksums). Every request therefore names the *origin*: the owner's disk, ``record.fragments[0].members[0]``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from sava.errors import Outcome, RetryableError
from sava.ledger.protocol import (
    JournalId,
    JournalRecord,
    Message,
    StorageId,
)


class Stored(NamedTuple):
    """A record as it is in the metadata store."""

    record: JournalRecord
    revision: int


class RecordChanged(RetryableError):
    """The record is not the one that was to be replaced; ``found`` is there instead (None: nothing)."""

    def __init__(self, journal: JournalId, found: Stored | None) -> None:
        state = found.record.state.value if found is not None else "gone"
        super().__init__(f"the record of journal {journal} was changed meanwhile: it is {state}")
        self.journal = journal
        self.found = found


class JournalRecords(Protocol):
    """The records in the metadata store. Reads are linearizable. Every call may raise what the metadata store
    raises (Unavailable, OutcomeUnknown, TimeoutError): nobody knows then whether it had an effect."""

    async def get(self, journal: JournalId) -> Stored | None: ...

    async def of(self, broker: int) -> Mapping[JournalId, Stored]:
        """All records of a broker's journals, oldest first."""
        ...

    async def open(self, journal: JournalId, record: JournalRecord) -> int:
        """Store the first record under an unused number; its revision. Raises RecordChanged if it is used."""
        ...

    async def change(self, journal: JournalId, record: JournalRecord, *, revision: int) -> int:
        """Compare-and-swap; the new revision. Raises RecordChanged."""
        ...

    async def remove(self, journal: JournalId, *, revision: int) -> None:
        """Compare-and-delete. Raises RecordChanged."""
        ...

    def listen(self, journal: JournalId | None, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` (on the event loop, it must return at once) whenever the record of this journal,
        or any, may have changed in this broker's view. Returns what ends it."""
        ...


class Neighbour(NamedTuple):
    """A disk of a broker that is registered now."""

    storage: StorageId
    broker: int
    address: str
    """Its Raft port, which takes journals, too."""
    rack: str = ""
    mirrored: int = 0
    """How many open journals name this disk, the broker's own not counted."""
    is_leaving: bool = False
    """Its broker is about to stop."""


class Neighbours(Protocol):
    """The registered brokers, this one included, as this broker sees them now."""

    def all(self) -> Sequence[Neighbour]: ...

    def find(self, storage: StorageId) -> Neighbour | None: ...

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` when somebody came, went, or came anew. Returns what ends it."""
        ...


class Choose(Protocol):
    """Which disks are to mirror (``choice``): pure."""

    def __call__(
        self,
        candidates: Sequence[Neighbour],
        *,
        own: StorageId,
        keep: Sequence[StorageId],
        avoid: Collection[StorageId],
        count: int,
        needed: int = 0,
    ) -> tuple[StorageId, ...]:
        """Up to ``count`` mirrors, never ``own``: those of ``keep`` that are still candidates first, then the
        best of the others; those to ``avoid`` (slow, full, silent) in their order, and only when there are
        fewer than ``needed`` others."""
        ...


class PeerUnreachable(RetryableError):
    """The disk was not reached, or did not answer in time. It may have done what it was asked."""

    outcome = Outcome.UNKNOWN


class Peers(Protocol):
    """Asking a disk, wherever it is, this broker's own included."""

    async def ask(
        self, storage: StorageId, message: Message, *, origin: StorageId, timeout: float
    ) -> Message:
        """The answer to Fence, Check, Read, WriteBack or Trim (a Trim is answered by itself). Raises
        PeerUnreachable."""
        ...
