"""TLS on all ports: certificates, as they are in their files now.

With TLS every end shows a certificate that one of the configured authorities has signed. On the client and
admin ports that tells who calls, where a certificate is asked for (``auth.tls.client_certificates``). On the
Raft port both ends must show a broker's: whose it is, the handshake checks (``security.handshake``).

**Files may be replaced at any time.** They are looked at again when a connection is made, every two seconds
at most, and what has changed counts for all connections from then on; those that stand continue. A
certificate and a key that do not belong together are half of a replacement: what there was stays until the
other half is there, and one line of the log says so.

gRPC for Python asks for a client's certificate only where it requires one. So ``optional`` is, on the client
and admin ports, the same as ``none``: a client without a certificate must get in.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import grpc
from grpc import aio

from sava.config import Auth, ConfigInvalid, TlsSettings
from sava.peer_connection import Contexts
from sava.raft.types import NO_NODE, NodeId
from sava.security.certificates import CertificateUnreadable, brokers_of, read_certificate
from sava.security.handshake import CertificateRule

log = logging.getLogger(__name__)

Options = Sequence[tuple[str, int | str]]
LOOK_S: Final = 2.0


class TlsMaterial(NamedTuple):
    """What was in the files together at one time."""

    generation: int
    ca: bytes
    broker_ca: bytes
    """Empty: none of its own."""
    cert: bytes
    key: bytes
    client: ssl.SSLContext
    """For connections to Raft ports."""
    server: ssl.SSLContext
    """For connections to this one."""

    @property
    def authorities(self) -> bytes:
        """On the gRPC ports a broker is one caller among others."""
        return b"\n".join(filter(None, (self.ca, self.broker_ca)))


class TlsFiles:
    """The files of ``auth.tls``. Any thread may ask; gRPC's does."""

    def __init__(self, settings: TlsSettings) -> None:
        """Raises ConfigInvalid."""
        self._settings = settings
        self._paths = [
            path
            for path in (settings.ca_file, settings.broker_ca_file, settings.cert_file, settings.key_file)
            if path is not None
        ]
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._look_at = time.monotonic() + LOOK_S
        self._trouble = ""
        try:
            self._seen = self._look()
            self._material = self._read(1)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigInvalid(f"auth.tls: the certificates cannot be used: {_reason(error)}") from error

    def newest(self) -> TlsMaterial:
        with self._lock:
            now = time.monotonic()
            if now >= self._look_at:
                self._look_at = now + LOOK_S
                self._look_again()
            return self._material

    def _look_again(self) -> None:
        try:
            seen = self._look()
            if seen == self._seen:
                return
            self._material = self._read(self._material.generation + 1)
            # Not before: a pair that was half there is looked at again, whatever its times say.
            self._seen, self._trouble = seen, ""
            log.info("tls: certificates were read again cert=%s", self._settings.cert_file)
        except (OSError, ssl.SSLError, ValueError) as error:
            if self._trouble != _reason(error):
                self._trouble = _reason(error)
                log.warning("tls: the certificates stay as they were error=%s", self._trouble)

    def _look(self) -> list[tuple[int, int, int]]:
        found = [path.stat() for path in self._paths]
        return [(each.st_mtime_ns, each.st_size, each.st_ino) for each in found]

    def _read(self, generation: int) -> TlsMaterial:
        """Raises OSError, SSLError, ValueError."""
        settings = self._settings
        before = [path.read_bytes() for path in self._paths]
        found = dict(zip(self._paths, before, strict=True))
        raft_ca = (settings.broker_ca_file or settings.ca_file).read_text()
        material = TlsMaterial(
            generation,
            found[settings.ca_file],
            found[settings.broker_ca_file] if settings.broker_ca_file is not None else b"",
            found[settings.cert_file],
            found[settings.key_file],
            _context(settings, ssl.Purpose.SERVER_AUTH, raft_ca),
            _context(settings, ssl.Purpose.CLIENT_AUTH, raft_ca),
        )
        if [path.read_bytes() for path in self._paths] != before:
            raise ValueError("the files change at this moment")
        return material


def _context(settings: TlsSettings, purpose: ssl.Purpose, ca: str) -> ssl.SSLContext:
    """For the Raft port. Whose certificate it is counts, and not which host it names: the handshake checks
    that. Raises SSLError where the certificate and the key do not belong together."""
    context = ssl.create_default_context(purpose, cadata=ca)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(str(settings.cert_file), str(settings.key_file))
    return context


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be read: {error.strerror}"
    return str(error)


