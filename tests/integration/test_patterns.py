"""The six patterns in which metadata is used, on three real nodes: sockets between them, a disk below each,
one process around them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from sava import config
from sava.metadata.node import NodeOptions, RaftNode, open_node
from sava.metadata.store import ClusterOperations, RaftStore
from sava.peer_connection import Dialer
from sava.peers.raft_listener import RaftListener
from sava.peers.raft_transport import TcpTransport
from sava.server import raft_address
from sava.server.broker import raft_credentials, replica_config
from tests.support.brokers import FAST
from tests.support.metadata_patterns import *  # noqa: F403
from tests.support.network import free_ports


class RaftHarness:
    ttl_ms = 1_500

    def __init__(self, nodes: Sequence[RaftNode]) -> None:
        self._nodes = nodes
        self.stores = tuple(map(RaftStore, nodes))

    @property
    def term(self) -> int:
        return next(node.replica.term for node in self._nodes if node.replica.is_leader)

    async def pass_time(self, ms: int) -> None:
        await asyncio.sleep(ms / 1000)


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[RaftHarness]:
    nodes: list[RaftNode] = []
    async with AsyncExitStack() as stack:
        addresses = []
        for port in free_ports(3):
            overlay = {
                "broker": {"host": "127.0.0.1", "ports": {"raft": port}},
                "meta_store": {**FAST, "data_dir": str(tmp_path / str(port))},
            }
            settings = config.load(None, {}, overlay)
            addresses.append(raft_address(settings))
            options = NodeOptions(address=addresses[-1], replica=replica_config(settings))
            dialer = Dialer(raft_credentials(settings))
            node = await open_node(settings.meta_store.data_dir, options, TcpTransport(dialer))
            stack.push_async_callback(node.close)
            listener = RaftListener(node, addresses[-1], dialer.credentials)
            await listener.start()
            stack.push_async_callback(listener.stop)
            nodes.append(node)
        await ClusterOperations(nodes[0]).init(addresses)
        harness = RaftHarness(nodes)
        await harness.stores[0].get("/")  # somebody leads
        yield harness
