"""What a broker process does before it serves."""

from __future__ import annotations

import resource
from collections.abc import Coroutine
from typing import Any

import pytest

from sava.config import Config
from sava.server import process


def test_it_takes_as_many_open_files_as_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell starts it with a limit of 1024 files, and a thousand clients connect. Then the journal is to go
    on in its next file, which cannot be opened: the broker stops."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def run(work: Coroutine[Any, Any, int]) -> int:
        work.close()
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    monkeypatch.setattr("uvloop.run", run)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        may_have = process.run(Config())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert may_have == (process.OPEN_FILES if hard < 0 else min(process.OPEN_FILES, hard))
