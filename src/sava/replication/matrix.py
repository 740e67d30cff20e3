"""Matrix: what replication does with a topic, by what there is of it here and at the remote.

First the two are put in relation (``relate``), then a table says what is done about each relation
(``RULES``), once for each mismatch policy. The policies differ where PIP-370 calls its own text disputed: by
``pip370`` a partition is copied into the one of the same number if there is one; by ``strict``, as Pulsar
does it since 4.2, nothing is copied unless both have the same partitions. Neither ever changes the number of
partitions of a topic that is there, except after the topic was grown here: that grows it there too,
as it always did.

Whether replication may create topics is asked in one case only: there is none. Creating is not the end of it:
another may have been faster, with another number of partitions. So what is there after creating is put
in relation again, and nothing is copied before the two agree.

Pure, and without anything else of Sava in it: the runner that copies decides by the same table as the
leader that checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Final


class Mismatch(StrEnum):
    PIP370 = "pip370"
    STRICT = "strict"


class LinkState(StrEnum):
    """Of one partition and one remote."""

    STARTING = "starting"
    ACTIVE = "active"
    IDLE = "idle"
    """All is copied, and nothing comes."""
    PAUSED = "paused"
    WAITING_RUNNER = "waiting_runner"
    """No runner has reported of it for a while."""
    WAITING_REMOTE_TOPIC = "waiting_remote_topic"
    PARTITION_MISMATCH = "partition_mismatch"
    REMOTE_DELETED = "remote_deleted"
    SCHEMA_REFUSED = "schema_refused"
    DENIED = "denied"
    UNREACHABLE = "unreachable"
    """The remote."""
    SOURCE_UNREACHABLE = "source_unreachable"
    """The partition here: it is not the remote that is lost."""
    DATA_LOSS = "data_loss"
    FAILED = "failed"


CONNECTED: Final = frozenset((LinkState.ACTIVE, LinkState.IDLE))
"""In these messages are copied as they come; in all others they wait, and an operator may have to act."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    topic: str
    partitions: int
    """0: a plain topic, which is copied as partition 0."""
    reliable: bool = True

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(range(max(1, self.partitions)))


