"""Both ends of the Raft port, as tests of parts of a broker need them: with a secret that all know."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, cast

from sava.metadata.peer import Inbound, NodeInfo
from sava.peer_connection import Dialer
from sava.raft.types import NO_NODE, NodeId
from sava.security.cluster_secret import ClusterSecret
from sava.security.handshake import BrokerCredentials, CertificateRule


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="sava-secrets-")


def known_secret(name: str = "shared") -> ClusterSecret:
    """The same for all who give the same name."""
    secret = ClusterSecret(Path(_directory().name) / name)
    secret.create()
    return secret


def no_secret(name: str) -> ClusterSecret:
    """Nothing is known yet; what is handed over is kept under this name."""
    return ClusterSecret(Path(_directory().name) / name)


class Named:
    """What the handshake asks of a node."""

    def __init__(self, node: int, cluster: str = "c", address: str = "127.0.0.1:1") -> None:
        self.node = NodeId(node)
        self.cluster = cluster
        self.address = address
        self.addresses: dict[int, str] = {}

    def info(self) -> NodeInfo:
        return NodeInfo(self.node, self.cluster, self.address, (self.node,), "0")

    def member_address(self, node: NodeId) -> str | None:
        return self.addresses.get(node)


def credentials(
    inbound: Any = None, *, secret: ClusterSecret | None = None, rule: CertificateRule | None = None
) -> BrokerCredentials:
    return BrokerCredentials(secret or known_secret(), rule=rule, inbound=cast(Inbound | None, inbound))


def dialer(node: int = 1, cluster: str = "c", *, secret: ClusterSecret | None = None) -> Dialer:
    """Of a node, or (0) of a command."""
    return Dialer(credentials(Named(node, cluster) if node != NO_NODE else None, secret=secret))
