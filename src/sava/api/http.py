"""The HTTP port: ``/metrics``, ``/healthz`` and ``/readyz``, answered by a server of a page, since three
GETs need no framework.

``/healthz`` says that the process works; an orchestrator restarts it otherwise. ``/readyz`` says that it can
serve: it belongs to a cluster, knows the leader, has applied what it knows to be committed, and is
registered, so that topics come to it. A broker that waits for ``cluster init`` is healthy and not ready, and
so is one that could not renew its registration: it has let go of its topics. One that ends because something
in it has died says what that was for as long as it is still there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from sava.api.metrics.broker import TYPE, BrokerMetrics
from sava.cluster.registration import Registrar
from sava.cluster.view import ClusterView
from sava.metadata.node import RaftNode
from sava.supervisor import Supervisor
from sava.tasks import cancelled

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 16 << 10
READ_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 30.0
"""A page of many topics has megabytes."""
CAUGHT_UP = 100
"""Entries that may be committed and not yet applied while a node still counts as caught up."""

Readiness = Callable[[], tuple[bool, str]]
Page = Callable[[], Awaitable[tuple[HTTPStatus, str, bytes]]]


def readiness(
    node: RaftNode, view: ClusterView, registrar: Registrar, supervisor: Supervisor
) -> tuple[bool, str]:
    if supervisor.reason:
        return False, f"this broker ends: {supervisor.reason}"
    core = node.core_status
    if core is None:
        return False, "waiting for cluster initialization"
    if core.node not in core.membership.members:
        return False, "not a member of the cluster"
    if not core.leader:
        return False, "no leader known"
    if core.commit - core.applied > CAUGHT_UP:
        return False, f"catching up: applied {core.applied} of {core.commit}"
    if not view.is_ready:
        return False, "learning which topics and brokers there are"
    if registrar.is_leaving:
        return False, "this broker stops, and hands its topics over"
    if not registrar.is_registered:
        return False, "not registered: the other brokers do not know that this one is there"
    return True, "ready"


class HttpServer:
    def __init__(self, metrics: BrokerMetrics, readiness: Readiness) -> None:
        self._metrics = metrics
        self._readiness = readiness
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._pages: dict[str, Page] = {
            "/metrics": self._render,
            "/healthz": self._health,
            "/readyz": self._ready,
        }

    async def start(self, host: str, port: int) -> None:
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST_BYTES)

    async def close(self) -> None:
        """At once: a caller that does not read its answer would keep the broker for half a minute."""
        if self._server is not None:
            self._server.close()
            for writer in tuple(self._serving.values()):
                writer.transport.abort()
            await cancelled(*self._serving)
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = writer
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            # However long this takes: it is this broker that is slow, and who asks has a deadline of his own.
            writer.write(await self._respond(head))
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        except RuntimeError as error:
            # uvloop raises it for a connection that was lost while the page was written.
            log.debug("http: not answered error=%s", error)
        finally:
            del self._serving[task]
            writer.close()

    async def _respond(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or words[0] not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"GET only\n")
        page = self._pages.get(words[1].partition("?")[0])
        if page is None:
            return _response(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")
        try:
            status, kind, body = await page()
        except Exception:
            log.exception("http: a page failed path=%s", words[1])
            return _response(
                HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", b"failed; the broker's log says why\n"
            )
        return _response(status, kind, body)

    async def _render(self) -> tuple[HTTPStatus, str, bytes]:
        return HTTPStatus.OK, TYPE, await self._metrics.page()

    async def _health(self) -> tuple[HTTPStatus, str, bytes]:
        return HTTPStatus.OK, "text/plain", b"ok\n"

    async def _ready(self) -> tuple[HTTPStatus, str, bytes]:
        ready, reason = self._readiness()
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "text/plain", f"{reason}\n".encode()


def _response(status: HTTPStatus, kind: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode("latin-1") + b"Connection: close\r\n\r\n" + body
