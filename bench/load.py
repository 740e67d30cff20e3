"""Load: many identical gRPC calls to one server, by h2load where it is installed and by grpc.aio where
not.

h2load (nghttp2) posts one gRPC request over and over, over one HTTP/2 connection. It is the cheapest client
there is, so what is measured is the server. It knows HTTP, not gRPC: a call that fails with a gRPC status
still counts as an HTTP success, so the callers check by other means that the calls took effect."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import grpc.aio

from bench.processes import ProcessFailedError
from bench.samples import Sample, closed_loop
from bench.wire import grpc_frame

WARM_UP_S = 0.3

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
"""What a stream's ``read`` returns at its end; the installed stubs do not know it."""


TIMEOUT_S = 120.0

_FINISHED = re.compile(r"finished in ([\d.]+)(us|ms|s|m),")
_DONE = re.compile(r"requests: .* (\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout")
_DATA = re.compile(r"traffic: .* headers .*, .* \((\d+)\) data")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


IS_INSTALLED = shutil.which("h2load") is not None


def client_name() -> str:
    return "h2load" if IS_INSTALLED else "grpc.aio (h2load is not installed)"


def channel_to(address: str) -> Any:
    """Reconnects fast: gRPC's own backoff, up to seconds, must not be counted as a server's failover or
    restart."""
    return grpc.aio.insecure_channel(
        address,
        options=[
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 20),
            ("grpc.min_reconnect_backoff_ms", 20),
            ("grpc.max_reconnect_backoff_ms", 50),
        ],
    )


class Load:
    """Load on the server at ``address``. ``issued`` counts all calls ever made here, so that callers can
    compare it with what the server says it did."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._rates: dict[tuple[str, bytes, int], float] = {}
        self.issued = 0

    async def run(
        self, method: str, request: bytes, *, in_flight: int, seconds: float, least_response: int = 0
    ) -> Sample:
        """About ``seconds`` of calls, ``in_flight`` at a time. The first run of its kind warms up first."""
        if not IS_INSTALLED:
            return await self._run_in_process(method, request, in_flight=in_flight, seconds=seconds)
        kind = (method, request, in_flight)
        if kind not in self._rates:
            warm_up = await self._post(kind, 20 * in_flight, least_response)
            await self._post(kind, max(in_flight, int(warm_up.rate * WARM_UP_S)), least_response)
        return await self._post(kind, max(in_flight, int(self._rates[kind] * seconds)), least_response)

    async def _post(self, kind: tuple[str, bytes, int], count: int, least_response: int) -> Sample:
        method, request, in_flight = kind
        sample = await _h2load(
            self._address, method, request, count=count, in_flight=in_flight, least_response=least_response
        )
        self._rates[kind] = sample.rate
        self.issued += count
        return sample

    async def _run_in_process(self, method: str, request: bytes, *, in_flight: int, seconds: float) -> Sample:
        async with channel_to(self._address) as channel:
            call = channel.unary_unary(method)
            await call(request)
            sample = await closed_loop(lambda _: call(request), in_flight=in_flight, seconds=seconds)
        self.issued += sample.count + 1
        return sample


async def _h2load(
    address: str, method: str, request: bytes, *, count: int, in_flight: int, least_response: int = 0
) -> Sample:
    """Call ``method`` ``count`` times. Each response must carry ``least_response`` bytes: an error has
    none."""
    with tempfile.TemporaryDirectory(prefix="sava-bench-h2load-") as name:
        folder = Path(name)
        body = folder / "body"
        body.write_bytes(grpc_frame(request))
        text = await _run(
            "h2load", f"-n{count}", "-c1", f"-m{in_flight}", f"--data={body}", f"--log-file={folder / 'log'}",
            "-Hcontent-type: application/grpc", "-Hte: trailers", f"http://{address}{method}",
        )  # fmt: skip
        # One line per request: start in µs, HTTP status, duration in µs.
        latencies = [int(line.split(b"\t")[2]) / 1e6 for line in (folder / "log").read_bytes().splitlines()]
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
