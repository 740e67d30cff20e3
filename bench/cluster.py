"""What moving, losing and having many topics costs: ``python -m bench.cluster``, the same as
``python -m bench --only cluster``."""

from __future__ import annotations

import sys

from bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--only", "cluster", *sys.argv[1:]]))
