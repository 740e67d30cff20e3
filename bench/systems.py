"""The clusters that the section ``failover`` puts under faults, seen alike: nodes that can be killed, one of
which leads the metadata, and topics of which each has an owner among the nodes.

Each keeps three copies of a message and acknowledges it when two have it; ``durability`` says what *have*
means there. Each runs in the namespaces of a ``Network`` where that is possible, and on loopback otherwise.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, Self

from bench.network import Network
from bench.processes import Child, ProcessFailedError
from bench.setting import ROOT
from bench.trio import Trio
from sava.proto import ledgers_pb2 as pb

HEALTHY_S: Final = 90.0
POLL_S: Final = 0.05
CALL_S: Final = 10.0
COPIES: Final = 3
TOPICS: Final = [f"failover-{number}" for number in range(6)]
"""Not partitioned. Sava's are in its default namespace."""


class System(ABC):
    """Use as an async context manager; entered when every node takes part."""

    name: str
    """As rows call it."""
    durability: str
    """What an acknowledgement says."""
    sender: str
    """Which of ``bench.workers.steady`` sends to it; the name by which ``--system`` chooses it."""

    def __init__(self, folder: Path, nodes: int, network: Network | None) -> None:
        self.folder = folder
        self.nodes = nodes
        self.network = network

    @classmethod
    @abstractmethod
    def version(cls) -> str | None:
        """None: it is not installed."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...

    @property
    def topics(self) -> list[str]:
        return TOPICS

    @property
    @abstractmethod
    def addresses(self) -> str: ...

    @abstractmethod
    def child(self, number: int) -> Child: ...

    @property
    def logs(self) -> list[Path]:
        """Files from which ``bench.timeline`` can tell what happened; none: it cannot."""
        return []

    def id_of(self, number: int) -> int:
        """By which the logs call a node."""
        return number

    @abstractmethod
    def start(self, number: int) -> None:
        """Start a node that was killed, with the data that it had."""

    @abstractmethod
    async def create(self) -> None:
        """Make the topics."""

    @abstractmethod
    async def leader(self) -> int: ...

    @abstractmethod
    async def owners(self) -> dict[str, int]: ...

    @abstractmethod
    async def bring(self, topic: str, to: int) -> None:
        """Make a node the owner; returns when it is."""

    @abstractmethod
    async def healthy(self) -> None:
        """Every node takes part again, and every topic has all its copies."""

    def host(self, number: int) -> str:
        return self.network.host(number) if self.network is not None else "127.0.0.1"

    def within(self, number: int) -> list[str]:
        return self.network.within(number) if self.network is not None else []


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = HEALTHY_S) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > deadline:
            raise ProcessFailedError(f"not after {seconds:.0f} s: {what}")
        await asyncio.sleep(POLL_S)


class Sava(System):
    """Brokers with default settings over one object store, a folder that all of them reach."""

    name = "Sava"
    durability = "synced on two of three disks"
    sender = "sava"

    def __init__(self, folder: Path, nodes: int, network: Network | None) -> None:
        super().__init__(folder, nodes, network)
        self._trio = Trio(folder, nodes=nodes, network=network)
        self._running = AsyncExitStack()

    @classmethod
    def version(cls) -> str:
        """By the tree of its source: other files of the repository may change between two rounds."""
        return _git("rev-parse", "--short=10", "HEAD:src") + (
            " with changes" if _git("status", "--porcelain", "--", "src") else ""
        )

    async def __aenter__(self) -> Self:
        await self._running.enter_async_context(self._trio)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    @property
    def topics(self) -> list[str]:
        return [f"/default/{topic}" for topic in TOPICS]

    @property
    def addresses(self) -> str:
        return self._trio.addresses

    def child(self, number: int) -> Child:
        return self._trio.brokers[number].child

    @property
    def logs(self) -> list[Path]:
        return [broker.child.log for broker in self._trio.brokers]

    def id_of(self, number: int) -> int:
        return self._trio.id_of(self._trio.brokers[number])

    def start(self, number: int) -> None:
        self._trio.brokers[number].start()

    async def create(self) -> None:
        for topic in self.topics:
            await self._trio.create(topic, reliable=True)

    async def leader(self) -> int:
        return self._trio.brokers.index(await self._trio.leading_broker())

    async def owners(self) -> dict[str, int]:
        numbers = {self._trio.id_of(broker): at for at, broker in enumerate(self._trio.brokers)}
        listed = await self._trio.summaries(self._trio.brokers[0])
        return {each.name: numbers[each.broker_id] for each in listed if each.broker_id in numbers}

    async def bring(self, topic: str, to: int) -> None:
        await self._trio.unload(topic, to=self._trio.brokers[to])

    async def healthy(self) -> None:
        for broker in self._trio.brokers:
            await broker.disconnect()  # a channel to a node that was away waits before it tries again
        await self._trio.ready()
        await self._trio.complete()
        await until(self._is_mirrored, f"every journal is on {COPIES} disks of registered brokers")

    async def _is_mirrored(self) -> bool:
        request = pb.ListLedgersRequest()
        response = await self._trio.brokers[0].ledgers.ListLedgers(request, timeout=CALL_S)
        ids = {self._trio.id_of(broker) for broker in self._trio.brokers}
        return ids == {each.broker_id for each in response.ledgers if _is_complete(each)}


def _is_complete(journal: pb.Ledger) -> bool:
    there = {member.storage_id for member in journal.members if member.broker_id}
    written = set(journal.fragments[-1].storage_ids) if journal.fragments else set()
    return journal.state == "open" and len(written) >= COPIES and written <= there


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if not done.returncode else "unknown"
