"""SecretFiles: files with tokens, keys and certificates that records in the metadata store name.

A record names a file, and each broker and runner reads its own: the store never holds what the file does. But
a caller chooses the name, and what is read is then shown to a server that the caller chose as well. So a
name is good for one directory only, which the configuration sets, also by way of ``..`` or a symbolic link.
What reaches the caller is one text for a file that is missing, elsewhere, too large or unreadable: the
directory is no way to look at this machine's disk. The log has the cause.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Final

from sava.errors import CallerError

log = logging.getLogger(__name__)

MAX_BYTES: Final = 64 << 10
MAX_NAME: Final = 500


class SecretFileRefused(CallerError):
    """A named file cannot be used on this machine. The text is the same for every cause."""


class SecretFiles:
    """``setting``: what sets the directory, for errors. Holds nothing between calls: files are replaced while
    this process runs."""

    def __init__(self, directory: Path, setting: str) -> None:
        self._directory = directory
        self._setting = setting

    def token(self, name: str) -> str:
        """One line, from a file that others on this machine cannot read. Raises SecretFileRefused."""
        try:
            token = self._read(name, may_others_read=False).decode().strip()
        except UnicodeDecodeError:
            token = ""
        if not token.isascii() or not token.isprintable() or not token or " " in token:
            log.warning("security: a file holds no token name=%r", name[:MAX_NAME])
            raise self._refused(name)
        return token

    def read(self, name: str) -> bytes:
        """Raises SecretFileRefused."""
        return self._read(name, may_others_read=True)

    def path(self, name: str) -> Path:
        """Where the file is, whether it is there or not. Raises SecretFileRefused."""
        root = os.path.realpath(self._directory)
        found = os.path.realpath(Path(root) / name) if _is_possible(name) else root
        if not found.startswith(f"{root.rstrip('/')}/"):
            log.warning("security: a named file is outside its directory name=%r", name[:MAX_NAME])
            raise self._refused(name)
        return Path(found)

    def _read(self, name: str, *, may_others_read: bool) -> bytes:
        path = self.path(name)
        try:
            # A pipe of that name would otherwise hold the caller until a writer comes.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                mode = os.fstat(descriptor).st_mode
                content = file.read(MAX_BYTES + 1) if stat.S_ISREG(mode) else b""
        except OSError as error:
            log.warning("security: a named file cannot be read path=%s error=%s", path, error.strerror)
            raise self._refused(name) from None
        if not stat.S_ISREG(mode) or not content or len(content) > MAX_BYTES:
            log.warning("security: a named file is empty, too large or no file path=%s", path)
            raise self._refused(name)
        if not may_others_read and mode & stat.S_IRWXO:
            log.warning("security: a token may be read by others; run `chmod 600` path=%s", path)
            raise self._refused(name)
        return content

    def _refused(self, name: str) -> SecretFileRefused:
        return SecretFileRefused(
            f"file {name[:100]!r} cannot be used; it has to be a readable file below {self._setting} on all "
            "brokers and runners, and one with a token for its owner alone (the log says more)"
        )


def _is_possible(name: str) -> bool:
    return bool(name) and len(name) <= MAX_NAME and name.isprintable()
