"""Objects: an object store for blocking code.

``sava.storage.objectstore`` belongs to an event loop. A worker process of Spark has one, in a thread, for
each store that it uses; a process that was forked makes its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from sava.client.loop_thread import LoopThread
from sava.storage.objectstore import ObjectStore


class Objects:
    def __init__(self, url: str) -> None:
        self._loop = LoopThread("sava objects")
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
        return self._loop.run(self._store.get_ranges(key, [(start, end)]))[0]

    def start_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Future[list[bytes]]:
        """Begun now, so that it goes on while the caller does something else."""
        return self._loop.begin(self._store.get_ranges(key, ranges))

    def start_put(self, key: str, parts: Sequence[bytes]) -> Future[None]:
        """A new object, begun now. Raises ObjectExists, ObjectStoreUnavailable."""
        return self._loop.begin(self._store.put_new(key, parts))

    def delete(self, keys: Sequence[str]) -> None:
        """Missing ones are fine. Raises ObjectStoreUnavailable."""
        self._loop.run(self._store.delete(keys))


_guard: Final = threading.Lock()
_stores: Final[dict[tuple[int, str], Objects]] = {}
