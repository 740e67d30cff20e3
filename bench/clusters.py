"""Which clusters take part: etcd only where it is installed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from bench.etcd import EtcdCluster
from bench.plan import Plan


@contextlib.asynccontextmanager
async def etcd_or_none(plan: Plan, name: str) -> AsyncIterator[EtcdCluster | None]:
    if not plan.with_etcd:
        yield None
        return
    async with EtcdCluster(plan.folder / name) as cluster:
        yield cluster
