"""Tending replication, on the leader: links are settled when something has changed, and every few seconds in
any case; ends of partitions that nobody copies are asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from sava.cluster.controller import Leadership
from sava.cluster.errors import NotController
from sava.cluster.view import ClusterView
from sava.errors import SavaError
from sava.metadata.errors import Deposed
from sava.replication.links import Links
from sava.replication.reports import Reports
from sava.replication.status import Statuses
from sava.supervisor import Supervisor
from sava.tasks import cancelled
from sava.topics.names import TopicName

log = logging.getLogger(__name__)

TICK_S: Final = 0.5
IDLE_S: Final = 10.0
"""How often it settles when nothing is known to have changed."""
RETRY_S: Final = 2.0
LOOK_S: Final = 5.0


class ReplicationMaintenance:
    """Owned by the event loop."""

    def __init__(
        self,
        view: ClusterView,
        links: Links,
        reports: Reports,
        statuses: Statuses,
        leadership: Leadership,
    ) -> None:
        self._view = view
        self._links = links
        self._reports = reports
        self._statuses = statuses
        self._leadership = leadership
        self._is_changed = True
        self._task: asyncio.Task[None] | None = None
        view.listen(self._on_change)

    def start(self, supervisor: Supervisor) -> None:
        self._task = supervisor.repeated(self._run, name="replication")

    async def close(self) -> None:
        await cancelled(self._task)

    def _on_change(self, topics: frozenset[TopicName] | None) -> None:
        self._is_changed = True

    async def _run(self) -> None:
        term = 0
        while True:
            leading = self._leadership.term()
            if leading and leading != term:
                self._reports.begin()
                self._is_changed = True
            term = leading
            if term and self._view.is_ready:
                await self._lead(term)
            await asyncio.sleep(TICK_S)

    async def _lead(self, term: int) -> None:
        """Until this node does not lead in this term any more, or something goes wrong."""
        settle_at = look_at = 0.0
        reason = ""
        while self._leadership.term() == term:
            now = time.monotonic()
            try:
                if self._is_changed or now >= settle_at:
                    self._is_changed = False
                    is_done = await self._links.settle()
                    self._reports.forget(topic.name for topic in self._links.topics())
                    settle_at = now + (IDLE_S if is_done else RETRY_S)
                if now >= look_at:
                    look_at = now + LOOK_S
                    await self._statuses.look()
                reason = ""
            except (Deposed, NotController):
                return
            except (SavaError, TimeoutError) as error:
                settle_at = now + RETRY_S
                if str(error) != reason:
                    reason = str(error)
                    log.warning("replication: cannot go on error=%s: %s", type(error).__name__, error)
            await asyncio.sleep(TICK_S)
