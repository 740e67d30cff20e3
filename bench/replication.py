"""How fast topics are copied to another cluster: ``python -m bench.replication``, the same as
``python -m bench --only replication``."""

from __future__ import annotations

import sys

from bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--only", "replication", *sys.argv[1:]]))
