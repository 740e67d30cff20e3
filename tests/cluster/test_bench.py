"""``sava bench`` when the owner of its topic dies: it goes on, and accounts for everything."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.cluster.harness import until
from tests.cluster.mirrored import MirroredBrokers
from tests.integration.harness import sava

TOPIC = "/default/loaded"


async def test_a_load_goes_on_when_its_broker_is_killed(tmp_path: Path) -> None:
    async with MirroredBrokers(3, tmp_path) as cluster:
        await cluster.mirrored()
        await cluster.create(TOPIC)
        owner = await cluster.owner(TOPIC)
        other = next(broker for broker in cluster.brokers if broker is not owner)
        service = ("--service", other.client_url, "-o", "json")
        producing = asyncio.create_task(
            sava(
                "bench", "produce", TOPIC, *("--count", "4000", "--rate", "400", "--duration", "60"), *service
            )
        )

        async def is_under_way() -> bool:
            return (await cluster.describe(TOPIC)).next_offset > 200

        await until(is_under_way, "a load of some messages")
        assert not producing.done()
        owner.kill()
        made = json.loads((await producing)[1])
        assert made["published"]["count"] == 4000
        assert made["published"]["failed"] == 0
        used = json.loads(
            (await sava("bench", "consume", TOPIC, *("--admin", other.admin, "--idle", "3"), *service))[1]
        )
        assert used["consumed"]["count"] == 4000
        found = used["messages"]
        assert (found["lost"], found["duplicates"], found["reordered"]) == (0, 0, 0), found
