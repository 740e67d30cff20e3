"""``python -m tests.torture.soak``: an hour of steady load without faults, in which nothing may grow.

Topics move, brokers are drained, consumers come and go. Every ten seconds each broker's memory, descriptors,
threads, disk, metadata and Raft log are sampled. At the end each figure's slope (Theil and Sen: the median of
the slopes between all pairs of samples, which single peaks do not bend) is printed, and the growth over the
run is compared with what is allowed: a fixed amount for what memory and files do by chance, and a little per
hour. The first quarter is warm-up: caches fill.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from sava.errors import SavaError
from sava.proto import topics_admin_pb2
from tests.torture.cluster import CALL_S, CLIENTS, SNAPSHOT_THRESHOLD, Broker, Cluster, Surroundings, ended
from tests.torture.faults import Operator
from tests.torture.history import Acked, Received, Recorder, read
from tests.torture.load import SETTLE_S, Status

SAMPLE_S: Final = 10.0
TOPICS: Final = {
    "/default/exclusive": "exclusive",
    "/default/shared": "shared",
    "/default/failover": "failover",
    "/default/keyed": "key_shared",
}
RETENTION_MINUTES: Final = 2
"""Segments, and what the metadata store knows of them, must go as others come."""
LOG_ENTRIES: Final = 4 * SNAPSHOT_THRESHOLD
"""Of the Raft log: a snapshot is taken after the threshold, and some entries stay for slow followers."""


class Allowed(msgspec.Struct, frozen=True):
    """Growth that is no leak: ``floor`` in any run, and ``per_hour`` more."""

    floor: float
    per_hour: float
    unit: str = ""


ALLOWED: Final = {
    "memory": Allowed(24.0, 16.0, "MB"),
    "descriptors": Allowed(24.0, 8.0),
    "threads": Allowed(6.0, 2.0),
    "disk": Allowed(96.0, 32.0, "MB"),
    "metadata keys": Allowed(120.0, 60.0),
    "metadata bytes": Allowed(100.0, 50.0, "kB"),
}


class Sample(msgspec.Struct, frozen=True):
    at: float
    broker: str
    figures: dict[str, float]
    log_entries: int
    snapshot: int


class Slope(msgspec.Struct, frozen=True):
    broker: str
    figure: str
    first: float
    last: float
    per_hour: float
    growth: float
    allowed: float
    unit: str

    @property
    def is_flat(self) -> bool:
        return self.growth <= self.allowed

    def __str__(self) -> str:
        verdict = "flat" if self.is_flat else "GROWS"
        return (
            f"{self.broker:<6} {self.figure:<15} {self.first:>9.1f} {self.last:>9.1f} "
            f"{self.per_hour:>+10.1f}/h {self.growth:>+8.1f} of {self.allowed:<7.1f} {self.unit:<3} {verdict}"
        )


def slopes(samples: Sequence[Sample], *, warm_up: float = 0.25) -> list[Slope]:
    """Of each figure of each broker, after the warm-up, which is a share of the run."""
    began, over = min(each.at for each in samples), max(each.at for each in samples)
    since = began + (over - began) * warm_up
    series: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        if sample.at >= since:
            for figure, value in sample.figures.items():
                series[sample.broker, figure].append((sample.at, value))
    found: list[Slope] = []
    for (broker, figure), points in sorted(series.items()):
        steps = [
            (later - earlier) / (end - start)
            for (start, earlier), (end, later) in combinations(points, 2)
            if end > start
        ]
        per_hour = median(steps) * 3600 if steps else 0.0
        hours = (points[-1][0] - points[0][0]) / 3600
        rule = ALLOWED[figure]
        third = max(len(points) // 3, 1)
        first, last = (median(value for _, value in some) for some in (points[:third], points[-third:]))
        allowed = rule.floor + rule.per_hour * hours
        found.append(Slope(broker, figure, first, last, per_hour, per_hour * hours, allowed, rule.unit))
    return found


def log_faults(samples: Sequence[Sample]) -> list[str]:
    """Whether the Raft log is cut by snapshots, and short because of it."""
    faults: list[str] = []
    by_broker: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_broker[sample.broker].append(sample)
    for broker, some in sorted(by_broker.items()):
        longest = max(each.log_entries for each in some)
        if longest > LOG_ENTRIES:
            faults.append(f"{broker}: the Raft log has {longest} entries, {LOG_ENTRIES} at most are expected")
        if some[-1].snapshot <= 0:
            faults.append(f"{broker}: no snapshot of the metadata store was taken")
    return faults


def lost(history: Path) -> list[str]:
    """Acknowledged messages that their subscription has not received."""
    acked: dict[str, set[int]] = defaultdict(set)
    received: dict[str, set[int]] = defaultdict(set)
    for event in read(history):
        if isinstance(event, Acked):
            acked[event.topic].add(event.offset)
        elif isinstance(event, Received):
            received[event.topic].add(event.offset)
    missing = {topic: sorted(offsets - received[topic]) for topic, offsets in acked.items()}
    return [f"{topic}: not received: {some[:5]}" for topic, some in missing.items() if some]


class Soak:
    def __init__(self, around: Surroundings, seed: int, minutes: float) -> None:
        self._around = around
        self._seed = seed
        self._minutes = minutes
        self._recorder = Recorder(around.directory / "events.jsonl")
        self._cluster = Cluster(around, self._recorder)
        self.samples: list[Sample] = []
        self.faults: list[str] = []

    async def run(self) -> None:
        load: subprocess.Popen[bytes] | None = None
        try:
            await self._cluster.start()
            for topic in TOPICS:
                await self._cluster.create(topic)
                await self._limit(topic)
            self._cluster.plan(TOPICS, seed=self._seed, keeps_all=False, calls_of_a_key=1 << 40)
            command = [sys.executable, "-m", "tests.torture.load", str(self._around.directory / "plan.json")]
            log = self._around.directory / "load.log"
            load = self._around.start(CLIENTS, command, log, stdin=subprocess.PIPE)
            operating = asyncio.create_task(
                Operator(self._cluster, [*TOPICS], self._recorder, self._seed).run()
            )
            await self._sample(time.monotonic() + self._minutes * 60)
            operating.cancel()
            await asyncio.gather(operating, return_exceptions=True)
            assert load.stdin is not None
            load.stdin.write(b"stop\n")
            load.stdin.flush()
            if await ended(load, timeout=3 * SETTLE_S):
                self.faults.append("the load has failed; see load.log")
        finally:
            if load is not None and load.poll() is None:
                load.kill()
            await self._cluster.close()
            self._recorder.close()
        self.faults += log_faults(self.samples)
        self.faults += lost(self._around.directory / "load.jsonl")

    async def _limit(self, topic: str) -> None:
        policy = topics_admin_pb2.Policy(retention_time_minutes=RETENTION_MINUTES)
        request = topics_admin_pb2.SetTopicPolicyRequest(name=topic, policy=policy)
        client = self._cluster.brokers[0].client
        await client.call(client.topics.SetTopicPolicy, request, timeout=CALL_S)

    async def _sample(self, until: float) -> None:
        began = time.monotonic()
        while time.monotonic() < until:
            await asyncio.sleep(SAMPLE_S)
            for broker in self._cluster.brokers:
                try:
                    self.samples.append(await sampled(broker))
                except (SavaError, FileNotFoundError) as error:
                    print(f"{broker.name} was not sampled: {error}", flush=True)
            status = Status.read(self._around.directory / "load.status")
            seen = "  ".join(_shortly(each) for each in self.samples[-len(self._cluster.brokers) :])
            print(f"{time.monotonic() - began:6.0f} s  acked {status.acked}  {seen}", flush=True)


def _shortly(sample: Sample) -> str:
    figures = sample.figures
    return (
        f"{sample.broker}: {figures['memory']:.0f} MB, {figures['descriptors']:.0f} files, "
        f"{figures['disk']:.0f} MB disk, {sample.log_entries} entries"
    )


async def sampled(broker: Broker) -> Sample:
    """Raises SavaError, or FileNotFoundError if the process has just ended."""
    process = Path("/proc") / str(broker.pid)
    status = await broker.client.status(timeout=CALL_S)
    memory = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    figures = {
        "memory": memory / 1e6,
        "descriptors": float(len(os.listdir(process / "fd"))),  # noqa: PTH208 (of a directory that changes)
        "threads": float(len(os.listdir(process / "task"))),  # noqa: PTH208
        "disk": await asyncio.to_thread(broker.disk.used) / 1e6,
        "metadata keys": float(status.keys),
        "metadata bytes": status.total_bytes / 1e3,
    }
    entries = status.last_index - status.first_index + 1
    return Sample(time.monotonic(), broker.name, figures, entries, status.snapshot_index)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, metavar="FILE", help="write samples and slopes as JSON")
    parser.add_argument("--directory", type=Path, help="for logs and histories; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="keep the files of a run without findings")
    options = parser.parse_args(arguments)
    seed = options.seed or random.randrange(1, 1 << 32)
    directory = options.directory or Path(tempfile.mkdtemp(prefix=f"sava-soak-{os.getpid()}-"))
    directory.mkdir(exist_ok=True, parents=True)
    print(f"seed {seed}, files in {directory}", flush=True)
    around = Surroundings.make(directory, seed=seed, tls=False, namespaces=False)
    around.loses_power = False
    soak = Soak(around, seed, options.minutes)
    try:
        asyncio.run(soak.run())
    finally:
        around.close()
    found = slopes(soak.samples)
    print(f"{'broker':<6} {'figure':<15} {'first':>9} {'last':>9} {'slope':>12} {'growth':>8}")
    print("\n".join(map(str, found)))
    faults = soak.faults + [f"{each.broker}: {each.figure} grows" for each in found if not each.is_flat]
    print("\n".join([*(f"FINDING  {each}" for each in faults), f"verdict  {len(faults)} findings"]))
    if options.report is not None:
        report = {"seed": seed, "samples": soak.samples, "slopes": found, "findings": faults}
        options.report.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    if not faults and not options.keep:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
