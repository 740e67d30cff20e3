"""The handshake of the Raft port: who gets in, what a proof is worth, and what strangers can take away."""

from __future__ import annotations

import asyncio
import random
import secrets
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from sava.config import Auth, ConfigInvalid
from sava.ledger.protocol import (
    Fence,
    FenceAnswer,
    Join,
    LedgerAppend,
    LedgerId,
    Message,
    Read,
    StorageId,
    Trim,
    WriteBack,
)
from sava.ledger.store import Reply
from sava.ledger.wire import LedgerAnswer, LedgerConnection, LedgerRequest, LedgerSession
from sava.metadata.errors import IdentityConflict, NotAuthenticated, Unavailable
from sava.metadata.peer import Bootstrap, Envelope, Ping, encode_envelope
from sava.peer_connection import GREETING, Dialer, PeerConnection, frame
from sava.peers import raft_listener, tls
from sava.peers.raft_listener import RaftListener
from sava.raft.types import Membership, NodeId
from sava.security import cluster_secret
from sava.security.cluster_secret import ClusterSecret
from sava.security.handshake import (
    BadHandshake,
    BrokerCredentials,
    DialerHandshake,
    ListenerHandshake,
    Order,
    Proof,
    Purpose,
    Welcome,
)
from tests.support.certificates import Authority, Issued
from tests.support.network import free_ports
from tests.support.peers import Named, credentials, dialer, known_secret, no_secret
from tests.support.waiting import PATIENCE_S, until
from tests.unit.peers.test_raft_port import FakeInbound, opened

ONE, TWO, THREE = NodeId(1), NodeId(2), NodeId(3)
HOST = "127.0.0.1"
LEDGER, DISK = LedgerId(1, 7), StorageId("disk")


class Port:
    """The Raft port of node two."""

    def __init__(self, *, auth: Auth | None = None, secret: ClusterSecret | None = None, cluster: str = "c"):
        (port,) = free_ports(1)
        self.inbound = FakeInbound(TWO, f"{HOST}:{port}", cluster)
        rule = tls.broker_rule(auth, "shop") if auth else None
        own = credentials(self.inbound, secret=secret, rule=rule)
        contexts = tls.server_contexts(auth) if auth else lambda: None
        self.listener = RaftListener(cast(Any, self.inbound), self.address, own, contexts)

    @property
    def address(self) -> str:
        return self.inbound.address

    async def __aenter__(self) -> Port:
        await self.listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.listener.stop()


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    async with Port() as port:
        yield port


async def connected(dialer: Dialer, address: str, node: NodeId = TWO) -> PeerConnection:
    """For Raft."""
    connection = PeerConnection()
    async with asyncio.timeout(PATIENCE_S):
        await dialer.open_raft(address, node, connection)
    return connection


def envelope(src: int) -> bytes:
    return frame(encode_envelope(Envelope("c", NodeId(src), 1, 1, TWO, Ping())))


# -- who gets in -------------------------------------------------------------------------------


async def test_a_broker_may_speak_for_itself_alone(port: Port) -> None:
    connection = await connected(dialer(ONE), port.address)
    connection.write((envelope(ONE),))
    assert await port.inbound.have(1) == [Ping()]
    connection.write((envelope(ONE), envelope(THREE), envelope(ONE)))
    await until(lambda: not connection.is_open, "the connection is ended")
    assert port.listener.forged == 1
    assert len(port.inbound.received) == 2, "nothing behind the forged one is believed"


@pytest.mark.parametrize("purpose", [Purpose.RAFT, Purpose.LEDGERS])
async def test_a_broker_with_another_secret_is_refused(port: Port, purpose: Purpose) -> None:
    stranger = dialer(ONE, secret=known_secret("another"))
    open_it = stranger.open_raft if purpose is Purpose.RAFT else stranger.open_ledgers
    with pytest.raises((NotAuthenticated, ConnectionError), match="does not prove"):
        await open_it(port.address, TWO, PeerConnection())
    info = await stranger.identify(port.address, timeout=PATIENCE_S)
    assert (info.node, info.cluster, info.founders, info.is_reticent) == (TWO, "", (), True)


async def test_a_listener_that_knows_no_secret_is_not_believed() -> None:
    async with Port(secret=known_secret("another")) as port:
        with pytest.raises(NotAuthenticated):
            await connected(dialer(ONE), port.address)


