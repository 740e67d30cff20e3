"""A stranger on the Raft port, who knows the protocol and has no credential: it speaks as another broker,
changes metadata, reads and fences journals, and takes the place of those who belong there."""

from __future__ import annotations

import asyncio
import hmac
import random
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Final, Literal

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
from sava.security.cluster_secret import ClusterSecret
from sava.security.credentials import Credentials, Tls
from sava.security.handshake import (
    NONCE_BYTES,
    Bound,
    Challenge,
    HandshakeRefused,
    Hello,
    Introduction,
    Order,
    Proof,
    Purpose,
    Welcome,
    tag_of,
)
from tests.security.attacks import CALL_S, Attack, Tally, Target

FORGED_KEY: Final = "/forged-by-stranger"
GUESSES: Final = 4
"""Incarnations of a journal that a stranger tries."""
CLAIMED: Final = "127.0.0.1:1"
LOST: Final = (OSError, TimeoutError, RuntimeError)
"""A connection that the broker has closed; uvloop raises RuntimeError when it is written to."""

Trick = Literal["no proof", "random proof", "guessed secret", "silence"]
TRICKS: Final[tuple[Trick, ...]] = ("no proof", "random proof", "guessed secret", "silence")
"""How a stranger goes on after the challenge; in silence it sends at once what comes after a handshake."""

_answers: Final = msgspec.msgpack.Decoder(Challenge | Welcome | Introduction | Bound | HandshakeRefused)
Reply = Challenge | Welcome | Introduction | Bound | HandshakeRefused


class Stranger:
    """A connection to a Raft port by one who does not belong there."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = FrameDecoder()
        self._payloads: list[bytes] = []

    @classmethod
    async def connect(cls, target: Target, address: str) -> Stranger:
        """Raises OSError, TimeoutError."""
        host, _, port = address.rpartition(":")
        tls = ssl.create_default_context(cafile=target.ca) if target.ca else None
        async with asyncio.timeout(CALL_S):
            return cls(*await asyncio.open_connection(host, int(port), ssl=tls))

    async def shake(
        self,
        purpose: Purpose,
        known: Known,
        trick: Trick = "no proof",
        order: bytes | None = None,
        *,
        secret: ClusterSecret | None = None,
    ) -> Reply | None:
        """The end of the handshake; None: the connection was closed. It comes as the first broker that it
        knows of. ``secret``: for one who is no stranger."""
        node = NodeId(known.nodes[0] if known.nodes else 0)
        hello = Hello(purpose, node, random.randbytes(NONCE_BYTES), tag_of(known.cluster), known.address)
        self._writer.write(GREETING + frame(msgspec.msgpack.encode(hello)))
        if trick == "silence":
            return None
        challenge = await self.answer()
        if not isinstance(challenge, Challenge):
            return challenge
        proof = Proof({"random proof": random.randbytes(32)}.get(trick, b""), order)
        if trick == "guessed secret":
            proof = Proof(hmac.digest(b"sava", DIALER + covered(hello, challenge, order), "sha256"), order)
        if secret is not None:
            proof = Proof(secret.mac(DIALER, covered(hello, challenge, order)), order)
        self.say(msgspec.msgpack.encode(proof))
        return await self.answer()

    async def answer(self) -> Reply | None:
        payload = await self.heard()
        return _answers.decode(payload) if payload else None

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


DIALER: Final = b"raft port, dialer"


def covered(hello: Hello, challenge: Challenge, order: bytes | None) -> bytes:
    """What a proof covers, which the protocol tells everyone."""
    return msgspec.msgpack.encode(
        (
            int(hello.purpose),
            (hello.node, challenge.node),
            (hello.nonce, challenge.nonce),
            (hello.tag, challenge.tag),
            hello.address,
            order,
        )
    )


class Known(msgspec.Struct):
    """What a stranger finds out, or learns from one who looked."""

    cluster: str = ""
    nodes: tuple[int, ...] = ()
    address: str = CLAIMED
    """Of the broker that it claims to be."""
    journals: tuple[tuple[LedgerId, StorageId], ...] = ()


def admin_of(target: Target) -> AdminClient:
    tls = Tls(ca=target.ca) if target.ca else None
    return AdminClient(target.admin[0], Credentials(tls=tls, token=target.token or None))


async def find_out(target: Target) -> Known:
    """Node ids are in the challenges of all brokers; the cluster's id the attacker has heard of."""
    cluster, nodes = "unknown", []
    for address in target.raft:
        with suppress(OSError, TimeoutError):
            stranger = await Stranger.connect(target, address)
            hello = Hello(Purpose.IDENTIFY, NodeId(0), random.randbytes(NONCE_BYTES), b"", "")
            stranger.say_parts((GREETING + frame(msgspec.msgpack.encode(hello)),))
            challenge = await stranger.answer()
            if isinstance(challenge, Challenge):
                nodes.append(int(challenge.node))
            stranger.close()
    with suppress(SavaError):
        async with admin_of(target) as client:
            cluster = (await client.status()).cluster_id
    return Known(cluster, tuple(nodes) or (1, 2, 3), address=target.raft[0])


