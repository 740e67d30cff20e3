"""h2load (nghttp2): a load generator in C that posts one gRPC request over and over, over one HTTP/2
connection.

It is the cheapest client there is, so what is measured is the server. It knows HTTP, not gRPC: a call that
fails with a gRPC status still counts as an HTTP success, so the callers check by other means that the calls
took effect."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from pathlib import Path

from bench.processes import ProcessFailedError
from bench.samples import Sample
from bench.wire import grpc_frame

TIMEOUT_S = 120.0

_FINISHED = re.compile(r"finished in ([\d.]+)(us|ms|s|m),")
_DONE = re.compile(r"requests: .* (\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout")
_DATA = re.compile(r"traffic: .* headers .*, .* \((\d+)\) data")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def is_installed() -> bool:
    return shutil.which("h2load") is not None


async def post(
    address: str, method: str, request: bytes, *, count: int, in_flight: int, least_response: int = 0
) -> Sample:
    """Call ``method`` ``count`` times. Each response must carry ``least_response`` bytes: an error has
    none."""
    with tempfile.TemporaryDirectory(prefix="sava-bench-h2load-") as name:
        folder = Path(name)
        body = _write(folder / "body", grpc_frame(request))
        text = await _run(
            "h2load", f"-n{count}", "-c1", f"-m{in_flight}", f"--data={body}", f"--log-file={folder / 'log'}",
            "-Hcontent-type: application/grpc", "-Hte: trailers", f"http://{address}{method}",
        )  # fmt: skip
        latencies = _latencies(folder / "log")
    finished, done, data = _FINISHED.search(text), _DONE.search(text), _DATA.search(text)
    if not finished or not done or not data or [int(part) for part in done.groups()] != [count, 0, 0, 0]:
        raise ProcessFailedError(f"h2load against {address}{method} did not succeed:\n{text[-2000:]}")
    if int(data[1]) < count * least_response:
        raise ProcessFailedError(
            f"{method}: {data[1]} bytes came back for {count} calls; some of them failed"
        )
    return Sample(count, float(finished[1]) * _UNITS[finished[2]], latencies)


async def _run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode(errors="replace")


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _latencies(log: Path) -> list[float]:
    """One line per request: start in µs, HTTP status, duration in µs."""
    return [int(line.split(b"\t")[2]) / 1e6 for line in log.read_bytes().splitlines()]
