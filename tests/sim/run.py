"""One simulated life of a cluster: trouble first, then healing, then the bill.

Phase one is about safety: clients, operator and nemesis do what they like, and every invariant is checked
after every event. Phase two is about liveness: all faults end, and within bounded virtual time there must be
one leader, one configuration, equal states, and a fresh write and read through every member. Phase three
compares all that clients were ever told with what is there."""

from __future__ import annotations

from collections.abc import Callable

from sava.metadata.commands import Put, Txn, TxnResult, decode_proposal
from sava.metadata.machine.state_machine import StateMachine
from sava.metadata.peer import Committed, Propose, ReadAt, ReadIndex, Reply
from sava.raft.types import Membership
from tests.sim.history import Violation
from tests.sim.holders import Holder, Leases
from tests.sim.knobs import Knobs, draw
from tests.sim.nemesis import Nemesis
from tests.sim.node import SimNode
from tests.sim.operators import Operator
from tests.sim.result import RunResult, result_of
from tests.sim.watchers import Watcher
from tests.sim.workload import Client, Prober
from tests.sim.world import MS, World

HEAL_MS = 90_000
"""Bound for coming back: some elections with split votes, a snapshot over small chunks, a repair by the
operator."""


def run_seed(
    seed: int, *, knobs: Knobs | None = None, trace: Callable[[str], None] | None = None, recent: int = 60
) -> RunResult:
    world = World(knobs or draw(seed))
    world.schedule.trace = trace
    return result_of(seed, world, simulate, recent=recent)


def simulate(world: World) -> None:
    knobs = world.knobs
    world.found(knobs.nodes)
    nemesis, operator = Nemesis(world), Operator(world)
    clients = [Client(world, f"c{number}", with_session=number % 2 == 0) for number in range(knobs.clients)]
    clients.append(Prober(world))
    watchers = [Watcher(world, f"w{number}") for number in range(knobs.watchers)]
    leases = Leases(world)
    holders = [Holder(world, leases, f"h{number}") for number in range(4)] if "leases" in knobs.faults else []
    parts: list[Nemesis | Operator | Client | Watcher | Holder]
    parts = [nemesis, operator, *clients, *watchers, *holders]
    for part in parts:
        part.start()
    world.run(knobs.chaos_ms)
    nemesis.stopped = operator.stopped = True
    for client in clients:
        client.stopped = True
    for holder in holders:
        holder.stopped = True
    world.run(knobs.quiet_ms)
    heal(world)
    if is_beyond_repair(world):
        world.count("beyond repair")
        world.oracle.settle()
        return
    converge(world, operator)
    serve(world)
    settle(world, clients, watchers, leases)


def heal(world: World) -> None:
    world.note("heal")
    world.healing = True
    world.net.heal()
    for ghost in world.ghosts:
        ghost.crash(None)
    world.ghosts.clear()
    for node in world.nodes.values():
        node.mend_disk()
        node.thaw()
        node.start()


def is_beyond_repair(world: World) -> bool:
    """Lost disks took a majority while a change was under way: no protocol comes back from that, and none may
    pretend to."""
    for node in world.running():
        membership = node.status.membership if node.status is not None else None
        for half in (membership.voters, membership.outgoing) if membership is not None else ():
            if half and 2 * sum(not world.nodes[voter].gone for voter in half) <= len(half):
                return True
    return False


def converge(world: World, operator: Operator) -> None:
    end = world.now + HEAL_MS * MS
    while True:
        world.schedule.run_until(world.now + 500 * MS)
        if not operator.repair() and has_converged(world):
            return
        if world.now > end:
            raise Violation(
                "liveness", f"no convergence {HEAL_MS / 1000:g} s after healing\n{world.describe()}"
            )


