"""The handshake of the Raft port: which broker is at the other end.

Every connection begins with it, whatever it is for, and neither end takes anything else before it is over:

    dialer                                            listener
    Hello(purpose, node, nonce, tag, address) ──────▶
                          ◀────── Challenge(node, nonce, tag, knows_secret)
    Proof(mac, order) ──────────────────────────────▶
                          ◀────── Welcome(mac)             for Raft and for ledgers
                          ◀────── Introduction(info, mac)  to a question who is there
                          ◀────── Bound(secret, mac)       to an order to belong to a cluster
                          ◀────── HandshakeRefused         and the end, at any step

A *proof* is a MAC under the cluster's secret (``cluster_secret``) over all that was said before: the purpose,
both node ids, both nonces, the tags of both clusters, the dialer's address, and the content of the message
that it stands in. The dialer's and the listener's are made for different purposes, so that neither can be
sent back as the other. The dialer proves first. A listener that did so would give every stranger a text and
its MAC, by which a weak secret could be guessed at home.

A *tag* is a digest of the cluster's id, so that two brokers which share a secret, but no cluster, find out
before anything else, and a stranger learns neither.

With TLS the certificate must be a broker's as well (``CertificateRule``), on both sides.

What an end may do that has not proved that it knows the secret:

=============  ==================================  ========================================================
               the listener belongs to a cluster   it does not
=============  ==================================  ========================================================
Raft, ledgers  nothing                             nothing
who is there   the node id, and that it is bound   everything that it says of itself
belong         nothing                             if it knows no secret: it is bound, and takes the secret
                                                   that it is given (trust on first use)
=============  ==================================  ========================================================

Bytes in, bytes out: this file knows no sockets.
"""

from __future__ import annotations

import ipaddress
import secrets
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from typing import Final, NamedTuple, TypeVar

import msgspec

from sava.errors import Outcome, SavaError
from sava.metadata.errors import IdentityConflict, NotAuthenticated
from sava.metadata.peer import Bootstrap, Inbound, NodeInfo, error_from
from sava.raft.types import NO_NODE, NodeId
from sava.security.certificates import Certificate, CertificateUnreadable, brokers_of, read_certificate
from sava.security.cluster_secret import ClusterSecret

NONCE_BYTES: Final = 32
MAX_TEXT: Final = 500
"""Of what another end says and a line of the log repeats."""
_TAG_BYTES: Final = 16
_DIALER: Final = b"raft port, dialer"
_LISTENER: Final = b"raft port, listener"

T = TypeVar("T")


class BadHandshake(SavaError):
    """Bytes that no Sava node sends in a handshake."""

    outcome = Outcome.NOT_DONE


class Purpose(IntEnum):
    """What a connection is for."""

    RAFT = 1
    """Envelopes, in the dialer's direction only."""
    LEDGERS = 2
    """Requests of the dialer, answers of the listener."""
    IDENTIFY = 3
    BIND = 4


# -- messages --------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """``node`` 0: a command, and no broker. ``address`` is where the dialer itself listens."""

    purpose: Purpose
    node: NodeId
    nonce: bytes
    tag: bytes
    address: str


class Order(msgspec.Struct, frozen=True, array_like=True):
    """Belong to this cluster. ``secret`` is the cluster's, for a node that knows none; empty: make one."""

    bootstrap: Bootstrap
    secret: str = ""


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """``mac`` empty: the dialer knows no secret. ``order`` is an Order as bytes, since a MAC of bytes holds
    also where the other end is of a version that has fewer fields."""

    mac: bytes
    order: bytes | None = None


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=1):
    node: NodeId
    nonce: bytes
    tag: bytes
    knows_secret: bool


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    mac: bytes