async def test_another_node_than_was_meant_is_not_spoken_to(port: Port) -> None:
    with pytest.raises(NotAuthenticated, match="node 2 answers there, and not node 3"):
        await connected(dialer(ONE), port.address, THREE)


async def test_brokers_of_two_clusters_with_one_secret_do_not_meet(port: Port) -> None:
    with pytest.raises(IdentityConflict, match="belongs to cluster c"):
        await connected(dialer(ONE, "other"), port.address)


async def test_a_node_that_asks_and_knows_the_secret_hears_all(port: Port) -> None:
    info = await dialer(ONE, "").identify(port.address, timeout=PATIENCE_S)
    assert info == port.inbound.info()


# -- belonging to a cluster ----------------------------------------------------------------------

ORDER = Bootstrap("c", Membership((ONE, TWO)))


async def test_the_secret_comes_with_the_order_and_is_kept_before_it_is_obeyed() -> None:
    secret, theirs = known_secret("kept"), no_secret("kept-there")
    async with Port(secret=theirs, cluster="") as port:
        await dialer(ONE, "c", secret=secret).bind(port.address, ORDER, timeout=PATIENCE_S)
        assert port.inbound.cluster == "c"
        assert theirs.shown() == secret.shown()
        assert theirs.path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(NotAuthenticated):
            await dialer(THREE, "x", secret=known_secret("other")).bind(
                port.address, Bootstrap("x", Membership((TWO,))), timeout=PATIENCE_S
            )


async def test_a_secret_is_not_kept_of_an_order_that_is_refused() -> None:
    theirs = no_secret("never-kept")
    async with Port(secret=theirs) as port:
        with pytest.raises(IdentityConflict):
            await dialer(ONE, "other").bind(
                port.address, Bootstrap("other", Membership((TWO,))), timeout=PATIENCE_S
            )
        assert not theirs.path.exists()


async def test_a_node_that_is_to_make_the_secret_hands_it_over() -> None:
    ours, theirs = no_secret("made-ours"), no_secret("made-theirs")
    async with Port(secret=theirs, cluster="") as port:
        await dialer(ONE, "", secret=ours).bind(port.address, ORDER, timeout=PATIENCE_S)
    assert ours.shown() == theirs.shown()


async def test_a_secret_that_was_given_by_an_operator_is_not_handed_over() -> None:
    theirs = no_secret("given-theirs")
    asker = dialer(ONE, "c")
    asker.credentials.is_given = True
    async with Port(secret=theirs, cluster="") as port:
        with pytest.raises(NotAuthenticated, match="cluster_secret_file"):
            await asker.bind(port.address, ORDER, timeout=PATIENCE_S)
        assert not theirs.path.exists()
        assert not port.inbound.cluster


# -- certificates --------------------------------------------------------------------------------


class Papers:
    """Certificates of node one, right and wrong."""

    def __init__(self, directory: Path) -> None:
        self.ca = Authority(directory / "ca")
        self.brokers_ca = Authority(directory / "brokers", "brokers")
        elsewhere = Authority(directory / "elsewhere")
        broker = "sava://shop/broker"
        issue = self.ca.issue
        self.listener = issue("listener", uris=[f"{broker}/2"])
        self.shown: dict[str, Issued] = {
            "its id": issue("id", uris=[f"{broker}/1"]),
            "its host": issue("host", uris=[f"{broker}/{HOST}"]),
            "another id": issue("other", uris=[f"{broker}/3"]),
            "another host": issue("there", uris=[f"{broker}/10.0.0.1"]),
            "a user": issue("user", uris=["sava://shop/user/1"]),
            "an application": issue("app", common_name="1"),
            "another cluster": issue("cluster", uris=["sava://store/broker/1"]),
            "expired": issue("old", uris=[f"{broker}/1"], is_expired=True),
            "another authority": elsewhere.issue("foreign", uris=[f"{broker}/1"]),
        }

    def auth(self, issued: Issued) -> Auth:
        return issued.auth(self.ca.path)


def secured(papers: Papers, shown: Issued, node: int = 1) -> Dialer:
    own = credentials(Named(node, "c", f"{HOST}:1"), rule=tls.broker_rule(papers.auth(shown), "shop"))
    return Dialer(own, tls.client_contexts(papers.auth(shown)))


