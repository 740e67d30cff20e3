"""Backends: from a storage URL to the obstore store that serves it.

``Backend`` is the part of obstore that Sava uses; tests put a faulty one in its place.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Mapping, Sequence
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Literal, Protocol
from urllib.parse import unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from sava.storage.errors import UnsupportedStore

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
