"""Asynchronous tests run on the event loop that brokers run on.

gRPC's preparations for a fork are switched off before it is imported: uvloop starts child processes with a
plain fork, and in a process with gRPC calls under way these preparations can spin in the child for ever.

Python is to keep its byte code, whatever the environment says: the tests start hundreds of processes, and
each would compile all of Sava first, which takes as long as all the rest of a broker's start.

Hypothesis judges no example by its time: on a shared machine any of them may stand still for a second. What
hangs is ended by pytest's own timeout. With ``SAVA_LONG=1`` there are many more examples.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from collections.abc import Callable
from typing import Any

import uvloop
from hypothesis import settings

from tests.long import IS_LONG

settings.register_profile("sava", deadline=None, max_examples=300 if IS_LONG else 40)
settings.load_profile("sava")


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}
