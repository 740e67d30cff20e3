"""Failover: a node fails while producers send to six topics, one message at a time each, and the clock runs
between two acknowledgements.

A round: bring two topics to the victim, let the fault happen, wait until every topic is acknowledged messages
again, undo the fault, wait until the cluster is whole. The figure of a topic is the longest time between two
of its acknowledgements around the fault, before it is undone. The p50 is over the topics that the victim
owned; the slowest is over all topics, for a topic that loses a copy must not stall either. At the end of each
fault's rounds everything is read back, and an acknowledged message that is missing ends the section.

Rounds can be kept in a file (``--resume FILE``). A later run counts those that were measured of the same
version and adds what is missing, so that a long measurement can be made in short parts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bench import network, timeline
from bench.jetstream import JetStream, SyncedJetStream
from bench.kafka import Kafka, TunedKafka
from bench.network import Network
from bench.plan import Plan
from bench.processes import ProcessFailedError
from bench.report import Quantity, Row, Target, duration
from bench.systems import Sava, System
from bench.worker import Worker

SECTION: Final = "failover"
OWNED: Final = 2
"""Topics of a victim: a third of all, as a balanced cluster of three has them."""
APART_S: Final = 2.0
"""Between two victims that fail in the same round."""
OBSERVED_S: Final = 2.0
"""After every topic was acknowledged a message again: what stalls once more must not be missed."""
FLOWING_S: Final = 0.5
"""A topic without an acknowledgement for longer stalls."""
CALM_S: Final = 1.0
GIVE_UP_S: Final = 60.0
"""A topic that stalls for longer counts as this, and the row says so."""
POLL_S: Final = 0.05
OUTAGES: Final = 3
MINUTE_S: Final = 60.0
PEER_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    title: str
    kind: str
    """kill, stop or cut."""
    p50_s: float
    slowest_s: float
    leads: bool | None = None
    """Whether the victim leads the cluster's metadata; None: every third one does, as by chance."""
    nodes: int = 3
    victims: int = 1
    at_once: bool = True
    """Whether a second victim fails while the first is still gone."""
    for_peers: bool = True


FAULTS: Final = (
    Fault("kill-follower", "SIGKILL of a follower", "kill", 1.5, 3.0, leads=False),
    Fault("kill-leader", "SIGKILL of the leader", "kill", 2.5, 4.0, leads=True),
    Fault("stop", "SIGSTOP", "stop", 3.0, 6.0),
    Fault("cut", "network cut", "cut", 3.0, 6.0),
    Fault(
        "two",
        "SIGKILL of one, then of the next",
        "kill",
        2.5,
        4.0,
        victims=2,
        at_once=False,
    ),
    # Two of three copies may be on the two victims: Kafka and NATS then wait for one of them to come back.
    Fault(
        "two-of-five",
        f"SIGKILL of two of five brokers, {APART_S:.0f} s apart",
        "kill",
        2.5,
        4.0,
        nodes=5,
        victims=2,
        for_peers=False,
    ),
)


def systems() -> Sequence[type[System]]:
    return (Sava, Kafka, TunedKafka, JetStream, SyncedJetStream)


@dataclass(frozen=True, slots=True)
class Round:
    """What one round measured, in seconds."""

    system: str
    version: str
    fault: str
    owned: Sequence[float]
    """The longest gap of each topic that a victim owned."""
    others: Sequence[float]
    back: float
    """The longest gap of any topic from undoing the fault until the cluster was whole."""
    gave_up: bool = False
    stages: Sequence[dict[str, float]] = field(default_factory=list)
    """Of each strike, when each stage of its failover was over (``bench.timeline``)."""


@dataclass(frozen=True, slots=True)
class ReadBack:
    """What was found of the messages of some rounds."""

    system: str
    version: str
    fault: str
    acked: int
    lost: int
    doubled: int
    failed: int


