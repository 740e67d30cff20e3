"""What Spark raises, in one line."""

from __future__ import annotations

import re
from typing import Final

MAX_ERROR: Final = 500


def brief(error: Exception) -> str:
    """Spark's texts hold the traces of two languages; what was raised last in Python is what the user can do
    something about."""
    text = str(error).partition("JVM stacktrace")[0].strip() or type(error).__name__
    text = re.sub(r"^An error occurred while calling \S+\s+: ", "", text)
    raised = re.findall(r"^([\w.]+(?:: .+)?)$", text, re.MULTILINE) if "Traceback (most" in text else []
    line = raised[-1] if raised else text.splitlines()[0]
    return line if len(line) <= MAX_ERROR else f"{line[: MAX_ERROR - 1]}…"
