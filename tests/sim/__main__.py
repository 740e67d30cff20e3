"""``python -m tests.sim``: run many seeds on all cores, or one seed again.

python -m tests.sim --seeds 2000 --jobs 2          a night's work
python -m tests.sim --seed 1234                    the same world again
python -m tests.sim --seed 1234 --trace            with every event
python -m tests.sim --seed 1234 --shrink           the smallest world that breaks the same rule
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter

from tests.sim.knobs import FAULTS, Knobs, draw
from tests.sim.result import RunResult
from tests.sim.run import run_seed
from tests.sim.shrink import shrink


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.seed is not None:
        return _run_one(options)
    return _run_many(options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description=__doc__.split("\n")[0] if __doc__ else ""
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=1, help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, help="run this seed alone and report it in full")
    parser.add_argument("--trace", action="store_true", help="print every event (with --seed)")
    parser.add_argument(
        "--shrink", action="store_true", help="look for a smaller world that fails alike (with --seed)"
    )
    parser.add_argument("--last", type=int, default=60, help="how many of the last events a failure shows")
    parser.add_argument(
        "--without", default="", help="fault classes to switch off, comma-separated (with --seed)"
    )
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failing seed")
    return parser.parse_args(arguments)


def _run_one(options: argparse.Namespace) -> int:
    knobs = draw(options.seed)
    for fault in filter(None, options.without.split(",")):
        knobs = knobs.without(fault)
    result = run_seed(options.seed, knobs=knobs, trace=print if options.trace else None, recent=options.last)
    if options.shrink and result.failed:
        print(f"seed {options.seed} breaks {result.rule}; looking for less")
        knobs, result = shrink(knobs, result, print)
    print(report(knobs, result))
    return int(result.failed)


def report(knobs: Knobs, result: RunResult) -> str:
    lines = [f"seed {knobs.seed}: {result.failure or 'ok'}"]
    lines.append(f"  {knobs.describe()}")
    lines.append(
        f"  {result.events} events, {result.virtual_ms / 1000:.1f} s of virtual time, {result.cpu_s:.2f} s "
        "of CPU, "
        f"hash {result.hash:08x}"
    )
    lines.append(f"  {dict(sorted(result.counts.items()))}")
    if result.failed:
        lines.append(result.traceback)
        lines.append("last events:")
        lines.extend(f"  {line}" for line in result.recent)
        lines.append(f"reproduce: python -m tests.sim --seed {knobs.seed} [--trace | --shrink]")
    return "\n".join(lines)


def _run_many(options: argparse.Namespace) -> int:
    seeds = range(options.start, options.start + options.seeds)
    started = time.monotonic()
    summary = Summary()
    failures: list[RunResult] = []
    with multiprocessing.Pool(max(1, options.jobs)) as pool:
        for result in pool.imap_unordered(run_seed, seeds, chunksize=1):
            summary.add(result)
            if result.failed:
                failures.append(result)
                print(f"\n{report(draw(result.seed), result)}", flush=True)
                if not options.keep_going:
                    pool.terminate()
                    break
            _progress(summary, len(seeds), len(failures), started)
    print(f"\n{summary.describe(time.monotonic() - started)}")
    if failures:
        print(
            "FAILED seeds:",
            " ".join(f"{result.seed}({result.rule})" for result in sorted(failures, key=_seed)),
        )
    return int(bool(failures))


def _seed(result: RunResult) -> int:
    return result.seed


def _progress(summary: Summary, total: int, failures: int, started: float) -> None:
    if sys.stdout.isatty() or summary.runs % 50 == 0:
        end = "\r" if sys.stdout.isatty() else "\n"
        rate = summary.runs / max(0.001, time.monotonic() - started)
        print(f"{summary.runs}/{total} seeds, {rate:.1f}/s, {failures} failed", end=end, flush=True)


class Summary:
    def __init__(self) -> None:
        self.runs = 0
        self.virtual_ms = 0
        self.events = 0
        self.cpu_s = 0.0
        self.slowest: tuple[float, int] = (0.0, 0)
        self.counts: Counter[str] = Counter()

    def add(self, result: RunResult) -> None:
        self.runs += 1
        self.virtual_ms += result.virtual_ms
        self.events += result.events
        self.cpu_s += result.cpu_s
        self.slowest = max(self.slowest, (result.cpu_s, result.seed))
        self.counts.update(result.counts)

    def describe(self, seconds: float) -> str:
        counts = self.counts
        faults = ", ".join(f"{name} {counts[name]}" for name in FAULTS if counts[name])
        other = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if name not in FAULTS)
        runs = max(1, self.runs)
        return (
            f"{self.runs} seeds, {self.virtual_ms / 3.6e6:.1f} virtual hours, {self.events} events, "
            f"{seconds:.0f} s of wall time, {self.cpu_s / runs:.2f} s of CPU per seed "
            f"(slowest {self.slowest[0]:.1f} s: seed {self.slowest[1]})\n"
            f"faults:  {faults}\n"
            f"work:    {other}"
        )


if __name__ == "__main__":
    sys.exit(main())
