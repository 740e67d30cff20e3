"""The Raft log on ``wal.Log``: what was promised is found again, and what cannot be is refused."""

from __future__ import annotations

from random import Random

import pytest

from sava.metadata import durable
from sava.metadata.durable import LogState, Replay, batch_records, bootstrap_record, checkpoint_records
from sava.metadata.peer import Bootstrap
from sava.raft.output import Checkpoint, Output
from sava.raft.types import Entry, EntryKind, HardState, Membership, NodeId, SnapshotMeta
from sava.wal.errors import LogCorrupt
from sava.wal.log import Buffers, Log, LogOptions, Record
from tests.sim.disk import CrashPolicy, SimDisk
from tests.unit.metadata.cuts import CutError, cut_at

ALONE = Membership(voters=(NodeId(1),))
BOOTSTRAP = Bootstrap("c1", ALONE)


def entry(index: int, term: int, data: bytes = b"x") -> Entry:
    return Entry(index, term, EntryKind.COMMAND, data)


def output(
    *entries: Entry,
    hard_state: HardState | None = None,
    truncate_from: int | None = None,
    install: SnapshotMeta | None = None,
) -> Output:
    return Output(1, hard_state, truncate_from, entries, (), install, (), (), (), (), (), ())


def snapshot(index: int, term: int = 1) -> SnapshotMeta:
    return SnapshotMeta(index, term, ALONE, 3, b"d" * 32)


def replay(*batches: list[tuple[int, Buffers]]) -> LogState:
    fold = Replay("here")
    records = [record for batch in batches for record in batch]
    for position, (kind, payload) in enumerate(records):
        fold(Record(position, kind, b"".join(payload)))
    return fold.result()


BOUND = [bootstrap_record(BOOTSTRAP)]


def test_an_empty_log_is_a_pristine_node() -> None:
    assert replay() == LogState(None, None)


def test_a_bound_node_has_an_origin_and_no_promises() -> None:
    state = replay(BOUND)
    assert state.bootstrap == BOOTSTRAP
    assert state.core is not None
    assert (state.core.hard_state, state.core.entries) == (HardState(), ())
    assert state.core.snapshot.membership == ALONE


def test_batches_fold_to_term_vote_and_entries() -> None:
    state = replay(
        BOUND,
        batch_records(output(entry(1, 1), entry(2, 1), hard_state=HardState(1, NodeId(1), 0))),
        batch_records(output(entry(3, 1))),
        batch_records(output(hard_state=HardState(2, NodeId(3), 1))),
        batch_records(output(entry(3, 2, b"new"), entry(4, 2), truncate_from=3)),
    )
    assert state.core is not None
    assert state.core.hard_state == HardState(2, NodeId(3), 1)
    assert [(e.index, e.term) for e in state.core.entries] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert state.core.entries[2].data == b"new"


def test_truncation_and_append_are_one_record() -> None:
    """Two records could be torn apart: the old entries gone, the new ones not there."""
    records = batch_records(output(entry(3, 2), entry(4, 2), truncate_from=3, hard_state=HardState(2)))
    assert len(records) == 1


def test_a_batch_may_commit_what_it_puts_in_the_place_of_what_it_cuts() -> None:
    """Behind a slow disk: entries 2.. of an old leader are cut, those of the next one appended, and the
    commit has passed them before the batch is written. Judged by its own commit, the truncation would seem to
    undo what is committed, and a good log would be refused."""
    state = replay(
        BOUND,
        batch_records(output(entry(1, 1), entry(2, 1), entry(3, 1), hard_state=HardState(1, NodeId(1), 1))),
        batch_records(
            output(entry(2, 2), entry(3, 2), hard_state=HardState(2, NodeId(2), 3), truncate_from=2)
        ),
    )
    assert state.core is not None
    assert [(e.index, e.term) for e in state.core.entries] == [(1, 1), (2, 2), (3, 2)]
    assert state.core.hard_state.commit == 3


def test_a_huge_batch_is_split_and_the_first_record_carries_the_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """m27: entries that are durable without their term let this node vote twice in it."""
    monkeypatch.setattr(durable, "MAX_RECORD_BYTES", 100)
    made = output(*(entry(i, 2, b"y" * 60) for i in range(1, 6)), hard_state=HardState(2, NodeId(1)))
    records = batch_records(made)
    assert len(records) == 5
    for seen in range(1, 6):
        state = replay(BOUND, records[:seen])
        assert state.core is not None
        assert state.core.hard_state.term == 2
        assert len(state.core.entries) == seen


def test_an_installed_snapshot_replaces_every_entry() -> None:
    state = replay(
        BOUND,
        batch_records(output(entry(1, 1), entry(2, 1), hard_state=HardState(1))),
        batch_records(output(install=snapshot(9), truncate_from=2)),
        batch_records(output(entry(10, 1))),
    )
    assert state.core is not None
    assert state.core.snapshot == snapshot(9)
    assert [e.index for e in state.core.entries] == [10]
    assert state.core.compacted_term == 1


def checkpoint(*entries: Entry, term: int = 1) -> Checkpoint:
    return Checkpoint(HardState(term, NodeId(1), 5), snapshot(5), entries, compacted_term=1)


