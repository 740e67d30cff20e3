"""``python -m bench.profiled FILE ARGUMENT …``: the command ``sava`` under cProfile.

A broker ends its process by ``os._exit``, which runs nothing that was to be run at the end; so FILE is
written there.
"""

from __future__ import annotations

import cProfile
import os
import sys
from typing import NoReturn

from sava.cli.main import main


def run(file: str) -> None:
    profile = cProfile.Profile()
    leave = os._exit

    def write_and_leave(status: int) -> NoReturn:
        profile.disable()
        profile.dump_stats(file)
        leave(status)

    os._exit = write_and_leave
    try:
        profile.runcall(main)
    finally:
        profile.dump_stats(file)


if __name__ == "__main__":
    output = sys.argv.pop(1)
    run(output)