def asked_of(dialer: Dialer, purpose: Purpose, address: str) -> Any:
    match purpose:
        case Purpose.RAFT:
            return dialer.open_raft(address, TWO, PeerConnection())
        case Purpose.LEDGERS:
            return dialer.open_ledgers(address, TWO, PeerConnection())
        case Purpose.IDENTIFY:
            return dialer.identify(address, timeout=PATIENCE_S)
        case Purpose.BIND:
            return dialer.bind(address, ORDER, timeout=PATIENCE_S)


GOOD = ("its id", "its host")
ALL = (
    *GOOD,
    "another id",
    "another host",
    "a user",
    "an application",
    "another cluster",
    "expired",
    "another authority",
    "none",
    "no TLS",
)


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"))


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("shown", ALL)
async def test_only_the_brokers_own_certificate_opens_the_port(
    papers: Papers, shown: str, purpose: Purpose
) -> None:
    """With the right secret in each case: a certificate is needed as well."""
    async with Port(auth=papers.auth(papers.listener)) as port:
        port.listener.ledgers = lambda write, broker: LedgerSession(Disk(), write, broker, Claims({}))
        if shown == "no TLS":
            asker = dialer(ONE)
        elif shown == "none":
            asker = secured(papers, papers.shown["its id"])
            bare = ssl.create_default_context(cafile=str(papers.ca.path))
            bare.check_hostname = False
            asker = Dialer(asker.credentials, lambda: bare)
        else:
            asker = secured(papers, papers.shown[shown])
        async with asyncio.timeout(PATIENCE_S):
            if shown in GOOD:
                await asked_of(asker, purpose, port.address)
            else:
                with pytest.raises((NotAuthenticated, Unavailable, OSError)):
                    await asked_of(asker, purpose, port.address)
                assert not port.inbound.received
        # A broker's host by the membership counts, whatever it says of itself.
        if shown == "its host" and purpose is Purpose.RAFT:
            port.inbound.addresses[ONE] = "10.0.0.9:1"
            with pytest.raises(NotAuthenticated, match=r"10\.0\.0\.9"):
                await asked_of(asker, purpose, port.address)


async def test_a_dialer_wants_the_certificate_of_the_broker_that_it_means(papers: Papers) -> None:
    for shown, is_good in (("its id", False), ("its host", True), ("a user", False)):
        async with Port(auth=papers.auth(papers.shown[shown])) as port:
            asker = secured(papers, papers.shown["its id"])
            if is_good:
                await connected(asker, port.address)
            else:
                with pytest.raises(NotAuthenticated, match="its certificate"):
                    await connected(asker, port.address)


async def test_an_authority_of_brokers_alone_needs_no_uris(papers: Papers) -> None:
    def with_broker_ca(issued: Issued) -> Auth:
        return issued.auth(papers.ca.path, broker_ca_file=papers.brokers_ca.path)

    plain = papers.brokers_ca.issue("plain")
    elsewhere = papers.brokers_ca.issue("elsewhere", hosts=["10.0.0.1"])
    async with Port(auth=with_broker_ca(plain)) as port:
        for shown, is_good in ((plain, True), (elsewhere, False), (papers.shown["its id"], False)):
            auth = with_broker_ca(shown)
            own = credentials(Named(ONE, "c", f"{HOST}:1"), rule=tls.broker_rule(auth, "shop"))
            asker = Dialer(own, tls.client_contexts(auth))
            if is_good:
                await connected(asker, port.address)
            else:
                with pytest.raises((NotAuthenticated, OSError)):
                    await connected(asker, port.address)


def test_a_certificate_names_the_node_that_a_broker_is(papers: Papers) -> None:
    def node(name: str, **more: Any) -> int:
        return tls.node_of_certificate(papers.shown[name].auth(papers.ca.path, **more), "shop")

    assert node("another id") == 3
    assert node("its host") == 0
    assert tls.node_of_certificate(Auth(), "shop") == 0
    for name in ("a user", "an application", "another cluster"):
        with pytest.raises(ConfigInvalid, match="sava://shop/broker/NODE"):
            node(name)
        assert node(name, broker_ca_file=papers.brokers_ca.path) == 0


