"""Compaction below a local snapshot, and what a restart finds: S54, S56."""

from __future__ import annotations

from random import Random

import pytest

from sava.raft import (
    NO_NODE,
    Append,
    CoreConfig,
    HardState,
    InvariantError,
    MembershipChange,
    RaftCore,
    Recovered,
    SnapshotChunk,
    SnapshotMeta,
)
from tests.unit.raft.harness import CONFIG, N1, N4, Cluster, entries_of, make_core, membership

THREE = membership([1, 2, 3])


def test_s54_local_compaction_survives_a_restart():
    """With the checkpoint and without it."""
    for truncate_disk in (True, False):
        cluster = Cluster(config=CoreConfig(keep_entries=3))
        cluster.elect(1)
        cluster.propose(1, *[b"%d" % n for n in range(10)])
        cluster[1].snapshot(truncate_disk=truncate_disk)
        cluster[1].crash()
        cluster[1].restart()
        assert cluster[1].machine == [b"%d" % n for n in range(10)]
        leader = cluster.converge()
        cluster.propose(leader, b"x")
        cluster.tick(1)
        assert [cluster[n].machine[-1] for n in (1, 2, 3)] == [b"x"] * 3


def test_s56_building_a_snapshot_blocks_neither_append_nor_apply():
    """The snapshot describes index 4; by the time it is durable, more has been appended and applied."""
    cluster = Cluster()
    cluster.elect(1)
    cluster.propose(1, b"a", b"b", b"c")
    core = cluster[1].core
    content = b"built in the background"
    meta = SnapshotMeta(4, core.term_at(4), core.membership_at(4), len(content), b"d")
    cluster.propose(1, b"d", b"e")
    assert cluster[1].applied == 6
    core.snapshot_taken(meta)
    status = cluster[1].status
    assert (status.snapshot_index, status.first_index, status.last_index) == (4, 5, 6)
    cluster.propose(1, b"f")
    assert cluster[2].machine[-1] == b"f"


def test_s56_a_joiner_that_replays_knows_the_group_at_every_index():
    """Seed 20124 of the simulator: a joiner replays the log from index 1 and takes a snapshot before it
    reaches the entry that adds it. Its group in no log, that snapshot named no voters."""
    cluster = Cluster(config=CoreConfig(max_append_bytes=1))
    cluster.elect(1)
    cluster.propose(1, b"a", b"b", b"c")
    joiner = cluster.join(4)
    cluster[1].core.change_membership(MembershipChange(add_learners=((N4, "four"),)))
    cluster.hold = lambda m: isinstance(m, Append) and any(e.index > 3 for e in m.entries)
    cluster.run()
    cluster.tick(2)
    assert joiner.applied == 3
    assert joiner.core.membership_at(3) == THREE
    assert joiner.snapshot().membership == cluster[1].core.membership_at(3)


def test_compaction_keeps_a_tail_and_the_term_before_it():
    cluster = Cluster(config=CoreConfig(keep_entries=4))
    cluster.elect(1)
    cluster.propose(1, *[b"%d" % n for n in range(9)])
    meta = cluster[1].snapshot()
    assert meta.index == 10
    status = cluster[1].status
    assert status.first_index == 7
    assert cluster[1].core.term_at(6) == 1
    with pytest.raises(InvariantError):
        cluster[1].core.term_at(5)
    checkpoint = cluster[1].core.checkpoint()
    assert checkpoint.entries[0].index == 7
    assert checkpoint.compacted_term == 1
    assert checkpoint.snapshot == meta


def test_follower_within_the_kept_tail_needs_no_snapshot():
    cluster = Cluster(config=CoreConfig(keep_entries=20))
    cluster.elect(1)
    cluster.isolate(3)
    cluster.propose(1, *[b"%d" % n for n in range(10)])
    cluster[1].snapshot()
    cluster.heal()
    cluster.tick(3)
    assert cluster[3].machine == cluster[1].machine
    assert not any(isinstance(m, SnapshotChunk) for m in cluster.delivered)


def test_compaction_beyond_a_durable_snapshot_is_impossible():
    """A snapshot of what is not applied here, or that does not describe this log, is a driver gone wrong."""
    cluster = Cluster()
    cluster.elect(1)
    cluster.propose(1, b"a", b"b")
    core = cluster[1].core
    with pytest.raises(InvariantError):
        core.snapshot_taken(SnapshotMeta(9, 1, THREE, 1, b"d"))
    with pytest.raises(InvariantError):
        core.snapshot_taken(SnapshotMeta(3, 7, THREE, 1, b"d"))
    with pytest.raises(InvariantError):
        core.snapshot_taken(SnapshotMeta(3, 1, membership([1]), 1, b"d"))
    assert cluster[1].status.first_index == 1
    core.snapshot_taken(SnapshotMeta(3, 1, THREE, 1, b"d"))
    assert cluster[1].status.first_index == 4, "exactly what the durable snapshot covers, and no more"
    core.snapshot_taken(SnapshotMeta(2, 1, THREE, 1, b"d"))
    assert cluster[1].status.snapshot_index == 3, "an overtaken one is ignored"


def test_a_snapshot_of_handed_out_but_unapplied_entries_is_refused():
    core = make_core(1, membership([1]))
    core.campaign()
    output = core.poll()
    core.persisted(output.number)
    core.propose([b"x"])
    output = core.poll()
    core.persisted(output.number)
    assert core.poll().apply
    with pytest.raises(InvariantError):
        core.snapshot_taken(SnapshotMeta(2, 1, membership([1]), 1, b"d"))


def test_recovery_without_a_recorded_compacted_term_gives_up_one_entry():
    entries = entries_of([1, 1, 2, 2], start=5)
    snapshot = SnapshotMeta(7, 2, THREE, 0, b"d")
    core = RaftCore(N1, CONFIG, Recovered(HardState(2, NO_NODE, 8), snapshot, entries), Random(1).randrange)
    assert core.status().first_index == 6
    assert core.term_at(5) == 1
    known = RaftCore(
        N1, CONFIG, Recovered(HardState(2, NO_NODE, 8), snapshot, entries, 1), Random(1).randrange
    )
    assert known.status().first_index == 5
    assert known.term_at(4) == 1


@pytest.mark.parametrize(
    ("entries", "snapshot"),
    [
        (entries_of([1, 1], start=9), SnapshotMeta(5, 1, THREE, 0, b"d")),
        ((*entries_of([1]), *entries_of([1], start=3)), SnapshotMeta(0, 0, THREE, 0, b"")),
        (entries_of([1, 1, 1]), SnapshotMeta(2, 9, THREE, 0, b"d")),
    ],
)
def test_recovery_refuses_a_log_with_holes_or_of_another_history(entries, snapshot):
    with pytest.raises(InvariantError):
        RaftCore(N1, CONFIG, Recovered(HardState(9, NO_NODE, 0), snapshot, entries), Random(1).randrange)


def test_recovery_takes_entries_before_an_installed_snapshot_as_superseded():
    snapshot = SnapshotMeta(9, 2, THREE, 0, b"d")
    core = RaftCore(
        N1, CONFIG, Recovered(HardState(2, NO_NODE, 3), snapshot, entries_of([1, 1, 1])), Random(1).randrange
    )
    status = core.status()
    assert (status.commit, status.first_index, status.last_index) == (9, 10, 9)
