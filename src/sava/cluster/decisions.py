"""Writing decisions down: many in one log entry, each on its own conditions.

Each decision is a transaction of its own; those of one moment share entries (``metadata.batching``). A topic
that changed meanwhile refuses its own and no other: it is decided again, from what it has become.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from sava.cluster.planning import Decision
from sava.cluster.view import ClusterView
from sava.metadata.commands import Compare, Relation, Target
from sava.metadata.store import LocalView, MetadataStore

SHOWN_S: Final = 1.0


class DecisionWriter:
    """Holds nothing between calls."""

    def __init__(self, view: ClusterView, store: MetadataStore) -> None:
        self._view = view
        self._store = store

    async def write(self, decisions: Sequence[Decision], *, term: int) -> list[Decision]:
        """Those that took effect, as soon as the view shows them: whoever decides next must not decide the
        same again. Raises Deposed, Unavailable, OutcomeUnknown."""
        tried = await asyncio.gather(
            *(self._write(decision, term) for decision in decisions), return_exceptions=True
        )
        done = [decision for decision, is_done in zip(decisions, tried, strict=True) if is_done is True]
        if done:
            with suppress(TimeoutError):
                await self.changed(done[-1])
        for failure in tried:
            if isinstance(failure, BaseException):
                raise failure
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

    async def _write(self, decision: Decision, term: int) -> bool:
        result = await self._store.txn(decision.compare, (decision.put,), fence_term=term, batched=True)
        return result.succeeded


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