@dataclass(slots=True)
class Kept:
    """Rounds and what was read back after them, in memory and, if there is a file, there as well."""

    path: Path | None = None
    rounds: list[Round] = field(default_factory=list)
    read_back: list[ReadBack] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                if "owned" in entry:
                    self.rounds.append(Round(**entry))
                else:
                    self.read_back.append(ReadBack(**entry))

    def add(self, entry: Round | ReadBack) -> None:
        if isinstance(entry, Round):
            self.rounds.append(entry)
        else:
            self.read_back.append(entry)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(entry)) + "\n")

    def of(self, system: str, version: str, fault: str) -> list[Round]:
        wanted = (system, version, fault)
        return [each for each in self.rounds if (each.system, each.version, each.fault) == wanted]

    def checked(self, system: str, version: str, fault: str) -> str:
        """What to say of the messages of these rounds."""
        wanted = (system, version, fault)
        found = [each for each in self.read_back if (each.system, each.version, each.fault) == wanted]
        if not found:
            return "not read back"
        lost, acked = sum(each.lost for each in found), sum(each.acked for each in found)
        return f"{lost} of {acked:,} acked lost"


def longest_gap(acks: Sequence[float], since: float, until: float) -> float:
    """The longest time without an acknowledgement that ended after ``since`` or had not ended by ``until``.
    ``acks`` are in order and begin with the last one before ``since``, if there was any."""
    times = [time for time in acks if time < until]
    if not times or times[0] > since:
        times.insert(0, since)
    times.append(until)
    return max(later - earlier for earlier, later in itertools.pairwise(times) if later > since)


def resumed(acks: Sequence[float], since: float) -> float:
    """When the longest of those gaps ended."""
    times = [since, *(time for time in acks if time > since)]
    return max(itertools.pairwise([*times, times[-1]]), key=lambda pair: pair[1] - pair[0])[1]


def part(fault: Fault) -> Callable[[Plan], Coroutine[Any, Any, list[Row]]]:
    async def run(plan: Plan) -> list[Row]:
        return await measure(plan, fault)

    return run


async def measure(plan: Plan, fault: Fault) -> list[Row]:
    """Run what is missing of each system's rounds, and give the rows of all that is known."""
    kept = Kept(plan.resume)
    reasons: dict[str, str] = {}
    for kind in systems():
        version = kind.version()
        is_wanted = plan.wants(fault.name, kind.sender) and (kind is Sava or fault.for_peers)
        if version is None or not is_wanted:
            continue
        rounds = plan.fault_rounds if kind is Sava else min(PEER_ROUNDS, plan.fault_rounds)
        missing = rounds - len(kept.of(kind.name, version, fault.name))
        if missing <= 0:
            continue
        if fault.kind == "cut" and not network.is_possible():
            reasons[kind.name] = f"not measured: namespaces need root, or {network.ALTERNATIVE}"
            continue
        try:
            await _run(plan, kind, version, fault, missing, kept)
        except Exception as error:
            if kind is Sava:
                raise
            # A peer that fails must not take Sava's figures with it.
            last_line = (str(error).strip() or repr(error)).splitlines()[-1]
            reasons[kind.name] = f"broke off: {last_line[:200]}"
        if kind is Sava:
            rounds_kept = kept.of(kind.name, version, fault.name)
            for line in timeline.table([told for each in rounds_kept for told in each.stages]):
                plan.say(line)
    return list(rows_of(fault, kept, reasons))


async def _run(plan: Plan, kind: type[System], version: str, fault: Fault, rounds: int, kept: Kept) -> None:
    folder = plan.folder / f"failover-{fault.name}-{kind.sender}"
    folder.mkdir(parents=True)
    async with AsyncExitStack() as stack:
        cables = stack.enter_context(Network(fault.nodes)) if network.is_possible() else None
        cluster = await stack.enter_async_context(kind(folder, fault.nodes, cables))
        await cluster.create()
        sender = (cluster.sender, cluster.addresses)
        worker = await stack.enter_async_context(Worker("steady", folder, *sender))
        recorder = timeline.Recorder(cluster.logs, plan.logs / fault.name if plan.logs else None)
        session = Session(cluster, worker, fault, recorder)
        await worker.do("begin", topics=cluster.topics)
        await cluster.healthy()
        for number in range(rounds):
            struck = await session.round(number)
            kept.add(Round(kind.name, version, fault.name, **asdict(struck)))
        found = await worker.do("end")
        failures = found.pop("failures")
        kept.add(ReadBack(kind.name, version, fault.name, **found))
        if found["lost"]:
            raise ProcessFailedError(f"{kind.name}, {fault.title}: {found}, failures {failures}")


