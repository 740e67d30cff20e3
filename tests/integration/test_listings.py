"""Lists say only what a majority has confirmed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.support.brokers import BrokerProcess, Cluster, sava
from tests.support.waiting import PATIENCE_S


async def listed(broker: BrokerProcess) -> tuple[list[dict[str, Any]], str]:
    """What ``brokers list`` shows, and what it says on stderr."""
    _, out, errors = await sava("brokers", "list", "-o", "json", admin=broker.admin)
    return json.loads(out), errors


async def test_killed_brokers_are_not_listed_as_active(tmp_path: Path) -> None:
    """Two of three brokers are killed. The survivor cannot know anything for certain, says so, and still
    answers. Then it is made a cluster of its own, and two new brokers join at the addresses of the dead."""
    async with Cluster(3, tmp_path) as cluster:
        await cluster.init()
        survivor, *others = cluster.brokers
        await sava("wait", admin=survivor.admin)
        brokers, errors = await listed(survivor)
        assert ({each["status"] for each in brokers}, errors) == ({"active"}, "")
        for broker in others:
            broker.kill()
            await broker.ended()

        # All at once: each waits for a majority until its own deadline.
        refused = ("topics list", "namespaces list", "pipelines list", "remotes list")
        (brokers, errors), (_, out, status_errors), *refusals = await asyncio.gather(
            listed(survivor),
            sava("cluster", "status", "-o", "json", admin=survivor.admin),
            *(sava(*command.split(), admin=survivor.admin, check=False) for command in refused),
        )
        assert [each["status"] for each in brokers] == ["unknown"] * 3
        assert not any(each["is_leader"] for each in brokers)
        assert errors.startswith("not confirmed by a majority (")
        assert errors.count("\n") == 1
        assert json.loads(out)["unconfirmed"]
        assert status_errors.startswith("not confirmed by a majority (")
        for command, (code, out, errors) in zip(refused, refusals, strict=True):
            assert (code, out) == (1, ""), (command, out, errors)

        await survivor.stop()
        data = str(survivor.data_dir)
        await sava("cluster", "force-new-cluster", "--data-dir", data, "--yes")
        await survivor.start()
        for broker in others:
            await broker.wipe()
            await broker.start()
            address = broker.raft_address
            await sava("cluster", "add-node", "--addr", address, admin=survivor.admin)
            await sava("cluster", "promote-node", "--addr", address, admin=survivor.admin)
        async with asyncio.timeout(PATIENCE_S):
            while {each["status"] for each in (await listed(survivor))[0]} != {"active"}:
                pass
        brokers, _ = await listed(survivor)
        assert len({each["raft_addr"] for each in brokers}) == len(brokers) == 3
