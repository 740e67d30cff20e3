"""Calls to the metadata store: callers that each wait for their answer, or calls at a rate."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any, Final, Literal

from sava.api.admin_client import AdminClient
from sava.errors import Outcome, RetryableError, SavaError
from sava.load.figures import Meter
from sava.load.producing import LoadPace
from sava.metadata.errors import OutcomeUnknown
from sava.peers.error_mapping import BrokerUnreachable
from sava.proto import admin_pb2 as pb

PREFIX: Final = "/bench/"
MAX_KEYS: Final = 10_000
"""As many as are deleted at once when the run is over."""

Operation = Literal["put", "get", "local-get", "txn"]


class KeysLeft(RetryableError):
    """A run could not delete its keys."""

    outcome = Outcome.PARTLY


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataCalls:
    run: int
    operation: Operation = "put"
    callers: int = 16
    keys: int = 1000
    value_size: int = 128
    count: int | None = None
    seconds: float | None = None
    rate: float | None = None

    @property
    def prefix(self) -> str:
        return f"{PREFIX}{self.run:08x}/"


class Callers:
    """Owned by one event loop."""

    def __init__(self, client: AdminClient, load: MetadataCalls, meter: Meter) -> None:
        self._client = client
        self._load = load
        self._meter = meter
        self._left = load.count
        self._failures_in_a_row = 0
        self._may_have_written = False
        self._value = random.randbytes(load.value_size)

    async def run(self) -> None:
        """The keys are gone afterwards. Raises KeysLeft if they are not."""
        load = self._load
        try:
            if load.operation in ("get", "local-get"):
                await self._fill()
            await self._call_all()
        finally:
            if self._may_have_written:
                await self._delete()

    async def _delete(self) -> None:
        prefix = self._load.prefix
        try:
            await self._client.call(self._client.meta.Delete, pb.DeleteRequest(key=prefix, prefix=True))
        except SavaError as error:
            raise KeysLeft(
                f"keys below {prefix} were not deleted: {error}; `sava meta delete {prefix} --prefix` does it"
            ) from error

    async def _call_all(self) -> None:
        load = self._load
        pace = LoadPace(load.rate, load.seconds)
        self._meter.begin()
        await asyncio.gather(*(self._call(pace) for _ in range(load.callers)))

    async def _fill(self) -> None:
        numbers = iter(range(self._load.keys))

        async def fill() -> None:
            for number in numbers:
                await self._put(self._key(number))

        await asyncio.gather(*(fill() for _ in range(self._load.callers)))

    async def _call(self, pace: LoadPace) -> None:
        operation = self._operation()
        while self._left != 0 and not self._is_hopeless(pace):
            if self._left is not None:
                self._left -= 1
            due = await pace.due(1)
            if not due:
                return
            try:
                await operation(self._key(random.randrange(self._load.keys)))
            except (RetryableError, OutcomeUnknown) as error:
                self._meter.fail(1, error)
                self._failures_in_a_row += 1
            else:
                self._meter.add(1, self._load.value_size)
                self._meter.latency.record((time.time_ns() - due[0]) // 1000)
                self._failures_in_a_row = 0

    def _is_hopeless(self, pace: LoadPace) -> bool:
        """Nothing is answered, and the time is over, or there is none: what was due would fail one call after
        the other, each when its time is up."""
        if not self._failures_in_a_row:
            return False
        return pace.is_over or (
            self._load.seconds is None and self._failures_in_a_row >= 2 * self._load.callers
        )

    def _operation(self) -> Any:
        return {"put": self._put, "get": self._get, "local-get": self._local_get, "txn": self._txn}[
            self._load.operation
        ]

    def _key(self, number: int) -> str:
        return f"{self._load.prefix}{number:06}"

    async def _put(self, key: str) -> None:
        await self._write(self._client.meta.Put, pb.PutRequest(key=key, value=self._value))

    async def _get(self, key: str) -> None:
        await self._client.call(self._client.meta.Get, pb.GetRequest(key=key))

    async def _local_get(self, key: str) -> None:
        await self._client.call(self._client.meta.Get, pb.GetRequest(key=key, local=True))

    async def _txn(self, key: str) -> None:
        """A compare and a put, whichever way the comparison goes."""
        put = pb.Operation(put=pb.Operation.Put(key=key, value=self._value))
        compare = pb.Compare(key=key, target=pb.Compare.VERSION, relation=pb.Compare.EQUAL, operand=0)
        request = pb.TxnRequest(compare=[compare], then=[put], otherwise=[put])
        await self._write(self._client.meta.Txn, request)

    async def _write(self, method: Any, request: Any) -> None:
        try:
            await self._client.call(method, request)
        except BrokerUnreachable:
            raise
        except (RetryableError, OutcomeUnknown, asyncio.CancelledError):
            self._may_have_written = True  # the outcome is unknown
            raise
        self._may_have_written = True
