"""A stranger on the Raft port, who knows the protocol and has no credential: it speaks as another broker,
changes metadata, reads and fences journals, and takes the place of those who belong there."""

from __future__ import annotations

import asyncio
import random
import ssl
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import msgspec

from sava.api.admin_client import AdminClient
from sava.errors import SavaError
from sava.ledger import wire
from sava.ledger.protocol import Fence, LedgerId, Message, Read, ReadAnswer, StorageId
from sava.ledger.protocol.member import FenceAnswer
from sava.metadata.commands import Put, Txn
from sava.metadata.peer import Ask, Bootstrap, Envelope, PeerMessage, Ping, Propose, encode_envelope
from sava.peer_connection import GREETING, MAX_FRAME_BYTES, BadFrame, FrameDecoder, frame
from sava.proto import admin_pb2 as pb
from sava.proto import ledgers_pb2 as ledgers_pb
from sava.raft.types import Membership, NodeId
from tests.security.attacks import CALL_S, Attack, Tally, Target

OPEN_RAFT: Final = 1
IDENTIFY: Final = 2
BIND: Final = 3
OPEN_LEDGERS: Final = 4
WELCOME: Final = 1
INTRODUCTION: Final = 2
BOUND: Final = 3

FORGED_KEY: Final = "/forged-by-stranger"
GUESSES: Final = 4
"""Incarnations of a journal that a stranger tries."""


class Stranger:
    """A connection to a Raft port by one who does not belong there."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = FrameDecoder()
        self._payloads: list[bytes] = []

    @classmethod
    async def connect(cls, target: Target, address: str) -> Stranger:
        host, _, port = address.rpartition(":")
        tls = ssl.create_default_context(cafile=target.ca) if target.ca else None
        async with asyncio.timeout(CALL_S):
            return cls(*await asyncio.open_connection(host, int(port), ssl=tls))

    async def ask(self, *message: object) -> list[Any]:
        """The answer to the opening of a connection; empty: it was closed, or there was none."""
        self._writer.write(GREETING + frame(msgspec.msgpack.encode(message)))
        payload = await self.heard()
        return list(msgspec.msgpack.decode(payload)) if payload else []

    def say(self, payload: bytes) -> None:
        self._writer.write(frame(payload))

    def say_parts(self, parts: Iterable[bytes]) -> None:
        self._writer.writelines(parts)

    async def heard(self, timeout: float = 2.0) -> bytes:
        """The next frame; empty: none came."""
        with suppress(TimeoutError, OSError, BadFrame):
            async with asyncio.timeout(timeout):
                while not self._payloads:
                    data = await self._reader.read(1 << 16)
                    if not data:
                        return b""
                    self._payloads += self._decoder.feed(data)
        return self._payloads.pop(0) if self._payloads else b""

    async def flush(self) -> None:
        with suppress(OSError):
            await self._writer.drain()

    def close(self) -> None:
        self._writer.transport.abort()


async def asked(target: Target, address: str, *message: object) -> list[Any]:
    try:
        stranger = await Stranger.connect(target, address)
    except (OSError, TimeoutError):
        return []
    try:
        return await stranger.ask(*message)
    finally:
        stranger.close()


class Known(msgspec.Struct):
    """What a stranger finds out, or is told by one who looked."""

    cluster: str
    nodes: tuple[int, ...]
    journals: tuple[tuple[LedgerId, StorageId], ...] = ()


async def find_out(target: Target) -> Known:
    """By asking each broker who it is; as a last resort the attacker was told."""
    cluster, nodes = "", []
    for address in target.raft:
        answer = await asked(target, address, IDENTIFY)
        if answer[:1] == [INTRODUCTION]:
            info = answer[1]
            cluster = info["cluster"] if isinstance(info, dict) else info[1]
            nodes.append(info["node"] if isinstance(info, dict) else info[0])
    if len(nodes) < len(target.raft):
        nodes = []
        for address in target.admin:
            with suppress(SavaError):
                async with AdminClient(address) as client:
                    status = await client.status()
                    cluster = status.cluster_id
                    nodes.append(status.self_node_id)
    return Known(cluster or "unknown", tuple(nodes) or (1, 2, 3))


async def find_journals(target: Target, known: Known) -> Known:
    """From the admin port where it is open, and by guessing."""
    journals = {(LedgerId(node, number), StorageId("0")) for node in known.nodes for number in range(GUESSES)}
    with suppress(SavaError):
        async with AdminClient(target.admin[0]) as client:
            listed = await client.ask(ledgers_pb.ListLedgersRequest())
            for ledger in listed.ledgers:
                name = LedgerId(ledger.broker_id, ledger.incarnation)
                journals |= {(name, StorageId(member.storage_id)) for member in ledger.members}
    return Known(known.cluster, known.nodes, tuple(journals))


def envelope(known: Known, source: int, target: int, message: PeerMessage) -> bytes:
    return encode_envelope(
        Envelope(
            known.cluster,
            NodeId(source),
            10**6,
            random.getrandbits(63),
            NodeId(target),
            message,
            "127.0.0.1:1",
        )
    )


async def forged_envelopes(target: Target, seconds: float) -> Tally:
    """C1: speak as broker 1 from a later start, so that it is told to stop."""
    known, tally = await find_out(target), Tally()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for address in target.raft:
            with suppress(OSError, TimeoutError):
                stranger = await Stranger.connect(target, address)
                answer = await stranger.ask(OPEN_RAFT, known.cluster)
                for source in known.nodes:
                    for node in known.nodes:
                        stranger.say(envelope(known, source, node, Ping()))
                await stranger.flush()
                tally.count(is_accepted=answer[:1] == [WELCOME])
                await asyncio.sleep(0.05)
                stranger.close()
    return tally


async def forged_changes(target: Target, seconds: float) -> Tally:
    """C2: have the leader write a key."""
    known, tally = await find_out(target), Tally()
    put = Txn(then=(Put(FORGED_KEY, b"1"),))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for address in target.raft:
            with suppress(OSError, TimeoutError):
                stranger = await Stranger.connect(target, address)
                answer = await stranger.ask(OPEN_RAFT, known.cluster)
                for node in known.nodes:
                    message = Ask(random.getrandbits(40), Propose(put))
                    stranger.say(envelope(known, 4711, node, message))
                    stranger.say(envelope(known, known.nodes[0], node, message))
                await stranger.flush()
                await asyncio.sleep(0.05)
                tally.count(is_accepted=answer[:1] == [WELCOME])
                stranger.close()
    with suppress(SavaError):
        async with AdminClient(target.admin[0]) as client:
            got = await client.ask(pb.GetRequest(key=FORGED_KEY))
            tally.note = "the key is there" if got.HasField("kv") else "the key is not there"
    return tally


async def _about_journals(target: Target, seconds: float, kind: str) -> Tally:
    known, tally = await find_journals(target, await find_out(target)), Tally()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for address in target.raft:
            with suppress(OSError, TimeoutError, BadFrame):
                stranger = await Stranger.connect(target, address)
                answer = await stranger.ask(OPEN_LEDGERS, known.cluster)
                taken = 0
                for ticket, (ledger, storage) in enumerate(known.journals, 1):
                    message: Message = Fence(ledger, storage, 1 << 40)
                    if kind == "read":
                        message = Read(ledger, storage, 0, 1 << 40, 1 << 16)
                    stranger.say_parts(wire.encode(wire.LedgerRequest(ticket, storage, message)))
                await stranger.flush()
                while payload := await stranger.heard(0.2):
                    said = wire.decode_answer(payload).message
                    taken += isinstance(said, FenceAnswer) or (
                        isinstance(said, ReadAnswer) and bool(said.data)
                    )
                tally.count(is_accepted=taken > 0 or answer[:1] == [WELCOME])
                stranger.close()
    return tally


async def read_journals(target: Target, seconds: float) -> Tally:
    """C3: have a broker give its copy of a journal."""
    return await _about_journals(target, seconds, "read")


async def fence_journals(target: Target, seconds: float) -> Tally:
    """C3: end every journal, so that no broker can publish."""
    return await _about_journals(target, seconds, "fence")


async def foreign_bind(target: Target, seconds: float) -> Tally:
    """M9: bind a broker to a cluster of the stranger's."""
    tally = Tally()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for address in target.raft:
            order = Bootstrap("stranger", Membership(voters=(NodeId(4711),)))
            raw = msgspec.msgpack.decode(msgspec.msgpack.encode(order))
            answer = await asked(target, address, BIND, raw)
            tally.count(is_accepted=answer[:1] == [BOUND])
    return tally


