"""Options and positions of ``format("sava")``: what a user tells it, and how far a query has come.

Option names are those of Spark's Kafka source where the meaning is the same. Spark passes all options as
text, in any case. The parser refuses an unknown option and names the nearest one that exists: a misspelled
``maxMessagesPerTrigger`` that is ignored reads everything at once. Every error is one line that names the
option, the given value and the allowed values.

Spark keeps a position in its checkpoint as JSON, and the options take the same form:

    {"/default/orders": {"0": 1200, "1": 998}}

A topic has the name that users know and a partition its number, ``"0"`` for a plain topic. Spark compares
positions as text, hence sorted keys: equal positions must be equal texts, or an idle query runs empty batches
without end.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from typing import Any, Final, Literal, NamedTuple, TypeVar

from sava.client.errors import Refused
from sava.client.messages import microseconds
from sava.errors import CallerError
from sava.pipeline.cluster import ClusterAccess
from sava.schemas.bounds import Pattern
from sava.schemas.errors import SchemaInvalid

Positions = dict[str, dict[str, int]]
"""The stored form: topic, partition number, next offset. Ends are exclusive."""


class TopicPartition(NamedTuple):
    """A plain topic, or one partition of a partitioned topic."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic} partition {self.number}"


def partition_name(part: TopicPartition, *, partitioned: bool) -> str:
    """The name of the partition at the brokers."""
    return f"{part.topic}-part-{part.number}" if partitioned else part.topic


def to_positions(offsets: Mapping[TopicPartition, int]) -> Positions:
    positions: Positions = {}
    for part in sorted(offsets):
        positions.setdefault(part.topic, {})[str(part.number)] = offsets[part]
    # Sorted by text: "10" comes before "2", as in JSON with sorted keys.
    return {topic: dict(sorted(numbers.items())) for topic, numbers in positions.items()}


def to_offsets(positions: Mapping[str, Mapping[str, int]]) -> dict[TopicPartition, int]:
    """The inverse of ``to_positions``. Raises ValueError for any other form."""
    offsets: dict[TopicPartition, int] = {}
    for topic, numbers in positions.items():
        if not isinstance(numbers, Mapping):
            raise ValueError(f"{topic} has {numbers!r} where offsets by partition are expected")
        for number, offset in numbers.items():
            if not number.isdecimal() or type(offset) is not int:
                raise ValueError(
                    f"{topic} has {number!r}: {offset!r} where a partition's number and an offset belong"
                )
            offsets[TopicPartition(topic, int(number))] = offset
    return offsets


T = TypeVar("T")

DEFAULT_SERVICE: Final = "127.0.0.1:6650"
"""Used when neither the option nor ``SAVA_SERVICE`` in the driver's environment is set."""
EARLIEST: Final = -2
LATEST: Final = -1
"""Special offsets of a partition, as in Spark's Kafka source."""

_COMMON: Final = ("service", "token", "tokenFile", "tlsCa", "tlsCert", "tlsKey", "timeout", "topic")
_SOURCE: Final = (
    "topics",
    "topicPattern",
    "startingOffsets",
    "startingTimestamp",
    "maxMessagesPerTrigger",
    "maxBytesPerTrigger",
    "minPartitions",
    "failOnDataLoss",
    "subscription",
    "decode",
    "filterPushdown",
)
_BATCH_SOURCE: Final = ("endingOffsets", "endingTimestamp", "filterPushdown")
_STREAM_SOURCE: Final = ("maxMessagesPerTrigger", "maxBytesPerTrigger", "subscription")
_SINK: Final = ("writerId", "batchId", "delivery", "compression")
NAMES: Final = tuple(dict.fromkeys((*_COMMON, *_SOURCE, *_BATCH_SOURCE, *_SINK)))
"""All options, as users write them."""
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})
"""Options that Spark adds to a streaming write."""

_TOPIC: Final = re.compile(r"/[^/]+/[^/]+")
_TOPIC_FORM: Final = "written /namespace/topic, such as /default/orders"


_SECRET: Final = re.compile(r"tok|secret|passw|cred|key", re.IGNORECASE)
"""Misspelt names too: what is meant for ``token`` is a secret under any name. Files are none."""


class OptionError(CallerError):
    """An option does not exist, is misplaced or has an invalid value. A secret is not part of its text."""

    def __init__(self, name: str, value: str, allowed: str) -> None:
        shown = value if len(value) <= 80 else f"{value[:77]}..."
        is_file = name.lower() in ("tokenfile", "tlskey")
        said = f"option {name}" if _SECRET.search(name) and not is_file else f"option {name} is {shown!r}"
        super().__init__(f'format("sava"): {said}: {allowed}')
        self.name = name


