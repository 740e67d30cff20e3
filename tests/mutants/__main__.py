"""``python -m tests.mutants [--only m7 m8] [--jobs 2]``: every mutant must die."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.mutants.everything import MUTANTS
from tests.mutants.runner import Verdict, judge


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", nargs="*", default=[], help="ids of the mutants to run")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="show the killer's output")
    parser.add_argument("--list", action="store_true", help="only say what they are")
    options = parser.parse_args()
    if options.list:
        for mutant in MUTANTS:
            print(f"{mutant.id:<5} {mutant.file:<44} {mutant.story}")
        return 0
    chosen = [mutant for mutant in MUTANTS if not options.only or mutant.id in options.only]
    verdicts = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(judge, chosen):
            verdicts.append(verdict)
            print(describe(verdict), flush=True)
            if options.verbose:
                print(verdict.detail[-6000:])
    alive = [verdict for verdict in verdicts if not verdict.killer]
    by_sim = sum(verdict.killer.startswith("sim") for verdict in verdicts)
    print(
        f"{len(verdicts) - len(alive)} of {len(verdicts)} mutants killed, {by_sim} of them by the simulator"
    )
    return int(bool(alive))


def describe(verdict: Verdict) -> str:
    fate = verdict.killer or ("OUTDATED " + verdict.detail if verdict.outdated else "SURVIVED")
    return f"{verdict.mutant.id:<5} {verdict.seconds:6.1f} s  {verdict.mutant.story:<62.62}  {fate}"


if __name__ == "__main__":
    sys.exit(main())
