"""Tests whose worth grows with their length do a little in ``make test``, and all of it with
``SAVA_LONG=1``."""

from __future__ import annotations

import os

import pytest

IS_LONG = os.environ.get("SAVA_LONG", "") not in ("", "0")


def only_long(why: str) -> pytest.MarkDecorator:
    """Leave the test out of ``make test``."""
    return pytest.mark.skipif(not IS_LONG, reason=f"{why}: SAVA_LONG=1")
