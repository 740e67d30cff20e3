"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.brokers import Cluster


@pytest.fixture
async def trio(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Three brokers, initialized."""
    async with Cluster(3, tmp_path) as cluster:
        await cluster.init()
        yield cluster
