"""PerProcess: one instance per process and key, made when first needed; and Objects, an object store of that
kind.

Spark forks its workers from a process that may have made some. An object with threads does not survive a
fork, so a child makes its own. The parent's instances stay referenced in the child: releasing them would
close their channels, which waits for threads that do not exist there.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Final, Generic, Protocol, TypeVar

from sava.client.loop_thread import LoopThread
from sava.storage.objectstore import ObjectStore


class Closable(Protocol):
    def close(self) -> None: ...


K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Closable)


class PerProcess(Generic[K, T]):
    """Instances by key. Any thread may call. Those that exist when the process ends are closed."""

    def __init__(self, make: Callable[[K], T]) -> None:
        self._make = make
        self._guard = threading.Lock()
        self._held: dict[tuple[int, K], T] = {}
        os.register_at_fork(after_in_child=self._forked)
        _kinds.append(self)

    def of(self, key: K) -> T:
        with self._guard:
            held = self._held.get((os.getpid(), key))
            if held is None:
                held = self._held[os.getpid(), key] = self._make(key)
            return held

    def forget(self, key: K) -> None:
        """The next call of ``of`` makes a new instance."""
        with self._guard:
            self._held.pop((os.getpid(), key), None)

    def _forked(self) -> None:
        self._guard = threading.Lock()  # a thread of the parent may have held it

    def close_all(self) -> None:
        for (process, _), held in list(self._held.items()):
            if process == os.getpid():
                held.close()


_kinds: Final[list[PerProcess[Any, Any]]] = []


def close_all() -> None:
    """Close every instance of this process, of any kind."""
    for kind in _kinds:
        kind.close_all()


atexit.register(close_all)


class Objects:
    """An object store for blocking code, over an event loop in a thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._loop = LoopThread("sava objects")
        self._store = ObjectStore.open(url)

    @staticmethod
    def of(url: str) -> Objects:
        """The store of this process. Credentials and endpoint come from the environment, as for a broker.
        Raises UnsupportedStore."""
        return _stores.of(url)

    def close(self) -> None:
        _stores.forget(self._url)
        self._loop.close()

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Raises ObjectMissing, ObjectTruncated, ObjectStoreUnavailable."""
        return self._loop.run(self._store.get_ranges(key, [(start, end)]))[0]

    def start_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Future[list[bytes]]:
        """Start to fetch the ranges and return at once."""
        return self._loop.begin(self._store.get_ranges(key, ranges))

    def start_put(self, key: str, parts: Sequence[bytes]) -> Future[None]:
        """Start to put a new object and return at once. Raises ObjectExists, ObjectStoreUnavailable."""
        return self._loop.begin(self._store.put_new(key, parts))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are no error. Raises ObjectStoreUnavailable."""
        self._loop.run(self._store.delete(keys))


_stores: Final = PerProcess[str, Objects](Objects)
