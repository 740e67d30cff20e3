"""Evictor: on the leader, ends the lease of a broker that the members agree is gone.

It is the one action that follows from a suspicion (``sava.metadata.suspicion``). Everything after it is
driven by the absence of the registration, as after a lease that has run out: topics become orphans, the
journal is fenced and recovered, other brokers take the topics up.

One write ends the lease. It names the lease that the suspect had when the doubt began, so a broker that has
registered again keeps its new one; and it names the term, so a leader that was deposed meanwhile, and whose
evidence may be old, changes nothing. A write that fails is not repeated here: while the evidence lasts, the
suspicion is confirmed again after two seconds, and the lease runs out in any case.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final

from sava.errors import SavaError
from sava.metadata.errors import Deposed, LeaseNotFound
from sava.metadata.store import MetadataStore
from sava.metadata.suspicion import Note
from sava.raft.types import NodeId
from sava.supervisor import Supervisor
from sava.tasks import cancelled

log = logging.getLogger(__name__)

WRITE_S: Final = 2.0


class Evictor:
    """Owned by the event loop."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._confirmed: dict[NodeId, Note] = {}
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.evictions: Counter[str] = Counter()
        """Leases ended, by the sign that led to it."""

    def start(self, supervisor: Supervisor) -> None:
        self._task = supervisor.repeated(self._run, name="evictions")

    async def close(self) -> None:
        await cancelled(self._task)

    def confirmed(self, note: Note) -> None:
        self._confirmed[note.node] = note
        self._woken.set()

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            confirmed, self._confirmed = self._confirmed, {}
            for note in confirmed.values():
                await self._evict(note)

    async def _evict(self, note: Note) -> None:
        sign = note.sign.name.lower()
        # Before the write: if its outcome is unknown and it was applied, no later line tells of the eviction.
        log.warning(
            "cluster: evicting broker=%d incarnation=%d sign=%s silent_ms=%d",
            *(note.node, note.lease, sign, note.silent_ms),
        )
        try:
            await self._store.revoke_lease(note.lease, fence_term=note.term, timeout=WRITE_S)
        except (LeaseNotFound, Deposed) as error:
            log.info("cluster: not evicted broker=%d incarnation=%d error=%s", note.node, note.lease, error)
        except (SavaError, TimeoutError) as error:
            log.warning(
                "cluster: eviction failed broker=%d incarnation=%d error=%s: %s",
                *(note.node, note.lease, type(error).__name__, error),
            )
        else:
            self.evictions[sign] += 1
            log.info("cluster: evicted broker=%d incarnation=%d", note.node, note.lease)