async def tried(
    target: Target,
    seconds: float,
    known: Known,
    purpose: Purpose,
    attack: Callable[[Stranger], Awaitable[bool]],
    *,
    order: bytes | None = None,
) -> Tally:
    """``attack`` on connections to each broker, by each trick, again and again. It says whether something was
    done; a handshake that succeeds counts as well."""
    tally, until = Tally(), time.monotonic() + seconds
    while time.monotonic() < until:
        for trick in TRICKS:
            for address in target.raft:
                tally.count(is_accepted=await _try(target, address, known, purpose, trick, attack, order))
    return tally


async def _try(
    target: Target,
    address: str,
    known: Known,
    purpose: Purpose,
    trick: Trick,
    attack: Callable[[Stranger], Awaitable[bool]],
    order: bytes | None,
) -> bool:
    try:
        stranger = await Stranger.connect(target, address)
    except LOST:
        return False  # as with TLS, for one without a certificate
    is_in = False
    with suppress(*LOST, BadFrame, msgspec.DecodeError):
        end = await stranger.shake(purpose, known, trick, order)
        is_in = isinstance(end, Welcome | Bound)
        is_in |= await attack(stranger)
    stranger.close()
    return is_in


async def find_journals(target: Target, known: Known) -> Known:
    """From the admin port where it is open, and by guessing."""
    journals = {(LedgerId(node, number), StorageId("0")) for node in known.nodes for number in range(GUESSES)}
    with suppress(SavaError):
        async with admin_of(target) as client:
            listed = await client.ask(ledgers_pb.ListLedgersRequest())
            for ledger in listed.ledgers:
                name = LedgerId(ledger.broker_id, ledger.incarnation)
                journals |= {(name, StorageId(member.storage_id)) for member in ledger.members}
    return msgspec.structs.replace(known, journals=tuple(journals))


def envelope(known: Known, source: int, target: int, message: PeerMessage) -> bytes:
    return encode_envelope(
        Envelope(
            known.cluster,
            NodeId(source),
            10**6,
            random.getrandbits(63),
            NodeId(target),
            message,
            CLAIMED,
        )
    )


async def forged_envelopes(target: Target, seconds: float) -> Tally:
    """C1: speak as broker 1 from a later start, so that it must stop."""
    known = await find_out(target)

    async def attack(stranger: Stranger) -> bool:
        for source in known.nodes:
            for node in known.nodes:
                stranger.say(envelope(known, source, node, Ping()))
        await stranger.flush()
        return False

    return await tried(target, seconds, known, Purpose.RAFT, attack)


async def forged_changes(target: Target, seconds: float) -> Tally:
    """C2: have the leader write a key."""
    known = await find_out(target)
    put = Txn(then=(Put(FORGED_KEY, b"1"),))

    async def attack(stranger: Stranger) -> bool:
        for node in known.nodes:
            message = Ask(random.getrandbits(40), Propose(put))
            stranger.say(envelope(known, 4711, node, message))
            stranger.say(envelope(known, known.nodes[0], node, message))
        await stranger.flush()
        return False

    tally = await tried(target, seconds, known, Purpose.RAFT, attack)
    if not target.token:
        async with AdminClient(target.admin[0]) as client:
            got = await client.ask(pb.GetRequest(key=FORGED_KEY))
            tally.accepted += got.HasField("kv")
            tally.note = "the key is there" if got.HasField("kv") else "the key is not there"
    return tally


