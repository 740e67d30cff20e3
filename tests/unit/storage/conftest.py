"""Fixtures of the storage tests."""

from __future__ import annotations

import pytest
from obstore.store import MemoryStore as MemoryBackend

from sava.storage.objectstore import ObjectStore
from tests.support.objects import s3_server
from tests.unit.storage.faults import FaultyBackend, FaultyMetadata

__all__ = ["s3_server"]


@pytest.fixture
def metadata() -> FaultyMetadata:
    return FaultyMetadata()


@pytest.fixture
def backend() -> FaultyBackend:
    return FaultyBackend(MemoryBackend())


@pytest.fixture
def store(backend: FaultyBackend) -> ObjectStore:
    return ObjectStore("memory://", backend, attempts=1)
