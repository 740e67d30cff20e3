"""SimNet: every way in which a network may treat an envelope, short of forging one.

An envelope is encoded when it is sent and decoded when it arrives, by the production codec. In between it may
be lost, delayed with a heavy tail, overtaken, doubled, kept and replayed much later, cut off by a partition
(both ways, one way, or with one bridge node left between two halves), handed to the wrong node, truncated or
bit-flipped.

A flipped frame that still decodes is not handed on: TLS would have dropped it, and a forged index is outside
the fault model. The exception is the data of a snapshot chunk, which carries its own checksum for exactly
this reason."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

import msgspec

from sava.metadata.peer import Envelope, MalformedEnvelope, decode_envelope, encode_envelope
from sava.raft.messages import SnapshotChunk
from sava.raft.types import NodeId
from tests.sim.knobs import Knobs
from tests.sim.schedule import Schedule

Link = tuple[NodeId, NodeId]

KEPT_FRAMES = 64
"""Old frames that may be replayed later."""


class Receiver(Protocol):
    def deliver(self, envelope: Envelope) -> None: ...


class SimNet:
    def __init__(
        self,
        schedule: Schedule,
        knobs: Knobs,
        rng: Random,
        receivers: Callable[[NodeId], Sequence[Receiver]],
        nodes: Callable[[], Sequence[NodeId]],
        count: Callable[[str], None],
    ) -> None:
        self._schedule = schedule
        self._knobs = knobs
        self._rng = rng
        self._receivers = receivers
        self._nodes = nodes
        self._count = count
        self.calm = False
        """No chance faults any more (set when the world heals)."""
        self.blocked: Counter[Link] = Counter()
        self.loss: dict[Link, int] = {}
        """Percent lost, per link, on top of the base."""
        self.slow: dict[Link, int] = {}
        """Extra microseconds, per link."""
        self._kept: list[bytes] = []
        self._free_at: dict[Link, int] = {}
        self.filter: Callable[[Envelope], bool] | None = None
        """For scripted runs: False drops the envelope."""

    def block(self, links: Sequence[Link]) -> None:
        for link in links:
            self.blocked[link] += 1

    def unblock(self, links: Sequence[Link]) -> None:
        for link in links:
            self.blocked[link] -= 1
            if self.blocked[link] <= 0:
                del self.blocked[link]

    def heal(self) -> None:
        self.calm = True
        self.blocked.clear()
        self.loss.clear()
        self.slow.clear()
        self._kept.clear()

    # -- sending ---------------------------------------------------------------------------------------------

    def send(self, envelope: Envelope) -> None:
        frame = encode_envelope(envelope)
        self._schedule.note_bytes(frame)
        if self.filter is not None and not self.filter(envelope):
            return
        link = (envelope.src, envelope.dst)
        if link in self.blocked or self._is_lost(link):
            self._count("dropped")
            return
        self._launch(link, frame)
        if self._happens("duplicate", 0.03):
            self._launch(link, frame)
        self._maybe_replay(frame)

    def _is_lost(self, link: Link) -> bool:
        percent = self.loss.get(link, 0)
        if not self.calm and "loss" in self._knobs.faults:
            percent = max(percent, self._knobs.loss_percent)
        return percent > 0 and self._rng.random() * 100 < percent

    def _launch(self, link: Link, frame: bytes) -> None:
        delay = self._delay(link)
        at = self._schedule.now + delay
        if "reorder" not in self._knobs.faults or self.calm:
            # One stream per link, as gRPC gives it: nothing overtakes.
            at = max(at, self._free_at.get(link, 0))
            self._free_at[link] = at
        self._schedule.after(at - self._schedule.now, self._arrive, link, frame)

    def _delay(self, link: Link) -> int:
        base = self._knobs.latency_us
        delay = base // 2 + self._rng.randrange(base)
        if self._happens("delay", 0.02):
            # A heavy tail: a few messages arrive after many elections' worth of others.
            delay += int(self._rng.paretovariate(1.0) * 10_000) % 5_000_000
        return delay + self.slow.get(link, 0)

    def _maybe_replay(self, frame: bytes) -> None:
        if self.calm or "replay" not in self._knobs.faults:
            return
        if len(self._kept) < KEPT_FRAMES:
            self._kept.append(frame)
        elif self._rng.random() < 0.05:
            self._kept[self._rng.randrange(KEPT_FRAMES)] = frame
        if self._rng.random() < 0.01:
            self._count("replay")
            old = self._rng.choice(self._kept)
            envelope = decode_envelope(old)
            self._launch((envelope.src, envelope.dst), old)

    def _happens(self, fault: str, chance: float) -> bool:
        if self.calm or fault not in self._knobs.faults or self._rng.random() >= chance:
            return False
        self._count(fault)
        return True

    # -- arriving --------------------------------------------------------------------------------------------

    def _arrive(self, link: Link, frame: bytes) -> None:
        if link in self.blocked:
            self._count("dropped")
            return
        envelope: Envelope | None
        if self._happens("corrupt", 0.005):
            envelope = self._decode_damaged(frame)
            if envelope is None:
                return
        else:
            envelope = decode_envelope(frame)
        target = link[1]
        if self._happens("misdeliver", 0.005):
            target = self._rng.choice(self._nodes())
        for receiver in self._receivers(target):
            receiver.deliver(envelope)

    def _decode_damaged(self, frame: bytes) -> Envelope | None:
        """Damaged bytes must raise MalformedEnvelope and nothing else."""
        whole = decode_envelope(frame)
        if isinstance(whole.message, SnapshotChunk) and whole.message.data and self._rng.random() < 0.7:
            data = flip_bit(whole.message.data, self._rng)
            return msgspec.structs.replace(whole, message=msgspec.structs.replace(whole.message, data=data))
        damaged = (
            frame[: self._rng.randrange(len(frame))]
            if self._rng.random() < 0.5
            else flip_bit(frame, self._rng)
        )
        with contextlib.suppress(MalformedEnvelope):
            decode_envelope(damaged)
        return None


def flip_bit(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
