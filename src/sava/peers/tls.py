"""Channels, contexts and server credentials: plain, or mutual TLS when the configuration names certificates.

With TLS both ends show a certificate signed by the cluster's own authority; the Raft port is then closed to
all others, which a cluster id alone (a name, not a secret) cannot do.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence

import grpc
from grpc import aio

from sava.config import Auth, ConfigInvalid, TlsSettings

Options = Sequence[tuple[str, int | str]]


def open_channel(target: str, auth: Auth, options: Options = ()) -> aio.Channel:
    if auth.tls is None:
        return aio.insecure_channel(target, options=options)
    ca, key, cert = _read(auth.tls)
    return aio.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), options=options)


def listen(server: aio.Server, address: str, auth: Auth) -> None:
    """Bind ``server`` to ``address``. Raises ConfigInvalid when the port is taken."""
    try:
        if auth.tls is None:
            server.add_insecure_port(address)
            return
        ca, key, cert = _read(auth.tls)
        # gRPC for Python either requires a certificate or asks for none.
        is_required = auth.client_certificates == "required"
        credentials = grpc.ssl_server_credentials(
            [(key, cert)], root_certificates=ca if is_required else None, require_client_auth=is_required
        )
        server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigInvalid(
            f"cannot listen on {address}: the address is in use or not of this machine"
        ) from error


def client_context(auth: Auth) -> ssl.SSLContext | None:
    """For connections to the Raft port; None without TLS."""
    return _context(auth, ssl.Purpose.SERVER_AUTH)


def server_context(auth: Auth) -> ssl.SSLContext | None:
    context = _context(auth, ssl.Purpose.CLIENT_AUTH)
    if context is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _context(auth: Auth, purpose: ssl.Purpose) -> ssl.SSLContext | None:
    if auth.tls is None:
        return None
    try:
        context = ssl.create_default_context(purpose, cafile=str(auth.tls.ca_file))
        context.load_cert_chain(str(auth.tls.cert_file), str(auth.tls.key_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigInvalid(f"auth.tls: the certificates cannot be used: {error}") from error
    return context


def _read(tls: TlsSettings) -> tuple[bytes, bytes, bytes]:
    try:
        return tls.ca_file.read_bytes(), tls.key_file.read_bytes(), tls.cert_file.read_bytes()
    except OSError as error:
        raise ConfigInvalid(f"auth.tls: {error.filename} cannot be read: {error.strerror}") from error
