"""Clients that tests drive step by step: a producer in a process of its own, and a program that writes
exactly once.

``python -m tests.support.clients URLS TOPIC NAME`` is the producer. It says ``open`` when it is open. Each
line that it reads is a message: it answers ``ok OFFSET`` or the type of the error, and ends with its input.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import uuid
from types import TracebackType
from typing import Any, Self

from grpc import aio

from sava.client import Client
from sava.errors import SavaError
from sava.proto import writers_pb2 as pb
from sava.proto import writers_pb2_grpc as rpc
from sava.records import RecordBatch
from sava.storage.objectstore import ObjectStore
from tests.support.objects import message, new_object
from tests.support.processes import PIPE, Child, start_sava
from tests.support.waiting import PATIENCE_S


class ProducingChild:
    """One named producer in a process of its own, which a test can stop and continue: the parent's end."""

    def __init__(self, process: Child) -> None:
        self._process = process

    @classmethod
    async def start(cls, urls: str, topic: str, name: str) -> Self:
        arguments = (urls, topic, name)
        child = cls(await start_sava(*arguments, module="tests.support.clients", stdin=PIPE, stdout=PIPE))
        assert await child.heard() == "open"
        return child

    def say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode() + b"\n")

    async def heard(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(2 * PATIENCE_S):
            return (await self._process.stdout.readline()).decode().strip()

    async def send(self, text: str) -> str:
        self.say(text)
        return await self.heard()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def proceed(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def close(self) -> None:
        """Close the producer and end, as a program does that has nothing left to send."""
        self.proceed()
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


async def _main(urls: str, topic: str, name: str) -> None:
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with (
        Client(urls.split(","), timeout=PATIENCE_S) as client,
        client.producer(topic, name=name, linger_ms=0, timeout=PATIENCE_S) as producer,
    ):
        print("open", flush=True)
        while line := await lines.readline():
            try:
                print("ok", await producer.send(line.strip()), flush=True)
            except SavaError as error:
                print(type(error).__name__, flush=True)


# -- exactly once ------------------------------------------------------------------------------


class Writing:
    """A program that writes exactly once, through one broker: its tasks stage, its driver commits."""

    def __init__(self, url: str, writer: str = "", *, run: str = "run-1") -> None:
        self._channel = aio.insecure_channel(url.removeprefix("http://"))
        self._stub: Any = rpc.WritersStub(self._channel)
        self.writer = writer or f"w-{uuid.uuid4().hex[:8]}"
        self.run = run
        self._where = pb.StagingResponse()
        self.objects: ObjectStore

    async def __aenter__(self) -> Self:
        self._where = await self._stub.Staging(pb.StagingRequest(writer=self.writer), timeout=PATIENCE_S)
        self.objects = ObjectStore.open(self._where.store_url)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    @property
    def expires_s(self) -> int:
        return self._where.expires_s

    async def stage(self, **parts: list[RecordBatch]) -> list[pb.Section]:
        """One object, as a task makes it."""
        key, data, sections = new_object(
            f"{self._where.prefix}/{uuid.uuid4().hex}",
            {f"/default/{topic}": batches for topic, batches in parts.items()},
        )
        await self.objects.put_new(key, data)
        return [message(topic, section) for topic, section in sections]

    async def commit(
        self,
        number: int,
        sections: list[pb.Section],
        *,
        run: str = "",
        query: str = "q",
        timeout: float = PATIENCE_S,
    ) -> pb.CommitResponse:
        request = pb.CommitRequest(
            writer=self.writer, run=run or self.run, query=query, batch=number, sections=sections
        )
        response: pb.CommitResponse = await self._stub.Commit(request, timeout=timeout)
        return response

    async def staged(self) -> list[str]:
        return [info.key async for info in self.objects.list("staging")]


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
