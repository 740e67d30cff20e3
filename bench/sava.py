"""A Sava cluster of three: two broker processes, and the third node in this process, as a broker hosts it.

The store is embedded in brokers and has no other way in that matters, so the benchmark is such a host: the
same node, the same gRPC transport, the same disk. ``hosted=False`` makes the third a broker process too, for
what needs killing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from bench.broker_process import Broker
from bench.hosted import HostedNode
from bench.network import Network
from bench.plan import VALUE
from bench.processes import ProcessFailedError, stop_all
from bench.samples import closed_loop
from sava.metadata.commands import Put, TxnResult
from sava.metadata.store import MetadataStore
from sava.proto import admin_pb2 as pb

NODES = 3
KEYS = 1_000
"""Puts go round this many keys."""
TXN_OPERATIONS = 100
"""Puts per transaction while filling, as for etcd."""
READY_TIMEOUT_S = 60.0
POLL_S = 0.02


class SavaCluster:
    """Use as an async context manager; entered with a leader elected and every node caught up."""

    def __init__(
        self,
        folder: Path,
        *,
        hosted: bool = True,
        nodes: int = NODES,
        network: Network | None = None,
        **storage: object,
    ) -> None:
        """With a ``network``, each broker has a host of its own there."""
        folder.mkdir(parents=True, exist_ok=True)
        self.brokers = []
        for number in range(nodes - hosted):
            if network is not None:
                storage |= {"host": network.host(number), "within": network.within(number)}
            self.brokers.append(Broker(f"broker-{number}", folder, **storage))  # type: ignore[arg-type]
        self._hosted = HostedNode(folder / "hosted") if hosted else None

    async def __aenter__(self) -> SavaCluster:
        try:
            for broker in self.brokers:
                broker.start()
            if self._hosted is not None:
                await self._hosted.start()
            for broker in self.brokers:
                await broker.answering()
            hosted = [self._hosted.raft] if self._hosted is not None else []
            addresses = [*hosted, *(broker.raft for broker in self.brokers)]
            await self.brokers[0].cluster.Init(pb.InitRequest(nodes=addresses), timeout=30.0)
            await self.ready()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _stop(self) -> None:
        try:
            for broker in self.brokers:
                await broker.disconnect()
            if self._hosted is not None:
                await self._hosted.stop()
        finally:
            await stop_all([broker.child for broker in self.brokers if broker.was_started])

    async def ready(self) -> None:
        """Every node has a leader and has applied what was written before this call."""
        await asyncio.gather(*(broker.answering() for broker in self.brokers))
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            statuses = [await broker.status() for broker in self.brokers]
            leaders = {status.leader_id for status in statuses}
            if len(leaders) == 1 and leaders != {0} and len({status.revision for status in statuses}) == 1:
                return
            await asyncio.sleep(POLL_S)
        raise ProcessFailedError("Sava's nodes do not agree on a leader")

    @property
    def hosted(self) -> HostedNode:
        assert self._hosted is not None, "this cluster has no node in this process"
        return self._hosted

    @property
    def store(self) -> MetadataStore:
        return self.hosted.store

    async def lead_here(self) -> None:
        await self._transfer(to=self.hosted.node_id)

    async def lead_elsewhere(self) -> None:
        await self._transfer(to=(await self.brokers[0].status()).self_node_id)

    async def _transfer(self, to: int) -> None:
        """A transfer may find the target a moment behind, or an election under way; it is asked again."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            statuses = [await broker.status() for broker in self.brokers]
            if all(status.leader_id == to for status in statuses):
                return
            with contextlib.suppress(Exception):
                await self.brokers[0].cluster.TransferLeader(
                    pb.TransferLeaderRequest(node_id=to), timeout=5.0
                )
            await asyncio.sleep(POLL_S)
        raise ProcessFailedError(f"leadership did not move to node {to}")

    async def leading_broker(self) -> Broker:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            for broker in self.brokers:
                status = await broker.status()
                if status.leader_id and status.leader_id == status.self_node_id:
                    return broker
            await asyncio.sleep(POLL_S)
        raise ProcessFailedError("none of Sava's broker processes leads")

    def key(self, number: int) -> str:
        return f"/bench/{number % KEYS}"

    async def put(self, number: int) -> TxnResult:
        return await self.store.put(self.key(number), VALUE)

    async def put_many(self, count: int) -> None:
        """At least ``count`` single puts."""
        done = 0
        while done < count:
            done += (await closed_loop(self.put, in_flight=64, seconds=0.5)).count

    async def fill(self, keys: int, *, in_flight: int = 8) -> None:
        """Write ``keys`` different keys, in transactions."""
        gate = asyncio.Semaphore(in_flight)

        async def write(first: int) -> None:
            numbers = range(first, min(first + TXN_OPERATIONS, keys))
            async with gate:
                await self.store.txn(
                    (), [Put(f"/fill/{number:08}", VALUE) for number in numbers], timeout=30.0
                )

        async with asyncio.TaskGroup() as group:
            for first in range(0, keys, TXN_OPERATIONS):
                group.create_task(write(first))

    async def snapshot_everywhere(self) -> None:
        """All nodes take a snapshot at the same time; returns when the last is durable."""
        snapshots = [broker.cluster.Snapshot(pb.SnapshotRequest(), timeout=60.0) for broker in self.brokers]
        await asyncio.gather(self.hosted.take_snapshot(), *snapshots)