Word = Literal["earliest", "latest"]
Position = Word | int | Mapping[TopicPartition, int]
"""A number is a position by time, in microseconds since 1970 UTC: the first message published at or after
it."""


@dataclass(frozen=True, slots=True)
class TopicChoice:
    """The topics of a query: a list of names, or a pattern."""

    names: tuple[str, ...] = ()
    pattern: str = ""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    access: ClusterAccess
    topics: TopicChoice
    start: Position
    end: Position
    max_messages: int | None
    max_bytes: int | None
    min_partitions: int
    """0 lets the planner choose by the amount of data."""
    fail_on_data_loss: bool
    subscription: str
    decode: bool
    filter_pushdown: bool

    @classmethod
    def parse(cls, options: Mapping[str, str], *, stream: bool | None) -> SourceOptions:
        """``stream`` is None while Spark asks for the schema only. Raises OptionError."""
        given = _Given(options)
        given.refuse_paths()
        for name in _SINK:
            given.refuse(name, "it is for writing")
        if stream is not None:
            for name in _BATCH_SOURCE if stream else _STREAM_SOURCE:
                given.refuse(name, "it is for batch reads only" if stream else "it is for streams only")
        return cls(
            access=_access(given),
            topics=_topics(given),
            start=_position(given, "starting", "latest" if stream else "earliest"),
            end=_position(given, "ending", "latest"),
            max_messages=given.number("maxMessagesPerTrigger"),
            max_bytes=given.number("maxBytesPerTrigger"),
            min_partitions=given.number("minPartitions") or 0,
            fail_on_data_loss=given.flag("failOnDataLoss", default=True),
            subscription=given.text("subscription"),
            decode=given.flag("decode", default=False),
            filter_pushdown=given.flag("filterPushdown", default=False),
        )


@dataclass(frozen=True, slots=True)
class SinkOptions:
    access: ClusterAccess
    topic: str
    """Empty if each row names its topic."""
    writer_id: str
    """Empty for the id of the query."""
    batch_id: int | None
    exactly_once: bool
    compression: Literal["none", "lz4", "zstd"]

    @classmethod
    def parse(cls, options: Mapping[str, str], *, stream: bool) -> SinkOptions:
        """Raises OptionError."""
        given = _Given(options)
        given.refuse_paths()
        for name in (*_SOURCE, *_BATCH_SOURCE):
            given.refuse(name, "it is for reading")
        if stream:
            given.refuse("batchId", "it is for batch writes only; a stream numbers its batches")
        if given.text("batchId") and not given.text("writerId"):
            raise OptionError(
                "batchId", given.text("batchId"), "it needs the option writerId, whose batches it counts"
            )
        return cls(
            access=_access(given),
            topic=given.topic("topic"),
            writer_id=given.text("writerId"),
            batch_id=given.number("batchId", least=0),
            exactly_once=given.choice("delivery", ("exactlyOnce", "atLeastOnce")) == "exactlyOnce",
            compression=given.choice("compression", ("none", "lz4", "zstd")),
        )


