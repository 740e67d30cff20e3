"""Snapshot files: whole or not there."""

from __future__ import annotations

import hashlib
from random import Random

import pytest

from sava.metadata.errors import SnapshotCorrupt
from sava.metadata.snapshots import SnapshotMissing, SnapshotStore, file_name, save
from sava.raft.types import Membership, NodeId, SnapshotMeta
from sava.wal.errors import DiskFull, FileMissing
from tests.sim.disk import CrashPolicy, SimDisk
from tests.unit.metadata.cuts import CutError, cut_at

MEMBERS = Membership(voters=(NodeId(1), NodeId(2)), addresses=((NodeId(1), "a:1"), (NodeId(2), "b:2")))
PAYLOAD = [b"one" * 100, b"two" * 1000, b"", b"three"]
WHOLE = b"".join(PAYLOAD)


def disk() -> SimDisk:
    return SimDisk(Random(1))


def base(index: int, term: int = 3) -> SnapshotMeta:
    return SnapshotMeta(index, term, MEMBERS, 0, b"")


def meta_of(index: int, payload: bytes = WHOLE) -> SnapshotMeta:
    return SnapshotMeta(index, 3, MEMBERS, len(payload), hashlib.sha256(payload).digest())


def receive(store: SnapshotStore, meta: SnapshotMeta, payload: bytes = WHOLE, step: int = 1000) -> None:
    for offset in range(0, len(payload), step):
        store.write_chunk(meta, offset, payload[offset : offset + step])


def test_what_was_built_is_found_again_whole() -> None:
    where = disk()
    meta = save(SnapshotStore(where), base(7), PAYLOAD)
    assert meta == meta_of(7)
    again = SnapshotStore(where)
    assert again.latest() == meta
    assert b"".join(again.load(meta)) == WHOLE
    assert again.read(meta, 3, 5) == WHOLE[3:8]
    again.require(meta)


def test_a_received_snapshot_is_the_same_file_as_a_built_one() -> None:
    built, received = disk(), disk()
    meta = save(SnapshotStore(built), base(7), PAYLOAD)
    store = SnapshotStore(received)
    receive(store, meta)
    store.install(meta)
    name = file_name(meta)
    one, two = built.open(name), received.open(name)
    assert one.read(0, one.size()) == two.read(0, two.size())


def test_a_received_snapshot_that_does_not_verify_changes_nothing() -> None:
    where = disk()
    store = SnapshotStore(where)
    old = save(store, base(5), [b"old"])
    meta = meta_of(7)
    receive(store, meta, WHOLE[:-1] + b"!")
    with pytest.raises(SnapshotCorrupt):
        store.install(meta)
    assert store.latest() == old
    assert where.list() == [file_name(old)]
    receive(store, meta)
    store.install(meta)
    assert store.latest() == meta


@pytest.mark.parametrize("payload", [WHOLE[:-1], WHOLE + b"more"], ids=["short", "long"])
def test_a_received_snapshot_of_the_wrong_size_is_refused(payload: bytes) -> None:
    store = SnapshotStore(disk())
    meta = meta_of(7)
    receive(store, meta, payload)
    with pytest.raises(SnapshotCorrupt):
        store.install(meta)


def test_chunks_of_a_transfer_that_was_not_begun_are_refused() -> None:
    store = SnapshotStore(disk())
    with pytest.raises(SnapshotCorrupt, match="not begun"):
        store.write_chunk(meta_of(7), 10, b"x")
    with pytest.raises(SnapshotCorrupt, match="not received"):
        store.install(meta_of(7))


def test_a_new_transfer_replaces_an_unfinished_one() -> None:
    store = SnapshotStore(disk())
    store.write_chunk(meta_of(7), 0, b"half")
    receive(store, meta_of(9))
    store.install(meta_of(9))
    assert store.latest() == meta_of(9)


def test_installing_again_after_a_full_disk_is_harmless() -> None:
    """The file was installed, then the record in the log did not fit: the whole step is repeated."""
    store = SnapshotStore(disk())
    meta = meta_of(7)
    receive(store, meta)
    store.install(meta)
    store.write_chunk(meta, 1000, WHOLE[1000:])
    store.install(meta)
    assert b"".join(store.load(meta)) == WHOLE


def test_leftovers_of_a_crash_are_removed() -> None:
    where = disk()
    store = SnapshotStore(where)
    store.write_chunk(meta_of(7), 0, b"half")
    store.build(base(9)).write(b"half")
    assert len(where.list()) == 2
    SnapshotStore(where)
    assert where.list() == []


def test_pruning_keeps_the_newest_and_one_before_it() -> None:
    where = disk()
    store = SnapshotStore(where)
    metas = [save(store, base(index), [b"%d" % index]) for index in (1, 2, 3, 10)]
    store.prune(metas[-1])
    assert where.list() == [file_name(metas[-2]), file_name(metas[-1])]
    assert SnapshotStore(where).latest() == metas[-1]


def test_what_the_log_was_never_told_about_is_removed_at_the_next_start() -> None:
    where = disk()
    store = SnapshotStore(where)
    named, orphan = save(store, base(3), [b"3"]), save(store, base(5), [b"5"])
    store.prune_newer(named)
    assert where.list() == [file_name(named)]
    assert orphan != named


def test_a_build_that_fails_leaves_nothing() -> None:
    where = disk()
    store = SnapshotStore(where)
    where.set_capacity(500)
    with pytest.raises(DiskFull):
        save(store, base(7), PAYLOAD)
    assert where.list() == []
    assert store.latest() is None


def test_every_flipped_bit_of_a_snapshot_is_noticed() -> None:
    where = disk()
    meta = save(SnapshotStore(where), base(7), [b"payload"])
    name = file_name(meta)
    for offset in range(where.open(name).size()):
        where.flip_bit(name, offset, offset % 8)
        with pytest.raises(SnapshotMissing, match=name):
            SnapshotStore(where).require(meta)
        where.flip_bit(name, offset, offset % 8)
    SnapshotStore(where).require(meta)


def test_a_missing_snapshot_is_named_with_the_way_out() -> None:
    store = SnapshotStore(disk())
    with pytest.raises(SnapshotMissing, match=r"snap-0+7-0+3\.snap.*join as a new one"):
        store.require(meta_of(7))
    with pytest.raises(FileMissing):
        store.read(meta_of(7), 0, 1)


def test_another_snapshot_under_the_same_name_is_not_the_one() -> None:
    store = SnapshotStore(disk())
    save(store, base(7), [b"forged"])
    with pytest.raises(SnapshotMissing, match="another one"):
        store.require(meta_of(7))


@pytest.mark.parametrize("policy", list(CrashPolicy))
@pytest.mark.parametrize("way", ["built", "received"])
def test_a_power_cut_at_any_operation_leaves_a_whole_snapshot(policy: CrashPolicy, way: str) -> None:
    """S54."""
    seen = set()
    for operation in range(100):
        where = SimDisk(Random(f"{policy}/{way}"))
        store = SnapshotStore(where)
        old = save(store, base(5), [b"old"])
        cut_at(where, operation)
        try:
            if way == "built":
                save(store, base(7), PAYLOAD)
            else:
                receive(store, meta_of(7))
                store.install(meta_of(7))
        except CutError:
            pass
        else:
            break
        after = where.crash(policy)
        after.on_operation(None)
        again = SnapshotStore(after)
        again.require(old)
        latest = again.latest()
        assert latest in (old, meta_of(7))
        assert latest is not None
        again.require(latest)
        seen.add(latest.index)
    assert 5 in seen
    assert operation > 4
