"""A real etcd cluster of three, with its default durability, driven as cheaply as possible.

Requests are hand-encoded bytes (``wire``) of etcd's v3 API; load comes from ``load``. h2load posts one
request over and over, so all puts go to one key: etcd keeps every revision of it, as it would of many keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio

from bench import wire
from bench.arrivals import arriving
from bench.load import EOF, Load, channel_to
from bench.processes import Child, ProcessFailedError, free_ports, stop_all
from bench.samples import Sample

NODES = 3
READY_TIMEOUT_S = 30.0
KEY = "bench/key"
TXN_OPERATIONS = 100
"""Puts per transaction while loading; etcd refuses more than 128 by default."""

PUT = "/etcdserverpb.KV/Put"
RANGE = "/etcdserverpb.KV/Range"
TXN = "/etcdserverpb.KV/Txn"
WATCH = "/etcdserverpb.Watch/Watch"
STATUS = "/etcdserverpb.Maintenance/Status"


def is_installed() -> bool:
    return shutil.which("etcd") is not None


def put_request(key: str, value: bytes) -> bytes:
    return wire.message((1, key), (2, value))


def range_request(key: str, *, serializable: bool) -> bytes:
    return wire.message((1, key), (7, int(serializable)))


class EtcdNode:
    """One etcd process and a gRPC channel to it."""

    def __init__(self, name: str, folder: Path, client_port: int, peer_port: int) -> None:
        self.name = name
        self.folder = folder
        self.address = f"127.0.0.1:{client_port}"
        self.peer_url = f"http://127.0.0.1:{peer_port}"
        self.child: Child | None = None
        self.channel: Any = None
        self.load = Load(self.address)

    def start(self, initial_cluster: str) -> None:
        url = f"http://{self.address}"
        self.child = Child(
            [
                "etcd", "--name", self.name, "--data-dir", str(self.folder / self.name),
                "--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url,
                "--listen-client-urls", url, "--advertise-client-urls", url,
                "--initial-cluster", initial_cluster, "--initial-cluster-token", "sava-bench",
                "--logger", "zap", "--log-level", "warn",
            ],
            self.folder / f"{self.name}.log",
        )  # fmt: skip

    async def connect(self) -> None:
        await self.disconnect()
        self.channel = channel_to(self.address)

    async def disconnect(self) -> None:
        if self.channel is not None:
            await self.channel.close()
            self.channel = None

    async def call(self, method: str, request: bytes, *, timeout_s: float = 10.0) -> bytes:
        if self.channel is None:
            await self.connect()
        call = self.channel.unary_unary(method)
        response: bytes = await call(request, timeout=timeout_s, wait_for_ready=True)
        return response

    async def revision(self) -> int:
        """Linearizable: waits for a leader, and sees every write acknowledged before."""
        response = await self.call(RANGE, range_request("none", serializable=False))
        return wire.number(wire.nested(response, 1), 3)

    async def leads(self) -> bool:
        status = await self.call(STATUS, b"")
        return wire.number(status, 4) == wire.number(wire.nested(status, 1), 2)


class EtcdCluster:
    """Three nodes under ``folder``; use as an async context manager."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(2 * NODES)
        folder.mkdir(parents=True, exist_ok=True)
        self.nodes = [EtcdNode(f"n{i}", folder, ports[2 * i], ports[2 * i + 1]) for i in range(NODES)]
        self._initial = ",".join(f"{node.name}={node.peer_url}" for node in self.nodes)

    async def __aenter__(self) -> EtcdCluster:
        try:
            for node in self.nodes:
                node.start(self._initial)
            await self.ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        for node in self.nodes:
            await node.disconnect()
        await stop_all([node.child for node in self.nodes if node.child is not None])

    def restart(self, node: EtcdNode) -> None:
        node.start(self._initial)

    async def ready(self) -> None:
        """All nodes answer a linearizable read."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        for node in self.nodes:
            while True:
                if node.child is not None:
                    node.child.check()
                with contextlib.suppress(grpc.RpcError):
                    await node.revision()
                    break
                if time.monotonic() > deadline:
                    raise ProcessFailedError(f"etcd {node.name} is not ready after {READY_TIMEOUT_S:.0f} s")
                await asyncio.sleep(0.05)

    async def leader(self) -> EtcdNode:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            for node in self.nodes:
                if node.child is not None and node.child.is_running and await node.leads():
                    return node
            await asyncio.sleep(0.05)
        raise ProcessFailedError("etcd has no leader")

    async def followers(self) -> list[EtcdNode]:
        leader = await self.leader()
        return [node for node in self.nodes if node is not leader]


async def puts(node: EtcdNode, value: bytes, *, in_flight: int, seconds: float) -> Sample:
    """Durable puts through ``node``; that each took effect is seen from the revision, which every put raises
    by one."""
    revision, issued = await node.revision(), node.load.issued
    sample = await node.load.run(PUT, put_request(KEY, value), in_flight=in_flight, seconds=seconds)
    moved, made = await node.revision() - revision, node.load.issued - issued
    if moved != made:
        raise ProcessFailedError(f"{made} puts moved etcd's revision by {moved}")
    return sample


async def gets(node: EtcdNode, *, serializable: bool, in_flight: int, seconds: float) -> Sample:
    """Reads of the key of ``puts``; that each succeeded is seen from the bytes that came back."""
    request = range_request(KEY, serializable=serializable)
    least = len(await node.call(RANGE, request))
    return await node.load.run(RANGE, request, in_flight=in_flight, seconds=seconds, least_response=least)


async def fill(node: EtcdNode, keys: int, value: bytes, *, in_flight: int = 8) -> None:
    """Write ``keys`` different keys, in transactions."""
    gate = asyncio.Semaphore(in_flight)

    async def write(first: int) -> None:
        operations = (
            wire.message((2, put_request(f"fill/{number:08}", value)))
            for number in range(first, min(first + TXN_OPERATIONS, keys))
        )
        async with gate:
            await node.call(TXN, wire.message(*((2, operation) for operation in operations)), timeout_s=30.0)

    async with asyncio.TaskGroup() as group:
        for first in range(0, keys, TXN_OPERATIONS):
            group.create_task(write(first))


@contextlib.asynccontextmanager
async def watching(node: EtcdNode, key: str) -> AsyncIterator[asyncio.Queue[float]]:
    """A queue that gets the time at which each event of ``key`` arrived; entered once the watch is
    established."""
    await node.connect()
    stream = node.channel.stream_stream(WATCH)()
    await stream.write(wire.message((1, wire.message((1, key)))))
    if not wire.number(await stream.read(), 3):
        raise ProcessFailedError("etcd did not create the watch")

    async def events() -> AsyncIterator[int]:
        while (response := await stream.read()) is not EOF:
            yield len(wire.fields(response).get(11, []))

    async with arriving(events(), stream.cancel) as times:
        yield times
