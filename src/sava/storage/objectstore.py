"""ObjectStore: put-if-absent, ranged reads, listing, over any store that obstore speaks.

One code path for ``file://``, ``memory://``, ``s3://``, ``gs://`` and ``az://``. What is added to obstore
here:

* **One place that retries.** obstore's own retries are switched off: it retries HTTP stores only, and hides
  whether an attempt may have taken effect, which put-if-absent must know. Each call has a deadline that grows
  with the bytes it moves; each attempt may use half of what is left and the last one all of it, so one
  attempt that hangs does not use up the time of the others. Pauses double, with full jitter: brokers that
  lost the store together do not come back in step.

* **Put-if-absent that survives a lost answer.**

      put          reaches the store, the object is there
      answer       is lost (timeout, connection reset)
      put again    refused: exists already

  Reporting ``ObjectExists`` would make the caller throw away its own upload. So after an attempt of unknown
  outcome a refusal is followed by a look at the object: the same bytes are success. Without such an attempt a
  refusal is a refusal, even if the bytes are equal: another writer wrote them.

* **Durable files.** obstore writes a file and links it to its name, without any sync. The journal is trimmed
  on the strength of an upload, so here a ``file://`` object is synced with its directories before ``put_new``
  returns.

* **Short answers are errors.** A store answers a range that passes the object's end with what there is.

Objects are written in one request, never in parts: obstore drops the put-if-absent condition for multipart
uploads. The limit for one request is 5 GB on S3, far above a segment.

**Backends.** From a storage URL to the obstore store that serves it.

``Backend`` is the part of obstore that Sava uses; tests put a faulty one in its place.

**StoreIdentity.** Whether two brokers see the same segments.

A URL does not tell: ``file:///var/lib/sava`` is another directory on each machine unless it is shared, and
one bucket has many endpoints. So the store itself says who it is, in an object that the first broker writes
and no broker ever changes.

**Probe.** Whether an object store does what Sava relies on, found out by doing it.

``probe`` looks at everything, for an operator. ``check_writable`` asks one thing, before a topic is moved:
whether the store takes a write now.

A store that lets a second put of the same object through looks healthy until two brokers write one: then
the later silently wins. So the probe writes an object twice.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from sava.errors import SavaError
from sava.storage.errors import (
    ObjectExists,
    ObjectMissing,
    ObjectStoreUnavailable,
    ObjectTruncated,
    UnsupportedStore,
)

_CLIENT: Final = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(hours=1)}
"""Calls are timed by ``ObjectStore``, which knows how much they move; obstore's own limit must not come
first."""
_NO_RETRY: Final = {"max_retries": 0, "retry_timeout": timedelta(0)}


class Body(Protocol):
    """Bytes in obstore's memory."""

    def __len__(self) -> int: ...

    def to_bytes(self) -> bytes: ...


class Answer(Protocol):
    @property
    def meta(self) -> Any: ...

    async def bytes_async(self) -> Body: ...


class Backend(Protocol):
    """What an obstore store does, with obstore's errors (FileNotFoundError for an object that is not
    there)."""

    async def put_async(
        self,
        path: str,
        file: bytes | memoryview | Sequence[bytes],
        *,
        mode: Literal["create"],
        use_multipart: bool,
    ) -> Any: ...

    async def get_async(self, path: str) -> Answer: ...

    async def get_ranges_async(
        self, path: str, *, starts: Sequence[int], ends: Sequence[int], coalesce: int
    ) -> Sequence[Body]: ...

    async def head_async(self, path: str) -> Any: ...

    def list(self, prefix: str, *, chunk_size: int) -> AsyncIterable[Sequence[Any]]: ...

    async def delete_async(self, paths: Sequence[str]) -> None: ...


