"""Load: many identical gRPC calls to one server, by h2load where it is installed and by grpc.aio where
not."""

from __future__ import annotations

from typing import Any

import grpc.aio

from bench import h2load
from bench.samples import Sample, closed_loop

WARM_UP_S = 0.3

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
"""What a stream's ``read`` returns at its end; the installed stubs do not know it."""


def client_name() -> str:
    return "h2load" if h2load.is_installed() else "grpc.aio (h2load is not installed)"


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
        if not h2load.is_installed():
            return await self._run_in_process(method, request, in_flight=in_flight, seconds=seconds)
        kind = (method, request, in_flight)
        if kind not in self._rates:
            warm_up = await self._post(kind, 20 * in_flight, least_response)
            await self._post(kind, max(in_flight, int(warm_up.rate * WARM_UP_S)), least_response)
        return await self._post(kind, max(in_flight, int(self._rates[kind] * seconds)), least_response)

    async def _post(self, kind: tuple[str, bytes, int], count: int, least_response: int) -> Sample:
        method, request, in_flight = kind
        sample = await h2load.post(
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
