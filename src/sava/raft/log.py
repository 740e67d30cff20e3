"""The log in memory: every entry since compaction, and how far each of them has come.

    compacted            applied   min(commit, durable)      polled        last
        |---- kept tail ----|------------|---------------------|-------------|
                                          handed to the driver ^             ^ appended

``polled`` is the end of what outputs have asked the driver to write, ``durable`` the end of what the driver
has confirmed *and is still in the log*. The second half of that sentence is the ABA rule:

    batch 1 writes 5@t1 · a new leader truncates 5, batch 2 writes 5@t2 ·
    a third leader brings 5@t1 back in batch 3 · the completion of batch 1 arrives

The entry in memory *is* the one batch 1 wrote, and yet a crash now could leave 5@t2 on disk: batch 2 may
reach it before batch 3 does. So comparing terms is not enough. Each write in flight remembers the end of what
it wrote, and a truncation lowers those ends: the completion of batch 1 counts for nothing at or after 5,
whatever stands there by then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence

from sava.raft.types import Entry, InvariantError, SnapshotMeta

__all__ = ["RaftLog"]

_ENTRY_OVERHEAD = 24
"""Bytes that an entry costs on the wire besides its payload; keeps a message of empty entries bounded too."""


def _term_of(entry: Entry) -> int:
    return entry.term


class RaftLog:
    __slots__ = (
        "_entries",
        "_truncate_from",
        "_writes",
        "applied",
        "commit",
        "compacted_term",
        "durable",
        "first_index",
        "handed_out",
        "last_index",
        "polled",
        "snapshot",
    )

    def __init__(
        self,
        snapshot: SnapshotMeta,
        entries: Sequence[Entry],
        commit: int,
        compacted_term: int | None = None,
    ) -> None:
        self.snapshot = snapshot
        """The newest snapshot that is durable on this node."""
        if entries and entries[-1].index < snapshot.index:
            entries = ()  # a received snapshot took their place; its marker does not erase what was before
        self._entries = list(entries)
        self.first_index = entries[0].index if entries else snapshot.index + 1
        self.compacted_term = self._find_compacted_term(compacted_term)
        self.last_index = self.first_index + len(self._entries) - 1
        self._check_recovered()
        self.polled = self.durable = self.last_index
        self.commit = max(snapshot.index, min(commit, self.last_index))
        self.applied = self.handed_out = snapshot.index
        self._truncate_from: int | None = None
        self._writes: deque[list[int]] = deque()

    def _find_compacted_term(self, given: int | None) -> int:
        before = self.first_index - 1
        if before == 0:
            return 0
        if before == self.snapshot.index:
            return self.snapshot.term
        if given is not None:
            return given
        if before > self.snapshot.index:
            raise InvariantError(
                f"entries from {self.first_index} do not connect to the snapshot at {self.snapshot.index}"
            )
        # The term before the first kept entry was not recorded: give that entry up, its term is what we need.
        first = self._entries.pop(0)
        self.first_index = first.index + 1
        return first.term

    def _check_recovered(self) -> None:
        for position, entry in enumerate(self._entries):
            if entry.index != self.first_index + position:
                raise InvariantError(f"entry {entry.index} stands where {self.first_index + position} must")
        if self.compacted_index > self.snapshot.index or self.last_index < self.snapshot.index:
            raise InvariantError(
                f"entries {self.first_index}..{self.last_index} do not reach "
                f"the snapshot at {self.snapshot.index}"
            )
        if self.term(self.snapshot.index) != self.snapshot.term:
            raise InvariantError(f"the entry at {self.snapshot.index} is not the one in the snapshot")

    # -- questions -------------------------------------------------------------------------------------------

    @property
    def compacted_index(self) -> int:
        return self.first_index - 1

    @property
    def last_term(self) -> int:
        return self._entries[-1].term if self._entries else self.compacted_term

    def term(self, index: int) -> int:
        position = index - self.first_index
        if 0 <= position < len(self._entries):
            return self._entries[position].term
        if position == -1:
            return self.compacted_term
        raise InvariantError(
            f"no term is known at {index}: the log holds {self.first_index}..{self.last_index}"
        )

    def matches(self, index: int, term: int) -> bool:
        return self.first_index <= index + 1 and index <= self.last_index and self.term(index) == term

    def is_up_to_date(self, last_index: int, last_term: int) -> bool:
        """Whether a log that ends so may lead this one: later term first, then longer."""
        return (last_term, last_index) >= (self.last_term, self.last_index)

    def probe_point(self, index: int, term: int) -> int:
        """The largest index <= ``index`` whose term is <= ``term``: where two logs may still agree.

        Entries of a larger term than the other side has at that point cannot match, so one probe skips them
        all. Terms never fall along a log, hence the binary search. Returns an index below the compaction
        point when nothing that is still held qualifies.
        """
        if index < self.compacted_index:
            return index
        end = min(index, self.last_index) - self.first_index + 1
        found = self.first_index + bisect_right(self._entries, term, 0, end, key=_term_of) - 1
        if found == self.compacted_index and self.compacted_term > term:
            return found - 1
        return found

    def slice(self, start: int, end: int, max_bytes: int) -> tuple[Entry, ...]:
        """Entries ``start <= index < end``, cut at ``max_bytes`` but never to nothing."""
        position = start - self.first_index
        if position < 0:
            raise InvariantError(f"entry {start} is compacted; the log begins at {self.first_index}")
        stop = min(end - self.first_index, len(self._entries))
        entries = self._entries
        size = 0
        for at in range(position, stop):
            size += len(entries[at].data) + _ENTRY_OVERHEAD
            if size > max_bytes and at > position:
                return tuple(entries[position:at])
        return tuple(entries[position:stop])

    def between(self, start: int, end: int) -> Sequence[Entry]:
        return self._entries[start - self.first_index : end - self.first_index]

    def all_entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    # -- growth ----------------------------------------------------------------------------------------------

    def append(self, entries: Iterable[Entry]) -> None:
        self._entries.extend(entries)
        self.last_index = self.first_index + len(self._entries) - 1

    def first_conflict(self, prev_index: int, entries: Sequence[Entry]) -> int:
        """Position in ``entries`` of the first one that is not in the log with the same term.

        Only a *different term* is a conflict. A message that ends before our log does says nothing about what
        follows: truncating there once lost committed entries (openraft 0.6), as an old append may arrive
        after a newer one.
        """
        if prev_index == self.last_index:
            return 0
        held = self._entries
        offset = prev_index + 1 - self.first_index
        for position, entry in enumerate(entries):
            at = offset + position
            if at >= len(held) or held[at].term != entry.term:
                return position
        return len(entries)

    def truncate_from(self, index: int) -> None:
        if index <= self.commit:
            raise InvariantError(
                f"truncation at {index} would remove committed entries (commit {self.commit})"
            )
        del self._entries[index - self.first_index :]
        self.last_index = index - 1
        if index <= self.polled:
            # Those entries are on disk or on their way there: the next output must remove them.
            self._truncate_from = index if self._truncate_from is None else min(self._truncate_from, index)
            self.polled = index - 1
        self.durable = min(self.durable, index - 1)
        for write in self._writes:
            write[1] = min(write[1], index - 1)

    def commit_to(self, index: int) -> bool:
        if index <= self.commit:
            return False
        if index > self.last_index:
            raise InvariantError(
                f"commit {index} lies beyond the log's end {self.last_index}: entries were lost"
            )
        self.commit = index
        return True

    # -- durability ------------------------------------------------------------------------------------------

    @property
    def has_unpolled(self) -> bool:
        return self._truncate_from is not None or self.polled < self.last_index

    def poll_writes(self, number: int) -> tuple[int | None, tuple[Entry, ...]]:
        """What output ``number`` must write: where to truncate, and what to append."""
        entries = tuple(self._entries[self.polled + 1 - self.first_index :])
        truncate_from, self._truncate_from = self._truncate_from, None
        self.polled = self.last_index
        if entries:
            self._writes.append([number, self.polled])
        return truncate_from, entries

    def persisted(self, number: int) -> bool:
        """All writes up to ``number`` are durable. Says whether ``durable`` moved."""
        before = self.durable
        while self._writes and self._writes[0][0] <= number:
            self.durable = max(self.durable, self._writes.popleft()[1])
        return self.durable > before

    # -- apply -----------------------------------------------------------------------------------------------

    def poll_apply(self, max_bytes: int) -> tuple[Entry, ...]:
        """Committed entries are applied only once durable *here*: otherwise a crash could leave a state
        machine (or a snapshot of it) that is ahead of its own log."""
        end = min(self.commit, self.durable)
        if end <= self.handed_out:
            return ()
        entries = self.slice(self.handed_out + 1, end + 1, max_bytes)
        self.handed_out = entries[-1].index
        return entries

    # -- snapshots -------------------------------------------------------------------------------------------

    def compact(self, snapshot: SnapshotMeta, keep_entries: int) -> None:
        """A local snapshot is durable: forget entries it covers, except a tail for slow followers."""
        self.snapshot = snapshot
        index = snapshot.index - keep_entries
        if index > self.compacted_index:
            term = self.term(index)
            del self._entries[: index + 1 - self.first_index]
            self.first_index = index + 1
            self.compacted_term = term

    def restore(self, snapshot: SnapshotMeta) -> None:
        """A received snapshot is durable and takes the place of the whole log."""
        self.snapshot = snapshot
        self._entries.clear()
        self.first_index = snapshot.index + 1
        self.last_index = snapshot.index
        self.compacted_term = snapshot.term
        self._truncate_from = None
        self._writes.clear()
        self.polled = self.durable = self.commit = self.applied = self.handed_out = snapshot.index
