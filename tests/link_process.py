"""One link in a process of its own, which can be killed: as a runner has it, but for Spark.

python -m tests.link_process ADMIN SERVICE REMOTE
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path

from sava.pipeline.cluster import ClusterAccess
from sava.pipeline.replicate.background import AdminLinkControl
from sava.pipeline.replicate.job import LinkJob
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]


class LinkProcess:
    def __init__(self, log: Path, admin: str, service: str, remote: str) -> None:
        self._command = [sys.executable, "-m", "tests.link_process", admin, service, remote]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self, *, now: bool = False) -> None:
        """SIGTERM, and it must have been well until then; ``now``: kill -9."""
        assert self._process is not None
        if now:
            self.kill()
            return
        self._process.terminate()
        try:
            assert self._process.wait(PATIENCE_S) == 0, self._log.read_text()[-4000:]
        finally:
            self.kill()


def main() -> None:
    from tests.replicating import ThreadEngine

    admin, service, remote = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    edges = (AdminLinkControl(admin), ThreadEngine(), ClusterAccess(service, timeout_s=5.0))
    job = LinkJob(f"replicate-{remote}", remote, "test", *edges)
    while job.end is None:
        if is_over.wait(0.1):
            job.stop(now=True)
    sys.exit(job.end or 0)


if __name__ == "__main__":
    main()
