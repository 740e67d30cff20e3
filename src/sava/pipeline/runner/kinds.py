"""Kinds: what a pipeline does. A runner knows some, by name, and takes pipelines of these only.

The runner's loop must never wait, so nothing here does: work is begun in a thread of its own, asked how far
it is, told to stop, and asked whether it has.

The kind ``custom``: a user's function from DataFrame to DataFrame, from topics to topics or to any sink of
Spark.

    from:       options of format("sava"): topic, topics or topicPattern, startingOffsets, …
    function:   module:function; without it rows go on as they are, to topics those columns that a message
                has from its writer
    to:         options of format("sava"): topic, … or format: with the options of that
    trigger:    how often a batch begins, such as "1 second"; by default as soon as there is something
    outputMode: append, update or complete
    checkpoint: directory; by default below that of the runner

What goes to topics goes there exactly once, in the name of the pipeline: the pipeline may stop, move to
another runner and be begun again at any moment.

Which kinds there are, for those who make pipelines: settings are checked before anything is stored.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from sava.client.errors import Unavailable
from sava.errors import CallerError
from sava.pipeline.options import OptionError, SinkOptions, SourceOptions
from sava.pipeline.runner.control import UNKNOWN_LAG

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class SettingsInvalid(CallerError):
    """Settings that a kind cannot work with, in one line."""


class JobProgress(NamedTuple):
    is_running: bool = False
    """False: it is still being prepared."""
    has_worked: bool = False
    """Since the job began a batch has ended well, or there was nothing to do."""
    rows: int = 0
    """Since the job began."""
    rate: float = 0.0
    batch: int = 0
    lag_messages: int = UNKNOWN_LAG
    lag_seconds: float = UNKNOWN_LAG
    has_backlog: bool = False
    """There is something to do, as far as is known."""
    pulse: Hashable = None
    """Something else whenever anything was done."""


class PipelineJob(Protocol):
    """A pipeline at work. Everything returns at once."""

    @property
    def progress(self) -> JobProgress: ...

    @property
    def end(self) -> JobEnd | None:
        """None: it has not ended, and may still write."""
        ...

    def stop(self, *, now: bool) -> None:
        """After the current batch, or in the midst of it. May be asked again, in either way."""
        ...


class JobEnd(NamedTuple):
    error: str = ""
    """Empty: it was stopped."""


class PipelineKind(Protocol):
    def start(self, name: str, settings: Mapping[str, Any]) -> PipelineJob:
        """``name`` is the pipeline's: what it writes exactly once, it writes in this name. Raises
        SettingsInvalid."""
        ...


COPIED: Final = ("key", "payload", "attributes", "publish_time", "schema_id", "schema_version")
"""What a copy of a message has of it. The rest is of its place: the copy gets another topic and offset, and
where its original came from, replication must not take for its own origin."""

SETTINGS: Final = ("from", "function", "to", "trigger", "outputMode", "checkpoint")
OUTPUT_MODES: Final = ("append", "update", "complete")
_FUNCTION: Final = re.compile(r"[\w.]+:\w+")
_TRIGGER: Final = re.compile(r"\d+(\.\d+)? ?(ms|milliseconds?|s|seconds?|m|minutes?|hours?)")
LAG_TIMEOUT_S: Final = 5.0
TOPICS: Final = "sava"


class FunctionInvalid(CallerError):
    """The user's function cannot be found, or does not do what it should."""


@dataclass(frozen=True, slots=True)
class CustomSettings:
    source: dict[str, str]
    function: str
    format: str
    sink: dict[str, str]
    trigger: str
    output_mode: str
    checkpoint: str

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> CustomSettings:
        """Raises SettingsInvalid."""
        if unknown := sorted(settings.keys() - set(SETTINGS)):
            raise SettingsInvalid(
                f"setting {unknown[0]}: there is no such one; there are {', '.join(SETTINGS)}"
            )
        sink = _options(settings, "to")
        form = sink.pop("format", TOPICS)
        parsed = cls(
            source=_options(settings, "from"),
            function=_text(settings, "function", _FUNCTION, "written module:function"),
            format=form,
            sink=sink,
            trigger=_text(settings, "trigger", _TRIGGER, 'a time such as "1 second" or "500 ms"'),
            output_mode=_text(
                settings, "outputMode", re.compile("|".join(OUTPUT_MODES)), ", ".join(OUTPUT_MODES)
            ),
            checkpoint=str(settings.get("checkpoint", "")),
        )
        try:
            SourceOptions.parse(parsed.source, stream=True)
            if form == TOPICS:
                SinkOptions.parse(sink, stream=True)
        except OptionError as error:
            raise SettingsInvalid(str(error)) from None
        return parsed


