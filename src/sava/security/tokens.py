"""Tokens (JWT): who signs them, what makes one valid, and how keys change while brokers run.

A ``TokenIssuer`` is a name (``iss``), one algorithm, and one source of keys: a file with secrets, a file with
public keys, a key set (JWKS) in a file, or one behind a URL. ``TokenVerifier.verify`` answers from the keys
at hand and never waits; ``authenticate`` is the same for handlers, and fetches a key set first where a token
needs that.

**The token chooses nothing.** Its header says which algorithm made the signature, and a broker that believed
it would check an HMAC with the text of a public key, which every client has. So the algorithm is the issuer's
alone, and a header that says otherwise refuses the token. ``kid`` only picks among the keys of a key set that
the operator named; ``jku``, ``jwk`` and ``x5u``, which bring keys along, are never looked at.

**Keys change without a restart.** Files are looked at every two seconds, and read when their time, size or
inode is another. All keys of a file are valid at once, so that an operator adds the new one, uses it, and
then removes the old one. A file that becomes unreadable keeps its last keys, with a warning: editors leave
half-written files for a moment. Key sets behind a URL are fetched after five minutes, and when a token names
a key that they lack, but at most every ten seconds: otherwise each forged token with a made-up key would cost
the issuer's server a request.

**Checked tokens are remembered** by their SHA-256, at most thirty seconds and never beyond their end, because
a signature costs a hundred microseconds and clients send the same token with every call. Keys that change
empty this memory. Owned by the event loop; only the fetch itself runs in a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import re
import secrets
import time
import urllib.error
import urllib.request
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.warnings import InsecureKeyLengthWarning

from sava.errors import CallerError, HostError, Outcome, RetryableError
from sava.security import MAX_TOKEN_BYTES, is_loopback
from sava.security.principal import USER, Principal
from sava.tasks import spawn

log = logging.getLogger(__name__)

MAX_KEY_FILE_BYTES: Final = 1 << 20
MAX_KEYS: Final = 100
"""Of one issuer. All keys of a file without ``kid`` are tried."""
MAX_TEXT: Final = 256
"""Characters of a claim that becomes part of a principal, and of ``jti``."""
SHOWN: Final = 200
"""Characters of a token's text that an error repeats."""

REMEMBERED: Final = 10_000
REMEMBERED_S: Final = 30.0
LOOK_EVERY_S: Final = 2.0
"""How often the files of keys are looked at."""
FETCH_AFTER_S: Final = 300.0
FETCH_EVERY_S: Final = 10.0
"""The shortest time between two fetches of a key set, of which there is one already."""
RETRY_S: Final = 1.0
"""The same while there is none."""
FETCH_TIMEOUT_S: Final = 5.0

