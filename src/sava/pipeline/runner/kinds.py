"""Kinds: what a pipeline does. A runner takes only pipelines of kinds that it knows by name.

The runner's loop never waits, so no method of a job does: a job works in its own thread, is polled for its
progress, and is asked to stop.

The kind ``custom`` is a user's function from DataFrame to DataFrame, from topics to topics or to any sink of
Spark:

    from:       options of format("sava"): topic, topics or topicPattern, startingOffsets, …
    function:   module:function; without it rows pass unchanged, to topics with the columns that a message
                has from its writer
    to:         options of format("sava"): topic, … or format: with the options of that
    trigger:    how often a batch begins, such as "1 second"; by default as soon as there are messages
    outputMode: append, update or complete
    checkpoint: directory below NAME in that of the runner; by default NAME itself

What of this a runner does is for its operator to say (``allowing``). Topics get each result exactly once, in
the name of the pipeline: the pipeline may stop, move to another runner and start again at any moment.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from sava.client.errors import Unavailable
from sava.errors import CallerError
from sava.pipeline.options import OptionError, SinkOptions, SourceOptions
from sava.pipeline.runner.allowing import AllowList, shown
from sava.pipeline.runner.control import UNKNOWN_LAG

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class SettingsInvalid(CallerError):
    """The settings of a pipeline are invalid for its kind, or the function that they name is."""


class JobProgress(NamedTuple):
    """The progress of a job since it started."""

    is_running: bool = False
    """False while the job prepares."""
    has_worked: bool = False
    """Whether a batch of this job has succeeded, or there was no backlog."""
    rows: int = 0
    rate: float = 0.0
    batch: int = 0
    lag_messages: int = UNKNOWN_LAG
    lag_seconds: float = UNKNOWN_LAG
    has_backlog: bool = False
    """Whether messages wait, as far as is known."""
    pulse: Hashable = None
    """A value that changes with every piece of work done."""


class PipelineJob(Protocol):
    """A running pipeline. Every method returns at once."""

    @property
    def progress(self) -> JobProgress: ...

    @property
    def end(self) -> str | None:
        """The error that ended the job, empty after a stop request; None while it runs and may still
        write."""
        ...

    @property
    def refusal(self) -> str:
        """Why the runner's operator does not allow it, if that is what ended it: repeating it is no use."""
        return ""

    def stop(self, *, now: bool) -> None:
        """Stop after the current batch, or now. May be called repeatedly."""
        ...


class PipelineKind(Protocol):
    """Starts jobs for pipelines of one kind."""

    def start(self, name: str, settings: Mapping[str, Any], token: str) -> PipelineJob:
        """Start a job. ``name`` is the pipeline's, and its writer id for exactly-once writes. ``token`` lets
        the job act for the pipeline's creator; empty where calls need no permission. Raises SettingsInvalid,
        NotAllowed."""
        ...


COPIED: Final = ("key", "payload", "attributes", "publish_time", "schema_id", "schema_version")
"""The columns that a copied message keeps. The copy has its own topic and offset, and replication must not
take the origin of the original for that of the copy."""

SETTINGS: Final = ("from", "function", "to", "trigger", "outputMode", "checkpoint")
OUTPUT_MODES: Final = ("append", "update", "complete")
_FUNCTION: Final = re.compile(r"[\w.]+:\w+")
_DIRECTORY: Final = re.compile(r".+")
_TRIGGER: Final = re.compile(r"\d+(\.\d+)? ?(ms|milliseconds?|s|seconds?|m|minutes?|hours?)")
LAG_TIMEOUT_S: Final = 5.0
MAX_OPTIONS: Final = 64
MAX_VALUE: Final = 4096
"""Characters of one option."""
MAX_TEXT: Final = 1000
"""Of a function, a directory, the name of an option."""
TOPICS: Final = "sava"


@dataclass(frozen=True, slots=True)
class CustomSettings:
    """The parsed settings of a custom pipeline."""

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
                f"setting {shown(unknown[0])}: there is no such one; there are {', '.join(SETTINGS)}"
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
            checkpoint=_text(settings, "checkpoint", _DIRECTORY, "a directory"),
        )
        try:
            SourceOptions.parse(parsed.source, stream=True)
            if form == TOPICS:
                SinkOptions.parse(sink, stream=True)
        except OptionError as error:
            raise SettingsInvalid(str(error)) from None
        return parsed


