"""``python -m tests.mirror_sim``: run many seeds on all cores, or one seed again.

python -m tests.mirror_sim --seeds 2000 --jobs 2   a night's work
python -m tests.mirror_sim --seed 1234 --trace     the same world again, with every event
python -m tests.mirror_sim --seed 1234 --shrink    the smallest world that breaks the same rule
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from dataclasses import replace

from tests.mirror_sim.knobs import FAULTS, Knobs, draw
from tests.mirror_sim.run import run_seed
from tests.sim.result import RunResult


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mirror_sim")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=1, help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, help="run this seed alone and report it in full")
    parser.add_argument("--trace", action="store_true", help="print every event (with --seed)")
    parser.add_argument("--shrink", action="store_true", help="look for less that fails alike (with --seed)")
    parser.add_argument("--last", type=int, default=60, help="how many of the last events a failure shows")
    parser.add_argument("--without", default="", help="fault classes to switch off, comma-separated")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failing seed")
    options = parser.parse_args(arguments)
    return _run_one(options) if options.seed is not None else _run_many(options)


def _run_one(options: argparse.Namespace) -> int:
    knobs = draw(options.seed)
    for fault in filter(None, options.without.split(",")):
        knobs = knobs.without(fault)
    result = run_seed(options.seed, knobs=knobs, trace=print if options.trace else None, recent=options.last)
    if options.shrink and result.failed:
        knobs, result = shrink(knobs, result)
    print(report(knobs, result))
    return int(result.failed)


def shrink(knobs: Knobs, result: RunResult) -> tuple[Knobs, RunResult]:
    """Greedy: every smaller world that still breaks the same rule is kept."""
    rule, is_smaller = result.rule, True
    while is_smaller:
        is_smaller = False
        candidates = [knobs.without(fault) for fault in FAULTS if fault in knobs.faults]
        for name, least in (("messages", 4), ("chaos_ms", 500), ("topics", 1), ("producers", 1)):
            less = getattr(knobs, name) // 2
            if less >= least:
                candidates.append(replace(knobs, **{name: less}))
        for candidate in candidates:
            tried = run_seed(knobs.seed, knobs=candidate)
            if tried.failed and tried.rule == rule:
                knobs, result, is_smaller = candidate, tried, True
                print(f"  smaller: {tried.events} events")
                break
    return knobs, result


def report(knobs: Knobs, result: RunResult) -> str:
    lines = [f"seed {knobs.seed}: {result.failure or 'ok'}", f"  {knobs.describe()}"]
    lines.append(
        f"  {result.events} events, {result.virtual_ms / 1000:.1f} s of virtual time, {result.cpu_s:.2f} s "
        f"of CPU, hash {result.hash:08x}"
    )
    lines.append(f"  {dict(sorted(result.counts.items()))}")
    if result.failed:
        lines.append(result.traceback)
        lines.append("last events:")
        lines.extend(f"  {line}" for line in result.recent)
        lines.append(f"reproduce: python -m tests.mirror_sim --seed {knobs.seed} [--trace | --shrink]")
    return "\n".join(lines)


def _run_many(options: argparse.Namespace) -> int:
    seeds = range(options.start, options.start + options.seeds)
    started = time.monotonic()
    counts: Counter[str] = Counter()
    cpu, runs = 0.0, 0
    failures: list[RunResult] = []
    with multiprocessing.Pool(max(1, options.jobs)) as pool:
        for result in pool.imap_unordered(run_seed, seeds, chunksize=1):
            runs += 1
            cpu += result.cpu_s
            counts.update(result.counts)
            if result.failed:
                failures.append(result)
                print(f"\n{report(draw(result.seed), result)}", flush=True)
                if not options.keep_going:
                    pool.terminate()
                    break
            if runs % 200 == 0:
                print(f"{runs}/{len(seeds)} seeds, {len(failures)} failed", flush=True)
    seconds = time.monotonic() - started
    print(f"\n{runs} seeds, {seconds:.0f} s of wall time, {cpu / max(1, runs):.2f} s of CPU per seed")
    print("faults: ", ", ".join(f"{name} {counts[name]}" for name in FAULTS if counts[name]))
    print("work:   ", ", ".join(f"{name} {n}" for name, n in sorted(counts.items()) if name not in FAULTS))
    if failures:
        failed = sorted((result.seed, result.rule) for result in failures)
        print("FAILED seeds:", " ".join(f"{seed}({rule})" for seed, rule in failed))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
