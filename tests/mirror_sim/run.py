"""One simulated life: trouble first, then healing, then the bill.

While there is trouble every invariant is checked as things happen. Then all faults end, and within bounded
virtual time every ledger that is not open is closed and every topic accepts a message, unless too many disks
are gone for ever: then recovery must wait and say for whom, an operator gives up, and what is lost must be
within what the operator was told. At the end every acknowledged message is read."""

from __future__ import annotations

from collections.abc import Callable

from sava.ledger.protocol.record import LedgerState, Range, recovery_quorum
from sava.ledger.protocol.recovery import Loss
from tests.mirror_sim.clients import Prober, Producer
from tests.mirror_sim.controller import Attempt
from tests.mirror_sim.copies import durable_note
from tests.mirror_sim.knobs import Knobs, draw
from tests.mirror_sim.nemesis import Nemesis
from tests.mirror_sim.world import MS, World
from tests.sim.history import Violation
from tests.sim.result import RunResult, result_of

HEAL_MS = 40_000
PATIENCE_MS = 4_000
"""So long after healing everybody who will ever answer has answered."""


def run_seed(
    seed: int, *, knobs: Knobs | None = None, trace: Callable[[str], None] | None = None, recent: int = 60
) -> RunResult:
    world = World(knobs or draw(seed))
    world.schedule.trace = trace
    return result_of(seed, world, simulate, recent=recent)


def simulate(world: World) -> None:
    world.begin()
    nemesis = Nemesis(world)
    producers = [Producer(world, number) for number in range(world.knobs.producers)]
    for producer in producers:
        producer.start()
    nemesis.start()
    world.schedule.run_until(world.knobs.chaos_ms * MS)
    nemesis.is_stopped = True
    for producer in producers:
        producer.is_stopped = True
    heal(world)
    converge(world)
    world.oracle.settle()


def heal(world: World) -> None:
    world.note("heal")
    world.is_healing = True
    world.net.heal()
    world.leaving.clear()
    world.store.leaderless_until = 0
    for broker in world.brokers.values():
        broker.disk.set_capacity(None)
        broker.disk._machine.faults.clear()
        broker.is_slow = False
        broker.paused_until = 0
        broker.controller = None  # those who were deposed are told so
        broker.start()


def converge(world: World) -> None:
    began = world.now
    prober = Prober(world)
    while not has_converged(world, prober):
        if world.now - began > HEAL_MS * MS:
            raise Violation("liveness", f"no service {HEAL_MS / 1000:g} s after healing\n{world.describe()}")
        world.schedule.run_until(world.now + 250 * MS)
        prober.probe()
        if world.now - began > PATIENCE_MS * MS:
            decide(world)
            forgo_tails(world)


def has_converged(world: World, prober: Prober) -> bool:
    states = [held.value.state for _, held in world.store.items("ledger")]
    return LedgerState.RECOVERING not in states and len(prober.acked) == world.knobs.topics


def decide(world: World) -> None:
    """The operator: gives up what can never come back."""
    for broker in world.brokers.values():
        for attempt in list(broker.controller.attempts.values()) if broker.controller is not None else ():
            loss = attempt.core.loss()
            if (
                loss is not None
                and world.now - attempt.started_at > 800 * MS
                and is_hopeless(world, attempt, loss)
            ):
                if not (loss.missing or loss.unknown_from is not None):
                    raise Violation("J6", f"{attempt.core.ledger} waits and does not say for what")
                world.count("recoveries that waited for ever")
                world.note("give up", attempt.core.ledger, loss)
                world.oracle.gave_up(attempt.core.ledger, loss.missing, loss.unknown_from)
                attempt.core.accept_loss(loss)
                attempt.pump()


def forgo_tails(world: World) -> None:
    """Of a ledger that was closed with every byte intact, the last copy of some may be lost before it is
    read: then nobody can have them."""
    for broker in world.brokers.values():
        for ledger, tail in broker.salvager.tails.items() if broker.salvager is not None else ():
            is_rotten = any(where == ledger for _, where in world.oracle.rotten)
            if tail.is_done or not (is_rotten or any(each not in world.disks for each in tail.sources)):
                continue
            # What is in segments may be asked for as well, if no disk that was heard had been told so.
            batches = world.oracle.batches[ledger]
            here = next((each.position_end for each in batches if each.frame.position == tail.at), 0)
            end = here or next((each.frame.position for each in batches if each.frame.position > tail.at), 0)
            lost = Range(tail.at, end or tail.record.end)
            there = [storage for storage in tail.sources if storage in world.disks]
            notes = [durable_note(world.disks[each], ledger) for each in there]
            floor = max((note.floor for note in notes if note is not None), default=0)
            if floor > tail.at:  # a disk that was not heard when the ledger was closed knows better
                tail.at = min(floor, tail.record.end)
                tail.ask()
            elif not any(world.oracle.holds(each, ledger, *lost) for each in there):
                world.count("parts lost after closing")
                world.oracle.gave_up(ledger, (lost,), None)
                tail.at = lost.end
                tail.ask()


def is_hopeless(world: World, attempt: Attempt, loss: Loss) -> bool:
    """Whether disks that are gone, or damaged, are what it waits for."""
    record = attempt.core.record
    there = [member for member in record.last.members if member in world.disks]
    if len(there) < recovery_quorum(record.last):
        return True
    is_damaged = any(
        storage not in world.disks or (storage, attempt.core.ledger) in world.oracle.rotten
        for storage in record.storages
    )
    return bool(loss.missing) and is_damaged