@lru_cache(maxsize=64)
def _files(settings: TlsSettings) -> TlsFiles:
    return TlsFiles(settings)


def files_of(auth: Auth) -> TlsFiles | None:
    """One for all ports of this process. Raises ConfigInvalid."""
    return _files(auth.tls) if auth.tls is not None else None


# -- the client and admin ports ----------------------------------------------------------------------


def open_channel(target: str, auth: Auth, options: Options = ()) -> aio.Channel:
    """Raises ConfigInvalid."""
    files = files_of(auth)
    if files is None:
        return aio.insecure_channel(target, options=options)
    material = files.newest()
    credentials = grpc.ssl_channel_credentials(material.authorities, material.key, material.cert)
    return aio.secure_channel(target, credentials, options=options)


def tool_context(auth: Auth) -> ssl.SSLContext | None:
    """For a command that looks at any port: the host must be one that the certificate names. None without
    TLS. Raises ConfigInvalid."""
    files = files_of(auth)
    if files is None or auth.tls is None:
        return None
    context = ssl.create_default_context(cadata=files.newest().authorities.decode())
    context.load_cert_chain(str(auth.tls.cert_file), str(auth.tls.key_file))
    return context


def generation(auth: Auth) -> int:
    """Of the certificates; a channel that was opened under another one shows others."""
    files = files_of(auth)
    return files.newest().generation if files is not None else 0


def listen(server: aio.Server, address: str, auth: Auth) -> None:
    """Bind ``server`` to ``address``. Raises ConfigInvalid, also when the port is taken."""
    files = files_of(auth)
    try:
        if files is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, _server_credentials(files, auth))
    except RuntimeError as error:
        raise ConfigInvalid(
            f"cannot listen on {address}: the address is in use or not of this machine"
        ) from error


def _server_credentials(files: TlsFiles, auth: Auth) -> grpc.ServerCredentials:
    is_required = auth.client_certificates == "required"
    given = files.newest()

    def configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(material.key, material.cert)], root_certificates=material.authorities if is_required else None
        )

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """(On a thread of gRPC, at each handshake.)"""
        nonlocal given
        newest = files.newest()
        if newest.generation == given.generation:
            return None  # nothing has changed
        given = newest
        return configuration(newest)

    return grpc.dynamic_ssl_server_credentials(
        configuration(given),
        fetch,  # type: ignore[arg-type]  # the stubs do not know that it may return None
        require_client_authentication=is_required,
    )


# -- the Raft port -----------------------------------------------------------------------------------


def client_contexts(auth: Auth) -> Contexts:
    """For connections to Raft ports."""
    files = files_of(auth)
    return lambda: files.newest().client if files is not None else None


def server_contexts(auth: Auth) -> Contexts:
    """For connections to this Raft port."""
    files = files_of(auth)
    return lambda: files.newest().server if files is not None else None


def broker_rule(auth: Auth, cluster_name: str) -> CertificateRule | None:
    """Which certificates are brokers'; None without TLS."""
    if auth.tls is None:
        return None
    return CertificateRule(cluster_name, is_any_of_authority=auth.tls.broker_ca_file is not None)


def node_of_certificate(auth: Auth, cluster_name: str) -> NodeId:
    """The node id that this broker's own certificate names; 0: it names none. Raises ConfigInvalid."""
    files = files_of(auth)
    if files is None or auth.tls is None:
        return NO_NODE
    own: Path = auth.tls.cert_file
    try:
        names = brokers_of(read_certificate(files.newest().cert), cluster_name)
    except CertificateUnreadable as error:
        raise ConfigInvalid(f"auth.tls.cert_file {own}: {error}") from error
    if not names and auth.tls.broker_ca_file is None:
        raise ConfigInvalid(
            f"auth.tls.cert_file {own} is no broker's certificate of cluster {cluster_name}: it needs "
            f"URI:sava://{cluster_name}/broker/NODE among its alternative names, with the node id or the "
            "host of this broker; or set auth.tls.broker_ca_file"
        )
    numbers = {int(name) for name in names if name.isdecimal()}
    if len(numbers) > 1 or any(not 0 < number < 1 << 63 for number in numbers):
        raise ConfigInvalid(f"auth.tls.cert_file {own} names {len(numbers)} node ids; a broker has one")
    return NodeId(numbers.pop()) if numbers else NO_NODE
