"""Logging: one line per event on standard error, ``key=value`` behind a short text, so that people and tools
both can read it; or one JSON object per event, with the same keys, for those who collect logs.

Code logs as Python does: ``log.info("agent: done topic=%s ms=%d", name, took)``. What every line needs and no
caller should have to pass along comes from here:

* ``broker``: whose line it is. A collector has those of all brokers in one place. Known from when the process
  has read its identity; *-* before.
* ``epoch``, in lines about a topic that do not say it themselves: as this broker knows it when it writes the
  line. Two brokers that both speak of a topic can be told apart by it: the one with the smaller is late.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Any, Final, Literal

_PLACE: Final = re.compile(r"%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
_NAME: Final = re.compile(r"(\w+)=$")
_GOES_ON: Final = ": "
"""Between the parts of one value, as in ``error=%s: %s``."""

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
        elif last and between == _GOES_ON:
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


def set_up(*, form: Literal["text", "json"] = "text", level: str = "info") -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
