"""Net: ordered channels that break, and single messages that are lost, late, doubled and overtaken.

A channel is a connection: what arrives on it arrives in order and without a hole. A message that is lost
breaks it, and what was sent behind that one never arrives; two channels between the same brokers know nothing
of each other, so what is under way on an old one may arrive after what is sent on a new one. Messages without
a channel are calls of their own. Every message passes through the production codec.

Endpoint 0 is the metadata store: a broker that is cut from it has lost Raft, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from sava.ledger.protocol.member import Message, decode, encode
from tests.mirror_sim.knobs import Knobs
from tests.sim.schedule import Schedule

RAFT = 0
NO_CHANNEL = 0
Link = tuple[int, int]
Deliver = Callable[[int, int, int, Message], None]
"""source, destination, channel, message"""


class Net:
    def __init__(
        self, schedule: Schedule, knobs: Knobs, rng: Random, deliver: Deliver, count: Callable[[str], None]
    ) -> None:
        self._schedule = schedule
        self._knobs = knobs
        self._rng = rng
        self._deliver = deliver
        self._count = count
        self.is_calm = False
        self.blocked: Counter[Link] = Counter()
        self._broken: set[tuple[int, int, int]] = set()
        self._free_at: dict[tuple[int, int, int], int] = {}
        self._channels = 0

    def open_channel(self) -> int:
        self._channels += 1
        return self._channels

    def block(self, links: list[Link]) -> None:
        self.blocked.update(links)

    def unblock(self, links: list[Link]) -> None:
        for link in links:
            self.blocked[link] -= 1
            if self.blocked[link] <= 0:
                del self.blocked[link]

    def heal(self) -> None:
        self.is_calm = True
        self.blocked.clear()

    def is_cut(self, source: int, destination: int) -> bool:
        return (source, destination) in self.blocked

    def send(self, source: int, destination: int, message: Message, channel: int = NO_CHANNEL) -> None:
        frame = encode(message)
        self._schedule.note_bytes(frame)
        way = (source, destination, channel)
        if way in self._broken:
            return
        if self.is_cut(source, destination) or self._happens("loss", self._knobs.loss_percent / 100):
            self._count("lost messages")
            if channel:
                self._broken.add(way)
            return
        self._launch(way, frame)
        if not channel and self._happens("duplicate", 0.05):
            self._launch(way, frame)

    def _launch(self, way: tuple[int, int, int], frame: bytes) -> None:
        at = self._schedule.now + self.delay()
        if way[2]:
            at = self._free_at[way] = max(at, self._free_at.get(way, 0))
        self._schedule.after(at - self._schedule.now, self._arrive, way, frame)

    def delay(self) -> int:
        base = self._knobs.latency_us
        delay = base // 2 + self._rng.randrange(base)
        if self._happens("delay", 0.03):
            delay += int(self._rng.paretovariate(1.0) * 20_000) % 3_000_000
        return delay

    def _arrive(self, way: tuple[int, int, int], frame: bytes) -> None:
        source, destination, channel = way
        if self.is_cut(source, destination):
            if channel:
                self._broken.add(way)
            return
        if way not in self._broken:
            self._deliver(source, destination, channel, decode(frame))

    def _happens(self, fault: str, chance: float) -> bool:
        return not self.is_calm and fault in self._knobs.faults and self._rng.random() < chance
