"""Who this node is, and whether the data directory agrees.

    <data>/node_id        decimal text, a random id drawn once
    <data>/raft/          the log; its header names its owner, ``node-<id>``
    <data>/snapshots/     snapshot files

A vote binds a node id without limit of time. A node that comes back under its old id without its log has
forgotten its votes and its entries, and could elect a second leader in a term or help to overwrite what was
committed; two processes on copies of one directory could do so even without a crash. Hence id and log must be
found together or not at all, and nothing is guessed:

    node_id   log of       start
    missing   no node      a new node
    X         X            as X
    X         no node      refused: the disk was lost, or node_id was copied
    missing   any node     refused: node_id was lost
    X         Y            refused (ForeignLog): directories were mixed

The first start writes the id as ``node_id.new``, creates the log in its name, and then renames the file. A
crash in between leaves ``node_id.new``, from which the next start continues; no other node has seen the id
before the rename.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from sava.metadata.durable import LogState, Replay
from sava.metadata.errors import IdentityConflict
from sava.metadata.snapshots import SnapshotStore
from sava.raft.types import NO_NODE, NodeId
from sava.wal.disk import Disk
from sava.wal.errors import FileMissing
from sava.wal.log import Log, LogOptions

NODE_ID = "node_id"
_PENDING = "node_id.new"
_LOG = "raft"
_SNAPSHOTS = "snapshots"
_MAX_ID = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class NodeState:
    """All that a node found in its data directory; what ``Replica`` needs of it."""

    node: NodeId
    incarnation: int
    disk: Disk
    """The data directory, locked."""
    log: Log
    recovered: LogState
    snapshots: SnapshotStore

    def release(self) -> None:
        """Give the directory up (the log is closed by its writer)."""
        self.snapshots.close()
        self.disk.unlock()


def open_state(
    disk: Disk, *, rng: Random, options: LogOptions | None = None, node: NodeId = NO_NODE
) -> NodeState:
    """Lock the data directory, settle the identity, recover the log, check the snapshot that it continues.

    ``rng`` draws the ids of a new node: ``random.SystemRandom`` in production. ``node``, if any, is the id
    that the node must have: its certificate names it. Raises IdentityConflict,
    ForeignLog, LogCorrupt, SnapshotMissing, DirectoryLocked; each names the file and the way out."""
    disk.lock()
    try:
        return _open_locked(disk, rng, options or LogOptions(), node)
    except BaseException:
        disk.unlock()
        raise


def _open_locked(disk: Disk, rng: Random, options: LogOptions, wanted: NodeId) -> NodeState:
    node = settle_identity(disk, lambda: wanted or NodeId(rng.randint(1, _MAX_ID)))
    if wanted and node != wanted:
        raise IdentityConflict(
            f"{disk.path} is that of node {node}, and the certificate of this broker names node {wanted}: "
            f"give node {node} a certificate with URI:sava://CLUSTER/broker/{node}, or start node {wanted} "
            "in its own data directory"
        )
    log_disk = disk.directory(_LOG)
    replay = Replay(log_disk.path)
    log = Log.open(
        log_disk,
        owner=f"node-{node}",
        new_storage_id=lambda: f"{rng.getrandbits(128):032x}",
        options=options,
        replay=replay,
    )
    try:
        confirm_identity(disk)
        recovered = replay.result()
        snapshots = SnapshotStore(disk.directory(_SNAPSHOTS))
        if recovered.core is not None:
            if recovered.core.snapshot.index > 0:
                snapshots.require(recovered.core.snapshot)
            snapshots.prune_newer(recovered.core.snapshot)
    except BaseException:
        log.close()
        raise
    return NodeState(node, log.identity.incarnation, disk, log, recovered, snapshots)


def settle_identity(disk: Disk, draw: Callable[[], NodeId]) -> NodeId:
    """The node's id by the table above; a new one stays pending until ``confirm_identity``."""
    names = disk.list()
    has_log = bool(disk.directory(_LOG).list())
    if NODE_ID in names:
        if not has_log:
            raise IdentityConflict(
                f"{disk.path}/{NODE_ID} exists, but {disk.path}/{_LOG} holds no log: the disk was lost or "
                "the file was copied. A node must not come back under its id without its log; "
                f"remove {NODE_ID} to start as a new node"
            )
        return _read_id(disk, NODE_ID)
    if has_log:
        return _resume_first_start(disk, names)
    if _PENDING in names:
        disk.remove(_PENDING)  # a first start that got no further: no node has seen this id
    node = draw()
    file = disk.open(_PENDING, create=True)
    try:
        file.write(0, [b"%d\n" % node])
        file.sync()
    finally:
        file.close()
    disk.sync_dir()
    return node


def _resume_first_start(disk: Disk, names: list[str]) -> NodeId:
    if _PENDING not in names:
        raise IdentityConflict(
            f"{disk.path}/{_LOG} holds a log, but {disk.path}/{NODE_ID} is missing. Restore it from a copy "
            f"(the log's header names its owner, 'node-<id>'), or move {disk.path} away to start as a new "
            "node"
        )
    return _read_id(disk, _PENDING)


def confirm_identity(disk: Disk) -> None:
    """The log exists under the pending id: from here on, both or neither."""
    if NODE_ID not in disk.list():
        disk.rename(_PENDING, NODE_ID)
        disk.sync_dir()


def _read_id(disk: Disk, name: str) -> NodeId:
    try:
        file = disk.open(name)
    except FileMissing as error:
        raise IdentityConflict(f"{disk.path}/{name} vanished while it was read") from error
    try:
        text = file.read(0, 64).strip()
    finally:
        file.close()
    if not text.isdigit() or not 1 <= int(text) <= _MAX_ID:
        raise IdentityConflict(
            f"{disk.path}/{name} does not hold a node id (a number from 1 to {_MAX_ID}). Restore it from a "
            f"copy, or move {disk.path} away to start as a new node"
        )
    return NodeId(int(text))


def cluster_id_of(founders: Iterable[NodeId]) -> str:
    """The id of the cluster that these nodes found: the same for all who run ``init`` with the same nodes,
    in any order, so that repeating it, even twice at the same time, cannot make two clusters."""
    text = ",".join(str(node) for node in sorted(founders))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
