"""Each attack for a moment, against one cluster: nothing of it is accepted that must be refused, all brokers
live, and a client is served. ``make attack`` has the long ones, with bounds on time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sava.client import Client
from sava.security.cluster_secret import ClusterSecret
from sava.security.handshake import Purpose, Welcome
from tests.security.attack import is_healthy, target_of
from tests.security.attacks import all_attacks, broker_port
from tests.security.secured_cluster import SecuredCluster
from tests.support.brokers import Brokers
from tests.support.waiting import PATIENCE_S

MOMENT_S = 0.5
ATTACKS = all_attacks()
TOPIC = "/default/orders"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Brokers]:
    async with Brokers(3, tmp_path_factory.mktemp("attacks")) as running:
        await running.create(TOPIC)
        yield running


@pytest.mark.parametrize("name", list(ATTACKS))
async def test_the_attack_does_no_harm(name: str, cluster: Brokers) -> None:
    attack = ATTACKS[name]
    async with (
        Client([broker.client_url for broker in cluster.brokers], timeout=PATIENCE_S) as client,
        client.producer(TOPIC, name="victim", timeout=PATIENCE_S) as producer,
    ):
        before = await producer.send(b"before")
        async with asyncio.timeout(PATIENCE_S):
            tally = await attack.run(target_of(cluster), MOMENT_S)
        assert await producer.send(b"after") > before
    assert [await is_healthy(broker) for broker in cluster.brokers] == [True] * 3
    assert tally.accepted + tally.refused > 0, "nothing was tried"
    if attack.must_be_refused(is_secured=False):
        assert tally.accepted == 0, tally.note


@pytest.mark.asyncio(loop_scope="function")
async def test_a_caller_without_a_role_gets_nothing_done(tmp_path: Path) -> None:
    async with SecuredCluster(1, tmp_path) as secured:
        target = target_of(secured)
        for attack in (each for each in ATTACKS.values() if each.must_be_refused(is_secured=True)):
            tally = await attack.run(target, MOMENT_S / 2)
            assert (attack.name, tally.accepted) == (attack.name, 0)
        assert await is_healthy(secured.brokers[0])


async def test_who_knows_the_secret_gets_in_by_the_same_handshake(cluster: Brokers) -> None:
    """So strangers are refused for want of the secret, and not because they speak wrongly."""
    target = target_of(cluster)
    known = await broker_port.find_out(target)
    assert len(known.nodes) == 3
    (path, *_) = sorted(cluster.brokers[1].data_dir.rglob("cluster_secret"))
    secret = ClusterSecret(path)
    secret.load()
    stranger = await broker_port.Stranger.connect(target, target.raft[1])
    try:
        assert isinstance(await stranger.shake(Purpose.LEDGERS, known, secret=secret), Welcome)
    finally:
        stranger.close()