async def test_replaced_certificates_count_for_the_next_connection(
    papers: Papers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of a replacement changes nothing; the other half does."""
    monkeypatch.setattr(tls, "LOOK_S", 0.0)
    authority = Authority(tmp_path)
    auth = authority.issue("node", uris=["sava://shop/broker/2", "sava://shop/broker/1"]).auth(authority.path)
    assert auth.tls is not None
    rule = tls.broker_rule(auth, "shop")
    seen = []

    async def shown(port: Port) -> bytes:
        connection = PeerConnection()
        asker = Dialer(credentials(Named(ONE), rule=rule), tls.client_contexts(auth))
        await asker.open_raft(port.address, TWO, connection)
        seen.append(connection)
        found = connection.certificate
        assert found is not None
        return found

    async with Port(auth=auth) as port:
        first = await shown(port)
        key, cert = auth.tls.key_file.read_bytes(), auth.tls.cert_file.read_bytes()
        authority.issue("node", uris=["sava://shop/broker/2", "sava://shop/broker/1"])
        new_cert = auth.tls.cert_file.read_bytes()
        auth.tls.cert_file.write_bytes(cert)
        assert auth.tls.key_file.read_bytes() != key
        assert await shown(port) == first, "the new key with the old certificate"
        assert await shown(port) == first
        assert len([each for each in caplog.records if "stay as they were" in each.message]) == 1
        auth.tls.cert_file.write_bytes(new_cert)
        assert await shown(port) != first
        assert all(connection.is_open for connection in seen)


# -- what a proof is worth -----------------------------------------------------------------------


def run(handshake: DialerHandshake, listener: ListenerHandshake) -> bytes:
    """Up to the proof."""
    challenge = listener.received(handshake.begin(), None)
    assert challenge is not None
    proof = handshake.received(challenge, None)
    assert isinstance(proof, bytes)
    return proof


def test_a_proof_is_of_one_handshake() -> None:
    def dialing() -> DialerHandshake:
        return DialerHandshake(credentials(Named(ONE)), Purpose.RAFT, "x:1")

    def listening() -> ListenerHandshake:
        return ListenerHandshake(credentials(Named(TWO)))

    recorded, whole = dialing(), listening()
    proof = run(recorded, whole)
    whole.received(proof, None)
    assert whole.is_proved
    replayed = listening()
    replayed.received(recorded.begin(), None)
    with pytest.raises(NotAuthenticated):
        replayed.received(proof, None)
    with pytest.raises(BadHandshake):
        whole.received(proof, None)
    # What the listener says is no proof of a dialer, nor that of another handshake.
    answer = msgspec.msgpack.decode(whole.welcome(), type=Welcome)
    reflected = listening()
    reflected.received(recorded.begin(), None)
    with pytest.raises(NotAuthenticated):
        reflected.received(msgspec.msgpack.encode(Proof(answer.mac)), None)
    other = dialing()
    run(other, listening())
    with pytest.raises(NotAuthenticated):
        other.received(whole.welcome(), None)


@pytest.mark.parametrize(
    ("what", "change"),
    [("purpose", (1, 2)), ("node", (2, 7)), ("address", (5, "y:1"))],
)
def test_a_proof_covers_what_was_said(what: str, change: tuple[int, Any]) -> None:
    """An attacker between the two changes the beginning."""
    handshake = DialerHandshake(credentials(Named(ONE)), Purpose.RAFT, "x:1")
    listener = ListenerHandshake(credentials(Named(TWO)))
    fields = msgspec.msgpack.decode(handshake.begin())
    fields[change[0]] = change[1]
    challenge = listener.received(msgspec.msgpack.encode(fields), None)
    assert challenge is not None
    proof = handshake.received(challenge, None)
    assert isinstance(proof, bytes)
    with pytest.raises(NotAuthenticated):
        listener.received(proof, None)


def test_an_order_cannot_be_changed_on_its_way() -> None:
    handshake = DialerHandshake(credentials(Named(ONE)), Purpose.BIND, "x:1", bootstrap=ORDER)
    listener = ListenerHandshake(credentials(Named(TWO, "")))
    proof = msgspec.msgpack.decode(run(handshake, listener), type=Proof)
    assert proof.order is not None
    order = msgspec.msgpack.decode(proof.order, type=Order)
    assert not order.secret, "it is not sent to one that has it"
    changed = Proof(proof.mac, msgspec.msgpack.encode(Order(Bootstrap("mine", Membership((TWO,))))))
    with pytest.raises(NotAuthenticated):
        listener.received(msgspec.msgpack.encode(changed), None)


def mutated(rng: random.Random, payload: bytes) -> bytes:
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            return payload[: rng.randrange(len(payload) + 1)]
        case 2:
            at = rng.randrange(len(payload))
            return payload[:at] + bytes((rng.randrange(256),)) + payload[at + 1 :]
        case 3:
            fields = msgspec.msgpack.decode(payload)
            fields[rng.randrange(len(fields))] = rng.choice(
                [None, -1, 1 << 63, b"", b"x" * 1000, "", [], {}, "x" * 1000, [*fields]]
            )
            return msgspec.msgpack.encode(fields)
        case 4:
            return payload + rng.randbytes(rng.randrange(20))
        case _:
            return b"\x91" * rng.randrange(2000)


def test_fuzzed_handshakes_are_refused_by_both_ends() -> None:
    """Thousands of each, from recorded ones: every fault is one of the errors that a handshake has, and what
    was changed is never taken for proved."""
    seed = secrets.randbits(32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(3000):
        purpose = rng.choice(list(Purpose))
        bootstrap = ORDER if purpose is Purpose.BIND else None
        handshake = DialerHandshake(credentials(Named(ONE)), purpose, "x:1", bootstrap=bootstrap)
        listener = ListenerHandshake(credentials(Named(TWO)))
        turn, is_changed = rng.randrange(3), False
        try:
            hello = handshake.begin()
            said = mutated(rng, hello) if turn == 0 else hello
            is_changed |= said != hello
            challenge = listener.received(said, None)
            if challenge is None:
                continue
            told = mutated(rng, challenge) if turn == 1 else challenge
            is_changed |= told != challenge
            proof = handshake.received(told, None)
            if not isinstance(proof, bytes):
                continue
            sent = mutated(rng, proof) if turn == 2 else proof
            is_changed |= sent != proof
            listener.received(sent, None)
        except (BadHandshake, NotAuthenticated, IdentityConflict):
            continue
        if listener.is_proved and is_changed:
            # Only bytes that say the same: trailing ones of the frame are refused by the decoder.
            assert msgspec.msgpack.decode(sent) == msgspec.msgpack.decode(proof)


async def test_fuzzed_connections_end_and_a_broker_gets_in_beside_them(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raft_listener, "HANDSHAKE_TIMEOUT_S", 1.0)
    seed = secrets.randbits(32)
    print("seed", seed)
    rng = random.Random(seed)

    async def come() -> None:
        hello = DialerHandshake(credentials(Named(ONE)), Purpose.RAFT, port.address).begin()
        reader, writer = await asyncio.open_connection(*port.address.split(":"))
        whole = GREETING + frame(mutated(rng, hello)) + frame(mutated(rng, hello))
        writer.write(whole[: rng.randrange(len(whole) + 1)])
        try:
            await reader.read()
        except OSError:
            return
        finally:
            writer.close()

    for _ in range(4):
        await asyncio.gather(*(come() for _ in range(20)), connected(dialer(ONE), port.address))
    connection = await connected(dialer(ONE), port.address)
    connection.write((envelope(ONE),))
    assert await port.inbound.have(1) == [Ping()]


# -- rooms and bounds ----------------------------------------------------------------------------


async def test_strangers_do_not_keep_a_broker_out(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    """They hold all that they can get, of one host and of many; brokers that were in stay in."""
    known = await connected(dialer(ONE), port.address)
    target = port.address.split(":")
    held = [await asyncio.open_connection(*target) for _ in range(4 * raft_listener.MAX_STRANGERS)]
    assert len(port.listener._strangers) <= raft_listener.STRANGERS_PER_HOST
    newcomer = await connected(dialer(THREE), port.address)
    newcomer.write((envelope(THREE),))
    known.write((envelope(ONE),))
    await port.inbound.have(2)
    lines = [each.getMessage() for each in caplog.records if "connection dropped" in each.message]
    assert len(lines) == 1, "one line a minute for each host"
    assert HOST in lines[0]
    for _, writer in held:
        writer.close()


async def test_there_is_room_for_strangers_of_a_few_hosts(port: Port) -> None:
    listener = port.listener
    for number in range(100):
        connection = listener._accept()
        connection.peer = f"10.0.{number}.1:9"
        listener._opened(connection)
    assert len(listener._strangers) == raft_listener.MAX_STRANGERS
    assert {f"10.0.{number}.1" for number in range(36, 100)} == set(listener._strangers.values())
    for connection in tuple(listener._connections):
        listener._lost(connection)
    assert not listener._hosts
    assert not listener._strangers


async def test_the_log_tells_how_often(
    port: Port, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raft_listener, "COMPLAIN_S", 0.05)
    complaints = raft_listener.Complaints()
    for _ in range(10):
        complaints.add("10.0.0.1:5", "noise")
    await asyncio.sleep(0.06)
    complaints.add("10.0.0.1:6", "noise")
    complaints.add("[2001:db8::1]:5", "noise")
    complaints.add("[2001:db8::2]:5", "noise")
    lines = [each.getMessage() for each in caplog.records]
    assert lines == [
        "raft: connection dropped peer=10.0.0.1:5 reason=noise count=1",
        "raft: connection dropped peer=10.0.0.1:6 reason=noise count=10",
        "raft: connection dropped peer=[2001:db8::1]:5 reason=noise count=1",
    ]
    for number in range(2 * raft_listener.MAX_COMPLAINTS):
        complaints.add(f"10.1.{number // 256}.{number % 256}:5", "noise")
    assert len(complaints._hosts) <= raft_listener.MAX_COMPLAINTS + 1


async def test_a_stranger_has_one_time_for_all_of_its_handshake(
    papers: Papers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it never gets through TLS."""
    monkeypatch.setattr(raft_listener, "HANDSHAKE_TIMEOUT_S", 0.3)
    for auth in (None, papers.auth(papers.listener)):
        async with Port(auth=auth) as port:
            reader, writer = await asyncio.open_connection(*port.address.split(":"))
            began = time.monotonic()
            writer.write(GREETING[:4] if auth is None else bytes.fromhex("16030100c8010000c4"))
            async with asyncio.timeout(PATIENCE_S):
                while await reader.read(100):
                    pass
            assert time.monotonic() - began < 5
            writer.close()
            await until(lambda: not port.listener._connections, "it is forgotten")


async def test_a_stranger_cannot_begin_a_long_frame(port: Port) -> None:
    reader, writer = await asyncio.open_connection(*port.address.split(":"))
    writer.write(GREETING + (1 << 20).to_bytes(4, "little") + bytes(4))
    async with asyncio.timeout(2.0):
        assert await reader.read() == b""
    assert port.listener.malformed == 1
    writer.close()


async def test_a_frame_that_does_not_grow_ends_its_connection(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raft_listener, "STALLED_S", 0.2)
    idle = await connected(dialer(ONE), port.address)
    reader, writer = await opened(port.address, Purpose.RAFT)
    writer.write((60 << 20).to_bytes(4, "little") + bytes(4) + b"x" * 1000)
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
    writer.close()
    assert idle.is_open, "one that says nothing is not late"


async def test_unfinished_frames_together_have_a_bound(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft_listener, "UNFINISHED_BYTES", 3 << 20)
    held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    for size in (1, 1, 2):
        reader, writer = await opened(port.address, Purpose.RAFT)
        writer.write((70 << 20).to_bytes(4, "little") + bytes(4) + b"x" * (size << 20))
        await writer.drain()
        held.append((reader, writer))
    async with asyncio.timeout(PATIENCE_S):
        assert await held[2][0].read() == b"", "the one that holds most is ended"
    assert len(port.listener._proved_by) == 2
    for _, writer in held:
        writer.close()


async def test_connections_of_a_secret_that_was_taken_away_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_secret, "LOOK_S", 0.0)
    old, new = "old-secret-of-16-bytes", "new-secret-of-16-bytes"

    def file(name: str, *lines: str) -> ClusterSecret:
        path = tmp_path / name
        path.write_text("\n".join(lines))
        path.chmod(0o600)
        return ClusterSecret(path)

    async with Port(secret=file("listener", old)) as port:
        leaked = await connected(dialer(ONE, secret=file("leaked", old)), port.address)
        file("listener", new, old)
        renewed = await connected(dialer(THREE, secret=file("renewed", new, old)), port.address)
        await asyncio.sleep(2 * raft_listener.SWEEP_S)
        assert leaked.is_open
        file("listener", new)
        await until(lambda: not leaked.is_open, "what was proved by the old one is worth nothing")
        assert renewed.is_open


