"""A Sava broker process, called from outside through the gRPC services of its admin port."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import yaml

from bench.arrivals import arriving
from bench.hosted import broker_settings
from bench.load import EOF, Load, channel_to
from bench.processes import Child, ProcessFailedError
from bench.samples import Sample
from sava.proto import admin_pb2 as pb
from sava.proto import admin_pb2_grpc as rpc
from sava.proto import brokers_pb2_grpc as brokers_rpc
from sava.proto import ledgers_pb2_grpc as ledgers_rpc
from sava.proto import topics_admin_pb2_grpc as topics_rpc

KEY = "/bench/key"
PUT = "/sava.admin.Meta/Put"
GET = "/sava.admin.Meta/Get"
SERVING_TIMEOUT_S = 60.0
POLL_S = 0.01


class Broker:
    """One ``sava broker`` with the default settings, apart from where it listens and keeps its data, and from
    what is said of its storage."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        within: Sequence[str] = (),
        **storage: object,
    ) -> None:
        """``within`` stands before the command, to run it on another host."""
        self.name = name
        self._folder = folder
        self._within = within
        tree, ports = broker_settings(folder / name, host, **storage)
        self.client = f"{host}:{ports['client']}"
        self.admin = f"{host}:{ports['admin']}"
        self.raft = f"{host}:{ports['raft']}"
        self.http = f"{host}:{ports['prometheus']}"
        self._config = folder / f"{name}.yaml"
        self._config.write_text(yaml.safe_dump(tree), encoding="utf-8")
        self._child: Child | None = None
        self._channel: Any = None
        self.load = Load(self.admin)

    @property
    def child(self) -> Child:
        assert self._child is not None, "not started"
        return self._child

    @property
    def was_started(self) -> bool:
        return self._child is not None

    def start(self) -> None:
        command = [*self._within, sys.executable, "-c", "from sava.cli.main import main; main()"]
        self._child = Child(
            [*command, "broker", "--config", str(self._config)], self._folder / f"{self.name}.log"
        )

    async def disconnect(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    @property
    def meta(self) -> Any:
        return rpc.MetaStub(self._connected())

    @property
    def cluster(self) -> Any:
        return rpc.ClusterStub(self._connected())

    @property
    def topics(self) -> Any:
        return topics_rpc.TopicsStub(self._connected())

    @property
    def brokers(self) -> Any:
        return brokers_rpc.BrokersStub(self._connected())

    @property
    def ledgers(self) -> Any:
        return ledgers_rpc.LedgersStub(self._connected())

    def _connected(self) -> Any:
        if self._channel is None:
            self._channel = channel_to(self.admin)
        return self._channel

    async def status(self) -> pb.StatusResponse:
        response: pb.StatusResponse = await self.cluster.Status(
            pb.StatusRequest(), timeout=10.0, wait_for_ready=True
        )
        return response

    async def answering(self) -> pb.StatusResponse:
        """Wait until the admin port answers at all."""
        deadline = time.monotonic() + SERVING_TIMEOUT_S
        while time.monotonic() < deadline:
            self.child.check()
            with contextlib.suppress(grpc.RpcError):
                return await self.status()
            await asyncio.sleep(POLL_S)
        raise ProcessFailedError(f"broker {self.name} does not answer after {SERVING_TIMEOUT_S:.0f} s")

    async def serving(self, key: str) -> None:
        """Wait until this broker answers a linearizable read of ``key``, which must be there."""
        deadline = time.monotonic() + SERVING_TIMEOUT_S
        while time.monotonic() < deadline:
            self.child.check()
            with contextlib.suppress(grpc.RpcError):
                response = await self.meta.Get(pb.GetRequest(key=key), timeout=10.0)
                if not response.HasField("kv"):
                    raise ProcessFailedError(f"broker {self.name} lost {key}")
                return
            await asyncio.sleep(POLL_S)
        raise ProcessFailedError(f"broker {self.name} does not serve after {SERVING_TIMEOUT_S:.0f} s")

    async def put(self, key: str, value: bytes, *, timeout_s: float = 10.0) -> None:
        await self.meta.Put(pb.PutRequest(key=key, value=value), timeout=timeout_s, wait_for_ready=True)

    async def puts(self, value: bytes, *, in_flight: int, seconds: float) -> Sample:
        """Load of durable puts; that each took effect is seen from the revision."""
        revision, issued = await self._revision(), self.load.issued
        request = pb.PutRequest(key=KEY, value=value).SerializeToString()
        sample = await self.load.run(PUT, request, in_flight=in_flight, seconds=seconds)
        moved, made = await self._revision() - revision, self.load.issued - issued
        if moved < made:
            raise ProcessFailedError(f"{made} puts moved Sava's revision by {moved}")
        return sample

    async def gets(self, *, local: bool, in_flight: int, seconds: float) -> Sample:
        """Load of reads; that each succeeded is seen from the bytes that came back."""
        await self.put(KEY, bytes(200))
        request = pb.GetRequest(key=KEY, local=local).SerializeToString()
        return await self.load.run(GET, request, in_flight=in_flight, seconds=seconds, least_response=200)

    async def _revision(self) -> int:
        response = await self.meta.Get(pb.GetRequest(key=KEY), timeout=10.0, wait_for_ready=True)
        return int(response.revision)

    @contextlib.asynccontextmanager
    async def watching(self, key: str) -> AsyncIterator[asyncio.Queue[float]]:
        """A queue of the times at which events of ``key`` arrived; entered once the watch is established."""
        stream: Any = self.meta.Watch(pb.WatchRequest(prefix=key))
        await stream.read()

        async def events() -> AsyncIterator[int]:
            while (response := await stream.read()) is not EOF:
                yield len(response.events)

        async with arriving(events(), stream.cancel) as times:
            yield times
