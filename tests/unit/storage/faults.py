"""Edges that fail on purpose: an obstore backend and a metadata store, each around a real one.

A fault is planned for the next call of a method; calls without a plan go through. What is planned and not met
is an error of the test.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import GenericError
from obstore.store import ObjectStoreMethods

from sava.metadata.errors import OutcomeUnknown, Unavailable
from tests.support.memory_store import MemoryStore

Call = Callable[[], Awaitable[Any]]
Fault = Callable[[Call], Awaitable[Any]]


def refuse(error: BaseException) -> Fault:
    """Nothing happens, and the caller gets ``error``."""

    async def fault(call: Call) -> Any:
        raise error

    return fault


def lose_answer(error: BaseException) -> Fault:
    """It happens, and the caller gets ``error``."""

    async def fault(call: Call) -> Any:
        await call()
        raise error

    return fault


async def hang(call: Call) -> Any:
    await asyncio.Event().wait()


async def pass_through(call: Call) -> Any:
    return await call()


def cut(keep: int) -> Fault:
    """Of what is read, only the first bytes come."""

    async def fault(call: Call) -> Any:
        parts: Sequence[Any] = await call()
        return [obstore.Bytes(part.to_bytes()[:keep]) for part in parts]

    return fault


def after(action: Callable[[], Awaitable[Any]]) -> Fault:
    """Something else happens between the call and its answer."""

    async def fault(call: Call) -> Any:
        answer = await call()
        await action()
        return answer

    return fault


def before(action: Callable[[], Awaitable[Any]]) -> Fault:
    async def fault(call: Call) -> Any:
        await action()
        return await call()

    return fault


BROKEN = GenericError("the connection was reset")
UNAVAILABLE = Unavailable("no leader")
UNKNOWN = OutcomeUnknown("the answer was lost")


class _Faulty:
    _methods: frozenset[str]

    def __init__(self, real: Any) -> None:
        self._real = real
        self._planned: dict[str, deque[Fault]] = defaultdict(deque)
        self.calls: list[str] = []
        self.bytes_read = 0

    def plan(self, method: str, *faults: Fault) -> None:
        self._planned[method].extend(faults)

    @property
    def is_done(self) -> bool:
        return not any(self._planned.values())

    def __getattr__(self, method: str) -> Any:
        real = getattr(self._real, method)
        if method not in self._methods:
            return real

        async def call(*args: Any, **options: Any) -> Any:
            self.calls.append(method)
            fault = self._planned[method].popleft() if self._planned[method] else pass_through
            # Others may run before the call and before its answer, as they may with a real edge.
            await asyncio.sleep(0)
            answer = await fault(lambda: real(*args, **options))
            await asyncio.sleep(0)
            if method == "get_ranges_async":
                self.bytes_read += sum(map(len, answer))
            return answer

        return call


if TYPE_CHECKING:
    _Backend = ObjectStoreMethods
else:  # its methods would hide those of the backend that is inside
    _Backend = object


class FaultyBackend(_Faulty, _Backend):
    _methods = frozenset({"put_async", "get_async", "get_ranges_async", "head_async", "delete_async"})


class FaultyMetadata(_Faulty):
    """By default around an empty ``MemoryStore``, which is the real state machine."""

    _methods = frozenset({"get", "range", "txn"})

    def __init__(self, real: Any = None) -> None:
        super().__init__(real or MemoryStore())