@dataclass(slots=True)
class Struck:
    """What the strikes of one round have done, as ``Round`` keeps it."""

    owned: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    back: float = 0.0
    gave_up: bool = False
    stages: list[dict[str, float]] = field(default_factory=list)


class Session:
    """One cluster under one kind of fault, with its traffic."""

    def __init__(self, cluster: System, worker: Worker, fault: Fault, recorder: timeline.Recorder) -> None:
        self._cluster = cluster
        self._worker = worker
        self._fault = fault
        self._recorder = recorder
        self._ended: dict[int, list[float]] = {node: [] for node in range(fault.nodes)}
        """When each node's outages were undone."""

    async def round(self, number: int) -> Struck:
        victims = await self._choose(number)
        if self._fault.at_once:
            return await self._strike(victims)
        whole = Struck()
        for victim in victims:
            one = await self._strike([victim])
            whole.owned += one.owned
            whole.others += one.others
            whole.back = max(whole.back, one.back)
            whole.gave_up = whole.gave_up or one.gave_up
            whole.stages += one.stages
        return whole

    async def _choose(self, number: int) -> list[int]:
        leader = await self._cluster.leader()
        leads = number % 3 == 2 if self._fault.leads is None else self._fault.leads
        followers = [(leader + 1 + each) % self._fault.nodes for each in range(self._fault.nodes - 1)]
        followers = followers[number % len(followers) :] + followers[: number % len(followers)]
        return ([leader, *followers] if leads else followers)[: self._fault.victims]

    async def _rested(self, victim: int) -> None:
        """Until a victim whose process lives on has had fewer than ``OUTAGES`` within a minute.
        Sava suspects a node that has had more only later."""
        ended = self._ended[victim]
        if self._fault.kind != "kill" and len(ended) >= OUTAGES:
            await asyncio.sleep(max(0.0, ended[-OUTAGES] + MINUTE_S - time.monotonic()))

    async def _strike(self, victims: list[int]) -> Struck:
        for victim in victims:
            await self._rested(victim)
            await self._give_topics(victim, spare=victims)
        await self._calm()
        owners = await self._cluster.owners()
        owned = {topic for topic in self._cluster.topics if owners.get(topic) in victims}
        ids = [self._cluster.id_of(victim) for victim in victims]
        self._recorder.begin()
        began = time.monotonic()
        try:
            for at, victim in enumerate(victims):
                await asyncio.sleep(APART_S if at else 0)
                self._break(victim)
            gave_up = not await self._until_flowing(time.monotonic())
            observed = time.monotonic()
            acks = await self._worker.do("acks", since=began)
        finally:
            for victim in victims:
                self._undo(victim)
        await self._cluster.healthy()
        await self._until_flowing(observed)
        later = await self._worker.do("acks", since=observed)
        back = max(longest_gap(times, observed, time.monotonic()) for times in later.values())
        gaps = {topic: longest_gap(times, began, observed) for topic, times in acks.items()}
        told = timeline.stages(self._recorder.read(), began, observed, victims=ids, topics=owned)
        if not gave_up:
            told["acked"] = round(max(resumed(acks[topic], began) for topic in owned) - began, 3)
        self._recorder.keep(f"{self._fault.name}, nodes {ids}: {told}", max(gaps.values()))
        return Struck(
            owned=[gap for topic, gap in gaps.items() if topic in owned],
            others=[gap for topic, gap in gaps.items() if topic not in owned],
            back=back,
            gave_up=gave_up,
            stages=[told],
        )

    async def _give_topics(self, victim: int, *, spare: list[int]) -> None:
        """``OWNED`` topics for a victim, from nodes that are no victims."""
        owners = await self._cluster.owners()
        lacking = OWNED - sum(owner == victim for owner in owners.values())
        givers = [topic for topic in self._cluster.topics if owners.get(topic) not in spare]
        for topic in givers[: max(0, lacking)]:
            await self._cluster.bring(topic, victim)

    async def _calm(self) -> None:
        """Until no topic has stalled for ``CALM_S``: the moves before a fault are no part of it."""
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            since = time.monotonic()
            await asyncio.sleep(CALM_S)
            acks = await self._worker.do("acks", since=since)
            if max(longest_gap(times, since, time.monotonic()) for times in acks.values()) < FLOWING_S:
                return
            if time.monotonic() > deadline:
                raise ProcessFailedError(f"topics still stall {GIVE_UP_S:.0f} s after all nodes are there")

    async def _until_flowing(self, since: float) -> bool:
        """Whether every topic was acknowledged messages again in time, and still is ``OBSERVED_S`` later."""
        served: float | None = None
        while time.monotonic() < since + GIVE_UP_S:
            last = (await self._worker.do("last")).values()
            now = time.monotonic()
            if min(last) > since and now - min(last) < FLOWING_S:
                served = served or now
                if now - served >= OBSERVED_S:
                    return True
            else:
                served = None
            await asyncio.sleep(POLL_S)
        return False

    def _break(self, victim: int) -> None:
        match self._fault.kind:
            case "kill":
                self._cluster.child(victim).kill()
            case "stop":
                self._cluster.child(victim).pause()
            case "cut":
                assert self._cluster.network is not None
                self._cluster.network.cut(victim)

    def _undo(self, victim: int) -> None:
        self._ended[victim].append(time.monotonic())
        child = self._cluster.child(victim)
        match self._fault.kind:
            case "stop":
                child.resume()
            case "cut":
                assert self._cluster.network is not None
                self._cluster.network.heal(victim)
        if not child.is_running:
            self._cluster.start(victim)


