"""The processes that the benchmark starts: all stopped by their own id, whatever happens in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

STOP_TIMEOUT_S = 10.0
QUIET_TIMEOUT_S = 10.0
QUIET_S = 0.2
QUIET_SHARE = 0.1
"""Of one core."""


class ProcessFailedError(Exception):
    """A process of the benchmark ended or did not get ready; the end of its output is in the message."""


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free now. All are held open until the last is drawn, so that none is drawn
    twice."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def filesystem_of(path: Path) -> str:
    """The kind of filesystem that ``path`` is on, as the kernel names it."""
    best, kind = "", "unknown filesystem"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        if path.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, name
    return kind


class Child:
    """One process with its output in a file. Its own session: Ctrl-C reaches the benchmark, which stops it in
    order."""

    def __init__(self, command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        self._command = " ".join(command)
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | (env or {}),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    async def has_ended(self) -> bool:
        return not self.is_running

    def check(self) -> None:
        if not self.is_running:
            tail = self.log.read_text(errors="replace")[-2000:]
            raise ProcessFailedError(f"{self._command} ended with {self._popen.returncode}:\n{tail}")

    def resident_bytes(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise ProcessFailedError(f"process {self.pid} has no resident memory any more")

    def processor_seconds(self) -> float:
        """That all its threads have used so far, in user and kernel mode."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def quiet(self) -> None:
        """Until it uses next to no processor time, or for ``QUIET_TIMEOUT_S``: what a server still does after
        it has answered (compaction, uploads) must not be charged to the next one's account."""
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        used = self.processor_seconds()
        while time.monotonic() < deadline:
            await asyncio.sleep(QUIET_S)
            before, used = used, self.processor_seconds()
            if used - before <= QUIET_SHARE * QUIET_S:
                return

    def kill(self) -> None:
        """SIGKILL, as a machine that dies would; returns once the process is gone."""
        self._popen.kill()
        self._popen.wait()

    def pause(self) -> None:
        """SIGSTOP: its connections stay open, and nothing answers on them."""
        self._popen.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._popen.send_signal(signal.SIGCONT)

    async def stop(self) -> None:
        if not self.is_running:
            return
        self._popen.terminate()
        self.resume()  # a paused process would get the request when it is too late
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._popen.wait, STOP_TIMEOUT_S)
        if self.is_running:
            self._popen.send_signal(signal.SIGKILL)
            self._popen.wait()


async def stop_all(children: Sequence[Child]) -> None:
    """Ask all before waiting for any; a second Ctrl-C while waiting still kills the rest."""
    try:
        await asyncio.gather(*(child.stop() for child in children))
    finally:
        for child in children:
            if child.is_running:
                child.kill()