SECRET_BYTES: Final = 32
LONGEST_HASH_BYTES: Final = 64
MIN_RSA_BITS: Final = 2048
SIGNATURES: Final = ("HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "ES256", "ES384", "EdDSA")
_CURVES: Final = {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1}
_RESERVED_KINDS: Final = frozenset({"broker", "anonymous", "broker_internal"})
_KIND: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_NAME: Final = re.compile(rf"[!-~]{{1,{MAX_TEXT}}}")
_PEM: Final = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.+?-----END \1-----", re.DOTALL)

PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey
Key = PublicKey | bytes
PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


class TokenInvalid(CallerError):
    """A token is refused. The text says why and never holds the token."""


class KeysUnavailable(RetryableError):
    """The keys of a token's issuer could not be fetched, so that nothing is known about the token."""


class KeysInvalid(HostError):
    """A file or key set has no keys that fit its issuer."""


class _KeysNeeded(KeysUnavailable):
    """A fetch may bring the key of this token."""

    def __init__(self, text: str, source: _FetchedKeys) -> None:
        super().__init__(text)
        self.source = source


class Verified(NamedTuple):
    """What a valid token says."""

    principal: Principal
    token_id: str
    """Its ``jti``; of a token without one, ``sha256:`` and the start of its hash. By this it is revoked."""
    issuer: str
    expires_at: float
    """When brokers stop to accept it, in Unix seconds: its ``exp`` and the clock skew that they allow."""


@dataclass(frozen=True, slots=True)
class TokenIssuer:
    """Who signs tokens, and where the keys are that prove it: exactly one of the last four."""

    issuer: str
    algorithm: str = "HS256"
    audience: str = ""
    """Empty: ``aud`` is not looked at."""
    secret_file: Path | None = None
    public_key_file: Path | None = None
    jwks_file: Path | None = None
    jwks_url: str = ""

    @property
    def file(self) -> Path | None:
        return self.secret_file or self.public_key_file or self.jwks_file


def check_jwks_url(url: str) -> None:
    """Raises ValueError unless it is https, or http to this machine: keys that a stranger on the way can
    replace prove nothing."""
    parts = urlsplit(url)
    if not parts.hostname or parts.scheme not in ("https", "http"):
        raise ValueError("jwks_url: written https://host/path")
    if parts.username or parts.password:
        raise ValueError("jwks_url: it holds a password, which a settings file must not")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError("jwks_url: https is needed, other than for an address of this machine")


# -- keys ------------------------------------------------------------------------------------------


class NamedKey(NamedTuple):
    kid: str | None
    key: Key


class _Keys:
    """The keys of one issuer."""

    def __init__(self, issuer: TokenIssuer) -> None:
        self.issuer = issuer
        self._keys: list[NamedKey] = []

    def candidates(self, kid: object) -> list[Key]:
        """The keys that may have signed a token whose header names ``kid``. Only key sets have names."""
        if self.issuer.secret_file or self.issuer.public_key_file:
            return [each.key for each in self._keys]
        if kid is None:
            return [each.key for each in self._keys] if len(self._keys) == 1 else []
        return [each.key for each in self._keys if each.kid == kid]


class _FileKeys(_Keys):
    """Keys in a file, which is read again when it changes."""

    def __init__(self, issuer: TokenIssuer, path: Path) -> None:
        """Raises KeysInvalid."""
        super().__init__(issuer)
        self._path = path
        self._seen = _identity_of(path)
        self._keys = self._read()

    def has_changed(self) -> bool:
        """Look at the file. Whether there are other keys now."""
        identity = _identity_of(self._path)
        if identity == self._seen:
            return False
        self._seen = identity
        try:
            self._keys = self._read()
        except KeysInvalid as error:
            log.warning("tokens: %s; the keys that it had stay valid", error)
            return False
        log.info("tokens: read the keys of issuer %s again keys=%d", self.issuer.issuer, len(self._keys))
        return True

    def _warn_if_open(self) -> None:
        with suppress(OSError):  # it was read a moment ago, and is looked at again
            if self._path.stat().st_mode & 0o077:
                log.warning("tokens: others may read the secret file %s; run chmod 600 on it", self._path)

    def _read(self) -> list[NamedKey]:
        content = read_key_file(self._path)
        try:
            if self.issuer.secret_file:
                self._warn_if_open()
                return [NamedKey(None, line) for line in _secrets_of(content, self._path)]
            if self.issuer.public_key_file:
                return [NamedKey(None, key) for key in _public_keys_of(content, self.issuer.algorithm)]
            return _key_set_of(content, self.issuer.algorithm)
        except ValueError as error:
            raise KeysInvalid(f"keys of issuer {self.issuer.issuer!r} in {self._path}: {error}") from None


class _FetchedKeys(_Keys):
    """A key set behind a URL. It is kept when a fetch fails."""

    def __init__(self, issuer: TokenIssuer, clock: Callable[[], float]) -> None:
        super().__init__(issuer)
        self._clock = clock
        self._fetched_at = self._asked_at = -math.inf
        self._failure = "they were not fetched yet"
        self._fetching: asyncio.Task[None] | None = None

    @property
    def is_stale(self) -> bool:
        return self._clock() - self._fetched_at >= FETCH_AFTER_S and self._may_fetch

    @property
    def _may_fetch(self) -> bool:
        return self._clock() - self._asked_at >= (FETCH_EVERY_S if self._keys else RETRY_S)

    def candidates(self, kid: object) -> list[Key]:
        """Raises _KeysNeeded, if a fetch may bring the key; KeysUnavailable, if one has just failed."""
        found = super().candidates(kid)
        if found:
            return found
        if self._may_fetch or self._fetching is not None:
            raise _KeysNeeded("the keys of its issuer are not here yet", self)
        if not self._keys:
            raise KeysUnavailable(
                f"keys of issuer {self.issuer.issuer!r} at {self.issuer.jwks_url}: {self._failure}"
            )
        return []

    def fetch(self) -> asyncio.Task[None]:
        """The fetch that is under way, or a new one. It raises nothing."""
        if self._fetching is None:
            self._asked_at = self._clock()
            self._fetching = spawn(self._fetch(), name=f"sava keys of {self.issuer.issuer}")
        return self._fetching

    async def _fetch(self) -> None:
        try:
            # The socket has a deadline of its own, but a resolver or a server that sends a byte a second has
            # none. The thread that is left then ends by itself.
            content = await asyncio.wait_for(
                asyncio.to_thread(_content_at, self.issuer.jwks_url), FETCH_TIMEOUT_S
            )
            self._keys = _key_set_of(content, self.issuer.algorithm)
            self._fetched_at = self._clock()
        except TimeoutError:
            self._failed(f"no answer within {FETCH_TIMEOUT_S:g} s")
        except (OSError, ValueError) as error:
            self._failed(str(error))
        finally:
            self._asked_at = self._clock()
            self._fetching = None

    def _failed(self, reason: str) -> None:
        self._failure = reason[:SHOWN]
        log.warning(
            "tokens: could not fetch the keys of issuer %s; those that are here stay valid keys=%d error=%s",
            *(self.issuer.issuer, len(self._keys), self._failure),
        )


def _identity_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_key_file(path: Path) -> bytes:
    """Raises KeysInvalid."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise KeysInvalid(f"key file {path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_KEY_FILE_BYTES:
        raise KeysInvalid(f"key file {path} has more than {MAX_KEY_FILE_BYTES} bytes")
    return content


def _secrets_of(content: bytes, path: Path) -> list[bytes]:
    found = [line.strip() for line in content.splitlines() if line.strip()]
    if not found:
        raise ValueError("there is no secret; write one a line")
    if len(found) > MAX_KEYS:
        raise ValueError(f"there are more than {MAX_KEYS} secrets")
    if b"-----BEGIN" in content:
        raise ValueError("this is a key in PEM, and no secret; the issuer's algorithm must fit it")
    if min(map(len, found)) < SECRET_BYTES:
        log.warning("tokens: a secret in %s has less than %d bytes and can be guessed", path, SECRET_BYTES)
    return found


def _public_keys_of(content: bytes, algorithm: str) -> list[Key]:
    found: list[Key] = []
    for block in _PEM.finditer(content):
        if b"PRIVATE" in block[1]:
            raise ValueError("this is a private key; brokers need its public key")
        try:
            key = serialization.load_pem_public_key(block[0])
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ValueError(f"not a public key in PEM: {error}") from None
        found.append(_fitting(key, algorithm))
    if not found:
        raise ValueError("there is no public key in PEM")
    if len(found) > MAX_KEYS:
        raise ValueError(f"there are more than {MAX_KEYS} keys")
    return found


def _key_set_of(content: bytes, algorithm: str) -> list[NamedKey]:
    """The keys of a JWKS that are for this algorithm. Others, which belong to other users of the set, do not
    matter. Raises ValueError."""
    try:
        given = json.loads(content)["keys"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError('this is no key set: JSON like {"keys": [...]} is') from None
    if not isinstance(given, list) or len(given) > MAX_KEYS:
        raise ValueError(f"a key set has a list of at most {MAX_KEYS} keys")
    found = []
    for each in given:
        if not isinstance(each, dict) or each.get("kty") == "oct" or each.get("use", "sig") != "sig":
            continue
        if each.get("alg", algorithm) != algorithm:
            continue
        try:
            key = _fitting(jwt.PyJWK(_public_part(each), algorithm).key, algorithm)
        except (jwt.PyJWTError, ValueError, KeyError, TypeError):
            continue
        kid = each.get("kid")
        found.append(NamedKey(kid if isinstance(kid, str) else None, key))
    if not found:
        raise ValueError(f"none of its {len(given)} keys is a public key for {algorithm}")
    return found


def _public_part(key: Mapping[str, Any]) -> dict[str, Any]:
    return {name: key[name] for name in ("kty", "crv", "n", "e", "x", "y") if name in key}


def _fitting(key: object, algorithm: str) -> PublicKey:
    """Raises ValueError."""
    if algorithm.startswith("RS") and isinstance(key, rsa.RSAPublicKey):
        if key.key_size < MIN_RSA_BITS:
            raise ValueError(f"an RSA key has {key.key_size} bits; {MIN_RSA_BITS} are needed")
        return key
    if algorithm in _CURVES and isinstance(key, ec.EllipticCurvePublicKey):
        if isinstance(key.curve, _CURVES[algorithm]):
            return key
    elif algorithm == "EdDSA" and isinstance(key, ed25519.Ed25519PublicKey):
        return key
    raise ValueError(f"a key is not one for {algorithm}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses to follow: where the answer points was named by no operator."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _content_at(url: str) -> bytes:
    """Runs in a thread. Raises OSError, ValueError."""
    check_jwks_url(url)
    deadline = time.monotonic() + FETCH_TIMEOUT_S
    parts, size = [], 0
    try:
        opened = urllib.request.build_opener(_NoRedirect).open(url, timeout=FETCH_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()  # it is the connection as well
        raise OSError(f"the answer has the status {error.code}") from None
    with opened as answer:
        while part := answer.read1(64 << 10):
            parts.append(part)
            size += len(part)
            if size > MAX_KEY_FILE_BYTES:
                raise ValueError(f"the answer has more than {MAX_KEY_FILE_BYTES} bytes")
            if time.monotonic() > deadline:
                raise ValueError(f"the answer took longer than {FETCH_TIMEOUT_S:g} s")
    return b"".join(parts)


# -- verifying -------------------------------------------------------------------------------------


class TokenVerifier:
    """What is accepted as a token. Owned by the event loop."""

    def __init__(
        self, issuers: Iterable[TokenIssuer], skew_s: float = 30.0, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Reads all files of keys. Raises KeysInvalid."""
        self._clock = clock
        self._skew_s = skew_s
        self._sources: list[_Keys] = []
        for issuer in issuers:
            if issuer.file is not None:
                self._sources.append(_FileKeys(issuer, issuer.file))
            else:
                self._sources.append(_FetchedKeys(issuer, clock))
        self._remembered: OrderedDict[bytes, tuple[Verified, float]] = OrderedDict()
        self._look_at = clock() + LOOK_EVERY_S

    async def authenticate(self, token: str) -> Verified:
        """As ``verify``, after the keys were fetched if the token needs that. Raises TokenInvalid,
        KeysUnavailable."""
        for source in self._sources:
            if isinstance(source, _FetchedKeys) and source.is_stale:
                source.fetch()  # what is here stays valid meanwhile
        try:
            return self.verify(token)
        except _KeysNeeded as needed:
            # Shielded, because others wait for the same keys.
            await asyncio.shield(needed.source.fetch())
            return self.verify(token)

    def verify(self, token: str) -> Verified:
        """By the keys at hand. Raises TokenInvalid; KeysUnavailable, if they were not fetched yet."""
        if len(token) > MAX_TOKEN_BYTES:
            raise TokenInvalid(f"the token has more than {MAX_TOKEN_BYTES} bytes")
        now = self._clock()
        self._look(now)
        digest = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        known = self._remembered.get(digest)
        if known is not None:
            if now < known[1]:
                self._remembered.move_to_end(digest)
                return known[0]
            del self._remembered[digest]
        verified = self._checked(token, digest, now)
        self._remembered[digest] = verified, min(verified.expires_at, now + REMEMBERED_S)
        if len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)
        return verified

    def _look(self, now: float) -> None:
        # A clock that was set back must not stop this until it has caught up.
        if now < self._look_at <= now + LOOK_EVERY_S:
            return
        self._look_at = now + LOOK_EVERY_S
        changed = [isinstance(source, _FileKeys) and source.has_changed() for source in self._sources]
        if any(changed):
            self._remembered.clear()

    def _checked(self, token: str, digest: bytes, now: float) -> Verified:
        header, claims = _opened(token)
        name, algorithm = claims.get("iss"), header.get("alg")
        if not isinstance(name, str):
            raise TokenInvalid("the token names no issuer (iss)")
        sources = [source for source in self._sources if source.issuer.issuer == name]
        if not sources:
            raise TokenInvalid(f"the token's issuer {name[:SHOWN]!r} is none that this broker accepts")
        fitting = [source for source in sources if source.issuer.algorithm == algorithm]
        if not fitting:
            wanted = ", ".join(sorted({source.issuer.algorithm for source in sources}))
            raise TokenInvalid(
                f"the token is signed by {str(algorithm)[:SHOWN]!r}, and issuer {name!r} by {wanted}"
            )
        failure = TokenInvalid(f"no key of issuer {name!r} has signed the token")
        for source in fitting:
            for key in source.candidates(header.get("kid")):
                try:
                    claims = _signed_claims(token, key, source.issuer)
                except jwt.InvalidSignatureError:
                    continue
                except jwt.PyJWTError as error:
                    failure = TokenInvalid(f"the token of issuer {name!r} is refused: {str(error)[:SHOWN]}")
                    continue
                return self._lasting(claims, name, digest, now)
        raise failure

    def _lasting(self, claims: Mapping[str, Any], issuer: str, digest: bytes, now: float) -> Verified:
        expires_at = _time(claims, "exp") + self._skew_s
        if now >= expires_at:
            raise TokenInvalid(f"the token of issuer {issuer!r} has expired")
        if "nbf" in claims and now < _time(claims, "nbf") - self._skew_s:
            raise TokenInvalid(f"the token of issuer {issuer!r} is not valid yet (nbf)")
        return Verified(principal_of(claims), _id_of(claims, digest), issuer, expires_at)


