"""How commands reach a broker: the address, and optional certificates, from options or the environment."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from sava.api.admin_client import AdminClient
from sava.cli.interrupts import run_to_end
from sava.config import Auth, ConfigInvalid, Tls
from sava.errors import Outcome, SavaError

T = TypeVar("T")

AdminOption = Annotated[
    str,
    typer.Option(
        "--admin",
        envvar="SAVA_ADMIN",
        metavar="HOST:PORT",
        help="Admin address of any broker of the cluster.",
    ),
]
DEFAULT_ADMIN = "127.0.0.1:50051"

ServiceOption = Annotated[
    str,
    typer.Option(
        "--service",
        envvar="SAVA_SERVICE",
        metavar="URL",
        help="Client address of any broker of the cluster.",
    ),
]
DEFAULT_SERVICE = "http://127.0.0.1:6650"

TLS_VARIABLES = {
    "SAVA_TLS_CERT": "The certificate that commands show to brokers.",
    "SAVA_TLS_KEY": "Its key.",
    "SAVA_TLS_CA": "The authority that has signed what brokers show.",
}
"""Files in PEM. No options: whoever has to give them gives them to every command."""


class PartlyDone(SavaError):
    """A later step of a command failed after the broker had confirmed an earlier one, which stays."""

    outcome = Outcome.PARTLY


def run(admin: str, work: Callable[[AdminClient], Awaitable[T]]) -> T:
    async def connected() -> T:
        async with AdminClient(admin, auth_from_environment()) as client:
            try:
                return await work(client)
            except SavaError as error:
                if client.changes and error.outcome is Outcome.NOT_DONE:
                    raise PartlyDone(f"{error}; what the command has changed before this stays") from error
                raise

    return run_to_end(connected())


def auth_from_environment() -> Auth:
    """All of ``TLS_VARIABLES`` together switch to mutual TLS."""
    given = {name: os.environ[name] for name in TLS_VARIABLES if os.environ.get(name)}
    if not given:
        return Auth()
    if missing := [name for name in TLS_VARIABLES if name not in given]:
        raise ConfigInvalid(
            f"{', '.join(given)} set, but not {', '.join(missing)}; mutual TLS needs all three"
        )
    cert, key, ca = (Path(given[name]) for name in TLS_VARIABLES)
    return Auth(mode="tls", tls=Tls(cert_file=cert, key_file=key, ca_file=ca))
