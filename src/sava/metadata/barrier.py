"""ReadBarrier: many linearizable reads, one round to the majority.

A read may share a round only if the round began after the read was asked for; otherwise it could miss a
write acknowledged in between. So at most one round is under way, everybody who asks meanwhile waits for the
next, and that one serves them all. Under load a round therefore serves as many reads as arrived during the
one before it, and a lone read waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sava.metadata.errors import Unavailable
from sava.metadata.failures import error_of
from sava.metadata.peer import Failed, ReadIndex, Reply, Request

Submit = Callable[[Request, Callable[[Reply], None], float], object]
"""Ask the replica; the last argument is the deadline on the loop's clock."""


class ReadBarrier:
    """Owned by the event loop."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._waiting: list[tuple[float, asyncio.Future[None]]] = []
        self._under_way = False

    async def wait(self, timeout: float) -> None:
        """Return once this node has applied everything that was acknowledged before the call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append((loop.time() + timeout, future))
        if not self._under_way:
            self._under_way = True
            # One pass later, so that all who ask in this pass are served by the same round.
            loop.call_soon(self._begin)
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            raise Unavailable(
                f"no majority confirmed the read within {timeout:g} s; more than half of the voters that "
                "`sava cluster status` lists must run and reach each other"
            ) from None

    def _begin(self) -> None:
        readers = [(deadline, future) for deadline, future in self._waiting if not future.done()]
        self._waiting = []
        if not readers:
            self._under_way = False
            return
        futures = [future for _, future in readers]
        self._submit(
            ReadIndex(), lambda reply: self._end(futures, reply), max(deadline for deadline, _ in readers)
        )

    def _end(self, futures: list[asyncio.Future[None]], reply: Reply) -> None:
        for future in futures:
            if future.done():
                continue
            if isinstance(reply, Failed):
                future.set_exception(error_of(reply))
            else:
                future.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._begin)
        else:
            self._under_way = False
