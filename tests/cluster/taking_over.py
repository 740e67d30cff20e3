"""How soon the topics of a killed broker are served elsewhere, and what that takes of the metadata store:
``python -m tests.cluster.taking_over [topics]``.

Three brokers; one of them has all topics, and is killed: once with all of them at rest, and once with a
message in each that is in no segment. The log of the metadata store says afterwards what was written, when,
and in how many entries: the leader stamps each entry.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from sava.ledger.protocol import LedgerRecord
from sava.ledger.registry import LEDGERS
from sava.metadata.commands import Delete, LeaseExpire, LeaseRevoke, Put, Txn, TxnBatch, decode_proposal
from sava.metadata.identity import open_state
from sava.raft.types import EntryKind
from sava.storage import keys
from sava.storage.types import TopicState
from sava.topics import specs
from sava.topics.specs import Ownership, OwnershipState
from sava.wal.disk import LocalDisk
from tests.cluster.mirrored import MirroredBrokers
from tests.support.brokers import BrokerProcess, Brokers
from tests.support.waiting import until

PARALLEL: Final = 32


@dataclass
class Step:
    """All writes of one kind."""

    first_ms: int
    last_ms: int = 0
    entries: int = 0
    operations: int = 0


@dataclass
class TakingOver:
    """What it came to, from the end of the registration on."""

    topics: int
    tails: int
    killed_ms: int
    served_ms: int = 0
    gone_ms: int = 0
    entries: int = 0
    operations: int = 0
    bytes: int = 0
    cpu_s: float = 0.0
    """Of the brokers that are left, from the kill on: what it takes on a machine that does other work too."""
    steps: dict[str, Step] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return (self.served_ms - self.gone_ms) / 1000

    def __str__(self) -> str:
        lines = [
            f"{self.topics} topics, {self.tails} with a tail: killed, registration gone after "
            f"{(self.gone_ms - self.killed_ms) / 1000:.2f} s, all served {self.seconds:.2f} s later; "
            f"{self.entries} log entries, {self.operations} operations, {self.bytes} bytes, "
            f"{self.cpu_s:.1f} s of CPU",
            f"{'step':20} {'first':>8} {'last':>8} {'entries':>8} {'writes':>8}",
        ]
        for name in sorted(self.steps, key=lambda each: self.steps[each].first_ms):
            step = self.steps[name]
            first, last = ((at - self.gone_ms) / 1000 for at in (step.first_ms, step.last_ms))
            lines.append(f"{name:20} {first:8.2f} {last:8.2f} {step.entries:8} {step.operations:8}")
        return "\n".join(lines)


class PlainBrokers(MirroredBrokers):
    """Without traps, which look into a file at each transaction."""

    async def prepare(self) -> BrokerProcess:
        return await Brokers.prepare(self)


async def take_over(directory: Path, *, topics: int, tails: int) -> TakingOver:
    """Kill the owner of so many topics, ``tails`` of them with a message in the journal only."""
    async with PlainBrokers(
        3, directory, upload_interval_s=3600, meta_store={"snapshot_threshold": 1_000_000}
    ) as cluster:
        owner = await cluster.follower()
        await cluster.mirrored()
        names = [f"/default/topic-{number}" for number in range(topics)]
        await _own_all(cluster, owner, names)
        await _publish(cluster, names[:tails])
        gone = await cluster.id_of(owner)
        asked = next(broker for broker in cluster.brokers if broker is not owner)
        measured = TakingOver(topics, tails, killed_ms=_now_ms())
        owner.kill()
        await owner.ended()
        measured.cpu_s = -sum(map(_cpu_s, cluster.running))
        await _taken_up(cluster.running, topics)
        measured.served_ms = _now_ms()
        measured.cpu_s += sum(map(_cpu_s, cluster.running))
    _read_log(asked, gone, measured)
    return measured


async def _own_all(cluster: MirroredBrokers, owner: BrokerProcess, names: list[str]) -> None:
    others = [str(await cluster.id_of(each)) for each in cluster.brokers if each is not owner]
    for other in others:
        await cluster.command("brokers", "drain", other)
    await _each(names, cluster.create)
    await _taken_up([owner], len(names))
    for other in others:
        await cluster.command("brokers", "activate", other)


async def _publish(cluster: MirroredBrokers, names: list[str]) -> None:
    async with cluster.sava_client() as client:

        async def publish(name: str) -> None:
            async with client.producer(name) as producer:
                await producer.send(b"x" * 100)

        await _each(names, publish)


async def _each(names: list[str], work: Callable[[str], Awaitable[object]]) -> None:
    waiting = iter(names)

    async def take_turns() -> None:
        for name in waiting:
            await work(name)

    await asyncio.gather(*(take_turns() for _ in range(PARALLEL)))


async def _taken_up(brokers: Sequence[BrokerProcess], count: int) -> None:
    """By what they log, which costs them nothing more: asking them would be part of what is measured."""

    async def are_taken_up() -> bool:
        lines = (line for broker in brokers for line in broker.lines)
        return sum("agent: done job=take_up" in line for line in lines) >= count

    await until(are_taken_up, f"{count} topics are taken up", timeout=180)


# -- the log -------------------------------------------------------------------------------------


def _read_log(broker: BrokerProcess, gone: int, measured: TakingOver) -> None:
    """Of a broker that has stopped."""
    state = open_state(LocalDisk(broker.data_dir), rng=random.SystemRandom())
    try:
        assert state.recovered.core is not None
        entries = state.recovered.core.entries
    finally:
        state.log.close()
        state.release()
    epochs: Counter[str] = Counter()
    for entry in entries:
        if entry.kind is not EntryKind.COMMAND:
            continue
        proposal = decode_proposal(entry.data)
        is_counted = proposal.stamp_ms >= measured.killed_ms and proposal.stamp_ms <= measured.served_ms
        changes = list(_changes(proposal.command, epochs))
        if not is_counted:
            continue
        if isinstance(proposal.command, LeaseExpire | LeaseRevoke) and not measured.gone_ms:
            measured.gone_ms = proposal.stamp_ms
        if measured.gone_ms:
            measured.entries += 1
            measured.operations += len(changes)
            measured.bytes += len(entry.data)
            for change, count in Counter(changes).items():
                step = measured.steps.setdefault(change, Step(proposal.stamp_ms))
                step.last_ms = proposal.stamp_ms
                step.entries += 1
                step.operations += count


def _changes(command: object, epochs: Counter[str]) -> Iterator[str]:
    if isinstance(command, LeaseExpire | LeaseRevoke):
        yield "registration gone"
    txns = command.txns if isinstance(command, TxnBatch) else (command,) if isinstance(command, Txn) else ()
    for operation in (each for txn in txns for each in txn.then):
        match operation:
            case Put(key) if key.startswith(specs.TOPICS) and key.endswith("/ownership"):
                record = msgspec.json.decode(operation.value, type=Ownership)
                is_taken = record.state is OwnershipState.ASSIGNED and record.incarnation
                yield "taken" if is_taken else str(record.state.value)
            case Put(key) if keys.is_state_key(key):
                state = msgspec.json.decode(operation.value, type=TopicState)
                is_claim = state.epoch > epochs[key]
                epochs[key] = state.epoch
                yield "storage " + ("sealed" if state.sealed else "claimed" if is_claim else "stored")
            case Put(key) if key.startswith(LEDGERS):
                journal = msgspec.json.decode(operation.value, type=LedgerRecord)
                yield f"journal {journal.state.value}"
            case Put(key) | Delete(key):
                yield (
                    "descriptor" if key.startswith(keys.TOPICS) else "other: " + "/".join(key.split("/")[:3])
                )
            case _:
                yield "other"


def _cpu_s(broker: BrokerProcess) -> float:
    fields = Path(f"/proc/{broker.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topics", type=int, nargs="?", default=1000)
    parser.add_argument("--tails", type=int, default=None)
    arguments = parser.parse_args()
    cases = [0, arguments.topics] if arguments.tails is None else [arguments.tails]
    for tails in cases:
        with tempfile.TemporaryDirectory() as directory:
            print(asyncio.run(take_over(Path(directory), topics=arguments.topics, tails=tails)), flush=True)


if __name__ == "__main__":
    main()
