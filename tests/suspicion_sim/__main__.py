"""``python -m tests.suspicion_sim``: many seeds, or simulated days in a bad network.

python -m tests.suspicion_sim --seeds 5000 --jobs 2
python -m tests.suspicion_sim --days 10 --jobs 2
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from functools import partial

from tests.suspicion_sim.scenarios import lossy_hours, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suspicion_sim")
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--start", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--days", type=int, default=0, help="simulated days with 200 ms delay and 2 %% loss")
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        if options.days:
            return _days(pool, options.days)
        failed = 0
        seeds = range(options.start, options.start + options.seeds)
        for seed, (name, broken) in zip(seeds, pool.imap(run_seed, seeds, chunksize=8), strict=True):
            if broken:
                failed += 1
                print(f"seed {seed} {name}: {broken[:3]}", flush=True)
                break
        print(f"{len(seeds)} seeds, {failed} failed")
    return int(failed > 0)


def _days(pool: multiprocessing.pool.Pool, days: int) -> int:
    evictions = doubts = 0
    for evicted, doubted in pool.imap_unordered(partial(lossy_hours, hours=24), range(days)):
        evictions, doubts = evictions + evicted, doubts + doubted
    print(f"{days} days, 3 brokers, 200 ms delay, 2 % loss: {evictions} false evictions, {doubts} doubts")
    return int(evictions > days)


if __name__ == "__main__":
    sys.exit(main())
