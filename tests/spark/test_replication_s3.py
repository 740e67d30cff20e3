"""Replication of a cluster whose segments are in S3: history is read there, by the runner, and what comes is
read from the broker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from sava.client.errors import ClientError
from sava.client.loop_thread import LoopThread
from sava.proto import topics_admin_pb2 as pb
from tests.spark.conftest import s3_environment
from tests.spark.runner_process import RunnerProcess
from tests.support.brokers import PLAIN, Standalone
from tests.support.long import only_long
from tests.support.objects import S3Server
from tests.support.replication import Side

NAMES = ["/default/orders-part-0", "/default/orders-part-1"]
HISTORY, TAIL = 8000, 200
SIZE = 1000
"""Of a message, by chance: of each partition there is more than is copied without a look at segments."""


class Counting:
    """A way to the server on which the bytes of its answers are counted."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.answered = 0
        self._upstream = port
        self._loop = LoopThread("way to S3")
        self._server = self._loop.run(self._open())

    async def _open(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        passing = [
            asyncio.create_task(self._pass(reader, up_writer, is_answer=False)),
            asyncio.create_task(self._pass(up_reader, writer, is_answer=True)),
        ]
        await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        for task in passing:
            task.cancel()
        writer.transport.abort()
        up_writer.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        while data := await reader.read(1 << 16):
            if is_answer:
                self.answered += len(data)
            writer.write(data)
            await writer.drain()

    def close(self) -> None:
        self._loop.run(self._closed())
        self._loop.close()

    async def _closed(self) -> None:
        self._server.close()


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    (tmp_path / "s3").mkdir()
    server = S3Server(tmp_path / "s3")
    server.start()
    yield server
    server.kill()


@only_long("an S3 server, and a runner")
def test_history_in_s3_is_copied_by_a_runner_and_then_the_tail(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("east", "west"):
        (tmp_path / name).mkdir()
    sender = Standalone(
        tmp_path / "east",
        PLAIN,
        SAVA__CLUSTER_NAME="east",
        SAVA__STORAGE__UPLOAD_INTERVAL_SECONDS="1",
        **s3_environment(s3),
    )
    sender.add_arguments("--storage-url", f"{s3.url}/east")
    loop = LoopThread("clusters")
    way = Counting(s3.port)
    with sender, Standalone(tmp_path / "west", SAVA__CLUSTER_NAME="west") as receiver:
        east, west = Side(sender), Side(receiver)
        loop.run(east.ready())
        loop.run(west.ready())
        loop.run(east.create("/default/orders", 2))
        chance = random.Random(7)
        payloads = {
            name: [f"{number} {chance.randbytes(SIZE // 2).hex()}" for number in range(HISTORY + TAIL)]
            for name in NAMES
        }
        for name in NAMES:
            for start in range(0, HISTORY, 1000):
                east.publish(name, payloads[name][start : start + 1000])

        def is_stored(name: str) -> bool:
            found = loop.run(east.call("topics", "DescribeTopic", pb.DescribeTopicRequest(name=name)))
            return bool(found.stored_offset == found.next_offset == HISTORY)

        def copied(name: str) -> list[str]:
            try:
                return west.payloads(name)
            except ClientError:
                return []  # there is no such topic yet

        loop.run(east.add("west", west.service))
        for name, value in s3_environment(s3).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.options_behind(way.port)["endpoint"])
        runner = RunnerProcess(tmp_path, east.broker.admin, "runner")
        try:
            runner.reached(lambda: all(map(is_stored, NAMES)), "history is in segments")
            loop.run(east.replicate("default"))
            runner.reached(lambda: all(len(copied(name)) >= HISTORY for name in NAMES), "history is copied")
            # Hexadecimal digits take half of their size, if they are compressed well.
            assert way.answered > len(NAMES) * HISTORY * SIZE / 2, "the runner has read segments itself"
            read = way.answered
            for name in NAMES:
                east.publish(name, payloads[name][HISTORY:])
            runner.reached(
                lambda: all(len(copied(name)) >= HISTORY + TAIL for name in NAMES), "the tail is copied"
            )
            assert way.answered == read, "what has just come is read from the broker"
            for name in NAMES:
                assert copied(name) == payloads[name]
            assert runner.stop() == 0, runner.said
        finally:
            runner.sweep()
            way.close()
            loop.close()
