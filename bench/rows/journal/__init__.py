"""Mirrored journals: what copies cost, and what they are worth.

``copies``    throughput and latency beside the same brokers without copies
``gigabyte``  the owner of a gigabyte that is in no segment is killed
"""

from __future__ import annotations

from bench.rows.journal import copies, gigabyte

PARTS = (copies.run, gigabyte.run)
