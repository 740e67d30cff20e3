"""A Sava node in this process: the very object that ``sava broker`` runs, on the benchmark's event loop."""

from __future__ import annotations

from pathlib import Path

from bench.processes import free_ports
from sava import config as settings
from sava.metadata.store import ClusterOperations, RaftStore
from sava.server import Broker

SNAPSHOT_TIMEOUT_S = 60.0


def broker_settings(
    data_dir: Path, host: str = "127.0.0.1", **storage: object
) -> tuple[dict[str, object], dict[str, int]]:
    """The settings of one broker (defaults, but for where it listens and keeps its data, and for what is said
    of its storage, and under ``journal`` of its journal), and its ports. Brokers in one folder have one
    object store."""
    journal = storage.pop("journal", {})
    client, admin, raft, http = free_ports(4)
    ports = {"client": client, "admin": admin, "raft": raft, "prometheus": http}
    tree: dict[str, object] = {
        "cluster_name": "bench",
        "broker": {"host": host, "ports": ports},
        "meta_store": {"data_dir": str(data_dir)},
        "storage": {
            "url": (data_dir.parent / "segments").as_uri(),
            "journal_dir": str(data_dir / "journal"),
            **storage,
        },
        "journal": journal,
    }
    return tree, ports


class HostedNode:
    """One broker, assembled by ``sava.server`` and driven by the caller's event loop."""

    def __init__(self, data_dir: Path) -> None:
        tree, ports = broker_settings(data_dir)
        self._broker = Broker(settings.check(tree, source="the benchmark"))
        self._is_started = False
        self.raft = f"127.0.0.1:{ports['raft']}"

    async def start(self) -> None:
        await self._broker.start()
        self._is_started = True
        self.store = RaftStore(self._broker.node)

    async def stop(self) -> None:
        if self._is_started:
            self._is_started = False
            await self._broker.close()

    @property
    def node_id(self) -> int:
        return self._broker.node.info().node

    async def take_snapshot(self) -> None:
        await ClusterOperations(self._broker.node).snapshot(timeout=SNAPSHOT_TIMEOUT_S)
