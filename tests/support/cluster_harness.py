"""Several brokers in processes of their own, over one object store: what moves topics needs.

async with Brokers(3, tmp_path) as cluster:
    await cluster.create("/default/orders")
    moved = await cluster.unload("/default/orders")
    (await cluster.owner("/default/orders")).kill()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from sava.api.admin_client import PLAIN
from sava.client import Client
from sava.config import Auth
from sava.errors import SavaError
from sava.proto import brokers_pb2 as brokers_pb
from sava.proto import topics_admin_pb2 as pb
from tests.support.brokers import BrokerProcess, Cluster, sava
from tests.support.waiting import PATIENCE_S

CALL_S = PATIENCE_S / 2
"""A call that was lost on its way can be repeated before patience is over."""
REGISTRATION_TTL_MS = 3000
"""Half of the default: most scenarios wait until a broker is taken for dead, and few are about how long."""


async def until(condition: Callable[[], Awaitable[bool]], what: str, *, timeout: float = PATIENCE_S) -> None:
    """Ask again and again; brokers have no event for everything that can be asked of them."""
    deadline = time.monotonic() + timeout
    failure: SavaError | None = None
    while True:
        try:
            if await condition():
                return
        except SavaError as error:
            failure = error
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what} ({failure})"
        await asyncio.sleep(0.05)


class Brokers(Cluster):
    """Initialized and registered when entered. Topics are uploaded, and so at rest, soon after they are
    idle."""

    def __init__(
        self,
        size: int,
        directory: Path,
        *,
        links: bool = False,
        auth: Auth = PLAIN,
        upload_interval_s: int = 1,
        **settings: dict[str, Any],
    ) -> None:
        super().__init__(size, directory, links=links, auth=auth)
        written = yaml.safe_load(self._config.read_text())
        written["storage"] = {"upload_interval_seconds": upload_interval_s}
        written["cluster"] = {"registration_ttl_ms": REGISTRATION_TTL_MS}
        for section, values in settings.items():
            written[section] = {**written.get(section, {}), **values}
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

    async def create(self, name: str, *, reliable: bool = True, partitions: int = 0) -> pb.TopicDescription:
        client = self.running[0].client
        request = pb.CreateTopicRequest(name=name, reliable=reliable, partitions=partitions)
        described: pb.TopicDescription = await client.call(client.topics.CreateTopic, request, timeout=CALL_S)
        return described

    async def describe(self, name: str, *, through: BrokerProcess | None = None) -> pb.TopicDescription:
        client = (through or self.running[0]).client
        request = pb.DescribeTopicRequest(name=name)
        described: pb.TopicDescription = await client.call(
            client.topics.DescribeTopic, request, timeout=CALL_S
        )
        return described

    async def list_topics(self) -> dict[str, pb.TopicSummary]:
        client = self.running[0].client
        response = await client.call(client.topics.ListTopics, pb.ListTopicsRequest(), timeout=CALL_S)
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
    ) -> list[pb.TopicMove]:
        """The moves; raises what the broker refused. A move that a busy machine could not make in the two
        seconds for which publishers are held was taken back, and is repeated."""
        client = (through or self.running[0]).client
        request = pb.UnloadTopicRequest(name=name, to_broker_id=await self.id_of(to) if to is not None else 0)
        async with asyncio.timeout(60):
            while True:
                repeats -= 1
                moves = [move async for move in client.stream(client.topics.UnloadTopic, request, timeout=60)]
                if not repeats or len(moves) != 1 or "of holding its publishers" not in moves[0].error:
                    return moves

    async def served(
        self, name: str, *, by_other_than: int = 0, timeout: float = PATIENCE_S
    ) -> pb.TopicDescription:
        """Until somebody (else) serves the topic."""
        described = pb.TopicDescription()

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
