"""Knobs: all that differs between two seeds, drawn from the seed (swarm testing).

A simulator that always runs one average configuration finds average bugs. Each seed therefore gets its own
cluster size, timeouts, windows and limits, and a fault mix in which whole classes are off: some bugs only
show when one class is absent, because its noise hides them (a lost trigger, for example, is repaired by the
next crash)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

NETWORK_FAULTS = (
    "loss",
    "delay",
    "reorder",
    "duplicate",
    "replay",
    "partition",
    "oneway",
    "bridge",
    "badlink",
    "slowlink",
    "swizzle",
    "misdeliver",
    "corrupt",
)
PROCESS_FAULTS = (
    "crash",
    "longcrash",
    "diskcrash",
    "powerloss",
    "pause",
    "stall",
    "skew",
    "clockjump",
    "doublestart",
)
EVIDENCE_FAULTS = ("falsealarm",)
"""Drawn apart, so that the seeds without them are what they were before these were thought of."""
DISK_FAULTS = ("slowdisk", "syncerror", "diskfull", "bitflip", "wipe")
OPERATOR_ACTIONS = ("add", "promote", "remove", "replace", "transfer", "snapshot")
LOAD_SHAPES = ("burst", "largevalue", "leases", "slowwatcher")

_DRAWN_TOGETHER = NETWORK_FAULTS + PROCESS_FAULTS + DISK_FAULTS + OPERATOR_ACTIONS + LOAD_SHAPES
FAULTS = _DRAWN_TOGETHER + EVIDENCE_FAULTS
"""Every class that can be switched off; ``--shrink`` removes them one by one."""


@dataclass(frozen=True, slots=True)
class Knobs:
    seed: int
    nodes: int
    faults: frozenset[str]
    """The classes that are on. Only ever asked ``in``, so its order cannot matter."""
    chaos_ms: int
    """Length of the phase with faults."""
    quiet_ms: int
    """Tail of that phase without new faults or load: lost triggers show only when nothing else happens."""
    tempo: int
    """Mean time between faults of one class, in ms."""
    operator_ms: int
    """Mean time between the operator's actions."""
    clients: int
    keys: int
    think_ms: int
    operations: int
    """No more operations than this, so that a fast cluster does not make an endless seed."""
    watchers: int
    tick_ms: int
    election_ticks: int
    heartbeat_ticks: int
    max_append_bytes: int
    max_inflight: int
    max_inflight_bytes: int
    max_uncommitted_bytes: int
    max_apply_bytes: int
    max_pending_reads: int
    keep_entries: int
    snapshot_entries: int
    snapshot_chunk_bytes: int
    snapshot_timeout_ticks: int
    promote_max_lag: int
    file_bytes: int
    latency_us: int
    sync_us: int
    loss_percent: int
    skew_percent: tuple[int, int] = field(default=(100, 100))
    """Slowest and fastest clock of any node, in percent of true time."""

    def without(self, fault: str) -> Knobs:
        return replace(self, faults=self.faults - {fault})

    def describe(self) -> str:
        off = sorted(set(FAULTS) - self.faults)
        plain = ", ".join(
            f"{name}={getattr(self, name)}"
            for name in self.__dataclass_fields__
            if name not in ("faults", "seed")
        )
        return f"{plain}\n  faults on:  {' '.join(sorted(self.faults))}\n  faults off: {' '.join(off)}"


def draw(seed: int) -> Knobs:
    rng = Random(f"{seed}/knobs")
    has_good_clocks = rng.random() < 0.25
    faults = _draw_faults(rng)
    if Random(f"{seed}/evidence").random() < 0.2:
        faults |= frozenset(EVIDENCE_FAULTS)
    skew = (90, 110) if has_good_clocks else rng.choice([(100, 100), (80, 125), (50, 200)])
    tick = rng.choice([50, 100, 100, 150])
    return Knobs(
        seed=seed,
        nodes=rng.choices([1, 2, 3, 4, 5, 6, 7], weights=[4, 4, 40, 8, 30, 4, 10])[0],
        faults=faults,
        chaos_ms=rng.choice([8_000, 15_000, 20_000, 30_000]),
        quiet_ms=rng.choice([0, 0, 3_000, 6_000]),
        tempo=rng.choice([2_000, 4_000, 8_000]),
        operator_ms=rng.choice([700, 1_500, 4_000]),
        clients=rng.randint(2, 5),
        keys=rng.choice([1, 3, 8, 20]),
        think_ms=rng.choice([20, 60, 120]),
        operations=rng.choice([200, 350, 600]),
        watchers=rng.randint(0, 3),
        tick_ms=tick,
        election_ticks=rng.choice([5, 10, 10, 10]),
        heartbeat_ticks=rng.choice([1, 1, 2]),
        max_append_bytes=rng.choice([1, 300, 4096, 1 << 20]),
        max_inflight=rng.choice([1, 2, 8, 64]),
        max_inflight_bytes=rng.choice([1, 2000, 8 << 20]),
        max_uncommitted_bytes=rng.choice([2000, 1 << 20, 32 << 20]),
        max_apply_bytes=rng.choice([1, 1000, 4 << 20]),
        max_pending_reads=rng.choice([1, 4096, 4096]),
        keep_entries=rng.choice([0, 0, 1, 20, 200]),
        snapshot_entries=rng.choice([5, 20, 60, 200, 10_000]),
        snapshot_chunk_bytes=rng.choice([64, 1000, 1 << 18]),
        snapshot_timeout_ticks=rng.choice([5, 20, 50]),
        promote_max_lag=rng.choice([0, 10, 100]),
        file_bytes=rng.choice([1 << 12, 1 << 14, 1 << 20]),
        latency_us=rng.choice([200, 1_000, 5_000]),
        sync_us=rng.choice([100, 1_000, 8_000]),
        loss_percent=rng.choice([1, 5, 20]),
        skew_percent=skew,
    )


def _draw_faults(rng: Random) -> frozenset[str]:
    """Each class is on with a probability that is itself drawn: calm seeds, wild seeds, and all between."""
    chance = rng.choice([0.1, 0.2, 0.35, 0.6])
    operator = rng.choice([0.0, 0.5, 1.0])
    return frozenset(
        name for name in _DRAWN_TOGETHER if rng.random() < (operator if name in OPERATOR_ACTIONS else chance)
    )
