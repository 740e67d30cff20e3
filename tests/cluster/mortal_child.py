"""A broker of which a task dies on a signal: ``python -m tests.cluster.mortal_child broker …``.

It is the ``sava`` command. On SIGUSR1 the task that the environment variable ``SAVA_MORTAL`` names gets an
error that nobody foresaw from whatever it waits for at that moment.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Final

from sava.cli.main import main
from sava.supervisor import Supervisor

VARIABLE: Final = "SAVA_MORTAL"


class Bug(Exception):
    """Not one of Sava's."""


def strike(name: str) -> None:
    """As soon as it waits for something."""
    loop = asyncio.get_running_loop()
    task = next(task for task in asyncio.all_tasks() if task.get_name() == name)
    waits_for: asyncio.Future[object] | None = task._fut_waiter  # type: ignore[attr-defined]
    if waits_for is None or waits_for.done():
        loop.call_soon(strike, name)
    else:
        waits_for.set_exception(Bug("injected"))


def run() -> None:
    made = Supervisor.__init__

    def make(self: Supervisor) -> None:
        made(self)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, strike, os.environ[VARIABLE])

    Supervisor.__init__ = make  # type: ignore[method-assign]
    main()


if __name__ == "__main__":
    run()
