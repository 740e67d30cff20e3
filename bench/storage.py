"""What storage costs: ``python -m bench.storage``, the same as ``python -m bench --only storage``."""

from __future__ import annotations

import sys

from bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--only", "storage", *sys.argv[1:]]))
