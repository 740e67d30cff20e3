"""``sava bench`` when the owner of its topic dies: it goes on, and accounts for everything."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.cluster.mirrored import MirroredBrokers
from tests.support.brokers import sava
from tests.support.waiting import until

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


async def test_a_broker_that_is_killed_while_a_load_is_consumed_has_lost_nothing(tmp_path: Path) -> None:
    """Another takes over later than an idle consumer was told to wait, and delivers again what was under way.
    Of two consumers that share, one gets what was on its way to the other, behind what it had itself."""
    async with MirroredBrokers(3, tmp_path) as cluster:
        await cluster.mirrored()
        await cluster.create(TOPIC, partitions=2)
        owner = await cluster.owner(f"{TOPIC}-part-0")
        other = next(broker for broker in cluster.brokers if broker is not owner)
        service = ("--service", other.client_url, "-o", "json")
        await sava("bench", "produce", TOPIC, "--count", "6000", "--size", "100", "--keys", "50", *service)
        await sava(
            *("topics", "set-policy", TOPIC, "--max-subscription-dispatch-rate", "300"), admin=other.admin
        )
        consuming = asyncio.create_task(
            sava(
                *("bench", "consume", TOPIC, "--type", "shared", "--consumers", "2", "--idle", "0.5"),
                *("--admin", other.admin, *service),
                check=False,
            )
        )

        async def is_under_way() -> bool:
            described = await cluster.describe(f"{TOPIC}-part-0")
            return any(each.acked > 300 for each in described.subscriptions)

        await until(is_under_way, "some messages are acked")
        assert not consuming.done()
        owner.kill()
        _, out, err = await consuming
        used = json.loads(out)
        assert used["consumed"]["count"] >= 6000, err
        assert (used["messages"]["lost"], used["messages"]["reordered"]) == (0, 0), used["messages"]
        assert (used["messages"]["unread"], used["messages"]["open_ended"]) == (0, 0), used["messages"]
