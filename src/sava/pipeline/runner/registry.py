"""Which kinds there are, for those who make pipelines: settings are checked before anything is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from sava.pipeline.runner import custom
from sava.pipeline.runner.kinds import SettingsInvalid

CHECKS: Final[Mapping[str, Callable[[Mapping[str, Any]], None]]] = {"custom": custom.check}
BY_POLICY: Final[Mapping[str, str]] = {"replicate": "sava replication set"}
"""Kinds that policies make, and what makes them."""


def check(name: str, kind: str, settings: Mapping[str, Any]) -> None:
    """Raises SettingsInvalid."""
    if kind in BY_POLICY:
        raise SettingsInvalid(f"pipeline {name}: those of kind {kind} are made by `{BY_POLICY[kind]}`")
    if kind not in CHECKS:
        raise SettingsInvalid(f"pipeline {name}: there is no kind {kind!r}; there are {', '.join(CHECKS)}")
    try:
        CHECKS[kind](settings)
    except SettingsInvalid as error:
        raise SettingsInvalid(f"pipeline {name}: {error}") from None
