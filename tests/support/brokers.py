"""Real brokers in real processes, on free loopback ports, with their own data directories.

    async with Cluster(3, tmp_path) as cluster:
        await cluster.init()
        leader = await cluster.leader()
        await cluster.put("/a", b"1")
        leader.kill()

    async with Brokers(3, tmp_path) as cluster:
        await cluster.create("/default/orders")
        moved = await cluster.unload("/default/orders")
        (await cluster.owner("/default/orders")).kill()

    with Standalone(tmp_path) as broker:
        ...

Everything that is started is stopped again, by its process id. Brokers tell by their log lines that they have
started, and a linearizable read returns as soon as there is a leader that can answer it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc
import yaml

from sava.api.admin_client import AdminClient, own_credentials
from sava.client import Client
from sava.config import Auth
from sava.proto import admin_pb2 as pb
from sava.proto import brokers_pb2 as brokers_pb
from sava.proto import danube_admin_pb2 as admin
from sava.proto import danube_admin_pb2_grpc as admin_rpc
from sava.proto import topics_admin_pb2 as topics_pb
from sava.security.credentials import Credentials
from tests.support.network import Links, free_ports
from tests.support.processes import PIPE, Child, Forked, start_sava
from tests.support.waiting import PATIENCE_S, until

FAST: dict[str, Any] = {"heartbeat_interval_ms": 50, "election_timeout_ms": 500}
"""For scenarios that are not about the default timeouts."""
REPOSITORY = Path(__file__).parents[2]

PLAIN: Final = Auth()


def storage_in(directory: Path) -> dict[str, str]:
    """Settings of a broker that is hosted by a test, and keeps its messages below its own directory."""
    return {"journal_dir": str(directory / "journal"), "url": (directory / "segments").as_uri()}


async def sava(*arguments: str, admin: str = "", check: bool = True) -> tuple[int, str, str]:
    """Run the ``sava`` command; returns exit code, stdout, stderr."""
    environment = {**os.environ, "SAVA_ADMIN": admin} if admin else dict(os.environ)
    process = await start_sava(*arguments, stdout=PIPE, stderr=PIPE, env=environment)
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.communicate()
        raise
    assert process.returncode is not None
    if check:
        assert process.returncode == 0, f"sava {' '.join(arguments)} ({process.returncode}): {err.decode()}"
    return process.returncode, out.decode(), err.decode()


class BrokerProcess:
    """One broker. ``number`` counts from 1 and names it in a test; its node id is drawn by itself."""

    def __init__(
        self, number: int, directory: Path, config: Path, auth: Auth, credentials: Credentials | None = None
    ) -> None:
        self.number = number
        self._credentials = credentials or own_credentials(auth)
        self.data_dir = directory
        self._config = config
        client, admin, raft, http = free_ports(4)
        self.raft_port = raft
        self.http_port = http
        self.admin = f"127.0.0.1:{admin}"
        self.client_url = f"{'https' if auth.tls else 'http'}://127.0.0.1:{client}"
        self.raft_address = f"127.0.0.1:{raft}"
        """Where its Raft port is reached by others; a link's proxy when there are links."""
        self._arguments = [
            *("--config", str(config), "--data-dir", str(directory), "--host", "127.0.0.1"),
            *("--port", str(client), "--admin-port", str(admin)),
            *("--raft-port", str(raft), "--http-port", str(http)),
        ]
        self._module = "sava.cli"
        self._environment: dict[str, str] = {}
        self.lines: list[str] = []
        self._line_added = asyncio.Condition()
        self._process: Child | None = None
        self._reading: asyncio.Task[None] | None = None
        self._client: AdminClient | None = None

    def add_arguments(self, *arguments: str) -> None:
        """From the next start on."""
        self._arguments += arguments

    def run_as(self, module: str, **environment: str) -> None:
        """From the next start on: another program, which takes the arguments of the ``sava`` command."""
        self._module, self._environment = module, environment

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def client(self) -> AdminClient:
        if self._client is None:
            self._client = AdminClient(self.admin, self._credentials)
        return self._client

    async def start(self, *, wait: bool = True, **environment: str) -> None:
        assert not self.is_running
        await self._drop_client()
        self.lines = []
        self._process = await start_sava(
            "broker",
            *self._arguments,
            module=self._module,
            stderr=PIPE,
            env={**os.environ, **self._environment, **environment},
        )
        self._reading = asyncio.create_task(self._read())
        if wait:
            await self.logged("broker: started")

    async def logged(self, text: str, *, timeout: float = PATIENCE_S) -> str:
        """The first line of this life that contains ``text``, when it is there."""

        def found() -> str | None:
            return next((line for line in self.lines if text in line), None)

        async with asyncio.timeout(timeout), self._line_added:
            await self._line_added.wait_for(lambda: found() is not None or not self.is_running)
        line = found()
        assert line is not None, f"broker {self.number} ended without saying {text!r}: {self.lines[-5:]}"
        return line

    def kill(self) -> None:
        """kill -9."""
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    async def ended(self, *, timeout: float = PATIENCE_S) -> int:
        """The exit code."""
        assert self._process is not None
        async with asyncio.timeout(timeout):
            code = await self._process.wait()
            if self._reading is not None:
                await self._reading
        return code

    async def stop(self) -> int:
        self.terminate()
        return await self.ended()

    async def wipe(self) -> None:
        """Lose the disk."""
        assert not self.is_running
        await asyncio.to_thread(shutil.rmtree, self.data_dir)

    async def status(self, *, timeout: float = PATIENCE_S) -> pb.StatusResponse:
        return await self.client.status(timeout=timeout)

    async def node_id(self) -> int:
        return (await self.status()).self_node_id

    async def get(self, key: str, *, local: bool = False, timeout: float = PATIENCE_S) -> bytes | None:
        response = await self.client.call(
            self.client.meta.Get, pb.GetRequest(key=key, local=local), timeout=timeout
        )
        return response.kv.value if response.HasField("kv") else None

    async def put(self, key: str, value: bytes, *, timeout: float = PATIENCE_S) -> int:
        response = await self.client.call(
            self.client.meta.Put, pb.PutRequest(key=key, value=value), timeout=timeout
        )
        return int(response.revision)

    async def caught_up(self, revision: int, *, timeout: float = PATIENCE_S) -> None:
        """Wait until this broker itself has applied ``revision``."""
        request = pb.GetRequest(key="/", local=True, min_revision=revision)
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                await self.client.call(self.client.meta.Get, request, timeout=left)
                return
            except Exception:
                if time.monotonic() + 0.5 > deadline:
                    raise

    async def http(self, path: str) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
        return int(head.split(" ")[1]), body

    async def close(self) -> None:
        if self.is_running:
            self.resume()
            self.kill()
            await self.ended()
        await self._drop_client()

    async def _drop_client(self) -> None:
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
            self._client = None

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            os.kill(self.pid, number)

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            async with self._line_added:
                self.lines.append(line.decode().rstrip())
                self._line_added.notify_all()
        await self._process.wait()
        async with self._line_added:
            self._line_added.notify_all()