def has_converged(world: World) -> bool:
    leader = world.leader()
    if leader is None or leader.status is None:
        return False
    status = leader.status
    if (
        status.membership.is_joint
        or status.applied != status.last_index
        or status.commit != status.last_index
    ):
        return False
    for member in members(world, status.membership):
        theirs = member.status
        if theirs is None or theirs.term != status.term or theirs.leader != leader.id:
            return False
        if theirs.applied != status.applied or theirs.membership != status.membership:
            return False
    digests = {
        member.replica.machine.digest() for member in members(world, status.membership) if member.replica
    }
    if len(digests) != 1:
        raise Violation("I5", f"at {status.applied} the members' states differ")
    return True


def members(world: World, membership: Membership) -> list[SimNode]:
    return [world.nodes[node] for node in membership.members]


def serve(world: World) -> None:
    """A fresh write and a fresh read through every member."""
    leader = world.leader()
    assert leader is not None
    assert leader.status is not None
    replies: list[Reply | None] = []
    nodes = members(world, leader.status.membership)
    for node in nodes:
        node.ask(Propose(Txn(then=(Put(f"/fresh/{node.id}", b"fresh"),))), replies.append, 20_000)
    world.wait_for(lambda: len(replies) == len(nodes), "a fresh write through every member")
    for reply in replies:
        if not isinstance(reply, Committed) or not isinstance(reply.result, TxnResult):
            raise Violation("liveness", f"a fresh write after healing was answered with {reply}")
    replies.clear()
    for node in nodes:
        node.ask(ReadIndex(), replies.append, 20_000)
    world.wait_for(lambda: len(replies) == len(nodes), "a fresh read through every member")
    for reply in replies:
        if not isinstance(reply, ReadAt):
            raise Violation("liveness", f"a fresh read after healing was answered with {reply}")
    for node in nodes:
        assert node.replica is not None
        if node.replica.machine.get(f"/fresh/{node.id}") is None:
            raise Violation(
                "I16", f"node {node.id} does not see its own fresh write after a linearizable read"
            )


def settle(world: World, clients: list[Client], watchers: list[Watcher], leases: Leases) -> None:
    world.run(8_000)  # open requests end, the last leases expire
    for node in world.running():
        if node.open_asks:
            raise Violation(
                "API", f"node {node.id}: {node.open_asks} requests got no answer by their deadline"
            )
    for watcher in watchers:
        watcher.settle()
        world.counts["watch batches"] += watcher.batches
        world.counts["watch gaps"] += watcher.gaps
    world.oracle.settle()
    world.counts["acked"] += world.oracle.acked
    world.counts["reads"] += world.oracle.reads
    world.counts["operations"] += len(world.oracle.operations)
    world.counts["leases expired"] += leases.expired
    check_machines(world, leases)


def check_machines(world: World, leases: Leases) -> None:
    """Every state equals the history; a replay of the log, and a restored image, equal the live state
    (I14)."""
    replayed = StateMachine(world.config.limits)
    for index in sorted(world.history.lines):
        line = world.history.lines[index]
        replayed.apply(decode_proposal(line.data), line.term)
    leader = world.leader()
    assert leader is not None
    assert leader.status is not None
    for node in members(world, leader.status.membership):
        assert node.replica is not None
        machine = node.replica.machine
        for key in sorted(world.history.keys):
            if machine.get(key) != world.history.at(key, machine.revision):
                raise Violation(
                    "I17", f"node {node.id}: {key} is {machine.get(key)}, the history says otherwise"
                )
        if machine.revision == replayed.revision and machine.digest() != replayed.digest():
            raise Violation("I14", f"node {node.id}: the state is not the replay of its log")
        restored = StateMachine.restore(machine.freeze().chunks(), world.config.limits)
        if restored.digest() != machine.digest():
            raise Violation("I14", f"node {node.id}: the state does not survive its own snapshot")
        overdue = [lease.lease for lease in machine.leases if lease.lease in leases.ttl_ms]
        if overdue and world.leader() is leader and max(leases.ttl_ms.values(), default=0) < 2_000:
            raise Violation("S67", f"leases {overdue} outlived their holders by far")
