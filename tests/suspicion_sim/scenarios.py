"""What must hold in the simulated network, one scenario for each rule; ``run_seed`` draws one of them.

A scenario returns the rules that were broken, as sentences; none: it passed.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from sava.raft.types import NodeId
from tests.suspicion_sim.world import DAY_MS, LEASE_MS, Network, World, others

WARM_UP_MS = 5_000
LOSSY = Network(delay_ms=200, jitter_ms=20, loss=0.02)

Scenario = Callable[[Random, int], list[str]]


def _world(rng: Random, seed: int, *, nodes: int = 0, network: Network | None = None) -> World:
    world = World(seed, nodes or rng.choice([3, 3, 4, 5, 7]), network)
    world.run(WARM_UP_MS + rng.randrange(1_000))
    return world


def _follower(rng: Random, world: World) -> NodeId:
    return rng.choice(others(world))


def _leader(world: World) -> NodeId:
    assert world.leader is not None
    return world.leader


def _found(world: World, victim: NodeId, began: int, bound_ms: int) -> list[str]:
    took = world.out_after(began, victim)
    late = [] if took is not None and took <= bound_ms else [f"{victim} out after {took} ms, not {bound_ms}"]
    return late + _no_false(world)


def _no_false(world: World) -> list[str]:
    return [*world.broken, *(f"false eviction: {each}" for each in world.false_evictions())]


# -- the dead are found --------------------------------------------------------------------------


def killed_follower(rng: Random, seed: int) -> list[str]:
    world = _world(rng, seed)
    victim, began = _follower(rng, world), world.now
    world.kill(victim)
    world.run(8_000)
    return _found(world, victim, began, 1_000)


def killed_leader(rng: Random, seed: int) -> list[str]:
    world = _world(rng, seed)
    victim, began = _leader(world), world.now
    world.kill(victim)
    world.run(8_000)
    return _found(world, victim, began, 1_300)


def stopped_or_cut_off(rng: Random, seed: int) -> list[str]:
    world = _world(rng, seed)
    victim, began = rng.choice([_leader(world), _follower(rng, world)]), world.now
    rng.choice([world.stop, world.isolate])(victim)
    world.run(8_000)
    return _found(world, victim, began, 2_600)


def struck_again(rng: Random, seed: int) -> list[str]:
    """Brokers are stopped or cut off for several seconds in turn, the leader too, and come back as the same
    process: the eighth is found as early as the first. A broker that was cut off heard none of the others,
    which says nothing of them; and a broker that was away for longer than a failover takes was not slow."""
    world = _world(rng, seed, nodes=3)
    broken = []
    for _ in range(8):
        victim, began = rng.choice(world.ids), world.now
        is_stop = rng.random() < 0.5
        (world.stop if is_stop else world.isolate)(victim)
        world.run(rng.randrange(3_500, 7_500))
        (world.resume if is_stop else world.rejoin)(victim)
        world.run(rng.randrange(17_000, 25_000))
        took = world.out_after(began, victim)
        if took is None or took > 2_600:
            broken.append(f"{victim} out after {took} ms, is_stop={is_stop}")
    return [*broken, *_no_false(world)]


def found_in_a_bad_network(rng: Random, seed: int) -> list[str]:
    """At the latest when the lease ends."""
    world = _world(rng, seed, network=LOSSY)
    world.run(120_000)
    victim, began = _follower(rng, world), world.now
    rng.choice([world.stop, world.isolate, world.kill])(victim)
    world.run(12_000)
    return _found(world, victim, began, LEASE_MS + 1_000)


# -- the living are left alone -------------------------------------------------------------------


def short_pause(rng: Random, seed: int) -> list[str]:
    world = _world(rng, seed)
    victim = rng.choice(world.ids)
    world.stop(victim)
    world.run(rng.randrange(100, 1_200))
    world.resume(victim)
    world.run(5_000)
    return [*_no_false(world), *(f"evicted after a short pause: {each}" for each in world.evictions)]


def busy(rng: Random, seed: int) -> list[str]:
    """All cores of one machine are taken for 30 s: its broker runs in slices, with waits of up to 0.9 s."""
    world = _world(rng, seed)
    victim, end = rng.choice(world.ids), world.now + 30_000
    while world.now < end:
        wait = rng.randrange(50, 900)
        world.stall(victim, wait)
        world.run(wait + rng.randrange(25, 150))
    world.run(3_000)
    return [*_no_false(world), *(f"evicted while busy: {each}" for each in world.evictions)]


def broken_link(rng: Random, seed: int) -> list[str]:
    """The leader and one other do not hear each other, in one direction or both; the rest hear everybody."""
    world = _world(rng, seed)
    leader, victim = _leader(world), _follower(rng, world)
    for source, target in rng.choice(
        [[(leader, victim)], [(victim, leader)], [(leader, victim), (victim, leader)]]
    ):
        world.cut(source, target)
    world.run(20_000)
    return [*_no_false(world), *(f"evicted over a broken link: {each}" for each in world.evictions)]


def asleep_itself(rng: Random, seed: int) -> list[str]:
    """The leader's process stands still, not long enough to be replaced, and accuses nobody afterwards."""
    world = _world(rng, seed)
    world.stall(_leader(world), rng.randrange(1_550, 2_900))
    before = world.count("doubted")
    world.run(6_000)
    doubts = world.count("doubted") - before
    evicted = [f"evicted by a leader that slept: {each}" for each in world.evictions if each.is_false]
    leader_doubts = [
        f"doubted by a leader that slept: {note}" for _, by, note in world.notes if note.node != by
    ]
    sleeper = [each for each in leader_doubts if world.term == 1]
    return [*world.broken, *evicted, *(sleeper if doubts else [])]


