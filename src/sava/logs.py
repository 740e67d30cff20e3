"""Logging: one line per event on standard error, ``key=value`` behind a short text, so that people and
tools both can read it."""

from __future__ import annotations

import logging
import sys
import time


class LineFormatter(logging.Formatter):
    """UTC time with milliseconds, level, logger, text. Newlines are folded: one event, one line."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        return " | ".join(super().format(record).splitlines())


def set_up(level: int = logging.INFO) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
