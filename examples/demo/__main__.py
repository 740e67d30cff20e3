"""``python -m examples.demo``: the tour, from start to stop."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from examples.demo.interrupts import Interrupts
from examples.demo.orders import TOPIC
from examples.demo.processes import Processes
from examples.demo.steps import Show
from examples.demo.tour import Tour

NEEDED_BYTES = 100_000_000
"""It was seen to take a quarter of that."""


def main() -> int:
    options = parser().parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal knows every character
    try:
        root = folder()
    except OSError as error:
        print(f"demo: there is no folder for its data: {error}; TMPDIR can name another", file=sys.stderr)
        return 1
    interrupts = Interrupts()
    processes = Processes(root, interrupts)
    tour = Tour(processes, options.port_base, options.orders)
    show = Show(root, tour.faults)
    is_kept = True
    try:
        interrupts.listen()
        began = time.monotonic()
        holds = show.run(tour.steps(show.say))
        show.summary(time.monotonic() - began)
        if options.keep and tour.serves:
            end = "stops everything and removes" if holds else "stops everything; data and logs stay in"
            show.console.print(try_next(tour), f"Ctrl-C {end} {root}", sep="\n", soft_wrap=True)
            wait_for_interrupt()
        is_kept = not holds
        return 0 if holds else 1
    except KeyboardInterrupt:
        is_kept = False
        return 130
    finally:
        interrupts.ignore()
        show.console.print("stopping everything …")
        processes.stop(is_kept=is_kept)
        if not is_kept:
            shutil.rmtree(root, ignore_errors=True)
        if root.exists():
            show.console.print(f"data and logs are in {root}")


def folder() -> Path:
    """A new one, where folders of this kind are. Raises OSError."""
    place = tempfile.gettempdir()
    if (free := shutil.disk_usage(place).free) < NEEDED_BYTES:
        raise OSError(f"{place} has {free / 1e6:.0f} MB left, of {NEEDED_BYTES / 1e6:.0f} MB that are needed")
    return Path(tempfile.mkdtemp(prefix="sava-demo-"))


def wait_for_interrupt() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def try_next(tour: Tour) -> str:
    east, west = tour.east, tour.west
    settings = " ".join(f"{name}={value}" for name, value in east.environment.items())
    programs = shlex.quote(str(Path(sys.executable).parent))
    return f"""
Everything runs on. The console, for a browser: {east.brokers[0].metrics.removesuffix("metrics")}

Try next, in another terminal:

  export PATH={programs}:$PATH
  export {settings}
  sava brokers list                                # one was killed
  sava ledgers list                               # who keeps copies
  sava topics describe {TOPIC}
  seq 1 1000 | sava produce /default/numbers
  sava consume /default/numbers --subscription mine --count 1000 | tail -1
  sava topics unload {TOPIC}
  sava replication status
  sava replication verify {TOPIC} --remote west
  sava consume {TOPIC} --service {west.brokers[0].service} --count 3
  sava spark shell
  sava doctor                                      # what to do
  curl {east.brokers[0].metrics}
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="A tour of Sava, measured.")
    parser.add_argument(
        "--keep", action="store_true", help="leave everything running until Ctrl-C, and say what to try"
    )
    parser.add_argument(
        "--port-base", type=int, default=26650, help="ports are taken from here on (default: 26650)"
    )
    parser.add_argument(
        "--orders", type=int, default=200_000, help="orders that are published first (default: 200,000)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
