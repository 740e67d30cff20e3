"""The cluster under torture: hosts with processes, disks and addresses, and what an operator does to them.

Three brokers are one cluster over an S3 server; a fourth one, ``west``, is a cluster by itself that the first
replicates to. Each host has its disk and, where the machine allows it, its network namespace. What a machine
does not allow is in ``Surroundings.missing``, with what takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml

from sava.api.admin_client import AdminClient, own_credentials
from sava.config import Auth
from sava.errors import SavaError
from sava.proto import admin_pb2, brokers_pb2, ledgers_pb2, topics_admin_pb2
from tests.support.brokers import PLAIN
from tests.support.certificates import make_certificates
from tests.support.network import Links, free_ports
from tests.support.objects import BUCKET, S3Server
from tests.support.waiting import NotInTime, until
from tests.torture.broker_child import VARIABLE, Knobs
from tests.torture.disks import Disk, FolderDisk, ImageDisk, NoMounts, room_for_images
from tests.torture.history import Exited, Recorder
from tests.torture.load import Plan
from tests.torture.network import Conditions, Network, NoNamespaces, isolate, mortal

T = TypeVar("T")

ROOT: Final = Path(__file__).parents[2]
BROKERS: Final = ("b1", "b2", "b3")
WEST, STORE, CLIENTS = "west", "s3", "clients"
HOSTS: Final = (*BROKERS, WEST, STORE, CLIENTS)
CALL_S: Final = 5.0
START_S: Final = 60.0
RESTART_S: Final = 1.0
"""A supervisor's pause before it starts a broker again that has ended by itself."""
DISK_MB: Final = 2048
SNAPSHOT_THRESHOLD: Final = 1000
"""Entries of the Raft log; a tenth of the default, so that short runs see snapshots too."""


