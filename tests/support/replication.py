"""Links between real clusters, without Spark: shares run in threads of the test, and everything else is what
a runner has.

``python -m tests.support.replication ADMIN SERVICE REMOTE`` is one link in a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import grpc
from grpc import aio

from sava.api.admin_client import AdminClient, own_credentials
from sava.client import Tls
from sava.client.blocking import Client
from sava.client.errors import ClientError
from sava.config import Auth
from sava.logs import MOST
from sava.pipeline.cluster import ClusterAccess
from sava.pipeline.replicate.background import AdminLinkControl
from sava.pipeline.replicate.copying import copy
from sava.pipeline.replicate.job import LinkJob
from sava.pipeline.replicate.rounds import CopyEngine
from sava.pipeline.replicate.target import CopyOutcome, CopyShare
from sava.pipeline.runner.control import AdminRunnerControl as RunnerControl
from sava.pipeline.runner.control import JobStatus
from sava.proto import pipelines_pb2, streams_pb2, topics_admin_pb2
from sava.proto import replication_pb2 as pb
from sava.records import Message
from tests.support.brokers import PLAIN, Standalone, sava
from tests.support.network import free_ports
from tests.support.waiting import PATIENCE_S, until, wait_until

HOLD_S = 0.2


class Side:
    """One cluster, through its admin port. ``auth``: certificates of its own."""

    def __init__(self, broker: Standalone, auth: Auth = PLAIN) -> None:
        self.broker = broker
        self.auth = auth
        files = auth.tls
        self.tls = Tls(files.ca_file, files.cert_file, files.key_file) if files is not None else None

    @property
    def service(self) -> str:
        return f"127.0.0.1:{self.broker.port}"

    async def call(self, service: str, method: str, request: Any) -> Any:
        async with AdminClient(self.broker.admin, own_credentials(self.auth)) as client:
            return await client.call(getattr(getattr(client, service), method), request, timeout=PATIENCE_S)

    async def replication(self, method: str, request: Any) -> Any:
        return await self.call("replication", method, request)

    async def ready(self) -> None:
        async def answers() -> bool:
            await self.call("namespaces", "ListNamespaces", topics_admin_pb2.ListNamespacesRequest())
            return True

        await until(answers, "the broker answers", timeout=PATIENCE_S)

    async def add(self, name: str, service: str) -> None:
        await self.replication("AddRemote", pb.Remote(name=name, service=service))

    async def namespace(self, name: str) -> None:
        request = topics_admin_pb2.CreateNamespaceRequest(namespace=name)
        await self.call("namespaces", "CreateNamespace", request)

    async def create(self, name: str, partitions: int = 0, *, reliable: bool = True) -> None:
        request = topics_admin_pb2.CreateTopicRequest(name=name, reliable=reliable, partitions=partitions)
        await self.call("topics", "CreateTopic", request)

    async def grow(self, name: str, partitions: int) -> None:
        request = topics_admin_pb2.GrowTopicRequest(name=name, partitions=partitions)
        await self.call("topics", "GrowTopic", request)

    async def delete(self, name: str) -> None:
        await self.call("topics", "DeleteTopic", topics_admin_pb2.DeleteTopicRequest(name=name))

    async def topics(self, namespace: str) -> list[str]:
        request = topics_admin_pb2.ListTopicsRequest(namespace=namespace)
        return [each.name for each in (await self.call("topics", "ListTopics", request)).topics]

    async def pipelines(self) -> list[str]:
        response = await self.call("pipelines", "ListPipelines", pipelines_pb2.ListPipelinesRequest())
        return [each.spec.name for each in response.pipelines]

    async def claim(self, pipeline: str, runner: str) -> None:
        """For a minute."""
        join = pipelines_pb2.JoinRunnerRequest(runner=runner, ttl_ms=60_000, kinds=["replicate"])
        await self.call("pipelines", "JoinRunner", join)
        request = pipelines_pb2.ClaimPipelineRequest(name=pipeline, runner=runner)
        assert (await self.call("pipelines", "ClaimPipeline", request)).is_granted

    async def leave(self, runner: str) -> None:
        await self.call("pipelines", "LeaveRunner", pipelines_pb2.LeaveRunnerRequest(runner=runner))

    async def status(self, topic: str) -> list[pb.LinkTopic]:
        """Of all topics, or of one; nothing: it is not replicated."""
        found = (await self.replication("GetReplicationStatus", pb.GetReplicationStatusRequest())).topics
        return [each for each in found if topic in ("", each.topic)]

    async def replicate(self, scope: str, remote: str = "west", **policy: Any) -> None:
        """Whatever there is at the remote."""
        wanted = pb.ReplicationPolicy(remotes=[remote], **policy)
        request = pb.SetReplicationRequest(scope=scope, policy=wanted, skip_checks=True)
        assert (await self.replication("SetReplication", request)).is_set

    async def clear(self, scope: str) -> None:
        await self.replication("ClearReplication", pb.ClearReplicationRequest(scope=scope))

    async def recreate(self, topic: str, remote: str = "west") -> None:
        request = pb.RecreateRemoteTopicRequest(topic=topic, remote=remote)
        await self.replication("RecreateRemoteTopic", request)

    async def command(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        found, out, err = await sava(*arguments, admin=self.broker.admin, check=False)
        assert found == code, (arguments, out, err)
        return out, err

    async def metrics(self) -> dict[str, float]:
        url = f"http://127.0.0.1:{self.broker.http_port}/metrics"

        def read() -> str:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
                return str(response.read().decode())

        lines = [line for line in (await asyncio.to_thread(read)).splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    # -- messages ------------------------------------------------------------------------------

    def client(self) -> Client:
        return Client(self.broker.url, tls=self.tls, timeout=PATIENCE_S)

    def publish(self, name: str, payloads: Sequence[str]) -> None:
        """To a plain topic, or to one partition."""
        with self.client() as client, client.producer(name) as producer:
            producer.send_many([payload.encode() for payload in payloads])

    def read(self, name: str) -> list[Message]:
        """Everything that is in a plain topic, or in one partition, now."""
        with self.client() as client, client.reader(name, end="latest") as reader:
            return list(reader)

    def payloads(self, name: str) -> list[str]:
        return [message.payload.decode() for message in self.read(name)]


class ThreadEngine(CopyEngine):
    """Shares run in threads of this process."""

    cores = 2

    def __init__(self) -> None:
        self.shares: list[CopyShare] = []

    def run(self, group: str, shares: Sequence[CopyShare]) -> list[CopyOutcome]:
        self.shares += shares
        with ThreadPoolExecutor(len(shares)) as pool:
            return [outcome for outcomes in pool.map(copy, shares) for outcome in outcomes]

    def cancel(self, group: str) -> None:
        """They end soon by themselves."""


class Claim:
    """Of a pipeline, held as its runner holds it, in a thread: of what nobody has claimed nobody is believed
    that it goes on."""

    def __init__(self, admin: str, pipeline: str, runner: str) -> None:
        self._control = RunnerControl(admin, runner, kinds=["replicate"])
        self._pipeline = pipeline
        self._claim = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._hold, daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _hold(self) -> None:
        while not self._is_over.is_set():
            with suppress(ClientError):  # a broker that is being restarted
                self._renew()
            self._is_over.wait(HOLD_S)
        with suppress(ClientError):
            self._control.leave()
        self._control.close()

    def _renew(self) -> None:
        self._control.join()
        self._claim = self._claim or self._control.claim(self._pipeline)
        if self._claim:
            answer = self._control.report(self._pipeline, self._claim, JobStatus("running"))
            if not answer.is_wanted:
                self._control.release(self._pipeline, self._claim, JobStatus("stopped"))
                self._claim = 0


class RunningLink:
    """The link of a cluster to one remote, as a runner would have it."""

    def __init__(self, side: Side, remote: str = "west") -> None:
        self.engine = ThreadEngine()
        edges = (AdminLinkControl(side.broker.admin), self.engine, ClusterAccess(side.service, timeout_s=5.0))
        pipeline, runner = f"replicate-{remote}", f"test-{remote}"
        self._claim = Claim(side.broker.admin, pipeline, runner)
        self.job = LinkJob(pipeline, remote, runner, *edges)

    def stop(self, *, now: bool = False, timeout: float = PATIENCE_S) -> None:
        self.job.stop(now=now)
        wait_until(lambda: self.job.end is not None, "the link has ended", timeout=timeout)
        self._claim.release()
        assert self.job.end is not None
        assert not self.job.end


class Told(logging.Handler):
    """What links say in the log, from its beginning on."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.files: list[Path] = []
        """Of runners, whose links say it there."""
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname} {record.getMessage()}")

    def of(self, topic: str) -> list[str]:
        return [line for line in [*self._lines, *self._written()] if f"topic={topic} " in f"{line} "]

    def has_error(self, topic: str, state: str) -> bool:
        """Whether it was said that the topic is not copied for this reason; or, by a runner, whose log has
        the first of many in a minute, of as many others."""
        errors = (line for line in self.of(topic) if line.startswith("ERROR"))
        others = [line for line in self._written() if line.startswith("ERROR replication: not copied")]
        return any(f"state={state} " in line for line in errors) or len(others) >= MOST

    def _written(self) -> Iterator[str]:
        for file in self.files:
            for line in file.read_text().splitlines():
                words = line.split(" ", 4)  # time, level, broker, logger, text
                if len(words) == 5:
                    yield f"{words[1]} {words[4]}"

    def __enter__(self) -> Self:
        logger = logging.getLogger("sava.pipeline.replicate")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("sava.pipeline.replicate").removeHandler(self)


