"""What ``format("sava")`` costs in Spark: ``python -m bench.spark``, the same as
``python -m bench --only spark``."""

from __future__ import annotations

import sys

from bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--only", "spark", *sys.argv[1:]]))