class Loopback:
    """The network where namespaces are not allowed: all hosts are this machine. A TCP proxy stands before
    each broker's Raft port, which can be cut; everything else of a bad network is missing."""

    has_packets: Final = False

    def __init__(self) -> None:
        self.pids: Callable[[], dict[int, int]] = dict
        self.links = Links(lambda: self.pids())

    def address(self, host: str) -> str:
        return "127.0.0.1"

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        return mortal(command)

    def descriptors(self, host: str) -> list[int]:
        return []

    def set(self, pairs: Sequence[tuple[str, str]], conditions: Conditions) -> None:
        for source, target in pairs:
            if conditions.is_cut and source in BROKERS and target in BROKERS:
                self.links.cut(BROKERS.index(source), BROKERS.index(target))

    def heal(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.links.heal()

    def heal_all(self) -> None:
        self.links.heal()

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """The links are closed with the event loop."""


@dataclass
class Surroundings:
    """What the machine gives this run. Made before any thread is started."""

    directory: Path
    network: Network | Loopback
    images: Path | None
    """Where disk images lie; None: brokers hold unsynced writes back."""
    auth: Auth
    missing: list[str] = field(default_factory=list)
    loses_power: bool = True
    """Whether a disk without an image must be able to forget what was not synced."""

    @classmethod
    def make(cls, directory: Path, *, seed: int, tls: bool, namespaces: bool) -> Surroundings:
        missing: list[str] = []
        network: Network | Loopback = Loopback()
        images: Path | None = None
        if not namespaces:
            missing.append(
                "network namespaces (not asked for): TCP proxies cut links, nothing is lost or late"
            )
        else:
            try:
                isolate()
                network = Network(HOSTS, seed=seed, log=directory / "router.log")
            except NoNamespaces as error:
                missing.append(
                    f"network namespaces ({error}): TCP proxies cut links, nothing is lost or late"
                )
            images = cls._try_images(directory, missing)
        auth = PLAIN
        if tls:
            addresses = [network.address(host) for host in HOSTS]
            auth = make_certificates(directory / "certificates", *addresses)
        return cls(directory, network, images, auth, missing)

    @staticmethod
    def _try_images(directory: Path, missing: list[str]) -> Path | None:
        images = room_for_images(directory)
        try:
            ImageDisk("try", directory / "mounts", images, megabytes=16).close()
        except (NoMounts, OSError) as error:
            shutil.rmtree(images, ignore_errors=True)
            missing.append(f"disk images ({error}): brokers hold unsynced writes back in memory instead")
            return None
        return images

    def described(self) -> list[str]:
        """What there is, in the words of a report."""
        router = (
            "a namespace for each host behind a router"
            if self.network.has_packets
            else "loopback, TCP proxies"
        )
        disk = (
            "ext4 images that lose power" if self.images is not None else "folders, unsynced writes in memory"
        )
        return [f"network: {router}", f"disks: {disk}", f"TLS: {'on' if self.auth.tls else 'off'}"]

    @property
    def tls_files(self) -> list[str]:
        """ca, cert and key; nothing: plain connections."""
        files = self.auth.tls
        return [str(files.ca_file), str(files.cert_file), str(files.key_file)] if files else []

    def disk(self, name: str) -> Disk:
        mounts = self.directory / "mounts"
        if self.images is None:
            return FolderDisk(name, mounts, holds_back=self.loses_power)
        return ImageDisk(name, mounts, self.images, megabytes=DISK_MB)

    def start(
        self,
        host: str,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """A process on a host. From the main thread only: it dies with the thread that has started it."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.network.command(host, command),
                pass_fds=self.network.descriptors(host),
                env={**os.environ, **(environment or {})},
                cwd=ROOT,
                stdin=stdin,
                stdout=output,
                stderr=output,
            )

    def close(self) -> None:
        self.network.close()
        if self.images is not None:
            shutil.rmtree(self.images, ignore_errors=True)


class Broker:
    """One broker's host. ``node_id`` is 0 until it is known, and again when its disk was wiped."""

    def __init__(self, name: str, around: Surroundings, arguments: Sequence[str], **environment: str) -> None:
        self.name = name
        self.disk = around.disk(name)
        self.address = around.network.address(name)
        self.client_port, self.admin_port, self.raft_port, self.http_port = (
            (6650, 50051, 7650, 9040) if around.network.has_packets else free_ports(4)
        )
        self.raft_address = f"{self.address}:{self.raft_port}"
        """Where the others reach its Raft port; a proxy on loopback."""
        self.admin = f"{self.address}:{self.admin_port}"
        self.client_url = f"{'https' if around.auth.tls else 'http'}://{self.address}:{self.client_port}"
        self.log = around.directory / f"{name}.log"
        self.node_id = 0
        self.knobs = Knobs(holds_back=self.disk.holds_back)
        self._knobs_file = around.directory / f"{name}.knobs"
        self._around = around
        self._arguments = arguments
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self.is_wanted = False
        """Whether it should run: one that ends then has ended by itself."""
        self._client: AdminClient | None = None

    @property
    def client(self) -> AdminClient:
        if self._client is None:
            self._client = AdminClient(self.admin, own_credentials(self._around.auth))
        return self._client

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def turn(self, **knobs: Any) -> None:
        """Change what its clock and disk do."""
        for name, value in knobs.items():
            setattr(self.knobs, name, value)
        self.knobs.save(self._knobs_file)

    def start(self) -> None:
        assert not self.is_running
        self.turn()
        command = [
            *(sys.executable, "-m", "tests.torture.broker_child", "broker", *self._arguments),
            *("--data-dir", str(self.disk.path / "data"), "--host", self.address),
            *("--port", str(self.client_port), "--admin-port", str(self.admin_port)),
            *("--raft-port", str(self.raft_port), "--http-port", str(self.http_port)),
        ]
        environment = {**self._environment, VARIABLE: str(self._knobs_file)}
        self._process = self._around.start(self.name, command, self.log, environment=environment)
        self.is_wanted = True

    def signal(self, number: signal.Signals) -> None:
        if self.is_running:
            os.kill(self.pid, number)

    async def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.is_wanted = False
        self.signal(signal.SIGKILL)
        await self.ended()

    async def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.is_wanted = False
        self.signal(signal.SIGTERM)
        try:
            return await self.ended(timeout=45.0)
        except TimeoutError:
            await self.kill()
            return -9

    async def ended(self, *, timeout: float = 20.0) -> int:
        assert self._process is not None
        return await ended(self._process, timeout=timeout)

    async def lose_power(self) -> None:
        """The process and everything that it has not synced are gone at once."""
        self.is_wanted = False
        self.signal(signal.SIGSTOP)
        await asyncio.to_thread(self.disk.cut_power)
        self.signal(signal.SIGKILL)
        await self.ended()
        await asyncio.to_thread(self.disk.return_power)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
        if self._process is not None:
            await self.kill()
        with contextlib.suppress(NoMounts):
            await asyncio.to_thread(self.disk.close)


class Store:
    """The S3 server."""

    def __init__(self, around: Surroundings) -> None:
        folder = around.directory / "s3"
        folder.mkdir()
        self._server = S3Server(folder, address=around.network.address(STORE))
        self._around = around
        self._process: subprocess.Popen[bytes] | None = None
        self.environment = {
            "AWS_ENDPOINT_URL": self._server.options["endpoint"],
            "AWS_ACCESS_KEY_ID": self._server.options["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": self._server.options["secret_access_key"],
            "AWS_REGION": self._server.options["region"],
            "AWS_ALLOW_HTTP": "true",
        }

    def start(self) -> None:
        log = self._around.directory / "s3.log"
        self._process = self._around.start(
            STORE, self._server.command(), log, environment=self._server.environment()
        )

    async def ready(self) -> None:
        await until(
            lambda: asyncio.to_thread(self._server.takes_objects),
            "the S3 server",
            timeout=START_S,
            poll_s=0.1,
        )

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await ended(self._process, timeout=20.0)


async def ended(process: subprocess.Popen[bytes], *, timeout: float) -> int:
    """The exit code. The process stays a child of this thread, which alone may wait for it. Raises
    TimeoutError."""
    deadline = time.monotonic() + timeout
    while (code := process.poll()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {process.pid} has not ended within {timeout:g} s")
        await asyncio.sleep(0.02)
    return code


class Cluster:
    """The three brokers and their store, started and initialized when entered."""

    def __init__(self, around: Surroundings, recorder: Recorder) -> None:
        self.around = around
        self.network = around.network
        self.recorder = recorder
        self.store = Store(around)
        config = around.directory / "sava.yaml"
        config.write_text(yaml.safe_dump(_settings(around.auth)))
        arguments = ("--config", str(config), "--storage-url", f"s3://{BUCKET}/east")
        self.brokers = [Broker(name, around, arguments, **self.store.environment) for name in BROKERS]
        west = {"SAVA__CLUSTER_NAME": WEST, "SAVA__CLUSTER__REGISTRATION_TTL_MS": "60000"}
        if around.auth.tls is not None:
            for name in ("cert_file", "key_file", "ca_file"):
                west[f"SAVA__AUTH__TLS__{name.upper()}"] = str(getattr(around.auth.tls, name))
            west["SAVA__AUTH__SUPER_ADMINS"] = json.dumps(around.auth.super_admins)
        self.west = Broker(WEST, around, ("--standalone",), **west)
        self.excuse = ""
        """The fault that may end a broker, if one is at work."""
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.store.start()
        if isinstance(self.network, Loopback):
            self.network.pids = lambda: {
                broker.pid: number for number, broker in enumerate(self.brokers) if broker.is_running
            }
            for number, broker in enumerate(self.brokers):
                port = await self.network.links.expose(number, broker.raft_port)
                broker.raft_address = f"127.0.0.1:{port}"
        await self.store.ready()
        for broker in (*self.brokers, self.west):
            broker.start()
        request = admin_pb2.InitRequest(nodes=[broker.raft_address for broker in self.brokers])
        await self._repeat(lambda client: client.call(client.cluster.Init, request, timeout=CALL_S), START_S)
        await self.whole((), timeout=START_S)
        self._supervisor = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
        for broker in (*self.brokers, self.west):
            await broker.close()
        await self.store.kill()
        if isinstance(self.network, Loopback):
            await self.network.links.close()

    async def _supervise(self) -> None:
        """Start brokers again that have ended by themselves, and record it."""
        while True:
            for broker in (*self.brokers, self.west):
                if broker.is_wanted and not broker.is_running:
                    code = broker.exit_code
                    self.recorder.add(Exited(time.monotonic(), broker.name, code or 0, self.excuse))
                    print(f"{broker.name} ended by itself with code {code} {self.excuse}", flush=True)
                    await asyncio.sleep(RESTART_S)
                    if broker.is_wanted and not broker.is_running:
                        broker.start()
            await asyncio.sleep(0.2)

    def plan(self, topics: Mapping[str, str], *, seed: int, **settings: Any) -> Plan:
        """What clients need to know, to be read by ``tests.torture.load``; the path is ``plan.json``."""
        plan = Plan(
            directory=str(self.around.directory),
            services=[broker.client_url for broker in self.brokers],
            admins=[broker.admin for broker in self.brokers],
            west=self.west.client_url,
            topics=dict(topics),
            seed=seed,
            tls=self.around.tls_files,
            **settings,
        )
        (self.around.directory / "plan.json").write_bytes(msgspec.json.encode(plan))
        return plan

    # -- asking ----------------------------------------------------------------------------------

    async def _repeat(
        self, call: Callable[[AdminClient], Awaitable[T]], timeout: float, *, but: Broker | None = None
    ) -> T:
        """Ask one broker after the other until one answers."""
        deadline, failure = time.monotonic() + timeout, ""
        while time.monotonic() < deadline:
            for broker in self.brokers:
                if broker is but or not broker.is_running:
                    continue
                try:
                    return await call(broker.client)
                except SavaError as error:
                    failure = f"{broker.name}: {type(error).__name__}: {error}"
            await asyncio.sleep(0.2)
        raise NotInTime(f"no broker answered within {timeout:g} s ({failure})")

    async def whole(self, topics: Sequence[str], *, timeout: float) -> None:
        """Until all brokers are registered, serve, and keep their journals on three disks, and every topic
        is open. Raises NotInTime."""
        deadline = time.monotonic() + timeout

        async def reached(condition: Callable[[], Awaitable[bool]], what: str) -> None:
            left = max(deadline - time.monotonic(), 1.0)
            await until(condition, what, timeout=left, poll_s=0.1, passing=(TimeoutError,))

        for broker in self.brokers:
            await reached(partial(self._sees_all, broker), f"{broker.name} sees all brokers")
        await reached(self._is_mirrored, "all journals are on three disks")
        for topic in topics:
            await reached(partial(self._is_open, topic), f"{topic} is served")

    async def _sees_all(self, broker: Broker) -> bool:
        client = broker.client
        status = await client.status(timeout=CALL_S)
        response = await client.call(
            client.brokers.ListBrokers, brokers_pb2.ListBrokersRequest(), timeout=CALL_S
        )
        there = [each for each in response.brokers if each.status == "active"]
        broker.node_id = status.self_node_id
        return len(there) == len(self.brokers) == len(status.voters) and bool(status.leader_id)

    async def journals(self) -> list[ledgers_pb2.Ledger]:
        request = ledgers_pb2.ListLedgersRequest()
        response = await self._repeat(
            lambda client: client.call(client.ledgers.ListLedgers, request, timeout=CALL_S), CALL_S
        )
        return list(response.ledgers)

    async def _is_mirrored(self) -> bool:
        there = {broker.node_id for broker in self.brokers}
        full = {
            each.broker_id
            for each in await self.journals()
            if each.state == "open" and len(each.fragments[-1].storage_ids) >= len(self.brokers)
        }
        return there <= full

    async def describe(self, topic: str) -> topics_admin_pb2.TopicDescription:
        request = topics_admin_pb2.DescribeTopicRequest(name=topic)
        return await self._repeat(
            lambda client: client.call(client.topics.DescribeTopic, request, timeout=CALL_S), CALL_S
        )

    async def _is_open(self, topic: str) -> bool:
        described = await self.describe(topic)
        return bool(described.broker_id) and described.state == "open"

    async def leader(self) -> Broker | None:
        status = await self._repeat(lambda client: client.status(timeout=CALL_S), CALL_S)
        return next((each for each in self.brokers if each.node_id == status.leader_id), None)

    # -- what an operator does -------------------------------------------------------------------

    async def create(self, topic: str, *, on: Broker | None = None) -> None:
        request = topics_admin_pb2.CreateTopicRequest(name=topic, reliable=True, if_absent=True)
        if on is not None:
            await on.client.call(on.client.topics.CreateTopic, request, timeout=CALL_S)
            return
        await self._repeat(
            lambda client: client.call(client.topics.CreateTopic, request, timeout=CALL_S), START_S
        )

    async def may_lose(self, broker: Broker) -> bool:
        """Whether everything acknowledged is on another disk than this broker's, too: losing all disks that
        have acknowledged a message at once is not survived, nor is it claimed to be."""
        for journal in await self.journals():
            there = {member.storage_id: member.broker_id for member in journal.members}
            for fragment in journal.fragments:
                gone = [each for each in fragment.storage_ids if there.get(each, 0) in (0, broker.node_id)]
                if len(gone) >= fragment.ack_quorum:
                    return False
        return True

    async def replace(self, broker: Broker, *, timeout: float) -> None:
        """The broker's disk is gone, its identity included: remove it, and add the empty one."""
        gone, broker.node_id = broker.node_id, 0
        remove = admin_pb2.RemoveNodeRequest(node_id=gone)
        await self._done(lambda c: c.call(c.cluster.RemoveNode, remove, timeout=CALL_S), broker, timeout)
        await asyncio.to_thread(broker.disk.wipe)
        broker.start()
        add = admin_pb2.AddNodeRequest(addr=broker.raft_address)
        await self._done(lambda c: c.call(c.cluster.AddNode, add, timeout=CALL_S), broker, timeout)
        promote = admin_pb2.PromoteNodeRequest(addr=broker.raft_address)
        await self._done(lambda c: c.call(c.cluster.PromoteNode, promote, timeout=CALL_S), broker, timeout)

    async def _done(
        self, call: Callable[[AdminClient], Awaitable[object]], but: Broker, timeout: float
    ) -> None:
        await self._repeat(call, timeout, but=but)


def _settings(auth: Auth) -> dict[str, Any]:
    """The defaults, but for what happens rarely in half an hour by default."""
    return {
        "cluster_name": "east",
        "auth": auth.model_dump(mode="json"),
        "storage": {"upload_interval_seconds": 5},
        "replication": {"secrets_dir": str(auth.tls.ca_file.parent)} if auth.tls is not None else {},
        "meta_store": {"snapshot_threshold": SNAPSHOT_THRESHOLD},
        "load_manager": {
            "load_report_interval_seconds": 5,
            "rebalancing": {
                "check_interval_seconds": 20,
                "cooldown_seconds": 10,
                "min_topic_age_seconds": 10,
                "max_moves_per_hour": 1000,
                "aggressiveness": "aggressive",
            },
        },
    }
