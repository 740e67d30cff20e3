"""Real brokers in real processes, on free loopback ports, with their own data directories.

    async with Cluster(3, tmp_path) as cluster:
        await cluster.init()
        leader = await cluster.leader()
        await cluster.put("/a", b"1")
        leader.kill()

Everything that is started is stopped again, by its process id. Nothing here sleeps: brokers tell by their
log lines that they have started, and a linearizable read returns as soon as there is a leader that can
answer it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from sava.api.admin_client import PLAIN, AdminClient
from sava.config import Auth
from sava.proto import admin_pb2 as pb
from tests.support.children import PIPE, Child, start_sava
from tests.support.network import Links
from tests.support.ports import free_ports
from tests.support.waiting import PATIENCE_S

FAST: dict[str, Any] = {"heartbeat_interval_ms": 50, "election_timeout_ms": 500}
"""For scenarios that are not about the default timeouts."""
REPOSITORY = Path(__file__).parents[2]


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
        assert process.returncode == 0, f"sava {' '.join(arguments)}: {err.decode()}"
    return process.returncode, out.decode(), err.decode()


class BrokerProcess:
    """One broker. ``number`` counts from 1 and names it in a test; its node id is drawn by itself."""

    def __init__(self, number: int, directory: Path, config: Path, auth: Auth) -> None:
        self.number = number
        self._auth = auth
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
            self._client = AdminClient(self.admin, self._auth)
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
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
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
    """``size`` brokers, started. ``links=True`` puts a proxy in front of each Raft port."""

    def __init__(
        self, size: int, directory: Path, *, links: bool = False, auth: Auth = PLAIN, **meta_store: Any
    ) -> None:
        self._directory = directory
        self._size = size
        self._config = directory / "sava.yaml"
        self._auth = auth
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
        broker = BrokerProcess(number, self._directory / f"broker-{number}", self._config, self._auth)
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
