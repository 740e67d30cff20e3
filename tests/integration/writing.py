"""A program that writes exactly once: its tasks stage, its driver commits."""

from __future__ import annotations

import uuid
from types import TracebackType
from typing import Any, Self

from grpc import aio

from sava.proto import writers_pb2 as pb
from sava.proto import writers_pb2_grpc as rpc
from sava.records import RecordBatch
from sava.storage.objectstore import ObjectStore
from tests.support.staging import message, new_object
from tests.support.waiting import PATIENCE_S


class Writing:
    """Through one broker."""

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
