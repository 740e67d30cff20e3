"""A broker in memory, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sava.client import Client
from tests.support.waiting import PATIENCE_S
from tests.unit.client.server import MemoryBroker


@pytest.fixture
async def broker() -> AsyncIterator[MemoryBroker]:
    async with MemoryBroker() as broker:
        yield broker


@pytest.fixture
async def client(broker: MemoryBroker) -> AsyncIterator[Client]:
    async with Client(f"http://{broker.address}", timeout=PATIENCE_S) as client:
        yield client
