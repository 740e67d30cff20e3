"""The clients under torture, in processes of their own on the host ``clients``.

    python -m tests.torture.load PLAN             producers, consumers, metadata clients and watchers
    python -m tests.torture.load PLAN GENERATION  one producer of a name that many share (see ``Zombies``)

The first one runs until it reads a line from its standard input. Then producers stop, consumers go on until
they have everything or their time is up, and all topics are read from their beginning. Everything that a
client learns is a line of the history; what it means is left to the oracles.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from sava.api.admin_client import AdminClient, own_credentials
from sava.client import Client, Tls
from sava.client.errors import ClientError, OutcomeUnknown
from sava.client.producer import Producer
from sava.client.subscribe_stream import SubscriptionType
from sava.config import Auth, TlsSettings
from sava.errors import SavaError
from sava.metadata import errors as metadata_errors
from sava.proto import admin_pb2 as pb
from tests.support.brokers import PLAIN
from tests.torture.history import (
    Acked,
    Called,
    Caught,
    Received,
    Recorder,
    Stored,
    Unsent,
    Watched,
    Watching,
    parse,
    payload,
)

PREFIX: Final = "/torture/"
END_KEY: Final = f"{PREFIX}~end"
SEND_S: Final = 30.0
"""Until a message without a receipt fails."""
CALL_S: Final = 3.0
RETRY_S: Final = 0.2
KEYS: Final = 4
"""Registers in use at a time."""
BURST: Final = 10
SETTLE_S: Final = 90.0
"""For consumers, watchers and copies to get everything after the last fault."""


class Plan(msgspec.Struct):
    directory: str
    services: list[str]
    admins: list[str]
    west: str
    topics: dict[str, str]
    """By topic, the type of its subscription, or empty."""
    seed: int
    copied: list[str] = msgspec.field(default_factory=list)
    """Topics that the other cluster has too."""
    shared_name: str = ""
    """The topic of producers that share a name; empty: none."""
    others: list[str] = msgspec.field(default_factory=list)
    """Topics of other programs, which are read at the end."""
    keeps_all: bool = True
    """Whether topics keep their messages, so that all can be read at the end."""
    pause_s: float = 0.02
    """Between two messages of one producer."""
    calls_of_a_key: int = 48
    """Then a new register takes its place: short histories are decided at once."""
    churn_s: float = 20.0
    """How long a consumer of several stays, about."""
    tls: list[str] = msgspec.field(default_factory=list)
    """ca, cert and key."""

    def client_tls(self) -> Tls | None:
        return Tls(*map(Path, self.tls)) if self.tls else None

    def auth(self) -> Auth:
        if not self.tls:
            return PLAIN
        ca, cert, key = map(Path, self.tls)
        return Auth(tls=TlsSettings(cert_file=cert, key_file=key, ca_file=ca))

    @classmethod
    def read(cls, path: Path) -> Plan:
        return msgspec.json.decode(path.read_bytes(), type=cls)


class Status(msgspec.Struct):
    """What the orchestrator sees of the load while it runs."""

    acked: int = 0
    received: int = 0
    calls: int = 0
    watched: int = 0
    errors: int = 0
    last_ack: dict[str, float] = msgspec.field(default_factory=dict)
    acked_by_topic: dict[str, int] = msgspec.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Status:
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()

    def save(self, path: Path) -> None:
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(self))
        draft.rename(path)


class Sender:
    """One producer, which opens itself again whenever it fails. Numbers are never used twice."""

    def __init__(self, client: Client, recorder: Recorder, status: Status, topic: str, name: str) -> None:
        self._client = client
        self._recorder = recorder
        self._status = status
        self._topic = topic
        self._name = name
        self._next = 0

    async def run(self, is_over: Callable[[], bool], pause_s: float, *, burst: int) -> None:
        while not is_over():
            try:
                async with self._client.producer(
                    self._topic, name=self._name, linger_ms=0, timeout=SEND_S
                ) as producer:
                    while not is_over():
                        outcomes = await asyncio.gather(*(self._send(producer) for _ in range(burst)))
                        if not all(outcomes):
                            break
                        await asyncio.sleep(pause_s * burst)
            except ClientError as error:
                self._status.errors += 1
                print(f"{self._topic} {self._name}: {type(error).__name__}: {error}", flush=True)
                await asyncio.sleep(0.2)

    async def _send(self, producer: Producer) -> bool:
        number, self._next = self._next, self._next + 1
        try:
            offset = await producer.send(payload(self._name, number), key=f"k{number % 17}")
        except ClientError as error:
            self._status.errors += 1
            is_unknown, now = isinstance(error, OutcomeUnknown), time.monotonic()
            why = f"{type(error).__name__}: {error}"
            self._recorder.add(Unsent(now, self._topic, self._name, number, is_unknown, why))
            return False
        now = time.monotonic()
        self._recorder.add(Acked(now, self._topic, self._name, number, offset))
        self._status.acked += 1
        self._status.last_ack[self._topic] = now
        counts = self._status.acked_by_topic
        counts[self._topic] = counts.get(self._topic, 0) + 1
        return True


class Load:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._directory = Path(plan.directory)
        self._recorder = Recorder(self._directory / "load.jsonl")
        self._chance = random.Random(plan.seed)
        self._client = Client(plan.services, tls=plan.client_tls(), timeout=10.0)
        self.status = Status()
        self._is_stopping = False
        self._has_all = False
        self._seen: dict[tuple[str, str], set[int]] = defaultdict(set)
        self._reached: dict[str, int] = {}
        """The last revision that each watcher has seen."""

    async def run(self) -> None:
        plan = self._plan
        producing: list[Coroutine[None, None, None]] = []
        consuming: list[Coroutine[None, None, None]] = []
        for topic, kind in plan.topics.items():
            for number in range(2):
                sender = Sender(self._client, self._recorder, self.status, topic, f"p{number}")
                burst = BURST if number else 1
                producing.append(sender.run(lambda: self._is_stopping, plan.pause_s, burst=burst))
            if kind:
                members = {"exclusive": 1, "failover": 2}.get(kind, 3)
                consuming += [self._consume(topic, kind, f"c{number}") for number in range(members)]
        registers = Registers(plan, self._recorder, self.status, lambda: self._is_stopping)
        zombies = Zombies(plan, lambda: self._is_stopping)
        watchers = [self._watch(f"w{number}", number) for number in range(2)]
        tasks = [asyncio.create_task(each) for each in (*consuming, *watchers, self._report())]
        work = [asyncio.create_task(each) for each in (*producing, registers.run(), zombies.run())]
        await self._told_to_stop(work + tasks)
        self._is_stopping = True
        await asyncio.gather(*work)
        await self._finish(registers)
        self._has_all = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.status.save(self._directory / "load.status")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await self._client.close()
        self._recorder.close()

    async def _told_to_stop(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Until the orchestrator says so; a task that has died ends the load with its error."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        waiting = {order := asyncio.create_task(reader.readline()), *tasks}
        while not order.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _report(self) -> None:
        while True:
            self.status.save(self._directory / "load.status")
            await asyncio.sleep(0.2)

    # -- consuming -------------------------------------------------------------------------------

    async def _consume(self, topic: str, kind: str, name: str) -> None:
        chance = random.Random(f"{self._plan.seed} {topic} {name}")
        while not self._has_all:
            try:
                await self._consume_for(topic, kind, name, chance)
            except SavaError as error:
                self.status.errors += 1
                print(f"{topic} {kind} {name}: {type(error).__name__}: {error}", flush=True)
                await asyncio.sleep(0.2)

    async def _consume_for(self, topic: str, kind: str, name: str, chance: random.Random) -> None:
        """One stay. The only consumer of an exclusive subscription stays until the broker ends it."""
        stay_s = 1e9 if kind == "exclusive" else self._plan.churn_s * chance.uniform(0.5, 2.0)
        until = time.monotonic() + stay_s
        seen = self._seen[topic, kind]
        type_: SubscriptionType = kind  # type: ignore[assignment]
        async with self._client.consumer(topic, subscription=kind, type=type_, name=name) as consumer:
            while time.monotonic() < until and not self._has_all:
                batch = await consumer.receive_batch(100, timeout=1.0)
                for message in batch or ():
                    assert message.offset is not None
                    producer, number = parse(message.payload)
                    self._recorder.add(
                        Received(
                            time.monotonic(),
                            *(topic, kind, name, message.offset, producer, number),
                            message.key or "",
                        )
                    )
                    self.status.received += 1
                    if kind == "shared" and message.offset not in seen and chance.random() < 0.02:
                        await consumer.nack(message)
                    else:
                        await consumer.ack(message)
                    seen.add(message.offset)
        if kind != "exclusive":
            await asyncio.sleep(chance.uniform(0.1, 2.0))

    # -- watching --------------------------------------------------------------------------------

    async def _watch(self, watcher: str, number: int) -> None:
        """Each stream is left after a while, and another broker goes on behind the last revision."""
        chance = random.Random(f"{self._plan.seed} {watcher}")
        while True:
            number += 1
            admin = self._plan.admins[number % len(self._plan.admins)]
            try:
                async with AdminClient(admin, own_credentials(self._plan.auth())) as client:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(chance.uniform(5, 30)):
                            await self._follow(client, watcher)
            except metadata_errors.Compacted:
                self._reached.pop(watcher, None)  # it was too far behind: it begins again, and says so
            except SavaError:
                self.status.errors += 1
                await asyncio.sleep(0.3)

    async def _follow(self, client: AdminClient, watcher: str) -> None:
        reached = self._reached.get(watcher)
        begin = 0 if reached is None else reached + 1
        async for answer in client.watch(pb.WatchRequest(prefix=PREFIX, from_revision=begin)):
            if not answer.events and reached is None:
                self._recorder.add(Watching(watcher, answer.revision))
                reached = self._reached[watcher] = answer.revision
            for event in answer.events:
                value = event.kv.value.decode() if event.HasField("kv") else None
                self._recorder.add(Watched(watcher, event.revision, event.key, value))
                self.status.watched += 1
                self._reached[watcher] = event.revision

    # -- the end ---------------------------------------------------------------------------------

    async def _finish(self, registers: Registers) -> None:
        """Read everything, and give consumers and watchers the time to get it."""
        end = await registers.end()
        ends: dict[tuple[str, str], int] = {}
        others = dict.fromkeys([*self._plan.others, self._plan.shared_name], "")
        for topic, kind in (self._plan.topics | others).items():
            if topic and self._plan.keeps_all:
                ends[topic, kind] = await self._read(self._client, topic, "")
            elif topic:
                ends[topic, kind] = self.status.acked_by_topic.get(topic, 0)
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            late = [where for where, count in ends.items() if where[1] and len(self._seen[where]) < count]
            late_watchers = [name for name, reached in self._reached.items() if reached < end]
            if not late and not late_watchers:
                break
            await asyncio.sleep(0.2)
        else:
            print(f"not everything was received: {late}, watchers {late_watchers}", flush=True)
        for watcher, reached in self._reached.items():
            if reached >= end:
                self._recorder.add(Caught(watcher, end))
        await self._read_copies(ends, deadline)

    async def _read(self, client: Client, topic: str, copy: str, *, at_least: int = 0) -> int:
        """How many messages there are; they are recorded if there are enough."""
        found: list[Stored] = []
        async with asyncio.timeout(SETTLE_S), client.reader(topic, end="latest") as reader:
            async for message in reader:
                producer, number = parse(message.payload)
                assert message.offset is not None
                found.append(Stored(topic, message.offset, producer, number, message.key or "", copy))
        if len(found) >= at_least:
            for each in found:
                self._recorder.add(each)
        return len(found)

    async def _read_copies(self, ends: dict[tuple[str, str], int], deadline: float) -> None:
        counts = {topic: count for (topic, _), count in ends.items()}
        async with Client(self._plan.west, tls=self._plan.client_tls(), timeout=10.0) as client:
            for topic in self._plan.copied:
                expected = counts[topic]
                while await self._read(client, topic, "west", at_least=expected) < expected:
                    if time.monotonic() > deadline:
                        await self._read(client, topic, "west")
                        break
                    await asyncio.sleep(1.0)


class Registers:
    """Metadata clients, each at another broker, on a few keys that they share."""

    def __init__(
        self, plan: Plan, recorder: Recorder, status: Status, is_over: Callable[[], bool], *, clients: int = 4
    ) -> None:
        self._plan = plan
        self._recorder = recorder
        self._status = status
        self._is_over = is_over
        self._clients = clients
        self._made = KEYS
        self._keys = [f"{PREFIX}r{number}" for number in range(KEYS)]
        self._used = [0] * KEYS
        self._values = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._call_often(number) for number in range(self._clients)))

    async def _call_often(self, number: int) -> None:
        chance = random.Random(f"{self._plan.seed} register {number}")
        seen: dict[str, int] = {}
        while not self._is_over():
            admin = chance.choice(self._plan.admins)
            async with AdminClient(admin, own_credentials(self._plan.auth())) as client:
                for _ in range(chance.randrange(5, 40)):
                    if self._is_over():
                        break
                    kind = chance.choices(("get", "put", "cas", "delete"), (4, 3, 3, 1))[0]
                    if not await self._call(client, f"m{number}", kind, self._key(chance), seen):
                        # Four clients without a pause would take a processor from brokers that start.
                        await asyncio.sleep(RETRY_S)
                        break
                    await asyncio.sleep(chance.expovariate(8.0))

    def _key(self, chance: random.Random) -> str:
        slot = chance.randrange(KEYS)
        key = self._keys[slot]
        self._used[slot] += 1
        if self._used[slot] >= self._plan.calls_of_a_key:
            self._keys[slot], self._used[slot] = f"{PREFIX}r{self._made}", 0
            self._made += 1
        return key

    async def _call(self, client: AdminClient, name: str, kind: str, key: str, seen: dict[str, int]) -> bool:
        """Whether the broker answered."""
        self._values += 1
        value, expect = f"{name}-{self._values}", seen.get(key, 0) if kind == "cas" else 0
        began = time.monotonic()
        try:
            found = await self._ask(client, kind, key, value, expect)
        except SavaError as error:
            self._status.errors += 1
            if kind != "get":
                is_unknown = isinstance(error, metadata_errors.OutcomeUnknown)
                outcome, why = "unknown" if is_unknown else "failed", f"{type(error).__name__}: {error}"
                ended = time.monotonic()
                self._recorder.add(Called(began, ended, name, kind, key, value, expect, outcome, error=why))
            return False
        outcome, revision, kv = found
        ended = time.monotonic()
        before, mod = (kv.value.decode(), kv.mod_revision) if kv is not None else (None, 0)
        self._recorder.add(
            Called(began, ended, name, kind, key, value, expect, outcome, revision, before, mod)
        )
        self._status.calls += 1
        seen[key] = revision if outcome == "ok" and kind in ("put", "cas") else mod
        if kind == "delete":
            seen[key] = 0
        return True

    async def _ask(
        self, client: AdminClient, kind: str, key: str, value: str, expect: int
    ) -> tuple[str, int, pb.KeyValue | None]:
        """Outcome, revision, and the key as it was before."""
        if kind == "get":
            got = await client.call(client.meta.Get, pb.GetRequest(key=key), timeout=CALL_S)
            return "ok", got.revision, got.kv if got.HasField("kv") else None
        if kind == "delete":
            gone = await client.call(client.meta.Delete, pb.DeleteRequest(key=key), timeout=CALL_S)
            return "ok", gone.revision, gone.prev[0] if gone.prev else None
        request = pb.PutRequest(key=key, value=value.encode())
        if kind == "cas":
            request.if_mod_revision = expect
        put = await client.call(client.meta.Put, request, timeout=CALL_S)
        return "ok" if put.succeeded else "refused", put.revision, put.prev if put.HasField("prev") else None

    async def end(self) -> int:
        """Write the last change, after which no watcher has anything to wait for; its revision."""
        deadline, number = time.monotonic() + SETTLE_S, 0
        while True:
            number += 1
            value = f"end-{number}"
            began = time.monotonic()
            try:
                async with AdminClient(
                    self._plan.admins[number % len(self._plan.admins)], own_credentials(self._plan.auth())
                ) as client:
                    _, revision, kv = await self._ask(client, "put", END_KEY, value, 0)
            except SavaError as error:
                is_unknown = isinstance(error, metadata_errors.OutcomeUnknown)
                outcome, why = "unknown" if is_unknown else "failed", f"{type(error).__name__}: {error}"
                self._recorder.add(
                    Called(began, time.monotonic(), "end", "put", END_KEY, value, 0, outcome, error=why)
                )
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)
                continue
            before, mod = (kv.value.decode(), kv.mod_revision) if kv is not None else (None, 0)
            self._recorder.add(
                Called(
                    *(began, time.monotonic(), "end", "put", END_KEY, value, 0, "ok", revision, before, mod)
                )
            )
            return revision


class Zombies:
    """Producers that share a name, each in its own process. One sends until it is stopped (SIGSTOP); the next
    one opens the name and sends; then the first is woken. It must not get another message in: the last one
    that has opened the name wins, whatever happened to the broker in between."""

    def __init__(self, plan: Plan, is_over: Callable[[], bool]) -> None:
        self._plan = plan
        self._is_over = is_over
        self._chance = random.Random(f"{plan.seed} zombies")

    async def run(self) -> None:
        if not self._plan.shared_name:
            return
        generation, former = 1, await self._start(1)
        while not self._is_over():
            await self._sleep(self._chance.uniform(3, 6))
            with contextlib.suppress(ProcessLookupError):
                former.send_signal(signal.SIGSTOP)
            await self._sleep(self._chance.uniform(0, 3))
            generation += 1
            current = await self._start(generation)
            await self._sleep(self._chance.uniform(3, 6))
            with contextlib.suppress(ProcessLookupError):
                former.send_signal(signal.SIGCONT)
            await self._end(former, self._chance.uniform(3, 6))
            former = current
        with contextlib.suppress(ProcessLookupError):
            former.send_signal(signal.SIGTERM)
        await self._end(former, SEND_S + 10)

    async def _sleep(self, seconds: float) -> None:
        """Or until the load is to end."""
        for _ in range(round(seconds * 10)):
            if self._is_over():
                return
            await asyncio.sleep(0.1)

    async def _start(self, generation: int) -> asyncio.subprocess.Process:
        plan = Path(self._plan.directory) / "plan.json"
        log = (Path(self._plan.directory) / "zombies.log").open("ab")
        with log:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.torture.load", str(plan), str(generation), stdout=log, stderr=log
            )

    @staticmethod
    async def _end(process: asyncio.subprocess.Process, patience_s: float) -> None:
        """A fenced producer ends by itself; one that was not fenced in time is killed."""
        try:
            async with asyncio.timeout(patience_s):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def share_name(plan: Plan, generation: int) -> None:
    """One producer of the shared name, until it is fenced or asked to end."""
    recorder = Recorder(Path(plan.directory) / f"zombie-{generation}.jsonl")
    label, topic, number = f"z#{generation}", plan.shared_name, 0
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    async with (
        Client(plan.services, tls=plan.client_tls(), timeout=10.0) as client,
        client.producer(topic, name="z", linger_ms=0, timeout=SEND_S) as producer,
    ):
        while not is_over.is_set():
            # Before it is sent: this process may be killed before it learns what has become of the message.
            recorder.add(Unsent(time.monotonic(), topic, label, number, True, "under way"))
            try:
                offset = await producer.send(payload(label, number))
            except ClientError as error:
                print(f"{label} {number}: {type(error).__name__}: {error}", flush=True)
                return
            recorder.add(Acked(time.monotonic(), topic, label, number, offset))
            number += 1
            await asyncio.sleep(plan.pause_s * 2)


def main() -> None:
    # Why streams end is what a gap without acks has to be explained with.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    plan = Plan.read(Path(sys.argv[1]))
    if len(sys.argv) > 2:
        uvloop.run(share_name(plan, int(sys.argv[2])))
    else:
        asyncio.run(Load(plan).run())
    # Everything is recorded. What gRPC's threads still do must not keep the orchestrator waiting.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
