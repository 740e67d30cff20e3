"""Seeds become one cluster by themselves, and never two: whatever is lost, late, wiped or configured wrong.

The nodes here keep what a real one keeps of this on its disk, its id and what it is bound to; the logic that
asks and binds is the one of brokers, on a network that delays and loses, in an order that the seed chooses.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, cast

import pytest

from sava.metadata.bootstrap import SeedBootstrap, bootstrap, check_seeds, check_voters
from sava.metadata.errors import IdentityConflict, Unavailable
from sava.metadata.identity import cluster_id_of
from sava.metadata.peer import Bootstrap, NodeInfo, Transport
from sava.raft.types import Membership, NodeId

A, B, C, D = "a:1", "b:1", "c:1", "d:1"
SEEDS = (A, B, C)
SOON_S = 5.0
"""Nothing here waits for time to pass; what is not there by then never comes."""


class Host:
    """A broker at an address, with a disk that can be wiped. A wiped one comes back as another node."""

    def __init__(self, address: str, rng: Random, seeds: Sequence[str] = SEEDS, name: str = "shop") -> None:
        self.address = address
        self.seeds = tuple(seeds)
        self.name = name
        self.is_up = True
        self.is_fixed = self.has_history = False
        self.hides_from = 0
        self._rng = rng
        self.wipe()

    def wipe(self) -> None:
        self.node = NodeId(self._rng.getrandbits(40) + 1)
        self.bound: Bootstrap | None = None

    def info(self) -> NodeInfo:
        own = NodeInfo(
            self.node,
            self.bound.cluster if self.bound else "",
            self.address,
            self.bound.membership.voters if self.bound else (),
            "0",
            self.seeds,
            self.name,
            is_fixed=self.is_fixed,
            has_history=self.has_history and self.bound is not None,
        )
        return own.for_stranger(NodeId(self.hides_from)) if self.hides_from else own

    def bind(self, order: Bootstrap) -> None:
        check_voters(self.info(), order)
        if self.bound is not None and self.bound.cluster != order.cluster:
            raise IdentityConflict("bound to another cluster")
        self.bound = self.bound or order


class Network:
    """Implements what ``bootstrap`` needs of a transport. Each call takes some passes of the event loop in
    either direction, and may get lost in either."""

    def __init__(self, hosts: dict[str, Host], rng: Random, loss: float = 0.0) -> None:
        self.hosts = hosts
        self._rng = rng
        self._loss = loss

    async def _travel(self) -> None:
        for _ in range(self._rng.randrange(8)):
            await asyncio.sleep(0)
        if self._rng.random() < self._loss:
            raise Unavailable("lost")

    def _reach(self, address: str) -> Host:
        host = self.hosts.get(address)
        if host is None or not host.is_up:
            raise Unavailable(f"{address} cannot be reached")
        return host

    async def identify(self, address: str, *, timeout: float) -> NodeInfo:
        await self._travel()
        info = self._reach(address).info()
        await self._travel()
        return info

    async def bootstrap(self, address: str, order: Bootstrap, *, timeout: float) -> None:
        await self._travel()
        self._reach(address).bind(order)
        await self._travel()


def network(hosts: dict[str, Host], rng: Random, loss: float = 0.0) -> Transport:
    return cast(Any, Network(hosts, rng, loss))


def hosts_of(rng: Random, addresses: Sequence[str] = SEEDS, **settings: Any) -> dict[str, Host]:
    return {address: Host(address, rng, **settings) for address in addresses}


def living_clusters(hosts: dict[str, Host]) -> list[str]:
    """Those that can elect a leader: a majority of their first voters is bound to them."""
    bound = Counter(host.bound.cluster for host in hosts.values() if host.bound)
    sizes = {host.bound.cluster: len(host.bound.membership.voters) for host in hosts.values() if host.bound}
    return [cluster for cluster, count in bound.items() if 2 * count > sizes[cluster]]


async def test_seeds_form_a_cluster_when_the_last_one_has_started() -> None:
    rng = Random(1)
    hosts = hosts_of(rng)
    hosts[C].is_up = False
    runs = [SeedBootstrap(network(hosts, rng), hosts[each].info, pause_s=0.0) for each in (A, B)]
    tasks = [asyncio.create_task(run.run()) for run in runs]
    for _ in range(200):
        await asyncio.sleep(0)
    assert not any(host.bound for host in hosts.values()), "two of three are not enough"
    hosts[C].is_up = True
    last = SeedBootstrap(network(hosts, rng), hosts[C].info, pause_s=0.0).run()
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*tasks, last)
    ids = [host.node for host in hosts.values()]
    assert {host.info().cluster for host in hosts.values()} == {cluster_id_of(ids)}


async def test_a_seed_that_lost_its_disk_makes_no_second_cluster() -> None:
    rng = Random(2)
    hosts = hosts_of(rng)
    await bootstrap(network(hosts, rng), hosts[A].info, SEEDS)
    first = hosts[A].info().cluster
    hosts[C].wipe()
    with pytest.raises(IdentityConflict):
        await bootstrap(network(hosts, rng), hosts[C].info, SEEDS)
    assert hosts[C].bound is None
    assert living_clusters(hosts) == [first]


async def test_the_log_says_how_a_seed_without_its_disk_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    rng = Random(3)
    hosts = hosts_of(rng)
    await bootstrap(network(hosts, rng), hosts[A].info, SEEDS)
    hosts[C].wipe()
    run = SeedBootstrap(network(hosts, rng), hosts[C].info, pause_s=0.0)
    caplog.set_level("INFO")
    task = asyncio.create_task(run.run())
    async with asyncio.timeout(SOON_S):
        while "add-node --addr c:1" not in caplog.text:  # noqa: ASYNC110 (the log is what is waited for)
            await asyncio.sleep(0)
    task.cancel()
    assert caplog.text.count("add-node --addr c:1") == 1


@pytest.mark.parametrize("what", ["seeds", "name"])
async def test_seeds_that_disagree_form_nothing(what: str) -> None:
    rng = Random(4)
    hosts = hosts_of(rng)
    if what == "seeds":
        hosts[B].seeds = (A, B, D)
    else:
        hosts[B].name = "warehouse"
    own = hosts[A].info
    with pytest.raises(IdentityConflict, match="same list" if what == "seeds" else "same name"):
        await bootstrap(network(hosts, rng), own, SEEDS, check=lambda infos: check_seeds(own(), infos))
    assert not any(host.bound for host in hosts.values())


async def test_an_operators_other_list_is_refused_by_a_seed() -> None:
    """`sava cluster init --nodes a,b` while the three form: a and b would be a majority of both."""
    rng = Random(5)
    hosts = hosts_of(rng)
    with pytest.raises(IdentityConflict, match="use that list"):
        await bootstrap(network(hosts, rng), hosts[A].info, (A, B))
    assert not any(host.bound for host in hosts.values())


def test_a_seed_may_still_be_added_to_a_running_cluster() -> None:
    check_voters(Host(A, Random(6)).info(), Bootstrap("x", Membership()))


async def live(seed: int) -> None:
    """Seeds start at their own times, calls get lost, disks are wiped, lists are edited; then peace comes."""
    rng = Random(seed)
    hosts = hosts_of(rng, (A, B, C, D))
    calm = network(hosts, rng)
    rough = network(hosts, rng, loss=rng.choice((0.0, 0.1, 0.4)))
    tasks: dict[str, asyncio.Task[None]] = {}

    def start(address: str, over: Transport) -> None:
        if address in tasks:
            tasks[address].cancel()
        own = hosts[address].info
        tasks[address] = asyncio.create_task(SeedBootstrap(over, own, pause_s=0.0).run())

    formed: set[str] = set()

    def look() -> None:
        formed.update(living_clusters(hosts))
        assert len(living_clusters(hosts)) <= 1, f"two clusters, seed {seed}"
        assert len(formed) <= 1, f"a second cluster after the first, seed {seed}"

    for address in rng.sample(SEEDS, 3):
        start(address, rough)
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
            look()
    wiped = rng.choice((*SEEDS, "", ""))
    edited = rng.choice((*SEEDS, "", "", ""))
    if edited:  # somebody replaces c by d, begins with one broker, and restarts it
        hosts[edited].seeds = hosts[D].seeds = (A, B, D)
        start(edited, rough)
        start(D, rough)
    if wiped:
        hosts[wiped].is_up = False
        tasks[wiped].cancel()
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
            look()
        hosts[wiped].wipe()
        hosts[wiped].is_up = True
        start(wiped, rough)
    for _ in range(100):
        await asyncio.sleep(0)
        look()
    if not wiped and not edited:
        for address in SEEDS:
            start(address, calm)
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*(tasks[each] for each in SEEDS))
        assert len(living_clusters(hosts)) == 1
        assert len({hosts[each].info().cluster for each in SEEDS}) == 1
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    look()


async def test_no_schedule_makes_two_clusters(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="sava.metadata.bootstrap")  # pytest would keep every line
    for seed in range(1500):
        await live(seed)


async def test_a_wiped_voter_is_not_bound_again_under_its_former_id() -> None:
    """Its certificate fixes its id. Bound again by the same list, it would have forgotten its votes."""
    rng = Random(7)
    hosts = hosts_of(rng)
    await bootstrap(network(hosts, rng), hosts[A].info, SEEDS)
    for host in hosts.values():
        host.has_history = True
    former = hosts[C].node
    hosts[C].wipe()
    hosts[C].node, hosts[C].is_fixed = former, True
    for own in (A, C):
        with pytest.raises(IdentityConflict, match="empty disk"):
            await bootstrap(network(hosts, rng), hosts[own].info, SEEDS)
    assert hosts[C].bound is None


async def test_the_first_voter_is_bound_first_and_the_one_that_binds_last() -> None:
    """The first makes the secret that the others get. The one that binds can begin again as long as it is not
    bound itself."""
    for seed in range(20):
        rng = Random(seed)
        hosts = hosts_of(rng)
        over = Network(hosts, rng)
        order: list[str] = []
        bind = over.bootstrap

        async def noted(address: str, wanted: Bootstrap, *, timeout: float, bind=bind, order=order) -> None:
            await bind(address, wanted, timeout=timeout)
            order.append(address)

        over.bootstrap = noted  # type: ignore[method-assign,assignment]
        await bootstrap(cast(Any, over), hosts[A].info, SEEDS)
        first = min(hosts.values(), key=lambda host: host.node).address
        assert order[-1] == A
        assert first in (order[0], A)


async def test_a_node_of_a_cluster_that_it_does_not_name_is_left_alone() -> None:
    rng = Random(8)
    hosts = hosts_of(rng)
    await bootstrap(network(hosts, rng), hosts[B].info, SEEDS)
    hosts[A].wipe()
    for each in (B, C):
        hosts[each].hides_from = hosts[A].node
    with pytest.raises(IdentityConflict, match="repeat it on that broker"):
        await bootstrap(network(hosts, rng), hosts[A].info, SEEDS)
    assert hosts[A].bound is None
