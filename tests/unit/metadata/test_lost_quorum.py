"""force-new-cluster: one survivor, all that it knows, and nothing mistaken for the old cluster."""

from __future__ import annotations

from random import Random

import pytest

from sava.metadata.bootstrap import (
    REVISION_STEP,
    ForceReport,
    NotConfirmed,
    force_new_cluster,
)
from sava.metadata.commands import AllocateId
from sava.metadata.errors import Compacted, NotInitialized
from sava.metadata.identity import open_state
from sava.metadata.peer import Committed
from tests.sim.disk import CrashPolicy, SimDisk
from tests.unit.metadata.cluster import Machine, World, txn
from tests.unit.metadata.cuts import CutError, cut_at


def yes(_: ForceReport) -> bool:
    return True


def survivor(*, compact: bool = False) -> tuple[World, Machine]:
    """A machine of three that holds /a committed and /b appended but, as far as it knows, not committed."""
    world = World()
    world.found("a", "b", "c")
    leader = world.leader()
    for number in range(4):
        world.put(leader, f"/k/{number}", f"{number}")
    world.put(leader, "/a", "acknowledged")
    for _ in range(3):
        leader.propose_unnamed(txn(AllocateId("/counter")))
        world.settle()
    if compact:
        leader.replica.take_snapshot(lambda _: None)
        world.settle()
    world.isolate(leader)
    leader.put("/b", "unknown")
    world.settle()
    for machine in world.machines.values():
        machine.stop()
    return world, leader


@pytest.mark.parametrize("compact", [False, True])
def test_the_survivor_goes_on_alone_with_all_that_it_holds(compact: bool) -> None:
    world, node = survivor(compact=compact)
    reports: list[ForceReport] = []

    def confirm(report: ForceReport) -> bool:
        reports.append(report)
        return True

    report = force_new_cluster(node.disk, address="a:9", rng=Random(5), confirm=confirm)
    assert reports == [report]
    assert len(report.missing_members) == 2
    assert report.uncertain_entries >= 1
    assert report.new_cluster != report.old_cluster
    assert "must be wiped" in str(report)

    node.start()
    world.elect()
    assert node.get("/a") == b"acknowledged"
    assert node.get("/b") == b"unknown"
    assert node.get("/k/3") == b"3"
    assert node.get("/counter") == b"3", "no entry is applied on top of a snapshot that holds it"
    status = node.replica.status()
    assert status.cluster == report.new_cluster
    assert node.status.membership.voters == (node.id,)
    assert node.status.membership.address(node.id) == "a:9"
    reply = world.put(node, "/c", "new")
    assert isinstance(reply, Committed)
    assert node.replica.machine.revision > REVISION_STEP
    with pytest.raises(Compacted):
        node.replica.hub.watch("/", 3)


def test_the_term_grows_and_survives_the_next_restart() -> None:
    world, node = survivor()
    old = open_state(node.disk, rng=Random(1))
    assert old.recovered.core is not None
    term = old.recovered.core.hard_state.term
    old.log.close()
    old.release()
    force_new_cluster(node.disk, address="a:9", rng=Random(5), confirm=yes)
    for _ in range(2):
        node.start()
        world.elect()
        assert node.replica.term > term + 1
        world.put(node, "/x", "1")
        node.stop()


def test_an_old_member_that_comes_back_is_not_heard() -> None:
    world, node = survivor()
    force_new_cluster(node.disk, address=node.address, rng=Random(5), confirm=yes)
    for machine in world.machines.values():
        machine.start()
    world.heal()
    world.addresses = {machine.id: machine.address for machine in world.machines.values()}
    world.pass_time(5_000)
    assert node.replica.is_leader
    others = [machine for machine in world.machines.values() if machine is not node]
    assert all(machine.replica.status().cluster != node.replica.status().cluster for machine in others)
    assert world.put(node, "/x", "1")
    assert all(machine.get("/x") is None for machine in others)
    assert sum(machine.replica.status().dropped.get("cluster", 0) for machine in world.machines.values()) > 0


def test_saying_no_changes_nothing() -> None:
    world, node = survivor()
    with pytest.raises(NotConfirmed):
        force_new_cluster(node.disk, address="a:9", rng=Random(5), confirm=lambda _: False)
    for machine in world.machines.values():
        machine.start()
    world.heal()
    world.elect()
    assert len(node.status.membership.voters) == 3


def test_a_node_of_no_cluster_has_nothing_to_recover() -> None:
    disk = SimDisk(Random(1))
    with pytest.raises(NotInitialized):
        force_new_cluster(disk, address="a:9", rng=Random(5), confirm=yes)


@pytest.mark.parametrize("policy", [CrashPolicy.LOSE, CrashPolicy.KEEP, CrashPolicy.TORN])
def test_cut_off_at_any_operation_it_is_the_old_cluster_or_the_new_one(policy: CrashPolicy) -> None:
    _, node = survivor(compact=True)
    seen = set()
    for operation in range(200):
        disk = node.disk.clone(Random(f"{policy}/{operation}"))
        cut_at(disk, operation)
        try:
            force_new_cluster(disk, address="a:9", rng=Random(5), confirm=yes)
        except CutError:
            pass
        else:
            break
        after = disk.crash(policy)
        after.on_operation(None)
        state = open_state(after, rng=Random(1))
        bootstrap, core = state.recovered.bootstrap, state.recovered.core
        assert bootstrap is not None
        assert core is not None
        is_new = len(bootstrap.membership.voters) == 1
        assert (len(core.snapshot.membership.voters) == 1) == is_new
        assert is_new or core.entries
        seen.add(is_new)
    assert seen == {False, True}
