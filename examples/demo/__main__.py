"""``python -m examples.demo``: the tour, from start to stop."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from examples.demo.orders import TOPIC
from examples.demo.steps import Show
from examples.demo.tour import Tour

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Whatever asks the demo to end ends it as Ctrl-C does: with everything stopped."""


def main() -> int:
    options = parser().parse_args()
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    root = Path(tempfile.mkdtemp(prefix="sava-demo-"))
    show = Show(root)
    tour = Tour(root, options.port_base, show.say)
    is_kept = True
    try:
        began = time.monotonic()
        holds = show.run(tour.steps())
        show.summary(time.monotonic() - began)
        if options.keep:
            show.console.print(try_next(tour), soft_wrap=True)
            wait_for_interrupt()
        is_kept = not holds
        return 0 if holds else 1
    except KeyboardInterrupt:
        is_kept = False
        return 130
    finally:
        # Bounded by itself, and whoever interrupts it leaves processes behind.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        show.console.print("stopping everything …")
        tour.stop()
        if is_kept:
            show.console.print(f"data and logs are in {root}")
        else:
            shutil.rmtree(root)


def wait_for_interrupt() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def try_next(tour: Tour) -> str:
    east, west = tour.east, tour.west
    settings = " ".join(f"{name}={value}" for name, value in east.environment.items())
    return f"""
Everything runs on. Try next, in another terminal:

  export PATH={Path(sys.executable).parent}:$PATH {settings}
  sava brokers list                                # one was killed
  sava journals list                               # and who keeps copies of whose messages
  sava topics describe {TOPIC}
  seq 1 1000 | sava produce /default/numbers
  sava consume /default/numbers --subscription mine --count 1000
  sava topics unload {TOPIC}
  sava replication status
  sava topics peek {TOPIC} --service {west.brokers[0].service} --admin {west.brokers[0].admin}
  sava replication verify {TOPIC} --remote west    # every message, with Spark
  sava spark shell
  sava doctor                                      # what is wrong, and what to do
  curl {east.brokers[0].metrics}

Ctrl-C stops everything and removes {east.directory.parent}.
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="A tour of Sava, measured.")
    parser.add_argument(
        "--keep", action="store_true", help="leave everything running until Ctrl-C, and say what to try"
    )
    parser.add_argument(
        "--port-base", type=int, default=26650, help="ports are taken from here on (default: 26650)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
