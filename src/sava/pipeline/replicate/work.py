"""What the driver asks of a task, and what it is told: values that travel between the two."""

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
        """A partition, as the target calls what is copied into it."""
        return pb.Source(
            cluster_name=self.source_name, cluster_id=self.source_id, topic=name, topic_id=topic_id
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """Copy one partition, from wherever its chain is up to ``end``."""

    name: str
    """The partition (or plain topic); it has the same name at the target."""
    topic_id: int
    """At the source."""
    target_topic_id: int
    """The one that was compared: another one of the same name is not written to."""
    subject: str
    """Of the schemas that the topic follows; empty: none."""
    begin: int | None
    """Where the chain begins if there is none yet. None: there must be one (it was seen before)."""
    end: int
    pieces: tuple[Piece, ...]
    """Where the messages are, from where the driver believes the chain to be, without a gap, up to
    ``end``."""
    store_url: str
    forward: bool
    """Copy what came from other clusters too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyShare:
    """What one task does: several errands, side by side."""

    ends: LinkEnds
    errands: tuple[Errand, ...]
    budget_s: float
    """After that no new stretch is begun; what is left is for another round."""
    is_light: bool = False
    """There is little to copy of each: they are copied together, as far as that goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOutcome:
    """What became of an errand. Everything before ``position`` is durable at the target."""

    name: str
    is_known: bool = False
    """Whether the chain has begun, as far as the target has said; False also if it said nothing."""
    position: int = 0
    kept_position: int = 0
    """The source may let go of what is below."""
    messages: int = 0
    bytes: int = 0
    duplicates: int = 0
    skipped: int = 0
    """Not to be copied: excluded, from other clusters without ``forward``, or been at the target."""
    code: str = ""
    """Sava's name of the error; empty: as far as the budget went, all is well. Also ``source_gone`` (messages
    that were not copied are not kept any more: ``reason`` says which), ``chain_missing`` (there is no chain
    where there must be one), ``target_replaced`` (another topic of the same name), ``source_unavailable`` and
    ``source_denied`` (``unavailable`` and ``denied`` are the target's)."""
    reason: str = ""
    may_pass: bool = False
    """The same may succeed later, without anybody doing something about it."""