class Introduction(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """``mac`` empty: the listener knows no secret, or the dialer has proved none."""

    described: bytes
    """A NodeInfo."""
    mac: bytes = b""

    @property
    def info(self) -> NodeInfo:
        """Raises BadHandshake."""
        return _decode(_infos, self.described)


class Bound(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """``secret``: the listener was to make it, and has."""

    secret: str = ""
    mac: bytes = b""


class HandshakeRefused(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """An error by its stable code (``metadata.peer``)."""

    code: str
    message: str
    detail: int = 0


Answer = Welcome | Introduction | Bound

_encoder: Final = msgspec.msgpack.Encoder()
_infos: Final = msgspec.msgpack.Decoder(NodeInfo)
_orders: Final = msgspec.msgpack.Decoder(Order)
_from_dialer: Final[msgspec.msgpack.Decoder[Hello | Proof]] = msgspec.msgpack.Decoder(Hello | Proof)
_from_listener: Final[msgspec.msgpack.Decoder[Challenge | Answer | HandshakeRefused]] = (
    msgspec.msgpack.Decoder(Challenge | Answer | HandshakeRefused)
)


def decode_dialer(payload: bytes) -> Hello | Proof:
    """Raises BadHandshake."""
    return _decode(_from_dialer, payload)


def encode_refusal(refused: HandshakeRefused) -> bytes:
    return _encoder.encode(refused)


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadHandshake(f"not a message of this version: {str(error)[:200]}") from error


# -- who an end is ---------------------------------------------------------------------------------


class CertificateRule(NamedTuple):
    """Which certificates are a broker's.

    One that names brokers of this cluster (``sava://CLUSTER/broker/...``) is that of the node id, or of the
    host, that it names. One that names none is no broker's, unless all that its authority signs are brokers'
    (``auth.tls.broker_ca_file``): then it is the broker's on the host that it names."""

    cluster_name: str
    is_any_of_authority: bool = False

    def check(self, der: bytes | None, node: NodeId, address: str) -> None:
        """Raises NotAuthenticated unless the certificate is that of ``node``, which listens at ``address``;
        of any broker, if ``node`` is 0."""
        if der is None:
            raise NotAuthenticated("it shows no certificate; the Raft port takes brokers' certificates alone")
        try:
            certificate = read_certificate(der)
        except CertificateUnreadable as error:
            raise NotAuthenticated(str(error)) from error
        names = brokers_of(certificate, self.cluster_name)
        if not names and self.is_any_of_authority:
            names = certificate.hosts
        if not names:
            raise NotAuthenticated(
                f"its certificate ({_subject(certificate)}) is no broker's of cluster {self.cluster_name}: "
                f"it has no URI:sava://{self.cluster_name}/broker/NODE among its alternative names"
            )
        host = host_of(address)
        if node != NO_NODE and not any(_is_of(name, node, host) for name in names):
            raise NotAuthenticated(
                f"its certificate is that of broker {', '.join(names)[:200]}, and not of node {node} at "
                f"{host or 'an unknown host'}"
            )


def _subject(certificate: Certificate) -> str:
    return f"CN={certificate.common_name}" if certificate.common_name else f"serial {certificate.serial:x}"


def _is_of(name: str, node: NodeId, host: str) -> bool:
    if name.isdecimal():
        return name == str(node)
    return bool(host) and _same_form(name) == host


def host_of(address: str) -> str:
    """Of ``host:port``, in one form."""
    return _same_form(address.rpartition(":")[0].removeprefix("[").removesuffix("]"))


def _same_form(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")


@dataclass(slots=True)
class BrokerCredentials:
    """What this process shows on Raft ports, and by what it knows others."""

    secret: ClusterSecret
    is_given: bool = False
    """The secret is in a file that the operator has given: it is neither made here nor handed over."""
    rule: CertificateRule | None = None
    """None: connections are plain."""
    inbound: Inbound | None = None
    """The node of this process; None: it is a command."""

    @property
    def own(self) -> NodeInfo:
        return self.inbound.info() if self.inbound is not None else NodeInfo(NO_NODE, "", "", (), "")

    def address_of(self, node: NodeId) -> str:
        """By the membership; empty: not a member, as far as is known."""
        return (self.inbound.member_address(node) if self.inbound is not None else None) or ""


def tag_of(cluster: str) -> bytes:
    return sha256(f"sava cluster {cluster}".encode()).digest()[:_TAG_BYTES] if cluster else b""


def _said(hello: Hello, challenge: Challenge, content: object) -> bytes:
    """What a proof covers."""
    return _encoder.encode(
        (
            int(hello.purpose),
            (hello.node, challenge.node),
            (hello.nonce, challenge.nonce),
            (hello.tag, challenge.tag),
            hello.address,
            content,
        )
    )


# -- the end that dials ----------------------------------------------------------------------------


class DialerHandshake:
    """One handshake of the end that has connected. Raises what ended it."""

    def __init__(
        self,
        credentials: BrokerCredentials,
        purpose: Purpose,
        address: str,
        *,
        node: NodeId = NO_NODE,
        bootstrap: Bootstrap | None = None,
    ) -> None:
        """``node`` is the broker that is meant, at ``address``; 0: whichever answers there."""
        own = credentials.own
        self._credentials = credentials
        self._address = address
        self._node = node
        self._bootstrap = bootstrap
        self.hello = Hello(
            purpose, own.node, secrets.token_bytes(NONCE_BYTES), tag_of(own.cluster), own.address
        )
        self._challenge: Challenge | None = None
        self.has_sent_order = False
        """The other end may have done what it was asked."""

    def begin(self) -> bytes:
        return _encoder.encode(self.hello)

    def received(self, payload: bytes, certificate: bytes | None) -> bytes | Answer:
        """What is to be sent next, or the answer that ends the handshake. Raises BadHandshake,
        NotAuthenticated, and the error that the other end refused with."""
        said = _decode(_from_listener, payload)
        if isinstance(said, HandshakeRefused):
            raise error_from(said.code, said.message[:MAX_TEXT], said.detail)
        if isinstance(said, Challenge) != (self._challenge is None):
            raise BadHandshake("an answer to another question")
        if isinstance(said, Challenge):
            return self._prove(said, certificate)
        assert self._challenge is not None
        self._check(said, self._challenge)
        return said

    def _prove(self, challenge: Challenge, certificate: bytes | None) -> bytes:
        if len(challenge.nonce) != NONCE_BYTES or len(challenge.tag) not in (0, _TAG_BYTES):
            raise BadHandshake("a challenge of the wrong size")
        if challenge.node <= 0:
            raise BadHandshake("a challenge of no node")
        if self._node and challenge.node != self._node:
            raise NotAuthenticated(f"node {challenge.node} answers there, and not node {self._node}")
        credentials = self._credentials
        if credentials.rule is not None:
            credentials.rule.check(certificate, challenge.node, self._address)
        self._challenge = challenge
        order, secret = None, credentials.secret
        if self._bootstrap is not None:
            order = _encoder.encode(Order(self._bootstrap, self._handed_over(challenge)))
            self.has_sent_order = True
        mac = b""
        if challenge.knows_secret and secret.is_known:
            mac = secret.mac(_DIALER, _said(self.hello, challenge, order))
        return _encoder.encode(Proof(mac, order))

    def _handed_over(self, challenge: Challenge) -> str:
        """The secret that goes with an order to belong to a cluster."""
        secret = self._credentials.secret
        if challenge.knows_secret or not secret.is_known:
            return ""
        if self._credentials.is_given:
            raise NotAuthenticated(
                f"node {challenge.node} at {self._address} does not know the cluster's secret; give it the "
                "same auth.cluster_secret_file, and start it again"
            )
        return secret.shown()

    def _check(self, answer: Answer, challenge: Challenge) -> None:
        """Raises unless the answer is of the kind that was asked for, and proved."""
        secret = self._credentials.secret
        match self.hello.purpose, answer:
            case (Purpose.RAFT | Purpose.LEDGERS, Welcome(mac=mac)):
                content: object = None
            case Purpose.IDENTIFY, Introduction(described=described, mac=mac):
                content = described
                if not mac and answer.info.node == challenge.node:
                    return  # what it says of itself, for what it is worth
            case Purpose.BIND, Bound(secret=made, mac=mac):
                content = made
                if made and not secret.is_known:
                    secret.store(made)
            case _:
                raise BadHandshake("an answer to another question")
        if not secret.verify(_LISTENER, _said(self.hello, challenge, content), mac):
            raise NotAuthenticated(
                f"node {challenge.node} at {self._address} does not prove that it knows the cluster's secret"
            )


# -- the end that listens --------------------------------------------------------------------------


class ListenerHandshake:
    """One handshake of the end that was connected to."""

    def __init__(self, credentials: BrokerCredentials) -> None:
        self._credentials = credentials
        self._hello: Hello | None = None
        self._challenge: Challenge | None = None
        self._proof: Proof | None = None
        self._order: Order | None = None
        self.proved_by = b""
        """The digest of the secret that the dialer has proved to know; empty: none."""

    @property
    def is_proved(self) -> bool:
        return bool(self.proved_by)

    @property
    def purpose(self) -> Purpose:
        assert self._hello is not None
        return self._hello.purpose

    @property
    def node(self) -> NodeId:
        """The dialer, as it says; to be believed once it is proved."""
        return self._hello.node if self._hello is not None else NO_NODE

    @property
    def order(self) -> Order:
        assert self._order is not None
        return self._order

    @property
    def is_over(self) -> bool:
        """The dialer has said all; it waits for an answer."""
        return self._proof is not None

    def received(self, payload: bytes, certificate: bytes | None) -> bytes | None:
        """What is to be sent next, if anything. Raises BadHandshake, NotAuthenticated, IdentityConflict."""
        said = decode_dialer(payload)
        if isinstance(said, Hello):
            return self._challenged(said, certificate)
        self._take(said)
        return None

    def _challenged(self, hello: Hello, certificate: bytes | None) -> bytes:
        credentials, own = self._credentials, self._credentials.own
        if self._hello is not None:
            raise BadHandshake("a second beginning")
        if len(hello.nonce) != NONCE_BYTES or len(hello.tag) not in (0, _TAG_BYTES):
            raise BadHandshake("a beginning of the wrong size")
        if hello.node < 0 or len(hello.address) > MAX_TEXT:
            raise BadHandshake("a beginning of no node")
        if hello.node == NO_NODE and hello.purpose is not Purpose.IDENTIFY:
            raise NotAuthenticated("only a broker may do that")
        if credentials.rule is not None:
            known = credentials.address_of(hello.node) if hello.node else ""
            credentials.rule.check(certificate, hello.node, known or hello.address)
        self._hello = hello
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._challenge = Challenge(own.node, nonce, tag_of(own.cluster), credentials.secret.is_known)
        return _encoder.encode(self._challenge)

    def _take(self, proof: Proof) -> None:
        hello, challenge = self._hello, self._challenge
        if hello is None or challenge is None or self._proof is not None:
            raise BadHandshake("a proof out of turn")
        if (proof.order is not None) != (hello.purpose is Purpose.BIND):
            raise BadHandshake("an order out of place")
        self._proof = proof
        self._order = _decode(_orders, proof.order) if proof.order is not None else None
        said = _said(hello, challenge, proof.order)
        self.proved_by = self._credentials.secret.proved_by(_DIALER, said, proof.mac)
        if hello.purpose is Purpose.IDENTIFY:
            return  # strangers get an answer as well
        if hello.purpose is Purpose.BIND and not challenge.knows_secret:
            return  # trust on first use
        if not self.is_proved:
            if hello.purpose is Purpose.BIND:
                raise NotAuthenticated(
                    f"node {challenge.node} knows a secret already, and node {hello.node} does not prove "
                    "that it knows the same; repeat the command on the broker where it was begun, or give "
                    "both the same auth.cluster_secret_file, or remove cluster_secret from the data "
                    "directory of a broker that belongs to no cluster"
                )
            raise NotAuthenticated(
                f"node {hello.node} does not prove that it knows the cluster's secret; every broker of a "
                "cluster has the same in meta_store.data_dir/cluster_secret, or auth.cluster_secret_file"
            )
        if hello.purpose is not Purpose.BIND:
            self._check_cluster(hello, challenge)

    def _check_cluster(self, hello: Hello, challenge: Challenge) -> None:
        is_bound = bool(hello.tag and challenge.tag)
        if hello.tag != challenge.tag and (is_bound or hello.purpose is Purpose.LEDGERS):
            whose = "another cluster" if hello.tag else "none"
            raise IdentityConflict(
                f"this node belongs to cluster {self._credentials.own.cluster or '(none)'}, and node "
                f"{hello.node} to {whose}"
            )

    # -- the last word -------------------------------------------------------------------------

    def welcome(self) -> bytes:
        return _encoder.encode(Welcome(self._mac(None)))

    def introduction(self) -> bytes:
        own = self._credentials.own
        if self.is_proved or not own.cluster:
            described = _encoder.encode(own)
            return _encoder.encode(Introduction(described, self._mac(described)))
        return _encoder.encode(Introduction(_encoder.encode(own.for_stranger(self.node))))

    def bound(self, made: str) -> bytes:
        """``made``: the secret that the dialer has asked for."""
        return _encoder.encode(Bound(made, self._mac(made)))

    def _mac(self, content: object) -> bytes:
        assert self._hello is not None
        assert self._challenge is not None
        secret = self._credentials.secret
        if not (self.is_proved or self.purpose is Purpose.BIND) or not secret.is_known:
            return b""
        return secret.mac(_LISTENER, _said(self._hello, self._challenge, content))