@dataclass(frozen=True, slots=True, kw_only=True)
class There:
    """By the remote's own word."""

    remote: str
    namespace_exists: bool = True
    exists: bool = True
    partitions: int = 0
    reliable: bool = True
    missing: tuple[int, ...] = ()
    """Numbers below the count that have no partition."""
    topic_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownThere:
    """What was remembered of the topic there."""

    topic_ids: tuple[int, ...] = ()
    """When it was last seen."""
    is_tombstone: bool = False
    is_grown: bool = False
    """Partitions were added here while it was replicated, and they were not seen there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    may_create: bool
    mismatch: Mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    create: int | None = None
    """Create the topic there with this number of partitions (0: a plain one), then put them in relation
    again."""
    grow: int = 0
    """As ``create``, of a topic that is there and has fewer."""
    copied: tuple[int, ...]
    """Partitions to copy, each into the one of the same number."""
    disconnected: int
    """Partitions that are not copied."""
    state: LinkState
    """Of those; ``starting`` if there are none."""
    reason: str = ""
    """Why, and what to do about it; empty: all are copied."""


class TopicRelation(Enum):
    DELETED = "seen there before, and now it is gone, or another one"
    NO_NAMESPACE = "the namespace is not there"
    ABSENT = "not there, and may be created"
    AWAITED = "not there, and may not be created"
    OTHER_KIND = "one is reliable, the other is not"
    SAME = "both plain, or the same partitions"
    GROWN = "there are fewer there, because some were added here"
    FEWER = "there are fewer there"
    MORE = "there are more there"
    HOLES = "some partitions there are missing"
    PLAIN_THERE = "partitioned here, plain there"
    PLAIN_HERE = "plain here, partitioned there"


class Do(Enum):
    COPY_ALL = 0
    COPY_COMMON = 1
    """Those that both have; the others are held."""
    HOLD = 2
    CREATE = 3
    GROW = 4


RULES: Final[Mapping[TopicRelation, Mapping[Mismatch, Do]]] = MappingProxyType(
    {
        relation: MappingProxyType({Mismatch.PIP370: pip370, Mismatch.STRICT: strict})
        for relation, pip370, strict in (
            (TopicRelation.DELETED, Do.HOLD, Do.HOLD),
            (TopicRelation.NO_NAMESPACE, Do.HOLD, Do.HOLD),
            (TopicRelation.ABSENT, Do.CREATE, Do.CREATE),
            (TopicRelation.AWAITED, Do.HOLD, Do.HOLD),
            (TopicRelation.OTHER_KIND, Do.HOLD, Do.HOLD),
            (TopicRelation.SAME, Do.COPY_ALL, Do.COPY_ALL),
            (TopicRelation.GROWN, Do.GROW, Do.GROW),
            (TopicRelation.FEWER, Do.COPY_COMMON, Do.HOLD),
            (TopicRelation.MORE, Do.COPY_ALL, Do.HOLD),
            (TopicRelation.HOLES, Do.COPY_COMMON, Do.HOLD),
            (TopicRelation.PLAIN_THERE, Do.HOLD, Do.HOLD),
            (TopicRelation.PLAIN_HERE, Do.HOLD, Do.HOLD),
        )
    }
)
"""What is done, by PIP-370 and strictly."""

_STATES: Final = {
    TopicRelation.DELETED: LinkState.REMOTE_DELETED,
    TopicRelation.NO_NAMESPACE: LinkState.WAITING_REMOTE_TOPIC,
    TopicRelation.AWAITED: LinkState.WAITING_REMOTE_TOPIC,
}
"""Of partitions that are held; all other relations are mismatches."""


def decide(here: Here, there: There, settings: Settings, known: KnownThere = KnownThere()) -> Verdict:  # noqa: B008 (frozen)
    relation = relate(here, there, settings, known)
    done = RULES[relation][settings.mismatch]
    copied = _copied(done, here, there)
    held = tuple(number for number in here.numbers if number not in copied)
    return Verdict(
        create=here.partitions if done is Do.CREATE else None,
        grow=here.partitions if done is Do.GROW else 0,
        copied=copied,
        disconnected=len(held),
        state=_STATES.get(relation, LinkState.PARTITION_MISMATCH) if held else LinkState.STARTING,
        reason=_reason(relation, here, there, settings, held) if held else "",
    )


def unanswered(here: Here, state: LinkState, reason: str) -> Verdict:
    """Of a remote that did not say what there is: it cannot be reached, or denies it. Nothing is known, so
    nothing is created and nothing copied."""
    return Verdict(copied=(), disconnected=len(here.numbers), state=state, reason=reason)


def relate(here: Here, there: There, settings: Settings, known: KnownThere) -> TopicRelation:
    if known.is_tombstone or was_deleted(known, there):
        return TopicRelation.DELETED
    if not there.exists:
        if not there.namespace_exists:
            return TopicRelation.NO_NAMESPACE
        return TopicRelation.ABSENT if settings.may_create else TopicRelation.AWAITED
    if here.reliable != there.reliable:
        return TopicRelation.OTHER_KIND
    if bool(here.partitions) != bool(there.partitions):
        return TopicRelation.PLAIN_HERE if there.partitions else TopicRelation.PLAIN_THERE
    if there.missing:
        return TopicRelation.HOLES
    if there.partitions < here.partitions:
        return TopicRelation.GROWN if known.is_grown else TopicRelation.FEWER
    return TopicRelation.MORE if there.partitions > here.partitions else TopicRelation.SAME


def was_deleted(known: KnownThere, there: There) -> bool:
    """A topic that was there has gone, or one of the same name has taken its place."""
    if not known.topic_ids:
        return False
    pairs = zip(known.topic_ids, there.topic_ids, strict=False)
    return not there.exists or any(before and now and before != now for before, now in pairs)


def _copied(done: Do, here: Here, there: There) -> tuple[int, ...]:
    if done is Do.HOLD:
        return ()
    if done is Do.COPY_COMMON:
        return tuple(
            number for number in here.numbers if number < there.partitions and number not in there.missing
        )
    return here.numbers


def _reason(
    relation: TopicRelation, here: Here, there: There, settings: Settings, held: tuple[int, ...]
) -> str:
    topic, remote = here.topic, there.remote
    create = f"sava topics create {topic}" + (f" --partitions {here.partitions}" if here.partitions else "")
    match relation:
        case TopicRelation.DELETED:
            return (
                f"topic {topic} was deleted at {remote} since it was last copied; it is neither created nor "
                f"copied there again until `sava replication recreate {topic} --remote {remote}`"
            )
        case TopicRelation.NO_NAMESPACE:
            namespace = topic.split("/")[1]
            return (
                f"namespace {namespace} does not exist at {remote}; create it there with "
                f"`sava namespaces create {namespace}`"
            )
        case TopicRelation.AWAITED:
            return (
                f"topic {topic} does not exist at {remote}, and replication may not create it "
                f"(replication.create_topic_to_remote_cluster); create it there with `{create}`"
            )
        case TopicRelation.OTHER_KIND:
            return (
                f"topic {topic} is {kind(here.reliable)} here and {kind(there.reliable)} at {remote}; "
                f"delete it there, or replicate another topic"
            )
        case TopicRelation.PLAIN_THERE | TopicRelation.PLAIN_HERE:
            return (
                f"topic {topic} has {spread(here.partitions)} here and {spread(there.partitions)} at "
                f"{remote}; one cannot become the other: delete it at {remote} and create it with `{create}`"
            )
    missing = f" and no partition {_numbers(there.missing)}" if there.missing else ""
    counts = f"topic {topic} has {spread(here.partitions)} here and {spread(there.partitions)}"
    counts += f"{missing} at {remote}"
    if settings.mismatch is Mismatch.STRICT:
        counts += ", and replication.partition_mismatch_policy is strict"
    else:
        counts += f"; partition {_numbers(held)} is not copied"
    grow = max(here.partitions, there.partitions)
    where = "here" if there.partitions > here.partitions else f"at {remote}"
    return f"{counts}; make them equal with `sava topics partitions {topic} --grow {grow}` {where}"


def spread(partitions: int) -> str:
    if not partitions:
        return "no partitions"
    return f"{partitions} partition{'' if partitions == 1 else 's'}"


def _numbers(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def kind(reliable: bool) -> str:
    return "reliable" if reliable else "not reliable"
