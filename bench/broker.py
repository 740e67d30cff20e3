"""The broker beside NATS and Redis: ``python -m bench.broker``, the same as
``python -m bench --only broker``."""

from __future__ import annotations

import sys

from bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--only", "broker", *sys.argv[1:]]))
