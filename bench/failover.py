"""How long producers wait when a node fails, beside Kafka and NATS: ``python -m bench.failover``, the same as
``python -m bench --only failover``. ``--rounds 20 --fault stop,cut --system sava --resume FILE`` choose."""

from __future__ import annotations

import sys

from bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--only", "failover", *sys.argv[1:]]))
