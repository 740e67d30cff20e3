"""What is done to the cluster: faults, one or two at a time, and an operator who works all the while.

A fault has a beginning, an end, and a recovery: the cluster is whole again, and every topic takes messages.
The seed draws the faults and how long they last; timing is the machine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from itertools import permutations, product
from typing import Final

from sava.errors import SavaError
from sava.proto import admin_pb2, brokers_pb2, topics_admin_pb2
from tests.support.waiting import NotInTime, until
from tests.torture.cluster import BROKERS, CLIENTS, STORE, WEST, Broker, Cluster
from tests.torture.disks import ImageDisk
from tests.torture.history import Fault, Operated, Recorder
from tests.torture.load import Status
from tests.torture.network import Conditions

RECOVERY_S: Final = 90.0
"""From the end of a fault until the cluster must be whole again."""
REPLACE_S: Final = 120.0
PAUSES: Final = (2.0, 4.0, 8.0, 15.0)
"""Shorter than a registration lasts, and longer."""

Harm = Callable[[Broker], AbstractAsyncContextManager[None]]


class Nemesis:
    """Does harm, sees the cluster recover, and records both."""

    def __init__(
        self,
        cluster: Cluster,
        topics: Sequence[str],
        recorder: Recorder,
        status: Callable[[], Status],
        seed: int,
    ) -> None:
        self._cluster = cluster
        self._network = cluster.network
        self._topics = topics
        self._recorder = recorder
        self._status = status
        self._chance = random.Random(f"{seed} faults")
        self.done: Counter[str] = Counter()
        self.power_losses = 0
        self.current = ""
        """For the line of progress."""
        self.harms = self._catalogue()

    def _catalogue(self) -> dict[str, Harm]:
        harms: dict[str, Harm] = {
            "kill": self._kill,
            "kill leader": self._kill_leader,
            "kill all": self._kill_all,
            "restart": self._restart,
            "stop": self._stop,
            "power": self._lose_power,
            "power all": self._lose_all_power,
            "slow disk": self._slow_disk,
            "full disk": self._full_disk,
            "new disk": self._new_disk,
            "clock": self._clock,
            "store killed": self._store_killed,
            "store stopped": self._store_stopped,
            "cut": self._cut,
        }
        if self._network.has_packets:
            harms |= {
                "cut one way": self._cut_one_way,
                "cut a pair": self._cut_pair,
                "cut clients": self._cut_clients,
                "loss": self._loss,
                "delay": self._delay,
                "mess": self._mess,
                "narrow": self._narrow,
                "store slow": self._store_slow,
            }
        return harms

    # -- rounds ----------------------------------------------------------------------------------

    async def run(self, until: float, kinds: Sequence[str], *, doubles: float) -> None:
        """Faults until the time is up; ``doubles`` is the share of rounds with two at a time. Every kind
        comes once before one comes again."""
        deck: list[str] = []
        while time.monotonic() < until:
            if not deck:
                deck = [*kinds]
                self._chance.shuffle(deck)
            chosen = [deck.pop()]
            others = [each for each in kinds if each != chosen[0] and not _exclude(each, chosen[0])]
            if others and self._chance.random() < doubles:
                chosen.append(self._chance.choice(others))
            await self.round(chosen)
            await asyncio.sleep(self._chance.uniform(1.0, 4.0))

    async def round(self, kinds: Sequence[str]) -> None:
        victims = self._chance.sample(self._cluster.brokers, len(kinds))
        name = " + ".join(sorted(kinds))
        self.current = f"{name} at {', '.join(each.name for each in victims)}"
        began = time.monotonic()
        self._cluster.excuse = ""
        async with contextlib.AsyncExitStack() as stack:
            for kind, victim in zip(kinds, victims, strict=True):
                await stack.enter_async_context(self.harms[kind](victim))
                self.done[kind] += 1
        ended = time.monotonic()
        recovered = await self._recovered(ended)
        self._recorder.add(Fault(began, ended, recovered, name, ", ".join(each.name for each in victims)))
        self.current = ""

    async def _recovered(self, since: float) -> float:
        """When; 0: not in time."""
        try:
            await self._cluster.whole(self._topics, timeout=RECOVERY_S)
            await until(
                partial(self._all_acked, since), "every topic takes messages", timeout=RECOVERY_S, poll_s=0.1
            )
        except (NotInTime, TimeoutError, SavaError) as error:
            print(f"not recovered from {self.current}: {type(error).__name__}: {error}", flush=True)
            return 0.0
        return time.monotonic()

    async def _all_acked(self, since: float) -> bool:
        last = self._status().last_ack
        return all(last.get(topic, 0.0) > since for topic in self._topics)

    async def _while_it_lasts(self, *choices: float) -> None:
        await asyncio.sleep(self._chance.choice(choices or PAUSES))

    # -- processes -------------------------------------------------------------------------------

    @asynccontextmanager
    async def _kill(self, broker: Broker) -> AsyncIterator[None]:
        await broker.kill()
        await self._while_it_lasts(0.1, 3.0, 8.0)
        yield
        broker.start()

    @asynccontextmanager
    async def _kill_leader(self, broker: Broker) -> AsyncIterator[None]:
        leader = broker
        with contextlib.suppress(NotInTime):
            leader = await self._cluster.leader() or broker
        if not leader.is_running:
            leader = broker
        await leader.kill()
        await self._while_it_lasts(0.1, 3.0, 8.0)
        yield
        if not leader.is_running:
            leader.start()

    @asynccontextmanager
    async def _kill_all(self, _: Broker) -> AsyncIterator[None]:
        running = [broker for broker in self._cluster.brokers if broker.is_running]
        await asyncio.gather(*(broker.kill() for broker in running))
        yield
        for broker in running:
            broker.start()

    @asynccontextmanager
    async def _restart(self, broker: Broker) -> AsyncIterator[None]:
        code = await broker.stop()
        if code:
            print(f"{broker.name} ended with {code} when it was asked to stop", flush=True)
        yield
        broker.start()

    @asynccontextmanager
    async def _stop(self, broker: Broker) -> AsyncIterator[None]:
        broker.signal(signal.SIGSTOP)
        try:
            await self._while_it_lasts(1.0, 5.0, 14.0)
            yield
        finally:
            broker.signal(signal.SIGCONT)

    # -- disks -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _lose_power(self, broker: Broker) -> AsyncIterator[None]:
        await broker.lose_power()
        self.power_losses += 1
        await self._while_it_lasts(0.1, 8.0)
        yield
        broker.start()

    @asynccontextmanager
    async def _lose_all_power(self, _: Broker) -> AsyncIterator[None]:
        running = [broker for broker in self._cluster.brokers if broker.is_running]
        await asyncio.gather(*(broker.lose_power() for broker in running))
        self.power_losses += len(running)
        yield
        for broker in running:
            broker.start()

    @asynccontextmanager
    async def _slow_disk(self, broker: Broker) -> AsyncIterator[None]:
        broker.turn(sync_ms=self._chance.choice((20, 200, 1500)))
        try:
            await self._while_it_lasts(5.0, 10.0)
            yield
        finally:
            broker.turn(sync_ms=0)

    @asynccontextmanager
    async def _full_disk(self, broker: Broker) -> AsyncIterator[None]:
        disk = broker.disk
        try:
            if isinstance(disk, ImageDisk):
                await asyncio.to_thread(disk.fill)
            else:
                broker.turn(no_room=True)
            await self._while_it_lasts(5.0, 10.0)
            yield
        finally:
            if isinstance(disk, ImageDisk):
                await asyncio.to_thread(disk.empty)
            else:
                broker.turn(no_room=False)

    @asynccontextmanager
    async def _new_disk(self, broker: Broker) -> AsyncIterator[None]:
        """The disk is gone with everything on it, and an operator replaces the broker. If its disk is one
        that is needed, the broker is killed only."""
        may_lose = False
        with contextlib.suppress(SavaError, NotInTime):
            may_lose = await self._cluster.may_lose(broker)
        await broker.kill()
        await self._while_it_lasts(0.1, 4.0)
        yield
        if may_lose:
            await self._cluster.replace(broker, timeout=REPLACE_S)
            self.done["replaced"] += 1
        else:
            broker.start()

    @asynccontextmanager
    async def _clock(self, broker: Broker) -> AsyncIterator[None]:
        """It jumps, forward or back, and jumps again."""
        try:
            for _ in range(3):
                broker.turn(clock_ms=self._chance.choice((-3_600_000, -5_000, 5_000, 3_600_000)))
                await asyncio.sleep(self._chance.uniform(1.0, 4.0))
            yield
        finally:
            broker.turn(clock_ms=0)

    # -- the object store ------------------------------------------------------------------------

    @asynccontextmanager
    async def _store_killed(self, _: Broker) -> AsyncIterator[None]:
        await self._cluster.store.kill()
        try:
            await self._while_it_lasts(5.0, 10.0, 20.0)
            yield
        finally:
            self._cluster.store.start()

    @asynccontextmanager
    async def _store_stopped(self, _: Broker) -> AsyncIterator[None]:
        self._cluster.store.signal(signal.SIGSTOP)
        try:
            await self._while_it_lasts(5.0, 10.0, 20.0)
            yield
        finally:
            self._cluster.store.signal(signal.SIGCONT)

    @asynccontextmanager
    async def _store_slow(self, _: Broker) -> AsyncIterator[None]:
        slow = Conditions(kbit=200.0, delay_ms=200.0, jitter_ms=200.0)
        async with self._under(_both([STORE], BROKERS), slow, 8.0, 15.0):
            yield

    # -- the network -----------------------------------------------------------------------------

    @asynccontextmanager
    async def _under(
        self, pairs: Sequence[tuple[str, str]], conditions: Conditions, *seconds: float
    ) -> AsyncIterator[None]:
        self._network.set(pairs, conditions)
        try:
            await self._while_it_lasts(*seconds)
            yield
        finally:
            self._network.heal(pairs)

    def _others(self, broker: Broker) -> list[str]:
        return [name for name in BROKERS if name != broker.name]

    def _cut(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        """From all other hosts but the operator's, or from the other brokers alone."""
        hosts = self._others(broker)
        if self._chance.random() < 0.5:
            hosts += [CLIENTS, STORE, WEST]
        return self._under(_both([broker.name], hosts), Conditions(is_cut=True))

    def _cut_one_way(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        pairs = [(broker.name, other) for other in self._others(broker)]
        if self._chance.random() < 0.5:
            pairs = [(other, name) for name, other in pairs]
        return self._under(pairs, Conditions(is_cut=True))

    def _cut_pair(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        """Two brokers do not hear each other, and the third hears both."""
        return self._under(_both([broker.name], self._others(broker)[:1]), Conditions(is_cut=True))

    def _cut_clients(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        return self._under(_both([broker.name], [CLIENTS]), Conditions(is_cut=True))

    def _loss(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        lossy = Conditions(loss=self._chance.uniform(0.02, 0.10))
        return self._under([*permutations(BROKERS, 2), *_both(BROKERS, [CLIENTS])], lossy, 8.0, 15.0)

    def _delay(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        late = Conditions(delay_ms=self._chance.uniform(50, 300), jitter_ms=50.0)
        return self._under(_both([broker.name], [*self._others(broker), CLIENTS]), late, 8.0, 15.0)

    def _mess(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        """Some of everything."""
        mess = Conditions(loss=0.02, duplicate=0.05, reorder=0.1, delay_ms=10.0, jitter_ms=20.0)
        return self._under([*permutations(BROKERS, 2), *_both(BROKERS, [CLIENTS])], mess, 8.0, 15.0)

    def _narrow(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        return self._under(_both([broker.name], self._others(broker)), Conditions(kbit=300.0), 8.0, 15.0)


def _both(some: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    there = list(product(some, others))
    return there + [(second, first) for first, second in there]


_WHOLE: Final = ("kill all", "power all", "new disk")
_STORE: Final = ("store killed", "store stopped", "store slow")
_NETWORK: Final = ("cut", "cut one way", "cut a pair", "cut clients", "loss", "delay", "mess", "narrow")


def _exclude(one: str, other: str) -> bool:
    """Faults that undo each other's conditions, or leave no majority for longer than a fault lasts."""
    if any(one in group and other in group for group in (_STORE, _NETWORK)):
        return True
    return one in _WHOLE or other in _WHOLE


class Operator:
    """Moves, drains, rebalances and transfers all the while, and records what came of it. Failures are no
    findings: with two brokers away there is nothing to move to. That nothing ever succeeds would be one."""

    def __init__(self, cluster: Cluster, topics: Sequence[str], recorder: Recorder, seed: int) -> None:
        self._cluster = cluster
        self._topics = topics
        self._recorder = recorder
        self._chance = random.Random(f"{seed} operator")
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    async def run(self) -> None:
        works = {
            "move": (self._move, 6),
            "drain": (self._drain, 1),
            "rebalance": (self._rebalance, 1),
            "transfer": (self._transfer, 1),
        }
        while True:
            kind = self._chance.choices([*works], [weight for _, weight in works.values()])[0]
            broker = self._chance.choice(self._cluster.brokers)
            began, error = time.monotonic(), ""
            try:
                async with asyncio.timeout(60):
                    error = await works[kind][0](broker)
            except (SavaError, TimeoutError, NotInTime) as failure:
                error = f"{type(failure).__name__}: {failure}"
            counted = self.failed if error else self.done
            counted[kind] += 1
            seconds = time.monotonic() - began
            self._recorder.add(Operated(began, kind, not error, seconds, error))
            await asyncio.sleep(self._chance.uniform(1.0, 3.0))

    async def _move(self, broker: Broker) -> str:
        request = topics_admin_pb2.UnloadTopicRequest(name=self._chance.choice(self._topics))
        client = broker.client
        moves = [move async for move in client.stream(client.topics.UnloadTopic, request, timeout=40)]
        return "; ".join(move.error for move in moves if move.error)

    async def _drain(self, broker: Broker) -> str:
        """Its topics go to others; then it gets topics again."""
        client, drained = broker.client, broker.node_id
        request = brokers_pb2.DrainBrokerRequest(broker_id=drained, timeout_seconds=20)
        error = "no answer"
        try:
            async for progress in client.stream(client.brokers.DrainBroker, request, timeout=30):
                if progress.done:
                    error = "" if progress.status == "drained" else f"{progress.failed} topics have not moved"
        finally:
            await asyncio.shield(self._activate(drained))
        return error

    async def _activate(self, broker_id: int) -> None:
        """Whatever happens meanwhile: the cluster is not whole while a broker is drained."""
        request = brokers_pb2.ActivateBrokerRequest(broker_id=broker_id)
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            broker = self._chance.choice(self._cluster.brokers)
            try:
                await broker.client.call(broker.client.brokers.ActivateBroker, request, timeout=5.0)
                return
            except SavaError:
                if all(each.node_id != broker_id for each in self._cluster.brokers):
                    return  # it was replaced, and its number with it
                await asyncio.sleep(0.3)

    async def _rebalance(self, broker: Broker) -> str:
        request = brokers_pb2.RebalanceRequest()
        done = await broker.client.call(broker.client.brokers.Rebalance, request, timeout=30.0)
        return "; ".join(move.error for move in done.moves if move.error)

    async def _transfer(self, broker: Broker) -> str:
        request = admin_pb2.TransferLeaderRequest()
        await broker.client.call(broker.client.cluster.TransferLeader, request, timeout=10.0)
        return ""
