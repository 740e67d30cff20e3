"""As ``broker_child``, for tests of writers: small frames, so that a small batch needs several of them, and a
leader that does not wait long before it finishes what others have left."""

from __future__ import annotations

from sava.cluster import controller, writer_maintenance
from sava.storage import staging
from tests.cluster import broker_child

if __name__ == "__main__":
    vars(staging)["FRAME_BYTES"] = 4000
    vars(writer_maintenance)["LEFT_MS"] = 1000
    vars(controller)["FULL_PASS_S"] = 1.0
    broker_child.run()
