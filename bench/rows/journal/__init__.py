"""Mirrored journals: what copies cost, and what they are worth.

``copies``    throughput and latency beside the same brokers without copies
``killed``    the owner of a topic is killed, and its newest messages are on mirrors only
``gigabyte``  the same with a gigabyte that is in no segment
"""

from __future__ import annotations

from bench.rows.journal import copies, gigabyte, killed

PARTS = (copies.run, killed.run, gigabyte.run)
