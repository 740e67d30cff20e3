"""Every row of the table of failures (``docs/design/journal.md``) against real processes.

Nothing is uploaded in these tests, so whatever is found again was found in journals: on the owner's disk, or
on mirrors. Producers number their messages, and a consumer reads along (``workload``): in the end each
acknowledged message is at its offset, once, in its producer's order.

The rows share a cluster, one after another, each with a topic of its own; all brokers are there at the
beginning of each. ``SAVA_ROW`` is a regular expression for the names of those to be run alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sava.errors import SavaError
from tests.cluster.mirrored import MirroredBrokers
from tests.cluster.workload import Workload
from tests.support.brokers import BrokerProcess
from tests.support.long import only_long
from tests.support.network import LEDGERS, RAFT
from tests.support.waiting import PATIENCE_S, until

ROW_S = 300.0

Row = Callable[[MirroredBrokers, str], Awaitable[None]]


@asynccontextmanager
async def traffic(
    cluster: MirroredBrokers, topic: str, owner: BrokerProcess | None = None
) -> AsyncIterator[Workload]:
    await cluster.create(topic)
    if owner is not None:
        await cluster.place(topic, owner)
    async with cluster.sava_client() as client, Workload(client, topic) as load:
        await load.progressed(30)
        yield load
        await load.progressed(30)
        await load.finish()


async def run_all(cluster: MirroredBrokers, rows: Sequence[Row]) -> None:
    only = os.environ.get("SAVA_ROW", "")
    for row in rows:
        if not re.search(only, row.__name__):
            continue
        began = time.monotonic()
        name = row.__name__
        try:
            async with asyncio.timeout(ROW_S):
                await cluster.all_running()
                topic = "/default/" + name.replace("_", "-")
                await row(cluster, topic)
                await cluster.delete(topic, through=cluster.running[0])
        except (AssertionError, SavaError, TimeoutError) as error:
            error.add_note(f"when {name.replace('_', ' ')}")
            raise
        print(f"{name.replace('_', ' ')}: {time.monotonic() - began:.1f} s")


async def die(broker: BrokerProcess) -> None:
    broker.kill()
    await broker.ended()


# -- the owner -----------------------------------------------------------------------------------


async def the_owner_is_killed_and_stays_away(cluster: MirroredBrokers, topic: str) -> None:
    """Its messages are on mirrors only; afterwards nobody needs its journal."""
    owner = (await cluster.roles()).source
    async with traffic(cluster, topic, owner):
        await die(owner)
        await cluster.until_served(topic, but_not=owner)
        await cluster.until_gone(owner)


async def the_owner_is_killed_while_it_leads(cluster: MirroredBrokers, topic: str) -> None:
    owner = await cluster.leader()
    async with traffic(cluster, topic, owner):
        await die(owner)
        await cluster.until_served(topic, but_not=owner)
        await cluster.until_gone(owner)


async def the_owner_is_killed_and_returns_at_once(cluster: MirroredBrokers, topic: str) -> None:
    """Before anybody took it for gone: it goes on from its own disk, in a new journal."""
    owner = (await cluster.roles()).source
    async with traffic(cluster, topic, owner):
        former = await cluster.journal_of(owner)
        await die(owner)
        await owner.start()
        await cluster.until_served(topic)
        await cluster.mirrored()
        assert (await cluster.journal_of(owner)).incarnation > former.incarnation


async def the_owner_returns_after_its_topics_went_elsewhere(cluster: MirroredBrokers, topic: str) -> None:
    """What its own disk still holds of them is not taken for theirs when one comes back to it."""
    owner = (await cluster.roles()).source
    async with traffic(cluster, topic, owner) as load:
        await die(owner)
        await cluster.until_served(topic, but_not=owner)
        await load.progressed(30)
        await cluster.all_running()
        await cluster.place(topic, owner)
        await load.progressed(30)


async def the_machine_of_the_owner_is_gone(cluster: MirroredBrokers, topic: str) -> None:
    """Its disk for messages is replaced, so it has another storage id, and comes back within its lease's
    time: the registration never disappears, and the tail is nowhere but on mirrors."""
    owner = (await cluster.roles()).source
    async with traffic(cluster, topic, owner) as load:
        await die(owner)
        await cluster.lose_disk(owner)
        await owner.start()
        await cluster.until_served(topic)
        await load.progressed(30)


async def an_owner_that_was_paused_acknowledges_nothing_when_it_wakes(
    cluster: MirroredBrokers, topic: str
) -> None:
    """Its connections stand still with it and are not closed. Clients leave it all the same within a few
    seconds, and repeat elsewhere what they have no answer for; what it had in flight meets a fence when it
    wakes."""
    owner = (await cluster.roles()).source
    asked = next(broker for broker in cluster.brokers if broker is not owner)
    async with traffic(cluster, topic, owner) as load:
        owner.pause()
        try:
            await until(
                lambda: _is_served_by_other(cluster, topic, owner, asked), "the topic is served by another"
            )
            await load.progressed(30)
        finally:
            owner.resume()
        await load.progressed(30)
        await cluster.mirrored()


# -- the network ---------------------------------------------------------------------------------


async def the_owner_is_cut_from_raft_and_not_from_its_mirrors(cluster: MirroredBrokers, topic: str) -> None:
    """Its mirrors refuse it from the fence on; before that it may acknowledge, and nothing of that is lost.
    Clients reach it all the time."""
    assert cluster.links is not None
    owner = (await cluster.roles()).source
    others = [broker for broker in cluster.brokers if broker is not owner]
    async with traffic(cluster, topic, owner) as load:
        cluster.links.isolate(owner.number, [each.number for each in others], (RAFT,))
        try:
            await until(
                lambda: _is_served_by_other(cluster, topic, owner, others[0]),
                "the topic is served by another",
            )
            await load.progressed(30)
        finally:
            cluster.links.heal()
        await cluster.registered()
        await cluster.mirrored()


async def the_owner_is_cut_from_its_mirrors_and_not_from_raft(cluster: MirroredBrokers, topic: str) -> None:
    """Nobody is left to hold a second copy: appends are refused until the network heals, and none is
    acknowledged with one copy."""
    assert cluster.links is not None
    owner = (await cluster.roles()).source
    others = [broker.number for broker in cluster.brokers if broker is not owner]
    async with traffic(cluster, topic, owner) as load:
        cluster.links.isolate(owner.number, others, (LEDGERS,))
        try:
            await asyncio.sleep(1.0)  # what was acknowledged on the way is counted by now
            acked = len(load.acked)
            await asyncio.sleep(3.0)
            assert len(load.acked) == acked
        finally:
            cluster.links.heal()
        await load.progressed(30)


async def the_owner_is_cut_off_from_everybody(cluster: MirroredBrokers, topic: str) -> None:
    assert cluster.links is not None
    owner = (await cluster.roles()).source
    others = [broker for broker in cluster.brokers if broker is not owner]
    async with traffic(cluster, topic, owner) as load:
        cluster.links.isolate(owner.number, [each.number for each in others])
        try:
            await until(
                lambda: _is_served_by_other(cluster, topic, owner, others[0]),
                "the topic is served by another",
            )
            await load.progressed(30)
        finally:
            cluster.links.heal()
        await cluster.registered()


async def _is_served_by_other(
    cluster: MirroredBrokers, topic: str, owner: BrokerProcess, asked: BrokerProcess
) -> bool:
    described = await cluster.describe(topic, through=asked)
    return described.state == "open" and described.broker_id not in (0, await cluster.id_of(owner))


# -- mirrors -------------------------------------------------------------------------------------


async def a_mirror_is_killed_and_returns(cluster: MirroredBrokers, topic: str) -> None:
    """Two of three go on without a pause worth mentioning; the third catches up."""
    owner = (await cluster.roles()).source
    mirror = (await cluster.mirrors_of(owner))[0]
    async with traffic(cluster, topic, owner) as load:
        load.longest_wait_s = 0.0
        await die(mirror)
        await load.progressed(50)
        assert load.longest_wait_s < 5.0
        await mirror.start()
        await cluster.mirrored()


async def a_mirror_loses_its_disk_and_then_the_owner_dies(cluster: MirroredBrokers, topic: str) -> None:
    """The new disk is not taken for the old one, which would say that it has nothing. (Of a journal that the
    owner wrote before, two of three disks may be gone in the end, and that is another row.)"""
    owner, target, _ = await cluster.roles()
    await cluster.forgotten(owner)
    async with traffic(cluster, topic, owner) as load:
        lost = await cluster.disk_of(target)
        await die(target)
        await cluster.lose_disk(target)
        await target.start()
        await cluster.mirrored(without=lost)
        await load.progressed(30)
        await die(owner)
        await cluster.until_served(topic, but_not=owner)


# -- several -------------------------------------------------------------------------------------


async def all_are_killed_at_once(cluster: MirroredBrokers, topic: str) -> None:
    owner = (await cluster.roles()).source
    async with traffic(cluster, topic, owner):
        for broker in cluster.brokers:
            broker.kill()
        for broker in cluster.brokers:
            await broker.ended()
        for broker in cluster.brokers:
            await broker.start()
        await cluster.all_running()
        await cluster.until_served(topic, timeout=PATIENCE_S)


async def the_owner_and_a_mirror_are_lost_at_once(cluster: MirroredBrokers, topic: str) -> None:
    """One copy of three is not enough to know what was acknowledged: the topic waits, an operator is told
    what would be lost, and nothing is done. When the mirror returns, nothing was lost."""
    owner, mirror = await _owner_and_mirror(cluster)
    async with traffic(cluster, topic, owner):
        owner.kill()
        mirror.kill()
        await owner.ended()
        await mirror.ended()
        told = await _told_of_loss(cluster, owner)
        assert "nothing was done" in told
        assert topic in told
        assert "all that was acknowledged from position" in told
        assert (await cluster.journal_of(owner)).state == "recovering"
        assert (await cluster.ownership(topic)).state.value == "orphan"
        await _a_doctor_says_so(cluster, owner, topic)
        await mirror.start()
        await cluster.until_served(topic, but_not=owner)


async def _a_doctor_says_so(cluster: MirroredBrokers, owner: BrokerProcess, topic: str) -> None:
    journal = await cluster.journal_of(owner)
    name = f"{journal.broker_id}/{journal.incarnation}"
    _, out, _ = await cluster.command("doctor", "--watch", "0.1", "-o", "json", check=False)
    said = {(each["check"], each["subject"]): each for each in json.loads(out)["findings"]}
    for about in (("ledgers", f"ledger {name}"), ("orphaned tails", topic)):
        assert said[about]["level"] == "error"
        assert f"`sava ledgers recover {name}`" in said[about]["remedy"]


async def an_operator_gives_up_what_is_lost(cluster: MirroredBrokers, topic: str) -> None:
    """The owner's and a mirror's disks never come back. With --yes the topic goes on with what the last copy
    has, which here is everything that had time to get there."""
    owner, mirror = await _owner_and_mirror(cluster)
    await cluster.create(topic)
    await cluster.place(topic, owner)
    async with cluster.sava_client() as client, client.producer(topic) as producer:
        await producer.send_many([b"%d" % number for number in range(100)])
    await until(lambda: _is_everywhere(cluster, owner), "the last copy has everything")
    for broker in (owner, mirror):
        broker.kill()
        await broker.ended()
    await _told_of_loss(cluster, owner)
    for broker in (owner, mirror):
        await cluster.lose_disk(broker)
    journal = await cluster.journal_of(owner)
    name = f"{journal.broker_id}/{journal.incarnation}"
    _, out, _ = await cluster.command("ledgers", "recover", name, "--yes")
    assert "given up" in out
    await cluster.until_served(topic, but_not=owner)
    async with (
        cluster.sava_client(cluster.running) as client,
        client.reader(topic, end="latest") as reader,
    ):
        assert [int(message.payload) async for message in reader] == list(range(100))


async def _owner_and_mirror(cluster: MirroredBrokers) -> tuple[BrokerProcess, BrokerProcess]:
    """Neither of them leads, so that the leader tells of the recovery all the time."""
    leader = await cluster.leader()
    for owner in cluster.running:
        mirrors = [mirror for mirror in await cluster.mirrors_of(owner) if mirror is not leader]
        if owner is not leader and mirrors:
            return owner, mirrors[0]
    raise AssertionError("nobody mirrors")


async def _told_of_loss(cluster: MirroredBrokers, owner: BrokerProcess) -> str:
    told = ""

    async def is_told() -> bool:
        nonlocal told
        told = await cluster.asked(owner)
        return "waits for 1 more" in told

    await until(is_told, "the recovery waits")
    return told


async def _is_everywhere(cluster: MirroredBrokers, owner: BrokerProcess) -> bool:
    journal = await cluster.journal_of(owner)
    return journal.HasField("positions") and all(not member.behind for member in journal.members)


async def the_coordinator_dies_after_its_claim(cluster: MirroredBrokers, topic: str) -> None:
    await _kill_coordinator(cluster, topic, "after journal recovering")


async def the_coordinator_dies_before_it_closes(cluster: MirroredBrokers, topic: str) -> None:
    await _kill_coordinator(cluster, topic, "before journal closed")


async def the_coordinator_dies_when_it_has_closed(cluster: MirroredBrokers, topic: str) -> None:
    await _kill_coordinator(cluster, topic, "after journal closed")


async def _kill_coordinator(cluster: MirroredBrokers, topic: str, step: str) -> None:
    """The next leader claims the journal anew."""
    leader = await cluster.leader()
    owner = next(broker for broker in cluster.running if broker is not leader)
    # If it is a mirror, too, one copy would be left: it must come back then.
    is_needed = leader in await cluster.mirrors_of(owner)
    async with traffic(cluster, topic, owner):
        cluster.trap(step, f"/ledgers/{await cluster.id_of(owner)}", leader)
        await die(owner)
        await leader.ended(timeout=PATIENCE_S)
        if is_needed:
            await leader.start()
        await cluster.until_served(topic, but_not=owner, timeout=PATIENCE_S)


# -- all of them ---------------------------------------------------------------------------------

OF_THREE: tuple[Row, ...] = (
    a_mirror_loses_its_disk_and_then_the_owner_dies,  # first: there are no earlier journals to wait for
    the_owner_is_killed_and_stays_away,
    the_owner_is_killed_while_it_leads,
    the_owner_is_killed_and_returns_at_once,
    the_owner_returns_after_its_topics_went_elsewhere,
    an_owner_that_was_paused_acknowledges_nothing_when_it_wakes,
    the_owner_is_cut_from_raft_and_not_from_its_mirrors,
    the_owner_is_cut_from_its_mirrors_and_not_from_raft,
    the_owner_is_cut_off_from_everybody,
    a_mirror_is_killed_and_returns,
    all_are_killed_at_once,
    the_machine_of_the_owner_is_gone,
)
OF_FIVE: tuple[Row, ...] = (
    the_owner_and_a_mirror_are_lost_at_once,
    the_coordinator_dies_after_its_claim,
    the_coordinator_dies_before_it_closes,
    the_coordinator_dies_when_it_has_closed,
    an_operator_gives_up_what_is_lost,
)


@pytest.mark.timeout(len(OF_THREE) * ROW_S)
async def test_whatever_happens_to_one_of_three_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    async with MirroredBrokers(3, tmp_path, links=True) as cluster:
        await run_all(cluster, OF_THREE)


@only_long("five brokers")
@pytest.mark.timeout(len(OF_FIVE) * ROW_S)
async def test_no_acknowledged_message_is_lost_silently_with_two_of_five_down(tmp_path: Path) -> None:
    async with MirroredBrokers(5, tmp_path) as cluster:
        await run_all(cluster, OF_FIVE)
