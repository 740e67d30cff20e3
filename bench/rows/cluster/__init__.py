"""Three brokers over one object store: what their clients notice when topics go from one to another.

``moves``     a producer at work while its topic moves again and again
``topics``    a new topic's first message; a broker that gives all its topics away
``many``      ten thousand topics: the controller's look at all of them, and look-ups
"""

from __future__ import annotations

from bench.rows.cluster import many, moves, topics

PARTS = (moves.run, topics.create, topics.drain, many.run)
