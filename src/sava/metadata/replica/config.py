"""What a replica needs at its start, and what it reports about itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sava.metadata.durable import LogState
from sava.metadata.machine.limits import DEFAULT_LIMITS, Limits
from sava.metadata.machine.state_machine import FrozenState
from sava.metadata.snapshots import SnapshotStore
from sava.raft.output import Status
from sava.raft.types import CoreConfig, NodeId, SnapshotMeta
from sava.wal.log import Buffers, Log

_CORE = CoreConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    core: CoreConfig = _CORE
    limits: Limits = DEFAULT_LIMITS
    tick_ms: int = 100
    """Length of one core tick; heartbeats every tick, elections after 10..20 of them with the core's
    defaults."""
    snapshot_entries: int = 10_000
    snapshot_bytes: int = 64 << 20
    """Take a snapshot after this many applied entries or bytes since the last one."""
    max_pending: int = 8192
    """Requests of local callers and of peers that may wait here; more are refused with ``unavailable``."""
    session_idle_ms: int = 3_600_000


@dataclass(frozen=True, slots=True)
class Process:
    """One run of a node, as its messages name it."""

    node: NodeId
    address: str
    incarnation: int
    nonce: int
    """Distinguishes two processes that run on copies of one data directory."""


Done = Callable[[BaseException | None], None]


class LogWriter(Protocol):
    """``sava.wal.writer.Writer``, or its twin in the simulator, which is why this is a Protocol: virtual time
    has no threads. ``done`` is called on the replica's own thread."""

    def append(self, records: Sequence[tuple[int, Buffers]], done: Done) -> None: ...

    def run(self, action: Callable[[Log], None], done: Done) -> None: ...


OnSaved = Callable[[SnapshotMeta | BaseException], None]

Save = Callable[[SnapshotMeta, FrozenState, OnSaved], None]
"""Writes an image of the state to disk in the background. The meta has index, term and membership; size and
digest are filled in. The callback gets the meta once the file is durable under its final name, or what went
wrong; it is called on the replica's own thread."""


@dataclass(frozen=True, slots=True)
class ReplicaDisk:
    """What a replica has of its data directory."""

    recovered: LogState
    """What ``durable.Replay`` found."""
    writer: LogWriter
    snapshots: SnapshotStore
    save: Save


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    node: NodeId
    cluster: str
    """Empty while waiting for initialization."""
    core: Status | None
    revision: int
    keys: int
    total_bytes: int
    limit_bytes: int
    snapshot_index: int
    removed: bool
    """This node was a member and is no longer."""
    dropped: dict[str, int]
    """Messages not let through, by reason."""