def _opened(token: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and claims, of which nothing is proven: they only choose the keys. Raises TokenInvalid."""
    try:
        opened = jwt.decode_complete(token, options={"verify_signature": False})
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        # The library's text may repeat what is in the token.
        raise TokenInvalid("this is no token (JWT)") from None
    header, claims = opened["header"], opened["payload"]
    if "crit" in header or "b64" in header:
        raise TokenInvalid("the token's header asks for extensions (crit), of which there are none")
    return header, claims


def _signed_claims(token: str, key: Key, issuer: TokenIssuer) -> dict[str, Any]:
    """Raises PyJWTError. Times are checked by the caller, against its clock."""
    with _silent_about(key):
        return jwt.decode(
            token,
            key,
            algorithms=[issuer.algorithm],
            issuer=issuer.issuer,
            audience=issuer.audience or None,
            options={
                "require": ["exp", "iss", *(["aud"] if issuer.audience else [])],
                "verify_aud": bool(issuer.audience),
                "verify_exp": False,
                "verify_nbf": False,
                "verify_iat": False,
                "verify_sub": False,
                "verify_jti": False,
            },
        )


@contextmanager
def _silent_about(key: Key | PrivateKey) -> Iterator[None]:
    """The library warns of a short secret at each use; here the log says it once, where the file is read."""
    if not isinstance(key, bytes) or len(key) >= LONGEST_HASH_BYTES:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InsecureKeyLengthWarning)
        yield


def _time(claims: Mapping[str, Any], name: str) -> float:
    value = claims.get(name)
    # JSON in Python knows NaN and Infinity, and true is an integer.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TokenInvalid(f"the token's {name} is not a time in Unix seconds")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise TokenInvalid(f"the token's {name} is not a time in Unix seconds")
    return seconds


def principal_of(claims: Mapping[str, Any]) -> Principal:
    """``principal_type`` and ``principal_name``, as Danube's tokens have them; else the user ``sub``. Raises
    TokenInvalid."""
    kind = claims.get("principal_type") or USER
    name = claims.get("principal_name") or claims.get("sub")
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise TokenInvalid("the token's principal_type is not a word like user or service_account")
    if kind in _RESERVED_KINDS:
        raise TokenInvalid(f"a token cannot make its bearer a {kind}")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TokenInvalid(
            f"the token's principal_name (or sub) is not 1 to {MAX_TEXT} ASCII characters without spaces"
        )
    return Principal(kind, name)


def identify_unverified(token: str) -> tuple[str, float]:
    """By what a token is revoked, and when it ends, whether it is valid or not. Raises TokenInvalid."""
    _, claims = _opened(token)
    return _id_of(claims, hashlib.sha256(token.encode()).digest()), _time(claims, "exp")


def _id_of(claims: Mapping[str, Any], digest: bytes) -> str:
    token_id = claims.get("jti") or f"sha256:{digest.hex()[:32]}"
    if not isinstance(token_id, str) or not _NAME.fullmatch(token_id):
        raise TokenInvalid(f"the token's jti is not a text of 1 to {MAX_TEXT} ASCII characters")
    return token_id


# -- making tokens and keys ------------------------------------------------------------------------


def create_token(
    issuer: str,
    principal: Principal,
    ttl_s: float,
    key: bytes,
    *,
    algorithm: str = "HS256",
    audience: str = "",
    now: float | None = None,
) -> str:
    """A token of ``principal``. ``key``: a secret, or a private key in PEM, as the algorithm needs. Raises
    TokenInvalid, KeysInvalid."""
    begins = time.time() if now is None else now
    claims = {
        "iss": issuer,
        "sub": principal.name,
        "principal_type": principal.kind,
        "principal_name": principal.name,
        "iat": int(begins),
        "exp": math.ceil(begins + ttl_s),
        "jti": secrets.token_hex(16),
    }
    principal_of(claims)
    if audience:
        claims["aud"] = audience
    signer: bytes | PrivateKey = key
    if not algorithm.startswith("HS"):
        signer = _private_key_of(key, algorithm)
    try:
        with _silent_about(signer):
            return jwt.encode(claims, signer, algorithm=algorithm)
    except (jwt.PyJWTError, NotImplementedError) as error:
        raise KeysInvalid(f"the key cannot sign by {algorithm}: {error}") from None


def signing_key(content: bytes, algorithm: str) -> bytes:
    """What signs, from the content of a file: the first of its secrets, or its private key."""
    if not algorithm.startswith("HS"):
        return content
    return next((line.strip() for line in content.splitlines() if line.strip()), b"")


def _private_key_of(pem: bytes, algorithm: str) -> PrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
        _fitting(key.public_key(), algorithm)
    except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
        raise KeysInvalid(f"not a private key in PEM for {algorithm}: {error}") from None
    assert isinstance(key, PrivateKey)
    return key


def new_secret() -> bytes:
    """A line for a file of secrets: 256 bits, in letters and digits."""
    return secrets.token_hex(SECRET_BYTES).encode()


def new_key_pair(algorithm: str) -> tuple[bytes, bytes]:
    """A private key and its public key, in PEM."""
    key: PrivateKey
    if algorithm.startswith("RS"):
        key = rsa.generate_private_key(public_exponent=65537, key_size=3072)
    elif algorithm == "EdDSA":
        key = ed25519.Ed25519PrivateKey.generate()
    else:
        key = ec.generate_private_key(_CURVES[algorithm]())
    return (
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
    )


class SecretExists(CallerError):
    """A secret is not written over one that is there."""

    outcome = Outcome.NOT_DONE


def write_private(path: Path, content: bytes) -> None:
    """A new file that only its owner can read (0600), durably, in a folder that only its owner can open if
    that is new as well. Raises SecretExists, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SecretExists(f"{path} exists; remove it, or choose another place") from None
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, 0o600)  # whatever the umask took away
        file.write(content)
        file.flush()
        os.fsync(handle)