class Cluster:
    """``size`` brokers, started. ``links=True`` puts a proxy in front of each Raft port. ``credentials`` are
    what the tests' own calls of the admin port show, by default the brokers' certificate."""

    def __init__(
        self,
        size: int,
        directory: Path,
        *,
        links: bool = False,
        auth: Auth = PLAIN,
        credentials: Credentials | None = None,
        **meta_store: Any,
    ) -> None:
        self._directory = directory
        self._size = size
        self._config = directory / "sava.yaml"
        self._auth = auth
        self._credentials = credentials
        settings = {
            "cluster_name": "test",
            "meta_store": {**FAST, **meta_store},
            "auth": auth.model_dump(mode="json"),
        }
        self._config.write_text(yaml.safe_dump(settings))
        self.brokers: list[BrokerProcess] = []
        self.links = Links(lambda: {b.pid: b.number for b in self.brokers if b.is_running}) if links else None

    async def __aenter__(self) -> Self:
        try:
            for _ in range(self._size):
                await self.prepare()
            await asyncio.gather(*(broker.start() for broker in self.brokers))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for broker in self.brokers:
                for line in broker.lines[-30:]:
                    print(f"broker {broker.number}: {line}")
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(broker.close() for broker in self.brokers))
        if self.links is not None:
            await self.links.close()

    async def prepare(self) -> BrokerProcess:
        """A further broker, not started."""
        number = len(self.brokers) + 1
        broker = BrokerProcess(
            number, self._directory / f"broker-{number}", self._config, self._auth, self._credentials
        )
        self.brokers.append(broker)
        if self.links is not None:
            port = await self.links.expose(number, broker.raft_port)
            broker.raft_address = f"127.0.0.1:{port}"
        return broker

    async def join(self) -> BrokerProcess:
        """A further broker, started and waiting."""
        broker = await self.prepare()
        await broker.start()
        return broker

    @property
    def running(self) -> list[BrokerProcess]:
        return [broker for broker in self.brokers if broker.is_running]

    @property
    def addresses(self) -> list[str]:
        return [broker.raft_address for broker in self.brokers]

    async def init(self, brokers: Sequence[BrokerProcess] = ()) -> pb.InitResponse:
        founders = brokers or self.brokers
        client = founders[0].client
        request = pb.InitRequest(nodes=[broker.raft_address for broker in founders])
        response: pb.InitResponse = await client.call(client.cluster.Init, request, timeout=PATIENCE_S)
        return response

    async def leader(
        self, *, among: Sequence[BrokerProcess] = (), timeout: float = PATIENCE_S
    ) -> BrokerProcess:
        """The broker that leads now, as one of ``among`` (default: all that run) sees it after a
        linearizable read."""
        candidates = list(among) or self.running
        deadline = time.monotonic() + timeout
        while True:
            await candidates[0].get("/", timeout=max(deadline - time.monotonic(), 0.1))
            for broker in candidates:
                status = await broker.status()
                if status.leader_id == status.self_node_id and status.role == "leader":
                    return broker
            assert time.monotonic() < deadline, "no leader"

    async def follower(self) -> BrokerProcess:
        leader = await self.leader()
        return next(broker for broker in self.running if broker is not leader)

    async def put(self, key: str, value: bytes, *, timeout: float = PATIENCE_S) -> int:
        return await self.running[0].put(key, value, timeout=timeout)

    async def logged(self, text: str, *, timeout: float = PATIENCE_S) -> str:
        """The first line with ``text`` of any broker that runs now. What the leader does after a fault is in
        the log of the broker that led then; on a busy machine another one leads by the time a test asks."""
        waiting = {asyncio.create_task(broker.logged(text, timeout=timeout)) for broker in self.running}
        try:
            while True:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.exception() is None or not waiting:
                        return task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


