"""What the leader's metrics say of replication."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from sava.api.metrics.cluster import ReplicationCollector
from sava.replication.links import Extent
from sava.replication.records import PartitionReport
from tests.unit.replication.world import ORDERS, World, world


class Metrics:
    def __init__(self, made: World) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(ReplicationCollector(made.control))

    def __getitem__(self, name: str) -> float | None:
        name, _, state = name.partition("/")
        labels = {
            "cluster": "east",
            "namespace": "default",
            "topic": str(ORDERS),
            "remote_cluster": "west",
            **({"state": state} if state else {}),
        }
        return self.registry.get_sample_value(name, labels)


async def test_connected_and_disconnected_partitions_under_both_names() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create(partitions=3)
        await made.replicate()
        metrics = Metrics(made)
        assert metrics["pulsar_replication_disconnected_count"] == 3
        await made.report(
            PartitionReport(partition=0, state="active", rate=2.0, bytes_rate=200.0, messages=7, restarts=1),
            PartitionReport(partition=1, state="idle", rate=1.0, messages=5),
            PartitionReport(partition=2, state="unreachable", reason="no route"),
        )
        assert metrics["sava_replication_connected_count"] == 2
        assert metrics["sava_replication_disconnected_count"] == 1
        assert metrics["pulsar_replication_disconnected_count"] == 1
        assert metrics["sava_replication_partitions/unreachable"] == 1
        assert metrics["sava_replication_rate_out"] == 3
        assert metrics["sava_replication_throughput_out"] == 200
        assert metrics["sava_replication_messages_total"] == 12
        assert metrics["sava_replication_restarts_total"] == 1


async def test_a_backlog_that_is_not_known_is_left_out_and_not_nothing() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        metrics = Metrics(made)
        assert metrics["sava_replication_backlog"] is None
        assert metrics["sava_replication_delay_seconds"] is None
        made.ends = {ORDERS: Extent(0, 9)}
        await made.statuses.look()
        assert metrics["sava_replication_backlog"] == 9


async def test_subscriptions_that_cannot_be_copied_are_counted() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create(partitions=2)
        await made.replicate()
        metrics = Metrics(made)
        assert metrics["sava_replication_unsynced_subscriptions"] == 0
        await made.report(
            PartitionReport(partition=0, state="idle", unsynced_subscriptions=("a", "b")),
            PartitionReport(partition=1, state="idle", unsynced_subscriptions=("a",)),
        )
        assert metrics["sava_replication_unsynced_subscriptions"] == 3
        assert metrics["sava_replication_connected_count"] == 2


async def test_only_the_leader_says_anything() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        metrics = Metrics(made)
        made.leadership.current = 0
        assert metrics["sava_replication_disconnected_count"] is None
