"""The Raft log on ``wal.Log``: what one node has promised, as a stream of records.

Three kinds of records, and the state of a node is the fold over them:

* ``BOOTSTRAP``: the cluster that this node belongs to. The first record of every log.
* ``BATCH``: one output of the core: term and vote, truncation, entries, an installed snapshot. It is *one*
  record because its parts must not be torn apart. Were the term a record of its own, behind the entries,

      entries of term 5 durable · power cut · restart in term 4 · vote for another node in term 5

  would let two leaders of term 5 exist (openraft documents the loss of a committed entry from such a
  reordering). Within a record the order is: term and vote, installed snapshot or truncation, entries.
* ``CHECKPOINT``: everything up to here in one value, written as the first record of a fresh file once a
  snapshot is durable. After it, all older files may go. Its entries may need several records; a checkpoint
  counts only when its last part is there, so a power cut in the middle leaves the state that the older files
  (not yet deleted) tell. The older files go one by one, oldest first: a power cut in between leaves a log
  that begins in the middle, with what is left of them. That is no harm as long as a complete checkpoint
  follows; what stands before it is passed over.

Recovery believes nothing that cannot be: a gap, a term that falls, an entry newer than the term, a
truncation of what was committed are ``LogCorrupt``. Starting with less than was promised would break quorum
intersection, hence never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

import msgspec

from sava.metadata.peer import Bootstrap
from sava.raft.output import Checkpoint, Output, Recovered
from sava.raft.types import Entry, HardState, SnapshotMeta
from sava.wal.errors import LogCorrupt
from sava.wal.log import Buffers, Log, Record

MAX_RECORD_BYTES = 8 << 20
"""Entries beyond this go into a further record: far below the log's own limit, and a bound for what recovery
holds twice."""


class RecordKind(IntEnum):
    BOOTSTRAP = 1
    BATCH = 2
    CHECKPOINT = 3


class DurableBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    hard_state: HardState | None
    truncate_from: int | None
    entries: Sequence[Entry]
    install: SnapshotMeta | None = None


class CheckpointPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``head`` opens a checkpoint; the parts after it carry entries alone. ``more``: another one follows."""

    head: CheckpointHead | None
    entries: Sequence[Entry]
    more: bool


class CheckpointHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    bootstrap: Bootstrap
    hard_state: HardState
    snapshot: SnapshotMeta
    compacted_term: int
    first_index: int


class LogState(msgspec.Struct, frozen=True):
    """What the log says. Both are None on a pristine node; afterwards neither ever is."""

    bootstrap: Bootstrap | None = None
    core: Recovered | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode_bootstrap = msgspec.msgpack.Decoder(Bootstrap).decode
_decode_batch = msgspec.msgpack.Decoder(DurableBatch).decode
_decode_part = msgspec.msgpack.Decoder(CheckpointPart).decode


# -- writing ---------------------------------------------------------------------------------------------


def bootstrap_record(bootstrap: Bootstrap) -> tuple[int, Buffers]:
    return RecordKind.BOOTSTRAP, [_encode(bootstrap)]


def has_durable_part(output: Output) -> bool:
    """Whether the output asks for a record. Chunks alone do not: they are files, and worthless until
    installed."""
    return bool(output.entries or output.hard_state or output.install or output.truncate_from is not None)


def batch_records(output: Output) -> list[tuple[int, Buffers]]:
    """One record, unless the entries exceed ``MAX_RECORD_BYTES``. Then the first one still carries term, vote
    and truncation, and a crash after it leaves a shorter log, which no node has heard of."""
    hard_state, truncate_from, install = output.hard_state, output.truncate_from, output.install
    if len(output.entries) < 2:
        return [
            (RecordKind.BATCH, [_encode(DurableBatch(hard_state, truncate_from, output.entries, install))])
        ]
    records: list[tuple[int, Buffers]] = []
    for entries in _pieces(output.entries):
        records.append(
            (RecordKind.BATCH, [_encode(DurableBatch(hard_state, truncate_from, entries, install))])
        )
        hard_state = truncate_from = install = None
    return records


def checkpoint_records(bootstrap: Bootstrap, checkpoint: Checkpoint) -> list[tuple[int, Buffers]]:
    entries = checkpoint.entries
    head: CheckpointHead | None = CheckpointHead(
        bootstrap,
        checkpoint.hard_state,
        checkpoint.snapshot,
        checkpoint.compacted_term,
        entries[0].index if entries else checkpoint.snapshot.index + 1,
    )
    pieces = list(_pieces(entries)) or [()]
    records: list[tuple[int, Buffers]] = []
    for number, piece in enumerate(pieces, start=1):
        part = CheckpointPart(head, piece, more=number < len(pieces))
        records.append((RecordKind.CHECKPOINT, [_encode(part)]))
        head = None
    return records


def write_checkpoint(log: Log, records: Sequence[tuple[int, Buffers]]) -> None:
    """Begin a fresh file with the checkpoint, and only when that is durable delete the files before it."""
    log.roll()
    position = log.append_many(records)[0]
    log.sync()
    log.trim(position)


def _pieces(entries: tuple[Entry, ...]) -> Iterator[Sequence[Entry]]:
    start = size = 0
    for at, entry in enumerate(entries):
        size += len(entry.data) + 32
        if size > MAX_RECORD_BYTES and at > start:
            yield entries[start:at]
            start, size = at, len(entry.data) + 32
    if start < len(entries):
        yield entries[start:]


# -- reading ---------------------------------------------------------------------------------------------