async def _about_journals(target: Target, seconds: float, kind: str) -> Tally:
    known = await find_journals(target, await find_out(target))

    async def attack(stranger: Stranger) -> bool:
        for ticket, (ledger, storage) in enumerate(known.journals, 1):
            message: Message = Fence(ledger, storage, 1 << 40)
            if kind == "read":
                message = Read(ledger, storage, 0, 1 << 40, 1 << 16)
            stranger.say_parts(wire.encode(wire.LedgerRequest(ticket, storage, message)))
        await stranger.flush()
        is_done = False
        while payload := await stranger.heard(0.1):
            said = wire.decode_answer(payload).message
            is_done |= isinstance(said, FenceAnswer) or (isinstance(said, ReadAnswer) and bool(said.data))
        return is_done

    return await tried(target, seconds, known, Purpose.LEDGERS, attack)


async def read_journals(target: Target, seconds: float) -> Tally:
    """C3: have a broker give its copy of a journal."""
    return await _about_journals(target, seconds, "read")


async def fence_journals(target: Target, seconds: float) -> Tally:
    """C3: end every journal, so that no broker can publish."""
    return await _about_journals(target, seconds, "fence")


async def foreign_bind(target: Target, seconds: float) -> Tally:
    """M9: bind a broker to a cluster of the stranger's."""
    known = await find_out(target)
    bootstrap = Bootstrap("stranger", Membership(voters=(NodeId(4711),)))
    order = msgspec.msgpack.encode(Order(bootstrap, "5" * 64))

    async def attack(_: Stranger) -> bool:
        return False

    return await tried(target, seconds, known, Purpose.BIND, attack, order=order)


async def fuzzed_openings(target: Target, seconds: float) -> Tally:
    """Openings that no broker sends: wrong shapes, wrong types, and good ones with a bit changed."""
    chance, tally = random.Random(21), Tally()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        address = chance.choice(target.raft)
        with suppress(*LOST):
            stranger = await Stranger.connect(target, address)
            hello = (1, chance.randrange(6), chance.getrandbits(62), chance.randbytes(32), b"", "x:1")
            proof = (2, chance.randbytes(32), None)
            good = bytearray(msgspec.msgpack.encode(chance.choice((hello, proof, hello[:4], ()))))
            for _ in range(chance.randrange(4)):
                good[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
            opening = GREETING + frame(bytes(good) + chance.randbytes(chance.randrange(30)))
            stranger.say_parts((opening[: chance.randrange(1, len(opening) + 1)],))
            await stranger.flush()
            answer = await stranger.heard(0.05)
            tally.count(is_accepted=bool(answer) and answer[1:2] == b"\x02")  # a Welcome
            stranger.close()
    return tally


async def unfinished_frames(target: Target, seconds: float) -> Tally:
    """Frames that claim 72 MB and stay one byte short, on several connections to each broker."""
    tally, writers = Tally(), []
    head = struct.pack("<II", MAX_FRAME_BYTES, 0)
    for address in target.raft:
        for _ in range(8):
            host, _, port = address.rpartition(":")
            try:
                async with asyncio.timeout(CALL_S):
                    _, writer = await asyncio.open_connection(host, int(port))
            except (OSError, TimeoutError):
                tally.refused += 1
                continue
            writers.append(writer)
            writer.write(GREETING + head)
    piece, until = bytes(1 << 20), time.monotonic() + seconds
    for _ in range(MAX_FRAME_BYTES // len(piece) - 1):
        for writer in list(writers):
            try:
                writer.write(piece)
                async with asyncio.timeout(0.5):
                    await writer.drain()
            except LOST:
                writers.remove(writer)
                writer.transport.abort()
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