class Custom(PipelineKind):
    """``spark`` and ``service`` are asked for when something starts: the first is made late, and brokers come
    and go. ``access`` are options for certificates."""

    def __init__(
        self,
        spark: Callable[[], SparkSession],
        service: Callable[[], str],
        checkpoints: Path,
        *,
        access: Mapping[str, str] | None = None,
    ) -> None:
        self._spark = spark
        self._service = service
        self._checkpoints = checkpoints
        self._access = access or {}

    def start(self, name: str, settings: Mapping[str, Any]) -> PipelineJob:
        from sava.pipeline.runner.queries import QueryJob

        parsed = CustomSettings.parse(settings)
        service = self._service()
        if not service:
            raise Unavailable("it is not known yet where the brokers are")
        reach = {"service": service, **self._access}
        source = {**reach, **parsed.source}
        options = SourceOptions.parse({**source, "timeout": str(LAG_TIMEOUT_S)}, stream=True)

        def prepare(spark: SparkSession) -> DataStreamWriter:
            return self._prepare(spark, name, parsed, source, reach)

        return QueryJob(name, self._spark(), prepare, access=options.access, topics=options.topics)

    def _prepare(
        self,
        spark: SparkSession,
        name: str,
        settings: CustomSettings,
        source: Mapping[str, str],
        reach: Mapping[str, str],
    ) -> DataStreamWriter:
        rows = spark.readStream.format(TOPICS).options(**source).load()
        if settings.function:
            rows = applied(settings.function, rows)
        elif settings.format == TOPICS:
            rows = rows.select(*COPIED)
        writer = rows.writeStream.queryName(name).format(settings.format)
        sink = dict(settings.sink)
        if settings.format == TOPICS:
            sink = {**reach, "writerId": name, **sink}
        if settings.trigger:
            writer = writer.trigger(processingTime=settings.trigger)
        if settings.output_mode:
            writer = writer.outputMode(settings.output_mode)
        checkpoint = settings.checkpoint or str(self._checkpoints / name)
        return writer.options(**sink).option("checkpointLocation", checkpoint)


def applied(function: str, rows: DataFrame) -> DataFrame:
    """Raises FunctionInvalid, and what the function raises."""
    from pyspark.sql import DataFrame as AnyDataFrame

    module, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise FunctionInvalid(
            f"function {function}: {error}; the runner finds modules by PYTHONPATH and --python-path"
        ) from error
    if not callable(found):
        raise FunctionInvalid(f"function {function}: there is no such function in {module}")
    result = found(rows)
    if not isinstance(result, AnyDataFrame):
        raise FunctionInvalid(
            f"function {function} has returned {type(result).__name__}; it is to return a DataFrame"
        )
    return result


def _options(settings: Mapping[str, Any], side: str) -> dict[str, str]:
    given = settings.get(side)
    if not isinstance(given, Mapping) or not given:
        raise SettingsInvalid(f"setting {side}: options by name are needed, such as topic: /default/orders")
    return {str(name): _as_text(side, name, value) for name, value in given.items()}


def _as_text(side: str, name: object, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (str, int, float)):
        raise SettingsInvalid(f"setting {side}: option {name} is {value!r}, and options are text or numbers")
    return str(value)


def _text(settings: Mapping[str, Any], name: str, form: re.Pattern[str], allowed: str) -> str:
    value = settings.get(name, "")
    if value != "" and not (isinstance(value, str) and form.fullmatch(value)):
        raise SettingsInvalid(f"setting {name} is {value!r}: {allowed}")
    return str(value)


CHECKS: Final[Mapping[str, Callable[[Mapping[str, Any]], object]]] = {"custom": CustomSettings.parse}
BY_POLICY: Final[Mapping[str, str]] = {"replicate": "sava replication set"}
"""Kinds that policies make, and what makes them."""


def check(name: str, kind: str, settings: Mapping[str, Any]) -> None:
    """Raises SettingsInvalid."""
    if kind in BY_POLICY:
        raise SettingsInvalid(f"pipeline {name}: those of kind {kind} are made by `{BY_POLICY[kind]}`")
    if kind not in CHECKS:
        raise SettingsInvalid(f"pipeline {name}: there is no kind {kind!r}; there are {', '.join(CHECKS)}")
    try:
        CHECKS[kind](settings)
    except SettingsInvalid as error:
        raise SettingsInvalid(f"pipeline {name}: {error}") from None