# -- several brokers over one object store -----------------------------------------------------

CALL_S = PATIENCE_S / 2
"""A call that was lost on its way can be repeated before patience is over."""
REGISTRATION_TTL_MS = 3000
"""Half of the default: most scenarios wait until a broker is taken for dead, and few are about how long."""


class Brokers(Cluster):
    """Several brokers over one object store, initialized and registered when entered, as moves of topics need
    them. Topics are uploaded, and so at rest, soon after they are idle."""

    def __init__(
        self,
        size: int,
        directory: Path,
        *,
        links: bool = False,
        auth: Auth = PLAIN,
        credentials: Credentials | None = None,
        upload_interval_s: int = 1,
        **settings: Any,
    ) -> None:
        super().__init__(size, directory, links=links, auth=auth, credentials=credentials)
        written = yaml.safe_load(self._config.read_text())
        written["storage"] = {"upload_interval_seconds": upload_interval_s}
        written["cluster"] = {"registration_ttl_ms": REGISTRATION_TTL_MS}
        for section, values in settings.items():
            is_section = isinstance(values, dict)
            written[section] = {**written.get(section, {}), **values} if is_section else values
        self._config.write_text(yaml.safe_dump(written))
        self._store_url = (directory / "segments").as_uri()
        self._ids: dict[int, int] = {}

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            await self.init()
            await self.registered()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def prepare(self) -> BrokerProcess:
        broker = await super().prepare()
        broker.add_arguments("--storage-url", self._store_url)
        return broker

    # -- brokers ---------------------------------------------------------------------------------

    async def id_of(self, broker: BrokerProcess) -> int:
        """Its node id, also when it is not running any more."""
        if broker.number not in self._ids:
            self._ids[broker.number] = await broker.node_id()
        return self._ids[broker.number]

    async def by_id(self, broker_id: int) -> BrokerProcess:
        for broker in self.brokers:
            if await self.id_of(broker) == broker_id:
                return broker
        raise AssertionError(f"nobody has the id {broker_id}")

    async def replace(self, old: BrokerProcess, *, pause_s: float = 0.0) -> BrokerProcess:
        """As an operator does it: a new broker joins, the old one is drained, removed and stopped. In between
        he looks at what has come of it for ``pause_s``."""
        new = await self.join()
        await self.command("cluster", "add-node", "--addr", new.raft_address)

        async def is_voter() -> bool:
            code, _, _ = await self.command(
                "cluster", "promote-node", "--addr", new.raft_address, check=False
            )
            return code == 0

        await until(is_voter, "the new broker has caught up", timeout=60)
        await self.registered([new])
        await asyncio.sleep(pause_s)
        await self.command("brokers", "drain", str(await self.id_of(old)))
        await self.command("cluster", "transfer-leader", "--to", str(await self.id_of(new)))
        await self.command("cluster", "remove-node", "--node-id", str(await self.id_of(old)))
        assert await old.stop() == 0
        return new

    async def list_brokers(self, *, through: BrokerProcess | None = None) -> list[brokers_pb.Broker]:
        client = (through or self.running[0]).client
        response = await client.call(
            client.brokers.ListBrokers, brokers_pb.ListBrokersRequest(), timeout=CALL_S
        )
        return list(response.brokers)

    async def registered(self, brokers: Sequence[BrokerProcess] = (), *, timeout: float = PATIENCE_S) -> None:
        """Until each of them (default: all that run) is there in the eyes of all that run."""
        wanted = {await self.id_of(broker) for broker in brokers or self.running}

        for broker in self.running:

            async def knows_them(broker: BrokerProcess = broker) -> bool:
                listed = await self.list_brokers(through=broker)
                return wanted <= {each.broker_id for each in listed if each.status != "unreachable"}

            await until(knows_them, f"broker {broker.number} knows {wanted}", timeout=timeout)

    # -- topics ----------------------------------------------------------------------------------

    async def create(
        self, name: str, *, reliable: bool = True, partitions: int = 0
    ) -> topics_pb.TopicDescription:
        client = self.running[0].client
        request = topics_pb.CreateTopicRequest(name=name, reliable=reliable, partitions=partitions)
        described: topics_pb.TopicDescription = await client.call(
            client.topics.CreateTopic, request, timeout=CALL_S
        )
        return described

    async def describe(
        self, name: str, *, through: BrokerProcess | None = None
    ) -> topics_pb.TopicDescription:
        client = (through or self.running[0]).client
        request = topics_pb.DescribeTopicRequest(name=name)
        described: topics_pb.TopicDescription = await client.call(
            client.topics.DescribeTopic, request, timeout=CALL_S
        )
        return described

    async def list_topics(self) -> dict[str, topics_pb.TopicSummary]:
        client = self.running[0].client
        response = await client.call(client.topics.ListTopics, topics_pb.ListTopicsRequest(), timeout=CALL_S)
        return {topic.name: topic for topic in response.topics}

    async def owner(self, name: str) -> BrokerProcess:
        return await self.by_id((await self.describe(name)).broker_id)

    async def others(self, name: str) -> list[BrokerProcess]:
        owner = await self.owner(name)
        return [broker for broker in self.running if broker is not owner]

    async def unload(
        self,
        name: str,
        *,
        to: BrokerProcess | None = None,
        through: BrokerProcess | None = None,
        repeats: int = 5,
    ) -> list[topics_pb.TopicMove]:
        """The moves; raises what the broker refused. A move that a busy machine could not make in the two
        seconds for which publishers are held was taken back, and is repeated."""
        client = (through or self.running[0]).client
        request = topics_pb.UnloadTopicRequest(
            name=name, to_broker_id=await self.id_of(to) if to is not None else 0
        )
        async with asyncio.timeout(60):
            while True:
                repeats -= 1
                moves = [move async for move in client.stream(client.topics.UnloadTopic, request, timeout=60)]
                if not repeats or len(moves) != 1 or "of holding its publishers" not in moves[0].error:
                    return moves

    async def served(
        self, name: str, *, by_other_than: int = 0, timeout: float = PATIENCE_S
    ) -> topics_pb.TopicDescription:
        """Until somebody (else) serves the topic."""
        described = topics_pb.TopicDescription()

        async def is_served() -> bool:
            nonlocal described
            described = await self.describe(name)
            return described.broker_id not in (0, by_other_than) and described.state == "open"

        await until(is_served, f"{name} is served", timeout=timeout)
        return described

    # -- clients ---------------------------------------------------------------------------------

    def sava_client(self, brokers: Sequence[BrokerProcess] = (), *, timeout: float = PATIENCE_S) -> Client:
        return Client([broker.client_url for broker in brokers or self.brokers], timeout=timeout)

    async def command(self, *arguments: str, check: bool = True) -> tuple[int, str, str]:
        """The ``sava`` command against the first broker that runs."""
        return await sava(*arguments, admin=self.running[0].admin, check=check)