async def fuzzed_openings(target: Target, seconds: float) -> Tally:
    """Openings that no broker sends: wrong shapes, wrong types, and good ones with a bit changed."""
    chance, tally = random.Random(21), Tally()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        address = chance.choice(target.raft)
        with suppress(OSError, TimeoutError):
            stranger = await Stranger.connect(target, address)
            good = bytearray(
                msgspec.msgpack.encode((chance.randrange(12), chance.choice(["", "x" * 64, 7, None])))
            )
            for _ in range(chance.randrange(4)):
                good[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
            opening = GREETING + frame(bytes(good) + chance.randbytes(chance.randrange(30)))
            stranger.say_parts((opening[: chance.randrange(1, len(opening) + 1)],))
            await stranger.flush()
            answer = await stranger.heard(0.05)
            tally.count(is_accepted=answer[:2] == msgspec.msgpack.encode((WELCOME,)))
            stranger.close()
    return tally


async def unfinished_frames(target: Target, seconds: float) -> Tally:
    """Frames that claim 72 MB and stay one byte short, on several connections to each broker."""
    tally, writers = Tally(), []
    head = struct.pack("<II", MAX_FRAME_BYTES, 0)
    for address in target.raft:
        for _ in range(8):
            with suppress(OSError, TimeoutError):
                host, _, port = address.rpartition(":")
                _, writer = await asyncio.open_connection(host, int(port))
                writers.append(writer)
                writer.write(GREETING + head)
    piece, until = bytes(1 << 20), time.monotonic() + seconds
    for _ in range(MAX_FRAME_BYTES // len(piece) - 1):
        for writer in list(writers):
            try:
                writer.write(piece)
                async with asyncio.timeout(0.5):
                    await writer.drain()
            except (OSError, TimeoutError):
                writers.remove(writer)
                tally.count(is_accepted=False)
        if time.monotonic() > until:
            break
    tally.accepted = len(writers)
    await asyncio.sleep(max(until - time.monotonic(), 0))
    for writer in writers:
        writer.transport.abort()
    tally.note = "accepted: the broker holds what came of the frame"
    return tally


ATTACKS: Final = (
    Attack("raft: forged changes", forged_changes, "refused"),
    Attack("raft: read journals", read_journals, "refused"),
    Attack("raft: foreign bind", foreign_bind, "refused"),
    Attack("raft: fuzzed openings", fuzzed_openings, "refused"),
    Attack("raft: unfinished frames", unfinished_frames, "borne"),
    Attack("raft: fence journals", fence_journals, "refused"),
    Attack("raft: forged envelopes", forged_envelopes, "refused"),
)
