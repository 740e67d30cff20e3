"""Values between the driver and its tasks: errands there, outcomes back."""

from __future__ import annotations

from dataclasses import dataclass

from sava.pipeline.cluster import ClusterAccess
from sava.pipeline.source.planning import Piece
from sava.proto import replica_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnds:
    """The two clusters of a link."""

    source: ClusterAccess
    source_name: str
    source_id: str
    target: ClusterAccess
    target_name: str
    target_id: str

    def source_of(self, name: str, topic_id: int) -> pb.Source:
        """The source of a partition's copy, as the target identifies it."""
        return pb.Source(
            cluster_name=self.source_name, cluster_id=self.source_id, topic=name, topic_id=topic_id
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """A request to copy one partition from its source position at the target up to ``end``."""

    name: str
    """The partition or plain topic; it has the same name at the target."""
    topic_id: int
    """The topic's id at the source."""
    target_topic_id: int
    """The compared topic at the target: another topic of the same name gets nothing."""
    subject: str
    """The topic's schema subject, or empty."""
    begin: int | None
    """The start of a new copy. None if the target must have a source position (it was seen before)."""
    end: int
    pieces: tuple[Piece, ...]
    """The places of the messages without a gap, from the driver's view of the position up to ``end``."""
    store_url: str
    forward: bool
    """Whether to copy messages that came from other clusters, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyShare:
    """The errands of one task, which run concurrently."""

    ends: LinkEnds
    errands: tuple[Errand, ...]
    budget_s: float
    """After this time no new range starts; the rest is for another round."""
    is_light: bool = False
    """The errands are small and are copied together as far as possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOutcome:
    """The outcome of an errand. Everything before ``position`` is durable at the target."""

    name: str
    is_known: bool = False
    """Whether the target has reported a source position; False also without an answer."""
    position: int = 0
    kept_position: int = 0
    """The source may delete messages below it."""
    messages: int = 0
    bytes: int = 0
    duplicates: int = 0
    skipped: int = 0
    """Messages that were left out: excluded, from other clusters without ``forward``, or loops."""
    code: str = ""
    """Sava's error code; empty if all went well within the budget. Also ``source_gone`` (retention deleted
    messages that were not copied; ``reason`` names them), ``chain_missing`` (the target has no source
    position although it had one), ``target_replaced`` (another topic of the same name),
    ``source_unavailable`` and ``source_denied`` (``unavailable`` and ``denied`` are the target's)."""
    reason: str = ""
    may_pass: bool = False
    """A retry may succeed without action of a user."""
