"""Logging: one line per event on standard error, ``key=value`` behind a short text, so that people and tools
both can read it; or one JSON object per event, with the same keys, for those who collect logs.

Code logs as Python does: ``log.info("agent: done topic=%s ms=%d", name, took)``. What every line needs and no
caller should have to pass along comes from here:

* ``broker``: whose line it is. A collector has those of all brokers in one place. Known from when the process
  has read its identity; *-* before.
* ``epoch``, in lines about a topic that do not say it themselves: as this broker knows it when it writes the
  line. It tells apart two brokers that both speak of a topic: the one with the smaller is late.

One cause has many effects: an object store that is down fails for every topic, and again with each attempt.
So of warnings and errors with the same text only the first few of a minute are written, and then one line
that says how many more there were. What is not a warning is written always: a topic's way through a drain of
a thousand is what a log is for.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final, Literal, TextIO

_PLACE: Final = re.compile(r"%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
_NAME: Final = re.compile(r"(\w+)=$")
_CONTINUES: Final = ": "
"""Between the parts of one value, as in ``error=%s: %s``."""

MOST: Final = 20
MINUTE_S: Final = 60.0
TEXTS: Final = 500
"""That are counted at a time; the code has fewer, other people's libraries may write a new one each time."""

EpochOf = Callable[[str], int | None]


class Context:
    """What is known about this process. Set by one thread, read by any."""

    def __init__(self) -> None:
        self.broker = "-"
        self.epoch_of: EpochOf = lambda topic: None


context: Final = Context()


def set_broker(broker: int) -> None:
    context.broker = str(broker)


def set_epochs(epoch_of: EpochOf) -> None:
    """How to find the epoch of a topic, by its name; must not block, and may be asked by any thread."""
    context.epoch_of = epoch_of


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """The values of a line that have a name in its text, and the epoch if it is about a topic."""
    found: dict[str, Any] = {}
    if isinstance(record.args, tuple) and isinstance(record.msg, str):
        found = _named(record.msg, record.args)
    topic = found.get("topic")
    if topic is not None and "epoch" not in found:
        epoch = context.epoch_of(str(topic))
        if epoch is not None:
            found["epoch"] = epoch
    return found


def _named(text: str, values: tuple[object, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    last, end, left = "", 0, list(values)
    for place in _PLACE.finditer(text):
        if place[0] == "%%":
            continue
        if not left:
            break
        value, between = left.pop(0), text[end : place.start()]
        name = _NAME.search(between)
        if name is not None:
            last = name[1]
            found[last] = value if isinstance(value, bool | int | float) else str(value)
        elif last and between == _CONTINUES:
            found[last] = f"{found[last]}{between}{value}"
        else:
            last = ""
        end = place.end()
    return found


class LineFormatter(logging.Formatter):
    """UTC time with milliseconds, level, broker, logger, text. Newlines are folded: one event, one line."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s broker=%(broker)s %(name)s %(message)s%(more)s")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        record.broker = context.broker
        epoch = fields(record).get("epoch")
        record.more = f" epoch={epoch}" if epoch is not None and "epoch=" not in str(record.msg) else ""
        return " | ".join(super().format(record).splitlines())


class JsonFormatter(logging.Formatter):
    """One object per line: ``time``, ``level``, ``logger``, ``broker``, ``message``, then the values of the
    message under their names. Ids are text: JSON's numbers lose digits beyond 2**53 in many readers."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__()
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "broker": context.broker,
            "message": record.getMessage(),
        }
        for name, value in fields(record).items():
            key = name if name not in event else f"{name}_"
            event[key] = str(value) if isinstance(value, int) and abs(value) >= 1 << 53 else value
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, ensure_ascii=False)


class Restraint:
    """Which lines are one too many. Time is that of the records. Used under the lock of its handler."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}
        """Of texts that were written lately: when their minute began."""
        self._counts: Counter[tuple[str, str]] = Counter()
        self._more: dict[tuple[str, str], logging.LogRecord] = {}
        """Of those with lines left out: the last of them."""

    def lets(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        text = record.name, str(record.msg)
        if len(self._since) >= TEXTS and text not in self._since:
            return True
        self._since.setdefault(text, record.created)
        self._counts[text] += 1
        if self._counts[text] <= MOST:
            return True
        self._more[text] = record
        return False

    def over(self, now: float) -> list[logging.LogRecord]:
        """What there is to say of minutes that are over."""
        ended = [text for text, since in self._since.items() if not since <= now < since + MINUTE_S]
        said = []
        for text in ended:
            since, count, last = self._since.pop(text), self._counts.pop(text), self._more.pop(text, None)
            if last is not None:
                said.append(_summary(last, count - MOST, last.created - since))
        return said


def _summary(last: logging.LogRecord, count: int, seconds: float) -> logging.LogRecord:
    text = 'logs: there were more lines like this one lines=%d seconds=%.0f last="%s"'
    values = (count, seconds, last.getMessage())
    return logging.LogRecord(last.name, last.levelno, last.pathname, last.lineno, text, values, None)


class RestrainedHandler(logging.StreamHandler[TextIO]):
    """Writes to standard error, and no more of the same than an operator would read."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._restraint = Restraint()

    def emit(self, record: logging.LogRecord) -> None:
        for summary in self._restraint.over(record.created):
            super().emit(summary)
        if self._restraint.lets(record):
            super().emit(record)

    def close(self) -> None:
        with self.lock or nullcontext():
            for summary in self._restraint.over(math.inf):
                super().emit(summary)
        super().close()


def set_up(*, form: Literal["text", "json"] = "text", level: str = "info") -> None:
    handler = RestrainedHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
