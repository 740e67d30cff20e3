"""Node id, log and data directory belong together or not at all (S42)."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from sava.metadata import durable
from sava.metadata.errors import IdentityConflict
from sava.metadata.identity import NODE_ID, NodeState, cluster_id_of, open_state
from sava.metadata.peer import Bootstrap
from sava.metadata.snapshots import SnapshotMissing, file_name, save
from sava.raft.output import Checkpoint
from sava.raft.types import HardState, Membership, NodeId, SnapshotMeta
from sava.wal.disk import LocalDisk
from sava.wal.errors import DirectoryLocked, ForeignLog, LogCorrupt
from tests.sim.disk import CrashPolicy, SimDisk
from tests.unit.metadata.cuts import CutError, cut_at


def disk(seed: int = 1) -> SimDisk:
    return SimDisk(Random(seed))


def start(where: SimDisk, seed: int = 1) -> NodeState:
    return open_state(where, rng=Random(seed))


def stop(state: NodeState) -> None:
    state.log.close()
    state.release()


def write_id(where: SimDisk, text: bytes) -> None:
    if NODE_ID in where.list():
        where.remove(NODE_ID)
    file = where.open(NODE_ID, create=True)
    file.write(0, [text])
    file.sync()
    where.sync_dir()


def test_a_new_node_draws_an_id_and_keeps_it() -> None:
    where = disk()
    first = start(where)
    assert 1 <= first.node < 1 << 63
    assert first.recovered == durable.LogState()
    assert first.incarnation == 1
    stop(first)
    second = start(where, seed=2)
    assert (second.node, second.incarnation) == (first.node, 2)
    assert where.list() == [NODE_ID]


def test_two_new_nodes_have_two_ids() -> None:
    assert start(disk(1), seed=1).node != start(disk(2), seed=2).node


def test_a_directory_in_use_is_refused() -> None:
    where = disk()
    state = start(where)
    with pytest.raises(DirectoryLocked):
        start(where)
    stop(state)
    stop(start(where))


def test_a_failed_start_gives_the_directory_back() -> None:
    where = disk()
    write_id(where, b"12\n")
    for _ in range(2):
        with pytest.raises(IdentityConflict):
            start(where)


def test_an_id_without_its_log_is_a_lost_disk_or_a_copy() -> None:
    """S42: coming back under an old id with an empty disk would forget votes."""
    where = disk()
    write_id(where, b"12\n")
    with pytest.raises(IdentityConflict, match="remove node_id to start as a new node"):
        start(where)
    where.remove(NODE_ID)
    assert start(where).node != 12


def test_a_log_without_its_id_is_refused() -> None:
    where = disk()
    stop(start(where))
    where.remove(NODE_ID)
    with pytest.raises(IdentityConflict, match="node_id is missing"):
        start(where)


def test_the_log_of_another_node_is_refused() -> None:
    where = disk()
    state = start(where)
    stop(state)
    write_id(where, b"12\n")
    with pytest.raises(ForeignLog, match=f"node-{state.node}"):
        start(where)


@pytest.mark.parametrize("text", [b"", b"zero", b"0", b"-4", b"9223372036854775808", b"1.5"])
def test_an_id_that_is_no_number_is_refused(text: bytes) -> None:
    where = disk()
    stop(start(where))
    write_id(where, text)
    with pytest.raises(IdentityConflict, match="does not hold a node id"):
        start(where)


@pytest.mark.parametrize("policy", list(CrashPolicy))
def test_a_first_start_cut_off_at_any_operation_is_gone_on_with(policy: CrashPolicy) -> None:
    for operation in range(100):
        where = SimDisk(Random(f"{policy}"))
        cut_at(where, operation)
        try:
            start(where)
        except CutError:
            pass
        else:
            break
        after = where.crash(policy)
        after.on_operation(None)
        state = start(after, seed=2)
        stop(state)
        assert start(after, seed=3).node == state.node
    assert operation > 8


def bound(state: NodeState, *, snapshot: bool) -> SnapshotMeta:
    alone = Membership(voters=(state.node,))
    meta = SnapshotMeta(5, 1, alone, 0, b"")
    state.log.append(*durable.bootstrap_record(Bootstrap("c", alone)))
    if snapshot:
        meta = save(state.snapshots, meta, [b"state"])
        checkpoint = Checkpoint(HardState(1), meta, (), 1)
        durable.write_checkpoint(state.log, durable.checkpoint_records(Bootstrap("c", alone), checkpoint))
    state.log.sync()
    return meta


def test_the_snapshot_that_the_log_continues_must_be_there() -> None:
    """Never start empty: what the snapshot held was acknowledged."""
    where = disk()
    state = start(where)
    meta = bound(state, snapshot=True)
    stop(state)
    stop(start(where))
    where.directory("snapshots").remove(file_name(meta))
    with pytest.raises(SnapshotMissing, match=file_name(meta)):
        start(where)


def test_a_damaged_snapshot_stops_the_start() -> None:
    where = disk()
    state = start(where)
    meta = bound(state, snapshot=True)
    stop(state)
    files = where.directory("snapshots")
    files.flip_bit(file_name(meta), files.open(file_name(meta)).size() - 1)
    with pytest.raises(SnapshotMissing, match="join as a new one"):
        start(where)


def test_a_snapshot_that_the_log_was_not_told_about_is_dropped() -> None:
    where = disk()
    state = start(where)
    bound(state, snapshot=False)
    save(state.snapshots, SnapshotMeta(9, 1, Membership(), 0, b""), [b"orphan"])
    stop(state)
    again = start(where)
    assert again.snapshots.latest() is None
    assert again.recovered.core is not None


def test_a_log_in_which_acknowledged_data_rotted_stops_the_start() -> None:
    """m29: only a torn tail that nobody was told about may be cut off."""
    where = disk()
    state = start(where)
    bound(state, snapshot=False)
    stop(state)
    log = where.directory("raft")
    (name,) = log.list()
    log.flip_bit(name, 512 + 40)
    with pytest.raises(LogCorrupt):
        start(where)


def test_on_a_real_directory(tmp_path: Path) -> None:
    state = open_state(LocalDisk(tmp_path / "data"), rng=Random(1))
    bound(state, snapshot=True)
    with pytest.raises(DirectoryLocked):
        open_state(LocalDisk(tmp_path / "data"), rng=Random(1))
    stop(state)
    assert (tmp_path / "data" / NODE_ID).read_text() == f"{state.node}\n"
    again = open_state(LocalDisk(tmp_path / "data"), rng=Random(2))
    assert again.recovered.core is not None
    assert again.recovered.core.snapshot.index == 5
    stop(again)


def test_the_cluster_id_names_the_founders_in_any_order() -> None:
    """Two people who run init with the same nodes at the same time make one cluster."""
    one = cluster_id_of([NodeId(3), NodeId(1), NodeId(2)])
    assert one == cluster_id_of([NodeId(1), NodeId(2), NodeId(3)])
    assert len(one) == 32
    assert one != cluster_id_of([NodeId(1), NodeId(2)])
    assert cluster_id_of([NodeId(12), NodeId(3)]) != cluster_id_of([NodeId(1), NodeId(23)])


def test_a_certificates_id_is_taken_at_the_first_start() -> None:
    where, wanted = disk(), NodeId(17)
    for _ in range(2):
        state = open_state(where, rng=Random(1), node=wanted)
        assert state.node == wanted
        stop(state)
    assert start(where).node == wanted, "without the certificate it is who it was"
    drawn = disk(2)
    state = start(drawn)
    stop(state)
    with pytest.raises(IdentityConflict, match=f"is that of node {state.node}.*names node 17"):
        open_state(drawn, rng=Random(1), node=wanted)
    stop(start(drawn))