class _Given:
    """The options as Spark passes them; names are case-insensitive."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._values = {name.lower(): value.strip() for name, value in options.items()}
        # CREATE TABLE sets it. Spark does not pass the options of such a table to a reader.
        self.refuse("provider", "use CREATE TEMPORARY VIEW … USING sava, whose options Spark hands over")
        known = {name.lower(): name for name in NAMES}
        for name in self._values.keys() - known.keys() - _SPARKS_OWN - {"path", "paths"}:
            near = get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"did you mean {known[near[0]]}?" if near else f"there are {', '.join(NAMES)}"
            value = "" if known.get(near[0] if near else "") == "token" else self._values[name]
            raise OptionError(name, value, f"there is no such option; {hint}")

    def text(self, name: str) -> str:
        return self._values.get(name.lower(), "")

    def has(self, name: str) -> bool:
        return name.lower() in self._values

    def refuse(self, name: str, why: str) -> None:
        if self.has(name):
            raise OptionError(name, self.text(name), why)

    def refuse_paths(self) -> None:
        for name in ("path", "paths"):
            self.refuse(name, "topics have no path; name one by the option topic")

    def number(self, name: str, *, least: int = 1) -> int | None:
        text = self.text(name)
        if not text and name.lower() not in self._values:
            return None
        if not text.isdecimal() or not least <= int(text) < 1 << 63:
            raise OptionError(name, text, f"a whole number from {least} on")
        return int(text)

    def flag(self, name: str, *, default: bool) -> bool:
        return bool(self.choice(name, ("true", "false") if default else ("false", "true")) == "true")

    def choice(self, name: str, values: tuple[Any, ...]) -> Any:
        """One of ``values``; the first is the default."""
        if name.lower() not in self._values:
            return values[0]
        text = self.text(name)
        for value in values:
            if text.lower() == value.lower():
                return value
        raise OptionError(name, text, f"{', '.join(values[:-1])} or {values[-1]}")

    def topic(self, name: str) -> str:
        text = self.text(name)
        if name.lower() in self._values and not _TOPIC.fullmatch(text):
            raise OptionError(name, text, _TOPIC_FORM)
        return text


def _access(given: _Given) -> ClusterAccess:
    timeout = given.text("timeout") or "60"
    try:
        timeout_s = float(timeout)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s <= 3600:
        raise OptionError("timeout", timeout, "seconds, more than 0 and at most 3600")
    for name, other in (("tlsCert", "tlsKey"), ("tlsKey", "tlsCert")):
        if given.text(name) and not given.text(other):
            raise OptionError(name, given.text(name), f"it needs the option {other} beside it")
    token, token_file = given.text("token"), given.text("tokenFile")
    if token and token_file:
        raise OptionError("tokenFile", token_file, "the option token is given as well; one of both")
    if not given.has("token") and not token_file:
        # As for commands. An empty option token means none, whatever the environment has.
        token_file = os.environ.get("SAVA_TOKEN_FILE", "")
        token = "" if token_file else os.environ.get("SAVA_TOKEN", "")
    return ClusterAccess(
        service=given.text("service") or os.environ.get("SAVA_SERVICE") or DEFAULT_SERVICE,
        token=token,
        token_file=token_file,
        ca=given.text("tlsCa"),
        cert=given.text("tlsCert"),
        key=given.text("tlsKey"),
        timeout_s=timeout_s,
    )


def _topics(given: _Given) -> TopicChoice:
    ways = ("topic", "topics", "topicPattern")
    used = [name for name in ways if given.text(name)]
    if len(used) != 1:
        shown = ", ".join(f"{name}={given.text(name)}" for name in used)
        raise OptionError(
            " and ".join(used) or "topic", shown, "exactly one of topic, topics and topicPattern is needed"
        )
    if used == ["topicPattern"]:
        pattern = given.text("topicPattern")
        try:
            Pattern(pattern)
        except SchemaInvalid as error:
            raise OptionError("topicPattern", pattern, f"a regular expression is needed: {error}") from None
        return TopicChoice(pattern=pattern)
    if used == ["topic"]:
        return TopicChoice((given.topic("topic"),))
    names = tuple(dict.fromkeys(name.strip() for name in given.text("topics").split(",")))
    if not all(map(_TOPIC.fullmatch, names)):
        raise OptionError("topics", given.text("topics"), f"names with commas between, each {_TOPIC_FORM}")
    return TopicChoice(names)


def _position(given: _Given, side: Literal["starting", "ending"], default: Word) -> Position:
    """The position by time if that option is set, otherwise by offsets."""
    if time := given.text(f"{side}Timestamp"):
        return _instant(f"{side}Timestamp", time)
    name = f"{side}Offsets"
    text = given.text(name) or default
    words: tuple[Word, ...] = ("earliest", "latest") if side == "starting" else ("latest",)
    for word in words:
        if text.lower() == word:
            return word
    example = '{"/default/orders": {"0": 23, "1": -2}}'
    allowed = f"{', '.join(words)} or offsets by topic and partition, such as {example}"
    if side == "starting":
        allowed += f" ({EARLIEST} is earliest, {LATEST} is latest)"
    try:
        offsets = to_offsets(json.loads(text))
    except (ValueError, AttributeError):
        raise OptionError(name, text, allowed) from None
    least = EARLIEST if side == "starting" else LATEST
    if any(offset < least for offset in offsets.values()):
        raise OptionError(name, text, allowed)
    return offsets


def _instant(name: str, text: str) -> int:
    if text.isdecimal():
        return int(text) * 1000
    try:
        return microseconds(datetime.fromisoformat(text))
    except Refused:
        raise OptionError(
            name, text, "a time with its zone is needed, such as 2030-01-31T12:00:00Z"
        ) from None
    except ValueError:
        raise OptionError(
            name, text, "milliseconds since 1970 UTC, or a time such as 2030-01-31T12:00:00Z"
        ) from None
