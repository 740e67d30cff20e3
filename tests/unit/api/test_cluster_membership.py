"""When a node may leave, and when a broker counts as ready."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from sava.api.admin.cluster import check_leaving
from sava.api.http import readiness
from sava.cluster import records
from sava.cluster.records import BrokerMode, Mode
from sava.cluster.registration import Registrar
from sava.cluster.view import ClusterView
from sava.metadata.errors import Unavailable
from sava.metadata.node import RaftNode
from sava.raft.types import MembershipRefused, NodeId
from sava.supervisor import Supervisor
from sava.topics import specs
from tests.support.waiting import PATIENCE_S
from tests.unit.api.site import Core, FakeNode, members
from tests.unit.cluster.fakes import ORDERS, FaultyStore, Life, new_store, register, step

THREE = NodeId(3)


@pytest.fixture
async def store() -> FaultyStore:
    return await new_store(ORDERS)


@pytest.fixture
async def view(store: FaultyStore) -> AsyncIterator[ClusterView]:
    view = ClusterView(store)
    view.start(Supervisor())
    await view.wait(lambda: view.is_ready, timeout=PATIENCE_S)
    yield view
    await view.close()


async def test_a_node_that_has_topics_stays(store: FaultyStore, view: ClusterView) -> None:
    await step(store, "assign", owner=3)
    await view.wait(lambda: bool(view.owned_by(3)), timeout=PATIENCE_S)
    with pytest.raises(MembershipRefused, match=r"1 topic.*/default/orders; run `sava brokers drain 3`"):
        check_leaving(view, THREE)


async def test_a_node_that_may_get_topics_stays(store: FaultyStore, view: ClusterView) -> None:
    await register(store, 3)
    await view.wait(lambda: 3 in view.brokers, timeout=PATIENCE_S)
    with pytest.raises(MembershipRefused, match=r"active.*`sava brokers drain 3`"):
        check_leaving(view, THREE)
    for mode, may_leave in ((Mode.DRAINING, False), (Mode.DRAINED, True)):
        await store.put(records.mode_key(3), specs.encode(BrokerMode(mode=mode)))
        await view.wait(lambda wanted=mode: view.mode(3).mode is wanted, timeout=PATIENCE_S)  # type: ignore[misc]
        if may_leave:
            check_leaving(view, THREE)
        else:
            with pytest.raises(MembershipRefused, match="draining"):
                check_leaving(view, THREE)


async def test_a_node_that_is_gone_and_has_nothing_leaves(view: ClusterView) -> None:
    check_leaving(view, THREE)


async def test_what_is_not_known_is_not_nothing(store: FaultyStore) -> None:
    with pytest.raises(Unavailable):
        check_leaving(ClusterView(store), THREE)


class ReadyCore(Core):
    commit = applied = 7


async def test_a_broker_is_ready_when_the_others_know_of_it(store: FaultyStore, view: ClusterView) -> None:
    node: Any = FakeNode(ReadyCore(membership=members(1)))
    life, supervisor = Life(incarnation=0), Supervisor()
    registrar = cast(Registrar, life)
    assert not readiness(cast(RaftNode, node), ClusterView(store), registrar, supervisor)[0]
    ready, why = readiness(node, view, registrar, supervisor)
    assert (ready, "not registered" in why) == (False, True)
    life.begin(5)
    assert readiness(node, view, registrar, supervisor) == (True, "ready")
    life.is_leaving = True
    assert readiness(node, view, registrar, supervisor) == (
        False,
        "this broker stops, and hands its topics over",
    )
    node.core_status = None
    assert readiness(node, view, registrar, supervisor) == (False, "waiting for cluster initialization")


async def test_a_broker_that_ends_is_not_ready_and_says_why(view: ClusterView) -> None:
    node: Any = FakeNode(ReadyCore(membership=members(1)))
    supervisor = Supervisor()
    supervisor.end("the task 'agent' died: KeyError: 7")
    supervisor.end("what came of it")
    ready, why = readiness(node, view, cast(Registrar, Life(incarnation=5)), supervisor)
    assert (ready, why) == (False, "this broker ends: the task 'agent' died: KeyError: 7")
