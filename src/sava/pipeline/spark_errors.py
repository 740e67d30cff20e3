"""What Spark raises, in one line."""

from __future__ import annotations

import re
from typing import Final

MAX_ERROR: Final = 500
_PACKAGES: Final = frozenset({"pyspark", "py4j"})
"""Known by name: whoever asks why Spark does not start may not have it."""
_AFTER: Final = re.compile(r"^(=== Streaming Query ===|JVM stacktrace:?)$", re.MULTILINE)
"""From here on: what the query was doing, and where in Java."""
_BEFORE: Final = re.compile(
    r"^(An error occurred while calling \S+\s+: "
    r"|\[STREAM_FAILED\] Query \[id = \S+, runId = \S+\] terminated with exception: )"
)
_RAISED: Final = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*(\S.*)")
"""Below the lines of a trace, which are indented, the error."""


def brief(error: Exception) -> str:
    """Spark's texts hold the traces of two languages; what was raised last in Python is what the user can do
    something about. Errors of others are named with their type: a KeyError's text is a mere key."""
    text = str(error).strip()
    if type(error).__module__.partition(".")[0] in _PACKAGES:
        line = _cause(text)
    else:
        line = _first(f"{type(error).__name__}: {text}" if text else "")
    line = line or type(error).__name__
    return line if len(line) <= MAX_ERROR else f"{line[: MAX_ERROR - 1]}…"


def _cause(text: str) -> str:
    reason = _BEFORE.sub("", _AFTER.split(text)[0].strip())
    raised: list[str] = _RAISED.findall(reason)
    return raised[-1] if raised else _first(reason)


def _first(text: str) -> str:
    return text.partition("\n")[0]
