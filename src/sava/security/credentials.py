"""Credentials: what a client shows to brokers, and by what it knows that they are brokers.

The client library, the admin client and the command line use the same. Files are read when they are needed, a
token with every call and certificates with every connection, so that what an operator replaces takes effect
without a restart. No text that a person or a log may see holds a token.
"""

from __future__ import annotations

import inspect
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from grpc import aio

from sava.errors import CallerError
from sava.security import MAX_TOKEN_BYTES, is_loopback

log = logging.getLogger(__name__)

Token = str | Path | Callable[[], str | Awaitable[str]]
"""The token itself, the file that has it, or what is asked for it."""
Metadata = tuple[tuple[str, str], ...]

MAX_PEM_BYTES: Final = 1 << 20
_TEXT: Final = re.compile(r"[!-~]+")


class CredentialsInvalid(CallerError):
    """Credentials that cannot be used: a file that cannot be read, a text that is no token. The text names
    the file, and never its content."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. Without ``ca`` the system's authorities are trusted. ``cert`` and ``key`` show who the
    client is; a client with a token needs none."""

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise CredentialsInvalid("tls: a certificate needs its key, and a key its certificate")

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Raises CredentialsInvalid when a file cannot be read."""
        return grpc.ssl_channel_credentials(*map(_content, (self.ca, self.key, self.cert)))

    def context(self) -> ssl.SSLContext:
        """The same for connections that are not gRPC's. Raises CredentialsInvalid."""
        try:
            context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
            if self.cert is not None and self.key is not None:
                context.load_cert_chain(str(self.cert), str(self.key))
        except (OSError, ssl.SSLError) as error:
            raise CredentialsInvalid(f"tls: the certificates cannot be used: {error}") from None
        return context


def _content(path: str | Path | None) -> bytes | None:
    return None if path is None else _read(Path(path), MAX_PEM_BYTES, "tls")


def _read(path: Path, limit: int, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise CredentialsInvalid(f"{what}: {path} cannot be read: {error.strerror}") from None
    if len(content) > limit:
        raise CredentialsInvalid(f"{what}: {path} has more than {limit} bytes")
    return content


class Credentials:
    """tls    how brokers are reached by TLS; None: without.
    token  goes with every call as ``authorization: Bearer …``. A file is read and a callable is called each
           time, because tokens end.
    """

    def __init__(self, *, tls: Tls | None = None, token: Token | None = None) -> None:
        self.tls = tls
        self.token = token or None
        self._has_warned = False
        if isinstance(self.token, str):
            _checked(self.token)

    def __repr__(self) -> str:
        token = self.token if self.token is None or isinstance(self.token, Path) else "..."
        return f"Credentials(tls={self.tls!r}, token={token})"

    def check(self) -> None:
        """Read the certificates, which a program learns best at its start. Raises CredentialsInvalid."""
        if self.tls is not None:
            self.tls.channel_credentials()

    @property
    def is_plain(self) -> bool:
        """Whether nothing is shown and nothing checked."""
        return self.tls is None and self.token is None

    @property
    def has_token(self) -> bool:
        return self.token is not None

    @property
    def is_renewable(self) -> bool:
        """Whether the token may be another one the next time."""
        return self.token is not None and not isinstance(self.token, str)

    def open_channel(self, target: str, options: Sequence[tuple[str, int | str]] = ()) -> aio.Channel:
        """Raises CredentialsInvalid."""
        if self.tls is not None:
            return aio.secure_channel(target, self.tls.channel_credentials(), options=options)
        if self.has_token and not self._has_warned and not is_loopback(target.rpartition(":")[0]):
            self._has_warned = True
            log.warning(
                "the token goes to %s without TLS, and whatever is on the way can read and use it; "
                "reach brokers by https://",
                target,
            )
        return aio.insecure_channel(target, options=options)

    async def metadata(self) -> Metadata:
        """What goes with a call. Raises CredentialsInvalid, and what the callable raises."""
        if self.token is None:
            return ()
        return (("authorization", f"Bearer {await self._current()}"),)

    async def renewed(self, refused: Metadata) -> Metadata | None:
        """What to show after a broker has refused that: None, if it would be the same again."""
        if not self.is_renewable:
            return None
        shown = await self.metadata()
        return None if shown == refused else shown

    async def _current(self) -> str:
        if isinstance(self.token, str):
            return self.token
        if isinstance(self.token, Path):
            return token_in(self.token)
        assert self.token is not None
        given = self.token()
        return _checked(await given if inspect.isawaitable(given) else given)


def token_in(path: Path) -> str:
    """Raises CredentialsInvalid."""
    content = _read(path, MAX_TOKEN_BYTES, "token")
    try:
        return _checked(content.decode("ascii").strip())
    except (UnicodeDecodeError, CredentialsInvalid):
        raise CredentialsInvalid(f"token: {path} holds no token, which is one line") from None


def _checked(token: object) -> str:
    # A line break in it would be another header, and gRPC's error would show the text.
    if not isinstance(token, str) or len(token) > MAX_TOKEN_BYTES or not _TEXT.fullmatch(token):
        raise CredentialsInvalid("token: not one line of ASCII characters without spaces")
    return token


PLAIN: Final = Credentials()
