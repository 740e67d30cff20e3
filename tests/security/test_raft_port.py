"""What a stranger reaches on the Raft port of a running cluster: nothing that changes it, or tells of it.

The strangers here speak in plain bytes, so that they can say what no broker would. Each knows all that can be
known from outside: the cluster's id, the ids of its nodes, and how brokers speak.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from sava.client import Client
from sava.ledger.protocol import Fence, Join, LedgerAppend, LedgerId, Message, Read, StorageId
from sava.ledger.wire import LedgerRequest, encode
from sava.metadata.commands import Put, Txn
from sava.metadata.errors import IdentityConflict
from sava.metadata.peer import Ask, Bootstrap, Conflict, Envelope, PeerMessage, Ping, Propose, encode_envelope
from sava.peer_connection import GREETING, FrameDecoder, frame
from sava.proto import ledgers_pb2 as pb
from sava.raft.types import Membership, NodeId
from tests.support.brokers import Brokers, Cluster
from tests.support.waiting import until

RAFT, LEDGERS, IDENTIFY, BIND = 1, 2, 3, 4
TOPIC = "/default/orders"
NO_MAC = b""


class Stranger:
    """A connection whose far end has been told what it is for. ``answers`` are the payloads that it sends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = FrameDecoder()
        self._waiting: list[bytes] = []

    @classmethod
    async def come(cls, port: int) -> Stranger:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def say(self, *payloads: bytes, begins: bool = False) -> None:
        self._writer.write((GREETING if begins else b"") + b"".join(map(frame, payloads)))

    def say_plain(self, *parts: bytes) -> None:
        self._writer.writelines(parts)

    async def answer(self, timeout: float = 2.0) -> bytes | None:
        """None: there is no more, or none in time."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(timeout):
                while not self._waiting:
                    data = await self._reader.read(1 << 16)
                    if not data:
                        return None
                    self._waiting += self._decoder.feed(data)
                return self._waiting.pop(0)
        return None

    async def all_answers(self, timeout: float = 2.0) -> list[bytes]:
        found = []
        while (answer := await self.answer(timeout)) is not None:
            found.append(answer)
        return found

    def leave(self) -> None:
        self._writer.transport.abort()


def hello(purpose: int, node: int) -> bytes:
    """The beginning of a handshake."""
    return msgspec.msgpack.encode([1, purpose, node, secrets.token_bytes(32), b"", "127.0.0.1:1"])


def proof(mac: bytes, order: Bootstrap, secret: str = "") -> bytes:
    """With an order to belong to a cluster."""
    return msgspec.msgpack.encode([2, mac, msgspec.msgpack.encode([order, secret])])


def openings(purpose: int, node: int, cluster: str) -> list[list[bytes]]:
    """Ways to get in without a secret: by the cluster's id alone, as it once was enough; by a handshake whose
    proof is missing or made up; and without waiting for any."""
    former = {RAFT: [1, cluster], LEDGERS: [4, cluster], IDENTIFY: [2]}[purpose]
    return [
        [msgspec.msgpack.encode(former)],
        [hello(purpose, node), msgspec.msgpack.encode([2, NO_MAC, None])],
        [hello(purpose, node), msgspec.msgpack.encode([2, secrets.token_bytes(32), None])],
        [hello(purpose, node)],
        [],
    ]


async def say(port: int, node: int, cluster: str, *messages: PeerMessage, incarnation: int, dst: int) -> None:
    """Speak as ``node``, by every way in."""
    envelopes = [
        encode_envelope(Envelope(cluster, NodeId(node), incarnation, 7, NodeId(dst), message))
        for message in messages
    ]
    for opening in openings(RAFT, node, cluster):
        stranger = await Stranger.come(port)
        stranger.say(*opening, *envelopes, begins=True)
        await stranger.answer(0.3)
        stranger.leave()


@pytest.fixture
async def trio(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Cluster(3, tmp_path) as cluster:
        await cluster.init()
        await cluster.put("/before", b"1")
        yield cluster


async def test_a_stranger_makes_no_broker_end(trio: Cluster) -> None:
    """It speaks as node one, with an incarnation that node one reaches never. The others took its word: node
    one heard that another process speaks as it, and ended, at every later start as well."""
    victim, *others = trio.brokers
    node, cluster = await victim.node_id(), (await victim.status()).cluster_id
    for other in others:
        await say(other.raft_port, node, cluster, Ping(), incarnation=10**6, dst=await other.node_id())
    victim_says = Conflict(NodeId(node), 7)
    await say(victim.raft_port, await others[0].node_id(), cluster, victim_says, incarnation=10**6, dst=node)
    for life in range(2):
        await victim.put(f"/life/{life}", b"1")
        assert await others[0].get(f"/life/{life}") == b"1"
        assert victim.is_running
        victim.kill()
        await victim.ended()
        await victim.start()
    await victim.put("/after", b"1")
    assert not [line for line in victim.lines if "IdentityConflict" in line]


async def test_a_stranger_proposes_nothing(trio: Cluster) -> None:
    leader = await trio.leader()
    put = Propose(Txn((), (Put("/forged", b"1"),), ()))
    await say(
        leader.raft_port,
        4242,
        (await leader.status()).cluster_id,
        *(Ask(ticket, put) for ticket in range(1 << 50, (1 << 50) + 3)),
        incarnation=1,
        dst=await leader.node_id(),
    )
    await trio.put("/after", b"1")
    assert await leader.get("/forged") is None


async def test_a_stranger_learns_which_node_it_is_and_no_more(trio: Cluster) -> None:
    broker = trio.brokers[0]
    status = await broker.status()
    for opening in openings(IDENTIFY, 0, ""):
        stranger = await Stranger.come(broker.raft_port)
        stranger.say(*opening, begins=True)
        told = b"".join(await stranger.all_answers(1.0))
        stranger.leave()
        assert status.cluster_id.encode() not in told
        for voter in status.voters:
            assert voter == status.self_node_id or msgspec.msgpack.encode(voter) not in told


async def ask(port: int, node: int, cluster: str, *asked: LedgerRequest) -> list[bytes]:
    answers: list[bytes] = []
    for opening in openings(LEDGERS, node, cluster):
        stranger = await Stranger.come(port)
        stranger.say(*opening, begins=True)
        stranger.say_plain(*(part for request in asked for part in encode(request)))
        answers += (await stranger.all_answers(1.0))[max(1, len(opening)) :]  # those of the handshake
        stranger.leave()
    return answers


async def test_a_stranger_neither_reads_a_ledger_nor_ends_it(tmp_path: Path) -> None:
    async with Brokers(3, tmp_path) as cluster:
        await cluster.create(TOPIC)
        owner = await cluster.owner(TOPIC)
        async with Client(owner.client_url) as client, client.producer(TOPIC) as producer:
            await producer.send(b"before")
            asked = await owner.client.call(owner.client.ledgers.ListLedgers, pb.ListLedgersRequest())
            node, status = await owner.node_id(), await owner.status()
            mine = next(each for each in asked.ledgers if each.broker_id == node and each.state == "open")
            ledger, disks = LedgerId(node, mine.incarnation), [each.storage_id for each in mine.members]
            stranger = next(member.node_id for member in status.members if member.node_id != node)
            for broker in cluster.brokers:
                for disk in map(StorageId, disks):
                    messages: list[Message] = [
                        Read(ledger, disk, 0, 1 << 20, 1 << 20),
                        Fence(ledger, disk, 1 << 40),
                        Join(ledger, disk, 1 << 40, 0, 0),
                        LedgerAppend(ledger, disk, 1 << 40, 0, b"x"),
                    ]
                    origin = StorageId(disks[0])
                    requests = [LedgerRequest(9, origin, message) for message in messages]
                    assert await ask(broker.raft_port, stranger, status.cluster_id, *requests) == []
            assert await producer.send(b"after") == 1
        assert not [line for broker in cluster.brokers for line in broker.lines if "was ended" in line]


async def test_a_stranger_binds_no_broker_that_has_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before `cluster init` it made the broker one of its own cluster, and init was refused."""
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(32))
    secret.chmod(0o600)
    monkeypatch.setenv("SAVA__AUTH__CLUSTER_SECRET_FILE", str(secret))
    async with Cluster(1, tmp_path) as cluster:
        (broker,) = cluster.brokers
        own = NodeId(await broker.node_id())
        order = Bootstrap("f" * 32, Membership((own,), addresses=((own, broker.raft_address),)))
        for messages in (
            [msgspec.msgpack.encode([3, order])],
            [hello(BIND, 5), proof(NO_MAC, order, "of-the-strangers-own-making")],
            [hello(BIND, 5), proof(secrets.token_bytes(32), order)],
        ):
            stranger = await Stranger.come(broker.raft_port)
            stranger.say(*messages, begins=True)
            await stranger.all_answers(1.0)
            stranger.leave()
        assert not (await broker.status()).cluster_id
        await cluster.init()
        await broker.put("/after", b"1")
        assert "of-the-strangers-own-making" not in secret.read_text()


async def test_the_first_order_binds_a_broker_without_a_secret_for_good(tmp_path: Path) -> None:
    """Trust on first use: what comes second is refused."""
    async with Cluster(2, tmp_path) as cluster:
        first, second = cluster.brokers
        await cluster.init([first])
        with pytest.raises(IdentityConflict):
            await cluster.init([first, second])
        own = NodeId(await first.node_id())
        order = Bootstrap("f" * 32, Membership((own,), addresses=((own, first.raft_address),)))
        stranger = await Stranger.come(first.raft_port)
        stranger.say(hello(BIND, 5), proof(NO_MAC, order), begins=True)
        await stranger.all_answers(1.0)
        stranger.leave()
        secret = first.data_dir / "cluster_secret"

        async def is_kept() -> bool:
            return secret.exists()

        await until(is_kept, "the secret is written down")
        assert secret.stat().st_mode & 0o777 == 0o600
        await first.put("/x", b"1")
