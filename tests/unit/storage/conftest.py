"""Fixtures of the storage tests."""

from __future__ import annotations

from tests.s3_server import s3_server

__all__ = ["s3_server"]
