"""Writing decisions down: many in one transaction, each on its own conditions.

A transaction takes effect as a whole, so one topic that changed meanwhile refuses all that are with it. Those
whose conditions do not hold any more by what this node knows are left out then (they are decided anew from
what they have become), and if that explains nothing, the rest is tried in halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from sava.cluster.planning import Decision
from sava.cluster.view import ClusterView
from sava.metadata.commands import Compare, Relation, Target
from sava.metadata.store import LocalView, MetadataStore

BATCH: Final = 100
"""Topics in one transaction: with two conditions and a write for each, and two conditions for each broker,
this leaves room below the store's limit of 512."""
SHOWN_S: Final = 1.0


class Writer:
    """Holds nothing between calls."""

    def __init__(self, view: ClusterView, store: MetadataStore) -> None:
        self._view = view
        self._store = store

    async def write(self, decisions: Sequence[Decision], *, term: int) -> list[Decision]:
        """Those that took effect, as soon as the view shows them: whoever decides next must not decide the
        same again. Raises Deposed, Unavailable, OutcomeUnknown."""
        done: list[Decision] = []
        for start in range(0, len(decisions), BATCH):
            done += await self._write(decisions[start : start + BATCH], term)
        if done:
            with suppress(TimeoutError):
                await self.changed(done[-1])
        return done

    async def changed(self, decision: Decision) -> None:
        """Until the view shows the topic differently from what was decided upon. Raises TimeoutError."""
        seen, name = decision.entry, decision.name

        def is_other() -> bool:
            entry = self._view.entry(name)
            return entry is None or (entry.revision, entry.spec_revision) != (
                seen.revision,
                seen.spec_revision,
            )

        await self._view.wait(is_other, timeout=SHOWN_S, about=name)

    async def _write(self, batch: Sequence[Decision], term: int) -> Sequence[Decision]:
        if not batch:
            return ()
        compare = tuple(dict.fromkeys(each for decision in batch for each in decision.compare))
        result = await self._store.txn(compare, [decision.put for decision in batch], fence_term=term)
        if result.succeeded:
            return batch
        local = self._store.local
        valid = [decision for decision in batch if all(holds(local, each) for each in decision.compare)]
        if len(valid) < len(batch):
            return await self._write(valid, term)
        if len(batch) == 1:
            return ()
        middle = len(batch) // 2
        return (*await self._write(batch[:middle], term), *await self._write(batch[middle:], term))


def holds(local: LocalView, compare: Compare) -> bool:
    """By what this node knows."""
    kv = local.get(compare.key)
    match compare.target:
        case Target.VERSION:
            value = kv.version if kv is not None else 0
        case Target.MOD_REVISION:
            value = kv.mod_revision if kv is not None else 0
        case Target.CREATE_REVISION:
            value = kv.create_revision if kv is not None else 0
        case Target.LEASE:
            value = kv.lease if kv is not None else 0
    match compare.relation:
        case Relation.EQUAL:
            return value == compare.operand
        case Relation.NOT_EQUAL:
            return value != compare.operand
        case Relation.LESS:
            return value < compare.operand
        case Relation.GREATER:
            return value > compare.operand
