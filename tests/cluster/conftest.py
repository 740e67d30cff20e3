from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.brokers import Brokers


@pytest.fixture
async def trio(tmp_path: Path) -> AsyncIterator[Brokers]:
    """Three brokers over one object store."""
    async with Brokers(3, tmp_path) as cluster:
        yield cluster
