"""One broker process, assembled from its parts.

===============  ===============================================================================
``assembly``     topics, and this broker's place among the others, in the order in which they are made
``replication``  what sends to other clusters
``ports``        which services are on which port
``broker``       all of them, started in order and stopped in reverse
``process``      configuration → broker → signals → exit code
===============  ===============================================================================
"""

from sava.server.assembly import client_address, raft_address
from sava.server.broker import Broker
from sava.server.process import EXIT_FAILED, EXIT_OK, EXIT_START, run, serve

__all__ = [
    "EXIT_FAILED",
    "EXIT_OK",
    "EXIT_START",
    "Broker",
    "client_address",
    "raft_address",
    "run",
    "serve",
]
