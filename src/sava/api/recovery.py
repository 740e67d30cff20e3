"""Recovery from a lost majority: ``force-new-cluster`` with the one check that needs a network.

A member that still answers means that the majority may be back in a moment, and then forcing would make two
clusters out of one. So every other member is asked first, and a single answer is enough to refuse.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from random import SystemRandom

from sava.config import Auth
from sava.errors import CallerError, SavaError
from sava.metadata.bootstrap import ForceReport, force_new_cluster
from sava.metadata.errors import NotAuthenticated, NotInitialized
from sava.metadata.identity import NODE_ID, open_state
from sava.peer_connection import Dialer
from sava.peers import tls
from sava.raft.messages import decode_membership
from sava.raft.output import Recovered
from sava.raft.types import EntryKind, Membership, NodeId
from sava.security.cluster_secret import FILE, ClusterSecret
from sava.security.handshake import BrokerCredentials
from sava.wal.disk import LocalDisk

ANSWER_TIMEOUT_S = 1.0


class MemberAliveError(CallerError):
    """Another member answers: the cluster is not lost."""


async def recover(
    data_dir: Path, address: str, auth: Auth, confirm: Callable[[ForceReport], bool]
) -> ForceReport:
    """Make the stopped node in ``data_dir`` a cluster of its own. ``address`` empty: the one it had."""
    if not (data_dir / NODE_ID).is_file():
        raise NotInitialized(f"{data_dir} is not the data directory of a broker: it has no {NODE_ID}")
    node, membership = _read(data_dir)
    others = [(member, at) for member, at in membership.addresses if member != node]
    credentials = BrokerCredentials(ClusterSecret(data_dir / FILE))
    answers = await asyncio.gather(*(_answers(member, at, auth, credentials) for member, at in others))
    if alive := [
        f"{member} at {at}" for (member, at), answered in zip(others, answers, strict=True) if answered
    ]:
        raise MemberAliveError(
            f"node {', '.join(alive)} still answers; restore the majority, or stop and wipe it first"
        )
    own = address or membership.address(node)
    if own is None:
        raise CallerError(f"the address of node {node} is not known; give it with --addr")
    return force_new_cluster(LocalDisk(data_dir), address=own, rng=SystemRandom(), confirm=confirm)


def _read(data_dir: Path) -> tuple[NodeId, Membership]:
    state = open_state(LocalDisk(data_dir), rng=SystemRandom())
    try:
        if state.recovered.core is None:
            raise NotInitialized(
                f"{data_dir} belongs to no cluster: start the node and run `sava cluster init`"
            )
        return state.node, _newest_membership(state.recovered.core)
    finally:
        state.log.close()
        state.release()


def _newest_membership(recovered: Recovered) -> Membership:
    changes = (entry for entry in reversed(recovered.entries) if entry.kind is EntryKind.MEMBERSHIP)
    newest = next(changes, None)
    return decode_membership(newest.data) if newest is not None else recovered.snapshot.membership


async def _answers(node: NodeId, address: str, auth: Auth, credentials: BrokerCredentials) -> bool:
    try:
        info = await Dialer(credentials, tls.client_contexts(auth)).identify(
            address, timeout=ANSWER_TIMEOUT_S
        )
    except NotAuthenticated:
        return True  # it is there, and does not tell
    except SavaError as error:
        # Whatever ends a connection that stood is a process that runs.
        return isinstance(error.__cause__, (ssl.SSLError, ConnectionResetError))
    return info.node == node
