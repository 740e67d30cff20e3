"""Kafka under the faults of the section ``failover``: nodes that are broker and KRaft controller at once,
topics of one partition with three replicas, two of which must have a message (``min.insync.replicas=2``,
``acks=all``).

Its jars are in ``KAFKA_HOME/libs`` or where ``make kafka`` puts them; its client is confluent-kafka. Kafka
acknowledges what is in the page cache of its replicas and leaves syncing to the kernel.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from bench.network import Network
from bench.processes import Child, ProcessFailedError, free_ports, stop_all
from bench.systems import CALL_S, System, until

MISSING: Final = "Kafka (make kafka, or its distribution in KAFKA_HOME; Java 17; confluent-kafka)"
LEADS: Final = re.compile(r"Completed transition to Leader\(.*?epoch=(\d+)")
FORMAT_S: Final = 60.0
HEAP: Final = "-Xmx512m"

SETTINGS: Final = {
    "process.roles": "broker,controller",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "auto.create.topics.enable": "false",
}
TUNED: Final = {
    "broker.session.timeout.ms": "2000",  # 9000 by default
    "broker.heartbeat.interval.ms": "500",  # 2000
    "controller.quorum.election.timeout.ms": "500",  # 1000
    "controller.quorum.fetch.timeout.ms": "1000",  # 2000
    "controller.quorum.election.backoff.max.ms": "500",  # 1000
    "controller.quorum.request.timeout.ms": "1000",  # 2000
    "replica.lag.time.max.ms": "2000",  # 30000
    "replica.socket.timeout.ms": "2000",  # 30000
}


def libs() -> Path | None:
    for folder in (os.environ.get("KAFKA_HOME"), Path(sys.prefix) / "kafka"):
        if folder and list((Path(folder) / "libs").glob("kafka_2.*.jar")):
            return Path(folder) / "libs"
    return None


class Kafka(System):
    name = "Kafka, defaults"
    durability = "Kafka: in the page cache of two of three"
    sender = "kafka"
    tuning: Mapping[str, str] = MappingProxyType({})

    def __init__(self, folder: Path, nodes: int, network: Network | None) -> None:
        super().__init__(folder, nodes, network)
        self._cluster = secrets.token_urlsafe(16)
        self._ports = [free_ports(2) for _ in range(nodes)]
        self._children: dict[int, Child] = {}
        self._admin: Any = None

    @classmethod
    def version(cls) -> str | None:
        found = libs()
        if found is None or shutil.which("java") is None or not importlib.util.find_spec("confluent_kafka"):
            return None
        (jar,) = found.glob("kafka_2.*[0-9].jar")
        return jar.stem.partition("-")[2]

    @property
    def addresses(self) -> str:
        return ",".join(f"{self.host(at)}:{client}" for at, (client, _) in enumerate(self._ports))

    async def __aenter__(self) -> Self:
        from confluent_kafka.admin import AdminClient

        try:
            await asyncio.gather(*(self._format(number) for number in range(self.nodes)))
            for number in range(self.nodes):
                self.start(number)
            self._admin = AdminClient({"bootstrap.servers": self.addresses, "log_level": 0})
            await until(self._is_complete, "all nodes of Kafka are registered")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_all(list(self._children.values()))

    async def _format(self, number: int) -> None:
        voters = ",".join(f"{at + 1}@{self.host(at)}:{ports[1]}" for at, ports in enumerate(self._ports))
        client, controller = (f"{self.host(number)}:{port}" for port in self._ports[number])
        settings = {
            **SETTINGS,
            **self.tuning,
            "node.id": str(number + 1),
            "controller.quorum.voters": voters,
            "listeners": f"PLAINTEXT://{client},CONTROLLER://{controller}",
            "log.dirs": str(self.folder / f"kafka-{number}"),
        }
        text = "".join(f"{key}={value}\n" for key, value in settings.items())
        self._config(number).write_text(text, encoding="utf-8")
        tool = ("kafka.tools.StorageTool", "format", "--cluster-id", self._cluster, "--config")
        child = Child(
            [*_java(), *tool, str(self._config(number))], self.folder / f"kafka-{number}-format.log"
        )
        try:
            await until(child.has_ended, "Kafka's storage is formatted", FORMAT_S)
        finally:
            await child.stop()
        if not (self.folder / f"kafka-{number}" / "meta.properties").exists():
            raise ProcessFailedError(f"Kafka's storage was not formatted: {child.log.read_text()[-1000:]}")

    def _config(self, number: int) -> Path:
        return self.folder / f"kafka-{number}.properties"

    def _log(self, number: int) -> Path:
        return self.folder / f"kafka-{number}.log"

    def start(self, number: int) -> None:
        command = [*self.within(number), *_java(), "kafka.Kafka", str(self._config(number))]
        self._children[number] = Child(command, self._log(number))

    def child(self, number: int) -> Child:
        return self._children[number]

    async def create(self) -> None:
        from confluent_kafka.admin import NewTopic

        made = [
            NewTopic(topic, 1, replica_assignment=[self._replicas(at)])
            for at, topic in enumerate(self.topics)
        ]
        for future in self._admin.create_topics(made, request_timeout=CALL_S).values():
            await asyncio.wrap_future(future)

    def _replicas(self, topic: int) -> list[int]:
        """The first one is the preferred leader: each node is that of a third of the topics."""
        return [(topic + each) % self.nodes + 1 for each in range(3)]

    async def _metadata(self) -> Any:
        return await asyncio.to_thread(self._admin.list_topics, timeout=CALL_S)

    async def _is_complete(self) -> bool:
        for child in self._children.values():
            child.check()
        try:
            metadata = await self._metadata()
        except Exception:  # noqa: BLE001 - no node answers yet
            return False
        return len(metadata.brokers) == self.nodes and all(
            len(metadata.topics[topic].partitions[0].isrs) == 3
            for topic in self.topics
            if topic in metadata.topics
        )

    async def leader(self) -> int:
        """The active controller. Clients are told of a random one; the nodes' logs know."""
        epochs = {
            number: max(map(int, LEADS.findall(self._log(number).read_text(errors="replace"))), default=-1)
            for number in range(self.nodes)
        }
        return max(epochs, key=lambda number: epochs[number])

    async def owners(self) -> dict[str, int]:
        topics = (await self._metadata()).topics
        return {topic: topics[topic].partitions[0].leader - 1 for topic in self.topics}

    async def bring(self, topic: str, to: int) -> None:
        raise ProcessFailedError(f"node {to + 1} is not the preferred leader of {topic}")

    async def healthy(self) -> None:
        """And each topic is led by its preferred leader, so that every node leads a third of them."""
        from confluent_kafka import ElectionType, TopicPartition

        await until(self._is_complete, "all replicas of Kafka's topics are in sync")

        async def are_led() -> bool:
            wanted = {topic: self._replicas(at)[0] - 1 for at, topic in enumerate(self.topics)}
            if await self.owners() == wanted:
                return True
            partitions = [TopicPartition(topic, 0) for topic in self.topics]
            # confluent-kafka 2.16 refuses the timeouts that it documents for this call.
            future = self._admin.elect_leaders(ElectionType.PREFERRED, partitions)
            await asyncio.wait_for(asyncio.wrap_future(future), CALL_S)
            return False

        await until(are_led, "Kafka's topics are led by their preferred leaders")


class TunedKafka(Kafka):
    name = "Kafka, tuned"
    sender = "kafka-tuned"
    tuning = TUNED


def _java() -> list[str]:
    # The property is of log4j, which a distribution logs by; slf4j-simple says the same by default.
    return ["java", HEAP, "-Dorg.apache.logging.log4j.level=INFO", "-cp", f"{libs()}/*"]