# -- ledgers -------------------------------------------------------------------------------------


class Claims:
    """The greatest epoch under which each ledger is claimed."""

    def __init__(self, epochs: dict[LedgerId, int], error: Exception | None = None) -> None:
        self.epochs = epochs
        self.error = error

    async def is_claimed(self, ledger: LedgerId, epoch: int, origin: StorageId) -> bool:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return 1 <= epoch <= self.epochs.get(ledger, 0)


class Disk:
    def __init__(self) -> None:
        self.received: list[Message] = []

    def receive(self, origin: StorageId, message: Message, reply: Reply) -> None:
        self.received.append(message)
        if isinstance(message, Fence):
            reply(FenceAnswer(message.ledger, message.storage, message.epoch, None))

    def forget_owner(self, reply: Reply) -> None:
        """Nothing was said to it."""


async def ledger_link(port: Port, node: int, answers: asyncio.Queue[LedgerAnswer]) -> LedgerConnection:
    link = LedgerConnection(answers.put_nowait)
    await link.open(dialer(node), port.address, TWO)
    return link


@pytest.mark.parametrize(
    "message",
    [
        Join(LEDGER, DISK, 0, 0, 0),
        LedgerAppend(LEDGER, DISK, 0, 0, b"x"),
        Trim(LEDGER, DISK, 0, 1 << 40),
        WriteBack(LedgerId(3, 7), DISK, 0, 0, b"x"),
    ],
)
async def test_a_broker_writes_its_own_ledgers_alone(port: Port, message: Message) -> None:
    disk = Disk()
    port.listener.ledgers = lambda write, broker: LedgerSession(disk, write, broker, Claims({}))
    link = await ledger_link(port, THREE, asyncio.Queue())
    link.send(LedgerRequest(1, DISK, message))
    await asyncio.wait_for(link.is_gone, PATIENCE_S)
    assert not disk.received
    if not isinstance(message, WriteBack):
        owner = await ledger_link(port, ONE, asyncio.Queue())
        owner.send(LedgerRequest(0, DISK, message))
        await until(lambda: len(disk.received) == 1, "its owner may")


