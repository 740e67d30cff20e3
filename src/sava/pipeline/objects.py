"""Objects: an object store for blocking code.

``sava.storage.objectstore`` belongs to an event loop. A worker process of Spark has one, in a thread, for
each store that it uses; a process that was forked makes its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from sava.storage.objectstore import ObjectStore


class Objects:
    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="sava objects", daemon=True).start()
        self._store = ObjectStore.open(url)

    @classmethod
    def of(cls, url: str) -> Objects:
        """This process's. Credentials and endpoint come from the environment, as a broker's do. Raises
        UnsupportedStore."""
        key = (os.getpid(), url)
        with _guard:
            if key not in _stores:
                _stores[key] = cls(url)
            return _stores[key]

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Raises ObjectMissing, ObjectTruncated, ObjectStoreUnavailable."""
        return self.start_ranges(key, [(start, end)]).result()[0]

    def start_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Future[list[bytes]]:
        """Begun now, so that it goes on while the caller does something else."""
        return asyncio.run_coroutine_threadsafe(self._store.get_ranges(key, ranges), self._loop)

    def start_put(self, key: str, parts: Sequence[bytes]) -> Future[None]:
        """A new object, begun now. Raises ObjectExists, ObjectStoreUnavailable."""
        return asyncio.run_coroutine_threadsafe(self._store.put_new(key, parts), self._loop)

    def delete(self, keys: Sequence[str]) -> None:
        """Missing ones are fine. Raises ObjectStoreUnavailable."""
        asyncio.run_coroutine_threadsafe(self._store.delete(keys), self._loop).result()


_guard: Final = threading.Lock()
_stores: Final[dict[tuple[int, str], Objects]] = {}
