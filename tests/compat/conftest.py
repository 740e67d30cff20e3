from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.compat.stubs import Stubs
from tests.support.brokers import Standalone

_numbers = count(1)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """One for all tests that do it no harm; each has topics of its own."""
    with Standalone(tmp_path_factory.mktemp("broker")) as broker:
        broker.ready()
        yield broker


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Standalone]:
    """For tests that stop it."""
    with Standalone(tmp_path) as broker:
        broker.ready()
        yield broker


@pytest.fixture
async def stubs(broker: Standalone) -> AsyncIterator[Stubs]:
    async with Stubs(broker) as stubs:
        yield stubs


@pytest.fixture
def topic() -> str:
    """A name that no other test of this session uses."""
    return f"/default/topic-{next(_numbers)}"
