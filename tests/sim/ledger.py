"""Ledger: what a node's log was asked to hold, and what of it is durable, kept apart from the code that does
it.

It reads the very records that the replica hands to its log writer and folds them a second time, with its own
few lines. Two states come out: ``submitted`` (what the node believes) and ``durable`` (what a power cut
cannot take). The invariants about promises (I6, I10, I11) ask the durable one, and a restart must find one of
the states between the two: nothing that was synced is missing, nothing appears that was never written,
and no record counts without those before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from sava.metadata.durable import DurableBatch, LogState, RecordKind
from sava.raft.types import Entry, EntryKind, HardState
from sava.wal.log import Buffers
from tests.sim.history import Violation

_decode_batch = msgspec.msgpack.Decoder(DurableBatch).decode


@dataclass(slots=True)
class LogImage:
    """The fold over some records: term and vote, and the entries after ``base``, which a snapshot covers."""

    bound: bool = False
    hard_state: HardState = field(default_factory=HardState)
    base: int = 0
    base_term: int = 0
    entries: list[Entry] = field(default_factory=list)
    configurations: list[int] = field(default_factory=list)
    """Indexes of the membership entries among them."""

    @property
    def last(self) -> int:
        return self.base + len(self.entries)

    @property
    def last_term(self) -> int:
        return self.entries[-1].term if self.entries else self.base_term

    def holds(self, index: int, term: int) -> bool:
        """Whether the entry is here, in the log or inside the snapshot."""
        return index <= self.base or (index <= self.last and self.entries[index - self.base - 1].term == term)

    def entry(self, index: int) -> Entry | None:
        return self.entries[index - self.base - 1] if self.base < index <= self.last else None

    def fold(self, batch: DurableBatch | None) -> None:
        """``None`` is the bootstrap record."""
        if batch is None:
            self.bound = True
            return
        if batch.install is not None:
            self.base, self.base_term = batch.install.index, batch.install.term
            self.entries, self.configurations = [], []
        if batch.hard_state is not None:
            self.hard_state = batch.hard_state
        if batch.truncate_from is not None:
            del self.entries[max(0, batch.truncate_from - self.base - 1) :]
            while self.configurations and self.configurations[-1] >= batch.truncate_from:
                self.configurations.pop()
        if batch.entries:
            if batch.entries[0].index != self.last + 1:
                raise Violation("I8", f"entry {batch.entries[0].index} is written after entry {self.last}")
            self.entries.extend(batch.entries)
            self.configurations += [e.index for e in batch.entries if e.kind is EntryKind.MEMBERSHIP]

    def copy(self) -> LogImage:
        return LogImage(
            self.bound,
            self.hard_state,
            self.base,
            self.base_term,
            list(self.entries),
            list(self.configurations),
        )


class Ledger:
    def __init__(self) -> None:
        self.submitted = LogImage()
        self.durable = LogImage()
        self.previous_terms: list[int | None] = []
        """Of the last submission: for each batch, the term before its first entry. (A later batch of the same
        submission may already have replaced that entry in the image.)"""
        self._pending: deque[DurableBatch | None] = deque()

    def submit(self, records: Sequence[tuple[int, Buffers]]) -> list[DurableBatch | None]:
        batches = [decode_record(kind, payload) for kind, payload in records if kind != RecordKind.CHECKPOINT]
        self.previous_terms = []
        for batch in batches:
            self.submitted.fold(batch)
            self._pending.append(batch)
            before = self.submitted.entry(batch.entries[0].index - 1) if batch and batch.entries else None
            self.previous_terms.append(before.term if before is not None else None)
        return batches

    def synced(self) -> None:
        """All that was submitted is durable now."""
        while self._pending:
            self.durable.fold(self._pending.popleft())

    def refused(self) -> None:
        """The disk was full: nothing of what was pending was written, and the node will come back with it."""
        self._pending.clear()
        self.submitted = self.durable.copy()

    def recovered(self, node: int, state: LogState) -> None:
        """A restart read the log back. Its finding must be the durable image plus some first part of what was
        pending."""
        image = self.durable.copy()
        while not _is_same(image, state):
            if not self._pending:
                raise Violation(
                    "durability", f"node {node} had promised {_brief(self.durable)} and found {_found(state)}"
                )
            image.fold(self._pending.popleft())
        if state.core is not None:
            image.hard_state = state.core.hard_state
        self._pending.clear()
        self.durable, self.submitted = image, image.copy()


def decode_record(kind: int, payload: Buffers) -> DurableBatch | None:
    if kind == RecordKind.BOOTSTRAP:
        return None
    return _decode_batch(b"".join(payload))


def _is_same(image: LogImage, state: LogState) -> bool:
    core = state.core
    if core is None or not image.bound:
        return core is None and not image.bound
    if (core.hard_state.term, core.hard_state.vote) != (image.hard_state.term, image.hard_state.vote):
        return False
    if core.snapshot.index < image.base:
        return False
    last = core.entries[-1].index if core.entries else core.snapshot.index
    if last != image.last:
        return False
    for entry in core.entries:
        mine = image.entry(entry.index)
        if mine is not None and mine != entry:
            return False
    return True


def _brief(image: LogImage) -> str:
    hard = image.hard_state
    entries = f"entries {image.base + 1}..{image.last} (last of term {image.last_term})"
    return f"term {hard.term}, vote {hard.vote}, {entries}"


def _found(state: LogState) -> str:
    core = state.core
    if core is None:
        return "nothing"
    hard = core.hard_state
    last = core.entries[-1].index if core.entries else core.snapshot.index
    return f"term {hard.term}, vote {hard.vote}, snapshot {core.snapshot.index}, entries ..{last}"
