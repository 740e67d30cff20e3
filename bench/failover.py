"""What copies of journals cost, and how soon others go on when a broker is killed:
``python -m bench.failover``, the same as ``python -m bench --only journal``."""

from __future__ import annotations

import sys

from bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--only", "journal", *sys.argv[1:]]))
