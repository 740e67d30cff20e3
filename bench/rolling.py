"""How long messages wait while three brokers are restarted one after another: ``python -m bench.rolling``,
the same as ``python -m bench --only rolling``."""

from __future__ import annotations

import sys

from bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--only", "rolling", *sys.argv[1:]]))
