"""HttpPort: the HTTP port of a broker, served by aiohttp.

    /healthz /readyz   for orchestrators
    /metrics           for Prometheus
    /v1/...            the HTTP API: administration (``routes``) and messages (``messages``)
    /v1/openapi.json   what the API is
    /                  the web console: files that call the API

**A page of another site has no way in.** A browser sends requests for any site that it shows, also to
loopback and into a company's network. Credentials are a header that only our own page sets, never a cookie;
but a broker without authentication takes calls without any. So a request with an ``Origin`` that is not this
port's own is refused, and so is one to a host name that is neither an address nor a name of this broker: a
name of a stranger's domain that leads here (DNS rebinding) would make its page our own.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Final, NamedTuple

from aiohttp import web
from prometheus_client.registry import Collector

from sava.api.http import TYPE, Readiness, written
from sava.api.metrics.broker import Disks
from sava.console.gateway import ApiError, Gateway, failed, json_response
from sava.console.messages import MessagesApi
from sava.console.routes import description
from sava.errors import SavaError
from sava.peers.guard import Guard

log = logging.getLogger(__name__)
_silent = logging.getLogger("sava.console.protocol")
"""What aiohttp says of a caller that does not speak HTTP: the whole of its garbage, at each attempt. What
fails here is logged by ``_guarded``."""
_silent.setLevel(logging.CRITICAL)

STATIC: Final = Path(__file__).parent / "static"
SHUTDOWN_S: Final = 1.0
"""For answers under way when the port closes; a stream of events is cut."""
IDLE_S: Final = 75.0

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_FILES: Final = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LocalPorts(NamedTuple):
    """Where this broker reaches its own gRPC ports: plain, on loopback."""

    admin: str
    client: str


class HttpPort:
    """Owned by the event loop."""

    def __init__(
        self,
        metrics: Collector,
        disks: Disks,
        readiness: Readiness,
        *,
        names: Iterable[str],
        local: LocalPorts,
        metrics_guard: Guard | None = None,
    ) -> None:
        """``names``: under which this broker is reached. ``local``: its own gRPC ports. ``metrics_guard``: of
        the page of metrics, which has names of topics; None: it is open."""
        self._metrics = metrics
        self._disks = disks
        self._readiness = readiness
        self._metrics_guard = metrics_guard
        self._names = frozenset(name.lower() for name in names) | {"localhost"}
        self._gateway = Gateway(local.admin, local.client)
        self._messages = MessagesApi(local.client)
        self._runner = web.AppRunner(
            self._application(),
            handle_signals=False,
            access_log=None,
            logger=_silent,
            shutdown_timeout=SHUTDOWN_S,
            keepalive_timeout=IDLE_S,
            max_line_size=8190,
            max_field_size=32 << 10,
        )

    async def start(self, host: str, port: int) -> None:
        """Raises OSError."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=128).start()

    async def close(self) -> None:
        await self._runner.cleanup()
        await self._messages.close()
        await self._gateway.close()

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._guarded], client_max_size=1 << 20)
        router = application.router
        router.add_get("/healthz", self._health)
        router.add_get("/readyz", self._ready)
        router.add_get("/metrics", self._page_of_metrics)
        router.add_get("/v1/openapi.json", self._openapi)
        self._messages.add_routes(router)
        self._gateway.add_routes(router)
        router.add_get("/", self._console)
        router.add_get("/console/{file:[a-z0-9./-]+}", self._file)
        return application

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path.startswith("/v1/"):
                self._check_site(request)
            response = await handler(request)
        except ApiError as error:
            response = error.response()
        except web.HTTPException as error:
            if error.status < HTTPStatus.BAD_REQUEST:
                raise
            status = HTTPStatus(error.status)
            text = f"{request.method} {request.path[:200]}: {error.reason}"
            response = ApiError(status, status.name.lower(), text).response()
        except ConnectionError:
            raise  # the caller has left
        except Exception:
            log.exception("http: a request failed path=%s", request.path[:200])
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            response = ApiError(status, "internal", "failed; the broker's log says why", "unknown").response()
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _check_site(self, request: web.Request) -> None:
        """Raises ApiError."""
        host = (
            request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdecimal() else request.host
        )
        if not self._is_known(host.strip("[]").lower()):
            raise ApiError(
                HTTPStatus.MISDIRECTED_REQUEST,
                "host_unknown",
                f"{host[:200]} is no name of this broker; use its address, or set broker.advertised_host",
            )
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2].lower() != request.host.lower():
            raise ApiError(HTTPStatus.FORBIDDEN, "origin_refused", "a page of another site made this request")

    def _is_known(self, host: str) -> bool:
        if host in self._names:
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    # -- pages ---------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        is_ready, reason = self._readiness()
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return web.Response(text=f"{reason}\n", status=status)

    async def _page_of_metrics(self, request: web.Request) -> web.Response:
        if self._metrics_guard is not None:
            try:
                await self._metrics_guard.check_metrics(request.headers.get("Authorization", ""))
            except SavaError as error:
                raise failed(error) from error
        await self._disks.look()
        return web.Response(body=await written(self._metrics), headers={"Content-Type": TYPE})

    async def _openapi(self, request: web.Request) -> web.Response:
        return json_response(description())

    async def _console(self, request: web.Request) -> web.StreamResponse:
        return _served("index.html")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        return _served(request.match_info["file"])


def _served(name: str) -> web.StreamResponse:
    path = (STATIC / name).resolve()
    kind = _FILES.get(path.suffix)
    if kind is None or not path.is_relative_to(STATIC) or not path.is_file():
        raise ApiError(HTTPStatus.NOT_FOUND, "not_found", f"there is no {name[:200]}")
    return web.FileResponse(
        path, headers={"Content-Type": f"{kind}; charset=utf-8", "Cache-Control": "no-cache"}
    )
