"""What the sink refuses. Spark shows the text at the end of its own report, so each is one line with the
way out."""

from __future__ import annotations

from sava.errors import CallerError


class WriteRefused(CallerError):
    """The rows, or the way they are to be written, are wrong; repeating it cannot help."""