def rows_of(fault: Fault, kept: Kept, reasons: dict[str, str]) -> Iterator[Row]:
    """Sava's p50 and slowest against their targets, then its p50 beside that of each peer."""
    figures: dict[str, tuple[Quantity, float, str]] = {}
    for kind in systems():
        version = kind.version()
        rounds = kept.of(kind.name, version, fault.name) if version else []
        if rounds:
            every = [gap for each in rounds for gap in (*each.owned, *each.others)]
            median = statistics.median(gap for each in rounds for gap in each.owned)
            more = ", a topic was given up" if any(each.gave_up for each in rounds) else ""
            checked = kept.checked(kind.name, version or "", fault.name)
            detail = f"slowest {duration(max(every))} of {len(rounds)} rounds{more}"
            figures[kind.name] = (Quantity(median, "seconds", detail), max(every), checked)
            figures[kind.name + " back"] = (Quantity(max(each.back for each in rounds), "seconds"), 0, "")
    ours = figures.get(Sava.name)
    if ours is None:
        if reason := reasons.get(Sava.name):
            yield Row(SECTION, fault.title, None, note=reason)
    else:
        p50 = Target(f"p50 at most {fault.p50_s:g} s", at_most=fault.p50_s, of_peer=False)
        most = Target(f"at most {fault.slowest_s:g} s", at_most=fault.slowest_s, of_peer=False)
        back = figures[f"{Sava.name} back"][0]
        slowest = Quantity(ours[1], "seconds", f"{back} while it came back; {ours[2]}")
        yield Row(SECTION, f"{fault.title}: p50 without acks", ours[0], None, p50, note=Sava.durability)
        yield Row(SECTION, f"{fault.title}: slowest topic", slowest, None, most)
    for kind in systems():
        if kind is Sava:
            continue
        theirs = figures.get(kind.name)
        parts = (f"{kind.durability}; {theirs[2]}" if theirs else "", reasons.get(kind.name, ""))
        note = "; ".join(part for part in parts if part)
        if note:
            yield Row(
                SECTION,
                f"{fault.title}: p50",
                replace(ours[0], detail="") if ours else None,
                theirs[0] if theirs else None,
                note=note,
                peer_name=kind.name,
            )


PARTS: Final = tuple(part(fault) for fault in FAULTS)