class Custom(PipelineKind):
    """The kind ``custom``. It calls ``spark`` and ``service`` at each start: the session is made late, and
    brokers change. ``access`` holds options for certificates and the runner's token."""

    def __init__(
        self,
        spark: Callable[[], SparkSession],
        service: Callable[[], str],
        allowed: AllowList,
        *,
        access: Mapping[str, str] | None = None,
    ) -> None:
        self._spark = spark
        self._service = service
        self._allowed = allowed
        self._access = access or {}

    def start(self, name: str, settings: Mapping[str, Any], token: str) -> PipelineJob:
        from sava.pipeline.runner.queries import QueryJob

        parsed = CustomSettings.parse(settings)
        source, sink = self._options(name, parsed, token)
        checkpoint = self._allowed.checked_checkpoint(name, parsed.checkpoint)
        if parsed.function:
            self._allowed.check_function(parsed.function)
        options = SourceOptions.parse({**source, "timeout": str(LAG_TIMEOUT_S)}, stream=True)

        def prepare(spark: SparkSession) -> DataStreamWriter:
            writer = self._prepare(spark, name, parsed, source)
            return writer.options(**sink).option("checkpointLocation", checkpoint)

        return QueryJob(name, self._spark(), prepare, access=options.access, topics=options.topics)

    def _options(
        self, name: str, settings: CustomSettings, token: str
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Of source and sink. Raises NotAllowed, Unavailable."""
        source = {
            **self._reach(self._allowed.check_topics("from", settings.source), token),
            **settings.source,
        }
        if settings.format == TOPICS:
            reach = self._reach(self._allowed.check_topics("to", settings.sink), token)
            return source, {**reach, **settings.sink, "writerId": name}
        return source, self._allowed.checked_sink(settings.format, settings.sink)

    def _reach(self, is_foreign: bool, token: str) -> dict[str, str]:
        """Another cluster is shown neither the token nor the certificate."""
        if is_foreign:
            return {"token": "", **{name: value for name, value in self._access.items() if name == "tlsCa"}}
        service = self._service()
        if not service:
            raise Unavailable("the addresses of the brokers are not known yet")
        reach = {"service": service, **self._access}
        if token:
            reach = {**reach, "token": token}
            reach.pop("tokenFile", None)
        return reach

    def _prepare(
        self, spark: SparkSession, name: str, settings: CustomSettings, source: Mapping[str, str]
    ) -> DataStreamWriter:
        rows = spark.readStream.format(TOPICS).options(**source).load()
        if settings.function:
            rows = applied(settings.function, rows, self._allowed)
        elif settings.format == TOPICS:
            rows = rows.select(*COPIED)
        writer = rows.writeStream.queryName(name).format(settings.format)
        if settings.trigger:
            writer = writer.trigger(processingTime=settings.trigger)
        if settings.output_mode:
            writer = writer.outputMode(settings.output_mode)
        return writer


def applied(function: str, rows: DataFrame, allowed: AllowList) -> DataFrame:
    """Call the user's function. Raises NotAllowed, SettingsInvalid, and what the function raises."""
    from pyspark.sql import DataFrame as AnyDataFrame

    allowed.check_function(function)
    module, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise SettingsInvalid(
            f"function {function}: {error}; the runner finds modules by PYTHONPATH and --python-path"
        ) from error
    if not callable(found):
        raise SettingsInvalid(f"function {function}: there is no such function in {module}")
    allowed.check_origin(function, getattr(found, "__module__", None))
    result = found(rows)
    if not isinstance(result, AnyDataFrame):
        raise SettingsInvalid(
            f"function {function} has returned {type(result).__name__}; it must return a DataFrame"
        )
    return result


def _options(settings: Mapping[str, Any], side: str) -> dict[str, str]:
    given = settings.get(side)
    if not isinstance(given, Mapping) or not given:
        raise SettingsInvalid(f"setting {side}: options by name are needed, such as topic: /default/orders")
    if len(given) > MAX_OPTIONS or any(len(str(name)) > MAX_TEXT for name in given):
        raise SettingsInvalid(f"setting {side}: at most {MAX_OPTIONS} options, with short names")
    lower = [str(name).lower() for name in given]
    if twice := [name for name in lower if lower.count(name) > 1]:
        raise SettingsInvalid(f"setting {side}: option {shown(twice[0])} is there twice")
    return {str(name): _as_text(side, name, value) for name, value in given.items()}


def _as_text(side: str, name: object, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (str, int, float)):
        given = shown(repr(value))
        raise SettingsInvalid(
            f"setting {side}: option {shown(str(name))} is {given}, and options are text or numbers"
        )
    text = str(value)
    if len(text) > MAX_VALUE:
        raise SettingsInvalid(f"setting {side}: option {shown(str(name))} is longer than {MAX_VALUE}")
    return text


def _text(settings: Mapping[str, Any], name: str, form: re.Pattern[str], allowed: str) -> str:
    value = settings.get(name, "")
    is_right = isinstance(value, str) and len(value) <= MAX_TEXT and form.fullmatch(value)
    if value != "" and not is_right:
        raise SettingsInvalid(f"setting {name} is {shown(repr(value))}: {allowed}")
    return str(value)


CHECKS: Final[Mapping[str, Callable[[Mapping[str, Any]], object]]] = {"custom": CustomSettings.parse}
BY_POLICY: Final[Mapping[str, str]] = {"replicate": "sava replication set"}
"""Kinds that a policy creates, and its command."""


def check(name: str, kind: str, settings: Mapping[str, Any]) -> None:
    """Check a pipeline before it is stored. Raises SettingsInvalid."""
    if kind in BY_POLICY:
        raise SettingsInvalid(f"pipeline {name}: those of kind {kind} are made by `{BY_POLICY[kind]}`")
    if kind not in CHECKS:
        raise SettingsInvalid(f"pipeline {name}: there is no kind {kind!r}; there are {', '.join(CHECKS)}")
    try:
        CHECKS[kind](settings)
    except SettingsInvalid as error:
        raise SettingsInvalid(f"pipeline {name}: {error}") from None
