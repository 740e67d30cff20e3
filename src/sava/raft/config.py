"""Tunables of the core, each with the reason for its default. Time is counted in ticks; the driver decides
how long one is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    election_ticks: int = 10
    """T: a follower campaigns after T..2T-1 silent ticks, drawn again each time. Ten heartbeats may be lost
    before that."""
    heartbeat_ticks: int = 1
    max_append_bytes: int = 1 << 20
    """One message is large enough to amortise its cost and small enough not to delay a heartbeat. At least
    one entry goes."""
    max_inflight: int = 64
    max_inflight_bytes: int = 8 << 20
    """Optimistic sends per follower, by count and by bytes: either alone lets the other grow without
    bound."""
    max_uncommitted_bytes: int = 32 << 20
    """Payload that the leader accepts beyond the commit index; more is refused with ``Busy``. Empty entries
    never are."""
    max_apply_bytes: int = 4 << 20
    """Committed entries handed out by one ``poll``, so that applying never starves the network."""
    max_pending_reads: int = 4096
    keep_entries: int = 2000
    """Entries kept below a snapshot, so that a follower that was away for a moment needs no snapshot."""
    snapshot_chunk_bytes: int = 256 << 10
    snapshot_timeout_ticks: int = 50
    """A transfer without progress for this long goes back to probing."""
    promote_max_lag: int = 100
    """A learner may be promoted when it misses at most this many entries at two consecutive checks."""

    def __post_init__(self) -> None:
        if self.heartbeat_ticks < 1 or self.election_ticks <= self.heartbeat_ticks:
            raise ValueError(
                "election_ticks must exceed heartbeat_ticks, and heartbeat_ticks must be at least 1"
            )
        for name in (
            "max_append_bytes",
            "max_inflight",
            "max_inflight_bytes",
            "max_uncommitted_bytes",
            "max_apply_bytes",
            "max_pending_reads",
            "snapshot_chunk_bytes",
            "snapshot_timeout_ticks",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.keep_entries < 0 or self.promote_max_lag < 0:
            raise ValueError("keep_entries and promote_max_lag must not be negative")
