"""What a replica needs at its start, and what it reports about itself."""

from __future__ import annotations

from dataclasses import dataclass

from sava.metadata.machine.limits import DEFAULT_LIMITS, Limits
from sava.raft.output import Status
from sava.raft.types import CoreConfig, NodeId

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