class Gate(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """In front of the client port of a cluster of one broker, call by call: lets them pass, denies them, or
    does something first. Who looks up a topic is told that it is here. Closed, it cannot be reached."""

    def __init__(self, upstream: str) -> None:
        (self._port,) = free_ports(1)
        self.service_address = f"127.0.0.1:{self._port}"
        self.is_denying = False
        self.token = ""
        """That a call must show; empty: any, or none."""
        self.shown: Counter[tuple[str, str]] = Counter()
        """How often which method was called, and with which token."""
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        """By the name of the method; done once."""
        self._upstream = upstream
        self._server: Any = None
        self._channel: Any = None

    async def open(self) -> None:
        self._channel = aio.insecure_channel(self._upstream)
        self._server = aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_insecure_port(self.service_address)
        await self._server.start()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            await self._channel.close(None)
        self._server = None

    def service(self, handler_call_details: Any) -> Any:
        """Calls of all kinds look the same on the wire."""
        method: str = handler_call_details.method
        scheme, _, token = (
            dict(handler_call_details.invocation_metadata).get("authorization", "").partition(" ")
        )
        assert scheme in ("", "Bearer")
        self.shown[method.rpartition("/")[2], token] += 1

        async def passed(requests: Any, context: Any) -> AsyncIterator[bytes]:
            if self.token and token != self.token:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not one of this cluster")
            if self.is_denying:
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this cluster may not replicate here")
            if (first := self.before.pop(method.rpartition("/")[2], None)) is not None:
                await first()
            call = self._channel.stream_stream(method)(requests)
            try:
                async for response in call:
                    yield self._here(response) if method.endswith("/LookUp") else response
            except aio.AioRpcError as error:
                context.set_trailing_metadata(tuple(error.trailing_metadata()))
                await context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(passed)

    def _here(self, response: bytes) -> bytes:
        found = streams_pb2.LookUpResponse.FromString(response)
        for partition in found.partitions:
            partition.address = self.service_address
        return found.SerializeToString()


# -- a link that can be killed -----------------------------------------------------------------

ROOT = Path(__file__).parents[2]


class LinkProcess:
    """One link in a process of its own, which can be killed: as a runner has it, but for Spark."""

    def __init__(self, log: Path, admin: str, service: str, remote: str) -> None:
        self._command = [sys.executable, "-m", "tests.support.replication", admin, service, remote]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self, *, now: bool = False) -> None:
        """SIGTERM, and it must have been well until then; ``now``: kill -9."""
        assert self._process is not None
        if now:
            self.kill()
            return
        self._process.terminate()
        try:
            assert self._process.wait(PATIENCE_S) == 0, self._log.read_text()[-4000:]
        finally:
            self.kill()


def main() -> None:
    admin, service, remote = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    edges = (AdminLinkControl(admin), ThreadEngine(), ClusterAccess(service, timeout_s=5.0))
    job = LinkJob(f"replicate-{remote}", remote, "test", *edges)
    while job.end is None:
        if is_over.wait(0.1):
            job.stop(now=True)
    sys.exit(job.end or 0)


if __name__ == "__main__":
    main()
