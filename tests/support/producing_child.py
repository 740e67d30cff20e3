"""One named producer in a process of its own, which a test can stop and continue.

``python -m tests.support.producing_child URLS TOPIC NAME``. It says ``open`` when its producer is open. Each
line that it reads is a message: it answers ``ok OFFSET`` or the type of the error, and ends with its input.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Self

from sava.client import Client
from sava.errors import SavaError
from tests.support.children import PIPE, Child, start_sava
from tests.support.waiting import PATIENCE_S


class ProducingChild:
    """The parent's end."""

    def __init__(self, process: Child) -> None:
        self._process = process

    @classmethod
    async def start(cls, urls: str, topic: str, name: str) -> Self:
        arguments = (urls, topic, name)
        child = cls(
            await start_sava(*arguments, module="tests.support.producing_child", stdin=PIPE, stdout=PIPE)
        )
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


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