def test_a_checkpoint_stands_for_everything_before_it() -> None:
    records = checkpoint_records(BOOTSTRAP, checkpoint(entry(4, 1), entry(5, 1), entry(6, 1)))
    state = replay(records, batch_records(output(entry(7, 1))))
    assert state.bootstrap == BOOTSTRAP
    assert state.core is not None
    assert state.core.snapshot == snapshot(5)
    assert [e.index for e in state.core.entries] == [4, 5, 6, 7]
    assert state.core.compacted_term == 1


def test_half_a_checkpoint_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "MAX_RECORD_BYTES", 100)
    old = batch_records(output(*(entry(i, 1) for i in range(1, 7)), hard_state=HardState(1)))
    parts = checkpoint_records(BOOTSTRAP, checkpoint(*(entry(i, 1, b"z" * 60) for i in range(4, 7))))
    assert len(parts) == 3
    for seen in range(len(parts)):
        state = replay(BOUND, old, parts[:seen])
        assert state.core is not None
        assert state.core.snapshot.index == 0
        after = replay(BOUND, old, parts[:seen], batch_records(output(entry(7, 1))))
        assert after.core is not None
        assert len(after.core.entries) == 7
    complete = replay(BOUND, old, parts)
    assert complete.core is not None
    assert complete.core.snapshot.index == 5


def test_a_log_that_begins_with_half_a_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "MAX_RECORD_BYTES", 100)
    parts = checkpoint_records(BOOTSTRAP, checkpoint(*(entry(i, 1, b"z" * 60) for i in range(4, 7))))
    for remains in (parts[:1], parts[1:], [*parts[:1], *HELD]):
        with pytest.raises(LogCorrupt, match="no checkpoint follows"):
            replay(remains)
    with pytest.raises(LogCorrupt, match="without its head"):
        replay(BOUND, parts[1:])


HELD = batch_records(output(entry(1, 1), entry(2, 1), hard_state=HardState(2, NodeId(0), 1)))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (output(entry(4, 2)), "follows entry 2"),
        (output(entry(2, 2)), "follows entry 2"),
        (output(entry(3, 0)), "follows term 1"),
        (output(entry(3, 3)), "but the node was in 2"),
        (output(hard_state=HardState(1)), "follows term 2"),
        (output(truncate_from=1), "are cut at 1"),
        (output(truncate_from=4), "are cut at 4"),
        (output(install=snapshot(0)), "replaces a newer one"),
    ],
    ids=[
        "gap",
        "overlap",
        "falling term",
        "term behind entries",
        "lower term",
        "cut committed",
        "cut beyond",
        "old",
    ],
)
def test_records_that_cannot_follow_each_other_are_corruption(bad: Output, why: str) -> None:
    with pytest.raises(LogCorrupt, match=why):
        replay(BOUND, HELD, batch_records(bad))


def test_other_impossible_beginnings() -> None:
    with pytest.raises(LogCorrupt, match="in the middle, and no checkpoint follows"):
        replay(HELD)
    with pytest.raises(LogCorrupt, match="second bootstrap"):
        replay(HELD, BOUND)
    with pytest.raises(LogCorrupt, match="second bootstrap"):
        replay(BOUND, BOUND)
    with pytest.raises(LogCorrupt, match="unknown kind 9"):
        replay(BOUND, [(9, [b""])])
    with pytest.raises(LogCorrupt):
        replay(BOUND, [(durable.RecordKind.BATCH, [b"\xc1"])])


@pytest.mark.parametrize("file_bytes", [64 << 20, 600], ids=["one file before", "several files before"])
@pytest.mark.parametrize("policy", list(CrashPolicy))
def test_a_checkpoint_cut_off_anywhere_leaves_the_old_or_the_new_state(
    policy: CrashPolicy, file_bytes: int
) -> None:
    """S54: compaction of the log, with a power cut before each operation that it makes. With several older
    files, a cut between two removals leaves a log that begins in the middle of what was replaced."""

    def prepare() -> tuple[SimDisk, Log]:
        disk = SimDisk(Random(f"{policy}"))
        log = Log.open(
            disk, owner="node-1", new_storage_id=lambda: "s", options=LogOptions(file_bytes=file_bytes)
        )
        log.append_many([*BOUND, *batch_records(output(hard_state=HardState(1)))])
        for index in range(1, 8):
            log.append_many(batch_records(output(entry(index, 1, b"x" * 60))))
        log.sync()
        return disk, log

    records = checkpoint_records(BOOTSTRAP, checkpoint(entry(6, 1), entry(7, 1)))
    outcomes = set()
    for operation in range(100):
        disk, log = prepare()
        cut_at(disk, operation)
        try:
            durable.write_checkpoint(log, records)
        except CutError:
            pass
        else:
            break
        after = disk.crash(policy)
        after.on_operation(None)
        fold = Replay("sim")
        Log.open(after, owner="node-1", new_storage_id=lambda: "s", replay=fold)
        core = fold.result().core
        assert core is not None
        assert core.entries[-1].index == 7
        assert (core.snapshot.index, len(core.entries)) in ((0, 7), (5, 2))
        outcomes.add(core.snapshot.index)
    assert operation > 5
    assert outcomes == {0, 5}
