"""Router: who has a topic, as soon as somebody has.

The answer for a topic that is served is two dictionary lookups. While nobody has it (it moves, its broker has
just died, it was created a moment ago) the caller waits, bounded, instead of being sent away: moves are over
in less time than clients take to come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from sava.cluster.records import Registration
from sava.cluster.view import ClusterView
from sava.errors import RetryableError
from sava.topics.errors import TopicMismatch, TopicUnknown
from sava.topics.names import TopicName
from sava.topics.registry import Registry
from sava.topics.specs import OwnershipState

WAIT_S: Final = 3600.0
"""The caller's own bound is what ends a wait."""


class NotServed(RetryableError):
    """Nobody has the topic; says why."""

    def __init__(self, topic: object, reason: str) -> None:
        super().__init__(f"topic {topic} is not served: {reason}")
        self.topic, self.reason = str(topic), reason


class TopicRouter:
    """Owned by the event loop."""

    def __init__(self, view: ClusterView, registry: Registry) -> None:
        self._view = view
        self._registry = registry

    def registration(self, broker: int) -> Registration | None:
        return self._view.brokers.get(broker)

    def current(self, name: TopicName) -> int:
        """The broker that has the topic, without waiting; 0: nobody."""
        record, _ = self._view.held(name)
        is_served = record.state is OwnershipState.ASSIGNED and record.owner in self._view.brokers
        return record.owner if is_served else 0

    async def owner(self, name: TopicName, *, timeout: float = 5.0, but_not: int = 0) -> int:
        """The broker that has the topic, which may be this one; waits for it.

        ``but_not`` is one that was asked and does not have it, or could not be reached: it is the answer
        again as soon as its record or registration has changed, or else when the time is over (for then it
        has it, as far as anybody knows; a caller that only met a view behind its own gives little time).

        Raises TopicUnknown, TopicMismatch (partitioned: ask for its partitions), NotServed."""
        found = self.current(name)
        if found and found != but_not:
            return found
        refused = self._mark(name, but_not)
        try:
            async with asyncio.timeout(timeout):
                while not self._answers(name, but_not, refused):
                    await self._wait(name, lambda: self._answers(name, but_not, refused))
        except TimeoutError:
            if not self.current(name):
                raise NotServed(name, self._reason(name)) from None
        return self.current(name)

    async def _wait(self, name: TopicName, condition: Callable[[], bool]) -> None:
        """For an answer, or for the topic to come or go."""
        await self._check_exists(name)
        was_seen = self._view.has(name)
        await self._view.wait(
            lambda: condition() or self._view.has(name) != was_seen, timeout=WAIT_S, about=name
        )

    def _answers(self, name: TopicName, but_not: int, refused: tuple[int, int]) -> bool:
        found = self.current(name)
        return found != 0 and (found != but_not or self._mark(name, but_not) != refused)

    def _mark(self, name: TopicName, broker: int) -> tuple[int, int]:
        """What must change before this broker is asked again."""
        registration = self.registration(broker)
        return self._view.held(name).revision, registration.incarnation if registration is not None else 0

    async def _check_exists(self, name: TopicName) -> None:
        """What the view does not know may be new: the store is asked, so that only what does not exist is
        called unknown."""
        if self._view.has(name):
            return
        spec = await self._registry.get(name)
        if spec is None:
            raise TopicUnknown(name)
        if spec.partitions:
            raise TopicMismatch(f"topic {name} is partitioned: its messages are its partitions'")

    def _reason(self, name: TopicName) -> str:
        record = self._view.held(name).record
        if fault := self._view.fault(name):
            return fault
        match record.state:
            case OwnershipState.ASSIGNED:
                return f"its broker {record.owner} is gone"
            case OwnershipState.MOVING:
                return f"broker {record.owner} is handing it over"
            case OwnershipState.ORPHAN:
                return (
                    f"its broker {record.owner} is gone, and its journal is not recovered yet; if that "
                    "lasts, `sava journals list` tells for what it waits"
                )
            case OwnershipState.DELETING:
                return "it is being deleted"
        if not self._view.active:
            return "no broker is active"
        return f"no broker has taken it up yet{f' ({record.error})' if record.error else ''}"