# -- one broker --------------------------------------------------------------------------------

SOON = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 50)]
"""A port that is not open yet is tried again; gRPC would wait for a second."""


class Standalone:
    """One broker in a process of its own, as its users start it: ``sava broker --standalone``. It can be
    killed and started again on the same ports and data.

    Unlike ``Cluster`` it belongs to no event loop, so that the tests of a module, or of a session, can share
    a broker. Entering starts it and waits for nothing: clients do, and that is part of what is tested. A test
    that calls it without such a client waits for ``ready``.
    """

    module = "sava.cli"
    """What is run; another program takes the arguments of the ``sava`` command."""

    def __init__(self, directory: Path, auth: Auth = PLAIN, /, **environment: str) -> None:
        client, admin_port, raft, http = free_ports(4)
        self.port = client
        self.address = f"127.0.0.1:{client}"
        self.url = f"{'https' if auth.tls else 'http'}://{self.address}"
        self.admin = f"127.0.0.1:{admin_port}"
        self.http_port = http
        self.log = directory / "broker.log"
        self._tls = auth.tls
        # Nobody takes anything over from the only broker: however busy the machine is, it stays registered.
        self.environment = {"SAVA__CLUSTER__REGISTRATION_TTL_MS": "60000", **environment}
        if auth.tls is not None:
            for name in ("cert_file", "key_file", "ca_file"):
                self.set(**{f"SAVA__AUTH__TLS__{name.upper()}": str(getattr(auth.tls, name))})
            self.set(SAVA__AUTH__SUPER_ADMINS=json.dumps(auth.super_admins))
        self._arguments = [
            *("--standalone", "--data-dir", str(directory / "data"), "--host", "127.0.0.1"),
            *("--port", str(client), "--admin-port", str(admin_port)),
            *("--raft-port", str(raft), "--http-port", str(http)),
        ]
        self._process: Forked | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self._last_words())
            self.kill()
        elif self._running.poll() is None:
            self.stop()

    @property
    def _running(self) -> Forked:
        assert self._process is not None, "not started"
        return self._process

    @property
    def pid(self) -> int:
        return self._running.pid

    def add_arguments(self, *arguments: str) -> None:
        """From the next start on."""
        self._arguments += arguments

    def set(self, **environment: str) -> None:
        """From the next start on."""
        self.environment.update(environment)

    def start(self) -> None:
        with self.log.open("ab") as stderr:
            self._process = Forked(
                self.module,
                ["broker", *self._arguments],
                stderr=stderr,
                env={**os.environ, **self.environment},
            )

    def ready(self) -> None:
        """Returns when the broker has a leader, which is itself, and its first namespaces."""
        deadline = time.monotonic() + PATIENCE_S
        with self._admin_channel() as channel:
            stub: Any = admin_rpc.BrokerAdminStub(channel)
            while not _has_namespaces(stub):
                assert self._running.poll() is None, f"the broker ended: {self._last_words()}"
                assert time.monotonic() < deadline, f"the broker has not come up: {self._last_words()}"
                time.sleep(0.05)

    def _admin_channel(self) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(self.admin, SOON)
        files = (self._tls.ca_file, self._tls.key_file, self._tls.cert_file)
        credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
        return grpc.secure_channel(self.admin, credentials, SOON)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._running.kill()
        self._running.wait(PATIENCE_S)

    def stop(self) -> None:
        """SIGTERM; the broker must end cleanly."""
        self._running.terminate()
        try:
            assert self._running.wait(PATIENCE_S) == 0, self._last_words()
        finally:
            self.kill()

    def _last_words(self) -> str:
        return self.log.read_text()[-4000:]


def _has_namespaces(stub: Any) -> bool:
    try:
        response = stub.ListNamespaces(admin.Empty(), timeout=PATIENCE_S, wait_for_ready=True)
    except grpc.RpcError:
        return False
    return "default" in response.namespaces
