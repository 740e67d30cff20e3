"""``make attack``: a cluster of three brokers under attack, while a client publishes and consumes.

    python -m tests.security.attack --minutes 2 [--secure] [--only raft --only "huge names"]

The brokers, the attacker and the client (this process) are processes of their own. One attack follows the
other; each has the same share of the time. For each, the table says how many of its attempts were accepted
and refused, how long the client's publishing took meanwhile, how large the brokers were, and how many of them
had to be started again.

The exit code is 1 if an acknowledged message was lost, a broker died or hung, an attack was accepted that
must be refused, or the client or a broker passed a bound.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from sava.client import Client
from sava.errors import SavaError
from tests.security.attacks import Attack, Tally, Target, all_attacks
from tests.security.secured_cluster import SecuredCluster
from tests.support.brokers import BrokerProcess, Brokers
from tests.support.processes import PIPE, start_sava
from tests.support.waiting import PATIENCE_S, NotInTime, until

TOPIC: Final = "/default/victim"
VICTIM: Final = "victim"
ATTACKER: Final = "attacker"
"""Has a token, and no role."""
PAUSE_S: Final = 0.01
"""Between two messages of the victim."""
HANGS_S: Final = 5.0
"""A broker that does not answer ``/healthz`` within this time hangs."""
SETTLE_S: Final = 2.0
"""After each attack: what comes of it late is its own."""
LOOK_S: Final = 0.25


@dataclass
class Bounds:
    p99_s: float
    """Of the victim's publishing, during any attack."""
    growth_mb: int
    """Of a broker's memory, over what it had before the attacks."""


