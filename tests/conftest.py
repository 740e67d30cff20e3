"""Asynchronous tests run on the event loop that brokers run on.

gRPC's preparations for a fork are switched off before it is imported: uvloop starts child processes with a
plain fork, and in a process with gRPC calls under way these preparations can spin in the child for ever.

Python is to keep its byte code, whatever the environment says: the tests start hundreds of processes, and
each would compile all of Sava first, which takes as long as all the rest of a broker's start.

Ctrl-C is heard also where a script runs the tests in its background, and so ignores it: some test what it
does.

Hypothesis judges no example by its time, neither a test's nor that of making it up: on a shared machine any
of them may stand still for a second. What hangs is ended by pytest's own timeout. With ``SAVA_LONG=1`` there
are many more examples.

What a process keeps of clusters is closed with each file: it would go on asking brokers that are gone, for a
minute, and so change the state of ``random`` while Hypothesis, which minds that, makes up examples.

Of several processes each takes whole files, so that servers which a file's tests share are started once. All
tests with Spark are one process's: each Java takes a core for seconds before it does anything. Long files
come first, small ones fill the end.
"""

from __future__ import annotations

import os
import signal

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from sava.pipeline import cluster
from tests.support.leftovers import sweep_after_this_process, wait_for_the_last
from tests.support.long import IS_LONG
from tests.support.processes import stop_server

TESTS = Path(__file__).parent

settings.register_profile(
    "sava",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=300 if IS_LONG else 40,
)
settings.load_profile("sava")


ORDER = (
    "spark",
    "cluster",
    "torture",
    "security",
    "compat",
    "integration",
    "security",
    "chaos",
    "sim",
    "mirror_sim",
    "suspicion_sim",
    "mutants",
    "unit",
)


def pytest_configure() -> None:
    sweep_after_this_process()


def pytest_unconfigure() -> None:
    stop_server()
    # It watches what Python's executors share, and outlives a process that ends without ``atexit``.
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    wait_for_the_last()


LONG_FILES = (
    "cluster/test_failover.py",
    "cluster/test_bench_failover.py",
    "cluster/test_mirrored_journal.py",
    "integration/test_docs.py",
    "integration/test_demo.py",
    "integration/test_lost_answers.py",
    "integration/test_copying.py",
    "integration/test_up.py",
    "unit/ledger/test_generations.py",
    "unit/ledger/test_failover.py",
    "unit/client/test_silent_broker.py",
    "unit/pipeline/replicate/test_job.py",
    "unit/cli/test_streams.py",
    "unit/ledger/test_silent_mirrors.py",
    "unit/cluster/test_registration.py",
)
"""Files that take 15 seconds and more come before the others of their kind: none of them is the last one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> tuple[int, bool]:
        path = item.path.relative_to(TESTS)
        return ORDER.index(path.parts[0]), path.as_posix() not in LONG_FILES

    items.sort(key=place)


class _ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return "spark" if nodeid.startswith("tests/spark/") else nodeid.split("::", 1)[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _ByFile(config, log)


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module", autouse=True)
def _of_this_process() -> Iterator[None]:
    yield
    cluster.close_all()
