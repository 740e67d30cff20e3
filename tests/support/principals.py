"""Calls of principals, as the guard makes them known to handlers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sava.config import Auth, Config, TokenIssuerSettings
from sava.security.principal import Principal, current, is_admin

ALICE: Final = Principal("user", "alice")
MALLORY: Final = Principal("user", "mallory")
OPERATOR: Final = Principal("user", "operator")


@contextmanager
def acting(principal: Principal, *, admin: bool = False) -> Iterator[None]:
    tokens = current.set(principal), is_admin.set(admin)
    try:
        yield
    finally:
        current.reset(tokens[0])
        is_admin.reset(tokens[1])


def enforcing(directory: Path) -> Config:
    """A broker on which calls need permissions."""
    return Config(auth=Auth(tokens=(TokenIssuerSettings(secret_file=directory / "secret"),)))
