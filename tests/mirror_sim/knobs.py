"""Knobs: all that differs between two seeds, drawn from the seed. Whole classes of faults are off in many
seeds, because one class can hide what another would show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

_DRAWN_TOGETHER = (
    "loss",
    "delay",
    "duplicate",
    "cut",
    "isolate",
    "raftcut",
    "leaderloss",
    "crash",
    "powercut",
    "allpower",
    "pause",
    "syncerror",
    "diskfull",
    "slowdisk",
    "rot",
    "rottail",
    "wipe",
    "secondcoordinator",
    "move",
    "churn",
)
FAULTS = (*_DRAWN_TOGETHER, "evict", "leave")
"""The last two are drawn apart, so that seeds without them are what they were before they existed."""


@dataclass(frozen=True, slots=True)
class Knobs:
    seed: int
    brokers: int
    qw: int
    qa: int
    allows_degraded: bool
    self_fences: bool
    """Whether a broker that cannot renew its lease stops by itself. Safety must not depend on it."""
    faults: frozenset[str]
    chaos_ms: int
    tempo_ms: int
    """Mean time between faults of one class."""
    topics: int
    producers: int
    messages: int
    think_ms: int
    payload_bytes: int
    window: int
    note_bytes: int
    max_backlog: int
    latency_us: int
    sync_us: int
    loss_percent: int
    lease_ms: int
    replace_ms: int
    upload_ms: int
    rejoin_ms: int

    def without(self, fault: str) -> Knobs:
        return replace(self, faults=self.faults - {fault})

    def describe(self) -> str:
        plain = ", ".join(
            f"{name}={getattr(self, name)}"
            for name in self.__dataclass_fields__
            if name not in ("faults", "seed")
        )
        return f"{plain}\n  faults on:  {' '.join(sorted(self.faults))}"


def draw(seed: int) -> Knobs:
    rng = Random(f"{seed}/knobs")
    brokers = rng.choices([1, 2, 3, 4, 5], weights=[3, 12, 40, 25, 20])[0]
    qw, qa = _quorums(rng, brokers)
    chance = rng.choice([0.1, 0.25, 0.4, 0.7])
    evicts = frozenset({"evict"} if Random(f"{seed}/evict").random() < 0.25 else ())
    leaves = frozenset({"leave"} if Random(f"{seed}/leave").random() < 0.25 else ())
    return Knobs(
        seed=seed,
        brokers=brokers,
        qw=qw,
        qa=qa,
        allows_degraded=rng.random() < 0.4,
        self_fences=rng.random() < 0.5,
        faults=frozenset(name for name in _DRAWN_TOGETHER if rng.random() < chance) | evicts | leaves,
        chaos_ms=rng.choice([4_000, 8_000, 15_000]),
        tempo_ms=rng.choice([700, 1_500, 3_000]),
        topics=rng.randint(1, 4),
        producers=rng.randint(1, 4),
        messages=rng.choice([100, 200, 400]),
        think_ms=rng.choice([5, 20, 60]),
        payload_bytes=rng.choice([8, 100, 600]),
        window=rng.choice([1, 500, 4_000, 1 << 20]),
        note_bytes=rng.choice([1, 400, 4_000, 1 << 20]),
        max_backlog=rng.choice([2_000, 1 << 20]),
        latency_us=rng.choice([200, 1_000, 5_000]),
        sync_us=rng.choice([100, 1_000, 8_000]),
        loss_percent=rng.choice([1, 5, 15]),
        lease_ms=rng.choice([500, 1_000]),
        replace_ms=rng.choice([100, 400, 1_500]),
        upload_ms=rng.choice([50, 300, 1_500, 60_000]),
        rejoin_ms=rng.choice([50, 200]),
    )


def _quorums(rng: Random, brokers: int) -> tuple[int, int]:
    """Mostly what a cluster of this size has by default."""
    if brokers == 1:
        return 1, 1
    if brokers == 2:
        return 2, 2
    return rng.choices([(3, 2), (2, 2), (3, 3), (2, 1)], weights=[70, 15, 10, 5])[0]
