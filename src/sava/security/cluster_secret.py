"""ClusterSecret: by what the brokers of one cluster know each other.

The secret is a file that its owner alone may read, one secret a line. The first line is what this broker
shows; any line is accepted. So a secret is replaced without a pause, on all brokers at each step:

    old            how it begins
    old, new       every broker accepts the new one
    new, old       every broker shows the new one
    new            the old one is worth nothing

Lines that are empty, or begin with ``#``, are no secrets. The file is looked at again every two seconds at
most, and read when it has changed. One that cannot be used then (half written, or readable by others) changes
nothing, and one line of the log says so.

No secret crosses the network where both ends have it: an end proves that it knows it by a MAC (HMAC-SHA256)
over what both ends have said. A *purpose* is part of every MAC, so that a proof of one kind is worth nothing
as one of another.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import stat
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

from sava.errors import HostError

log = logging.getLogger(__name__)

FILE: Final = "cluster_secret"
"""In the data directory of the metadata store."""
MIN_BYTES: Final = 16
"""Of one secret: 128 bits, if it is drawn and not thought up."""
MAX_FILE_BYTES: Final = 16 << 10
MAX_SECRETS: Final = 16
LOOK_S: Final = 2.0
_DRAWN_BYTES: Final = 32
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)
"""A filesystem that has no hard links says so."""


class SecretUnusable(HostError):
    """The file with the cluster's secret is missing, readable by others, or holds no secret."""


class ClusterSecret:
    """Owned by the event loop. The file need not exist: a broker that belongs to no cluster has none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: tuple[bytes, ...] = ()
        self._seen: _Look | None = None
        """What the file looked like when it was read last, or tried to be."""
        self._look_at = 0.0

    @property
    def is_known(self) -> bool:
        return bool(self._newest())

    def load(self) -> None:
        """Read the file now. Raises SecretUnusable."""
        seen, known = _read(self.path)
        self._seen, self._known = seen, known
        self._look_at = time.monotonic() + LOOK_S

    def mac(self, purpose: bytes, data: bytes) -> bytes:
        """32 bytes, under the first secret. Raises SecretUnusable where there is none."""
        known = self._newest()
        if not known:
            self.load()
            known = self._known
        return _mac(known[0], purpose, data)

    def verify(self, purpose: bytes, data: bytes, mac: bytes) -> bool:
        """Whether ``mac`` was made under any of the secrets."""
        return bool(self.proved_by(purpose, data, mac))

    def proved_by(self, purpose: bytes, data: bytes, mac: bytes) -> bytes:
        """Under which of the secrets ``mac`` was made, as a digest; empty: none. In constant time for each of
        them."""
        found = b""
        for secret in self._newest():
            if hmac.compare_digest(_mac(secret, purpose, data), mac):
                found = sha256(secret).digest()
        return found

    def is_valid(self, digest: bytes) -> bool:
        """Whether the secret of this digest is still one of those that are accepted."""
        return digest in [sha256(secret).digest() for secret in self._newest()]

    def shown(self) -> str:
        """The first secret itself, for a broker that joins. Never to be logged. Raises SecretUnusable."""
        if not self._newest():
            self.load()
        return self._known[0].decode()

    # -- writing -----------------------------------------------------------------------------

    def create(self) -> None:
        """Draw a secret and write it down, unless there is one. Durable on return. Raises SecretUnusable."""
        if not self.is_known:
            self._write(secrets.token_hex(_DRAWN_BYTES))

    def store(self, secret: str) -> None:
        """Write down what another broker has handed over. Durable on return. A file that is there stays, and
        must hold this secret. Raises SecretUnusable."""
        if len(secret.encode()) < MIN_BYTES or len(secret) > MAX_FILE_BYTES or secret.split() != [secret]:
            raise SecretUnusable(
                f"the cluster's secret is to have at least {MIN_BYTES} bytes and no spaces; it was not stored"
            )
        self._write(secret)
        if secret.encode() not in self._known:
            raise SecretUnusable(
                f"{self.path} holds another secret than that of the cluster; remove the file, or put the "
                "cluster's secret into it"
            )

    def _write(self, secret: str) -> None:
        try:
            _write_new(self.path, f"{secret}\n".encode())
        except OSError as error:
            raise SecretUnusable(f"{self.path}: the secret cannot be written: {error.strerror}") from error
        self.load()

    # -- reading -----------------------------------------------------------------------------

    def _newest(self) -> tuple[bytes, ...]:
        now = time.monotonic()
        if self._known and now < self._look_at:
            return self._known
        self._look_at = now + LOOK_S
        try:
            seen = _look(self.path.stat())
            if seen != self._seen:
                self._seen = seen
                self._seen, self._known = _read(self.path)
                log.info("security: the cluster's secret was read secrets=%d", len(self._known))
        except FileNotFoundError:
            if self._known and self._seen is not None:
                self._seen = None
                log.warning("security: the file with the cluster's secret is gone path=%s", self.path)
        except (OSError, SecretUnusable) as error:
            log.warning("security: the secret stays as it was error=%s", error)
        return self._known


def _mac(secret: bytes, purpose: bytes, data: bytes) -> bytes:
    return hmac.digest(secret, b"sava/%d/%s/" % (len(purpose), purpose) + data, sha256)


_Look = tuple[int, int, int, int]


def _look(found: os.stat_result) -> _Look:
    """The time of the last change of its mode as well: that may be what makes it usable."""
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[_Look, tuple[bytes, ...]]:
    """Raises SecretUnusable."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            _check_mode(path, found)
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SecretUnusable(f"{path}: the secret cannot be read: {error.strerror}") from error
    lines = tuple(line.strip() for line in text.splitlines())
    known = tuple(line for line in lines if line and not line.startswith(b"#"))
    if len(text) > MAX_FILE_BYTES or not 1 <= len(known) <= MAX_SECRETS:
        raise SecretUnusable(f"{path}: it is to hold 1 to {MAX_SECRETS} secrets, one a line")
    for number, line in enumerate(known, 1):
        if len(line) < MIN_BYTES or not line.isascii() or b" " in line:
            raise SecretUnusable(
                f"{path}: secret {number} is to have at least {MIN_BYTES} ASCII characters and no spaces; "
                "`openssl rand -hex 32` makes one"
            )
    return _look(found), known


def _check_mode(path: Path, found: os.stat_result) -> None:
    """Its owner alone may read it. A file of root's may be for a group as well: that is how a host hands a
    secret to a service."""
    allowed = stat.S_IRWXU | (stat.S_IRGRP if found.st_uid == 0 and os.geteuid() != 0 else 0)
    mode = stat.S_IMODE(found.st_mode)
    if mode & ~allowed:
        raise SecretUnusable(f"{path} may be read by others (mode {mode:04o}); run `chmod 600 {path}`")


def _write_new(path: Path, data: bytes) -> None:
    """Write ``path`` whole or not at all; one that is there stays. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # A rename would replace what another task, or an operator, has written meanwhile; a link does not.
        try:
            os.link(draft, path)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            draft.rename(path)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