async def test_a_fence_counts_under_the_epoch_of_its_claim_and_no_other(port: Port) -> None:
    disk, answers = Disk(), asyncio.Queue[LedgerAnswer]()
    claims = Claims({LEDGER: 3})
    port.listener.ledgers = lambda write, broker: LedgerSession(disk, write, broker, claims)
    link = await ledger_link(port, THREE, answers)
    for epoch in (1 << 40, 4, 0, -1, 3):
        link.send(LedgerRequest(9, DISK, Fence(LEDGER, DISK, epoch)))
    answer = await asyncio.wait_for(answers.get(), PATIENCE_S)
    assert answer.message == FenceAnswer(LEDGER, DISK, 3, None)
    assert disk.received == [Fence(LEDGER, DISK, 3)]
    claims.error = Unavailable("no majority")
    link.send(LedgerRequest(9, DISK, Fence(LEDGER, DISK, 3)))
    link.send(LedgerRequest(9, DISK, Read(LEDGER, DISK, 0, 1, 1)))
    await until(lambda: len(disk.received) == 2, "a read needs no claim")
    assert isinstance(disk.received[1], Read), "a fence that cannot be checked is asked again"
    assert link.connection.is_open


def test_credentials_of_a_command_are_those_of_no_node() -> None:
    own = BrokerCredentials(known_secret())
    assert own.own.node == 0
    listener = ListenerHandshake(credentials(Named(TWO)))
    for purpose in (Purpose.RAFT, Purpose.LEDGERS, Purpose.BIND):
        with pytest.raises(NotAuthenticated, match="only a broker"):
            listener.received(DialerHandshake(own, purpose, "x:1").begin(), None)
