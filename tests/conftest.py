"""Asynchronous tests run on the event loop that brokers run on.

gRPC's preparations for a fork are switched off before it is imported: uvloop starts child processes with a
plain fork, and in a process with gRPC calls under way these preparations can spin in the child for ever.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from collections.abc import Callable
from typing import Any

import uvloop


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}
