"""What a broker's metrics say of its place in the cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from sava.api.metrics.cluster import ClusterSources, observe_cluster
from sava.cluster import records
from sava.cluster.controller import Controller
from sava.cluster.records import BrokerMode, Mode
from sava.cluster.registration import Evictor, Registrar
from sava.cluster.view import ClusterView
from sava.cluster.writer_maintenance import WriterMaintenance
from sava.cluster.writers import Writers
from sava.metadata.suspicion import Suspicion
from sava.raft.types import NodeId
from sava.supervisor import Supervisor
from sava.topics import specs
from tests.support.waiting import PATIENCE_S
from tests.unit.cluster.fakes import ORDERS, FaultyStore, Life, new_store, register, step


class Counts:
    """Of a controller."""

    is_leading = True
    moves = 3
    move_failures = 1
    assignments = 7
    orphans = 2
    unplaced = 0
    imbalance = 0.25
    pass_seconds = 0.004


class WriterCounts:
    """Of writers, and of whoever tends them."""

    decided = 5
    published = 4
    messages = 400
    unpublished = 1


class Story:
    """Broker 1's metrics, and what happens around it."""

    def __init__(self, store: FaultyStore, view: ClusterView) -> None:
        self.store, self.view = store, view
        self.life = Life(incarnation=0)
        self.counts = Counts()
        self.forwards: dict[str, int] = {}
        self.suspicion = Suspicion(NodeId(1), tick_ms=100)
        self.evictor = Evictor(store)
        self._registry = CollectorRegistry()
        observe_cluster(
            self._registry,
            ClusterSources(
                broker=1,
                view=view,
                registrar=cast(Registrar, self.life),
                controller=cast(Controller, self.counts),
                forwards=self.forwards,
                refusals={},
                writers=cast(Writers, WriterCounts()),
                writer_maintenance=cast(WriterMaintenance, WriterCounts()),
                suspicion=self.suspicion,
                evictor=self.evictor,
            ),
        )

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(name, labels)

    async def step(self, name: str, **changes: Any) -> None:
        before = self.view.held(ORDERS).revision
        await step(self.store, name, **changes)
        await self.view.wait(lambda: self.view.held(ORDERS).revision != before, timeout=PATIENCE_S)


@pytest.fixture
async def story() -> AsyncIterator[Story]:
    store = await new_store(ORDERS)
    view = ClusterView(store)
    story = Story(store, view)
    view.start(Supervisor())
    await register(store, 1)
    await view.wait(lambda: 1 in view.brokers, timeout=PATIENCE_S)
    yield story
    await view.close()


async def test_a_broker_says_whether_it_is_there_and_in_which_mode(story: Story) -> None:
    assert story.value("sava_broker_registered") == 0
    story.life.begin(5)
    story.life.begin(6)
    assert story.value("sava_broker_registered") == 1
    assert story.value("sava_broker_registrations_total") == 2
    assert story.value("sava_cluster_brokers") == 1
    assert story.value("sava_broker_mode", mode="active") == 1
    await story.store.put(records.mode_key(1), specs.encode(BrokerMode(mode=Mode.DRAINED)))
    await story.view.wait(lambda: story.view.mode(1).mode is Mode.DRAINED, timeout=PATIENCE_S)
    assert story.value("sava_broker_mode", mode="active") == 0
    assert story.value("sava_broker_mode", mode="drained") == 1


async def test_topics_are_counted_by_the_state_of_their_ownership(story: Story) -> None:
    await story.step("assign", owner=1)
    assert story.value("sava_broker_topics", state="assigned") == 1
    await story.step("move", target=2, from_broker=1)
    assert story.value("sava_broker_topics", state="assigned") == 0
    assert story.value("sava_broker_topics", state="moving") == 1


async def test_the_downtime_of_a_move_counts_where_the_topic_came_to(story: Story) -> None:
    """From 2 to 1: counted. From 1 to 2, and a move that was taken back: not here."""
    moves = "sava_topic_move_downtime_seconds_count"
    await story.step("assign", owner=2)
    await story.step("take", incarnation=1)
    await story.step("move", target=1, from_broker=2)
    await story.step("seal", end=4)
    await story.step("assign", owner=1)
    assert story.value(moves) == 0, "nobody has taken it up yet"
    await story.step("take", incarnation=1)
    assert story.value(moves) == 1
    await story.step("move", target=2, from_broker=1)
    await story.step("roll_back", error="no room")
    assert story.value(moves) == 1
    await story.step("move", target=2, from_broker=1)
    await story.step("seal", end=4)
    await story.step("assign", owner=2)
    await story.step("take", incarnation=1)
    assert story.value(moves) == 1


async def test_the_controllers_numbers_and_forwarded_calls(story: Story) -> None:
    story.forwards.update(client=5, leader=2)
    assert story.value("sava_controller_moves_total") == 3
    assert story.value("sava_controller_move_failures_total") == 1
    assert story.value("sava_controller_imbalance") == 0.25
    assert story.value("sava_controller_orphan_topics") == 2
    story.counts.is_leading = False
    assert story.value("sava_controller_orphan_topics") is None, "another broker knows"
    assert story.value("sava_controller_moves_total") == 3
    assert story.value("sava_forwarded_calls_total", kind="client") == 5
    assert story.value("sava_forwarded_calls_total", kind="leader") == 2


async def test_suspicions_and_evictions_are_counted_by_evidence(story: Story) -> None:
    story.suspicion.counts["refuted", "silent"] += 2
    story.evictor.evictions["refused"] += 1
    assert story.value("sava_cluster_suspicions_total", outcome="refuted", sign="silent") == 2
    assert story.value("sava_cluster_evictions_total", sign="refused") == 1


async def test_writers_are_counted(story: Story) -> None:
    assert story.value("sava_writer_batches_decided_total") == 5
    assert story.value("sava_writer_batches_published_total") == 4
    assert story.value("sava_writer_messages_total") == 400
    assert story.value("sava_writer_batches_unpublished") == 1
    story.counts.is_leading = False
    assert story.value("sava_writer_batches_unpublished") is None, (
        "a sum over brokers counted them three times"
    )
