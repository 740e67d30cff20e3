"""The six patterns in which metadata is used, on three real nodes: sockets between them, a disk below each,
one process around them all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from sava import config
from sava.metadata.operations import ClusterOperations
from sava.metadata.raft_store import RaftStore
from sava.server import Broker, raft_address
from tests.integration.harness import FAST, storage_in
from tests.metadata_patterns import *  # noqa: F403
from tests.ports import free_ports


class RaftHarness:
    ttl_ms = 1_500

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._brokers = brokers
        self.stores = tuple(RaftStore(broker.node) for broker in brokers)

    @property
    def term(self) -> int:
        return next(b.node.replica.term for b in self._brokers if b.node.replica.is_leader)

    async def pass_time(self, ms: int) -> None:
        await asyncio.sleep(ms / 1000)  # noqa: F405


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[RaftHarness]:
    brokers: list[Broker] = []
    addresses: list[str] = []
    try:
        for number in range(3):
            names = ("client", "admin", "raft", "prometheus")
            overlay = {
                "broker": {"host": "127.0.0.1", "ports": dict(zip(names, free_ports(4), strict=True))},
                "meta_store": {**FAST, "data_dir": str(tmp_path / str(number))},
                "storage": storage_in(tmp_path / str(number)),
            }
            settings = config.load(None, {}, overlay)
            broker = Broker(settings)
            await broker.start()
            brokers.append(broker)
            addresses.append(raft_address(settings))
        await ClusterOperations(brokers[0].node).init(addresses)
        for broker in brokers:
            await broker.topics.ready()  # it writes nothing more by itself
        await RaftStore(brokers[0].node).delete_prefix(
            "/namespaces/"
        )  # the patterns begin with an empty store
        yield RaftHarness(brokers)
    finally:
        for broker in brokers:
            await broker.close()
