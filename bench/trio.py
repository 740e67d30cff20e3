"""Three broker processes over one object store, and what is asked of them about topics."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final, Self

from bench.broker_process import Broker
from bench.network import Network
from bench.processes import ProcessFailedError
from bench.sava import NODES, SavaCluster
from sava.proto import brokers_pb2 as brokers_pb
from sava.proto import topics_admin_pb2 as pb

READY_S: Final = 30.0
POLL_S: Final = 0.02
CALL_S: Final = 60.0


class Trio(SavaCluster):
    """Entered when all three are registered, in the eyes of each."""

    def __init__(
        self, folder: Path, *, nodes: int = NODES, network: Network | None = None, **storage: object
    ) -> None:
        super().__init__(folder, hosted=False, nodes=nodes, network=network, **storage)
        self._ids: dict[int, Broker] = {}

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            await self.complete()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    @property
    def addresses(self) -> str:
        return ",".join(broker.client for broker in self.brokers)

    async def complete(self) -> None:
        """Until every broker sees all three as active."""
        for broker in self.brokers:
            self._ids[(await broker.answering()).self_node_id] = broker
        deadline = time.monotonic() + READY_S
        for broker in self.brokers:
            while await self._active(broker) != self._ids.keys():
                if time.monotonic() > deadline:
                    raise ProcessFailedError(f"broker {broker.name} does not see all three")
                await asyncio.sleep(POLL_S)

    async def _active(self, broker: Broker) -> set[int]:
        response = await broker.brokers.ListBrokers(brokers_pb.ListBrokersRequest(), timeout=CALL_S)
        return {each.broker_id for each in response.brokers if each.status == "active"}

    def id_of(self, broker: Broker) -> int:
        return next(number for number, each in self._ids.items() if each is broker)

    async def followers(self) -> list[Broker]:
        leader = await self.leading_broker()
        return [broker for broker in self.brokers if broker is not leader]

    # -- topics ----------------------------------------------------------------------------------

    async def create(self, name: str, *, reliable: bool, partitions: int = 0) -> None:
        request = pb.CreateTopicRequest(name=name, reliable=reliable, partitions=partitions)
        await self.brokers[0].topics.CreateTopic(request, timeout=CALL_S)

    async def summaries(self, through: Broker) -> list[pb.TopicSummary]:
        response = await through.topics.ListTopics(pb.ListTopicsRequest(), timeout=CALL_S)
        return list(response.topics)

    async def unload(self, name: str, *, to: Broker | None = None) -> None:
        """Returns when it is served elsewhere; by default where the leader thinks best."""
        leader = await self.leading_broker()
        request = pb.UnloadTopicRequest(name=name, to_broker_id=self.id_of(to) if to is not None else 0)
        call: Any = leader.topics.UnloadTopic(request, timeout=CALL_S)
        (move,) = [move async for move in call]
        if move.error:
            raise ProcessFailedError(f"{name} did not move: {move.error}")

    # -- modes -----------------------------------------------------------------------------------

    async def drain(self, broker: Broker) -> int:
        """Returns when it is over: the number of topics that moved."""
        leader = await self.leading_broker()
        request = brokers_pb.DrainBrokerRequest(broker_id=self.id_of(broker))
        call: Any = leader.brokers.DrainBroker(request, timeout=CALL_S)
        *_, progress = [each async for each in call]
        if not progress.done or progress.failed or progress.pending:
            raise ProcessFailedError(f"{broker.name} was not drained: {progress}")
        return int(progress.succeeded)

    async def activate(self, broker: Broker) -> None:
        leader = await self.leading_broker()
        request = brokers_pb.ActivateBrokerRequest(broker_id=self.id_of(broker), reason="benchmark")
        await leader.brokers.ActivateBroker(request, timeout=CALL_S)
