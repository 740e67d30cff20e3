"""Who copies, as a broker of the other cluster sees it: the ``Replica`` service by its stub, and a sender
that goes on from whatever it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
from grpc import aio

from sava.proto import replica_pb2 as pb
from sava.proto import replica_pb2_grpc as rpc
from sava.topics.source_copier import Source, SourceRange
from tests.copying import Origins
from tests.patience import PATIENCE_S


def source_of(source: Source) -> pb.Source:
    return pb.Source(
        cluster_name=source.cluster,
        cluster_id=source.cluster_id,
        topic=source.topic,
        topic_id=source.topic_id,
    )


def request_of(stretch: SourceRange) -> pb.AppendRequest:
    batches = b"".join(batch.to_bytes() for batch in stretch.batches)
    return pb.AppendRequest(
        range=pb.SourceRange(
            start=stretch.start,
            end=stretch.end,
            begin=stretch.begin,
            batches=batches,
            offsets=stretch.offsets,
        )
    )


@asynccontextmanager
async def replica(address: str) -> AsyncIterator[Any]:
    async with aio.insecure_channel(address) as channel:
        yield rpc.ReplicaStub(channel)


class ChainStream:
    """One Append stream."""

    def __init__(self, stub: Any, topic: str, source: Source, *, timeout: float = PATIENCE_S) -> None:
        self._call = stub.Append(timeout=timeout)
        self._opening = pb.AppendRequest(open=pb.OpenSource(topic=topic, source=source_of(source)))

    async def open(self) -> pb.SourceOpened:
        await self._call.write(self._opening)
        response: pb.AppendResponse = await self._call.read()
        if response is aio.EOF:  # type: ignore[attr-defined]
            raise await self.error()
        return response.opened

    async def send(self, stretch: SourceRange) -> None:
        await self._call.write(request_of(stretch))

    async def receive(self) -> pb.SourceReceipt | pb.SourceEnded:
        response: pb.AppendResponse = await self._call.read()
        if response is aio.EOF:  # type: ignore[attr-defined]
            raise await self.error()
        kind = response.WhichOneof("kind")
        return response.receipt if kind == "receipt" else response.ended

    async def close(self) -> grpc.StatusCode:
        """Say that nothing more comes; how the stream has ended."""
        await self._call.done_writing()
        code: grpc.StatusCode = await self._call.code()
        return code

    async def error(self) -> Exception:
        return RuntimeError(f"{await self._call.code()}: {await self._call.details()}")

    def cancel(self) -> None:
        self._call.cancel()


class Sender:
    """Copies a source into a topic to its end, several stretches under way, through whichever broker it
    finds, and starts again from what it is told whenever something fails."""

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        topic: str,
        origins: Origins,
        rng: Random,
        *,
        longest: int = 200,
        is_complete: Callable[[], bool] = lambda: True,
    ) -> None:
        """``is_complete``: nothing more will be published at the source."""
        self._addresses = addresses
        self._topic = topic
        self._origins = origins
        self._rng = rng
        self._longest = longest
        self._is_complete = is_complete
        self._moved = asyncio.Event()
        self.position = 0
        """The last that it was told."""
        self.sent = self.refused = self.failed = 0

    async def beyond(self, position: int) -> None:
        """Until it was told that the chain is there."""
        while self.position < position:
            self._moved.clear()
            await self._moved.wait()

    def _told(self, position: int) -> None:
        self.position = position
        self._moved.set()

    async def run(self) -> None:
        while True:
            address = self._rng.choice(self._addresses())
            try:
                async with replica(address) as stub:
                    await self._copy(stub)
                return
            except (aio.AioRpcError, RuntimeError, asyncio.InvalidStateError):
                self.failed += 1
                await asyncio.sleep(self._rng.uniform(0, 0.2))

    async def _copy(self, stub: Any) -> None:
        while True:
            stream = ChainStream(stub, self._topic, self._origins.source)
            try:
                opened = await stream.open()
                assert opened.kept_position <= opened.position
                self._told(opened.position)
                if await self._stream(stream, opened):
                    return
                self.refused += 1
            finally:
                stream.cancel()

    async def _stream(self, stream: ChainStream, opened: pb.SourceOpened) -> bool:
        """Whether the end was reached."""
        position, under_way, is_known = opened.position, 0, opened.is_known
        while True:
            is_complete, total = self._is_complete(), len(self._origins.held)
            while position < total and under_way < 4:
                end = min(total, position + self._rng.randrange(1, self._longest))
                await stream.send(self._origins.stretch(position, end, begin=not is_known))
                position, is_known, under_way = end, True, under_way + 1
                self.sent += 1
            if not under_way:
                if is_complete:
                    return True
                await asyncio.sleep(0.01)
                continue
            answer = await stream.receive()
            if isinstance(answer, pb.SourceEnded):
                return False
            assert answer.position > self.position
            self._told(answer.position)
            under_way -= 1
