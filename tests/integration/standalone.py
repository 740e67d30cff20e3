"""One standalone broker in a process of its own, for tests of what clients see. It can be killed and started
again on the same ports and data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.ports import free_ports


class Standalone:
    """Nothing here waits for the broker to be ready: clients do, and that is part of what is tested."""

    def __init__(self, directory: Path, **environment: str) -> None:
        client, admin, raft, http = free_ports(4)
        self.port = client
        self.url = f"http://127.0.0.1:{client}"
        self.admin = f"127.0.0.1:{admin}"
        self.log = directory / "log"
        ports = f"--port {client} --admin-port {admin} --raft-port {raft} --http-port {http}"
        self._arguments = ["broker", "--standalone", "--data-dir", str(directory / "data"), *ports.split()]
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def add_arguments(self, *arguments: str) -> None:
        """From the next start on."""
        self._arguments += arguments

    def start(self) -> None:
        with self.log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sava.cli", *self._arguments],
                stderr=stderr,
                env={**os.environ, **self._environment},
            )

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM; the broker must end cleanly."""
        assert self._process is not None
        self._process.terminate()
        try:
            assert self._process.wait(timeout=30) == 0, self.log.read_text()[-4000:]
        finally:
            self.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
        else:
            print(self.log.read_text()[-4000:])
            self.kill()