@dataclass
class Row:
    """What is known of one attack."""

    attack: Attack
    tally: Tally = field(default_factory=Tally)
    latencies: list[float] = field(default_factory=list)
    errors: int = 0
    """Of the victim."""
    largest_mb: int = 0
    restarts: int = 0

    def quantile(self, part: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else math.inf


class Victim:
    """The client that others must not disturb: one message at a time, and a consumer of all of them."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self.acknowledged: set[bytes] = set()
        self.received: set[bytes] = set()
        self.row: Row | None = None
        """Of the attack under way."""
        self._has_all = asyncio.Event()

    async def publish(self) -> None:
        number = 0
        async with (
            self._connect() as client,
            client.producer(TOPIC, name="victim", linger_ms=0, timeout=PATIENCE_S) as producer,
        ):
            while True:
                payload = f"{number}".encode()
                number, began = number + 1, time.monotonic()
                try:
                    await producer.send(payload)
                except SavaError:
                    if self.row is not None:
                        self.row.errors += 1
                    await asyncio.sleep(1.0)
                else:
                    self.acknowledged.add(payload)
                    if self.row is not None:
                        self.row.latencies.append(time.monotonic() - began)
                await asyncio.sleep(PAUSE_S)

    async def consume(self) -> None:
        async with (
            self._connect() as client,
            client.consumer(TOPIC, subscription="victim") as consumer,
        ):
            async for message in consumer:
                self.received.add(bytes(message.payload))
                await consumer.ack(message)

    async def lost(self) -> set[bytes]:
        """What was acknowledged, and neither came to the consumer nor is in the topic."""
        with suppress(NotInTime):
            await until(lambda: self.acknowledged <= self.received, "all has come", timeout=PATIENCE_S)
        missing = self.acknowledged - self.received
        if missing:
            async with self._connect() as client, client.reader(TOPIC) as reader:
                with suppress(TimeoutError):
                    async with asyncio.timeout(PATIENCE_S):
                        async for message in reader:
                            missing.discard(bytes(message.payload))
                            if not missing:
                                break
        return missing


def memory_mb(broker: BrokerProcess) -> int:
    """What the process has in memory; 0 if it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{broker.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) >> 10
    return 0


class Siege:
    """One run: all attacks, one after the other."""

    def __init__(self, cluster: Brokers, attacks: Sequence[Attack], seconds: float) -> None:
        self._cluster = cluster
        self._attacks = attacks
        self._seconds = seconds
        self._victim = Victim(lambda: client_of(cluster))
        self.rows: list[Row] = []
        self.before_mb = 0
        self.lost: set[bytes] = set()

    async def run(self) -> None:
        cluster, victim = self._cluster, self._victim
        await cluster.create(TOPIC)
        if isinstance(cluster, SecuredCluster):
            for role in ("producer", "consumer", "reader"):
                await cluster.bind(VICTIM, role, topic=TOPIC)
        parts = [asyncio.create_task(part) for part in (victim.consume(), victim.publish())]
        try:
            await until(lambda: len(victim.received) > 100, "the victim publishes and consumes")
            self.before_mb = max(map(memory_mb, cluster.brokers))
            for attack in self._attacks:
                row = Row(attack)
                self.rows.append(row)
                victim.row = row
                await self._one(row)
                print(line_of(row), flush=True)
            victim.row = None
            parts.pop().cancel()
            self.lost = await victim.lost()
            for part in parts:
                if part.done() and not part.cancelled():
                    part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _one(self, row: Row) -> None:
        watching = asyncio.create_task(self._watch(row))
        try:
            row.tally = await attacked(row.attack, target_of(self._cluster), self._seconds)
            await asyncio.sleep(SETTLE_S)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await self._restart_broken(row)

    async def _watch(self, row: Row) -> None:
        while True:
            row.largest_mb = max(row.largest_mb, *map(memory_mb, self._cluster.brokers))
            await asyncio.sleep(LOOK_S)

    async def _restart_broken(self, row: Row) -> None:
        """Brokers that died, and those that hang: an operator would."""
        for broker in self._cluster.brokers:
            if broker.is_running and await is_healthy(broker):
                continue
            row.restarts += 1
            if broker.is_running:
                broker.kill()
            await broker.ended()
            with suppress(AssertionError, TimeoutError):
                await broker.start()
        with suppress(SavaError, NotInTime, AssertionError):
            await self._cluster.registered(timeout=20)


async def is_healthy(broker: BrokerProcess) -> bool:
    try:
        async with asyncio.timeout(HANGS_S):
            return (await broker.http("/healthz"))[0] == 200
    except (OSError, TimeoutError, IndexError, ValueError):
        return False


async def attacked(attack: Attack, target: Target, seconds: float) -> Tally:
    """The tally of one attack, in a process of its own."""
    process = await start_sava(
        attack.name, f"{seconds:g}", module="tests.security.attacks", stdin=PIPE, stdout=PIPE, limit=1 << 20
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(target))
    try:
        async with asyncio.timeout(4 * seconds + 60):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
        return Tally(note="the attacker did not end in time")
    if process.returncode:
        return Tally(note=f"the attacker failed ({process.returncode})")
    return msgspec.json.decode(out, type=Tally)


def client_of(cluster: Brokers) -> Client:
    if isinstance(cluster, SecuredCluster):
        return cluster.client_of(VICTIM)
    return Client([broker.client_url for broker in cluster.brokers], timeout=PATIENCE_S)


def target_of(cluster: Brokers) -> Target:
    secured = cluster if isinstance(cluster, SecuredCluster) else None
    return Target(
        ca=str(secured.tls.ca) if secured is not None and secured.tls is not None else "",
        token=secured.token_of(ATTACKER) if secured is not None else "",
        client=tuple(broker.client_url.rpartition("/")[2] for broker in cluster.brokers),
        admin=tuple(broker.admin for broker in cluster.brokers),
        raft=tuple(broker.raft_address for broker in cluster.brokers),
        http=tuple(f"127.0.0.1:{broker.http_port}" for broker in cluster.brokers),
    )


# -- the report --------------------------------------------------------------------------------


HEAD: Final = (
    f"{'attack':<28} {'accepted':>8} {'refused':>8} {'expected':>9} {'p50 ms':>8} {'p99 ms':>8} "
    f"{'errors':>6} {'MB':>6} {'restarts':>8}"
)


def line_of(row: Row) -> str:
    tally, attack = row.tally, row.attack
    return (
        f"{attack.name:<28} {tally.accepted:>8} {tally.refused:>8} {attack.expected:>9} "
        f"{1000 * row.quantile(0.5):>8.1f} {1000 * row.quantile(0.99):>8.1f} "
        f"{row.errors:>6} {row.largest_mb:>6} {row.restarts:>8}  {tally.note}"
    )


def faults(siege: Siege, bounds: Bounds, *, is_secured: bool = False) -> list[str]:
    """What must not be."""
    found = [f"{len(siege.lost)} acknowledged messages are lost"] if siege.lost else []
    for row in siege.rows:
        attack = row.attack
        if row.tally.accepted and attack.must_be_refused(is_secured=is_secured):
            found.append(f"{attack.name}: accepted {row.tally.accepted} times")
        if row.restarts:
            found.append(f"{attack.name}: {row.restarts} brokers died or hung")
        if row.quantile(0.99) > bounds.p99_s:
            found.append(f"{attack.name}: p99 of publishing {row.quantile(0.99):.2f} s > {bounds.p99_s:g} s")
        if row.largest_mb > siege.before_mb + bounds.growth_mb:
            found.append(
                f"{attack.name}: a broker had {row.largest_mb} MB, {siege.before_mb} MB before the attacks"
            )
        if not row.tally.accepted and not row.tally.refused:
            found.append(f"{attack.name}: nothing was tried ({row.tally.note})")
    return found


async def _main(arguments: argparse.Namespace) -> int:
    known = all_attacks()
    attacks = [each for name, each in known.items() if any(word in name for word in arguments.only or ("",))]
    seconds = arguments.minutes * 60 / len(attacks)
    with tempfile.TemporaryDirectory() as directory:
        kind = SecuredCluster if arguments.secure else Brokers
        async with kind(3, Path(directory)) as cluster:
            siege = Siege(cluster, attacks, seconds)
            print(HEAD, flush=True)
            await siege.run()
            survived = [await is_healthy(broker) for broker in cluster.brokers]
            print(
                f"memory before the attacks: {siege.before_mb} MB; healthy at the end: {sum(survived)} of 3"
            )
    found = faults(siege, Bounds(arguments.p99, arguments.growth), is_secured=arguments.secure)
    for fault in found:
        print(f"FAULT {fault}")
    if not found:
        print("ok: nothing was lost, nothing died, and the bounds were kept")
    return 1 if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.security.attack", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="for all attacks together")
    parser.add_argument("--only", action="append", metavar="TEXT", help="attacks with it in their name")
    parser.add_argument(
        "--secure", action="store_true", help="TLS and tokens; the attacker has a token without any role"
    )
    parser.add_argument("--p99", type=float, default=1.0, help="seconds that publishing may take")
    parser.add_argument("--growth", type=int, default=800, help="megabytes that a broker may grow by")
    sys.exit(asyncio.run(_main(parser.parse_args())))


if __name__ == "__main__":
    main()
