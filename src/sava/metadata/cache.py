"""PrefixCache: a copy of the keys under one prefix that is always brought up to date, whatever was missed.

Level-triggered: consumers act on the difference between the copy and the store, not on having seen every
event. The order matters. The range is read first, with the revision it was read at, and the watch begins at
that revision + 1; a watch from "now" after the read would lose what was written between the two. After
``Compacted`` the range is read again and compared with the copy, and keys that are gone become deletions: a
reload alone cannot show what is no longer there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from sava.metadata.commands import Event, KeyValue
from sava.metadata.errors import Compacted, InvalidRequest
from sava.metadata.store import MetadataStore, WatchBatch


class PrefixCache:
    """One consumer iterates ``changes``; anyone on the same event loop may read ``kvs`` in between. Bounded
    by ``max_keys``."""

    def __init__(
        self, store: MetadataStore, prefix: str, *, max_keys: int = 100_000, page: int = 1_000
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._max_keys = max_keys
        self._page = page
        self.kvs: dict[str, KeyValue] = {}
        self.revision = 0
        """Everything up to this revision is in ``kvs``."""
        self.resyncs = 0
        """Reloads after a gap."""

    async def changes(self) -> AsyncIterator[tuple[Event, ...]]:
        """First what exists (as creations), then every later change; after a gap only the difference. Never
        empty batches. Runs until it is closed or the store fails; can be started again and then begins with
        the difference to what ``kvs`` held."""
        while True:
            difference = await self._load()
            if difference:
                yield difference
            try:
                watch = self._store.watch(self._prefix, from_revision=self.revision + 1)
                try:
                    async for batch in watch:
                        events = self._apply(batch)
                        if events:
                            yield events
                    return
                finally:
                    watch.close()
            except Compacted:
                self.resyncs += 1

    async def _load(self) -> tuple[Event, ...]:
        """Pages are read at growing revisions, so the copy counts as read at the *first* one; the watch then
        repeats what later pages already showed, and ``_apply`` recognises it by its revision."""
        loaded: dict[str, KeyValue] = {}
        result = await self._store.range(self._prefix, limit=self._page)
        revision = result.revision
        while True:
            loaded.update((kv.key, kv) for kv in result.kvs)
            self._check_bound(len(loaded))
            if not result.more:
                break
            result = await self._store.range(self._prefix, limit=self._page, start_after=result.kvs[-1].key)
        events = tuple(_difference(self.kvs, loaded, revision))
        self.kvs, self.revision = loaded, revision
        return events

    def _apply(self, batch: WatchBatch) -> tuple[Event, ...]:
        news = tuple(event for event in batch.events if self._is_news(event))
        for event in news:
            if event.kv is None:
                del self.kvs[event.key]
            else:
                self.kvs[event.key] = event.kv
        self._check_bound(len(self.kvs))
        self.revision = batch.revision
        return news

    def _is_news(self, event: Event) -> bool:
        """Not older than what a later page already showed; nor the deletion of something that was never
        seen."""
        known = self.kvs.get(event.key)
        if known is None:
            return event.kv is not None
        return event.revision > known.mod_revision

    def _check_bound(self, count: int) -> None:
        if count > self._max_keys:
            raise InvalidRequest(
                f"prefix {self._prefix!r} holds more than the {self._max_keys} keys that this copy may hold"
            )


def _difference(old: dict[str, KeyValue], new: dict[str, KeyValue], revision: int) -> Iterable[Event]:
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before != after:
            yield Event(revision, key, after, before)
