"""Unloading: moves that an operator asks for, of a topic or of all partitions of one.

A move is done for the operator when the new owner answers, and so long its downtime is counted: the
controller knows when the new owner had taken the topic, and what comes on top is how long that owner took to
describe it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from sava.api.topic_parts import TopicParts
from sava.cluster.controller import Controller
from sava.cluster.errors import NotController
from sava.errors import CallerError, SavaError
from sava.proto import topics_admin_pb2 as pb
from sava.tasks import cancelled
from sava.topics.names import TopicName

REASON: Final = "unload"
PARALLEL: Final = 8
"""Partitions of one topic that move at a time."""

_Result = tuple[TopicName, pb.TopicMove | SavaError]


class Unloading:
    """Holds nothing between calls. On the leader; raises NotController elsewhere."""

    def __init__(self, parts: TopicParts, controller: Controller, *, timeout_ms: int) -> None:
        self._parts = parts
        self._controller = controller
        self._timeout_ms = timeout_ms

    async def unload(
        self, name: TopicName, *, target: int = 0, timeout_ms: int = 0
    ) -> AsyncGenerator[pb.TopicMove, None]:
        """One result for each topic as it is done. What is refused before anything has moved is raised
        (NotController, TopicUnknown, MoveRefused, WrongState): of several partitions if it is refused for all
        of them."""
        names = await self._parts.names(name)
        refused: list[_Result] = []
        has_moved = False
        async with aclosing(self._each(names, target, timeout_ms or self._timeout_ms)) as results:
            async for topic, result in results:
                if isinstance(result, NotController) and not has_moved:
                    raise result
                if isinstance(result, SavaError):
                    refused.append((topic, result))
                    continue
                has_moved = True
                yield result
        if not has_moved:
            raise _first(refused)
        for topic, error in refused:
            owner = self._parts.view.held(topic).record.owner
            yield pb.TopicMove(topic=str(topic), from_broker_id=owner, to_broker_id=owner, error=str(error))

    async def _each(
        self, names: list[TopicName], target: int, timeout_ms: int
    ) -> AsyncGenerator[_Result, None]:
        """As they are done."""
        waiting = iter(names)
        done: asyncio.Queue[_Result] = asyncio.Queue()

        async def take_turns() -> None:
            for name in waiting:
                try:
                    result: pb.TopicMove | SavaError = await self._move(name, target, timeout_ms)
                except SavaError as error:
                    result = error
                done.put_nowait((name, result))

        turns = [asyncio.create_task(take_turns()) for _ in range(min(PARALLEL, len(names)))]
        try:
            for _ in names:
                yield await done.get()
        finally:
            # Of moves that were begun the controller sees the end, whoever waits for it.
            await cancelled(*turns)

    async def _move(self, name: TopicName, target: int, timeout_ms: int) -> pb.TopicMove:
        move = await self._controller.move(name, target=target, reason=REASON, timeout_ms=timeout_ms)
        result = pb.TopicMove(
            topic=str(name),
            from_broker_id=move.from_broker,
            to_broker_id=move.to_broker,
            downtime_ms=move.downtime_ms,
            epoch=move.epoch,
            error=move.error,
        )
        await self._ask_owner(name, result)
        return result

    async def _ask_owner(self, name: TopicName, result: pb.TopicMove) -> None:
        """Whether the move succeeded or was taken back: it counts when somebody serves the topic again."""
        taken = time.monotonic()
        try:
            (described,) = await self._parts.describe([name])
            silence = described.reason
        except SavaError as error:
            silence = str(error)
        if silence:
            result.error = result.error or f"it has moved, and nobody answers for it yet: {silence}"
            return
        result.downtime_ms += round(1000 * (time.monotonic() - taken))
        if described.HasField("next_offset"):
            result.next_offset = described.next_offset


def _first(refused: list[_Result]) -> SavaError:
    """The refusal that says most: one that a repetition does not cure."""
    errors = [error for _, error in refused if isinstance(error, SavaError)]
    return next((error for error in errors if isinstance(error, CallerError)), errors[0])
