"""NATS JetStream under the faults of the section ``failover``: streams in files with three replicas, two of
which must have a message.

By default a server syncs every two minutes and acknowledges before; with ``sync_interval: always`` it syncs
first. Its client by default waits 5 s for an acknowledgement and pings every 2 minutes; the tuned one asks
again after half a second and pings every second.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Self

import nats
from nats.errors import Error as NatsError
from nats.js.api import StorageType, StreamConfig

from bench.network import Network
from bench.processes import Child, free_ports, stop_all
from bench.servers import nats_version
from bench.systems import CALL_S, System, until

MISSING: Final = "NATS (make nats)"
REPLICAS: Final = 3


def program() -> str | None:
    """The one that ``make nats`` has built, or the one on the PATH."""
    built = Path(sys.executable).parent / "nats-server"
    return str(built) if built.exists() else shutil.which("nats-server")


class JetStream(System):
    name = "NATS R3, defaults"
    durability = "NATS: in the page cache of two of three"
    sender = "nats"
    sync = ""

    def __init__(self, folder: Path, nodes: int, network: Network | None) -> None:
        super().__init__(folder, nodes, network)
        self._ports = [free_ports(3) for _ in range(nodes)]
        self._children: dict[int, Child] = {}

    @classmethod
    def version(cls) -> str | None:
        found = program()
        return nats_version(found) if found else None

    @property
    def addresses(self) -> str:
        return ",".join(f"nats://{self.host(at)}:{client}" for at, (client, _, _) in enumerate(self._ports))

    async def __aenter__(self) -> Self:
        try:
            for number in range(self.nodes):
                self._write_config(number)
                self.start(number)
            await until(self._has_leader, "NATS has a meta leader and all its nodes")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_all(list(self._children.values()))

    def _write_config(self, number: int) -> None:
        client, route, http = (f"{self.host(number)}:{port}" for port in self._ports[number])
        routes = ", ".join(f"nats://{self.host(at)}:{ports[1]}" for at, ports in enumerate(self._ports))
        self._config(number).write_text(
            f"server_name: node-{number}\nlisten: {client}\nhttp: {http}\n"
            f"cluster {{ name: bench, listen: {route}, routes: [{routes}] }}\n"
            f'jetstream {{ store_dir: "{self.folder}/nats-{number}"\n{self.sync} }}\n',
            encoding="utf-8",
        )

    def _config(self, number: int) -> Path:
        return self.folder / f"nats-{number}.conf"

    def start(self, number: int) -> None:
        command = [*self.within(number), program() or "nats-server", "-c", str(self._config(number))]
        self._children[number] = Child(command, self.folder / f"nats-{number}.log")

    def child(self, number: int) -> Child:
        return self._children[number]

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        connection = await nats.connect(self.addresses.split(","), connect_timeout=2, error_cb=_ignore)
        try:
            yield connection
        finally:
            await connection.close()

    async def create(self) -> None:
        async with self._connected() as connection:
            jetstream = connection.jetstream(timeout=CALL_S)
            for topic in self.topics:
                config = StreamConfig(
                    name=topic, subjects=[topic], storage=StorageType.FILE, num_replicas=REPLICAS
                )
                await jetstream.add_stream(config)

    async def _meta(self) -> dict[str, Any]:
        """What the meta leader says of its group; the others do not know who is current."""
        for number in range(self.nodes):
            self._children[number].check()
            try:
                group = await asyncio.to_thread(self._jsz, number)
            except OSError:
                continue
            if group.get("leader") == f"node-{number}":
                return group
        return {}

    def _jsz(self, number: int) -> dict[str, Any]:
        url = f"http://{self.host(number)}:{self._ports[number][2]}/jsz"
        with urllib.request.urlopen(url, timeout=CALL_S) as response:
            return dict(json.load(response).get("meta_cluster") or {})

    async def _has_leader(self) -> bool:
        replicas = (await self._meta()).get("replicas", [])
        return len(replicas) == self.nodes - 1 and all(
            each["current"] and not each.get("offline") for each in replicas
        )

    async def leader(self) -> int:
        await until(self._has_leader, "NATS has a meta leader and all its nodes")
        return _number((await self._meta())["leader"])

    async def owners(self) -> dict[str, int]:
        return {topic: _number(group.leader) for topic, group in (await self._groups()).items()}

    async def _groups(self) -> dict[str, Any]:
        async with self._connected() as connection:
            jetstream = connection.jetstream(timeout=CALL_S)
            return {topic: (await jetstream.stream_info(topic)).cluster for topic in self.topics}

    async def bring(self, topic: str, to: int) -> None:
        wanted = json.dumps({"placement": {"preferred": f"node-{to}"}}).encode()

        async def is_there() -> bool:
            if (await self.owners())[topic] == to:
                return True
            async with self._connected() as connection:
                await connection.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{topic}", wanted, timeout=CALL_S)
            return False

        await until(is_there, f"node-{to} leads {topic}")

    async def healthy(self) -> None:
        await until(self._has_leader, "NATS has a meta leader and all its nodes")

        async def are_current() -> bool:
            try:
                groups = (await self._groups()).values()
            except (NatsError, TimeoutError):
                return False
            return all(
                group.leader
                and len(group.replicas) == REPLICAS - 1
                and all(each.current and not each.offline for each in group.replicas)
                for group in groups
            )

        await until(are_current, "all replicas of NATS's streams are current")


class SyncedJetStream(JetStream):
    name = "NATS R3, synced, tuned"
    durability = "NATS: synced on two of three disks"
    sender = "nats-tuned"
    sync = "sync_interval: always"


def _number(name: str | None) -> int:
    return int(name.removeprefix("node-")) if name else -1


async def _ignore(_: Exception) -> None:
    """nats-py logs what it does about a broken connection; here connections break."""
