"""How ``grpc.aio`` tells that a stream has ended, to whoever reads it message by message."""

from __future__ import annotations

from grpc import aio

END: object = aio.EOF  # type: ignore[attr-defined]  # which the stubs do not know