def open_backend(url: str, options: Mapping[str, str]) -> tuple[Backend, Path | None]:
    """The store that ``url`` names, and for ``file://`` the directory that it writes to. Raises
    UnsupportedStore."""
    scheme = urlsplit(url).scheme
    try:
        if scheme == "file":
            return _open_directory(url)
        if scheme == "memory":
            return MemoryStore(), None
        if scheme in _CLOUDS:
            return _open_cloud(scheme, url, options), None
    except (BaseError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedStore(f"storage at {url} cannot be opened: {reason}") from error
    raise UnsupportedStore(
        f"storage at {url} cannot be opened: the URL must begin with file:///, memory://, {'://, '.join(_CLOUDS)}://"
    )


_CLOUDS: Final[Mapping[str, Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}


def _open_directory(url: str) -> tuple[Backend, Path]:
    parts = urlsplit(url)
    root = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not root.is_absolute() or parts.query or parts.fragment:
        raise ValueError("a directory is named by file:// and its absolute path")
    missing = [place for place in (root, *root.parents) if not place.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_path(place.parent)
    return LocalStore(root), root


def sync_path(path: Path) -> None:
    """Make a file's content, or a directory's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_cloud(scheme: str, url: str, options: Mapping[str, str]) -> Backend:
    client: dict[str, Any] = dict(_CLIENT)
    if scheme == "s3" and (_is_loopback(_s3_endpoint(options)) or _may_be_plain()):
        client["allow_http"] = True
    backend: Backend = _CLOUDS[scheme].from_url(
        url, config=dict(options), client_options=client, retry_config=dict(_NO_RETRY)
    )
    return backend


def _s3_endpoint(options: Mapping[str, str]) -> str:
    given = [options.get(name) for name in ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url")]
    given += [os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")]
    return next(filter(None, given), "")


def _may_be_plain() -> bool:
    """obstore heeds the variable only where it is given no client options, and Sava gives it timeouts."""
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("true", "1", "yes", "on", "t", "y")


def _is_loopback(endpoint: str) -> bool:
    """Whether plain HTTP is harmless: to any other host it would show messages and credentials to the
    network, and must be asked for (AWS_ALLOW_HTTP)."""
    host = urlsplit(endpoint).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


# -- the store -------------------------------------------------------------------------------------


T = TypeVar("T")

SLOWEST_BYTES_PER_S: Final = 1 << 20
"""A transfer slower than this counts as hung: the deadline of a call grows by a second for each such
amount."""
MAX_PAUSE_S: Final = 5.0

COALESCE_BYTES: Final = 128 << 10
"""Ranges closer than this are fetched together: reading the gap takes less time than another request."""

_REFUSALS: Final = (InvalidPathError, NotSupportedError, PermissionDeniedError, UnauthenticatedError)
"""Answers that the same request will get again."""


class ObjectInfo(msgspec.Struct, frozen=True):
    key: str
    size: int
    modified_ms: int


class _NotYet(Exception):
    """An answer that asking again may change."""


class ObjectStore:
    """All calls have a deadline and bounded retries with backoff for what may pass; raise
    ObjectStoreUnavailable then.

    Owned by one event loop; the work is done by obstore's threads."""

    url: str

    def __init__(
        self,
        url: str,
        backend: Backend,
        *,
        timeout_s: float = 30.0,
        attempts: int = 4,
        pause_s: float = 0.1,
        sync_root: Path | None = None,
    ) -> None:
        """``sync_root``: the directory that a ``file://`` backend writes to; its objects are synced."""
        self.url = url
        self._backend = backend
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._pause_s = pause_s
        self._sync_root = sync_root

    @classmethod
    def open(
        cls,
        url: str,
        *,
        timeout_s: float = 30.0,
        attempts: int = 4,
        options: Mapping[str, str] | None = None,
    ) -> ObjectStore:
        """``file:///dir``, ``memory://``, ``s3://bucket/prefix`` (credentials and endpoint from AWS_*
        variables or ``options``, by obstore's names), ``gs://``, ``az://``. Raises UnsupportedStore for
        anything else."""
        backend, sync_root = open_backend(url, options or {})
        return cls(url, backend, timeout_s=timeout_s, attempts=attempts, sync_root=sync_root)

    # -- writing ---------------------------------------------------------------------

    async def put_new(self, key: str, data: bytes | memoryview | Sequence[bytes]) -> None:
        """Write an object that does not exist yet. Raises ObjectExists. A retry after a lost answer that
        finds its own bytes there is success."""
        if isinstance(data, memoryview):
            data = data.cast("B")
        parts = [data] if isinstance(data, bytes | memoryview) else data
        size = sum(map(len, parts))
        is_uncertain = False

        async def attempt() -> None:
            nonlocal is_uncertain
            try:
                await self._backend.put_async(key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                if not await self._is_own(key, parts, size, is_uncertain):
                    raise ObjectExists(key) from None
            except FileNotFoundError as error:
                raise _NotYet(f"there is no place to put it: {_line(error)}") from error
            except BaseException:
                is_uncertain = True
                raise

        await self._retry("put", key, attempt, size)
        if self._sync_root is not None:
            await asyncio.to_thread(_sync, self._sync_root, key)

    async def _is_own(
        self, key: str, parts: Sequence[bytes | memoryview], size: int, is_uncertain: bool
    ) -> bool:
        """Whether the object that a put found in its way is what an earlier attempt of the same put left
        there."""
        try:
            if (await self._backend.head_async(key))["size"] != size or not is_uncertain:
                return False
            found = memoryview((await (await self._backend.get_async(key)).bytes_async()).to_bytes())
        except FileNotFoundError:
            # S3 refuses one of two puts that overlap, also if the other fails in the end.
            raise _NotYet("another put of the same key was under way") from None
        position = 0
        for part in parts:
            if found[position : position + len(part)] != part:
                return False
            position += len(part)
        return position == len(found)

    async def delete(self, keys: Sequence[str]) -> None:
        """Missing keys are fine."""
        if not keys:
            return
        try:
            await self._retry("delete", keys[0], lambda: self._backend.delete_async(list(keys)))
        except ObjectMissing:
            # Some stores stop at the first key that is not there.
            for key in keys:
                with suppress(ObjectMissing):
                    await self._retry("delete", key, partial(self._backend.delete_async, [key]))

    # -- reading ---------------------------------------------------------------------

    async def get(self, key: str) -> bytes:
        return (await self.get_with_info(key))[0]

    async def get_with_info(self, key: str) -> tuple[bytes, ObjectInfo]:
        async def attempt() -> tuple[bytes, ObjectInfo]:
            answer = await self._backend.get_async(key)
            body = (await answer.bytes_async()).to_bytes()
            if len(body) != answer.meta["size"]:
                raise _NotYet(f"{len(body)} bytes of {answer.meta['size']} came")
            return body, _info(answer.meta)

        return await self._retry("get", key, attempt)

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        """Exactly ``end - start`` bytes. Raises ObjectTruncated when the object has fewer."""
        return (await self.get_ranges(key, [(start, end)]))[0]

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """As ``get_range``, for several at once; near ones in one request, distant ones side by side."""
        if not ranges:
            return []
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        if any(not 0 <= start < end for start, end in ranges):
            raise ValueError(f"ranges {ranges} of {key}: each must begin before it ends")

        async def attempt() -> list[bytes]:
            parts = await self._backend.get_ranges_async(
                key, starts=starts, ends=ends, coalesce=COALESCE_BYTES
            )
            if [len(part) for part in parts] != [end - start for start, end in ranges]:
                raise _NotYet("fewer bytes came than were asked for")
            return [part.to_bytes() for part in parts]

        try:
            return await self._retry("get", key, attempt, sum(ends) - sum(starts))
        except ObjectStoreUnavailable as error:
            if isinstance(error.__cause__, TimeoutError):
                raise
            size = (await self.head(key)).size
            if size < max(ends):
                raise ObjectTruncated(key, max(ends), size) from None
            raise

    async def head(self, key: str) -> ObjectInfo:
        return _info(await self._retry("head", key, lambda: self._backend.head_async(key)))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """All objects below ``prefix``, which ends where a name ends: ``a/b`` covers ``a/b/c`` and not
        ``a/bc``. In key order. Read completely before the first is given: a listing that breaks off in the
        middle must not look like a short one."""

        async def attempt() -> list[ObjectInfo]:
            found: list[ObjectInfo] = []
            try:
                async for page in self._backend.list(prefix, chunk_size=1000):
                    found += map(_info, page)
            except FileNotFoundError as error:
                raise _NotYet(f"there is nothing to list: {_line(error)}") from error
            return found

        for info in sorted(await self._retry("list", prefix, attempt), key=lambda info: info.key):
            yield info

    # -- the one place that retries ---------------------------------------------------

    async def _retry(
        self, verb: str, key: str, attempt: Callable[[], Awaitable[T]], transferred: int = 0
    ) -> T:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_s + transferred / SLOWEST_BYTES_PER_S
        pause_s, number = self._pause_s, 0
        while True:
            number += 1
            left_s = deadline - clock()
            try:
                async with asyncio.timeout(left_s if number == self._attempts else left_s / 2):
                    return await attempt()
            except FileNotFoundError as error:
                raise ObjectMissing(key) from error
            except _REFUSALS as error:
                raise ObjectStoreUnavailable(f"{self.url}: cannot {verb} {key}: {_line(error)}") from error
            except (BaseError, OSError, _NotYet) as error:
                failure = error
            wait_s = random.uniform(0, pause_s)
            if number == self._attempts or clock() + wait_s >= deadline:
                break
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        raise ObjectStoreUnavailable(
            f"{self.url}: cannot {verb} {key}, tried {number} times: {_line(failure)}"
        ) from failure


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], int(meta["last_modified"].timestamp() * 1000))


_TOOK: Final = re.compile(r" in [\d.]+(?:ns|µs|ms|s)\b")


def _line(error: BaseException) -> str:
    """The first line of an error: obstore's messages fill pages, and the first line says it. How long the
    last attempt took is left out: the same trouble is to have the same text, so that it is logged once and
    not each time."""
    return _TOOK.sub("", str(error).partition("\n")[0]) or type(error).__name__


def _sync(root: Path, key: str) -> None:
    """Make a file durable, and every name on the way to it."""
    path = root / key
    for place in (path, *path.parents):
        sync_path(place)
        if place == root:
            return


# -- whether two brokers share a store -------------------------------------------------------------


STORE_ID_KEY: Final = "store-id"
_STORE_ID: Final = re.compile(rb"[0-9a-f]{32}")


async def store_id(store: ObjectStore) -> str:
    """The id that all who share the store have in common, and no others have. Raises ObjectStoreUnavailable,
    and UnsupportedStore if something else has the object's place."""
    try:
        return await _read_store_id(store)
    except ObjectMissing:
        drawn = uuid.uuid4().hex
    try:
        await store.put_new(STORE_ID_KEY, drawn.encode())
    except ObjectExists:  # another broker was faster
        return await _read_store_id(store)
    return drawn


async def _read_store_id(store: ObjectStore) -> str:
    found = await store.get(STORE_ID_KEY)
    if not _STORE_ID.fullmatch(found):
        raise UnsupportedStore(
            f"the object {STORE_ID_KEY} in {store.url} is not the identity of a store of Sava's: "
            f"{found[:40]!r}; "
            "give Sava a place of its own there, or remove the object if nothing else uses it"
        )
    return found.decode()


# -- probing a store -------------------------------------------------------------------------------


PROBES_PREFIX: Final = "probes/"
WRITABLE_S: Final = 2.0
"""A store that takes longer to store an empty object would hold a move up for longer than publishers are to
wait."""
PROBE_CONTENT: Final = b"written by sava doctor, and deleted at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    store_id: str = ""
    is_reachable: bool = False
    puts_if_absent: bool = False
    milliseconds: int = 0
    error: str = ""


async def probe(store: ObjectStore) -> Probed:
    """Raises nothing: what goes wrong is the answer."""
    began = time.monotonic()
    key = f"{PROBES_PREFIX}{uuid.uuid4().hex}"
    identity, is_refused, error = "", False, ""
    try:
        identity = await store_id(store)
        await store.put_new(key, PROBE_CONTENT)
        try:
            is_refused = await _is_refused(store, key)
            if await store.get(key) != PROBE_CONTENT:
                error = "an object has other bytes than were written"
        finally:
            with suppress(SavaError):
                await store.delete([key])
    except (SavaError, TimeoutError) as failure:
        error = str(failure) or type(failure).__name__
    return Probed(
        store_id=identity,
        is_reachable=not error,
        puts_if_absent=is_refused,
        milliseconds=int((time.monotonic() - began) * 1000),
        error=error,
    )


async def check_writable(store: ObjectStore) -> None:
    """Raises ObjectStoreUnavailable. An object that arrives later than its answer was waited for stays."""
    key = f"{PROBES_PREFIX}{uuid.uuid4().hex}"
    try:
        async with asyncio.timeout(WRITABLE_S):
            await store.put_new(key, b"")
            await store.delete([key])
    except TimeoutError:
        reason = f"no answer within {WRITABLE_S:g} s"
    except SavaError as failure:
        reason = str(failure)
    else:
        return
    raise ObjectStoreUnavailable(f"the object store {store.url} takes no writes: {reason}")


async def _is_refused(store: ObjectStore, key: str) -> bool:
    try:
        await store.put_new(key, b"written a second time")
    except ObjectExists:
        return True
    return False