def restarted(rng: Random, seed: int) -> list[str]:
    """A process dies and is back, registered again, while the leader still asks about the former one."""
    world = _world(rng, seed, network=Network(delay_ms=60, jitter_ms=5))
    victim = _follower(rng, world)
    world.kill(victim)
    world.run(rng.randrange(300, 900))
    world.restart(victim)
    world.run(8_000)
    return _no_false(world)


def minority(rng: Random, seed: int) -> list[str]:
    """Most members die at once: the leader must not end leases, whoever would agree."""
    world = _world(rng, seed, nodes=rng.choice([3, 5, 7]))
    for victim in rng.sample(others(world), len(world.ids) // 2 + 1):
        world.kill(victim)
    world.run(5_000)
    return [*world.broken, *(f"evicted by a minority: {each}" for each in world.evictions)]


def flapping(rng: Random, seed: int) -> list[str]:
    """A slow machine stands still for two seconds, again and again: it loses its topics twice, not each
    time."""
    world = _world(rng, seed)
    victim = _follower(rng, world)
    for _ in range(20):
        world.stop(victim)
        world.run(rng.randrange(1_700, 2_500))
        world.resume(victim)
        world.run(15_000)
    losses = len([each for each in world.evictions if each.node == victim])
    return [*_no_false(world), *([f"lost its topics {losses} times"] if losses > 2 else [])]


def flapping_for_long(rng: Random, seed: int) -> list[str]:
    """A machine stands still for three to five seconds, several times a minute: each time is long enough to
    be an outage, and together they are a slow machine, which keeps its topics after the fourth."""
    world = _world(rng, seed)
    victim = _follower(rng, world)
    for _ in range(12):
        world.stop(victim)
        world.run(rng.randrange(3_100, 5_000))
        world.resume(victim)
        world.run(9_000)
    losses = len([each for each in world.evictions if each.node == victim])
    return [*_no_false(world), *([f"lost its topics {losses} times"] if losses > 4 else [])]


def soup(rng: Random, seed: int) -> list[str]:
    """Anything, for two minutes, in any network."""
    network = rng.choice([Network(), Network(20, 20), Network(100, 50, 0.005), LOSSY])
    world = _world(rng, seed, network=network)
    for _ in range(rng.randrange(4, 12)):
        victim = rng.choice(world.ids)
        match rng.randrange(5):
            case 0:
                world.kill(victim)
                world.run(rng.randrange(50, 9_000))
                world.restart(victim)
            case 1:
                world.stop(victim)
                world.run(rng.randrange(50, 9_000))
                world.resume(victim)
            case 2:
                world.isolate(victim)
                world.run(rng.randrange(50, 9_000))
                world.rejoin(victim)
            case 3:
                other = rng.choice([each for each in world.ids if each != victim])
                world.cut(victim, other)
                world.run(rng.randrange(50, 9_000))
                world.mend(victim, other)
            case _:
                world.stall(victim, rng.randrange(50, 1_400))
        world.run(rng.randrange(3_000, 10_000))
    world.run(15_000)
    missing = [f"{id_} is not registered at the end" for id_ in world.ids if id_ not in world.registered]
    return [*_no_false(world), *missing]


SCENARIOS: tuple[Scenario, ...] = (
    killed_follower,
    killed_leader,
    stopped_or_cut_off,
    struck_again,
    found_in_a_bad_network,
    short_pause,
    busy,
    broken_link,
    asleep_itself,
    restarted,
    minority,
    flapping,
    flapping_for_long,
    soup,
)


def run_seed(seed: int) -> tuple[str, list[str]]:
    scenario = SCENARIOS[seed % len(SCENARIOS)]
    return scenario.__name__, scenario(Random(f"scenario/{seed}"), seed)


def lossy_hours(seed: int, hours: float) -> tuple[int, int]:
    """In a network with 200 ms delay and 2 % loss: evictions (all of them false), and doubts of the leader
    alone, which others or the next message refuted."""
    world = World(f"lossy/{seed}", 3, LOSSY)
    world.run(int(hours * DAY_MS / 24))
    return len(world.evictions), world.count("doubted")
