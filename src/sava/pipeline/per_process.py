"""PerProcess: things that a process has one of for each key, made when first needed.

Spark's workers are forked from a process that may have made some. What has threads does not survive that, so
a child makes its own. The parent's stay where they are: letting go of them would close their channels, which
waits for threads that are not here.

Objects: an object store for blocking code.

``sava.storage.objectstore`` belongs to an event loop. A worker process of Spark has one, in a thread, for
each store that it uses; a process that was forked makes its own.
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
    """Any thread may call. What is there when the process ends is closed."""

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
        """Whoever asks after that gets a new one."""
        with self._guard:
            self._held.pop((os.getpid(), key), None)

    def _forked(self) -> None:
        self._guard = threading.Lock()  # somebody may have had it at that moment

    def close_all(self) -> None:
        for (process, _), held in list(self._held.items()):
            if process == os.getpid():
                held.close()


_kinds: Final[list[PerProcess[Any, Any]]] = []


def close_all() -> None:
    """Everything that this process has of any kind. Whoever asks after that gets a new one."""
    for kind in _kinds:
        kind.close_all()


atexit.register(close_all)


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