class _Inconsistent(Exception):
    """Records that do not follow from each other; becomes LogCorrupt with the record's position."""


class _Fold:
    """The state that the records so far tell, while it is being built."""

    __slots__ = ("bootstrap", "compacted_term", "entries", "first", "hard_state", "snapshot")

    def __init__(
        self,
        bootstrap: Bootstrap,
        hard_state: HardState,
        snapshot: SnapshotMeta,
        compacted_term: int,
        first: int,
    ) -> None:
        self.bootstrap = bootstrap
        self.hard_state = hard_state
        self.snapshot = snapshot
        self.compacted_term = compacted_term
        self.first = first
        self.entries: list[Entry] = []

    @property
    def end(self) -> int:
        return self.first + len(self.entries)

    def batch(self, batch: DurableBatch) -> None:
        # A truncation is judged by the commit of the batches before: the hard state beside it may count
        # what has replaced the cut entries already (a slow disk; 11..14 cut, 11..13 of the next leader
        # appended and committed, all in one batch; tests/sim seed 86).
        committed = self.hard_state.commit
        if batch.hard_state is not None:
            self._promise(batch.hard_state)
        if batch.install is not None:
            # It replaces every entry, so a truncation beside it has nothing left to cut.
            self._install(batch.install)
        elif batch.truncate_from is not None:
            self._truncate(batch.truncate_from, committed)
        self.append(batch.entries)

    def append(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        index = self.end
        term = self.entries[-1].term if self.entries else self.compacted_term
        for entry in entries:
            if entry.index != index:
                raise _Inconsistent(f"entry {entry.index} follows entry {index - 1}")
            if entry.term < term:
                raise _Inconsistent(f"entry {index} of term {entry.term} follows term {term}")
            term = entry.term
            index += 1
        if term > self.hard_state.term:
            raise _Inconsistent(
                f"entry {index - 1} is of term {term}, but the node was in {self.hard_state.term}"
            )
        self.entries += entries

    def _install(self, snapshot: SnapshotMeta) -> None:
        if snapshot.index <= self.snapshot.index:
            raise _Inconsistent(
                f"a snapshot at {snapshot.index} replaces a newer one at {self.snapshot.index}"
            )
        self.snapshot = snapshot
        self.compacted_term = snapshot.term
        self.first = snapshot.index + 1
        self.entries = []

    def _promise(self, hard_state: HardState) -> None:
        if hard_state.term < self.hard_state.term:
            raise _Inconsistent(f"term {hard_state.term} follows term {self.hard_state.term}")
        self.hard_state = hard_state

    def _truncate(self, index: int, committed: int) -> None:
        if index <= max(self.snapshot.index, committed, self.first - 1) or index > self.end:
            raise _Inconsistent(f"entries {self.first}..{self.end - 1} are cut at {index}")
        del self.entries[index - self.first :]

    def recovered(self) -> Recovered:
        return Recovered(self.hard_state, self.snapshot, tuple(self.entries), self.compacted_term)


class Replay:
    """Fed with every record of a log, oldest first (``Log.open(replay=...)``); then ``result``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fold: _Fold | None = None
        self._checkpoint: _Fold | None = None
        """A checkpoint whose last part was not seen yet; it replaces ``_fold`` when it is complete."""
        self._has_remains = False
        """The log begins with records that only a later checkpoint makes superfluous."""
        self._position = 0

    def __call__(self, record: Record) -> None:
        self._position = record.position
        try:
            self._apply(record.kind, record.payload)
        except (_Inconsistent, msgspec.DecodeError) as error:
            raise LogCorrupt(self._path, "log", record.position, str(error)) from error

    def result(self) -> LogState:
        if self._fold is None:
            if self._has_remains or self._checkpoint is not None:
                raise LogCorrupt(
                    self._path,
                    "log",
                    self._position,
                    "the log begins in the middle, and no checkpoint follows",
                )
            return LogState()
        return LogState(self._fold.bootstrap, self._fold.recovered())

    def _apply(self, kind: int, payload: bytes) -> None:
        if kind == RecordKind.BATCH:
            self._checkpoint = None  # half a checkpoint before a power cut: it never counted
            batch = _decode_batch(payload)
            if self._fold is not None:
                self._fold.batch(batch)
            else:
                self._has_remains = True
        elif kind == RecordKind.CHECKPOINT:
            self._part(_decode_part(payload))
        elif kind == RecordKind.BOOTSTRAP:
            self._bind(_decode_bootstrap(payload))
        else:
            raise _Inconsistent(f"a record of unknown kind {kind}")

    def _bind(self, bootstrap: Bootstrap) -> None:
        if self._fold is not None or self._has_remains:
            raise _Inconsistent("a second bootstrap")
        origin = SnapshotMeta(0, 0, bootstrap.membership, 0, b"")
        self._fold = _Fold(bootstrap, HardState(), origin, 0, 1)

    def _part(self, part: CheckpointPart) -> None:
        if part.head is not None:
            head = part.head
            self._checkpoint = _Fold(
                head.bootstrap, head.hard_state, head.snapshot, head.compacted_term, head.first_index
            )
        if self._checkpoint is None:
            if self._fold is not None:
                raise _Inconsistent("a part of a checkpoint without its head")
            self._has_remains = True
            return
        self._checkpoint.append(part.entries)
        if not part.more:
            self._fold, self._checkpoint = self._checkpoint, None


def origin(bootstrap: Bootstrap) -> Recovered:
    """The state of a node that was bound to a cluster a moment ago."""
    return Recovered(HardState(), SnapshotMeta(0, 0, bootstrap.membership, 0, b""), ())
