"""The servers beside which Sava's broker is measured, on free loopback ports, with their data in the folder
of the run. Each acknowledges what is durable, as far as it can be told to."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.processes import Child, ProcessFailedError, free_ports

READY_TIMEOUT_S: Final = 20.0
POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Server:
    address: str
    child: Child
    note: str = ""
    """What its figures cannot be read without."""
    admin: str = ""
    """Of a Sava broker: its admin port."""


def nats_version(program: str = "nats-server") -> str | None:
    return _version(program, "nats-server: v")


def redis_version() -> str | None:
    return _version("redis-server", "Redis server v=")


def _version(program: str, prefix: str) -> str | None:
    if shutil.which(program) is None:
        return None
    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return output.removeprefix(prefix).split()[0] if output.startswith(prefix) else "unknown"


@contextlib.asynccontextmanager
async def nats_server(folder: Path) -> AsyncIterator[Server]:
    (port,) = free_ports(1)
    config = folder / "nats.conf"
    syncs = _nats_config(config, folder, port, "sync_interval: always")
    note = ""
    if not syncs:
        _nats_config(config, folder, port, "")
        note = "this version of NATS acknowledges before it syncs"
    async with _running(["nats-server", "-c", str(config)], folder / "nats.log", port) as child:
        yield Server(f"127.0.0.1:{port}", child, note)


def _nats_config(path: Path, folder: Path, port: int, setting: str) -> bool:
    """Whether the server takes this configuration: ``always`` came with 2.10."""
    jetstream = f'jetstream {{ store_dir: "{folder}/jetstream"\n{setting} }}'
    path.write_text(f"listen: 127.0.0.1:{port}\n{jetstream}\n", encoding="utf-8")
    return not subprocess.run(
        ["nats-server", "-t", "-c", str(path)], capture_output=True, check=False
    ).returncode


@contextlib.asynccontextmanager
async def redis_server(folder: Path) -> AsyncIterator[Server]:
    (port,) = free_ports(1)
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
    # Neither snapshots nor rewrites of its log: they would cost Redis time at moments that nobody chose.
    quiet = ["--save", "", "--auto-aof-rewrite-percentage", "0"]
    durable = ["--appendonly", "yes", "--appendfsync", "always"]
    async with _running([*command, *durable, *quiet], folder / "redis.log", port) as child:
        yield Server(f"127.0.0.1:{port}", child)


@contextlib.asynccontextmanager
async def _running(command: list[str], log: Path, port: int) -> AsyncIterator[Child]:
    """A server that listens."""
    child = Child(command, log)
    try:
        await listening(child, port)
        yield child
    finally:
        await child.stop()


async def listening(child: Child, port: int) -> None:
    """Wait until the process takes connections."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        child.check()
        with contextlib.suppress(ConnectionError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(POLL_S)
    raise ProcessFailedError(f"process {child.pid} does not listen after {READY_TIMEOUT_S:.0f} s")
