"""How commands reach the client port."""

from __future__ import annotations

from sava.cli.connection import auth_from_environment
from sava.client import Tls


def tls_for(service: str) -> Tls | None:
    """For an ``https://`` address: the files that the environment names, as for the admin port."""
    files = auth_from_environment().tls
    if files is None or not service.startswith("https://"):
        return None
    return Tls(ca=files.ca_file, cert=files.cert_file, key=files.key_file)
