"""The cluster that sends gets other brokers, until none is left of those that a link began with."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

from sava.client.blocking import Client
from sava.client.errors import ClientError
from tests.cluster.sites import NamedBrokers
from tests.spark.runner_process import Pipelines, RunnerProcess
from tests.support.brokers import BrokerProcess, Standalone
from tests.support.long import only_long
from tests.support.replication import Side
from tests.support.waiting import until

LINK = "replicate-west"
ORDERS = "/default/orders"
NAMES = [f"{ORDERS}-part-0", f"{ORDERS}-part-1"]
WAIT_S = 200.0


def publish(broker: BrokerProcess, start: int, end: int) -> None:
    with Client(broker.client_url, timeout=60) as client:
        for name in NAMES:
            with client.producer(name) as producer:
                producer.send_many([f"{name} {number}".encode() for number in range(start, end)])


@only_long("a broker is replaced, and a runner is started")
async def test_a_link_goes_on_when_all_brokers_it_began_with_are_replaced(tmp_path: Path) -> None:
    """A link knows the addresses of its beginning; its connections learn of others while some of those
    answer. The processes of its tasks do not live as long: one that is started after the change has only what
    it is told."""
    (tmp_path / "west").mkdir()
    async with NamedBrokers("east", tmp_path / "east", size=1) as east:
        with Standalone(tmp_path / "west", SAVA__CLUSTER_NAME="west") as broker:
            west = Side(broker)
            await west.ready()
            old = east.brokers[0]
            await east.create(ORDERS, partitions=2)
            await asyncio.to_thread(publish, old, 0, 100)
            await east.command("remotes", "add", "west", "--service", west.service)
            await east.command("replication", "set", "default", "--remote", "west")

            def copied() -> dict[str, list[str]]:
                with suppress(ClientError):  # there is no such topic yet
                    return {name: west.payloads(name) for name in NAMES}
                return {}

            async def has(count: int) -> bool:
                found = await asyncio.to_thread(copied)
                return all(len(found.get(name, [])) >= count for name in NAMES)

            runner = RunnerProcess(tmp_path, old.admin, "runner")
            try:
                await until(lambda: has(100), "the first are copied", timeout=WAIT_S)
                # Runners ask every two seconds which brokers there are.
                new = await east.replace(old, pause_s=4)
                for pid in runner.parts("pyspark.daemon"):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(publish, new, 100, 200)
                await until(lambda: has(200), "the link goes on", timeout=WAIT_S)
                found = await asyncio.to_thread(copied)
                assert found == {name: [f"{name} {number}" for number in range(200)] for name in NAMES}
                pipelines = Pipelines(new.admin)
                state = await asyncio.to_thread(pipelines.status, LINK)
                await asyncio.to_thread(pipelines.close)
                assert (state.state, state.restarts) == ("running", 1)
                assert "are all gone, and others have come" in runner.log.read_text()
                assert await asyncio.to_thread(runner.stop) == 0, runner.said
            finally:
                print(runner.said[-4000:])
                runner.sweep()
